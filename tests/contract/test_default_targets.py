"""The targets that are written out for a publisher are those of the installed PEFT."""

from __future__ import annotations

import pytest
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from registry_service.domain.default_targets import DEFAULT_TARGETS

pytestmark = pytest.mark.torch


def test_the_default_targets_are_those_of_the_installed_peft() -> None:
    ours = {
        model_type: targets if isinstance(targets, str) else list(targets)
        for model_type, targets in DEFAULT_TARGETS.items()
    }
    assert ours == TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
