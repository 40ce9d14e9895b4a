"""Whatever config passes, PEFT reads too, and reads as saying the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig

from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.peft_fields import (
    DEFAULT_FIELDS,
    FORBIDDEN_FIELDS,
    HARMLESS_FIELDS,
    SERVED_FIELDS,
    Expression,
)

pytestmark = pytest.mark.torch

STEADY = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    # The folder is written anew by each example.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NAMES = st.sampled_from(
    ["q_proj", "v_proj", "self_attn.q_proj", "0.mlp", "lm_head", "embed_tokens"]
)
LISTS = st.lists(NAMES, min_size=1, max_size=4, unique=True)
NUMBERS = st.one_of(st.integers(-1, 64), st.floats(0.1, 64), st.booleans(), st.just("8"))
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "r": NUMBERS,
    "lora_alpha": NUMBERS,
    "target_modules": LISTS | st.sampled_from(["all-linear", ".*_proj", "ALL-LINEAR", "", None]),
    "exclude_modules": LISTS | st.sampled_from([None, [], ".*mlp.*", ""]),
    "rank_pattern": st.dictionaries(NAMES, NUMBERS, max_size=2) | st.none(),
    "alpha_pattern": st.dictionaries(NAMES, NUMBERS, max_size=2),
    "use_rslora": st.booleans(),
    "use_dora": st.booleans(),
    "lora_bias": st.booleans(),
    "layers_to_transform": st.one_of(st.none(), st.integers(-1, 9), st.lists(st.integers(0, 9))),
    "layers_pattern": st.sampled_from([None, "layers", ["h", "layers"], "", []]),
    "target_parameters": st.sampled_from([None, [], ["mlp.experts.gate_up_proj"]]),
    "trainable_token_indices": st.sampled_from([None, [1, 2], {"embed_tokens": [3]}]),
    "modules_to_save": st.sampled_from([None, [], ["classifier"]]),
    "task_type": st.sampled_from([None, "CAUSAL_LM", "SEQ_CLS", "causal_lm"]),
    "init_lora_weights": st.sampled_from([True, False, "gaussian", "pissa", "eva"]),
    "lora_dropout": NUMBERS,
    "bias": st.sampled_from(["none", "all", "lora_only", None]),
    "peft_version": st.sampled_from([None, "0.18.0", "0.21.2", "x y"]),
}
FIXED = {**DEFAULT_FIELDS, **FORBIDDEN_FIELDS}
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        **USUAL,
        **{name: st.sampled_from([*values, "x"]) for name, values in FIXED.items() if values},
    },
)


def document(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **changes}


def pefts(folder: Path, content: bytes) -> LoraConfig:
    (folder / "adapter_config.json").write_bytes(content)
    with warnings.catch_warnings():
        # It warns where fields have no effect together; what counts is what it reads.
        warnings.simplefilter("ignore")
        config = PeftConfig.from_pretrained(str(folder))
    assert isinstance(config, LoraConfig)
    return config


def plain(value: Any) -> Any:
    """The form in which PEFT keeps what we keep."""
    if isinstance(value, Expression):
        return value.text
    return set(value) if isinstance(value, tuple) else value


@STEADY
@given(CHANGES)
def test_what_passes_peft_reads_as_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    content = json.dumps(document(**changes)).encode()
    ours, findings = peft_config_parse(content)
    assert (ours is None) == bool(findings)
    if ours is None:
        return
    theirs = pefts(tmp_path, content)
    assert (theirs.r, theirs.lora_alpha) == (ours.r, ours.lora_alpha)
    assert theirs.target_modules == plain(ours.target_modules)
    assert (theirs.exclude_modules or set()) == plain(ours.exclude_modules)
    assert list((theirs.rank_pattern or {}).items()) == [
        (plain(key), rank) for key, rank in ours.rank_pattern
    ]
    assert list((theirs.alpha_pattern or {}).items()) == [
        (plain(key), alpha) for key, alpha in ours.alpha_pattern
    ]
    for name in ("use_rslora", "use_dora", "lora_bias", "task_type"):
        assert getattr(theirs, name) == getattr(ours, name), name


def test_enough_of_them_pass() -> None:
    # Were they all refused, the test above could not fail.
    passed = 0

    @STEADY
    @given(CHANGES)
    def count(changes: dict[str, Any]) -> None:
        nonlocal passed
        passed += peft_config_parse(json.dumps(document(**changes)).encode())[0] is not None

    count()
    assert passed >= 10, passed


def test_every_field_that_peft_writes_has_a_rule(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    content = (tmp_path / "adapter_config.json").read_bytes()
    known = {*SERVED_FIELDS, *HARMLESS_FIELDS, *DEFAULT_FIELDS, *FORBIDDEN_FIELDS}
    assert {*json.loads(content)} <= known
    assert peft_config_parse(content)[1] == ()
