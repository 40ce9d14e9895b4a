"""``adapterctl base``: base models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.connection import connection_of
from cli.options import AsJson, BaseDigest, Reason
from cli.output import ProgressLines, json_print, moment, pairs_print, say, short, table_print
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import MalformedError

_READERS = ("operator", "admin", "reviewer", "auditor", "publisher")

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
        ("CATALOG MADE BY", "DIGEST", "CLASS", "TRANSFORMERS", "AT"),
        (
            (
                made["worker"],
                short(made["catalogDigest"]),
                made["modelClass"],
                made["transformersVersion"],
                moment(made["at"]),
            )
            for made in item["catalogs"]
        ),
        "no catalogs yet",
    )


@app.command("catalog")
def base_catalog(
    source: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A base's folder with weights, or its config.json."),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")],
    base_digest: BaseDigest = None,
) -> None:
    """Make a base's catalog here, for 'adapterctl check'; config.json is enough."""
    from cli.base_catalog import catalog_build

    digest = None if base_digest is None else digest_parse(base_digest)
    content = catalog_build(source, digest)
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
    """Settle a disagreement: drop the catalog of the worker that is wrong."""
    with connection_of(context).client("operator", "admin") as client:
        item = client.catalog_drop(base, worker, reason)
    if as_json:
        json_print(item)
    else:
        pairs_print([("base", item["name"]), ("state", item["state"])])


@app.command("recatalog")
def catalog_remake(
    context: typer.Context, base: str, reason: Reason, as_json: AsJson = False
) -> None:
    """Have an admitted base's catalog made again, by workers with other transformers."""
    with connection_of(context).client("operator", "admin") as client:
        item = client.catalog_remake(base, reason)
    if as_json:
        json_print(item)
        return
    pairs_print(
        [
            ("base", item["name"]),
            ("transformersVersion", item["transformersVersion"]),
            ("recatalog", item["recatalog"]),
        ]
    )
    say("the admitted catalog stays in force until two workers agree on another version's")
