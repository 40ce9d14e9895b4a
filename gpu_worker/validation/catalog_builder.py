"""Makes a base's catalog from its ``config.json`` on torch's meta device: no weights, no memory.

The model class is the exact one that the base names, since the class decides the names of all
tensors; code that a base brings along is never run. A quantized base has the catalog of the model
it was made from: LoRA is shaped after that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model_class import model_class_of
from registry_service.domain import limits
from registry_service.domain.base_model import (
    BASE_CONFIG_PATH,
    base_config_parse,
    base_json_check,
    may_ask_for_code,
    remote_code_refuse,
)
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.quantization import QUANTIZATION_FIELDS, quantization_of
from registry_service.domain.text import shown

# How a base is stored does not change its modules' names, and would ask for extra libraries.
_LEFT_OUT: Final = QUANTIZATION_FIELDS | {"architectures", "_name_or_path"}


def catalog_build(base: Path | Mapping[str, Any], base_digest: Digest) -> Catalog:
    """The catalog of a base directory, of a ``config.json`` file, or of a parsed one.

    Raises:
        MalformedError: no readable config, or a config that makes no model.
        RefusedError: remote code, an adapter inside the base, or a class that no base may have.
    """
    raw = _read(base) if isinstance(base, Path) else dict(base)
    remote_code_refuse(raw)
    quantization = quantization_of(raw)
    model = _meta_model(raw)
    names = {id(module): name for name, module in model.named_modules()}
    return Catalog(
        base_digest=base_digest,
        model_class=type(model).__name__,
        model_type=model.config.model_type,
        transformers_version=transformers.__version__,
        quantization=quantization,
        input_embedding=names.get(id(model.get_input_embeddings())),
        output_embedding=names.get(id(model.get_output_embeddings())),
        tied_modules=tied_modules(model),
        aliases=aliases(model),
        modules=tuple(_module(name, module) for name, module in model.named_modules() if name),
    )


def tied_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose weight is the input embedding's, without that one."""
    embedding: Any = model.get_input_embeddings()
    shared = {id(parameter) for parameter in embedding.parameters()}
    return tuple(
        sorted(
            name
            for name, module in model.named_modules()
            if module is not embedding and shared & {id(p) for p in module._parameters.values()}
        )
    )


def aliases(model: nn.Module) -> dict[str, str]:
    """For each further name of a module object, the first: a catalog lists a module once."""
    first = {id(module): name for name, module in model.named_modules()}
    every = model.named_modules(remove_duplicate=False)
    return {name: first[id(module)] for name, module in every if first[id(module)] != name}


def _read(base: Path) -> dict[str, Any]:
    try:
        for path in sorted(base.rglob("*")):
            # transformers loads an adapter that lies beside a base as a part of it.
            if path.name == "adapter_config.json" or path.suffix == ".py":
                raise RefusedError(f"base: refused because it holds {shown(path.name)}; remove it")
            if path.parent == base and may_ask_for_code(path.name) and path.is_file():
                base_json_check(path.name, path.read_bytes())
        with (base / BASE_CONFIG_PATH if base.is_dir() else base).open("rb") as file:
            return base_config_parse(file.read(limits.BASE_CONFIG_BYTES + 1))
    except OSError as error:
        raise MalformedError(
            f"base: expected {BASE_CONFIG_PATH} or a directory with one, got {shown(str(base))}"
        ) from error


def _meta_model(raw: Mapping[str, Any]) -> Any:
    config_class, model_class = model_class_of(raw)
    try:
        config = config_class.from_dict(_unquantized(raw))
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:
        # A config class raises whatever its reading of a hostile config runs into.
        raise MalformedError(
            f"config.json: transformers makes no {model_class.__name__} from it: "
            f"{shown(str(error))}"
        ) from error


def _unquantized(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _unquantized(value) if isinstance(value, Mapping) else value
        for name, value in raw.items()
        if name not in _LEFT_OUT
    }


def _module(name: str, module: nn.Module) -> Module:
    kind, in_size, out_size = _kind(module)
    convolution = module if isinstance(module, nn.Conv2d) else None
    return Module(
        name=name,
        kind=kind,
        class_name=type(module).__name__,
        in_size=in_size,
        out_size=out_size,
        kernel=() if convolution is None else tuple(convolution.kernel_size),
        groups=1 if convolution is None else convolution.groups,
        # What transformers' fused experts say of themselves, and PEFT asks them for.
        transposed=bool(getattr(module, "is_transposed", False)),
        parameters=tuple(key for key, p in module._parameters.items() if p is not None),
        tensors={key: tuple(tensor.shape) for key, tensor in _tensors(module)},
    )


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers of the module itself, those it shares with others included."""
    transient = module._non_persistent_buffers_set
    buffers = [(k, b) for k, b in module._buffers.items() if b is not None and k not in transient]
    return [*((k, p) for k, p in module._parameters.items() if p is not None), *buffers]


def _kind(module: nn.Module) -> tuple[Kind, int | None, int | None]:
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return Kind.INERT, None, None
    if isinstance(module, nn.Linear):
        return Kind.LINEAR, module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return Kind.CONV1D, module.weight.shape[0], module.weight.shape[1]
    if isinstance(module, nn.Conv2d):
        return Kind.CONV2D, module.in_channels, module.out_channels
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING, module.num_embeddings, module.embedding_dim
    return Kind.OTHER, None, None
