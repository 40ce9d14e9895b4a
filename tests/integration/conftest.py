"""A running service on real parts, its roles' tokens, and a small base with adapters for it."""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from registry_service.client import RegistryClient
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.declaration import Declaration
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.manifest import FileEntry, base_manifest_build
from registry_service.usecases.context import Context
from registry_service.usecases.maintenance import events_sequence
from registry_service.usecases.revocation_list import revocation_list_renew
from registry_service.usecases.scan import scan_next
from registry_service.usecases.tenants import token_create

WIDTH, RANK = 16, 4
CONFIG = b'{"model_type":"llama"}'


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch runs on one thread meanwhile."""
    from tests.integration import engine_world

    with engine_world.one_thread():
        yield


@pytest.fixture
def lasting(world: Any) -> Iterator[None]:
    """A request to the node for 100 tokens or more does not end while the test runs."""
    from tests.integration import engine_world

    with engine_world.lasting(world.node.engine):
        yield


def safetensors_bytes(tensors: Mapping[str, tuple[int, ...]], fill: int = 0) -> bytes:
    """A safetensors file of F32 tensors of the given shapes."""
    header, position = {}, 0
    for name, shape in tensors.items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<I", fill) * (position // 4)


def lora_tensors(width: int = WIDTH, rank: int = RANK) -> dict[str, tuple[int, ...]]:
    """The tensors of a LoRA on q_proj and v_proj of the two layers."""
    tensors = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = (rank, width)
            tensors[f"{path}.lora_B.weight"] = (width, rank)
    return tensors


@dataclass
class World:
    """The service's URL, its parts, a client per role, and the base."""

    url: str
    context: Context
    tokens: dict[str, str]
    base_digest: Digest
    base_files: dict[str, bytes]

    def client(self, role: str) -> RegistryClient:
        return RegistryClient(self.url, self.tokens[role])

    def settle(self) -> None:
        """Run what the background does, once."""
        while scan_next(self.context):
            pass
        while events_sequence(self.context):
            pass
        revocation_list_renew(self.context)

    def folder(
        self,
        path: Path,
        *,
        tenant: str = "t-1042",
        adapter: str = "support-zh",
        fill: int = 1,
        weights: bytes | None = None,
        config: dict[str, Any] | None = None,
        declare: dict[str, Any] | None = None,
    ) -> dict[str, bytes]:
        """An adapter's files, written to ``path``."""
        peft = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            **(config or {}),
        }
        shown = self.client("admin").base_show("tiny")
        values: dict[str, Any] = {
            "tenant": tenant,
            "adapter": adapter,
            "base_model_digest": self.base_digest,
            "peft_type": "LORA",
            "rank": RANK,
            "alpha": 8.0,
            "target_modules": ("q_proj", "v_proj"),
            "tokenizer_digest": shown["tokenizerDigest"],
            "chat_template_digest": shown["chatTemplateDigest"],
            "training_data_version": "2026-11",
            **(declare or {}),
        }
        files = {
            "adapter_model.safetensors": weights or safetensors_bytes(lora_tensors(), fill),
            "adapter_config.json": json.dumps(peft).encode(),
            "adapter-declaration.json": Declaration(**values).to_bytes(),
        }
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name).write_bytes(content)
        return files

    def publish(self, path: Path, *, label: str | None = None, **options: Any) -> str:
        """Publish an adapter as its tenant; its digest."""
        from registry_service.client_transfer import PublishFile

        tenant = options.get("tenant", "t-1042")
        adapter = options.get("adapter", "support-zh")
        files = [PublishFile(name, path / name) for name in self.folder(path, **options)]
        with self.client(f"publisher:{tenant}") as client:
            return client.push(tenant, adapter, files, label=label)

    def validate(self, *findings: dict[str, Any]) -> dict[str, Any]:
        """Do the next validation job as a worker, with these findings."""
        with self.client("validator") as worker:
            job = worker.job_claim("w1", ["validate"], [self.base_digest])
            assert job is not None
            worker.job_complete(job["id"], job["lease"], report=report(*findings))
        return job

    def approve(self, digest: str, tenant: str = "t-1042") -> None:
        """Approve as the reviewer, and let it be numbered."""
        with self.client("reviewer") as reviewer:
            reviewer.review_submit(tenant, digest, "approve", "looks right")
        self.settle()

    def admit(self, path: Path, **options: Any) -> str:
        """Publish, scan, validate and approve; the digest."""
        digest = self.publish(path, **options)
        self.settle()
        self.validate()
        self.approve(digest, options.get("tenant", "t-1042"))
        return digest


def report(*findings: dict[str, Any]) -> dict[str, Any]:
    """A worker's report."""
    return {
        "findings": list(findings),
        "checks": [9, 10, 11, 12, 13, 14, 15],
        "device": "cpu",
        "versions": {"torch": "2.13.0"},
        "sandbox": True,
        "measurements": {},
    }


def tiny_catalog(base_digest: Digest) -> Catalog:
    """The catalog of a two-layer base."""
    modules = [
        Module(
            name=f"model.layers.{layer}.self_attn.{name}",
            kind=Kind.LINEAR,
            class_name="Linear",
            in_size=WIDTH,
            out_size=WIDTH,
            tensors={"weight": (WIDTH, WIDTH)},
        )
        for layer in range(2)
        for name in ("q_proj", "v_proj")
    ]
    return Catalog(
        base_digest=base_digest,
        model_class="LlamaForCausalLM",
        model_type="llama",
        transformers_version="5.24.0",
        input_embedding=None,
        output_embedding=None,
        modules=tuple(modules),
    )


@pytest.fixture
def world(context: Context) -> Iterator[World]:
    """A service with two tenants, a usable base that both may use, and a token for each role."""
    import uvicorn

    from registry_service.api.service import service_build

    server = uvicorn.Server(
        uvicorn.Config(service_build(context), port=0, log_level="warning", loop="asyncio")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    admin = token_create(context, "test", subject="admin", role="admin", tenant=None)["token"]
    built = World(url, context, {"admin": admin}, Digest(""), {})
    try:
        world_prepare(built)
        yield built
    finally:
        server.should_exit = True
        thread.join()


def world_prepare(world: World) -> None:
    """Two tenants, a usable base that both may use, and a token for each role."""
    header = safetensors_bytes({"model.layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH)})
    files = [
        FileEntry(
            "config.json",
            digest_of(CONFIG),
            len(CONFIG),
            "application/vnd.cncf.model.weight.config.v1.raw",
        ),
        FileEntry(
            "model.safetensors",
            digest_of(header),
            len(header),
            "application/vnd.cncf.model.weight.v1.raw",
        ),
    ]
    built = base_manifest_build("tiny", files, "float32")
    world.base_digest = built.digest
    with world.client("admin") as admin:
        for tenant in ("t-1042", "t-2001"):
            admin.tenant_create(tenant)
        for subject, role, tenant in (
            ("pipeline-1", "publisher", "t-1042"),
            ("pipeline-2", "publisher", "t-2001"),
            ("rita", "reviewer", None),
            ("olga", "operator", None),
            ("worker-1", "validator", None),
            ("worker-2", "validator", None),
            ("node-1", "node", None),
            ("gate", "gateway", None),
            ("audra", "auditor", None),
        ):
            key = role if tenant is None else f"{role}:{tenant}"
            made = admin.token_create(subject, role, tenant)
            world.tokens[subject if key in world.tokens else key] = made["token"]
        admin.base_add(
            "tiny",
            built.manifest,
            {"config.json": CONFIG},
            {"model.safetensors": header[: 8 + int.from_bytes(header[:8], "little")]},
        )
        for tenant in ("t-1042", "t-2001"):
            admin.base_grant("tiny", tenant)
    catalog = tiny_catalog(built.digest).to_bytes()
    for worker in ("validator", "worker-2"):
        with world.client(worker) as client:
            client.catalog_submit("tiny", catalog)


def basic(token: str) -> dict[str, str]:
    """An OCI client's header."""
    return {"Authorization": "Basic " + base64.b64encode(f"any:{token}".encode()).decode()}
