"""How much room an engine takes, fixed when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 64
"""Tokens of a block: prefill never crosses its border, and prefixes are shared in whole ones."""

ROW_STEP: Final = 16
"""Rows of a product are padded to a multiple of this: smaller sizes choose other kernels, which
round differently (MKL at 8 rows and at 16)."""

_LANE_TOKENS: Final = 2048


class WorkspaceError(ValueError):
    """Sizes that do not fit each other."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The sizes of an engine.

    ``lanes`` requests run at once, each with room for ``lane_tokens`` tokens of prompt and answer;
    of one tenant at most ``tenant_lanes``, or with 0 as many as there are.
    The bank holds ``adapters`` adapters of at most ``rank``; every adapter pays for that rank.
    ``targets`` names the modules that have a place in the bank, by their last names; None is all
    that can have one. A step runs at most ``step_tokens`` tokens. ``outstanding`` requests may be
    waiting or running. Prefix blocks take at most ``tenant_bytes`` per tenant and ``prefix_bytes``
    in all. ``grouped`` runs one adapter a step, where mixing them is not exact.
    """

    lanes: int = 16
    lane_tokens: int = _LANE_TOKENS
    tenant_lanes: int = 0
    adapters: int = 16
    rank: int = 16
    targets: frozenset[str] | None = None
    step_tokens: int = 512
    outstanding: int = 128
    tenant_bytes: int = 64 * 2**20
    prefix_bytes: int = 256 * 2**20
    grouped: bool = False

    @classmethod
    def of(cls, positions: int, *, lanes: int = 16, tokens: int = _LANE_TOKENS) -> Workspace:
        """Lanes of whole blocks with room for ``tokens``, no longer than the base's positions."""
        wanted = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        return cls(lanes=lanes, lane_tokens=min(wanted, positions // BLOCK_TOKENS * BLOCK_TOKENS))

    def __post_init__(self) -> None:
        if min(self.lanes, self.adapters, self.rank, self.outstanding) < 1:
            raise WorkspaceError("expected at least one lane, adapter, rank and request")
        if self.lane_tokens < BLOCK_TOKENS or self.lane_tokens % BLOCK_TOKENS:
            raise WorkspaceError(f"lane_tokens: expected a multiple of {BLOCK_TOKENS}")
        # Otherwise a full house of running requests leaves no room for a prompt to advance.
        if self.step_tokens < self.lanes + BLOCK_TOKENS:
            raise WorkspaceError(f"step_tokens: expected at least {self.lanes + BLOCK_TOKENS}")


def rows_padded(count: int) -> int:
    """The next multiple of ``ROW_STEP``."""
    return -(-count // ROW_STEP) * ROW_STEP


def row_sizes(most: int) -> Iterable[int]:
    """Every padded number of rows up to that of ``most`` rows."""
    return range(ROW_STEP, rows_padded(most) + 1, ROW_STEP)
