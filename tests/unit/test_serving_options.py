"""What a node is started with: command line, pinned trust, and its own folder."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from gpu_worker.serving.loader import QueueLimits
from gpu_worker.serving.options import LoadLimits, options_parse, wanted_parse
from gpu_worker.serving.residency import Key
from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError
from registry_service.domain.limits import MIB

DIGEST = digest_of(b"x")
NEEDED = ["--url", "http://r", "--token-file", "t", "--name", "node-1", "--base", "b"]
NEEDED += ["--port", "8000", "--trust", "t.json", "--store", "s"]


def test_options() -> None:
    options = options_parse([*NEEDED, "--preload", f"t-1042/support-zh@{DIGEST}"])
    assert options.public_url == "http://127.0.0.1:8000"
    assert options.preload[0].digest == DIGEST
    assert (options.preload[0].tenant, options.preload[0].adapter) == ("t-1042", "support-zh")
    assert (options.traces, options.drain_seconds) == (None, 30)
    with pytest.raises(SystemExit):
        options_parse([*NEEDED, "--prelod", "x"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0::0", ""])
def test_a_node_that_listens_everywhere_says_how_it_is_reached(host: str) -> None:
    with pytest.raises(MalformedError, match="--public-url: expected the address that others"):
        options_parse([*NEEDED, "--host", host])
    given = ["--host", host, "--public-url", "http://node:8000"]
    assert options_parse([*NEEDED, *given]).public_url == "http://node:8000"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.7", "http://10.0.0.7:8000"),
        ("::1", "http://[::1]:8000"),
        ("node.example", "http://node.example:8000"),
    ],
)
def test_a_node_that_listens_somewhere_is_reached_there(host: str, url: str) -> None:
    assert options_parse([*NEEDED, "--host", host]).public_url == url


def test_tracing_and_stopping_are_told_in_so_many_words() -> None:
    options = options_parse([*NEEDED, "--traces", "http://c/v1/traces", "--drain-seconds", "5"])
    assert (options.traces, options.drain_seconds) == ("http://c/v1/traces", 5)
    with pytest.raises(SystemExit):
        options_parse([*NEEDED, "--drain-seconds", "0"])


def test_what_adapters_may_take_is_bounded_and_has_defaults() -> None:
    limits = options_parse(NEEDED).limits
    assert limits == LoadLimits()
    assert (limits.adapters, limits.rank, limits.memory, limits.tenant_bytes) == (16, 16, 0, 0)
    assert (limits.running, limits.tokens) == (16, 2048)
    assert limits.queue.waiting_each == limits.sequences
    given = ["--memory-mib", "2048", "--max-adapters", "32", "--max-rank", "64"]
    given += ["--max-running", "32", "--max-tenant-running", "20", "--max-tokens", "512"]
    given += ["--max-adapter-mib", "100", "--max-sequences", "8", "--max-tenant-adapters", "4"]
    given += ["--max-tenant-mib", "300", "--max-tenant-loads", "5"]
    assert options_parse([*NEEDED, *given]).limits == LoadLimits(
        memory=2048 * MIB,
        running=32,
        tenant_running=20,
        tokens=512,
        adapters=32,
        rank=64,
        adapter_bytes=100 * MIB,
        sequences=8,
        tenant_adapters=4,
        tenant_bytes=300 * MIB,
        queue=QueueLimits(waiting_each=8, per_minute=5),
    )


@pytest.mark.parametrize(("adapters", "share"), [(1, 1), (2, 1), (9, 4), (64, 32)])
def test_a_tenant_has_half_of_the_adapters_unless_it_is_said(adapters: int, share: int) -> None:
    options = options_parse([*NEEDED, "--max-adapters", str(adapters)])
    assert options.limits.tenant_adapters == share


@pytest.mark.parametrize(("running", "share"), [(1, 1), (3, 1), (64, 32), (129, 64), (256, 64)])
def test_a_tenant_has_half_of_the_lanes_unless_it_is_said(running: int, share: int) -> None:
    options = options_parse([*NEEDED, "--max-running", str(running)])
    assert options.limits.tenant_running == share


@pytest.mark.parametrize(
    "given",
    [
        ("--max-adapters", "0"),
        ("--max-adapters", "-1"),
        ("--max-rank", "513"),
        ("--max-running", "257"),
        ("--max-tenant-running", "65"),
        ("--max-tokens", "0"),
        ("--max-rank", "8.0"),
        ("--memory-mib", "x"),
        ("--max-sequences", "9" * 30),
    ],
)
def test_a_limit_out_of_its_bounds_is_a_usage_error(
    given: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options_parse([*NEEDED, *given])
    assert caught.value.code == 2
    assert f"argument {given[0]}: expected 1 to" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "t/a", "t/a@prod", f"a@{DIGEST}", f"../a/b@{DIGEST}"])
def test_a_preload_names_a_digest(text: str) -> None:
    with pytest.raises(MalformedError):
        wanted_parse(text)


def test_store(tmp_path: Path) -> None:
    key = Key(UUID(int=3), DIGEST)
    store = NodeStore(tmp_path, url="http://r", node="node-1")
    assert store.feed_index() == 0
    store.feed_index_write(7)
    store.folder(key).mkdir(parents=True)
    (store.folder(key) / "file").write_bytes(b"123")
    store.revocable_write(key, DIGEST, DIGEST)
    leftover = store.folder(key).with_name(".staging")
    leftover.mkdir()
    store.close()
    again = NodeStore(tmp_path, url="http://r", node="node-1")
    assert again.feed_index() == 7
    assert again.keys() == (key,)
    assert not leftover.exists()
    assert again.remove(key) == 3
    assert again.remove(key) == 0
    assert again.keys() == ()
    again.close()
    other = NodeStore(tmp_path, url="http://other", node="node-1")
    assert other.feed_index() == 0
    (tmp_path / "feed.json").write_text("{")
    assert other.feed_index() == 0
    other.close()
