"""``adapterctl check``: the static checks on a folder, without a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.options import AsJson, BaseDigest
from cli.output import json_print, pairs_print
from cli.report_print import findings_print, modules_print
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError

if TYPE_CHECKING:
    from registry_service.domain.catalog import Catalog
    from registry_service.domain.verification import BaseFacts

# A catalog names a base. Made of a config alone for this one check, it may name none that there is.
_NO_BASE: Final = Digest("sha256:" + "0" * 64)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("check")(check)


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A training output folder.")],
    base: Annotated[
        Path | None, typer.Option(help="The base model's folder, with its weights.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option(help="The base's catalog, of 'adapterctl base catalog'.")
    ] = None,
    base_config: Annotated[
        Path | None, typer.Option(help="The base's config.json alone; needs the worker extra.")
    ] = None,
    base_digest: BaseDigest = None,
    allow_full_tensors: Annotated[
        bool,
        typer.Option(
            "--allow-full-tensors",
            help="Check as for a tenant that may publish whole tensors of the base.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Would the registry take this adapter? Exit 0 for pass, 3 for refuse."""
    from cli.check import check_folder

    given = [path for path in (base, catalog, base_config) if path is not None]
    if len(given) != 1:
        raise MalformedError(
            "name one of --catalog FILE, --base DIR or --base-config FILE: the base to check "
            "against"
        )
    if catalog is not None:
        against = _against_catalog(catalog, base_digest)
    elif base is not None:
        against = _against_base(base, base_digest)
    else:
        against = _against_config(given[0], base_digest, folder)
    result = check_folder(folder, *against, full_tensors=allow_full_tensors)
    if base_config is not None and base_digest is None:
        result["baseDigest"] = None
    if as_json:
        json_print(result)
    else:
        pairs_print([("verdict", result["verdict"]), ("baseDigest", result["baseDigest"])])
        findings_print(result["findings"])
        modules_print(result["modules"])
    raise typer.Exit(0 if result["verdict"] == "pass" else 3)


def _against_catalog(path: Path, base_digest: str | None) -> tuple[Catalog, BaseFacts]:
    from registry_service.domain.catalog import catalog_parse
    from registry_service.domain.verification import BaseFacts

    if base_digest is not None:
        raise MalformedError("leave --base-digest out: a catalog names its base")
    try:
        with path.open("rb") as file:
            content = file.read(limits.CATALOG_BYTES + 1)
    except OSError as error:
        raise MalformedError(f"cannot read {path}: {error.strerror}") from error
    return catalog_parse(content), BaseFacts(None, None)


def _against_base(folder: Path, base_digest: str | None) -> tuple[Catalog, BaseFacts]:
    from cli.base_catalog import catalog_build
    from cli.base_folder import base_facts
    from registry_service.domain.catalog import catalog_parse

    digest = None if base_digest is None else digest_parse(base_digest)
    return catalog_parse(catalog_build(folder, digest)), base_facts(folder)


def _against_config(
    config: Path, base_digest: str | None, folder: Path
) -> tuple[Catalog, BaseFacts]:
    from cli.base_catalog import catalog_build
    from registry_service.domain.catalog import catalog_parse
    from registry_service.domain.manifest import DECLARATION_PATH
    from registry_service.domain.verification import BaseFacts

    if base_digest is None and (folder / DECLARATION_PATH).exists():
        raise MalformedError(
            f"{DECLARATION_PATH} names a base digest: give --base-digest to compare it with"
        )
    digest = _NO_BASE if base_digest is None else digest_parse(base_digest)
    return catalog_parse(catalog_build(config, digest)), BaseFacts(None, None)
