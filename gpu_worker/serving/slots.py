"""Slots: the KV of a session, saved to a file so that its next turn need not compute it again.

A page that does not hold, in one of the steps of ``slot_restore``, is refused: no lane is touched,
the page is dropped so that it is not tried again, an event says why, and the turn is prefilled
cold. What passed and then cannot be put into a lane is refused by whoever finds that, in the same
way. A fault of the disk is treated alike: no fault here fails a request.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gpu_worker.serving.identity import Identity, tokens_encode
from gpu_worker.serving.lanes import LaneState
from gpu_worker.serving.ledger import LedgerFullError
from gpu_worker.serving.residency import Key
from gpu_worker.serving.slot_events import SlotEvent, SlotEventKind, event_log
from gpu_worker.serving.slot_index import Budget, Entry, SlotIndex
from gpu_worker.serving.slot_key import SEAL_BYTES, NodeKey
from gpu_worker.serving.slot_pages import SlotPages
from gpu_worker.serving.slot_restore import ANY_READER, Reader, page_load
from gpu_worker.serving.slot_sidecar import Refusal, Session, Sidecar, SlotRefusedError
from gpu_worker.serving.slot_state import state_encode
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError, RegistryError, UnavailableError
from registry_service.trust.routing_context import BASE_MARKER

_LOG = logging.getLogger(__name__)
_OVER: Final = "over the budget"


class Restored(NamedTuple):
    """What a page holds, and its number."""

    page: int
    state: LaneState


class Slots:
    """The slots of one node, in a folder that it holds alone. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        key: NodeKey,
        *,
        budget: Budget | None = None,
        on_event: Callable[[SlotEvent], None] = event_log,
    ) -> None:
        """Open the folder and remove what no slot refers to.

        Raises:
            UnavailableError: the folder cannot be used.
        """
        self._pages = SlotPages(folder, key)
        self._key, self._budget = key, budget or Budget()
        self._on_event = on_event
        self._changed = threading.Condition()
        self._saving: Counter[Digest] = Counter()
        # Never forgotten, as in the table of residents: one digest for each revocation.
        self._removed: set[Digest] = set()
        self._index = self._index_open()
        self._pages.sweep(self._index)

    def close(self) -> None:
        """Let the folder go."""
        self._pages.close()

    def entries(self) -> tuple[Entry, ...]:
        """Every slot's current page, least recently used first."""
        with self._changed:
            return self._index.entries()

    def keys(self) -> set[Key]:
        """The adapters that there are pages of."""
        return {
            Key(entry.tenant_id, entry.adapter_digest)
            for entry in self.entries()
            if entry.adapter_digest != BASE_MARKER
        }

    def save(self, session: Session, identity: Identity, state: LaneState) -> int | None:
        """Save a lane's state as the slot's page, in place of the one before it.

        Returns the page's number. None: nothing is saved, since the adapter was removed, a newer
        page came first, the state is not as the identity says, is over the budget, or the disk
        fails; the page before it stays, unless the index could not be written.
        """
        digest = identity.adapter_digest
        with self._changed:
            page = self._index.page_take()
            if digest in self._removed:
                self._tell(SlotEventKind.NOT_SAVED, identity, page, Refusal.REVOKED)
                return None
            self._saving[digest] += 1
        try:
            entry = self._write(page, session, identity, state)
            late = self._commit(entry)
        except Exception as error:  # noqa: BLE001 - the turn is answered: keeping its KV is extra
            with self._changed:
                self._forget((_slot(identity, session), page))
            late = error.message if isinstance(error, RegistryError) else type(error).__name__
        finally:
            with self._changed:
                self._saving -= Counter({digest: 1})
                self._changed.notify_all()
        kind = SlotEventKind.NOT_SAVED if late else SlotEventKind.SAVED
        self._tell(kind, identity, page, late)
        return None if late else page

    def save_skipped(self, identity: Identity, reason: str) -> None:
        """Tell why nothing is saved of a turn; the page before it stays."""
        self._tell(SlotEventKind.NOT_SAVED, identity, 0, reason)

    def restore(
        self, session: Session, identity: Identity, reader: Reader = ANY_READER
    ) -> Restored | None:
        """What the slot's page holds, as it was saved under this very identity.

        None: there is no page, or it is refused; the turn is prefilled cold.

        Raises:
            LedgerFullError: the reader has no memory for it; the page stays.
        """
        with self._changed:
            entry = self._index.find(_slot(identity, session))
        if entry is None:
            return None
        try:
            state = page_load(self._pages, self._key, entry, session, identity, reader)
        except LedgerFullError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, a cold prefill is right
            self.refuse(session, identity, entry.page, _refused(error))
            return None
        self._tell(SlotEventKind.RESTORED, identity, entry.page, tokens=len(state.tokens))
        return Restored(entry.page, state)

    def refuse(
        self, session: Session, identity: Identity, page: int, refused: SlotRefusedError
    ) -> None:
        """Drop a page and tell why, once; nothing when it is not the slot's any more."""
        with self._changed:
            dropped = self._forget((_slot(identity, session), page))
        if dropped:
            kind = SlotEventKind.REFUSED
            self._tell(kind, identity, page, refused.reason, refused=refused)

    def remove(self, digest: Digest) -> int:
        """Remove every page made under an adapter, of any tenant, and save none from now on.

        Returns how many; a save that is under way has then ended, and saved nothing.

        Raises:
            UnavailableError: some files could not be removed; asking again tries again.
        """
        with self._changed:
            self._removed.add(digest)
            found = self._index.of_adapter(digest)
            self._forget(*((entry.slot, entry.page) for entry in found))
            self._changed.wait_for(lambda: not self._saving[digest])
            left = self._pages.left_remove()
        for entry in found:
            self._tell_of(SlotEventKind.REMOVED, entry)
        if left:
            raise UnavailableError(f"slots: {left} files cannot be removed; see the log")
        return len(found)

    def _write(self, page: int, session: Session, identity: Identity, state: LaneState) -> Entry:
        plain = state_encode(identity, state)
        tokens = state.tokens
        sidecar = Sidecar(
            identity=identity,
            session=session,
            page=page,
            token_count=len(tokens),
            tokens_digest=self._key.digest("tokens", tokens_encode(tokens)),
            state_digest=self._key.digest("state", plain),
            key_id=self._key.key_id,
        ).to_bytes()
        size = len(plain) + SEAL_BYTES + len(sidecar)
        most = min(limits.SLOT_STATE_BYTES, self._budget.tenant_bytes, self._budget.node_bytes)
        if size > most:
            raise MalformedError(f"slot: expected at most {most} bytes, got {size}")
        entry = Entry(
            slot=_slot(identity, session),
            tenant_id=identity.tenant_id,
            adapter_digest=identity.adapter_digest,
            page=page,
            size=size,
            sidecar_digest=digest_of(sidecar),
        )
        with self._changed:
            if not self._index.keeps(entry, self._budget):
                raise MalformedError(_OVER)
        self._pages.write(page, sidecar, self._key.seal(plain, sidecar))
        return entry

    def _commit(self, entry: Entry) -> str:
        """Make a written page the slot's, and make room for it; or why it came too late."""
        with self._changed:
            newer = self._index.find(entry.slot)
            if entry.adapter_digest in self._removed or (newer and newer.page > entry.page):
                self._pages.remove(entry.page)
                return Refusal.REVOKED if entry.adapter_digest in self._removed else "a newer page"
            # Others may have saved since it was asked first.
            if not self._index.keeps(entry, self._budget):
                self._pages.remove(entry.page)
                return _OVER
            before = self._index.put(entry)
            trimmed = self._index.trim(self._budget)
            gone = [before, *trimmed] if before else [*trimmed]
            try:
                self._pages.index_write(self._index)
            finally:
                for old in gone:
                    self._pages.remove(old.page)
        for old in trimmed:
            self._tell_of(SlotEventKind.TRIMMED, old)
        return ""

    def _forget(self, *pages: tuple[str, int]) -> bool:
        """Drop these pages of these slots, whatever the disk says: they are not tried again.

        True when one of them was its slot's still.
        """
        dropped = any([self._index.drop(slot, page) for slot, page in pages])
        if dropped:
            self._index_write(self._index)
        for _, page in pages:
            self._pages.remove(page)
        return dropped

    def _index_open(self) -> SlotIndex:
        try:
            return self._pages.index_read()
        except (OSError, RegistryError) as error:
            # Which pages are current is not known any more: none is, and this is said once.
            self._on_event(
                SlotEvent(SlotEventKind.REFUSED, 0, reason=Refusal.UNREADABLE, got=str(error))
            )
        index = SlotIndex()
        self._index_write(index)
        return index

    def _index_write(self, index: SlotIndex) -> None:
        """Write the index if the disk lets us.

        What was forgotten and stands in the file still has lost its files: after a restart it is
        refused as missing.
        """
        try:
            self._pages.index_write(index)
        except (OSError, MemoryError) as error:
            _LOG.warning("slots: the index cannot be written: %s", error)

    def _tell(
        self,
        kind: SlotEventKind,
        identity: Identity,
        page: int,
        reason: str = "",
        *,
        refused: SlotRefusedError | None = None,
        tokens: int = 0,
    ) -> None:
        expected, got = (refused.expected, refused.got) if refused else ("", "")
        of = (identity.tenant_id, identity.adapter_digest)
        self._on_event(SlotEvent(kind, page, *of, reason, expected, got, tokens))

    def _tell_of(self, kind: SlotEventKind, entry: Entry) -> None:
        self._on_event(SlotEvent(kind, entry.page, entry.tenant_id, entry.adapter_digest))


def _slot(identity: Identity, session: Session) -> str:
    """A slot's name: of a tenant's session and subject, each in its length."""
    state = hashlib.sha256()
    for part in (str(identity.tenant_id), session.session_id, session.subject):
        text = part.encode()
        state.update(len(text).to_bytes(8, "big") + text)
    return state.hexdigest()


def _refused(error: Exception) -> SlotRefusedError:
    if isinstance(error, SlotRefusedError):
        return error
    return SlotRefusedError(Refusal.UNREADABLE, "a page that can be read", type(error).__name__)
