"""The static checks of 1,000 tensors, from files to findings."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from cli.check import check_folder
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.digests import Digest
from tests.integration.conftest import safetensors_bytes

LAYERS, TARGETS, WIDTH, RANK, ROUNDS = 125, ("a", "b", "c", "d"), 64, 8, 9


def check() -> list[dict[str, Any]]:
    """The best time of some rounds, in milliseconds."""
    names = [f"model.layers.{n}.{target}" for n in range(LAYERS) for target in TARGETS]
    catalog = Catalog(
        base_digest=Digest("sha256:" + "0" * 64),
        model_class="LlamaForCausalLM",
        model_type="llama",
        transformers_version="5.24.0",
        input_embedding=None,
        output_embedding=None,
        modules=tuple(
            Module(
                name=name,
                kind=Kind.LINEAR,
                class_name="Linear",
                in_size=WIDTH,
                out_size=WIDTH,
                tensors={"weight": (WIDTH, WIDTH)},
            )
            for name in names
        ),
    )
    tensors = {}
    for name in names:
        tensors[f"base_model.model.{name}.lora_A.weight"] = (RANK, WIDTH)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (WIDTH, RANK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
        (folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 8, "lora_alpha": 16, '
            '"target_modules": ["a", "b", "c", "d"]}'
        )
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            verdict = check_folder(folder, catalog)["verdict"]
            times.append(time.perf_counter() - start)
            if verdict != "pass":
                raise RuntimeError(f"expected a pass, got {verdict}")
    return [{"what": "check 1,000 tensors", "ms": round(min(times) * 1000, 1)}]
