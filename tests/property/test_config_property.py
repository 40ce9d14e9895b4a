"""The config reader on made-up and on spoiled documents: a config or findings, never more."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import sample_adapter as sample
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.findings import refused
from registry_service.domain.peft_config import LoraConfig, peft_config_parse
from registry_service.domain.peft_fields import (
    DEFAULT_FIELDS,
    FORBIDDEN_FIELDS,
    HARMLESS_FIELDS,
    SERVED_FIELDS,
)

STEADY = settings(derandomize=True, deadline=None, max_examples=200)
MEMORY = settings(derandomize=True, deadline=None, max_examples=80)
FIELDS = sorted({*SERVED_FIELDS, *HARMLESS_FIELDS, *DEFAULT_FIELDS, *FORBIDDEN_FIELDS, "surprise"})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.integers(),
    st.floats(),
    st.sampled_from(["LORA", "q_proj", "all-linear", "CAUSAL_LM", "none", "0.21.2", ".*", ""]),
    st.text(max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def judged(content: bytes) -> LoraConfig | None:
    config, findings = peft_config_parse(content)
    assert (config is None) == bool(findings)
    assert not findings or refused(findings)
    assert all(f.where.isascii() and f.got.isascii() for f in findings)
    assert all(len(f.where) <= 600 and len(f.got) <= 400 for f in findings)
    return config


@STEADY
@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer(content: bytes) -> None:
    assert judged(content) is None


@STEADY
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
def test_any_values_of_known_fields_get_an_answer(changes: dict[str, Any]) -> None:
    judged(json.dumps({**sample.config(), **changes}).encode("utf-8", "surrogatepass"))


@STEADY
@given(st.data())
def test_a_config_with_spoiled_bytes_gets_an_answer(data: st.DataObject) -> None:
    content = bytearray(json.dumps(sample.config()).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    judged(bytes(content))


@STEADY
@given(st.sampled_from(sorted(SERVED_FIELDS)), VALUES)
def test_what_passes_says_what_the_document_says(name: str, value: Any) -> None:
    # Nothing is coerced: a number in the config is that number in the document.
    config = judged(json.dumps({**sample.config(), name: value}).encode())
    if config is not None and name in ("r", "lora_alpha", "use_dora", "use_rslora", "lora_bias"):
        assert getattr(config, name) == value
        assert isinstance(value, bool) == isinstance(getattr(config, name), bool)


@STEADY
@given(VALUES)
def test_the_strict_parser_reads_what_the_standard_parser_reads_or_refuses(value: Any) -> None:
    content = json.dumps(value).encode()
    try:
        read = json_parse(content, what="x", limit=100_000)
    except MalformedError:
        return
    assert read == json.loads(content)


@MEMORY
@given(st.one_of(st.binary(max_size=4_000), st.text(max_size=1_000).map(str.encode), VALUES))
def test_memory_is_bounded_by_the_document(value: Any) -> None:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    tracemalloc.start()
    try:
        peft_config_parse(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (512 << 10) + 200 * len(content)
