"""The checks, run for real: worker's side, bubblewrap, zygote, forked child."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.base_files import ProvenBase, base_prove
from gpu_worker.validation.report import report_build
from gpu_worker.validation.sandbox import Sandbox, sandbox_find
from gpu_worker.validation.supervisor import Ready, Zygote, ZygoteFaultError
from tests.integration.validation_inputs import (
    WEIGHTS,
    Tensors,
    adapter_change,
    adapter_make,
    base_make,
    facts_of,
)

pytestmark = [pytest.mark.torch]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@dataclass
class Bench:
    """One sandbox with one base, and the zygote in use."""

    sandbox: Sandbox
    base: ProvenBase
    inputs: Path
    good: Path
    zygote: Zygote
    ready: Ready
    stale: bool = False

    def check(self, folder: Path) -> dict[str, Any]:
        if self.stale:
            self.replace()
        result = self.zygote.run(folder, facts_of(folder))
        return report_build(
            result, device=self.ready.device, versions=self.ready.versions, sandbox=True
        )

    def changed(self, name: str, change: Callable[[Tensors], None]) -> dict[str, Any]:
        folder = self.inputs / name
        if not folder.exists():
            adapter_change(self.good, folder, change)
        return self.check(folder)

    def replace(self) -> None:
        self.zygote.close()
        self.zygote = Zygote(self.sandbox, self.base, self.inputs, device="cpu")
        self.ready = self.zygote.ready()
        self.stale = False


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("validation")
    sandbox = sandbox_find(wanted=True, cuda=False)
    base = base_prove(base_make(root / "base"))
    (root / "inputs").mkdir()
    good = adapter_make(root / "base", root / "inputs" / "good")
    zygote = Zygote(sandbox, base, root / "inputs", device="cpu")
    bench = Bench(sandbox, base, root / "inputs", good, zygote, zygote.ready())
    yield bench
    bench.zygote.close()


def codes(report: dict[str, Any], severity: str = "refuse") -> set[str]:
    return {str(f["code"]) for f in report["findings"] if f["severity"] == severity}


def test_good_adapter_has_no_refusal(bench: Bench) -> None:
    report = bench.check(bench.good)
    assert codes(report) == set(), report["findings"]
    assert codes(report, "review") == set(), report["findings"]
    assert codes(report, "info") == {"LOAD_TIME"}
    measured = report["measurements"]
    assert report["checks"] == [9, 10, 11, 12, 13, 14, 15]
    assert measured["residentBytes"]["measured"] == measured["residentBytes"]["predicted"]
    assert measured["effect"]["maxDifference"] > 0
    assert report["sandbox"] is True
    assert report["device"] == "cpu"
    assert report["versions"]["torch"].startswith("2.")
    assert report["versions"]["cuda"] == "none"


def test_spectrum_is_that_of_the_product(bench: Bench) -> None:
    measured = bench.check(bench.good)["measurements"]["spectrum"]["perModule"]
    from safetensors.torch import load_file

    tensors = load_file(bench.good / WEIGHTS)
    update = 2.0 * tensors[f"{Q0}.lora_B.weight"] @ tensors[f"{Q0}.lora_A.weight"]  # alpha 8, r 4
    sigma = torch.linalg.svdvals(update.double())
    got = measured["model.layers.0.self_attn.q_proj"]
    assert got["sigma1"] == pytest.approx(float(sigma[0]), rel=1e-5)
    assert got["norm"] == pytest.approx(float(sigma.norm()), rel=1e-5)


def test_nan_is_refused_before_it_is_loaded(bench: Bench) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{Q0}.lora_A.weight"][0, 0] = float("nan")

    report = bench.changed("nan", change)
    assert codes(report) == {"VALUE_NOT_FINITE"}
    assert report["findings"][0]["where"] == f"{Q0}.lora_A.weight"
    assert report["checks"] == [9, 10]


def test_missing_tensor(bench: Bench) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{Q0}.lora_B.weight"]

    report = bench.changed("missing", change)
    assert codes(report) == {"LOAD_MISSING_KEYS"}


def test_extra_tensor(bench: Bench) -> None:
    extra = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    report = bench.changed("extra", lambda t: t.update({extra: torch.ones(4, 64)}))
    assert codes(report) == {"LOAD_UNEXPECTED_KEYS"}


def test_wrong_shape_is_a_finding_of_the_reader(bench: Bench) -> None:
    report = bench.changed("shape", lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 48)}))
    assert codes(report) == {"LOAD_FAILED"}


def test_key_of_a_base_weight_is_seen(bench: Bench) -> None:
    key = "base_model.model.model.layers.0.self_attn.o_proj.weight"
    report = bench.changed("overwrite", lambda t: t.update({key: torch.zeros(64, 64)}))
    assert "BASE_CHANGED" in codes(report)


def test_key_of_a_neighbour_is_seen(bench: Bench) -> None:
    key = f"{Q0}.lora_A.resident.weight"
    report = bench.changed("neighbour", lambda t: t.update({key: torch.zeros(2, 64)}))
    assert codes(report) & {"OTHER_ADAPTER_CHANGED", "LOAD_UNEXPECTED_KEYS"}


def test_zero_adapter_has_no_effect(bench: Bench) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.zero_()

    assert codes(bench.changed("zero", change)) == {"NO_EFFECT"}


def test_large_update_needs_review(bench: Bench) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{Q0}.lora_B.weight"] *= 1000

    report = bench.changed("large", change)
    assert codes(report) == set()
    found = [f for f in report["findings"] if f["code"] == "SPECTRUM"]
    assert {f["where"] for f in found} == {"model.layers.0.self_attn.q_proj"}
    assert all(f["got"].startswith("anomaly, needs review") for f in found)


def test_garbage_is_a_finding(bench: Bench) -> None:
    folder = adapter_change(bench.good, bench.inputs / "garbage", lambda t: None)
    (folder / WEIGHTS).write_bytes(b"\xff" * 500)
    assert codes(bench.check(folder)) == {"LOAD_FAILED"}


def test_other_bytes_than_the_manifests_are_a_fault(bench: Bench) -> None:
    facts = facts_of(bench.good)
    folder = adapter_change(bench.good, bench.inputs / "differs", lambda t: t.clear())
    result = bench.zygote.run(folder, facts)
    assert result["fault"].startswith("BYTES_DIFFER: adapter_model.safetensors")


def test_other_kinds_pass_in_the_sandbox(bench: Bench) -> None:
    variants: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "all-linear": {"target_modules": "all-linear", "use_rslora": True},
        "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        "tokens": {"trainable_token_indices": [3, 4]},
        "saved": {"modules_to_save": ["lm_head"]},
    }
    for name, options in variants.items():
        folder = adapter_make(bench.base.dir, bench.inputs / name, **options)
        report = bench.check(folder)
        assert codes(report) == set(), name
        assert report["checks"] == [9, 10, 11, 12, 13, 14, 15]


def test_killed_child_is_a_fault_and_the_next_zygote_works(bench: Bench) -> None:
    seen = threading.Event()
    killer = threading.Thread(target=_children_kill, args=(bench.zygote.pid, seen))
    killer.start()
    try:
        with pytest.raises(ZygoteFaultError, match="signal 9"):
            for _ in range(50):
                bench.check(bench.good)
    finally:
        seen.set()
        killer.join()
    with pytest.raises(ZygoteFaultError):
        bench.check(bench.good)
    bench.replace()
    assert codes(bench.check(bench.good)) == set()


def _children_kill(outermost: int, seen: threading.Event) -> None:
    """Kill what the zygote forks (bwrap, its init, the zygote, the child), until it was seen.

    One alone could have ended by itself already.
    """
    while not seen.wait(0.002):
        for child in _descendants(outermost, 3):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _descendants(pid: int, depth: int) -> list[int]:
    level = [pid]
    for _ in range(depth):
        found: list[int] = []
        for parent in level:
            try:
                text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            except OSError:
                continue
            found += [int(word) for word in text.split()]
        level = found
    return level


def test_child_past_its_time_is_a_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.zygote, "_wall_seconds", 0.01)
    bench.stale = True
    with pytest.raises(ZygoteFaultError, match="past its time"):
        bench.zygote.run(bench.good, facts_of(bench.good))


def test_started_child_gives_the_same(bench: Bench) -> None:
    """The way of CUDA, on the CPU: a child that is started, not forked."""
    started = Zygote(bench.sandbox, bench.base, bench.inputs, device="cpu", spawn=True)
    try:
        started.ready()
        result = started.run(bench.good, facts_of(bench.good))
        assert {f["code"] for f in result["findings"]} == {"LOAD_TIME"}
    finally:
        started.close()


def test_zygote_refuses_another_base(bench: Bench, tmp_path: Path) -> None:
    base = base_prove(base_make(tmp_path / "base"))
    weights = tmp_path / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    zygote = Zygote(bench.sandbox, base, bench.inputs, device="cpu")
    try:
        with pytest.raises(ZygoteFaultError, match="BASE_DIFFERS"):
            zygote.ready()
    finally:
        zygote.close()
