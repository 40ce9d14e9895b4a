"""Tiny bases and PEFT adapters on disk, and an in-memory registry for a serving node."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from gpu_worker.base_files import ProvenBase, base_prove
from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.gate import Gate
from gpu_worker.serving.trust import Trust, trust_parse
from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.backends.file_signer import FileSigner
from registry_service.domain.canonical import canonical_json
from registry_service.domain.declaration import Declaration
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import ConflictError, NotFoundError, UnavailableError
from registry_service.domain.manifest import FileEntry, adapter_manifest_build, media_type_of
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.revocation_list import (
    PAYLOAD_TYPE,
    RevocationList,
    Revoked,
    revocation_list_payload,
)
from registry_service.trust.routing_context import (
    BASE_MARKER,
    RoutingContext,
    routing_context_sign,
)
from registry_service.trust.verdict import (
    BaseClaims,
    VerdictClaims,
    base_statement,
    verdict_statement,
)

VOCABULARY = 96
TENANT, TENANT_ID = "t-1042", UUID(int=1042)
OTHER, OTHER_ID = "t-2001", UUID(int=2001)
ADAPTER = "support-zh"
NODE = "node-1"
VERIFIER = "urn:adapter-registry:test"
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    # Wide enough that torch shares its products, copies and sums among threads.
    "wide": {**_LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 4},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def base_make(folder: Path, kind: str = "llama") -> Path:
    """A random base of one kind, with a word tokenizer."""
    torch.manual_seed(7)
    raw = dict(CONFIGS[kind])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1024).save_pretrained(
        folder
    )
    return folder


def identity(proven: ProvenBase) -> BaseIdentity:
    """A base's identity with its own catalog."""
    catalog = catalog_build(proven.dir, proven.digest)
    return BaseIdentity(
        proven.digest, proven.tokenizer_digest, proven.chat_template_digest, catalog, "tiny"
    )


def peft_make(base: Path, folder: Path, seed: int, **options: Any) -> Any:
    """A PEFT model with random adapter weights, saved to ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **wanted))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" not in name:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
    assert any(isinstance(module, LoraLayer) for module in peft.modules())
    peft.save_pretrained(folder)
    return peft.eval()


def adapter_files(
    base: ProvenBase, folder: Path, *, tenant: str = TENANT, adapter: str = ADAPTER
) -> dict[str, bytes]:
    """The files of a saved adapter as they are published."""
    declaration = Declaration(
        tenant=tenant,
        adapter=adapter,
        base_model_digest=base.digest,
        peft_type="LORA",
        rank=4,
        alpha=8.0,
        target_modules="all-linear",
        tokenizer_digest=base.tokenizer_digest,
        chat_template_digest=base.chat_template_digest,
        training_data_version="1",
    )
    files = {
        name: (folder / name).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    return files | {"adapter-declaration.json": declaration.to_bytes()}


@dataclass
class Artifact:
    """One artifact in the fake registry."""

    tenant_id: UUID
    tenant: str
    adapter: str
    digest: Digest
    files: dict[str, bytes]
    revoked: bool = False


@dataclass
class FakeRegistry:
    """What a node sees of a registry, in memory. It answers like the real one: revoked is 404."""

    folder: Path
    base: ProvenBase
    url: str = "http://registry.test"
    state: str = "USABLE"
    down: bool = False
    artifacts: dict[Digest, Artifact] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    acknowledged: list[tuple[str, str, int]] = field(default_factory=list)
    # Blocks that each acknowledgement named.
    purged: list[int] = field(default_factory=list)
    # What the registered node has not acknowledged, as its heartbeat is answered.
    outstanding: dict[Digest, dict[str, Any]] = field(default_factory=dict)
    heartbeats: list[list[dict[str, Any]]] = field(default_factory=list)
    registered: list[tuple[str, str]] = field(default_factory=list)
    catalogs: list[bytes] = field(default_factory=list)
    pulls: int = 0
    used: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    overdue: list[dict[str, Any]] = field(default_factory=list)
    lost_placements: list[dict[str, Any]] = field(default_factory=list)
    placements: dict[str, str] = field(default_factory=dict)
    listed: tuple[Revoked, ...] = ()
    list_number: int = 0
    verdict_changes: dict[str, Any] = field(default_factory=dict)
    statement_changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.verdict_signer = FileSigner.create(self.folder / "verdict.pem")
        self.routing_signer = FileSigner.create(self.folder / "routing.pem")
        self.list_signer = FileSigner.create(self.folder / "revocation-list.pem")
        self.list_issue()
        self.lock = threading.Lock()

    def trust(self) -> Trust:
        return trust_parse(self.trust_json())

    def trust_json(self) -> bytes:
        return canonical_json(
            {
                "verdict": {"publicKey": self.verdict_signer.public_pem, "verifierId": VERIFIER},
                "routingContext": {"publicKey": self.routing_signer.public_pem, "issuer": VERIFIER},
                "revocationList": {"publicKey": self.list_signer.public_pem, "issuer": VERIFIER},
            }
        )

    # What tests do

    def publish(self, files: dict[str, bytes], *, tenant: str = TENANT) -> Digest:
        digest = adapter_manifest_build(ADAPTER, _entries(files), "fp32").digest
        tenant_id = TENANT_ID if tenant == TENANT else OTHER_ID
        self.artifacts[digest] = Artifact(tenant_id, tenant, ADAPTER, digest, files)
        return digest

    def revoke(self, digest: Digest, deadline: int | None = None) -> None:
        artifact = self.artifacts[digest]
        artifact.revoked = True
        body = {} if deadline is None else {"deadlineSeconds": deadline}
        self._tell("artifact.revoked", artifact.tenant, artifact.tenant_id, digest, body)
        if self.registered:
            self.outstanding[digest] = {
                "tenantId": str(artifact.tenant_id),
                "adapterDigest": digest,
                "deadlineSeconds": deadline,
            }

    def context(self, body: bytes, digest: Digest | None, **changes: Any) -> str:
        now = datetime.now(UTC)
        values: dict[str, Any] = {
            "tenant_id": TENANT_ID,
            "tenant": TENANT,
            "subject": "app",
            "session_id": "s-1",
            "adapter": None if digest is None else ADAPTER,
            "base_digest": self.base.digest,
            "adapter_digest": digest or BASE_MARKER,
            "tokenizer_digest": self.base.tokenizer_digest,
            "chat_template_digest": self.base.chat_template_digest,
            "grant_epoch": 1,
            "node": NODE,
            "jti": str(uuid4()),
            "issued_at": now,
            "expires_at": now + timedelta(seconds=50),
            "body_digest": digest_of(body),
            **changes,
        }
        return routing_context_sign(RoutingContext(**values), VERIFIER, self.routing_signer)

    def list_issue(self, *entries: Revoked, life: float = 86400, **changes: Any) -> bytes:
        """Sign the next list over everything that was listed before, and these entries."""
        now = datetime.now(UTC).replace(microsecond=0)
        self.listed += entries
        self.list_number = changes.pop("number", self.list_number + 1)
        revocations = RevocationList(
            number=self.list_number,
            issuer=changes.pop("issuer", VERIFIER),
            issued_at=changes.pop("issued_at", now),
            expires_at=changes.pop("expires_at", now + timedelta(seconds=life)),
            entries=self.listed,
        )
        signer = changes.pop("signer", self.list_signer)
        payload = revocation_list_payload(revocations)
        self.listing = dsse_sign(PAYLOAD_TYPE, payload, signer.sign, signer.key_id)
        return self.listing

    def withdraw(self, subject: str, epoch: int) -> None:
        """A subject may not run the tenant's adapter any more."""
        body = {"adapter": ADAPTER, "epoch": epoch}
        self._tell("grant.withdrawn", TENANT, TENANT_ID, subject, body)

    def _tell(
        self, kind: str, tenant: str, tenant_id: UUID, subject: str, body: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "index": len(self.events) + 1,
                "id": str(uuid4()),
                "kind": kind,
                "tenant": tenant,
                "tenantId": str(tenant_id),
                "subject": subject,
                "actor": "olga",
                "at": "2026-11-30T00:00:00Z",
                "body": body,
            }
        )

    # What a node calls

    def revocation_list(self, held: int = 0) -> bytes | None:
        self._reach()
        return None if held == self.list_number else self.listing

    def base_show(self, base: str) -> dict[str, Any]:
        self._reach()
        if base != self.base.digest:
            raise NotFoundError("not found")
        return {
            "name": "tiny",
            "baseModelDigest": self.base.digest,
            "state": self.state,
            "tokenizerDigest": self.base.tokenizer_digest,
            "chatTemplateDigest": self.base.chat_template_digest,
        }

    def base_statement(self, base: str) -> bytes:
        now = datetime.now(UTC).replace(microsecond=0)
        values: dict[str, Any] = {
            "base_digest": self.base.digest,
            "name": "tiny",
            "catalog_digest": identity(self.base).catalog_digest,
            "policy_digest": digest_of(b"policy"),
            "issued_at": now,
            "not_after": now + timedelta(days=1),
            "verifier_id": VERIFIER,
            **self.statement_changes,
        }
        return self._signed(base_statement(BaseClaims(**values)))

    def catalog_submit(self, base: str, catalog: bytes) -> dict[str, Any]:
        self.catalogs.append(catalog)
        return {}

    def verdict(self, tenant: str, digest: str) -> bytes:
        artifact = self._artifact(tenant, digest)
        now = datetime.now(UTC).replace(microsecond=0)
        values: dict[str, Any] = {
            "adapter_digest": artifact.digest,
            "base_digest": self.base.digest,
            "tenant_id": artifact.tenant_id,
            "tenant": artifact.tenant,
            "adapter": artifact.adapter,
            "files": tuple(sorted((n, digest_of(d)) for n, d in artifact.files.items())),
            "catalog_digest": identity(self.base).catalog_digest,
            "policy_digest": digest_of(b"policy"),
            "input_attestations": (),
            "issued_at": now,
            "not_after": now + timedelta(days=1),
            "verifier_id": VERIFIER,
            **self.verdict_changes,
        }
        return self._signed(verdict_statement(VerdictClaims(**values)))

    def pull(self, tenant: str, adapter: str, digest: str, into: Path) -> None:
        artifact = self._artifact(tenant, digest)
        self.pulls += 1
        into.mkdir(parents=True)
        for name, data in artifact.files.items():
            (into / name).write_bytes(data)
            (into / name).chmod(0o444)

    def node_register(self, node: str, base_digest: str, url: str, catalog_digest: str) -> None:
        self._reach()
        self.registered.append((node, catalog_digest))

    def node_heartbeat(
        self, node: str, feed_index: int, residents: list[dict[str, Any]]
    ) -> dict[str, Any]:
        self._reach()
        self.heartbeats.append(residents)
        return {
            "leaseSeconds": 15,
            "revocations": [*self.overdue, *self.outstanding.values()],
            "lostPlacements": self.lost_placements,
        }

    def placement_take(self, node: str, tenant: str, digest: str) -> dict[str, Any]:
        artifact = self._artifact(tenant, digest)
        with self.lock:
            if self.placements.get(digest, node) != node:
                raise ConflictError("expected fewer than 1 other nodes that hold it, got 1")
            self.placements[digest] = node
        return {"node": node, "tenantId": artifact.tenant_id, "adapterDigest": digest}

    def placement_release(self, node: str, tenant: str, digest: str) -> None:
        self._reach()
        with self.lock:
            if self.placements.get(digest) == node:
                del self.placements[digest]

    def manifest(self, tenant: str, adapter: str, reference: str) -> bytes:
        files = self._artifact(tenant, reference).files
        return adapter_manifest_build(adapter, _entries(files), "fp32").manifest

    def node_acknowledge(
        self, node: str, tenant_id: str, digest: str, freed_bytes: int, purged_blocks: int
    ) -> None:
        self._reach()
        self.purged.append(purged_blocks)
        # Last: whoever waits for it finds the rest.
        self.acknowledged.append((tenant_id, digest, freed_bytes))
        self.outstanding.pop(Digest(digest), None)

    def usage_report(self, node: str, run: str, items: list[dict[str, Any]]) -> None:
        self._reach()
        self.used |= {(run, item["tenantId"], item["adapterDigest"]): item for item in items}

    def feed(self, after: int, wait: float = 0) -> dict[str, Any]:
        self._reach()
        end = time.monotonic() + min(wait, 0.5)
        while len(self.events) <= after and time.monotonic() < end:
            time.sleep(0.01)
        items = self.events[after:]
        return {"items": items, "next": items[-1]["index"] if items else after}

    def _artifact(self, tenant: str, digest: str) -> Artifact:
        self._reach()
        artifact = self.artifacts.get(Digest(digest))
        if artifact is None or artifact.revoked or artifact.tenant != tenant:
            raise NotFoundError("not found")
        return artifact

    def _signed(self, payload: bytes) -> bytes:
        signer = self.verdict_signer
        return dsse_sign(IN_TOTO, payload, signer.sign, signer.key_id)

    def _reach(self) -> None:
        if self.down:
            raise UnavailableError("the registry is down")


def gate(registry: FakeRegistry, base: BaseIdentity, node: str = NODE) -> Gate:
    """Who may ask the node, which began half a minute ago."""
    started = datetime.now(UTC) - timedelta(seconds=30)
    return Gate(
        registry.trust(), base, node=node, started_at=started, now=lambda: datetime.now(UTC)
    )


def prove(folder: Path) -> ProvenBase:
    """Prove a base directory."""
    return base_prove(folder)


def _entries(files: dict[str, bytes]) -> list[FileEntry]:
    return [
        FileEntry(name, digest_of(data), len(data), media_type_of(name))
        for name, data in files.items()
    ]
