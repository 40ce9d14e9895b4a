"""The list that a node holds: never an older one, also after a restart, and fresh or not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.store import NodeStore
from registry_service.backends.file_signer import FileSigner
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError, UnavailableError, UntrustedError
from registry_service.trust.dsse import dsse_sign
from registry_service.trust.keys import public_key_parse
from registry_service.trust.revocation_list import (
    PAYLOAD_TYPE,
    RevocationList,
    Revoked,
    revocation_list_payload,
)

ISSUER = "urn:registry"
START = datetime(2026, 11, 30, 12, tzinfo=UTC)
TENANT, ADAPTER = UUID(int=1), digest_of(b"adapter")
ENTRY = Revoked(ADAPTER, None, None, None, None)


class Node:
    """A node's folder, clock and signer; ``restart`` makes its list anew over the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.signer = FileSigner.create(root / "key.pem")
        self.wall, self.counter = START, 1000.0
        self.store = NodeStore(root / "store", url="http://r", node="n")
        self.held = self.made()

    def made(self, signer: FileSigner | None = None) -> HeldList:
        key = public_key_parse((signer or self.signer).public_pem)
        return HeldList(
            self.store, key, ISSUER, now=lambda: self.wall, elapsed=lambda: self.counter
        )

    def restart(self) -> None:
        self.store.close()
        self.store = NodeStore(self.root / "store", url="http://other", node="n")
        self.held = self.made()

    def signed(
        self, number: int, *entries: Revoked, at: datetime | None = None, **options: Any
    ) -> bytes:
        issued = at or self.wall
        life = timedelta(minutes=10)
        signer = options.get("signer", self.signer)
        revocations = RevocationList(number, ISSUER, issued, issued + life, entries)
        payload = revocation_list_payload(revocations)
        return dsse_sign(PAYLOAD_TYPE, payload, signer.sign, signer.key_id)

    def advance(self, seconds: float, *, wall: bool = True, counter: bool = True) -> None:
        self.wall += timedelta(seconds=seconds if wall else 0)
        self.counter += seconds if counter else 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.store.close()


def test_without_a_list_nothing_is_accepted(node: Node) -> None:
    assert node.held.stale_reason() == "no revocation list yet"
    assert node.held.number == 0


def test_a_list_is_fresh_until_it_expires(node: Node) -> None:
    node.held.take(node.signed(1, ENTRY))
    assert node.held.fresh
    node.advance(299)
    assert not node.held.past_half
    node.advance(1)
    assert node.held.past_half
    node.advance(299)
    assert node.held.fresh
    node.advance(1)
    assert node.held.stale_reason() == "revocation list 1 expired at 2026-11-30T12:10:00Z"
    node.held.take(node.signed(2, ENTRY))
    assert node.held.fresh


def test_a_clock_that_is_set_back_does_not_keep_a_list_fresh(node: Node) -> None:
    node.held.take(node.signed(1))
    node.advance(-3600, counter=False)
    node.advance(599, wall=False)
    assert node.held.fresh
    node.advance(1, wall=False)
    assert not node.held.fresh


def test_a_machine_that_slept_does_not_keep_a_list_fresh(node: Node) -> None:
    node.held.take(node.signed(1))
    node.advance(600, counter=False)
    assert not node.held.fresh


def test_an_expired_list_still_names_what_is_revoked(node: Node) -> None:
    node.held.take(node.signed(1, ENTRY))
    node.advance(3600)
    assert node.held.find(TENANT, ADAPTER) == ENTRY


def test_a_replayed_older_list_is_refused_and_logged(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = node.signed(4), node.signed(5, ENTRY)
    node.held.take(newer)
    with pytest.raises(UntrustedError, match="expected number 5 or more, got 4"):
        node.held.take(older)
    assert node.held.number == 5
    assert node.held.find(TENANT, ADAPTER) == ENTRY
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.__dict__["event"] == "revocation_list.refused"


def test_a_replayed_older_list_is_refused_after_a_restart_too(node: Node) -> None:
    older, newer = node.signed(4), node.signed(5, ENTRY)
    node.held.take(newer)
    node.restart()
    assert not node.held.fresh
    with pytest.raises(UntrustedError, match="expected number 5 or more"):
        node.held.take(older)
    assert not node.held.fresh
    node.held.take(newer)
    assert node.held.fresh


def test_two_lists_of_one_number_are_not_both_taken(node: Node) -> None:
    first, second = node.signed(5, ENTRY), node.signed(5)
    node.held.take(first)
    node.held.take(first)
    for _ in range(2):
        with pytest.raises(UntrustedError, match="got another"):
            node.held.take(second)
        node.restart()


def test_a_number_that_cannot_be_kept_does_not_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UnavailableError("the disk is full")

    monkeypatch.setattr(node.store, "list_mark_write", full)
    with pytest.raises(UnavailableError):
        node.held.take(node.signed(1))
    assert not node.held.fresh


def test_a_refused_list_leaves_the_held_one(node: Node) -> None:
    node.held.take(node.signed(1, ENTRY))
    expired = node.signed(2, at=node.wall - timedelta(hours=1))
    for envelope in (b"", b"{}", node.signed(2)[:-9], expired):
        with pytest.raises(UntrustedError):
            node.held.take(envelope)
    assert (node.held.number, node.held.fresh) == (1, True)
    node.restart()
    node.held.take(node.signed(1, ENTRY))


def test_another_pinned_key_begins_anew(node: Node) -> None:
    node.held.take(node.signed(9))
    other = FileSigner.create(node.root / "other.pem")
    held = node.made(other)
    held.take(node.signed(1, signer=other))
    assert held.fresh


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"keyId": "x"}', b'{"number": 3}'])
def test_a_number_that_cannot_be_read_stops_the_start(node: Node, content: bytes) -> None:
    node.held.take(node.signed(5))
    (node.root / "store" / "revocation-list.json").write_bytes(content)
    with pytest.raises(MalformedError, match=r"revocation-list\.json"):
        node.restart()
