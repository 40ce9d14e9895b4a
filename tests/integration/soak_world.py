"""Adapters that each say a word of their own, the node that serves them, and what it did.

Every prompt ends with ``ask``. Two places of the residual stream are kept free of everything else:
one tells that a word is there, the other that it is ``ask``. The base's head never says a canary;
each adapter's says its own one right after ``ask``, and its attention decides what follows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
import safetensors.torch
import torch
import uvicorn
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.base_load import base_load
from gpu_worker.serving.loader import QueueLimits
from gpu_worker.serving.meter import RequestTuple
from gpu_worker.serving.node import Node
from gpu_worker.serving.openai_bodies import completion_parse
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.prefix import Block
from gpu_worker.serving.residency import Key
from gpu_worker.serving.startup import base_admit
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.web import app_build
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER
from tests import sample_adapter
from tests.integration import serving_world as sw
from tests.integration.http_world import options_of
from tests.integration.load_world import LoadWorld
from tests.waiting import until

ADAPTERS: Final = 12
RANK: Final = 4
TOKENS: Final = 8
PROMPTS: Final = 8
CANARIES: Final = tuple(f"canary{chr(ord('A') + number)}" for number in range(ADAPTERS))
_PLAIN: Final = 80
WORDS: Final = (*(f"w{number}" for number in range(_PLAIN)), "ask", *CANARIES)
_THERE, _ASKED = 0, 1
TENANTS: Final = ((sw.TENANT, sw.TENANT_ID), (sw.OTHER, sw.OTHER_ID))
_CONFIG: Final[dict[str, Any]] = {
    **sw.CONFIGS["llama"],
    "vocab_size": len(WORDS),
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Who:
    """Who asks, for which adapter or the base, and the one canary that may be said."""

    tenant: str
    tenant_id: UUID
    digest: Digest = BASE_MARKER
    canary: str | None = None

    @property
    def key(self) -> Key:
        return Key(self.tenant_id, self.digest)

    @property
    def runs(self) -> Key | None:
        """The adapter as the engine knows it; None is the base."""
        return None if self.digest == BASE_MARKER else self.key

    def tuple(self, base: ProvenBase) -> RequestTuple:
        return RequestTuple(self.tenant_id, base.digest, self.digest, base.tokenizer_digest)


def base_make(folder: Path) -> ProvenBase:
    """A random llama that never says ``ask`` or a canary."""
    torch.manual_seed(7)
    raw = dict(_CONFIG)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
    )
    special = _PLAIN
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for layer in model.model.layers:
            for writes in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writes.weight[: _ASKED + 1] = 0
        words = model.model.embed_tokens.weight
        words[:, _THERE], words[:, _ASKED], words[special, _ASKED] = 3, 0, 6
        model.model.norm.weight[: _ASKED + 1] = 1
        model.lm_head.weight[:, : _ASKED + 1] = 0
        model.lm_head.weight[special:, _THERE] = -20
    model.save_pretrained(folder)
    known = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1024).save_pretrained(
        folder
    )
    return sw.prove(folder)


def adapter_publish(
    registry: sw.FakeRegistry, folder: Path, number: int, *, broken: bool = False
) -> Who:
    """The adapter of this number, whose tenant is one of two; a ``broken`` one is of NaN."""
    tenant, tenant_id = TENANTS[number % len(TENANTS)]
    generator = torch.Generator().manual_seed(number)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (float("nan") if broken else 0.5)

    width, heads = _CONFIG["hidden_size"], _CONFIG["num_attention_heads"]
    narrow = width // heads * _CONFIG["num_key_value_heads"]
    asked, says = torch.zeros(RANK, width), torch.zeros(len(WORDS), RANK)
    asked[0, _ASKED] = 1
    if not broken:
        says[WORDS.index(CANARIES[number]), 0] = 12
    tensors = {"lm_head.lora_A": asked, "lm_head.lora_B": says}
    for layer in range(_CONFIG["num_hidden_layers"]):
        for name, size in (("q_proj", width), ("v_proj", narrow)):
            at = f"model.layers.{layer}.self_attn.{name}"
            tensors |= {f"{at}.lora_A": random(RANK, width), f"{at}.lora_B": random(size, RANK)}
    config = sample_adapter.config(target_modules=["q_proj", "v_proj", "lm_head"])
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(
        safetensors.torch.save({f"base_model.model.{n}.weight": t for n, t in tensors.items()})
    )
    files = sw.adapter_files(registry.base, folder, tenant=tenant)
    digest = registry.publish(files, tenant=tenant)
    return Who(tenant, tenant_id, digest, None if broken else CANARIES[number])


def body_of(prompt: str, number: int, **fields: Any) -> bytes:
    """A completion's body; the prompts of odd numbers are sampled, each with its seed."""
    chosen = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    return json.dumps({"prompt": prompt, "max_tokens": TOKENS, **chosen, **fields}).encode()


@contextmanager
def node_of(
    registry: sw.FakeRegistry, root: Path, *, adapters: int, grouped: bool = False
) -> Iterator[LoadWorld]:
    """A started node with room for so many adapters, all but its HTTP."""
    client: Any = registry
    identity = base_admit(client, registry.trust(), registry.base)
    loaded = base_load(registry.base, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        # No option of a node's command line says whether its engine groups adapters or mixes them.
        patch.setattr("gpu_worker.serving.node.replace", partial(replace, grouped=grouped))
        node: Any = Node(
            client,
            registry.trust(),
            NodeStore(root / "store", url=registry.url, node=sw.NODE),
            identity,
            loaded,
            gate=sw.gate(registry, identity),
            load_limits=LoadLimits(
                adapters=adapters, rank=RANK, queue=QueueLimits(per_minute=6000)
            ),
        )
    node.start(options_of(root, registry.base))
    try:
        yield LoadWorld(registry, node, loaded)
    finally:
        node.stop()


@contextmanager
def served(node: Any) -> Iterator[str]:
    """The node's HTTP application at an address."""
    app = app_build(node.completions, node.residency)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Cold:
    """Prompts, what everybody gets for each with nobody beside them, and the blocks of that."""

    prompts: dict[tuple[Who, int], str]
    says: dict[tuple[Who, int], list[str]]
    blocks: dict[bytes, Block]


def cold_runs(registry: sw.FakeRegistry, root: Path, people: Sequence[Who]) -> Cold:
    """Each request alone on a node with room for all adapters; nothing is kept between them."""
    cold = Cold({}, {}, {})
    with node_of(registry, root, adapters=len(people)) as world, pytest.MonkeyPatch.context() as p:
        node: Any = world.node

        def keep(key: bytes, block: Block, **_: Any) -> None:
            cold.blocks[key] = block

        watch(p, node.engine._prefix, "publish", keep)
        for number, who in product(range(PROMPTS), people):
            cold.prompts[who, number] = prompt = _prompt(cold, who, number)
            body = body_of(prompt, number)
            context = context_of(registry, who, body, session=f"{who.digest}-{number}")
            running = node.completions.start(context, body, completion_parse, request_id="cold")
            tokens = list(running.generations[0].tokens())
            assert running.generations[0].reused_tokens == 0
            cold.says[who, number] = [WORDS[token] for token in tokens]
            node.engine.purge(who.runs)
    return cold


def _prompt(cold: Cold, who: Who, number: int) -> str:
    """The first half of the prompts begin a session, two of them alike; the others go on in it."""
    before = number - PROMPTS // 2
    if before >= 0:
        return " ".join([cold.prompts[who, before], *cold.says[who, before], "w5 ask"])
    start = [f"w{(7 * place + number // 2) % _PLAIN}" for place in range(130)]
    return " ".join([*start, *(f"w{(place + number) % _PLAIN}" for place in range(5)), "ask"])


def context_of(registry: sw.FakeRegistry, who: Who, body: bytes, *, session: str) -> str:
    """The routing context of one request."""
    digest = None if who.digest == BASE_MARKER else who.digest
    return registry.context(
        body, digest, tenant=who.tenant, tenant_id=who.tenant_id, session_id=session
    )


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., Any]) -> None:
    """Show a method's arguments to ``look`` before it runs."""
    watched = getattr(owner, name)

    def shown(*arguments: Any, **named: Any) -> Any:
        look(*arguments, **named)
        return watched(*arguments, **named)

    patch.setattr(owner, name, shown)
