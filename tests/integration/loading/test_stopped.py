"""A node that stops leaves what it held to others: a new one, under another name, loads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving import node as node_module
from gpu_worker.serving.base_load import base_load
from gpu_worker.serving.options import LoadLimits, Wanted
from gpu_worker.serving.startup import Node, base_admit
from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import Digest
from registry_service.domain.errors import UnavailableError
from tests.integration import serving_world as sw
from tests.integration.http_world import options_of
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
Make = Callable[[str], Node]


@pytest.fixture
def make(registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path) -> Iterator[Make]:
    """Makes whole nodes, by name."""
    made: list[Node] = []

    def run(name: str) -> Node:
        client: Any = registry
        identity = base_admit(client, registry.trust(), base)
        made.append(
            Node(
                client,
                registry.trust(),
                NodeStore(tmp_path / name, url=registry.url, node=name),
                identity,
                base_load(base, "cpu"),
                gate=sw.gate(registry, identity, name),
                load_limits=LoadLimits(adapters=4, rank=8),
            )
        )
        return made[-1]

    yield run
    registry.registered.clear()
    registry.outstanding.clear()


def start(node: Node, base: ProvenBase, root: Path, digests: list[Digest]) -> None:
    node.start(options_of(root, base, *(Wanted(sw.TENANT, sw.ADAPTER, d) for d in digests)))


def test_a_new_node_loads_what_the_stopped_one_held(
    registry: sw.FakeRegistry, base: ProvenBase, own: list[Digest], make: Make, tmp_path: Path
) -> None:
    old, new = make("node-1"), make("node-2")
    start(old, base, tmp_path, own[:2])
    assert registry.placements == dict.fromkeys(own[:2], "node-1")
    with pytest.raises(UnavailableError, match="no place in the pool"):
        new.residents.start()
        new.residents.preload(sw.TENANT, sw.ADAPTER, own[0])
    old.stop()
    assert registry.placements == {}
    # It takes nothing any more, either.
    with pytest.raises(UnavailableError, match="stopping"):
        old.placements.take(sw.TENANT, old.residents.residents()[0].key)
    start(new, base, tmp_path, own[:2])
    assert registry.placements == dict.fromkeys(own[:2], "node-2")
    new.stop()


def test_a_registry_that_does_not_answer_holds_up_no_stop(
    registry: sw.FakeRegistry,
    base: ProvenBase,
    own: list[Digest],
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = make("node-1")
    start(node, base, tmp_path, own[:2])
    go = threading.Event()
    monkeypatch.setattr(registry, "placement_release", lambda *_: go.wait())
    monkeypatch.setattr(node_module, "_RELEASE_SECONDS", 0.2)
    # It returns while the answer is still to come.
    node.stop()
    assert "placements not released" in caplog.text
    assert registry.placements == dict.fromkeys(own[:2], "node-1")
    go.set()


def test_leases_go_after_the_last_heartbeat_which_would_renew_them(
    registry: sw.FakeRegistry,
    base: ProvenBase,
    own: list[Digest],
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = make("node-1")
    start(node, base, tmp_path, own[:1])
    began, answered = threading.Event(), list[str]()
    beat, release = registry.node_heartbeat, registry.placement_release

    def slow(*arguments: Any) -> Any:
        began.set()
        time.sleep(0.3)
        answered.append("heartbeat")
        return beat(*arguments)

    def released(*arguments: Any) -> None:
        answered.append("release")
        release(*arguments)

    monkeypatch.setattr(registry, "node_heartbeat", slow)
    monkeypatch.setattr(registry, "placement_release", released)
    node.follower._beat_now.set()
    assert began.wait(30)
    node.stop()
    assert answered == ["heartbeat", "release"]
    until(lambda: registry.placements == {})
