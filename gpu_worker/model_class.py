"""The exact model class of a base, from its ``config.json``: never a guess, never remote code.

The class decides the names of all tensors (``model.layers…`` in one, ``model.language_model.…`` in
another), so the catalog, the validator and the serving node ask here and nowhere else. Imports only
transformers and the parts of the domain that need nothing from outside the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from registry_service.domain.errors import RefusedError
from registry_service.domain.text import shown

_MAPPINGS: Final = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
)


def model_class_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The config class and the model class that ``architectures`` names.

    Without ``architectures`` it is the causal language model of the model type.

    Raises:
        RefusedError: an unknown model type, or a class that is not one of its language models,
            classifiers or answerers of questions.
    """
    model_type = config.get("model_type")
    # Asked with "in": these mappings load lazily, and their get() does not.
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise RefusedError(
            f"config.json: model_type: expected one that transformers "
            f"{transformers.__version__} knows, got {shown(model_type)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    architectures = config.get("architectures")
    if architectures is None:
        return config_class, _causal(config_class, model_type)
    classes = {found.__name__: found for found in _classes(config_class)}
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise RefusedError(
            f"config.json: architectures: expected exactly one class, got {shown(architectures)}"
        )
    named = architectures[0]
    if not isinstance(named, str) or named not in classes:
        raise RefusedError(
            f"config.json: architectures: expected one of {', '.join(sorted(classes)) or 'none'} "
            f"for {shown(model_type)}, got {shown(named)}"
        )
    return config_class, classes[named]


def is_causal(config_class: Any, model_class: Any) -> bool:
    """True when the class is the causal language model of its config."""
    return (
        config_class in MODEL_FOR_CAUSAL_LM_MAPPING
        and MODEL_FOR_CAUSAL_LM_MAPPING[config_class] is model_class
    )


def load_fault(quantization: str, error: Exception) -> str:
    """Why transformers did not load a base whose bytes are right, and what to do next."""
    why = f"{type(error).__name__}: {shown(str(error))}"
    if quantization == "none":
        return f"base: transformers does not load it: {why}"
    return (
        f"base: it is stored as {quantization}, which cannot be loaded here ({why}); use a machine "
        "that has the library for it and a device that it runs on"
    )


def _causal(config_class: Any, model_type: str) -> Any:
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(
            f"config.json: {shown(model_type)} has no causal language model; "
            "name the model's class in architectures"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def _classes(config_class: Any) -> Iterator[Any]:
    for mapping in _MAPPINGS:
        if config_class in mapping:
            found = mapping[config_class]
            yield from found if isinstance(found, tuple) else (found,)
