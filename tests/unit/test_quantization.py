"""How a base is stored, as one word."""

from __future__ import annotations

import re
from typing import Any

import pytest

from registry_service.domain.declaration import Declaration
from registry_service.domain.errors import RefusedError
from registry_service.domain.quantization import quantization_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({}, "none"),
        ({"quantization_config": None}, "none"),
        ({"text_config": {"hidden_size": 8}}, "none"),
        ({"quantization_config": GPTQ}, "gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": GPTQ}}, "gptq"),
        ({"quantization_config": GPTQ, "text_config": {"quantization_config": GPTQ}}, "gptq"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "bitsandbytes-4bit",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": False,
                    "load_in_8bit": True,
                }
            },
            "bitsandbytes-8bit",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes-8bit"),
    ],
)
def test_each_way_of_storing_a_base_has_its_word(config: dict[str, Any], word: str) -> None:
    assert quantization_of(config) == word
    (declared,) = Declaration.model_fields["base_quantization"].metadata
    assert re.search(declared.pattern, word)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {}},
        {"quantization_config": "gptq"},
        {"quantization_config": {"quant_method": ["gptq"]}},
        {"quantization_config": {"quant_method": "Evil\u202eName"}},
        {"quantization_config": {"quant_method": "x" * 33}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": True,
            }
        },
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": "yes"}},
        {"quantization_config": GPTQ, "text_config": {"quantization_config": {}}},
        {
            "quantization_config": GPTQ,
            "vision_config": {"quantization_config": {"quant_method": "awq"}},
        },
    ],
)
def test_what_does_not_say_how_it_is_stored_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="quantization_config") as raised:
        quantization_of(config)
    assert raised.value.message.isascii()
