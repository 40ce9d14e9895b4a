"""From a request's bytes to its running sequences: who it is, what it asks, what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.gate import DeniedError, Gate
from gpu_worker.serving.meter import request_tuple
from gpu_worker.serving.openai_bodies import Body, PromptTooLongError
from gpu_worker.serving.prompts import Prompts
from gpu_worker.serving.recorder import Recorder
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Lease, Residents
from gpu_worker.serving.running import Marks, OpenRequests, Request, Running
from gpu_worker.serving.sequence import EngineBusyError, EngineError, Job, TooLongError
from gpu_worker.serving.turns import Turns
from registry_service.domain.errors import RegistryError, UnavailableError
from registry_service.trust.routing_context import RoutingContext

STOPPING: Final = "the node is stopping"


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs a node's requests."""

    engine: Engine
    residents: Residents
    follower: Follower
    turns: Turns


class Completions:
    """Admits requests. Thread-safe."""

    def __init__(
        self,
        gate: Gate,
        base: BaseIdentity,
        prompts: Prompts,
        serving: Serving,
        recorder: Recorder,
        *,
        requests: OpenRequests | None = None,
    ) -> None:
        self.base = base
        self.text = prompts.text
        self.residents = serving.residents
        self.recorder = recorder
        self.requests = requests or OpenRequests()
        self._gate = gate
        self._prompts = prompts
        self._serving = serving
        self._stopping = False

    @property
    def unready_reason(self) -> str | None:
        """Why no new work is accepted, or None when it is."""
        if self._stopping:
            return STOPPING
        if not self._serving.engine.alive:
            return "the engine is stopped"
        return self._serving.follower.stale_reason

    def stop(self) -> None:
        """Accept nothing new from now on; what runs goes on. Safe in a signal handler."""
        self._stopping = True

    def start(
        self,
        token: str | None,
        content: bytes,
        parse: Callable[[bytes], Body],
        *,
        request_id: str,
    ) -> Running:
        """Check a request in order (node, identity, form, adapter, prompt) and start it.

        Raises:
            DeniedError: not allowed, for whatever reason. BodyError: the body. UnavailableError:
            not now; of these TooManyRequestsError: this tenant has its share.
        """
        marks = Marks()
        self._accept_check()
        context = self._gate.enter(token, content)
        body = parse(content)
        marks.allowed = time.time_ns()
        who = request_tuple(context)
        with ExitStack() as held:
            self.requests.place_take(who.tenant_id, body.n)
            held.callback(self.requests.place_release, who.tenant_id, body.n)
            lease = None if context.adapter is None else self._lease(context, context.adapter)
            if lease is not None:
                held.callback(lease.release)
            marks.loaded = time.time_ns()
            template = None if lease is None else lease.chat_template
            prompt, most = self._prompts.tokens(body, template)
            turn = self._serving.turns.begin(context)
            marks.queued = time.time_ns()
            job = Job(
                prompt,
                most,
                adapter=None if lease is None else Key(who.tenant_id, who.adapter_digest),
                root_key=turn.root_key,
                tenant=who.tenant_id,
                lane_state=turn.lane_state,
                on_lane_state=turn.on_lane_state,
            )
            request = Request(request_id, who, body, len(prompt), marks)
            return self._submit(request, job, context, held)

    def _accept_check(self) -> None:
        if reason := self.unready_reason:
            raise UnavailableError(f"no new work is accepted: {reason}", retry_after=1)

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
        self, request: Request, job: Job, context: RoutingContext, held: ExitStack
    ) -> Running:
        running = Running(request, self._let_go(held.pop_all()))
        self.requests.add(running)
        count = request.body.n
        try:
            for index in range(count):
                sampling = self._prompts.sampling(request.body, index)
                generation = self._serving.engine.submit(
                    replace(
                        job,
                        admit=lambda: self._admit(context, running),
                        on_end=running.less,
                        sampling=sampling,
                        # The session goes on with the first answer.
                        on_lane_state=None if index else job.on_lane_state,
                    )
                )
                running.generations.append(generation)
        except EngineError as error:
            running.cancel()
            running.less(count - len(running.generations))
            raise _refusal(error) from error
        finally:
            running.less()
        return running

    def _let_go(self, held: ExitStack) -> Callable[[Running], None]:
        def let_go(running: Running) -> None:
            held.close()
            self.requests.remove(running)
            self.recorder.ended(running)

        return let_go

    def _admit(self, context: RoutingContext, running: Running) -> None:
        """What is checked again when a sequence leaves the queue."""
        if reason := self._serving.follower.stale_reason:
            raise UnavailableError(f"no new work is accepted: {reason}", retry_after=1)
        self._gate.recheck(context)
        running.joined()


def _refusal(error: EngineError) -> RegistryError:
    if isinstance(error, TooLongError):
        return PromptTooLongError(str(error))
    if isinstance(error, EngineBusyError):
        return UnavailableError(str(error), retry_after=1)
    return UnavailableError("the answer cannot begin on this node", retry_after=1)
