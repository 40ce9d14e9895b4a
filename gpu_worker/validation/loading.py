"""Loading a base from the very bytes that were hashed. Runs inside the sandbox."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gpu_worker.validation.checks.c11_load import base_tensors, parameters_digest

_LEFT_OVER_SHOWN: Final = 8


class BaseLoadError(Exception):
    """The base on this node cannot be used. Never an adapter's fault."""


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base in memory, the hash of its parameters, and the seconds it took."""

    model: Any
    parameters_digest: str
    seconds: float
    device: str


def base_load(directory: Path, files: Mapping[str, str], device: str) -> LoadedBase:
    """Read every file once, compare its hash, and build the model from those bytes.

    Raises:
        BaseLoadError: other bytes than proven, or tensors that do not fit the model exactly.
    """
    started = time.perf_counter()
    config_bytes = _verified(directory, "config.json", files)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(files):
        if path.endswith(".safetensors"):
            tensors.update(load(_verified(directory, path, files)))
    model = model_build(json.loads(config_bytes), tensors)
    model = model.eval().requires_grad_(False).to(device)
    digest = parameters_digest(base_tensors(model))
    return LoadedBase(model, digest, time.perf_counter() - started, device)


def model_build(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """The model of the class that the catalog was made from, with every tensor in its place.

    Raises:
        BaseLoadError: an unknown class, or tensors missing, left over or of another shape.
    """
    kind = config.get("model_type")
    # Asked with "in": these mappings load lazily, and their get() does not.
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BaseLoadError(f"config.json: no causal language model {kind!r}")
    config_class = CONFIG_MAPPING[kind]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    model, loading = model_class.from_pretrained(
        None,
        config=config_class.from_dict(dict(config)),
        state_dict=tensors,
        dtype="auto",
        output_loading_info=True,
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loading.get(what):
            shown = sorted(map(str, loading[what]))[:_LEFT_OVER_SHOWN]
            raise BaseLoadError(f"base: {what}: {shown}")
    return model


def device_choose(wanted: str) -> str:
    """``cuda`` when wanted or, for ``auto``, when there is one; else ``cpu``.

    Raises:
        BaseLoadError: CUDA is wanted and there is none.
    """
    available = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise BaseLoadError("--device cuda: torch finds no CUDA device here")
    return "cuda" if available else "cpu"


def _verified(directory: Path, path: str, files: Mapping[str, str]) -> bytes:
    try:
        content = (directory / path).read_bytes()
    except OSError as error:
        raise BaseLoadError(f"BASE_DIFFERS: {path}: {error.strerror}") from error
    got = "sha256:" + hashlib.sha256(content).hexdigest()
    if got != files.get(path):
        raise BaseLoadError(f"BASE_DIFFERS: {path}: expected {files.get(path)}, got {got}")
    return content
