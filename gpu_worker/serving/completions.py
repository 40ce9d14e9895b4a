"""From a request's bytes to its running sequences: who it is, what it asks, what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.gate import DeniedError, Gate
from gpu_worker.serving.meter import request_tuple
from gpu_worker.serving.openai_bodies import Body, BodyError, PromptTooLongError
from gpu_worker.serving.prompts import Prompts
from gpu_worker.serving.recorder import Recorder
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Lease, Residents
from gpu_worker.serving.running import Caller, Marks, OpenRequests, Request, Running
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
        self.recorder = recorder
        self.requests = requests or OpenRequests()
        self._gate = gate
        self._prompts = prompts
        self._serving = serving
        self._stopping = False

    @property
    def engine_alive(self) -> bool:
        """False when the model's thread is dead, which only another process mends."""
        return self._serving.engine.alive

    @property
    def unready_reason(self) -> str | None:
        """Why no new work is accepted, or None when it is."""
        if self._stopping:
            return STOPPING
        if not self.engine_alive:
            return "the engine is stopped"
        return self._serving.follower.stale_reason

    def stop(self) -> None:
        """Accept nothing new, and hand back what waits for an adapter; what runs goes on."""
        self._stopping = True
        self._serving.residents.stop()

    def start(
        self,
        token: str | None,
        content: bytes,
        parse: Callable[[bytes], Body],
        *,
        request_id: str,
        caller: Caller | None = None,
    ) -> Running:
        """Check a request in order (node, identity, form, adapter, prompt) and start it.

        A ``caller`` that leaves meanwhile is not waited for: what has not begun does not begin.

        Raises:
            DeniedError: not allowed, for whatever reason. BodyError: the body. UnavailableError:
            not now; of these TooManyRequestsError: this tenant has its share.
        """
        marks, caller = Marks(), caller or Caller()
        self._accept_check()
        context = self._gate.enter(token, content)
        caller.who = request_tuple(context)
        body = parse(content)
        marks.allowed = time.time_ns()
        running = Running(Request(request_id, caller.who, body, marks), self.recorder.ended)
        try:
            running.held.enter_context(self.requests.held(running))
            caller.follow(running)
            self._submit(running, self._job(running, context), context)
        except BaseException as error:
            # Whatever it was: what began ends, and what never began holds nothing.
            running.cancel()
            running.less(body.n - len(running.generations))
            if isinstance(error, EngineError):
                raise _refusal(error) from error
            raise
        finally:
            running.less()
        return running

    def _accept_check(self) -> None:
        if reason := self.unready_reason:
            raise UnavailableError(f"no new work is accepted: {reason}", retry_after=1)

    def _job(self, running: Running, context: RoutingContext) -> Job:
        """What the engine is asked for; the adapter is held from here on."""
        request, marks = running.request, running.request.marks
        key = template = None
        if context.adapter is not None:
            self._choices_check(request.body.n)
            key = Key(context.tenant_id, context.adapter_digest)
            lease = self._lease(key, context, context.adapter, request.body.n)
            running.held.callback(lease.release)
            template = lease.chat_template
            running.go_check()
        marks.loaded = time.time_ns()
        prompt, most = self._prompts.tokens(request.body, template, context.tenant_id)
        running.prompt_tokens = len(prompt)
        turn = self._serving.turns.begin(context, request.body.n)
        running.held.callback(turn.release)
        marks.queued = time.time_ns()
        return Job(
            prompt,
            most,
            adapter=key,
            root_key=turn.root_key,
            tenant=context.tenant_id,
            lane_state=turn.lane_state,
            on_restore_failed=turn.on_restore_failed,
            on_lane_filled=turn.on_lane_filled,
            wants_lane_state=turn.wants_lane_state,
            on_lane_state=turn.on_lane_state,
        )

    def _choices_check(self, choices: int) -> None:
        """More than may run on one adapter at once never will, whenever it is asked again."""
        most = self._serving.residents.most_sequences
        if choices > most:
            raise BodyError(f"n: expected at most {most} on an adapter, got {choices}", "n")

    def _lease(self, key: Key, context: RoutingContext, adapter: str, sequences: int) -> Lease:
        try:
            return self._serving.residents.acquire(
                tenant_id=key.tenant_id,
                tenant=context.tenant,
                adapter=adapter,
                digest=key.digest,
                template=context.chat_template_digest,
                sequences=sequences,
            )
        except UnavailableError:
            raise
        except RegistryError as error:
            raise DeniedError from error

    def _submit(self, running: Running, job: Job, context: RoutingContext) -> None:
        for index in range(running.request.body.n):
            running.go_check()
            one = replace(
                job,
                # Not the job itself: it has the state, which goes when it is in its lanes.
                admit=partial(self._admit, context, running, job.adapter),
                on_end=running.less,
                sampling=self._prompts.sampling(running.request.body, index),
                # The session goes on with the first answer.
                on_lane_state=None if index else job.on_lane_state,
            )
            running.add(self._serving.engine.submit(one))

    def _admit(self, context: RoutingContext, running: Running, adapter: Hashable) -> None:
        """What is checked again when a sequence leaves the queue: nothing revoked begins."""
        if reason := self._serving.follower.stale_reason:
            raise UnavailableError(f"no new work is accepted: {reason}", retry_after=1)
        self._gate.recheck(context)
        if isinstance(adapter, Key) and not self._serving.residents.usable(adapter):
            raise DeniedError
        running.joined()


def _refusal(error: EngineError) -> RegistryError:
    if isinstance(error, TooLongError):
        return PromptTooLongError(str(error))
    if isinstance(error, EngineBusyError):
        return UnavailableError(str(error), retry_after=1)
    return UnavailableError("the answer cannot begin on this node", retry_after=1)
