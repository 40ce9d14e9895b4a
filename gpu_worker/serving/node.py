"""A serving node: its parts, how they hang together, and how they come up and go down."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.adapter_statistics import AdapterStatistics
from gpu_worker.serving.admission import Admission
from gpu_worker.serving.base_audit import BaseAudit
from gpu_worker.serving.base_load import LoadedBase
from gpu_worker.serving.chat_template import ChatTemplates
from gpu_worker.serving.completions import Completions, Serving
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.gate import Gate
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.identity import Layout
from gpu_worker.serving.loading import Loading
from gpu_worker.serving.memory import ledgers_open
from gpu_worker.serving.metrics import Looks, Metrics
from gpu_worker.serving.options import LoadLimits, Options
from gpu_worker.serving.parameters import BaseWatch, Unchanged
from gpu_worker.serving.prompts import Prompts
from gpu_worker.serving.recorder import Recorder
from gpu_worker.serving.residency_report import residency_report
from gpu_worker.serving.residents import Residents
from gpu_worker.serving.slot_events import event_log
from gpu_worker.serving.slots import Slots
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.tracing import Tracer, provider_close, provider_open
from gpu_worker.serving.trust import Trust
from gpu_worker.serving.turns import Runtime, Turns, library_versions
from gpu_worker.serving.usage_report import UsageReport
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace
from registry_service.client import RegistryClient
from registry_service.domain import limits
from registry_service.domain.errors import RefusedError

_LOG = logging.getLogger(__name__)
# Together with what else is asked of the registry at the end, far less than a stop may take.
_HEARTBEAT_SECONDS: Final = 2.0
_RELEASE_SECONDS: Final = 5.0


class Node:
    """A node's parts, and the order in which they come up and go down."""

    def __init__(
        self,
        client: RegistryClient,
        trust: Trust,
        store: NodeStore,
        base: BaseIdentity,
        loaded: LoadedBase,
        *,
        gate: Gate,
        load_limits: LoadLimits,
        traces: str | None = None,
    ) -> None:
        """``traces`` is the address of a collector; without one nothing is traced."""
        self.client, self.store, self.base, self.name = client, store, base, gate.node
        self.engine = Engine(
            loaded.model,
            stop_tokens=loaded.stop_tokens,
            workspace=replace(
                Workspace.of(
                    loaded.max_tokens, lanes=load_limits.running, tokens=load_limits.tokens
                ),
                adapters=load_limits.adapters,
                rank=load_limits.rank,
                tenant_lanes=load_limits.tenant_running,
                outstanding=limits.SEQUENCES,
            ),
        )
        self.ledgers = ledgers_open(
            self.engine,
            (tensor for _, tensor in loaded.parameters),
            device=loaded.model.device.type,
            budget=load_limits.memory,
        )
        held = HeldList(store, trust.list_key, trust.list_issuer, now=now)
        self.follower = Follower(client, store, self.name, held, gate.withdrawn)
        admission = Admission(
            client,
            trust,
            base,
            self.engine,
            store,
            held,
            now=now,
            base_unchanged=BaseWatch(Unchanged(loaded.parameters), self.engine.stop),
        )
        loading = Loading(admission, self.ledgers, client, node=self.name, load_limits=load_limits)
        self.placements = loading.placements
        metrics = Metrics(Looks(self._queues, self._resident_bytes, self._unloads))
        self.statistics = AdapterStatistics(metrics)
        slot_log = partial(
            event_log, base_digest=base.digest, tokenizer_digest=base.tokenizer_digest
        )
        self.slots = Slots(store.slots, store.node_key(), on_event=slot_log)
        self.turns = Turns(
            self.slots,
            self._runtime(loaded),
            self.ledgers.host,
            self.engine.memory().lanes // self.engine.workspace.lanes,
        )
        self.residents = Residents(
            loading,
            self.engine,
            store,
            held,
            now=now,
            acknowledge=self.follower.acknowledge,
            # In this order: after the first no state is kept, and the engine is purged by the
            # model's thread between two steps, where none is on its way any more.
            purges=[self.turns, self.engine],
            slots=[self.turns],
        )
        self.residents.watch(self.statistics)
        self.audit = BaseAudit(loaded.parameters, loaded.parameters_digest, self.engine.stop)
        self.residents.watch(self.audit)
        self.templates = ChatTemplates(loaded.text.special_tokens, now=now)
        self.traces = provider_open(traces, node=self.name)
        recorder = Recorder(metrics, self.statistics, Tracer(self.traces))
        self.completions = Completions(
            gate,
            base,
            Prompts(
                loaded.text,
                self.templates,
                loaded.chat_template,
                lane_tokens=self.engine.workspace.lane_tokens,
            ),
            Serving(self.engine, self.residents, self.follower, self.turns),
            recorder,
        )
        self.usage = UsageReport(client, recorder, self.name)

    def start(self, options: Options) -> None:
        """Take the revocation list, register, preload, reconcile with what was revoked, follow.

        Registering comes first: a node loads only under a lease that the registry gives it.

        Raises:
            RegistryError: no list that holds, a preloaded digest that is not valid, or the registry
                refuses this node.
        """
        self.engine.start()
        self.audit.start()
        self.residents.start()
        self.follower.list_refresh(self.residents)
        self.client.node_register(
            self.name, self.base.digest, options.public_url, self.base.catalog_digest
        )
        keys = []
        for wanted in options.preload:
            keys.append(self.residents.preload(wanted.tenant, wanted.adapter, wanted.digest))
            _LOG.info("preloaded %s/%s %s", wanted.tenant, wanted.adapter, wanted.digest)
        self.follower.reconcile(self.residents)
        gone = [key.digest for key in keys if not self.residents.serving(key)]
        if gone:
            raise RefusedError(f"preload: revoked meanwhile: {', '.join(gone)}")
        self.follower.start(self.residents)
        self.usage.start()

    def stop(self) -> None:
        """Let go of everything; what this node held others may hold from then on."""
        self.follower.stop()
        self.residents.stop()
        self.audit.stop()
        self.engine.stop()
        # Nothing of it serves any more: others may hold what it held, at once. A heartbeat that is
        # still under way would take the leases back.
        self.follower.quiet_wait(_HEARTBEAT_SECONDS)
        self.placements.close(_RELEASE_SECONDS)
        self.usage.stop()
        self.turns.close()
        self.slots.close()
        self.templates.close()
        self.store.close()
        provider_close(self.traces)

    def residency(self) -> list[dict[str, Any]]:
        """What operators see of each adapter."""
        return residency_report(self.residents, self.statistics, self.ledgers.device)

    def _runtime(self, loaded: LoadedBase) -> Runtime:
        model = loaded.model
        return Runtime(
            self.base.digest,
            str(model.dtype).removeprefix("torch."),
            Layout(layers=self.engine.layers, block_tokens=BLOCK_TOKENS),
            library_versions(model.device.type),
        )

    def _queues(self) -> dict[str, int]:
        return {**self.completions.requests.counts(), "loads": self.residents.loads_waiting}

    def _resident_bytes(self) -> dict[str, int]:
        return {str(name): size for name, size in self.ledgers.device.taken().items()}

    def _unloads(self) -> dict[str, int]:
        return {str(reason): count for reason, count in self.residents.unloads().items()}


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)
