"""Makes a base's catalog from its ``config.json`` on torch's meta device: no weights, no memory.

The model class is the exact one that serves the base (``AutoModelForCausalLM``), since the class
decides the names; code that a base brings along is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from registry_service.domain import limits
from registry_service.domain.base_model import BASE_CONFIG_PATH, base_config_parse
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.text import shown

# How a base is stored does not change its modules' names, and would ask for extra libraries.
_LEFT_OUT: Final = frozenset({"quantization_config", "architectures", "_name_or_path"})


def catalog_build(base: Path | Mapping[str, Any], base_digest: Digest) -> Catalog:
    """The catalog of a base directory, or of a parsed ``config.json``.

    Raises:
        MalformedError: a directory without a readable config, or a config that makes no model.
        RefusedError: remote code, an adapter inside the base, or no causal language model.
    """
    raw = _directory_config(base) if isinstance(base, Path) else dict(base)
    _no_remote_code(raw)
    model = _meta_model(raw)
    names = {id(module): name for name, module in model.named_modules()}
    modules = tuple(_module(name, module) for name, module in model.named_modules() if name)
    return Catalog(
        base_digest=base_digest,
        model_class=type(model).__name__,
        model_type=model.config.model_type,
        transformers_version=transformers.__version__,
        input_embedding=names.get(id(model.get_input_embeddings())),
        output_embedding=names.get(id(model.get_output_embeddings())),
        tied=bool(model.config.get_text_config().tie_word_embeddings),
        modules=modules,
    )


def _directory_config(directory: Path) -> dict[str, Any]:
    try:
        for path in sorted(directory.rglob("*")):
            # transformers loads an adapter that lies beside a base as a part of it.
            if path.name == "adapter_config.json" or path.suffix == ".py":
                raise RefusedError(f"base: refused because it holds {shown(path.name)}; remove it")
        with (directory / BASE_CONFIG_PATH).open("rb") as file:
            return base_config_parse(file.read(limits.BASE_CONFIG_BYTES + 1))
    except OSError as error:
        raise MalformedError(
            f"base: expected a directory with {BASE_CONFIG_PATH}, got {shown(str(directory))}"
        ) from error


def _no_remote_code(value: Any) -> None:
    if isinstance(value, Mapping):
        if "auto_map" in value:
            raise RefusedError("config.json: auto_map asks for code, which is never run here")
        for item in value.values():
            _no_remote_code(item)
    elif isinstance(value, list):
        for item in value:
            _no_remote_code(item)


def _meta_model(raw: Mapping[str, Any]) -> Any:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise RefusedError(
            f"config.json: model_type: expected one that transformers "
            f"{transformers.__version__} knows, got {shown(model_type)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(f"config.json: {shown(model_type)} has no causal language model")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    _class_check(raw.get("architectures"), model_class.__name__)
    fields = {name: value for name, value in raw.items() if name not in _LEFT_OUT}
    try:
        config = config_class.from_dict(fields)
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:
        raise MalformedError(
            f"config.json: transformers makes no {model_class.__name__} from it: "
            f"{shown(str(error))}"
        ) from error


def _class_check(architectures: Any, class_name: str) -> None:
    if architectures is not None and architectures != [class_name]:
        raise RefusedError(
            f"config.json: architectures: expected ['{class_name}'], got {shown(architectures)}"
        )


def _module(name: str, module: nn.Module) -> Module:
    kind, in_size, out_size = _kind(module)
    return Module(
        name=name,
        kind=kind,
        class_name=type(module).__name__,
        in_size=in_size,
        out_size=out_size,
        tensors={key: tuple(tensor.shape) for key, tensor in _tensors(module)},
    )


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers of the module itself, those it shares with others included."""
    transient = module._non_persistent_buffers_set
    buffers = [(k, b) for k, b in module._buffers.items() if b is not None and k not in transient]
    return [*((k, p) for k, p in module._parameters.items() if p is not None), *buffers]


def _kind(module: nn.Module) -> tuple[Kind, int | None, int | None]:
    # An attention's inner projection that bypasses forward: an adapter on it would do nothing.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return Kind.OTHER, None, None
    if isinstance(module, nn.Linear):
        return Kind.LINEAR, module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return Kind.CONV1D, module.weight.shape[0], module.weight.shape[1]
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING, module.num_embeddings, module.embedding_dim
    return Kind.OTHER, None, None
