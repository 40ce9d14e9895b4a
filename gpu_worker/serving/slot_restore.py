"""Restoring a page is numbered steps; only what passed them all is handed on to be put into a lane.

1. the slot has a page; 2. its sidecar is read, once; 3. it is of this format; 4. sealed by this
node; 5. of this session and subject; 6. of this identity, part by part, with or without an
adapter; 7. the current page, to the byte; 8. no longer than a lane; 9. there is memory to read it;
10. the state is read and opened with the sidecar's bytes; 11. its digest, tensors and tokens are
those of the sidecar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpu_worker.serving.identity import Identity, tokens_encode
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.slot_index import Entry
from gpu_worker.serving.slot_key import NodeKey
from gpu_worker.serving.slot_pages import SlotPages
from gpu_worker.serving.slot_sidecar import (
    Refusal,
    Session,
    Sidecar,
    SlotRefusedError,
    identity_check,
    same_check,
    sidecar_parse,
)
from gpu_worker.serving.slot_state import state_decode
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RegistryError

# Sealed and plain while it is opened, plain and tensors while it is decoded.
_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Reader:
    """What a page is read for.

    A lane has room for ``lane_tokens``. ``reserve`` gets the bytes that reading takes at its
    fullest, before they are taken, and raises LedgerFullError where there are not as many.
    """

    lane_tokens: int
    reserve: Callable[[int], object]


ANY_READER: Final = Reader(sys.maxsize, lambda _: None)
"""One with room for every page, and memory of its own."""


def page_load(
    pages: SlotPages,
    key: NodeKey,
    entry: Entry,
    session: Session,
    identity: Identity,
    reader: Reader,
) -> LaneState:
    """Steps 2 to 11.

    Raises:
        SlotRefusedError: the first step that does not hold. LedgerFullError: step 9.
    """
    content = pages.sidecar(entry.page)
    sidecar = _sidecar(content, key, entry, session, identity)
    if sidecar.token_count > reader.lane_tokens:
        raise SlotRefusedError(
            Refusal.LANE, f"at most {reader.lane_tokens} tokens", sidecar.token_count
        )
    size = entry.size - len(content)
    reader.reserve(_AT_ONCE * size)
    try:
        plain = key.open(pages.state(entry.page, size), content)
        same_check(Refusal.STATE, key.digest("state", plain), sidecar.state_digest)
        state = state_decode(identity, sidecar.token_count, plain)
        tokens = key.digest("tokens", tokens_encode(state.tokens))
    except RegistryError as error:
        raise SlotRefusedError(Refusal.STATE, "the saved state", error.message) from error
    same_check(Refusal.STATE, tokens, sidecar.tokens_digest)
    return state


def _sidecar(
    content: bytes, key: NodeKey, entry: Entry, session: Session, identity: Identity
) -> Sidecar:
    """Steps 3 to 7."""
    sidecar = sidecar_parse(content, identity.format_version)
    same_check(Refusal.NODE_KEY, sidecar.key_id, key.key_id)
    # By digests: a refusal is logged, and whose page it is may be another tenant's to know.
    for reason, found, wanted in (
        (Refusal.SESSION, sidecar.session.session_id, session.session_id),
        (Refusal.SUBJECT, sidecar.session.subject, session.subject),
    ):
        same_check(reason, digest_of(found.encode()), digest_of(wanted.encode()))
    identity_check(sidecar.identity, identity)
    same_check(Refusal.OLDER_PAGE, sidecar.page, entry.page)
    same_check(Refusal.SIDECAR, digest_of(content), entry.sidecar_digest)
    return sidecar
