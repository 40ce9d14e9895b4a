"""What a node did with every request: the one tuple at each stage, and whose KV is kept where."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
import torch

from gpu_worker.serving.identity import FORMAT_VERSION, root_key
from gpu_worker.serving.meter import RequestTuple
from gpu_worker.serving.prefix import Block
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import CANCELLED
from gpu_worker.serving.slot_sidecar import sidecar_parse
from gpu_worker.serving.slot_state import state_decode
from tests.integration.soak_world import CANARIES, WORDS, Cold, Who, watch
from tests.integration.turn_world import context_make


class Witness:
    """Sees every request at each stage of its way, by its id, and every block that is shared.

    Where a stage knows parts of a tuple only, they have to be those of one tuple; else None is
    what was seen.
    """

    def __init__(self, node: Any, people: Sequence[Who], patch: pytest.MonkeyPatch) -> None:
        self.minted: dict[str, RequestTuple] = {}
        self.seen: dict[str, dict[str, set[RequestTuple | None]]] = {}
        self.published: list[tuple[bytes, Block]] = []
        self.reused: Counter[str] = Counter()
        self._engine, self._lock, self._own = node.engine, threading.Lock(), threading.local()
        runtime = node.turns._runtime
        self._roots: dict[bytes | None, RequestTuple] = {}
        self._runs = {who.tuple(node.base): who.runs for who in people}
        for who in people:
            context = context_make(
                who.digest,
                tenant_id=who.tenant_id,
                tokenizer_digest=node.base.tokenizer_digest,
                chat_template_digest=node.base.chat_template_digest,
            )
            self._roots[root_key(runtime.identity(context))] = who.tuple(node.base)
        assert len(self._roots) == len(people)
        recorder = node.completions.recorder
        watch(patch, node.completions, "start", self._started)
        watch(patch, node.engine, "submit", self._admitted)
        watch(patch, node.engine._runner, "forward", self._stepped)
        watch(patch, node.engine._requests, "_leave", self._left)
        watch(patch, node.engine._prefix, "publish", lambda *seen, **_: self.published.append(seen))
        watch(patch, recorder, "ended", self._ended)
        watch(patch, recorder._meter, "count", self._metered)

    def _note(self, request_id: str, stage: str, who: RequestTuple | None) -> None:
        with self._lock:
            self.seen.setdefault(request_id, {}).setdefault(stage, set()).add(who)

    def _started(self, token: str, *_: Any, request_id: str, **__: Any) -> None:
        self._note(request_id, "minted", self.minted[token])

    def _admitted(self, job: Any) -> None:
        request = _request_of(job)
        self._note(request.request_id, "admitted", request.who)

    def _stepped(self, step: Any) -> None:
        for sequence in step.sequences:
            self._note_sequence("step", sequence)

    def _left(self, sequence: Any, reason: str, *_: Any) -> None:
        if reason == CANCELLED:
            self._note_sequence("cancelled", sequence)
        self._note_sequence("left", sequence)
        if sequence.generation.reused_tokens:
            self.reused["prefix" if sequence.blocks else "slot"] += 1

    def _note_sequence(self, stage: str, sequence: Any) -> None:
        job, engine = sequence.job, self._engine
        who: RequestTuple | None = self._roots.get(job.root_key)
        if who is not None:
            key = self._runs[who]
            row = {r: k for k, r in engine._rows.items()}.get(sequence.bank_row)
            # One that never left the queue has no row yet.
            ran = key if sequence.lane < 0 else row
            if (job.tenant, job.adapter, ran) != (who.tenant_id, key, key):
                who = None
        self._note(_request_of(job).request_id, stage, who)

    def _ended(self, running: Any) -> None:
        self._own.request_id = running.request.request_id

    def _metered(self, who: RequestTuple, _: Any) -> None:
        self._note(self._own.request_id, "metered", who)

    def check(self, lines: Sequence[dict[str, Any]]) -> None:
        """One tuple at every stage of a request; whoever was admitted left, was metered, logged."""
        for line in lines:
            if "requestId" in line and "tenantId" in line:
                self._note(line["requestId"], "logged", _logged(line))
        for stages in self.seen.values():
            (who,) = stages["minted"]
            assert who is not None
            assert all(found == {who} for found in stages.values()), stages
            assert "admitted" not in stages or {"left", "metered", "logged"} <= stages.keys()

    def requests(self, *stages: str) -> int:
        """How many requests went through all of these stages."""
        return sum(seen.keys() >= set(stages) for seen in self.seen.values())


def blocks_check(node: Any, witness: Witness, cold: Cold) -> None:
    """Every block that was ever shared is to the bit what its owner alone makes of its tokens.

    What is left of them belongs to adapters that are here still, and to the base.
    """
    assert witness.published
    for key, block in witness.published:
        alone = cold.blocks[key]
        assert (block.tenant, block.adapter) == (alone.tenant, alone.adapter)
        for ours, theirs in ((block.kv.keys, alone.kv.keys), (block.kv.values, alone.kv.values)):
            assert all(map(torch.equal, ours, theirs))
    owners = {block.adapter for block in node.engine._prefix._blocks.values()}
    assert owners
    assert owners <= {None, *(item.key for item in node.residents.residents())}


def pages_check(node: Any, people: Sequence[Who], revoked: Sequence[Who]) -> None:
    """Every session on disk says no other canary than that of the adapter that it belongs to."""
    owners = {who.key: who for who in people}
    entries = node.slots.entries()
    assert entries
    for entry in entries:
        who = owners[Key(entry.tenant_id, entry.adapter_digest)]
        content = node.slots._pages.sidecar(entry.page)
        sidecar = sidecar_parse(content, FORMAT_VERSION)
        of = sidecar.identity
        assert (of.tenant_id, of.adapter_digest) == who.key
        plain = node.slots._key.open(node.slots._pages.state(entry.page), content)
        state = state_decode(of, sidecar.token_count, plain)
        assert foreign(who, [WORDS[token] for token in state.tokens]) == set()
        assert who not in revoked


def foreign(who: Who, words: Sequence[str]) -> set[str]:
    """Canaries that are not this one's."""
    return set(words) & set(CANARIES) - {who.canary}


def _request_of(job: Any) -> Any:
    """The request whose sequence a job is."""
    return job.on_end.__self__.request


def _logged(line: dict[str, Any]) -> RequestTuple:
    """The tuple of a line of the log."""
    digests = (line[name] for name in ("baseDigest", "adapterDigest", "tokenizerDigest"))
    return RequestTuple(UUID(line["tenantId"]), *digests)
