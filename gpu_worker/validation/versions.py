"""What a report says about the machinery: device and versions."""

from __future__ import annotations

import platform

import peft
import safetensors
import torch
import transformers


def versions(device: str) -> dict[str, str]:
    """Versions of everything that can change a result."""
    cuda = str(torch.version.cuda) if device == "cuda" else "none"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "peft": str(peft.__version__),
        "safetensors": str(safetensors.__version__),
        "cuda": cuda,
    }


def device_name(device: str) -> str:
    """``cpu`` or ``cuda``. The card's own name would need the driver, which must not start here."""
    return device
