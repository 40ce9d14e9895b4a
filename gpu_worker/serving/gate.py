"""Who may ask this node: the routing context, checked on arrival and when the queue is left."""

from __future__ import annotations

from datetime import datetime

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.admission import Clock
from gpu_worker.serving.trust import Trust
from gpu_worker.serving.withdrawn import Withdrawn
from registry_service.domain.digests import digest_equal
from registry_service.domain.errors import ForbiddenError, UnavailableError, UntrustedError
from registry_service.trust.routing_context import (
    RoutingContext,
    SeenContexts,
    expiry_check,
    routing_context_verify,
)


class DeniedError(ForbiddenError):
    """The one answer to whoever may not run what they asked for, whatever the reason."""

    def __init__(self) -> None:
        super().__init__("this request is not allowed on this node")


class Gate:
    """Checks routing contexts for one node and base. Thread-safe."""

    def __init__(
        self, trust: Trust, base: BaseIdentity, *, node: str, started_at: datetime, now: Clock
    ) -> None:
        """``started_at`` is when this process began: what an earlier one used up is not known."""
        self.node = node
        self._now = now
        self._trust = trust
        self._base = base
        self._started_at = started_at.replace(microsecond=0)
        self._seen = SeenContexts(now)
        self.withdrawn = Withdrawn(now)

    def enter(self, token: str | None, body: bytes) -> RoutingContext:
        """The context of a request, which is used up by this.

        Raises:
            DeniedError: it does not hold here and now, for this body and for the first time.
            UnavailableError: whether its grant was withdrawn is not known.
        """
        try:
            context = routing_context_verify(
                token or "",
                public_key=self._trust.routing_key,
                issuer=self._trust.routing_issuer,
                node=self.node,
                base_digest=self._base.digest,
                body=body,
                now=self._now(),
            )
            self._grant_check(context)
            if context.issued_at < self._started_at:
                raise UntrustedError("a routing context from before this process")
            if not digest_equal(context.tokenizer_digest, self._base.tokenizer_digest):
                raise UntrustedError("a routing context of another tokenizer")
            if context.adapter is None and not digest_equal(
                context.chat_template_digest, self._base.chat_template_digest
            ):
                # An adapter may have one of its own: that is compared when it is known.
                raise UntrustedError("a routing context of another chat template")
            self._seen.claim(context.jti, context.expires_at)
        except UntrustedError as error:
            raise DeniedError from error
        return context

    def recheck(self, context: RoutingContext) -> None:
        """Check a context again, when its request leaves the queue.

        Raises:
            DeniedError: its grant was withdrawn meanwhile. UnavailableError: whether it was is not
                known, or it is over: the request waited for longer than it holds.
        """
        try:
            self._grant_check(context)
        except UntrustedError as error:
            raise DeniedError from error
        try:
            expiry_check(context, self._now())
        except UntrustedError as error:
            raise UnavailableError(
                "the request waited for longer than its routing context holds; ask again",
                retry_after=1,
            ) from error

    def _grant_check(self, context: RoutingContext) -> None:
        """Refuse a context whose grant is not sure to hold still.

        Raises:
            UntrustedError: it was withdrawn. UnavailableError: the node missed whether it was; of
                all adapters alike, so that this tells nobody anything.
        """
        if self.withdrawn.knows(context):
            raise UntrustedError("a routing context of a withdrawn grant")
        if wait := self.withdrawn.unsure_seconds(context):
            raise UnavailableError(
                "this node missed for a while which grants were withdrawn; ask again",
                retry_after=wait,
            )
