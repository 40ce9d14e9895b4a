"""A tiny random base and adapters on it, for the tests of the validation worker."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.validation.checks.candidate import FileFact

WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]


def base_make(directory: Path, *, tied: bool = False) -> Path:
    """A llama of two layers, saved as safetensors."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def adapter_make(base: Path, directory: Path, **options: object) -> Path:
    """A LoRA adapter with random values, B included."""
    torch.manual_seed(11)
    model = LlamaForCausalLM.from_pretrained(base)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft still asks transformers by a name it deprecates
        peft_model = get_peft_model(model, LoraConfig(**settings))
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    peft_model.save_pretrained(directory)
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
