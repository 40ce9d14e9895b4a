"""``adapterctl check``: the static checks on a folder, without a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import AsJson
from cli.output import findings_print, json_print, pairs_print
from registry_service.domain.errors import MalformedError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("check")(check)


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A training output folder.")],
    base: Annotated[Path | None, typer.Option(help="The base model's folder.")] = None,
    catalog: Annotated[
        Path | None, typer.Option(help="The base's catalog, of 'adapterctl base catalog'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Would the registry take this adapter? Exit 0 for pass, 3 for refuse."""
    from cli.base_folder import base_facts
    from cli.bases import catalog_build
    from cli.check import check_folder
    from registry_service.domain.catalog import catalog_parse
    from registry_service.domain.verification import BaseFacts

    if (base is None) == (catalog is None):
        raise MalformedError("name either --base DIR or --catalog FILE")
    if base is not None:
        content, facts = catalog_build(base), base_facts(base)
    else:
        assert catalog is not None  # noqa: S101 - one of the two is there
        content, facts = file_read(catalog), BaseFacts(None, None)
    result = check_folder(folder, catalog_parse(content), facts)
    if as_json:
        json_print(result)
    else:
        pairs_print([("verdict", result["verdict"]), ("baseDigest", result["baseDigest"])])
        findings_print(result["findings"])
    raise typer.Exit(0 if result["verdict"] == "pass" else 3)


def file_read(path: Path) -> bytes:
    """A file's bytes. Raises MalformedError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise MalformedError(f"cannot read {path}: {error.strerror}") from error
