"""The meter counts by the tuple, and tells totals, so that what is told twice counts once."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.meter import Amount, Meter, RequestTuple
from registry_service.domain.digests import digest_of

TUPLES = [
    RequestTuple(UUID(int=tenant), digest_of(b"base"), digest_of(adapter), digest_of(b"tokenizer"))
    for tenant in (1, 2)
    for adapter in (b"a", b"b")
]
AMOUNTS = st.builds(Amount, *(st.integers(0, 1000) for _ in range(4)))
USES = st.lists(st.tuples(st.sampled_from(TUPLES), AMOUNTS), max_size=30)


@given(USES)
def test_each_tuple_has_the_sum_of_its_own(uses: list[tuple[RequestTuple, Amount]]) -> None:
    meter = Meter()
    for who, amount in uses:
        meter.count(who, amount)
    expected = {
        who: sum((amount for other, amount in uses if other == who), Amount())
        for who in {who for who, _ in uses}
    }
    assert meter.used() == expected


@given(USES, USES)
def test_what_changed_is_told_as_totals(
    before: list[tuple[RequestTuple, Amount]], after: list[tuple[RequestTuple, Amount]]
) -> None:
    meter = Meter()
    for who, amount in before:
        meter.count(who, amount)
    told, change = meter.since(0)
    assert told == meter.used()
    assert meter.since(change) == ({}, change)
    for who, amount in after:
        meter.count(who, amount)
    changed, _ = meter.since(change)
    assert set(changed) == {who for who, _ in after}
    assert told | changed == meter.used()
