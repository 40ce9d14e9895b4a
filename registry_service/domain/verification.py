"""The static checks in the design's order: 1 files, 2 header, 3 config, 4 declaration,
5 structure, 8 limits. Pure: bytes and values in, findings out; tensor data is never read.

A check that cannot run, because what it reads failed an earlier one, adds nothing: the earlier
finding refuses already. Nothing here passes an adapter on a part that was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from registry_service.domain import file_set, limits
from registry_service.domain.base_model import (
    chat_template_digest,
    chat_template_of,
    tokenizer_digest,
)
from registry_service.domain.catalog import Catalog
from registry_service.domain.declaration import Declaration, declaration_parse
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError
from registry_service.domain.expected_tensors import (
    ExpectedTensors,
    expected_tensors,
    scaling_check,
)
from registry_service.domain.expressions import Matcher, Matches, matches_of
from registry_service.domain.file_set import FileFact, file_set_check
from registry_service.domain.findings import Check, Code, Finding, refuse, refused, review
from registry_service.domain.manifest import (
    CONFIG_PATH,
    DECLARATION_PATH,
    REQUIRED_PATHS,
    TOKENIZER_PATHS,
    WEIGHT_PATH,
)
from registry_service.domain.peft_config import LoraConfig, peft_config_parse
from registry_service.domain.report import ModuleGroup, modules_group, variety_check
from registry_service.domain.safetensors_header import Header, header_parse
from registry_service.domain.structure import structure_check
from registry_service.domain.tokenizer_files import ARGUMENT_PATHS, tokenizer_file_check

TEMPLATE_PATHS: Final = file_set.TEMPLATE_PATHS
WHOLE_PATHS: Final = file_set.WHOLE_PATHS
_REPORT_PATH: Final = "evaluation-report.json"
_TOKENIZER_FILES: Final = TOKENIZER_PATHS - {"chat_template.jinja"}

# Says how another reader of the file disagrees with ours, if it does: (prefix, size, header).
LibraryCheck = Callable[[bytes, int, Header], Finding | None]


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """Digests of the base's tokenizer and chat template; None when they are not known here."""

    tokenizer_digest: str | None
    chat_template_digest: str | None


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """Digests of what the adapter brings along; None for what it does not bring.

    ``template_fault`` says why its chat template cannot be read; ``tokenizer_findings`` are those
    about the tokenizer files in ``tokenizer_read``.
    """

    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    evaluation_report_digest: str | None = None
    template_fault: str | None = None
    tokenizer_read: frozenset[str] = frozenset()
    tokenizer_findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """All that the static checks look at. ``weight_size`` is in bytes.

    ``full_tensors`` is the tenant's policy on whole modules in an adapter.
    """

    files: tuple[FileFact, ...]
    header_prefix: bytes | None
    weight_size: int
    config: bytes | None
    declaration: bytes | None
    catalog: Catalog
    base: BaseFacts
    own: OwnFacts | None = None
    declaration_required: bool = True
    full_tensors: bool = False
    max_rank: int = limits.RANK
    max_weight_bytes: int = limits.WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class StaticReport:
    """What the checks found, and what the config says the adapter changes: rank and scaling.

    ``modules`` is empty where that cannot be told.
    """

    findings: tuple[Finding, ...]
    modules: tuple[ModuleGroup, ...]


def own_facts(digests: Mapping[str, Digest], whole: Mapping[str, bytes]) -> OwnFacts:
    """The facts about an adapter's own tokenizer, template and report.

    ``digests`` are those of all its files, ``whole`` the bytes of its ``WHOLE_PATHS``.
    """
    brings = digests.keys() & _TOKENIZER_FILES
    arguments = whole.keys() & ARGUMENT_PATHS
    template, fault = None, None
    try:
        if whole.keys() & TEMPLATE_PATHS:
            template = chat_template_digest(chat_template_of(whole))
    except MalformedError as error:
        fault = error.message
    return OwnFacts(
        tokenizer_digest=tokenizer_digest(digests) if brings else None,
        chat_template_digest=template,
        evaluation_report_digest=digests.get(_REPORT_PATH),
        template_fault=fault,
        tokenizer_read=frozenset(arguments),
        tokenizer_findings=tuple(
            finding
            for path in sorted(arguments)
            for finding in tokenizer_file_check(path, whole[path])
        ),
    )


def static_check(
    inputs: StaticInputs,
    library: LibraryCheck | None = None,
    matcher: Matcher | None = None,
) -> StaticReport:
    """Checks 1 to 5 and 8 on one adapter. Without a ``matcher`` an expression is refused.

    Raises:
        UnavailableError: a fault of the matcher's machine.
    """
    required = REQUIRED_PATHS
    if not inputs.declaration_required:
        required -= {DECLARATION_PATH}
    # 1. The file set.
    findings = [*file_set_check(inputs.files, required), *_tokenizer(inputs)]
    # 2. The safetensors header, by our reader and then by the library's.
    header, header_findings = _header(inputs, library)
    findings += header_findings
    # 3. The PEFT config.
    config, config_findings = _config(inputs)
    findings += config_findings
    # 4. The declaration agrees with config, base and files.
    findings += _declaration(inputs, config)
    # 5. The header's keys are the expected keys.
    modules: tuple[ModuleGroup, ...] = ()
    if header is not None and config is not None:
        expected, expression_findings = _tensors_expected(inputs, config, matcher)
        findings += expression_findings
        if expected is not None:
            findings += structure_check(header, expected, inputs.catalog)
            findings += scaling_check(expected)
            modules = modules_group(expected)
            findings += variety_check(modules)
    # 8. The tenant's limits.
    findings += _limits(inputs, config)
    return StaticReport(tuple(findings), modules)


def verdict_of(findings: Sequence[Finding]) -> Literal["pass", "refuse"]:
    """``refuse`` when at least one finding refuses."""
    return "refuse" if refused(tuple(findings)) else "pass"


def _tokenizer(inputs: StaticInputs) -> list[Finding]:
    own = inputs.own or OwnFacts()
    paths = {file.path for file in inputs.files} & ARGUMENT_PATHS
    unread = [
        refuse(Check.FILE_SET, Code.CONTENT_UNKNOWN, path, "a file that can be read", "not read")
        for path in sorted(paths - own.tokenizer_read)
    ]
    return [*own.tokenizer_findings, *unread]


def _header(
    inputs: StaticInputs, library: LibraryCheck | None
) -> tuple[Header | None, list[Finding]]:
    if inputs.header_prefix is None:
        return None, [_missing(Check.HEADER, WEIGHT_PATH)]
    header, findings = header_parse(inputs.header_prefix, inputs.weight_size)
    if header is None or findings or library is None:
        return header, list(findings)
    difference = library(inputs.header_prefix, inputs.weight_size, header)
    return header, [] if difference is None else [difference]


def _config(inputs: StaticInputs) -> tuple[LoraConfig | None, list[Finding]]:
    if inputs.config is None:
        return None, [_missing(Check.PEFT_CONFIG, CONFIG_PATH)]
    config, findings = peft_config_parse(inputs.config)
    return config, list(findings)


def _tensors_expected(
    inputs: StaticInputs, config: LoraConfig, matcher: Matcher | None
) -> tuple[ExpectedTensors | None, list[Finding]]:
    try:
        matches = matches_of(inputs.catalog, config, matcher or _no_matcher)
    except MalformedError as error:
        expected = "expressions that compile and end within their bound"
        return None, [
            refuse(Check.STRUCTURE, Code.EXPRESSION_REFUSED, CONFIG_PATH, expected, error.message)
        ]
    expected_set = expected_tensors(
        inputs.catalog, config, matches, full_tensors=inputs.full_tensors
    )
    return expected_set, []


def _no_matcher(expressions: Sequence[str], names: Sequence[str]) -> Matches:
    raise MalformedError("no expressions are matched here; write the module names out as a list")


def _declaration(inputs: StaticInputs, config: LoraConfig | None) -> list[Finding]:
    if inputs.declaration is None:
        needed = inputs.declaration_required
        return [_missing(Check.DECLARATION, DECLARATION_PATH)] if needed else []
    try:
        declaration = declaration_parse(inputs.declaration)
    except MalformedError as error:
        return [
            refuse(
                Check.DECLARATION,
                Code.DECLARATION_MALFORMED,
                DECLARATION_PATH,
                "a declaration of version 1",
                error.message,
            )
        ]
    return [
        *_against_config(declaration, config),
        *_mismatch("baseModelDigest", inputs.catalog.base_digest, declaration.base_model_digest),
        *_against_quantization(declaration, inputs.catalog),
        *_against_files(declaration, inputs),
    ]


def _against_config(declaration: Declaration, config: LoraConfig | None) -> list[Finding]:
    if config is None:
        return []
    return [
        *_mismatch("peftType", config.peft_type, declaration.peft_type),
        *_mismatch("rank", config.r, declaration.rank),
        *_mismatch("alpha", config.lora_alpha, declaration.alpha),
        *_mismatch("targetModules", config.declared_targets, declaration.target_modules),
    ]


def _against_quantization(declaration: Declaration, catalog: Catalog) -> list[Finding]:
    """Trained on differently rounded weights: allowed, and a person has to look at it."""
    trained = declaration.base_quantization
    if trained == catalog.quantization:
        return []
    where = f"{DECLARATION_PATH}: baseQuantization"
    expected = f"the base's {catalog.quantization}"
    return [review(Check.DECLARATION, Code.QUANTIZATION_DIFFERS, where, expected, trained)]


def _against_files(declaration: Declaration, inputs: StaticInputs) -> list[Finding]:
    own, base = inputs.own or OwnFacts(), inputs.base
    paths = {file.path for file in inputs.files}
    tokenizer, template = declaration.tokenizer_digest, declaration.chat_template_digest
    findings = []
    if paths & TEMPLATE_PATHS and own.chat_template_digest is None:
        # Falling back to the base's would let a template in that nobody has looked at.
        fault = own.template_fault or "not read"
        findings += _mismatch("chatTemplateDigest", "a readable chat template", fault)
    if paths & _TOKENIZER_FILES and own.tokenizer_digest is None:
        findings += _mismatch("tokenizerDigest", "the digest of the adapter's own", "not computed")
    findings += _expected(
        "tokenizerDigest", own.tokenizer_digest or base.tokenizer_digest, tokenizer
    )
    findings += _expected(
        "chatTemplateDigest", own.chat_template_digest or base.chat_template_digest, template
    )
    report = declaration.evaluation_report_digest
    if own.evaluation_report_digest is not None or _REPORT_PATH in paths:
        findings += _mismatch("evaluationReportDigest", own.evaluation_report_digest, report)
    findings += _differs(Code.TOKENIZER_DIFFERS, base.tokenizer_digest, own.tokenizer_digest)
    findings += _differs(Code.TEMPLATE_DIFFERS, base.chat_template_digest, own.chat_template_digest)
    return findings


def _differs(code: Code, base: str | None, own: str | None) -> list[Finding]:
    """A tokenizer or template of its own is allowed, and a person has to look at it."""
    if own is None or own == base:
        return []
    return [review(Check.DECLARATION, code, DECLARATION_PATH, f"the base's {base}", own)]


def _expected(field: str, expected: object, declared: object) -> list[Finding]:
    return [] if expected is None else _mismatch(field, expected, declared)


def _mismatch(field: str, expected: object, declared: object) -> list[Finding]:
    if expected == declared:
        return []
    return [
        refuse(
            Check.DECLARATION,
            Code.DECLARATION_MISMATCH,
            f"{DECLARATION_PATH}: {field}",
            _text(expected),
            _text(declared),
        )
    ]


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _limits(inputs: StaticInputs, config: LoraConfig | None) -> list[Finding]:
    findings = []
    if inputs.weight_size > inputs.max_weight_bytes:
        findings.append(
            _over(WEIGHT_PATH, f"{inputs.max_weight_bytes} bytes", f"{inputs.weight_size} bytes")
        )
    if config is not None:
        rank = max([config.r, *(rank for _, rank in config.rank_pattern)])
        if rank > inputs.max_rank:
            findings.append(_over(f"{CONFIG_PATH}: r", f"rank {inputs.max_rank}", f"rank {rank}"))
    return findings


def _over(where: str, limit: str, got: str) -> Finding:
    return refuse(Check.TENANT_LIMITS, Code.TENANT_LIMIT, where, f"at most {limit}", got)


def _missing(check: Check, path: str) -> Finding:
    return refuse(check, Code.FILE_MISSING, path, "this file", "none")
