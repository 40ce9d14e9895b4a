"""Findings: what a check saw. A report is all findings of one scan or one validation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from registry_service.domain.text import bounded


class Severity(StrEnum):
    """What a finding does to the artifact: end it, need a person, or only inform."""

    REFUSE = "refuse"
    REVIEW = "review"
    INFO = "info"


class Check(StrEnum):
    """The numbered admission checks; the numbers are those of the design."""

    FILE_SET = "1"
    HEADER = "2"
    PEFT_CONFIG = "3"
    DECLARATION = "4"
    STRUCTURE = "5"
    PROVENANCE = "6"
    BILL_OF_MATERIALS = "7"
    TENANT_LIMITS = "8"
    BYTES = "9"
    VALUES = "10"
    LOAD = "11"
    EFFECT = "12"
    MIXED_BATCH = "13"
    RESIDENT_BYTES = "14"
    LOAD_TIME = "15"

    @property
    def number(self) -> int:
        return int(self.value)


# What a worker has to have run before an artifact may pass.
WORKER_CHECKS: Final = (9, 10, 11, 12, 13, 14, 15)


class Code(StrEnum):
    """Stable finding codes. Adding one is a feature; renaming one breaks pipelines."""

    # 1 file set
    FILE_NAME_FORBIDDEN = "FILE_NAME_FORBIDDEN"
    FILE_MISSING = "FILE_MISSING"
    FILE_EMPTY = "FILE_EMPTY"
    FILE_TOO_LARGE = "FILE_TOO_LARGE"
    FILE_IS_LINK = "FILE_IS_LINK"
    FILE_TOO_MANY = "FILE_TOO_MANY"
    CONTENT_PICKLE = "CONTENT_PICKLE"
    CONTENT_ARCHIVE = "CONTENT_ARCHIVE"
    CONTENT_LFS_POINTER = "CONTENT_LFS_POINTER"
    CONTENT_SCRIPT = "CONTENT_SCRIPT"
    CONTENT_UNKNOWN = "CONTENT_UNKNOWN"
    # 2 header
    HEADER_MALFORMED = "HEADER_MALFORMED"
    HEADER_TOO_LARGE = "HEADER_TOO_LARGE"
    HEADER_DISAGREES = "HEADER_DISAGREES"
    TENSOR_DUPLICATE = "TENSOR_DUPLICATE"
    TENSOR_NAME = "TENSOR_NAME"
    TENSOR_DTYPE = "TENSOR_DTYPE"
    TENSOR_LAYOUT = "TENSOR_LAYOUT"
    TENSOR_COUNT = "TENSOR_COUNT"
    # 3 PEFT config
    CONFIG_MALFORMED = "CONFIG_MALFORMED"
    CONFIG_FIELD_UNKNOWN = "CONFIG_FIELD_UNKNOWN"
    CONFIG_FIELD_FORBIDDEN = "CONFIG_FIELD_FORBIDDEN"
    CONFIG_OPTION_UNSUPPORTED = "CONFIG_OPTION_UNSUPPORTED"
    CONFIG_VALUE = "CONFIG_VALUE"
    PEFT_TYPE_UNSUPPORTED = "PEFT_TYPE_UNSUPPORTED"
    # 4 declaration
    DECLARATION_MALFORMED = "DECLARATION_MALFORMED"
    DECLARATION_MISMATCH = "DECLARATION_MISMATCH"
    TOKENIZER_DIFFERS = "TOKENIZER_DIFFERS"
    TEMPLATE_DIFFERS = "TEMPLATE_DIFFERS"
    # 5 structure: one known deviation of many keys or shapes
    KEY_PREFIX_MISSING = "KEY_PREFIX_MISSING"
    KEY_PREFIX_DOUBLED = "KEY_PREFIX_DOUBLED"
    KEY_COMPILED = "KEY_COMPILED"
    KEY_DEFAULT_NAME = "KEY_DEFAULT_NAME"
    KEY_OTHER_ADAPTER = "KEY_OTHER_ADAPTER"
    KEY_KOHYA = "KEY_KOHYA"
    KEY_MLX = "KEY_MLX"
    KEY_PER_EXPERT = "KEY_PER_EXPERT"
    KEY_MULTIMODAL_OLD = "KEY_MULTIMODAL_OLD"
    KEY_TEXT_CLASS = "KEY_TEXT_CLASS"
    KEY_MULTIMODAL_CLASS = "KEY_MULTIMODAL_CLASS"
    KEY_OTHER_CLASS = "KEY_OTHER_CLASS"
    TENSORS_EMPTY = "TENSORS_EMPTY"
    VOCABULARY_RESIZED = "VOCABULARY_RESIZED"
    OTHER_WIDTH = "OTHER_WIDTH"
    OTHER_DEPTH = "OTHER_DEPTH"
    OTHER_DTYPE = "OTHER_DTYPE"
    HEAD_LOST = "HEAD_LOST"
    # 5 structure: single tensors and targets
    UNEXPECTED_TENSOR = "UNEXPECTED_TENSOR"
    MISSING_TENSOR = "MISSING_TENSOR"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    RANK_MISMATCH = "RANK_MISMATCH"
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    BASE_TENSOR = "BASE_TENSOR"
    ADAPTER_NAME_IN_KEY = "ADAPTER_NAME_IN_KEY"
    TARGETS_MISSING = "TARGETS_MISSING"
    TARGET_UNKNOWN = "TARGET_UNKNOWN"
    TARGET_KIND = "TARGET_KIND"
    PATTERN_UNUSED = "PATTERN_UNUSED"
    EXPRESSION_REFUSED = "EXPRESSION_REFUSED"
    FULL_TENSOR = "FULL_TENSOR"
    SCALING_HIGH = "SCALING_HIGH"
    SCALING_CHANGED = "SCALING_CHANGED"
    MODULES_VARIED = "MODULES_VARIED"
    BASE_UNKNOWN = "BASE_UNKNOWN"
    # 8 tenant limits
    TENANT_LIMIT = "TENANT_LIMIT"
    # 9 to 15, on the worker
    BYTES_DIFFER = "BYTES_DIFFER"
    BASE_DIFFERS = "BASE_DIFFERS"
    QUANTIZATION_DIFFERS = "QUANTIZATION_DIFFERS"
    VALUE_NOT_FINITE = "VALUE_NOT_FINITE"
    SPECTRUM = "SPECTRUM"
    LOAD_FAILED = "LOAD_FAILED"
    LOAD_MISSING_KEYS = "LOAD_MISSING_KEYS"
    LOAD_UNEXPECTED_KEYS = "LOAD_UNEXPECTED_KEYS"
    BASE_CHANGED = "BASE_CHANGED"
    OTHER_ADAPTER_CHANGED = "OTHER_ADAPTER_CHANGED"
    NO_EFFECT = "NO_EFFECT"
    OFF_DIFFERS = "OFF_DIFFERS"
    MIXED_BATCH_DIFFERS = "MIXED_BATCH_DIFFERS"
    MIXED_BATCH_UNSUPPORTED = "MIXED_BATCH_UNSUPPORTED"
    RESIDENT_BYTES = "RESIDENT_BYTES"
    LOAD_TIME = "LOAD_TIME"
    NO_SANDBOX = "NO_SANDBOX"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check saw. All text is bounded and escaped when it is made."""

    check: int
    code: Code
    where: str
    expected: str
    got: str
    severity: Severity

    def to_json(self) -> dict[str, Any]:
        """The wire form, as in reports and ``adapterctl check --json``."""
        return asdict(self)


def refuse(check: Check, code: Code, where: str, expected: str, got: str) -> Finding:
    """A finding that ends the artifact."""
    return _finding(check, code, where, expected, got, Severity.REFUSE)


def review(check: Check, code: Code, where: str, expected: str, got: str) -> Finding:
    """A finding that a person has to look at."""
    return _finding(check, code, where, expected, got, Severity.REVIEW)


def info(check: Check, code: Code, where: str, expected: str, got: str) -> Finding:
    """A finding that only informs."""
    return _finding(check, code, where, expected, got, Severity.INFO)


def refused(findings: tuple[Finding, ...] | list[Finding]) -> bool:
    """True when at least one finding refuses."""
    return any(f.severity == Severity.REFUSE for f in findings)


def _finding(
    check: Check, code: Code, where: str, expected: str, got: str, severity: Severity
) -> Finding:
    return Finding(
        check.number, code, bounded(where, 600), bounded(expected, 400), bounded(got, 400), severity
    )
