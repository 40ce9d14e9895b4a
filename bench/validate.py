"""Dynamic validation of a 2 MB adapter on SmolLM2, in a sandbox whose zygote holds the base."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gpu_worker.base_files import base_prove
from gpu_worker.validation.report import report_build
from gpu_worker.validation.sandbox import sandbox_find
from gpu_worker.validation.supervisor import Zygote
from registry_service.domain.digests import digest_of
from registry_service.domain.manifest import FileEntry

ROUNDS, RANK = 7, 8


def validate() -> list[dict[str, Any]]:
    """Seconds a job, from the job's line to the parsed report, and jobs a minute of one worker."""
    with tempfile.TemporaryDirectory() as name:
        base, inputs = Path(name) / "base", Path(name) / "inputs"
        command = [sys.executable, "-m", "gpu_worker.demo_training", "base", str(base)]
        subprocess.run(command, check=True, capture_output=True)
        inputs.mkdir()
        config = json.loads((base / "config.json").read_text())
        folder = _adapter_make(inputs / "adapter", config)
        files = [_entry(path) for path in sorted(folder.iterdir())]
        zygote = Zygote(
            sandbox_find(wanted=True, cuda=False), base_prove(base), inputs, device="cpu"
        )
        try:
            ready = zygote.ready()
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                result = zygote.run(folder, files)
                report = report_build(
                    result, device=ready.device, versions=ready.versions, sandbox=True
                )
                times.append(time.perf_counter() - start)
                refused = [f for f in report["findings"] if f["severity"] == "refuse"]
                if refused:
                    raise RuntimeError(f"expected no refusal, got {refused}")
        finally:
            zygote.close()
        megabytes = sum(file.size for file in files) / 1e6
    median = statistics.median(times)
    return [
        {
            "what": f"validate {megabytes:.1f} MB on SmolLM2",
            "seconds": round(median, 2),
            "from": round(min(times), 2),
            "to": round(max(times), 2),
            "adapters/minute of one worker": round(60 / median, 1),
        }
    ]


def _adapter_make(folder: Path, config: dict[str, Any]) -> Path:
    """LoRA on q_proj and v_proj of every layer, with random values."""
    generator = np.random.default_rng(0)
    width = config["hidden_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    sizes = {
        "q_proj": head * config["num_attention_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target, out in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for part, shape in (("lora_A", (RANK, width)), ("lora_B", (out, RANK))):
                values = generator.normal(scale=0.02, size=shape).astype(np.float32)
                tensors[f"{prefix}.{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": sorted(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def _entry(path: Path) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(path.name, digest_of(content), len(content), "application/octet-stream")
