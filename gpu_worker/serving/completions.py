"""From a request's bytes to a running generation: who it is, what it asks, what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.admission import Clock
from gpu_worker.serving.base_load import Text
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Lease, Residents
from gpu_worker.serving.sequence import EngineBusyError, EngineError, Generation, Job
from gpu_worker.serving.trust import Trust
from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.digests import digest_equal
from registry_service.domain.errors import (
    ForbiddenError,
    MalformedError,
    RegistryError,
    UnavailableError,
    UntrustedError,
)
from registry_service.domain.text import shown
from registry_service.trust.routing_context import (
    BASE_MARKER,
    RoutingContext,
    SeenContexts,
    expiry_check,
    routing_context_verify,
)

BODY_BYTES: Final = limits.MIB
_MAX_TOKENS_DEFAULT: Final = 64


class DeniedError(ForbiddenError):
    """The one answer to whoever may not run what they asked for, whatever the reason."""

    def __init__(self) -> None:
        super().__init__("this request is not allowed on this node")


class CompletionBody(BaseModel):
    """What a request may say. What runs it is in the routing context alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=limits.NEW_TOKENS)] = _MAX_TOKENS_DEFAULT
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """A request that runs."""

    context: RoutingContext
    body: CompletionBody
    generation: Generation
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may ask this node: pinned trust, this node's name, and when its process began."""

    trust: Trust
    node: str
    started_at: datetime
    now: Clock


class Completions:
    """Admits requests. Thread-safe."""

    def __init__(
        self,
        gate: Gate,
        base: BaseIdentity,
        text: Text,
        engine: Engine,
        residents: Residents,
        follower: Follower,
        *,
        max_tokens: int,
    ) -> None:
        self.base = base
        self.text = text
        self.residents = residents
        self._gate = gate
        self._engine = engine
        self._follower = follower
        self._max_tokens = max_tokens
        self._seen = SeenContexts(gate.now)

    @property
    def ready(self) -> bool:
        """True when new work is accepted."""
        return self._engine.alive and self._follower.fresh

    def start(self, token: str | None, content: bytes) -> Started:
        """Check a request in order (node, identity, form, adapter) and hand it to the engine.

        Raises:
            DeniedError: not allowed, for whatever reason. MalformedError: the body.
            UnavailableError: not now.
        """
        if not self.ready:
            raise UnavailableError("the node cannot renew its lease; no new work is accepted")
        context = self._identify(token, content)
        body = body_parse(content)
        prompt = self._prompt(body)
        lease = None if context.adapter is None else self._lease(context, context.adapter)
        try:
            generation = self._submit(context, body, prompt, lease)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return Started(context, body, generation, len(prompt))

    def _identify(self, token: str | None, content: bytes) -> RoutingContext:
        try:
            context = routing_context_verify(
                token or "",
                public_key=self._gate.trust.routing_key,
                issuer=self._gate.trust.routing_issuer,
                node=self._gate.node,
                base_digest=self.base.digest,
                body=content,
                now=self._gate.now(),
            )
            # Which contexts an earlier process used up is not known here.
            if context.issued_at < self._gate.started_at.replace(microsecond=0):
                raise UntrustedError("a routing context from before this process")
            if not digest_equal(context.tokenizer_digest, self.base.tokenizer_digest):
                raise UntrustedError("a routing context of another tokenizer")
            self._seen.claim(context.jti, context.expires_at)
        except UntrustedError as error:
            raise DeniedError from error
        return context

    def _prompt(self, body: CompletionBody) -> tuple[int, ...]:
        prompt = self.text.encode(body.prompt)
        most = min(limits.PROMPT_TOKENS, self._max_tokens - body.max_tokens)
        if not 0 < len(prompt) <= most:
            raise MalformedError(
                f"prompt: expected 1 to {max(most, 0)} tokens beside {body.max_tokens} new ones, "
                f"got {len(prompt)}"
            )
        return prompt

    def _lease(self, context: RoutingContext, adapter: str) -> Lease:
        try:
            return self.residents.acquire(
                tenant_id=context.tenant_id,
                tenant=context.tenant,
                adapter=adapter,
                digest=context.adapter_digest,
                template=context.chat_template_digest,
            )
        except UnavailableError:
            raise
        except RegistryError as error:
            raise DeniedError from error

    def _submit(
        self,
        context: RoutingContext,
        body: CompletionBody,
        prompt: tuple[int, ...],
        lease: Lease | None,
    ) -> Generation:
        def admit() -> None:
            if not self._follower.fresh:
                raise UnavailableError("the node's lease has run out", retry_after=1)
            try:
                expiry_check(context, self._gate.now())
            except UntrustedError as error:
                raise DeniedError from error

        name = None
        if context.adapter_digest != BASE_MARKER:
            name = Key(context.tenant_id, context.adapter_digest)
        on_end = (lambda: None) if lease is None else lease.release
        try:
            return self._engine.submit(Job(prompt, body.max_tokens, name, admit, on_end))
        except EngineBusyError as error:
            raise UnavailableError(str(error), retry_after=1) from error
        except EngineError as error:
            raise UnavailableError("the node is stopping") from error


def body_parse(content: bytes) -> CompletionBody:
    """Parse a body strictly.

    Raises:
        MalformedError: not JSON, an unknown field, or a value out of bounds.
    """
    document: Any = json_parse(content, what="body", limit=BODY_BYTES)
    try:
        return CompletionBody.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise MalformedError(f"{shown(where)}: {first['msg']}") from error
