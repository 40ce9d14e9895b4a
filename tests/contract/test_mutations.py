"""Single changes of adapters that PEFT saved: each is refused, flagged or passed as it has to be.

One saved adapter for every supported option, at least 40 kinds of change on each. Survivors, kinds
that had to be refused and were not, are printed; there are none.
"""

from __future__ import annotations

import collections
import json
import warnings
from pathlib import Path
from typing import Any, Final

import peft
import pytest
import torch
from architectures import ARCHITECTURES, meta_model
from mutant_kinds import PASSED, REFUSED, REVIEWED, UNSEEN
from mutants import Adapter, applied
from peft_oracle import here
from safetensors import safe_open

from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.findings import Severity, refused

pytestmark = pytest.mark.torch

BASE = Digest("sha256:" + "b" * 64)
ATTENTION = ["q_proj", "v_proj"]
OPTIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": ("llama", {"target_modules": ATTENTION}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "expression": ("llama", {"target_modules": r".*\.(q|v)_proj"}),
    "rslora": ("llama", {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": ("llama", {"target_modules": ATTENTION, "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ATTENTION, "lora_bias": True}),
    "rank_pattern": ("llama", {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2}}),
    "alpha_pattern": ("llama", {"target_modules": ATTENTION, "alpha_pattern": {".*v_proj": 20}}),
    "layers": (
        "llama",
        {
            "target_modules": ATTENTION,
            "layers_to_transform": [0, 1],
            "layers_pattern": ["layers"],
        },
    ),
    "exclude_modules": (
        "llama",
        {"target_modules": ATTENTION, "exclude_modules": ["1.self_attn.q_proj"]},
    ),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_fc"]}),
    "Embedding": ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    "Conv2d": ("gemma3", {"target_modules": ["patch_embedding", "fc1"]}),
    "fused qkv": ("phi3", {"target_modules": ["qkv_proj", "o_proj"]}),
    "target_parameters": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["down_proj", "gate_up_proj"]},
    ),
    "trainable_token_indices": (
        "llama",
        {"target_modules": ATTENTION, "trainable_token_indices": [1, 5, 9]},
    ),
    "modules_to_save": ("llama", {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "base copies": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "classifier": ("bert_classifier", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
}
LEAST_KINDS: Final = 40


def saved(name: str, folder: Path) -> Adapter:
    """An adapter as PEFT itself saves it, on a tiny model with weights."""
    architecture, options = OPTIONS[name]
    model = meta_model(ARCHITECTURES[architecture])
    torch.manual_seed(0)
    fields = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed: Any = peft.get_peft_model(
            type(model)(model.config), peft.LoraConfig(**{**fields, **options})
        )
        placed.save_pretrained(folder)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        tensors = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    config = json.loads((folder / "adapter_config.json").read_bytes())
    return Adapter(
        tensors=tensors,
        config=config,
        catalog=catalog_build(ARCHITECTURES[architecture], BASE),
        others=_others(architecture),
        full_tensors=True,
    )


def _others(architecture: str) -> dict[str, Catalog]:
    """The same architecture in another width and depth, and another architecture."""
    config = ARCHITECTURES[architecture]
    foreign = {"foreign": catalog_build(ARCHITECTURES["gpt_neox"], BASE)}
    if architecture == "gemma3":
        # Only the vision tower carries the adapter of this test.
        return foreign
    width = next(key for key in ("hidden_size", "n_embd") if key in config)
    depth = next(key for key in ("num_hidden_layers", "n_layer") if key in config)

    def built(**changes: int) -> Catalog:
        return catalog_build({**config, **changes}, BASE)

    return {
        **foreign,
        "wider": built(**{width: 64}),
        "deeper": built(**{depth: 5}),
        "shallower": built(**{depth: 1}),
    }


@pytest.fixture(scope="module", params=OPTIONS)
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return saved(request.param, tmp_path_factory.mktemp("saved"))


def test_what_peft_saved_passes(adapter: Adapter) -> None:
    assert adapter.check(here) == ()


def test_what_has_to_be_refused_is_refused_for_the_right_reason(adapter: Adapter) -> None:
    survivors, others, kinds = [], [], 0
    for kind, changed in applied(REFUSED, adapter):
        findings = changed.check(here)
        kinds += 1
        if not refused(findings):
            survivors.append(kind.name)
        elif not kind.codes & {finding.code.value for finding in findings}:
            others.append((kind.name, collections.Counter(f.code.value for f in findings)))
    print(f"{kinds} kinds, survivors: {survivors or 'none'}")
    assert survivors == []
    assert others == []
    assert kinds >= LEAST_KINDS


def test_what_needs_a_person_is_flagged(adapter: Adapter) -> None:
    for kind, changed in applied(REVIEWED, adapter):
        findings = changed.check(here)
        assert {f.severity for f in findings} == {Severity.REVIEW}, kind.name
        assert kind.codes == {finding.code.value for finding in findings}, kind.name


def test_what_means_the_same_passes(adapter: Adapter) -> None:
    kinds = 0
    for kind, changed in applied(PASSED, adapter):
        kinds += 1
        assert changed.check(here) == (), kind.name
    assert kinds >= 4


def test_what_no_static_check_sees_has_another_digest(adapter: Adapter) -> None:
    """Values, rslora and row numbers: signature, digest and the dynamic checks are for these."""
    before = {path: digest_of(content) for path, content in adapter.files().items()}
    for kind, changed in applied(UNSEEN, adapter):
        assert not refused(changed.check(here)), kind.name
        after = {path: digest_of(content) for path, content in changed.files().items()}
        assert after != before, kind.name
