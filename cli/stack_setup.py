"""What ``adapterctl up`` puts into a running service: role tokens, bases, and the profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cli.base_folder import base_read
from cli.connection import private_write
from cli.output import ProgressLines, say
from cli.stack import Stack, token_write
from registry_service.client import RegistryClient
from registry_service.domain.errors import MalformedError, RefusedError, UnauthenticatedError

_PROFILE_ROLES: Final = ("operator", "reviewer", "auditor", "gateway", "node")
_USABLE_SECONDS: Final = 180.0


def stack_run(stack: Stack) -> dict[str, Any]:
    """Start everything on the stack's data folder; the profile that was written.

    Raises:
        RegistryError: a part did not start, or a base is not what it was.
    """
    old = _profile_read(stack)
    if not stack.bases:
        stack.bases = _old_bases(old)
        for name, folder in stack.bases.items():
            if not folder.is_dir():
                raise MalformedError(
                    f"base {name} of last time is no longer at {folder}; name the bases with --base"
                )
    stack.start_service()
    tokens = tokens_ensure(stack, old.get("tokens", {}))
    with RegistryClient(stack.url, tokens["operator"]) as client:
        bases = _bases_add(stack, client)
        nodes = stack.start_workers()
        for base in bases.values():
            stack.wait_for(
                "the base's catalog", lambda b=base: _usable(client, b["digest"]), _USABLE_SECONDS
            )
    profile = {
        "url": stack.url,
        "nodes": nodes,
        "trust": str(stack.trust),
        # Tokens that were added to the profile by hand stay in it.
        "tokens": {**old.get("tokens", {}), **tokens},
        "bases": bases,
    }
    private_write(stack.profile, json.dumps(profile, indent=2) + "\n")
    return profile


def tokens_ensure(stack: Stack, old: dict[str, str]) -> dict[str, str]:
    """A valid token of each role: the old ones, and new ones for those missing or expired."""
    admin = old.get("admin")
    if admin is None or not _valid(stack.url, admin):
        say("making role tokens")
        admin = json.loads(stack.bootstrap_token("admin", "admin"))["token"]
    tokens = {"admin": admin}
    with RegistryClient(stack.url, admin) as client:
        for role in _PROFILE_ROLES:
            tokens[role] = _token(client, stack.url, role, role, old.get(role))
        # A worker's token is for that worker alone and stays out of the profile.
        for name, role in (("validator", "validator"), *((n, "node") for n in stack.node_names)):
            file = stack.token_file(name)
            known = file.read_text("utf-8") if file.exists() else None
            token_write(stack, name, _token(client, stack.url, name, role, known))
    return tokens


def _token(client: RegistryClient, url: str, subject: str, role: str, known: str | None) -> str:
    if known and _valid(url, known):
        return known
    return str(client.token_create(subject, role)["token"])


def _bases_add(stack: Stack, client: RegistryClient) -> dict[str, dict[str, str]]:
    added = {}
    for name, folder in stack.bases.items():
        with ProgressLines("hashing") as progress:
            base = base_read(name, folder, progress)
        client.base_add(name, base.manifest, base.files, base.headers)
        added[name] = {"dir": str(folder), "digest": base.digest}
    return added


def _usable(client: RegistryClient, digest: str) -> str | None:
    state = client.base_show(digest)["state"]
    if state == "CONFLICTED":
        raise RefusedError(
            f"base {digest}: its workers made different catalogs; look with 'adapterctl base show'"
        )
    return None if state == "PENDING" else str(state)


def _valid(url: str, token: str) -> bool:
    try:
        with RegistryClient(url, token) as client:
            client.whoami()
    except UnauthenticatedError:
        return False
    return True


def _profile_read(stack: Stack) -> dict[str, Any]:
    try:
        profile = json.loads(stack.profile.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return profile if isinstance(profile, dict) else {}


def _old_bases(old: dict[str, Any]) -> dict[str, Path]:
    return {name: Path(base["dir"]) for name, base in old.get("bases", {}).items()}
