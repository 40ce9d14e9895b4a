"""Tiny random bases and adapters on them, for the tests of the validation worker."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from gpu_worker.model_class import model_class_of
from gpu_worker.validation.checks.candidate import FileFact

WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]

_DECODER = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASES: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "gpt2": {
        "vocab_size": 256,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        **_TOKENS,
    },
    "mixtral": {**_DECODER, "num_local_experts": 4},
    "qwen3_moe": {
        **_DECODER,
        **_TOKENS,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", **_DECODER, **_TOKENS, "head_dim": 16},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 256,
    },
    "bert": {
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "num_labels": 3,
    },
}
# Values that stand for something of the base's: an adapter nudges them, it does not make them up.
_NUDGED = ("lora_magnitude_vector", "trainable_tokens_delta", "modules_to_save")


def base_make(
    directory: Path,
    *,
    kind: str = "llama",
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A model of two layers with random values, saved as safetensors."""
    torch.manual_seed(7)
    fields = {"model_type": kind, **BASES[kind], "tie_word_embeddings": tied}
    config_class, model_class = model_class_of(fields)
    model = model_class(config_class.from_dict(fields)).to(dtype)
    for parameter in model.parameters():
        if not parameter.any():  # a projection of zeros would hide what comes before it
            torch.nn.init.normal_(parameter.data, std=0.02)
    model.save_pretrained(directory)
    return directory


def adapter_make(base: Path, directory: Path, **options: object) -> Path:
    """A LoRA adapter with random values, B included."""
    torch.manual_seed(11)
    _, model_class = model_class_of(json.loads((base / "config.json").read_text()))
    model = model_class.from_pretrained(base)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft still asks transformers by a name it deprecates
        peft_model = get_peft_model(model, LoraConfig(**settings))
        for name, parameter in peft_model.named_parameters():
            if any(part in name for part in _NUDGED):
                parameter.data += torch.randn_like(parameter) * 0.01
            elif "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        peft_model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    return directory


def adapter_change(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of an adapter with its tensors changed in place by ``change``."""
    shutil.copytree(source, target)
    tensors = load_file(target / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def facts_of(directory: Path) -> tuple[FileFact, ...]:
    """What the manifest of an adapter's folder would say."""
    entries = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        entries.append(FileFact(path.name, digest, len(content)))
    return tuple(entries)


def config_change(directory: Path, **fields: object) -> Path:
    """The folder with fields of its ``adapter_config.json`` set."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory
