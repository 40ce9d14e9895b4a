"""The 46 configs that people published: each has a reason for refusal or a result on its own base.

They lie outside of the repository: ``REGISTRY_TEST_DATA``, by default ``../shared/data``. Bases are
tiny ones of the same architecture, since names depend on architecture and depth only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from architectures import ARCHITECTURES, meta_model
from peft_oracle import equal, ours, pefts

from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RefusedError

pytestmark = pytest.mark.torch

DATA = Path(os.environ.get("REGISTRY_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
FOLDER = DATA / "adapter-configs"
BASE = Digest("sha256:" + "b" * 64)

_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_EYE: Final[dict[str, Any]] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
}
_ROPE: Final = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
MORE: Final[Mapping[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": {"rope_parameters": _ROPE, **_SMALL},
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"rope_parameters": _ROPE, **_SMALL},
        "vision_config": _EYE,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"head_dim": 8, **_SMALL},
        "vision_config": {**_EYE, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            **_SMALL,
        },
        "vision_config": _EYE,
    },
    "phi": {"model_type": "phi", **_SMALL},
    "nemotron_h": {
        "model_type": "nemotron_h",
        **_SMALL,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "head_dim": 8,
        "n_groups": 2,
    },
    "privacy_filter": {
        "model_type": "openai_privacy_filter",
        "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        **_SMALL,
    },
    "paligemma": {
        "model_type": "paligemma",
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "text_config": {"model_type": "gemma", "head_dim": 8, **_SMALL},
        "vision_config": ARCHITECTURES["gemma3"]["vision_config"],
        "projection_dim": 32,
    },
}
# Bases whose own code would have to run, or that are no language model: no catalog, so no result.
NO_BASE: Final = {
    "001": "baichuan",
    "003": "chatglm",
    "004": "internlm",
    "044": "flux2",
}
# The base's architecture by number, with the codes of the refusal; no code means a result.
RESULTS: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    number: (base, frozenset(codes.split()))
    for number, base, codes in (
        # phi-1_5 had a Wqkv before its code came into transformers.
        ("002", "phi", "TARGET_UNKNOWN"),
        ("005", "bert_classifier", ""),
        ("006", "t5", ""),
        ("007", "qwen3_vl", ""),
        ("008", "qwen3_5", ""),
        # PEFT itself refuses out_proj of a state-space model.
        ("009", "nemotron_h", "TARGET_KIND"),
        ("010", "qwen3_5", "CONFIG_FIELD_FORBIDDEN"),
        ("011", "privacy_filter", ""),
        ("012", "qwen3", ""),
        ("013", "gemma3_text", "PEFT_TYPE_UNSUPPORTED"),
        ("014", "llama", "CONFIG_FIELD_FORBIDDEN"),
        ("015", "mistral", ""),
        ("016", "llama", "PEFT_TYPE_UNSUPPORTED"),
        ("017", "llama", ""),
        ("018", "qwen2_5_vl", ""),
        ("019", "mistral", ""),
        ("020", "llama", "PEFT_TYPE_UNSUPPORTED"),
        ("021", "qwen3", ""),
        ("022", "llama", ""),
        # enable_lora and merge_weights were fields of the first versions of PEFT.
        ("023", "llama", "CONFIG_FIELD_UNKNOWN"),
        ("024", "qwen2", "PEFT_TYPE_UNSUPPORTED"),
        ("025", "qwen2", ""),
        ("026", "gpt_neox", ""),
        ("027", "distilbert_classifier", ""),
        ("028", "llama", ""),
        # out_proj also means one inside of an attention that never calls it.
        ("029", "paligemma", "TARGET_KIND"),
        ("030", "qwen2", ""),
        ("031", "llama", "TARGETS_MISSING"),
        ("032", "llama", "CONFIG_OPTION_UNSUPPORTED"),
        ("033", "llama", "CONFIG_OPTION_UNSUPPORTED"),
        ("034", "llama", ""),
        *((f"{n:03}", "llama", "PEFT_TYPE_UNSUPPORTED") for n in range(35, 44)),
        ("045", "qwen2_5_vl", ""),
        # The expression also matches modules that hold others.
        ("046", "qwen2_vl", "TARGET_KIND"),
    )
}

needs_data = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}; set REGISTRY_TEST_DATA"
)


def content(number: str) -> bytes:
    return (FOLDER / f"config-{number}.json").read_bytes()


@needs_data
def test_every_published_config_is_looked_at() -> None:
    published = {path.stem.removeprefix("config-") for path in FOLDER.glob("config-*.json")}
    assert published == NO_BASE.keys() | RESULTS.keys()
    assert len(published) == 46


@needs_data
@pytest.mark.parametrize("number", RESULTS)
def test_a_published_config_has_a_result_or_a_reason(number: str) -> None:
    base, codes = RESULTS[number]
    catalog = catalog_build(MORE[base], BASE)
    expected, findings = ours(catalog, content(number))
    assert {finding.code.value for finding in findings} == codes
    if expected is not None:
        saved = pefts(meta_model(MORE[base]), _of_today(content(number)))
        assert equal(expected, saved)


@needs_data
@pytest.mark.parametrize("number", NO_BASE)
def test_a_base_of_foreign_code_gets_no_catalog(number: str) -> None:
    assert json.loads(content(number))["peft_type"] == "LORA"
    with pytest.raises(RefusedError, match=NO_BASE[number]):
        catalog_build({"model_type": NO_BASE[number]}, BASE)


def _of_today(published: bytes) -> bytes:
    """The config for PEFT on meta, where the base's own name would make it look for files."""
    return json.dumps({**json.loads(published), "base_model_name_or_path": None}).encode()
