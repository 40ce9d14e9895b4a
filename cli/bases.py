"""``adapterctl base``: base models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.connection import connection_of
from cli.options import AsJson, Reason
from cli.output import ProgressLines, json_print, moment, pairs_print, say, short, table_print
from registry_service.domain.errors import MalformedError, RefusedError

_READERS = ("operator", "admin", "reviewer", "auditor", "publisher")

_BUILDER: Final = "gpu_worker.validation.catalog_process"

app = typer.Typer(no_args_is_help=True, help="Base models.")


@app.command("add")
def base_add(
    context: typer.Context,
    name: str,
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    as_json: AsJson = False,
) -> None:
    """Register a base: its digests, config, tokenizer and safetensors headers; no weights."""
    from cli.base_folder import base_read

    with ProgressLines("hashing") as progress:
        base = base_read(name, folder, progress)
    with connection_of(context).client("operator", "admin") as client:
        added = client.base_add(name, base.manifest, base.files, base.headers)
    if as_json:
        json_print(added)
        return
    pairs_print(
        [
            ("name", added["name"]),
            ("baseModelDigest", added["baseModelDigest"]),
            ("state", added["state"]),
        ]
    )
    if added["state"] == "PENDING":
        say("it is usable once two workers made the same catalog of it")


@app.command("list")
def base_list(context: typer.Context, as_json: AsJson = False) -> None:
    """Bases by name; a tenant's token sees those granted to it."""
    with connection_of(context).client(*_READERS) as client:
        items = list(client.base_list())
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("BASE", "DIGEST", "STATE", "CATALOG", "QUANTIZATION", "CREATED"),
        (
            (
                item["name"],
                short(item["baseModelDigest"]),
                item["state"],
                short(item["catalogDigest"]),
                item["quantization"],
                moment(item["createdAt"]),
            )
            for item in items
        ),
        "no bases",
    )


@app.command("show")
def base_show(context: typer.Context, base: str, as_json: AsJson = False) -> None:
    """One base, by name or digest."""
    with connection_of(context).client(*_READERS) as client:
        item = client.base_show(base)
    if as_json:
        json_print(item)
        return
    nested = ("files", "catalogs")
    pairs_print((key, value) for key, value in item.items() if key not in nested)
    table_print(
        "",
        ("FILE", "DIGEST", "BYTES"),
        ((file["path"], short(file["digest"]), file["size"]) for file in item["files"]),
        "no files",
    )
    table_print(
        "",
        ("CATALOG MADE BY", "DIGEST", "AT"),
        ((c["worker"], short(c["catalogDigest"]), moment(c["at"])) for c in item["catalogs"]),
        "no catalogs yet",
    )


@app.command("catalog")
def base_catalog(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")],
) -> None:
    """Make a base's catalog on this machine, for 'adapterctl check --catalog'."""
    content = catalog_build(folder)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise MalformedError(f"cannot write {out}: {error.strerror}") from error
    say(f"{out}: {len(content):,} bytes")


@app.command("grant")
def base_grant(context: typer.Context, base: str, tenant: str, as_json: AsJson = False) -> None:
    """Let a tenant see and use a base."""
    with connection_of(context).client("operator", "admin") as client:
        item = client.base_grant(base, tenant)
    if as_json:
        json_print(item)
    else:
        pairs_print([("base", item["name"]), ("grants", item["grants"])])


@app.command("drop-catalog")
def catalog_drop(
    context: typer.Context, base: str, worker: str, reason: Reason, as_json: AsJson = False
) -> None:
    """Settle a CONFLICTED base: drop the catalog of the worker that is wrong."""
    with connection_of(context).client("operator", "admin") as client:
        item = client.catalog_drop(base, worker, reason)
    if as_json:
        json_print(item)
    else:
        pairs_print([("base", item["name"]), ("state", item["state"])])


def catalog_build(folder: Path) -> bytes:
    """The catalog of a base's folder, made by the worker's builder in a process of its own.

    Raises:
        MalformedError: not a base that can be read. RefusedError: one that is refused.
    """
    from cli.base_folder import base_read

    with ProgressLines("hashing") as progress:
        digest = base_read(folder.name, folder, progress).digest
    command = [sys.executable, "-m", _BUILDER, str(folder), digest]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    kind, _, reason = (lines[-1] if lines else "").partition(": ")
    error = RefusedError if kind.endswith(RefusedError.__name__) else MalformedError
    raise error(f"no catalog of {folder}: {reason or f'the builder ended with {done.returncode}'}")
