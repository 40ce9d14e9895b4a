"""An identity of KV, as tests of keys, sidecars and slots take it."""

from __future__ import annotations

from uuid import UUID

from gpu_worker.serving.identity import Identity, Layout
from registry_service.domain.digests import digest_of

A, B = digest_of(b"adapter a"), digest_of(b"adapter b")
IDENTITY = Identity(
    format_version=1,
    tenant_id=UUID(int=1042),
    base_digest=digest_of(b"base"),
    adapters=((A, 1.0),),
    tokenizer_digest=digest_of(b"tokenizer"),
    chat_template_digest=digest_of(b"template"),
    dtype="float32",
    layout=Layout(layers=((2, 8, 8), (2, 8, 16)), block_tokens=64),
    engine_version="1",
    library_versions=(("torch", "2.13.0"), ("transformers", "5.24.0")),
)
