"""``python -m registry_service``: migrate, keys, bootstrap-token, serve, background."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from registry_service.domain.errors import RegistryError


def main() -> int:
    """Run one command; the exit codes are those of the design."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m registry_service")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("migrate", help="create roles and schema (REGISTRY_OWNER_DATABASE_URL)")
    commands.add_parser("keys", help="make missing signing keys and trust.json")
    commands.add_parser("serve", help="serve /v1 and /v2")
    commands.add_parser("background", help="number events, scan, sweep")
    token = commands.add_parser("bootstrap-token", help="make a token without one")
    token.add_argument("--subject", required=True)
    token.add_argument("--role", required=True)
    token.add_argument("--tenant")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except RegistryError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)  # noqa: T201 - a command's answer
        return error.exit_code
    except (ValueError, RuntimeError) as error:
        print(str(error), file=sys.stderr)  # noqa: T201 - a command's answer
        return 2


def _run(arguments: argparse.Namespace) -> int:
    # Imported here so that each command loads what it needs.
    if arguments.command == "migrate":
        from registry_service.store.migrate import migrate

        url = os.environ.get("REGISTRY_OWNER_DATABASE_URL")
        if not url:
            raise ValueError("expected REGISTRY_OWNER_DATABASE_URL, got none")
        migrate(url)
        return 0
    from registry_service import app
    from registry_service.backends import key_folder
    from registry_service.settings import settings_load

    if arguments.command == "keys":
        folder = os.environ.get("REGISTRY_KEY_DIR")
        if not folder:
            raise ValueError("expected REGISTRY_KEY_DIR, got none")
        verifier = os.environ.get("REGISTRY_VERIFIER_ID", "urn:adapter-registry:local")
        key_folder.keys_create(Path(folder), verifier)
    elif arguments.command == "serve":
        _serve()
    elif arguments.command == "background":
        app.background_run(app.context_build(settings_load()), app.stop_on_signals())
    else:
        from registry_service.usecases.tenants import token_create

        made = token_create(
            app.context_build(settings_load()),
            "bootstrap",
            subject=arguments.subject,
            role=arguments.role,
            tenant=arguments.tenant,
        )
        print(json.dumps({"id": made["id"], "token": made["token"]}))  # noqa: T201 - a command's answer
    return 0


def _serve() -> None:
    import uvicorn

    from registry_service.settings import settings_load

    settings = settings_load()
    # uvloop and httptools: without them keep-alive requests stall (docs/adr/0002).
    uvicorn.run(
        "registry_service.app:application",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        loop="uvloop",
        http="httptools",
        access_log=False,
        timeout_graceful_shutdown=10,
        server_header=False,
        # What a caller says of its own address is not believed, so it need not be read.
        proxy_headers=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
