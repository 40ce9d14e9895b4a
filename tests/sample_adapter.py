"""A small adapter on a small base, as bytes: what the static tests start from and then spoil."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.file_set import HEAD_BYTES, TAIL_BYTES, WHOLE_PATHS, FileFact
from registry_service.domain.findings import Finding
from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES
from registry_service.domain.verification import BaseFacts, StaticInputs, own_facts, static_check

BASE_DIGEST = "sha256:" + "b" * 64
TOKENIZER = "sha256:" + "1" * 64
TEMPLATE = "sha256:" + "2" * 64
WIDTH, VOCABULARY, LAYERS, RANK = 16, 32, 2, 4
WEIGHTS, CONFIG, DECLARATION = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "adapter-declaration.json",
)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I64": 8, "BOOL": 1}

Tensors = Mapping[str, tuple[str, Sequence[int]]]


def module(name: str, kind: Kind, size_in: int, size_out: int) -> Module:
    shape = (size_out, size_in) if kind is Kind.LINEAR else (size_in, size_out)
    return Module(
        name=name,
        kind=kind,
        class_name={"linear": "Linear", "conv1d": "Conv1D"}.get(kind, "Embedding"),
        in_size=size_in,
        out_size=size_out,
        parameters=("weight",),
        tensors={"weight": shape},
    )


def other(name: str, **tensors: tuple[int, ...]) -> Module:
    return Module(
        name=name,
        kind=Kind.OTHER,
        class_name="Block",
        parameters=tuple(tensors),
        tensors=tensors,
    )


def catalog(**changes: Any) -> Catalog:
    """A decoder with two layers: q_proj and v_proj Linear, c_fc Conv1D, a norm, wte, lm_head."""
    modules = [other("model"), module("model.wte", Kind.EMBEDDING, VOCABULARY, WIDTH)]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        modules += [
            other(at),
            other(f"{at}.self_attn"),
            module(f"{at}.self_attn.q_proj", Kind.LINEAR, WIDTH, WIDTH),
            module(f"{at}.self_attn.v_proj", Kind.LINEAR, WIDTH, WIDTH // 2),
            module(f"{at}.mlp.c_fc", Kind.CONV1D, WIDTH, 3 * WIDTH),
            other(f"{at}.norm", weight=(WIDTH,)),
        ]
    modules.append(module("lm_head", Kind.LINEAR, WIDTH, VOCABULARY))
    fields: dict[str, Any] = {
        "base_digest": BASE_DIGEST,
        "model_class": "SmallForCausalLM",
        "model_type": "small",
        "transformers_version": "5.24.0",
        "input_embedding": "model.wte",
        "output_embedding": "lm_head",
        "modules": tuple(modules),
    }
    return Catalog(**{**fields, **changes})


def config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        **changes,
    }


def tensors(dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the config above needs."""
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            result[f"{key}.lora_A.weight"] = (dtype, (RANK, WIDTH))
            result[f"{key}.lora_B.weight"] = (dtype, (out, RANK))
    return result


def declaration(**changes: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "tenant": "t-1042",
        "adapter": "support-zh",
        "baseModelDigest": BASE_DIGEST,
        "peftType": "LORA",
        "rank": RANK,
        "alpha": 8,
        "targetModules": ["q_proj", "v_proj"],
        "tokenizerDigest": TOKENIZER,
        "chatTemplateDigest": TEMPLATE,
        "trainingDataVersion": "2026-11",
        "evaluationReportDigest": None,
        "baseQuantization": "none",
        "maxReplicas": 2,
        **changes,
    }


def raw(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, padded to 8 bytes as the library pads it."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def weights(entries: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A well-formed file of zeros."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    position = 0
    for name, (dtype, shape) in entries.items():
        end = position + math.prod(shape) * _BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return raw(json.dumps(fields, separators=(",", ":")).encode(), bytes(position))


def files(**changes: bytes | None) -> dict[str, bytes]:
    """The adapter's files; keyword names are weights, config and declaration."""
    chosen = {
        "weights": weights(tensors()),
        "config": json.dumps(config()).encode(),
        "declaration": json.dumps(declaration()).encode(),
        **changes,
    }
    paths = {"weights": WEIGHTS, "config": CONFIG, "declaration": DECLARATION}
    return {paths[name]: data for name, data in chosen.items() if data is not None}


def inputs(content: Mapping[str, bytes], **changes: Any) -> StaticInputs:
    """The inputs of the static checks for these files."""
    from registry_service.domain.digests import digest_of

    weight = content.get(WEIGHTS)
    made = StaticInputs(
        files=tuple(fact(path, data) for path, data in content.items()),
        header_prefix=None if weight is None else weight[:HEADER_PREFIX_BYTES],
        weight_size=len(weight or b""),
        config=content.get(CONFIG),
        declaration=content.get(DECLARATION),
        catalog=catalog(),
        base=BaseFacts(TOKENIZER, TEMPLATE),
        own=own_facts(
            {path: digest_of(data) for path, data in content.items()},
            {path: content[path] for path in WHOLE_PATHS if path in content},
        ),
    )
    return replace(made, **changes)


def fact(path: str, data: bytes, *, is_link: bool = False) -> FileFact:
    return FileFact(path, len(data), data[:HEAD_BYTES], data[-TAIL_BYTES:], is_link)


def check(content: Mapping[str, bytes], **changes: Any) -> tuple[Finding, ...]:
    return static_check(inputs(content, **changes)).findings


def codes(findings: Sequence[Finding]) -> set[str]:
    return {finding.code.value for finding in findings}


def write(folder: Path, content: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path, data in content.items():
        (folder / path).write_bytes(data)
    return folder
