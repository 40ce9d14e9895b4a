"""Who runs next: requests join and leave between steps, and a step has a budget of tokens.

Tenants take turns to join: next is who has the fewest requests running. A tenant's share of the
lanes is bounded, since a lane is never taken from a request that runs. Running requests come
first, one token each; what is left of the budget goes to prompts, oldest first, in segments that
end at the borders of blocks. How a prompt is cut depends on nothing but
itself and what was cached of it, so that neighbours cannot change its arithmetic.
"""

from __future__ import annotations

from collections import Counter, deque

from gpu_worker.serving.sequence import Sequence
from gpu_worker.serving.step import Segment, Step, step_of
from gpu_worker.serving.workspace import BLOCK_TOKENS


class Scheduler:
    """Waiting and running sequences. The caller takes lanes and bank rows."""

    def __init__(self, step_tokens: int, *, tenant_most: int = 0, grouped: bool = False) -> None:
        """``grouped`` runs sequences of one bank row a step, the row that waited longest.

        Of one tenant at most ``tenant_most`` run; 0 is no bound.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._step_tokens = step_tokens
        self._tenant_most = tenant_most
        self.grouped = grouped
        self._ran: dict[int, int] = {}
        self._steps = 0

    def next_waiting(self) -> Sequence | None:
        """Who joins next: of the tenants that have the fewest running, who waited longest.

        None when nobody waits whose tenant may have another one; what is nobody's has no bound.
        """
        running = Counter(sequence.job.tenant for sequence in self.running)
        most = self._tenant_most or len(self.running) + 1
        may = [s for s in self.waiting if s.job.tenant is None or running[s.job.tenant] < most]
        return min(may, key=lambda sequence: running[sequence.job.tenant], default=None)

    def plan(self) -> Step | None:
        """The next step, or None when nothing runs."""
        candidates = self._group() if self.grouped else self.running
        if not candidates:
            return None
        # By lane: lanes that follow each other are read without a copy.
        decode = [
            Segment(s, 0, 1, s.cached)
            for s in sorted(candidates, key=lambda s: s.lane)
            if s.cached >= len(s.job.prompt)
        ]
        room = self._step_tokens - len(decode)
        prefill: list[Segment] = []
        for sequence in candidates:
            segments = _segments(sequence, room)
            room -= sum(segment.count for segment in segments)
            prefill += segments
        return step_of(decode, prefill)

    def _group(self) -> list[Sequence]:
        rows = {sequence.bank_row for sequence in self.running}
        self._ran = {row: self._ran.get(row, 0) for row in rows}
        if not rows:
            return []
        self._steps += 1
        row = min(rows, key=lambda r: (self._ran[r], r))
        self._ran[row] = self._steps
        return [sequence for sequence in self.running if sequence.bank_row == row]


def _segments(sequence: Sequence, room: int) -> list[Segment]:
    """The next segments of a prompt: as many whole ones as there is room for."""
    segments = []
    position, end = sequence.cached, len(sequence.job.prompt)
    while position < end:
        count = min(BLOCK_TOKENS - position % BLOCK_TOKENS, end - position)
        if count > room:
            break
        segments.append(Segment(sequence, 0, count, position))
        position, room = position + count, room - count
    return segments
