"""How a base's weights are stored, as one word: ``none``, ``bitsandbytes-4bit``, ``gptq``, …

Stands apart from ``base_model`` because the sandboxed loader asks for it, too, and may import
nothing from outside the standard library but torch and its kin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from registry_service.domain.errors import RefusedError
from registry_service.domain.text import shown

QUANTIZATION_FIELDS: Final = frozenset({"quantization_config", "compression_config"})
"""The second is what compressed-tensors wrote in its first versions."""

_METHOD: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_BITSANDBYTES: Final = "bitsandbytes"


def quantization_of(config: Mapping[str, Any]) -> str:
    """The quantization that a base's ``config.json`` names, or ``none``.

    The word has the form of the declaration's ``baseQuantization``. bitsandbytes tells its two
    widths apart; the other methods go by their ``quant_method``.

    Raises:
        RefusedError: it does not say how, or its parts say different things.
    """
    words = sorted({_word(value) for value in _quantizations(config)})
    if len(words) > 1:
        raise RefusedError(
            f"config.json: quantization_config: expected one method, got {shown(', '.join(words))}"
        )
    return words[0] if words else "none"


def _quantizations(config: Mapping[str, Any]) -> Iterator[Any]:
    """The base's own, and those of the models inside it."""
    for name, value in config.items():
        if name in QUANTIZATION_FIELDS:
            if value is not None:
                yield value
        elif isinstance(value, Mapping):
            yield from _quantizations(value)


def _word(quantization: Any) -> str:
    where = "config.json: quantization_config"
    if not isinstance(quantization, Mapping):
        raise RefusedError(f"{where}: expected an object, got {shown(quantization)}")
    four, eight = quantization.get("load_in_4bit"), quantization.get("load_in_8bit")
    # Older bitsandbytes configs name no method; the two flags are theirs alone.
    flags = _BITSANDBYTES if four or eight else None
    method = quantization.get("quant_method") or flags
    if not isinstance(method, str) or not _METHOD.fullmatch(method):
        raise RefusedError(f"{where}: quant_method: expected its name, got {shown(method)}")
    if method != _BITSANDBYTES:
        return method
    if (four is True) == (eight is True):
        raise RefusedError(
            f"{where}: expected load_in_4bit or load_in_8bit, got {shown(four)} and {shown(eight)}"
        )
    return f"{_BITSANDBYTES}-{'4' if four is True else '8'}bit"
