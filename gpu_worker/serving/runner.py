"""One forward: a step in, logits out. Owns the model, its bank and its lanes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gpu_worker.serving.bank import Bank, placeable
from gpu_worker.serving.batch import Batch, least_rows
from gpu_worker.serving.inspection import Inspection, forward, inspect_base
from gpu_worker.serving.lanes import Lanes
from gpu_worker.serving.linear import Current, Stacked, StackedEmbedding, StackedHead, StackedLinear
from gpu_worker.serving.sequence import EngineError
from gpu_worker.serving.step import Step
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace, row_sizes


class Runner:
    """A base with its bank and lanes. Everything here belongs on one thread."""

    def __init__(self, model: PreTrainedModel, workspace: Workspace) -> None:
        """Look at a base, wrap its modules, and take the workspace.

        Raises:
            EngineError: the engine cannot run it, with the reason.
        """
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        found = inspect_base(model, workspace.lane_tokens)
        self.bank = Bank(
            _targeted(found.modules, workspace.targets), workspace.adapters, workspace.rank
        )
        weight: Tensor = found.head.weight
        self.lanes = Lanes(
            found.layers,
            workspace.lanes,
            workspace.lane_tokens,
            dtype=weight.dtype,
            device=model.device,
        )
        sizes = [min(s.key_size, s.value_size) * s.heads * BLOCK_TOKENS for s in found.layers]
        self._least_rows = least_rows(min(sizes), model.device, weight.dtype)
        self._current = Current()
        self._wrap(found, workspace)

    def forward(self, step: Step) -> Tensor:
        """Logits (emitting segments, vocabulary) of a step, whose KV is in the lanes afterwards.

        A forward that raised may be run again: it only wrote what the next one writes anew.
        """
        for segment in step.segments:
            self.lanes.extend(segment.sequence.lane, segment.end)
        with torch.inference_mode():
            batch = Batch(step, self.lanes, self.model.device, self._least_rows)
            with self._current.of(batch):
                logits = forward(self.model, batch.tokens, batch, batch.positions, batch.keep)
            return logits[: len(step.emitting)]

    def _wrap(self, found: Inspection, workspace: Workspace) -> None:
        for name, module in found.flat.items():
            if self.model.device.type == "cpu" and rows_at_once(module, workspace.step_tokens):
                raise EngineError(
                    f"{name}: its rows depend on how many there are, and it cannot be cut"
                )
        measured: dict[tuple[object, ...], int | None] = {}
        for name, module in found.modules.items():
            is_head = module is found.head
            wrapper = _wrapper(module, is_head=is_head)(
                module, self._current, self.bank.stacks.get(name)
            )
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, wrapper)
            if self.model.device.type != "cpu" or isinstance(module, nn.Embedding):
                continue
            # Modules of one kind and size run the same kernels.
            kind = (type(module), tuple(module.weight.shape), is_head)
            if kind not in measured:
                most = workspace.lanes if is_head else workspace.step_tokens
                measured[kind] = rows_at_once(module, most)
            wrapper.most_rows = measured[kind]


def rows_at_once(module: nn.Module, most: int) -> int | None:
    """The largest number of rows up to which a row's product does not depend on how many there are.

    None when that holds for ``most`` rows. Matrix libraries choose their kernels by size, and
    some of them round differently.

    Raises:
        EngineError: it does not hold even for the smallest sizes.
    """
    with torch.inference_mode():
        size_in = module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(size_in, generator=generator).to(module.weight.dtype)
        expected: Tensor | None = None
        good = 0
        for count in row_sizes(most):
            got = module(row.expand(1, count, size_in).contiguous())[0]
            expected = got[0].clone() if expected is None else expected
            if not torch.equal(got, expected.expand_as(got)):
                break
            good = count
    if good == 0:
        raise EngineError("a product depends on the place of a row in it")
    return None if good == list(row_sizes(most))[-1] else good


def _targeted(
    modules: Mapping[str, nn.Module], targets: frozenset[str] | None
) -> Mapping[str, nn.Module]:
    return {
        name: module
        for name, module in modules.items()
        if placeable(module) and (targets is None or name.rpartition(".")[2] in targets)
    }


def _wrapper(module: nn.Module, *, is_head: bool) -> type[Stacked]:
    if is_head:
        return StackedHead
    return StackedEmbedding if isinstance(module, nn.Embedding) else StackedLinear
