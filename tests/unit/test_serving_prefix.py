"""Prefix blocks: their keys, whose they are, and what goes first."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.prefix import Block, PrefixCache, block_keys
from gpu_worker.serving.sequence import Holder
from gpu_worker.serving.workspace import BLOCK_TOKENS

MANY = 10**9


def keys(count: int, root: bytes = b"root", first: int = 0) -> list[bytes]:
    """Keys of a text of whole blocks."""
    return list(block_keys(root, tuple(range(first, first + count * BLOCK_TOKENS))))


def block(tenant: str = "t", adapter: str | None = "a", size: int = 10) -> Block:
    return Block(object(), size, tenant, adapter)


def test_only_whole_blocks_have_keys() -> None:
    assert [len(list(block_keys(b"", (1,) * n))) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]


def test_a_key_states_the_root_and_every_token_before() -> None:
    text = tuple(range(128))
    one = list(block_keys(b"root", text))
    assert list(block_keys(b"root", text[:64])) == one[:1]
    assert set(one).isdisjoint(block_keys(b"other", text))
    for place in (0, 63, 64, 127):
        changed = (*text[:place], 999, *text[place + 1 :])
        other = list(block_keys(b"root", changed))
        assert [a == b for a, b in zip(one, other, strict=True)] == [place >= 64, False]


@given(st.binary(max_size=4), st.binary(max_size=4), st.lists(st.integers(0, 2**31), max_size=3))
def test_roots_do_not_run_into_tokens(one: bytes, other: bytes, start: list[int]) -> None:
    text = (*start, *range(BLOCK_TOKENS - len(start)))
    assert (list(block_keys(one, text)) == list(block_keys(other, text))) == (one == other)


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache(tenant_bytes=MANY, total_bytes=MANY)
    chain = keys(4)
    blocks = [block() for _ in chain]
    for n in (0, 1, 3):
        cache.publish(chain[n], blocks[n])
    assert cache.find(chain, "a") == blocks[:2]
    assert cache.find(chain, "b") == []
    assert cache.find(keys(4, b"other"), "a") == []


def test_a_known_block_is_not_replaced() -> None:
    cache = PrefixCache(tenant_bytes=MANY, total_bytes=MANY)
    first = block()
    assert cache.publish(b"k", first)
    assert not cache.publish(b"k", block(tenant="other"))
    assert cache.find([b"k"], "a") == [first]


def test_a_tenant_loses_its_own_oldest_and_nobody_elses() -> None:
    cache = PrefixCache(tenant_bytes=30, total_bytes=MANY)
    other = [b"o1", b"o2", b"o3"]
    for key in other:
        cache.publish(key, block("other"))
    for number in range(50):
        cache.publish(b"%d" % number, block("t"))
    assert (cache.tenant_size("t"), cache.tenant_size("other")) == (30, 30)
    assert [key in cache for key in (b"46", b"47", b"48", b"49", *other)] == [False] + [True] * 6


def test_the_beginning_of_a_text_outlives_its_end() -> None:
    cache = PrefixCache(tenant_bytes=40, total_bytes=MANY)
    chain = keys(4)
    for key in chain:
        cache.publish(key, block())
    cache.touched(chain)
    for number in range(3):
        cache.publish(b"%d" % number, block())
        assert [key in cache for key in chain] == [n < 3 - number for n in range(4)]


def test_what_was_used_stays() -> None:
    cache = PrefixCache(tenant_bytes=30, total_bytes=MANY)
    for key in (b"1", b"2", b"3"):
        cache.publish(key, block())
    cache.find([b"1"], "a")
    cache.publish(b"4", block())
    assert [key in cache for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]


def test_all_together_have_a_budget_too() -> None:
    cache = PrefixCache(tenant_bytes=30, total_bytes=50)
    for number in range(10):
        cache.publish(b"%d" % number, block(f"t{number}"))
    assert (cache.size, len(cache)) == (50, 5)
    assert [b"%d" % n in cache for n in range(10)] == [False] * 5 + [True] * 5


def test_what_never_fits_pushes_nothing_out() -> None:
    cache = PrefixCache(tenant_bytes=30, total_bytes=50)
    cache.publish(b"1", block())
    assert not cache.publish(b"2", block(size=31))
    assert cache.size == 10
    assert not PrefixCache(tenant_bytes=0, total_bytes=0).publish(b"1", block())


@pytest.mark.parametrize("budgets", [(100, MANY), (MANY, 100)], ids=["tenant", "all"])
def test_a_text_longer_than_the_budget_keeps_its_beginning(budgets: tuple[int, int]) -> None:
    cache = PrefixCache(tenant_bytes=budgets[0], total_bytes=budgets[1])
    cache.publish(b"before", block())
    chain = keys(13)
    for _ in range(2):
        known = [key for key in chain if key in cache]
        published = [cache.publish(key, block(), after=chain[:n]) for n, key in enumerate(chain)]
        assert published == [False] * len(known) + [True] * (10 - len(known)) + [False] * 3
        assert len(cache.find(chain, "a")) == 10
    assert b"before" not in cache
    assert cache.size == 100


def test_a_purge_is_complete_and_counted() -> None:
    cache = PrefixCache(tenant_bytes=MANY, total_bytes=MANY)
    for number in range(12):
        cache.publish(b"%d" % number, block(f"t{number % 2}", f"a{number % 3}"))
    assert cache.purge("a1") == 4
    assert cache.purge("a1") == 0
    assert (len(cache), cache.size, cache.tenant_size("t0")) == (8, 80, 40)
    assert cache.drop([b"0", b"1", b"unknown"]) == 1
    assert cache.purge("a0") + cache.purge("a2") == 7
    assert (len(cache), cache.size) == (0, 0)


def test_the_bytes_of_each_holder_are_those_of_its_blocks() -> None:
    cache = PrefixCache(tenant_bytes=50, total_bytes=90)
    chain = keys(30)

    def check() -> None:
        counted: dict[Holder, int] = {}
        for one in cache._blocks.values():
            counted[one.holder] = counted.get(one.holder, 0) + one.size
        assert cache.held() == counted
        assert cache.size == sum(counted.values())

    for number, key in enumerate(chain):
        cache.publish(key, block(f"t{number % 2}", (None, "a0", "a1")[number % 3], 1 + number % 7))
        check()
    for step in (
        lambda: cache.drop(chain[20:23]),
        lambda: cache.purge("a0"),
        lambda: cache.purge("a1"),
        lambda: cache.purge(None),
    ):
        assert step() > 0
        check()
    assert cache.held() == {}


def test_the_bytes_may_be_asked_for_while_blocks_come_and_go() -> None:
    cache = PrefixCache(tenant_bytes=30, total_bytes=60)
    wrong: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            wrong.extend(size for size in (sum(cache.held().values()), cache.size) if size > 60)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        cache.publish(b"%d" % number, block(f"t{number % 50}", f"a{number % 7}"))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
