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

from gpu_worker.model_class import load_fault, model_class_of
from gpu_worker.validation.checks.c11_load import base_tensors, parameters_digest
from registry_service.domain.errors import RefusedError
from registry_service.domain.quantization import quantization_of

_LEFT_OVER_SHOWN: Final = 8


class BaseLoadError(Exception):
    """The base on this node cannot be used. Never an adapter's fault."""


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base in memory, the hash of its parameters, and the seconds it took.

    ``quantization`` is how the loaded model is stored, by its own config.
    """

    model: Any
    parameters_digest: str
    seconds: float
    device: str
    quantization: str


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
    config = json.loads(config_bytes)
    model = model_build(config, tensors).eval().requires_grad_(False).to(device)
    digest = parameters_digest(base_tensors(model))
    seconds = time.perf_counter() - started
    return LoadedBase(model, digest, seconds, device, quantization_of(config))


def model_build(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """The model of the class that the catalog was made from, with every tensor in its place.

    Raises:
        BaseLoadError: an unknown class, or tensors missing, left over or of another shape.
    """
    try:
        config_class, model_class = model_class_of(config)
        quantization = quantization_of(config)
    except RefusedError as error:
        raise BaseLoadError(error.message) from error
    try:
        model, loading = model_class.from_pretrained(
            None,
            config=config_class.from_dict(dict(config)),
            state_dict=tensors,
            dtype="auto",
            output_loading_info=True,
        )
    except Exception as error:
        # Hundreds of model classes, each with exceptions of its own.
        raise BaseLoadError(load_fault(quantization, error)) from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if loading.get(what):
            keys = sorted(map(str, loading[what]))[:_LEFT_OVER_SHOWN]
            raise BaseLoadError(f"base: {what}: {keys}")
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
