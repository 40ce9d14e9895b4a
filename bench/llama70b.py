"""The static check of an all-linear DoRA adapter for Llama-70B, beside PEFT on the meta device.

1,680 tensors, from a file whose data is a hole: what is read is its header. Both sides run in a
process of their own, so that each has its own peak of memory.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

BASE: Final = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}
OPTIONS: Final = {
    "r": 16,
    "lora_alpha": 32,
    "use_dora": True,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
TENSORS: Final = 1680
ROUNDS: Final = 9


def llama70b() -> list[dict[str, Any]]:
    """Milliseconds and MiB of both, and how many times faster the check is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _child("prepare", folder)
        check, peft = _child("check", folder), _child("peft", folder)
    times = peft["ms"] / check["ms"]
    return [
        {"what": "check Llama-70B, all-linear DoRA, 1,680 tensors", **check},
        {"what": "the same through PEFT on meta", **peft, "times slower": round(times, 1)},
    ]


def _child(part: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.llama70b", part, str(folder)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    result: dict[str, Any] = json.loads(answer)
    return result


def _prepare(folder: Path) -> dict[str, Any]:
    from gpu_worker.validation.catalog_builder import catalog_build
    from registry_service.domain.digests import Digest
    from registry_service.domain.expected_tensors import expected_tensors
    from registry_service.domain.peft_config import peft_config_parse

    catalog = catalog_build(BASE, Digest("sha256:" + "0" * 64))
    (folder / "catalog.json").write_bytes(catalog.to_bytes())
    adapter = folder / "adapter"
    adapter.mkdir()
    content = json.dumps({"peft_type": "LORA", **OPTIONS}).encode()
    (adapter / "adapter_config.json").write_bytes(content)
    config, _ = peft_config_parse(content)
    if config is None:
        raise RuntimeError("expected a config that is served")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, item in expected_tensors(catalog, config).tensors.items():
        size = 4 * math.prod(item.shape)
        entries[name] = {"dtype": "F32", "shape": item.shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
    return {"tensors": len(entries) - 1}


def _check(folder: Path) -> dict[str, Any]:
    from cli.check import check_folder
    from registry_service.domain.catalog import catalog_parse

    catalog = catalog_parse((folder / "catalog.json").read_bytes())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        report = check_folder(folder / "adapter", catalog)
        times.append(time.perf_counter() - start)
        if report["verdict"] != "pass":
            raise RuntimeError(f"expected a pass, got {report['findings'][:3]}")
    return _figures(min(times))


def _peft(folder: Path) -> dict[str, Any]:
    import warnings

    import peft
    import torch
    import transformers

    warnings.simplefilter("ignore")
    fields = {name: value for name, value in BASE.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model("llama", **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    start = time.perf_counter()
    placed = peft.get_peft_model(model, peft.LoraConfig(**OPTIONS), low_cpu_mem_usage=True)
    state = peft.get_peft_model_state_dict(placed)
    seconds = time.perf_counter() - start
    if len(state) != TENSORS:
        raise RuntimeError(f"expected {TENSORS} tensors, got {len(state)}")
    return _figures(seconds)


def _figures(seconds: float) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": round(seconds * 1000, 1), "process MiB": round(peak)}


if __name__ == "__main__":
    part = {"prepare": _prepare, "check": _check, "peft": _peft}[sys.argv[1]]
    sys.stdout.write(json.dumps(part(Path(sys.argv[2]))))
