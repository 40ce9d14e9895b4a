"""The base is hashed again after loads: what sums do not see ends the node all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from gpu_worker.serving import base_audit
from gpu_worker.serving.base_audit import BaseAudit
from gpu_worker.serving.parameters import Unchanged, parameters_digest, parameters_named
from gpu_worker.serving.residency import Key
from registry_service.domain.digests import digest_of

pytestmark = pytest.mark.torch

KEY = Key(UUID(int=1), digest_of(b"adapter"))


class Audited:
    """An audit of a small base, and whether it gave the base up."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.named = parameters_named(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        self.lost = threading.Event()
        self.audit = BaseAudit(self.named, parameters_digest(self.named), self.lost.set)

    def words_swap(self) -> None:
        """Swap two words of a parameter behind torch's back: every sum is what it was."""
        words = self.named[1][1].detach().numpy().reshape(-1).view(np.uint64)
        words[[0, 1]] = words[[1, 0]]


@pytest.fixture
def audited() -> Iterator[Audited]:
    audited = Audited()
    audited.audit.start()
    yield audited
    audited.audit.stop()


@pytest.mark.parametrize("failed", [False, True])
def test_words_that_cancel_out_are_seen_after_a_load(audited: Audited, failed: bool) -> None:
    unchanged = Unchanged(audited.named)
    audited.words_swap()
    assert unchanged()
    if failed:
        audited.audit.load_failed(KEY)
    else:
        audited.audit.loaded(KEY, 0.1)
    assert audited.lost.wait(60)


def test_a_base_that_is_what_it_was_is_hashed_once_for_many_loads(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    begun, go = threading.Event(), threading.Event()
    add = base_audit.parameter_add

    def slow(state: Any, name: str, tensor: torch.Tensor) -> None:
        begun.set()
        go.wait()
        hashed.append(name)
        add(state, name, tensor)

    monkeypatch.setattr(base_audit, "parameter_add", slow)
    audited.audit.loaded(KEY, 0.1)
    begun.wait()
    for _ in range(5):
        audited.audit.loaded(KEY, 0.1)
    go.set()
    while len(hashed) < 2 * len(audited.named):
        assert not audited.lost.wait(0.01)
    audited.audit.stop()
    assert len(hashed) == 2 * len(audited.named)
    assert not audited.lost.is_set()


def test_it_ends_between_two_tensors(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def stopping(_: Any, name: str, __: torch.Tensor) -> None:
        hashed.append(name)
        audited.audit._stopping.set()

    monkeypatch.setattr(base_audit, "parameter_add", stopping)
    audited.audit.loaded(KEY, 0.1)
    audited.audit._thread.join()
    assert len(hashed) == 1
    assert not audited.lost.is_set()
