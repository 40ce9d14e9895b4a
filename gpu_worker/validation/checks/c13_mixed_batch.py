"""Check 13: rows of several adapters in one batch answer as each adapter does alone.

One batch holds rows of the candidate, of the resident adapter and of the bare base. While it runs,
each module with adapters on it is run again on the very same input under one adapter alone, and its
rows are compared: a row of the base exactly, one of an adapter within the rounding of the dtype.
All the rest of a model works row by row, so modules that agree make answers that agree. Whole
answers are not compared: in 16 bits the rounding of a first layer grows, through the layers, to the
size of what a small adapter does, and such a comparison would see nothing. The bounds are those of
arithmetic, so they hold on every device; on CPUs correct batches stay below half of them.

Some kinds PEFT does not mix, which this check reports: an engine that runs adapters as PEFT does
has to give them batches of their own. PEFT leaves its hooks behind when a mixed batch fails, so
this check runs last, and the process ends after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from gpu_worker.validation.checks.candidate import CANDIDATE, PREFIX, RESIDENT, base_name, reading
from gpu_worker.validation.checks.inputs import Inputs, logits_of, rows_make
from registry_service.domain.findings import Check, Code, Finding, info, refuse

BASE_ROW: Final = "__base__"
"""PEFT's own word for a row without an adapter."""
ROWS: Final = (CANDIDATE, RESIDENT, BASE_ROW, CANDIDATE)
TOKENS: Final = 4
"""Tokens of each row, the last of those given: what an embedding's adapter touches comes last."""
NOISE: Final = 1e-5
"""Of a row's largest output: the difference that products over fewer rows in 32 bits may make.
Measured on CPUs: none."""
FINDINGS: Final = 32


@dataclass(slots=True)
class _Comparison:
    """What the modules' rows have shown so far. ``worst`` is the largest share of the bound."""

    findings: list[Finding] = field(default_factory=list)
    modules: int = 0
    worst: float = 0.0


def mixed_batch_check(model: PeftModel, inputs: Inputs) -> tuple[list[Finding], dict[str, Any]]:
    """Compare a mixed batch's rows with the same rows alone; ``inputs`` is one row.

    Raises:
        CheckFaultError: memory ran out.
    """
    batch = rows_make(inputs, len(ROWS), TOKENS)
    comparison = _Comparison()
    failed: list[Finding] = []
    # What PEFT does with a batch's rows depends on the active adapter for some kinds.
    model.set_adapter(CANDIDATE)
    with reading(Check.MIXED_BATCH, "mixed batch", failed), _compared(model, comparison):
        logits_of(model, batch, adapter_names=list(ROWS))
    if failed:
        expected = "rows of several adapters in one batch"
        got = f"{failed[0].got}: PEFT runs it in batches of its own only"
        code = Code.MIXED_BATCH_UNSUPPORTED
        return [info(Check.MIXED_BATCH, code, "adapter", expected, got)], {"mixed": False}
    if comparison.modules == 0:
        expected, got = "modules that run in a mixed batch", "none"
        comparison.findings.append(
            refuse(Check.MIXED_BATCH, Code.MIXED_BATCH_DIFFERS, "adapter", expected, got)
        )
    return comparison.findings[:FINDINGS], {
        "mixed": True,
        "modules": comparison.modules,
        "worstShareOfBound": comparison.worst,
    }


@contextmanager
def _compared(model: PeftModel, comparison: _Comparison) -> Iterator[None]:
    """While this is open, every module with adapters compares its rows as it runs."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (LoraLayer, AuxiliaryTrainingWrapper)):
            place = base_name(name.removeprefix(PREFIX))

            def compare(
                layer: Any, args: Any, options: Any, output: Any, place: str = place
            ) -> None:
                with reading(Check.MIXED_BATCH, place, comparison.findings):
                    _compare(layer, args, dict(options), output, place, comparison)

            handles.append(module.register_forward_hook(compare, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(
    layer: Any,
    args: Any,
    options: dict[str, Any],
    output: torch.Tensor,
    place: str,
    comparison: _Comparison,
) -> None:
    names = options.pop("adapter_names", None)
    comparison.modules += 1
    alone = {name: _alone(layer, name, args, options) for name in dict.fromkeys(ROWS)}
    for row, name in enumerate(ROWS):
        share = _share(output[row], alone[name][row], alone[BASE_ROW][row])
        if name == BASE_ROW and isinstance(layer, LoraLayer) and share > 0:
            share = math.inf  # PEFT adds to other rows only
        comparison.worst = max(comparison.worst, share)
        # Written so that NaN does not pass.
        if names != list(ROWS) or not share <= 1:
            expected = "the row alone, within rounding"
            got = f"{share:.3g} times the bound, among rows of {names}"
            where = f"{place}: row of {name}"
            comparison.findings.append(
                refuse(Check.MIXED_BATCH, Code.MIXED_BATCH_DIFFERS, where, expected, got)
            )


def _alone(layer: Any, name: str, args: Any, options: dict[str, Any]) -> torch.Tensor:
    """What the module answers to the whole batch under one adapter, or under none."""
    if name != BASE_ROW:
        layer.set_adapter(name, inference_mode=True)
    layer.enable_adapters(name != BASE_ROW)
    try:
        # Past the hooks: PEFT's would mix again, and ours compare again.
        result: torch.Tensor = layer.forward(*args, **options)
    finally:
        layer.enable_adapters(True)
        layer.set_adapter(CANDIDATE, inference_mode=True)
    return result


def _share(row: torch.Tensor, alone: torch.Tensor, base: torch.Tensor) -> float:
    """The largest difference as a share of what the rounding of sums and products may make."""
    difference = (row.double() - alone.double()).abs()
    # A mixed batch rounds the adapter's part before it adds it, a plain one afterwards.
    rounding = torch.finfo(row.dtype).eps * (base.double().abs() + 2 * alone.double().abs())
    allowed = rounding + NOISE * alone.double().abs().max() + torch.finfo(torch.float32).tiny
    return float((difference / allowed).max())
