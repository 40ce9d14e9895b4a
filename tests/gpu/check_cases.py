"""What the checks have to say on a device: run on CUDA here, on the CPU by the integration tests.

Needs torch, transformers, peft, safetensors and pytest, nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file

from gpu_worker.validation.checking import adapter_check
from gpu_worker.validation.loading import LoadedBase, base_load
from tests.integration.validation_inputs import (
    WEIGHTS,
    Tensors,
    adapter_change,
    adapter_make,
    base_make,
    facts_of,
)

ALL_CHECKS = [9, 10, 11, 12, 13, 14, 15]
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"
EXPERTS0 = "model.layers.0.mlp.experts"


@dataclass(frozen=True)
class Kind:
    """An adapter of one kind: its base, PEFT's options, and what the checks have to find."""

    options: dict[str, Any]
    base: str = "llama"
    dtype: torch.dtype = torch.float32
    tied: bool = False
    mixed: bool = True
    scaling: dict[str, float] = field(default_factory=dict)


LORA = {"target_modules": ["q_proj", "v_proj"]}
FUSED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
KINDS: dict[str, Kind] = {
    "lora in 32 bits": Kind(LORA, scaling={Q0: 2.0}),
    "lora in bfloat16": Kind(LORA, dtype=torch.bfloat16, scaling={Q0: 2.0}),
    "lora in float16": Kind(LORA, dtype=torch.float16),
    "all-linear in bfloat16": Kind({"target_modules": "all-linear"}, dtype=torch.bfloat16),
    "rslora": Kind({**LORA, "use_rslora": True, "lora_alpha": 3}, scaling={Q0: 3 / math.sqrt(4)}),
    "dora": Kind({**LORA, "use_dora": True}, mixed=False),
    "dora in bfloat16": Kind({**LORA, "use_dora": True}, dtype=torch.bfloat16, mixed=False),
    "lora_bias": Kind({**LORA, "lora_bias": True}),
    "patterns": Kind(
        {**LORA, "rank_pattern": {r"layers\.0.*q_proj": 2}, "alpha_pattern": {"^model.*0.*": 3}},
        scaling={Q0: 3 / 2, "model.layers.0.self_attn.v_proj": 3 / 4},
    ),
    "expression": Kind({"target_modules": r".*\.1\..*(q|k)_proj"}),
    "layers": Kind(
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}
    ),
    "conv1d": Kind({"target_modules": ["c_attn", "c_proj"]}, base="gpt2"),
    "dora on conv1d": Kind(
        {"target_modules": ["c_fc"], "use_dora": True}, base="gpt2", mixed=False
    ),
    "embedding": Kind({"target_modules": ["wte", "c_attn"]}, base="gpt2", tied=True),
    "embedding in bfloat16": Kind({"target_modules": ["wte"]}, base="gpt2", dtype=torch.bfloat16),
    "embedding with its copy": Kind({"target_modules": ["embed_tokens", "q_proj"]}),
    "fused experts": Kind({"target_modules": ["q_proj"], **FUSED}, base="mixtral", mixed=False),
    "fused experts in bfloat16": Kind(
        {"target_modules": [], **FUSED},
        base="qwen3_moe",
        dtype=torch.bfloat16,
        mixed=False,
        scaling={f"{EXPERTS0}.down_proj": 2.0},
    ),
    "attention beside experts": Kind(LORA, base="mixtral"),
    "trained tokens": Kind(
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 200, 255]}, mixed=False
    ),
    "trained tokens of a tied head": Kind(
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 200]}, tied=True, mixed=False
    ),
    "conv2d": Kind({"target_modules": ["patch_embedding"]}, base="gemma3"),
    "dora on conv2d": Kind(
        {"target_modules": ["patch_embedding"], "use_dora": True}, base="gemma3", mixed=False
    ),
    "vision and language": Kind({"target_modules": "all-linear"}, base="gemma3"),
    "encoder and decoder": Kind({"target_modules": ["q", "v"]}, base="t5"),
    "classifier": Kind({"target_modules": ["query"], "task_type": "SEQ_CLS"}, base="bert"),
    "saved module": Kind(
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        dtype=torch.bfloat16,
        tied=True,
        mixed=False,
    ),
}


class ChecksOnDevice:
    """The tests; a subclass names the device."""

    device: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("checks")

    @pytest.fixture
    def good(self, root: Path) -> Path:
        return self.adapter(root, "lora in 32 bits")

    def base(self, root: Path, kind: Kind) -> Path:
        folder = root / f"{kind.base}-{kind.dtype}-{kind.tied}"
        if not folder.exists():
            base_make(folder, kind=kind.base, dtype=kind.dtype, tied=kind.tied)
        return folder

    def adapter(self, root: Path, name: str) -> Path:
        kind, folder = KINDS[name], root / name
        if not folder.exists():
            adapter_make(self.base(root, kind), folder, **kind.options)
        return folder

    def load(self, base: Path) -> LoadedBase:
        """A base on the device, as a started child holds it."""
        files = {fact.path: fact.digest for fact in facts_of(base)}
        kept = {p: d for p, d in files.items() if p == "config.json" or p.endswith(".safetensors")}
        loaded = base_load(base, kept, self.device)
        assert next(loaded.model.parameters()).device.type == self.device
        return loaded

    def check(self, root: Path, folder: Path, name: str = "lora in 32 bits") -> dict[str, Any]:
        return run(self.load(self.base(root, KINDS[name])), folder)

    def changed(
        self, root: Path, good: Path, target: Path, change: Callable[[Tensors], object]
    ) -> dict[str, Any]:
        return self.check(root, adapter_change(good, target / "changed", lambda t: void(change(t))))

    @pytest.mark.parametrize("name", KINDS)
    def test_every_kind_passes_all_checks(self, root: Path, name: str) -> None:
        kind = KINDS[name]
        result = self.check(root, self.adapter(root, name), name)
        assert refusals(result) == set(), result["findings"]
        measured = result["measurements"]
        assert measured["checksRun"] == ALL_CHECKS
        assert measured["residentBytes"]["measured"] == measured["residentBytes"]["predicted"]
        assert measured["effect"]["maxDifference"] > 0
        assert measured["mixedBatch"]["mixed"] is kind.mixed
        assert ("MIXED_BATCH_UNSUPPORTED" in codes(result)) is not kind.mixed
        spectrum = measured["spectrum"]["perModule"]
        for module, scaling in kind.scaling.items():
            assert spectrum[module]["scaling"] == pytest.approx(scaling)

    @pytest.mark.parametrize(
        ("name", "module"),
        [
            ("rslora", Q0),
            ("conv1d", "transformer.h.0.attn.c_attn"),
            ("embedding", "transformer.wte"),
            ("fused experts", f"{EXPERTS0}.gate_up_proj"),
            ("fused experts", f"{EXPERTS0}.down_proj"),
        ],
    )
    def test_the_spectrum_is_that_of_the_whole_update(
        self, root: Path, name: str, module: str
    ) -> None:
        folder = self.adapter(root, name)
        spectrum = self.check(root, folder, name)["measurements"]["spectrum"]
        got = spectrum["perModule"][module]
        update = whole_update(load_file(folder / WEIGHTS), module) * got["scaling"]
        sigma = torch.linalg.svdvals(update.double())
        energy = sigma.square()
        assert got["norm"] == pytest.approx(float(energy.sum().sqrt()), rel=1e-5)
        assert got["sigma1"] == pytest.approx(float(sigma.max()), rel=1e-5)
        share = float(energy.amax(dim=-1).sum() / energy.sum())
        assert got["energyShare"] == pytest.approx(share, rel=1e-5)
        assert 0 < got["entropy"] <= math.log(4) + 1e-9
        base = base_weight(self.base(root, KINDS[name]), module)
        assert got["relativeNorm"] == pytest.approx(got["norm"] / float(base.norm()), rel=1e-4)

    def test_norms_are_grouped_by_place_in_a_layer(self, root: Path, good: Path) -> None:
        spectrum = self.check(root, good)["measurements"]["spectrum"]
        of_q = [v["norm"] for k, v in spectrum["perModule"].items() if k.endswith("q_proj")]
        group = spectrum["norms"]["model.layers.*.self_attn.q_proj"]
        assert group["modules"] == len(of_q) == 2
        assert group["norm"] == pytest.approx(math.hypot(*of_q), rel=1e-6)

    def test_a_saved_module_is_measured_against_the_bases(self, root: Path) -> None:
        name = "saved module"
        folder = self.adapter(root, name)
        spectrum = self.check(root, folder, name)["measurements"]["spectrum"]
        saved = load_file(folder / WEIGHTS)[f"{PREFIX}lm_head.weight"].double()
        base = load_file(self.base(root, KINDS[name]) / "model.safetensors")
        head = base["model.embed_tokens.weight"].double()  # the head is tied to it
        expected = float((saved - head).norm())
        assert spectrum["norms"]["lm_head"] == {"modules": 1, "norm": pytest.approx(expected)}
        got = spectrum["perModule"]["lm_head"]["relativeNorm"]
        assert got == pytest.approx(expected / float(head.norm()), rel=1e-4)

    def test_a_magnitude_far_from_the_bases_needs_review(self, root: Path, tmp_path: Path) -> None:
        def change(tensors: Tensors) -> None:
            tensors[f"{PREFIX}{Q0}.lora_magnitude_vector"][3] *= 5

        folder = adapter_change(self.adapter(root, "dora"), tmp_path / "magnitude", change)
        result = self.check(root, folder, "dora")
        found = [f for f in result["findings"] if f["code"] == "SPECTRUM"]
        assert {f["where"] for f in found} == {Q0}
        assert all(f["got"].startswith("anomaly, needs review") for f in found)
        ratio = result["measurements"]["spectrum"]["perModule"][Q0]["magnitudeRatio"]
        assert ratio[1] == pytest.approx(5, rel=0.3)

    def test_a_file_that_overwrites_the_base(self, root: Path, good: Path, tmp_path: Path) -> None:
        key = f"{PREFIX}model.layers.0.self_attn.o_proj.weight"
        result = self.changed(root, good, tmp_path, lambda t: t.update({key: torch.zeros(64, 64)}))
        assert refusals(result) == {"BASE_CHANGED"}
        assert result["measurements"]["checksRun"] == [9, 10, 11]

    def test_a_copied_embedding_that_is_not_the_bases(self, root: Path, tmp_path: Path) -> None:
        name = "embedding with its copy"
        key = f"{PREFIX}model.embed_tokens.base_layer.weight"

        def change(tensors: Tensors) -> None:
            tensors[key][7, 7] += 1

        folder = adapter_change(self.adapter(root, name), tmp_path / "copy", change)
        assert refusals(self.check(root, folder, name)) == {"BASE_CHANGED"}

    def test_a_file_that_overwrites_another_adapter(
        self, root: Path, good: Path, tmp_path: Path
    ) -> None:
        key = f"{PREFIX}{Q0}.lora_A.resident.weight"
        result = self.changed(root, good, tmp_path, lambda t: t.update({key: torch.zeros(2, 64)}))
        assert "OTHER_ADAPTER_CHANGED" in refusals(result)

    def test_a_value_that_is_no_number(self, root: Path, good: Path, tmp_path: Path) -> None:
        def change(tensors: Tensors) -> None:
            tensors[f"{PREFIX}{Q0}.lora_A.weight"][0, 0] = math.nan

        result = self.changed(root, good, tmp_path, change)
        assert refusals(result) == {"VALUE_NOT_FINITE"}
        assert result["measurements"]["checksRun"] == [9, 10]

    def test_an_adapter_without_effect(self, root: Path, good: Path, tmp_path: Path) -> None:
        def change(tensors: Tensors) -> None:
            for name, tensor in tensors.items():
                if "lora_B" in name:
                    tensor.zero_()

        assert refusals(self.changed(root, good, tmp_path, change)) == {"NO_EFFECT"}

    def test_a_base_that_changed_in_memory_is_no_finding(self, root: Path, good: Path) -> None:
        base = self.load(self.base(root, KINDS["lora in 32 bits"]))
        with torch.no_grad():
            base.model.lm_head.weight[0, 0] += 1
        result = run(base, good)
        assert result.keys() == {"fault"}
        assert result["fault"].startswith("BASE_DIFFERS: parameters in memory")

    @pytest.mark.parametrize("dtype", ["32 bits", "bfloat16", "float16"])
    def test_a_mixed_batch_that_takes_one_adapter_for_another(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        swap = {"candidate": "resident", "resident": "candidate"}
        _rows_change(monkeypatch, lambda names: [swap.get(name, name) for name in names])
        name = f"lora in {dtype}"
        result = self.check(root, self.adapter(root, name), name)
        assert refusals(result) == {"MIXED_BATCH_DIFFERS"}

    def test_a_mixed_batch_that_touches_the_bases_rows(
        self, root: Path, good: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _rows_change(monkeypatch, lambda names: [n.replace("__base__", "resident") for n in names])
        found = self.check(root, good)["findings"]
        differs = [f for f in found if f["code"] == "MIXED_BATCH_DIFFERS"]
        assert {f["where"].rpartition(" ")[2] for f in differs} == {"__base__"}

    def test_a_declared_quantization_that_the_base_has_not(
        self, root: Path, good: Path, tmp_path: Path
    ) -> None:
        for declared, expected in (("none", False), ("bitsandbytes-4bit", True)):
            folder = adapter_change(good, tmp_path / declared, lambda _: None)
            declaration = json.dumps({"baseQuantization": declared})
            (folder / "adapter-declaration.json").write_text(declaration)
            result = self.check(root, folder)
            assert refusals(result) == set()
            assert ("QUANTIZATION_DIFFERS" in codes(result)) is expected


def run(base: LoadedBase, folder: Path) -> dict[str, Any]:
    """All checks of the adapter in ``folder``."""
    facts = [{"path": f.path, "digest": f.digest, "size": f.size} for f in facts_of(folder)]
    return adapter_check(base, {"dir": str(folder), "files": facts})


def codes(result: dict[str, Any]) -> set[str]:
    return {str(finding["code"]) for finding in result["findings"]}


def refusals(result: dict[str, Any]) -> set[str]:
    return {str(f["code"]) for f in result["findings"] if f["severity"] == "refuse"}


def void(_: object) -> None:
    """For changes that are expressions."""


def whole_update(tensors: Tensors, module: str) -> torch.Tensor:
    """B·A of a module as one matrix, or one an expert; from the file, by the format's own rules."""
    path, _, parameter = f"{PREFIX}{module}".rpartition(".")
    # PEFT nests the wrappers of two parameters: the first is the inner one.
    nested = {"gate_up_proj": f"{path}.base_layer", "down_proj": path}
    if parameter in nested and f"{path}.lora_A.weight" in tensors:
        down = tensors[f"{nested[parameter]}.lora_A.weight"]
        up = tensors[f"{nested[parameter]}.lora_B.weight"]
        experts = down.shape[0] // 4
        return torch.einsum(
            "ore,eri->eoi", up.reshape(len(up), 4, experts), down.reshape(experts, 4, -1)
        )
    if f"{PREFIX}{module}.lora_embedding_A" in tensors:
        up = tensors[f"{PREFIX}{module}.lora_embedding_B"]
        return up @ tensors[f"{PREFIX}{module}.lora_embedding_A"]
    return tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


def base_weight(base: Path, module: str) -> torch.Tensor:
    """The base's weight of a module, or of all its experts together, from its file."""
    tensors = load_file(base / "model.safetensors")
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"]
    layer = module.partition(".mlp.")[0]
    parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[module.rpartition(".")[2]]
    found = [
        tensor.flatten()
        for name, tensor in tensors.items()
        if name.startswith(layer) and name.endswith(tuple(f".{part}.weight" for part in parts))
    ]
    return torch.cat(found)


def _rows_change(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]]) -> None:
    """A PEFT whose linear layers take the rows of a mixed batch for other adapters' rows."""
    mixed = Linear._mixed_batch_forward

    def other(self: Any, x: Any, *args: Any, adapter_names: list[str], **options: Any) -> Any:
        return mixed(self, x, *args, adapter_names=change(adapter_names), **options)

    monkeypatch.setattr(Linear, "_mixed_batch_forward", other)
