"""A real engine on a tiny base with two adapters, whose sessions take turns over slots."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu_worker.serving.adapter import Adapter, Part
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.identity import Layout
from gpu_worker.serving.ledger import Ledger
from gpu_worker.serving.memory import ledgers_open, storages_bytes
from gpu_worker.serving.parameters import Named, parameters_digest, parameters_named
from gpu_worker.serving.sequence import Job, Sampling
from gpu_worker.serving.slot_events import SlotEvent, SlotEventKind
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slots import Slots
from gpu_worker.serving.turns import Runtime, Turn, Turns, library_versions
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace
from registry_service.domain.digests import Digest, digest_of
from registry_service.trust.routing_context import BASE_MARKER, RoutingContext
from tests.identities import A, B

TENANT_ID = UUID(int=1042)
VOCABULARY = 96
NEW = 12
PROMPT = tuple((7 * n) % 90 + 1 for n in range(80))
"""Past the border of a block."""
NOW = datetime(2026, 11, 30, tzinfo=UTC)


def tiny_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random llama of two layers."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval().requires_grad_(requires_grad=False)


def adapter_make(model: Any, seed: int, rank: int = 4, *, std: float = 0.3) -> Adapter:
    """A random adapter on the attention's projections, strong enough to change answers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return std * torch.randn(*shape, generator=generator)

    parts = {
        name: Part(random(rank, module.in_features), random(module.out_features, rank), 1.0)
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj"))
    }
    return Adapter(parts)


def context_make(digest: Digest, session: str = "s-1", **changes: Any) -> RoutingContext:
    """The routing context of one request."""
    values: dict[str, Any] = {
        "tenant_id": TENANT_ID,
        "tenant": "t-1042",
        "subject": "app",
        "session_id": session,
        "adapter": None if digest == BASE_MARKER else "support-zh",
        "base_digest": digest_of(b"base"),
        "adapter_digest": digest,
        "tokenizer_digest": digest_of(b"tokenizer"),
        "chat_template_digest": digest_of(b"template"),
        "grant_epoch": 1,
        "node": "node-1",
        "jti": "1",
        "issued_at": NOW,
        "expires_at": NOW,
        "body_digest": digest_of(b"body"),
        **changes,
    }
    return RoutingContext(**values)


class Answer(NamedTuple):
    """What a turn answered, how sure of it, and how much of its prompt was not computed again."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reused: int

    def same(self, cold: Answer) -> bool:
        """Equal to a cold run; decode rounds otherwise than prefill, so up to 1e-3."""
        pairs = zip(self.logprobs, cold.logprobs, strict=True)
        return self.tokens == cold.tokens and all(abs(a - b) < 1e-3 for a, b in pairs)


@dataclass
class TurnNode:
    """One start of a node: its engine, slots and turns."""

    engine: Engine
    slots: Slots
    turns: Turns
    base: Named

    def base_digest(self) -> str:
        """A digest of the base's parameters as they are now."""
        return parameters_digest(self.base)

    def taken(self) -> dict[str, int]:
        """Bytes that lie in base, bank, lanes and blocks."""
        engine, found = self.engine, (tensor for _, tensor in self.base)
        stacks = engine._runner.bank.stacks.values()
        blocks = [block.kv for block in engine._prefix._blocks.values()]
        return storages_bytes(
            {
                "base": found,
                "bank": [tensor for stack in stacks for tensor in (stack.a, stack.b, stack.m)],
                "lanes": self.slabs,
                "blocks": [tensor for kv in blocks for tensor in (*kv.keys, *kv.values)],
            }
        )

    @property
    def slabs(self) -> tuple[Tensor, ...]:
        """All that lanes lie in. To be looked at while nothing runs."""
        lanes = self.engine._runner.lanes
        return (*lanes.keys, *lanes.values)

    def lanes_hash(self) -> str:
        """A digest of every byte of every lane."""
        found = hashlib.sha256()
        for slab in self.slabs:
            found.update(slab.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def turn(
        self, digest: Digest, prompt: Sequence[int], session: str = "s-1", **changes: Any
    ) -> Answer:
        """One turn of a session, as a node serves it."""
        return self.go_on(
            self.turns.begin(context_make(digest, session, **changes)), digest, prompt
        )

    def go_on(self, turn: Turn, digest: Digest, prompt: Sequence[int]) -> Answer:
        """The rest of a turn that was begun."""
        try:
            return self.run(
                digest,
                prompt,
                root_key=turn.root_key,
                lane_state=turn.lane_state,
                on_restore_failed=turn.on_restore_failed,
                on_lane_filled=turn.on_lane_filled,
                wants_lane_state=turn.wants_lane_state,
                on_lane_state=turn.on_lane_state,
            )
        finally:
            turn.release()

    def saved(self) -> None:
        """Wait until nothing is being saved or dropped."""
        with self.turns._done:
            self.turns._done.wait_for(lambda: not self.turns._pending)

    def run(
        self, digest: Digest, prompt: Sequence[int], *, new: int = NEW, **options: Any
    ) -> Answer:
        """A single run, cold unless the options say otherwise."""
        generation = self.engine.submit(
            Job(
                prompt=tuple(prompt),
                max_tokens=new,
                adapter=None if digest == BASE_MARKER else digest,
                sampling=Sampling(logprobs=0),
                tenant=TENANT_ID,
                **options,
            )
        )
        outputs = list(generation.outputs())
        return Answer(
            tuple(output.token for output in outputs),
            tuple(output.logprob or 0.0 for output in outputs),
            generation.reused_tokens,
        )


@dataclass
class TurnWorld:
    """What outlives a node's process: its folder, its key, base and adapters.

    ``ledger`` has pages alone, or everything that a node has when it is ``whole``, and is then each
    start's own.
    """

    folder: Path
    events: list[SlotEvent] = field(default_factory=list)
    base: Callable[[torch.dtype], PreTrainedModel] = tiny_model
    lane_tokens: int = 512
    secret: bytes = b"k" * 32
    ledger: Ledger = field(default_factory=lambda: Ledger(2**40))
    whole: bool = False

    def refusals(self) -> list[str]:
        """Why pages were refused, in order."""
        return [event.reason for event in self.events if event.kind is SlotEventKind.REFUSED]

    @contextmanager
    def node(
        self,
        adapters: Sequence[Digest] = (A, B),
        *,
        dtype: torch.dtype = torch.float32,
        **runtime: Any,
    ) -> Iterator[TurnNode]:
        """Start a node with these adapters attached in this order, and stop it.

        ``runtime`` are parts of its identity that are other ones.
        """
        model = self.base(dtype)
        base = parameters_named(model)
        made = {digest: adapter_make(model, 100 + (digest == A)) for digest in (A, B)}
        engine = Engine(
            model,
            stop_tokens=frozenset(),
            workspace=Workspace(
                lanes=4, lane_tokens=self.lane_tokens, adapters=4, rank=4, step_tokens=512
            ),
        )
        engine.start()
        for digest in adapters:
            engine.attach(digest, made[digest])
        if self.whole:
            tensors = (tensor for _, tensor in base)
            self.ledger = ledgers_open(engine, tensors, device="cpu", budget=2**33).host
        slots = Slots(self.folder, NodeKey(self.secret), on_event=self.events.append)
        parts: dict[str, Any] = {
            "base_digest": digest_of(b"base"),
            "dtype": str(dtype).removeprefix("torch."),
            "layout": Layout(layers=engine.layers, block_tokens=BLOCK_TOKENS),
            "library_versions": library_versions("cpu"),
            **runtime,
        }
        lane_bytes = engine.memory().lanes // engine.workspace.lanes
        turns = Turns(slots, Runtime(**parts), self.ledger, lane_bytes)
        try:
            yield TurnNode(engine, slots, turns, base)
        finally:
            turns.close()
            slots.close()
            engine.stop()
