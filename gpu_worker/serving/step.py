"""What one forward runs: decode tokens first, then prefill segments, in one flat row of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu_worker.serving.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence: ``count`` of them at ``start`` of the step, from ``position`` on."""

    sequence: Sequence
    start: int
    count: int
    position: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + self.count

    @property
    def emits(self) -> bool:
        """True when its last token decides the next one."""
        return self.end >= len(self.sequence.job.prompt)

    def tokens(self) -> tuple[int, ...]:
        """Its token ids."""
        prompt = self.sequence.job.prompt
        if self.position >= len(prompt):
            return (self.sequence.produced[self.position - len(prompt)],)
        return prompt[self.position : self.end]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward. A decode segment is one token; a prefill segment stays inside one block."""

    decode: tuple[Segment, ...]
    prefill: tuple[Segment, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, in the order of their tokens."""
        return self.decode + self.prefill

    @property
    def emitting(self) -> tuple[Segment, ...]:
        """The segments whose last token has logits, in the order of the logits."""
        return tuple(segment for segment in self.segments if segment.emits)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Each sequence of the step, once."""
        return tuple(dict.fromkeys(segment.sequence for segment in self.segments))

    def split(self) -> tuple[Step, ...]:
        """One step for each sequence: to find the one that fails."""
        steps = []
        for sequence in self.sequences:
            decode = [s for s in self.decode if s.sequence is sequence]
            prefill = [s for s in self.prefill if s.sequence is sequence]
            steps.append(step_of(decode, prefill))
        return tuple(steps)


def step_of(decode: Many[Segment], prefill: Many[Segment]) -> Step:
    """A step of these segments, wherever they started before."""
    placed, start = [], 0
    for old in (*decode, *prefill):
        placed.append(Segment(old.sequence, start, old.count, old.position))
        start += old.count
    return Step(tuple(placed[: len(decode)]), tuple(placed[len(decode) :]))
