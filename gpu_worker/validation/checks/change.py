"""What a loaded adapter does to each module of the base, in numbers, for every kind of layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper

from gpu_worker.validation.checks.candidate import CANDIDATE, PREFIX, base_name

DOUBLE_RANK: Final = 64
"""Up to this rank the factors are computed in double precision."""


@dataclass(frozen=True, slots=True)
class Energy:
    """How the update's energy Σσ² spreads over its directions.

    ``share`` is σ1²/Σσ², ``entropy`` that of σ²/Σσ² in nats. A stack of experts counts as one: its
    ``sigma1`` is the largest of all, share and entropy are means weighted by energy.
    """

    scaling: float
    rank: int
    sigma1: float
    share: float
    entropy: float


@dataclass(frozen=True, slots=True)
class Change:
    """One module's change: its Frobenius norm, and that over the base weight's.

    Norm and energy of a DoRA module are those of its direction s·B·A; ``magnitude`` is the smallest
    and the largest of its magnitudes over the base's column norms. Replaced tensors (saved modules,
    trained tokens) have no energy.
    """

    module: str
    norm: float
    relative: float
    energy: Energy | None = None
    magnitude: tuple[float, float] | None = None


def changes(model: PeftModel) -> Iterator[Change]:
    """The changes that the candidate makes, module by module."""
    for name, module in model.named_modules():
        place = base_name(name.removeprefix(PREFIX))
        if isinstance(module, LoraLayer) and CANDIDATE in module.scaling:
            yield _lora(place, module)
        elif isinstance(module, TrainableTokensLayer):
            if module.tied_adapter is None and CANDIDATE in module.trainable_tokens_delta:
                before = module.trainable_tokens_original[CANDIDATE]
                yield _replaced(place, module.trainable_tokens_delta[CANDIDATE], before)
        elif isinstance(module, ModulesToSaveWrapper) and CANDIDATE in module.modules_to_save:
            for part, saved in module.modules_to_save[CANDIDATE].named_modules():
                before = list(module.original_module.get_submodule(part).parameters(recurse=False))
                after = list(saved.parameters(recurse=False))
                if after:
                    yield _replaced(f"{place}.{part}".rstrip("."), _flat(after), _flat(before))


def _lora(place: str, layer: Any) -> Change:
    up, down = _factors(layer)
    rank = up.shape[-1]
    dtype = torch.float64 if rank <= DOUBLE_RANK else torch.float32
    left = torch.linalg.qr(up.detach().to(dtype), mode="r").R
    right = torch.linalg.qr(down.detach().to(dtype).mT, mode="r").R
    scaling = float(layer.scaling[CANDIDATE])
    sigma = abs(scaling) * torch.linalg.svdvals(left @ right.mT)
    norm = float(torch.linalg.vector_norm(sigma))
    if isinstance(layer, ParamWrapper):
        place, weight = f"{place}.{layer.parameter_name}", layer.get_param()
    else:
        weight = getattr(layer.get_base_layer(), "weight", None)
    energy = _energy(scaling, rank, sigma)
    return Change(place, norm, _relative(norm, weight), energy, _magnitude(layer, weight))


def _factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """B as (…, out, r) and A as (…, r, in), with a leading dimension for stacked experts."""
    if CANDIDATE in layer.lora_embedding_A:
        return layer.lora_embedding_B[CANDIDATE], layer.lora_embedding_A[CANDIDATE]
    down, up = layer.lora_A[CANDIDATE].weight, layer.lora_B[CANDIDATE].weight
    if isinstance(layer, ParamWrapper):
        # The order that PEFT reads them in: experts lead in A and trail in B.
        experts = layer.num_experts
        stacked = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)
        return stacked, down.reshape(experts, -1, down.shape[-1])
    up, down = up.flatten(1), down.flatten(1)
    groups = getattr(layer.get_base_layer(), "groups", 1)
    # A convolution's group of outputs sees its own share of the rank only.
    return (torch.block_diag(*up.chunk(groups)) if groups > 1 else up), down


def _energy(scaling: float, rank: int, sigma: torch.Tensor) -> Energy:
    squares = sigma.square()
    total = float(squares.sum())
    if total <= 0:
        return Energy(scaling, rank, 0.0, 0.0, 0.0)
    # One row an expert; xlogy makes 0·log 0 zero.
    each = squares.reshape(-1, squares.shape[-1])
    parts = each / each.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(each.dtype).tiny)
    entropy = -torch.special.xlogy(parts, parts).sum(dim=-1)
    weighted = float((entropy * each.sum(dim=-1)).sum()) / total
    return Energy(
        scaling, rank, float(sigma.max()), float(squares.amax(dim=-1).sum()) / total, weighted
    )


def _magnitude(layer: Any, weight: torch.Tensor | None) -> tuple[float, float] | None:
    if CANDIDATE not in layer.lora_magnitude_vector or weight is None:
        return None
    dora = layer.lora_magnitude_vector[CANDIDATE]
    # PEFT's own norm of W + 0: it knows the axis for each kind of layer.
    plain = weight.detach().float()
    norms = dora.get_weight_norm(plain, plain.new_zeros(()), 1.0).flatten()
    ratio = dora.weight.detach().float().flatten() / norms
    ratio = torch.where(ratio.isnan(), torch.ones_like(ratio), ratio)
    return float(ratio.min()), float(ratio.max())


def _replaced(place: str, after: torch.Tensor, before: torch.Tensor) -> Change:
    change = after.detach().float() - before.detach().float()
    norm = float(torch.linalg.vector_norm(change, dtype=torch.float64))
    return Change(place, norm, _relative(norm, before))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _relative(norm: float, weight: torch.Tensor | None) -> float:
    # A quantized weight is packed: its bytes have no norm to compare with.
    if weight is None or not weight.is_floating_point():
        return math.inf
    base = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32))
    return norm / base if base > 0 else (math.inf if norm > 0 else 0.0)
