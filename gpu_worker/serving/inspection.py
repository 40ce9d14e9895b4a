"""What a base is to the engine, found out by one forward before it serves; or why it cannot.

Nothing that changes a result is ever ignored: a base is refused unless every layer's attention goes
through the interface, unless the engine knows which keys each layer sees, and unless the positions
of a request decide its rotations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gpu_worker.serving import attention
from gpu_worker.serving.bank import product
from gpu_worker.serving.lanes import LayerShape
from gpu_worker.serving.sequence import EngineError
from gpu_worker.serving.workspace import ROW_STEP

_SLIDING: Final = "sliding_attention"
_MASKS: Final = frozenset({"full_attention", _SLIDING})
# Rotations that change for every position once any one in the batch is beyond a length.
_BY_LENGTH: Final = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Inspection:
    """A base's attention layers, the modules that see each token once, and its output head.

    ``flat`` see each token once too, in a shape that adapters have no place for.
    """

    layers: tuple[LayerShape, ...]
    modules: Mapping[str, nn.Module]
    flat: Mapping[str, nn.Module]
    head: nn.Module


class _Probe:
    """Attends to nothing, and notes what each layer would keep."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: attention.Scores
    ) -> Tensor:
        """Zeros of the right shape."""
        self.calls += 1
        self.windows[layer] = scores.window
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def inspect_base(model: PreTrainedModel, lane_tokens: int) -> Inspection:
    """Switch a model to the engine's attention and look at it.

    Raises:
        EngineError: the engine cannot run it, with the reason.
    """
    name = type(model).__name__
    _positions_check(model, lane_tokens)
    try:
        model.set_attn_implementation(attention.NAME)
    except ValueError as error:
        raise EngineError(f"{name}: takes no other attention than its own: {error}") from error
    probe = _Probe()
    head = model.get_output_embeddings()
    with torch.inference_mode(), _rows_noted(model) as rows:
        try:
            # Different tokens: experts share them out.
            forward(model, torch.arange(ROW_STEP)[None] % _vocabulary(model), probe)
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error
        except TypeError as error:
            raise EngineError(
                f"{name}: it does not pass keyword arguments on to its attention, so that the "
                f"engine cannot reach it: {error}"
            ) from error
    count = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(count)) or probe.calls != count:
        raise EngineError(
            f"{name}: expected {count} layers to attend through transformers' AttentionInterface, "
            f"got {len(probe.layers)}; a base that attends in its own way is not served"
        )
    _masks_check(model, probe.windows, lane_tokens)
    layers = tuple(probe.layers[i] for i in range(count))
    return Inspection(layers, *_modules(model, rows, head), head)


def _modules(
    model: PreTrainedModel, rows: Mapping[str, list[_Rows]], head: nn.Module
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The modules that see each token once, and those that do so flat."""
    name = type(model).__name__
    modules = {n: m for n, m in model.named_modules() if rows.get(n) == [_Rows.EACH]}
    flat = {n: m for n, m in model.named_modules() if rows.get(n) == [_Rows.FLAT]}
    loose = sorted(rows.keys() - modules.keys() - flat.keys())
    if loose and model.device.type == "cpu":
        raise EngineError(
            f"{name}: {loose[0]}: expected a module that sees each token once, got one of which "
            "other requests choose how many rows it multiplies (experts do so); no row of such a "
            "base keeps its bits on the CPU"
        )
    if not any(module is head for module in modules.values()):
        raise EngineError(f"{name}: expected an output head that sees each token once")
    return modules, flat


def forward(
    model: PreTrainedModel,
    tokens: Tensor,
    attending: attention.Attending,
    positions: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Logits (rows, vocabulary) of flat tokens (1, N), of all or of the ``keep`` indices."""
    device = model.device
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=device)[None]
    output: Any = model(
        input_ids=tokens.to(device),
        position_ids=positions,
        use_cache=False,
        attending=attending,
        logits_to_keep=0 if keep is None else keep,
    )
    logits: Tensor = output.logits[0]
    return logits


class _Rows(Enum):
    """Which rows of a step a module multiplies in one call."""

    EACH = "each token once, as (1, tokens, size)"
    FLAT = "each token once, as (tokens, size)"
    OTHER = "some, or in another way"


@contextmanager
def _rows_noted(model: nn.Module) -> Iterator[dict[str, list[_Rows]]]:
    """Note the calls of each module that multiplies, by its name, while the context lasts.

    A lookup that is not over the tokens is no product and is not noted.
    """
    found: dict[str, list[_Rows]] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows = _rows_of(module, inputs, named)
            if rows is _Rows.EACH or not isinstance(module, nn.Embedding):
                found.setdefault(name, []).append(rows)

        return hook

    modules = [(n, m) for n, m in model.named_modules() if product(m) or _holds_stacks(m)]
    handles = [m.register_forward_pre_hook(note(name), with_kwargs=True) for name, m in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _rows_of(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> _Rows:
    # A module with more inputs than one computes something else.
    if not product(module) or len(inputs) != 1 or named:
        return _Rows.OTHER
    shape = tuple(inputs[0].shape)
    if not isinstance(module, nn.Embedding):
        shape = shape[:-1]
    return {(1, ROW_STEP): _Rows.EACH, (ROW_STEP,): _Rows.FLAT}.get(shape, _Rows.OTHER)


def _holds_stacks(module: nn.Module) -> bool:
    """True when a module has weights stacked in one tensor, as fused experts have."""
    return any(parameter.ndim > 2 for parameter in module.parameters(recurse=False))


def _vocabulary(model: PreTrainedModel) -> int:
    count: int = model.get_input_embeddings().weight.shape[0]
    return count


def _masks_check(
    model: PreTrainedModel, windows: Mapping[int, int | None], lane_tokens: int
) -> None:
    """Models tell their mask function which keys a layer sees, and the engine has none."""
    name, config = type(model).__name__, model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    chunk = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in kinds and (chunk is None or chunk < lane_tokens):
        raise EngineError(
            f"{name}: attends in chunks of {chunk} tokens, which is not implemented; "
            f"expected lanes of at most that, got {lane_tokens}"
        )
    unknown = sorted(set(kinds) - _MASKS - {"chunked_attention"})
    if unknown:
        raise EngineError(f"{name}: attention of kind {', '.join(unknown)} is not implemented")
    for layer, kind in enumerate(kinds):
        if kind == _SLIDING and windows.get(layer) is None:
            raise EngineError(
                f"{name}: layer {layer}: expected the window of {_SLIDING} with its attention, "
                "got none"
            )


def _positions_check(model: PreTrainedModel, lane_tokens: int) -> None:
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or lane_tokens
    if lane_tokens > positions:
        raise EngineError(f"expected lanes of at most the base's {positions}, got {lane_tokens}")
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for each in nested or [parameters]:
        if each.get("rope_type") not in _BY_LENGTH:
            continue
        most = each.get("original_max_position_embeddings") or config.max_position_embeddings
        if lane_tokens > most:
            raise EngineError(
                f"{type(model).__name__}: its rotations depend on the longest request beside one "
                f"beyond {most} tokens; expected lanes of at most that, got {lane_tokens}"
            )
