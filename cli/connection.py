"""Which service and which token a command uses: options, environment, or a profile."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from registry_service.domain.errors import MalformedError, UnauthenticatedError

if TYPE_CHECKING:
    from registry_service.client import RegistryClient


@dataclass(frozen=True, slots=True)
class Connection:
    """The global options, as given."""

    url: str | None = None
    token: str | None = None
    profile: Path | None = None
    role: str | None = None

    def client(self, *roles: str, tenant: str | None = None) -> RegistryClient:
        """A client whose token is that of the options, else the profile's for one of ``roles``.

        For the role ``publisher`` of a tenant the profile may hold ``publisher@TENANT``.

        Raises:
            MalformedError: no service is named. UnauthenticatedError: no token for these roles.
        """
        from registry_service.client import RegistryClient

        profile = None if self.url and self.token else self._profile()
        url = self.url or (profile or {}).get("url")
        if not isinstance(url, str):
            raise MalformedError(
                "no service is named: give --url and --token (ADAPTERCTL_URL, ADAPTERCTL_TOKEN) "
                "or --profile (ADAPTERCTL_PROFILE), or start one with 'adapterctl up'"
            )
        return RegistryClient(url, self.token or self._token(profile or {}, roles, tenant))

    def profile_needed(self) -> dict[str, Any]:
        """The profile. Raises MalformedError when there is none."""
        profile = self._profile()
        if profile is None:
            raise MalformedError("this needs a profile: give --profile (ADAPTERCTL_PROFILE)")
        return profile

    def profile_token_set(self, name: str, token: str) -> Path:
        """Keep a token in the profile, so that later commands find it."""
        profile = self.profile_needed()
        path = self.profile or profile_default()
        profile["tokens"] = {**profile["tokens"], name: token}
        private_write(path, json.dumps(profile, indent=2) + "\n")
        return path

    def _profile(self) -> dict[str, Any] | None:
        path = self.profile or profile_default()
        if self.profile is None and not path.exists():
            return None
        try:
            profile = json.loads(path.read_text("utf-8"))
            if not isinstance(profile["url"], str) or not isinstance(profile["tokens"], dict):
                raise TypeError
        except OSError as error:
            raise MalformedError(f"profile {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedError(f"profile {path}: not one that 'adapterctl up' wrote") from error
        return dict(profile)

    def _token(self, profile: dict[str, Any], roles: tuple[str, ...], tenant: str | None) -> str:
        tokens = profile.get("tokens", {})
        wanted = (self.role,) if self.role else roles
        for role in wanted:
            for name in (f"{role}@{tenant}", role):
                if isinstance(tokens.get(name), str):
                    return str(tokens[name])
        named = " or ".join(wanted)
        raise UnauthenticatedError(f"no token of role {named} is at hand")


def connection_of(context: typer.Context) -> Connection:
    """The global options of this call."""
    found = context.find_object(Connection)
    return found or Connection()


def data_dir_default() -> Path:
    """Where ``adapterctl up`` keeps its data when it isn't told."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "adapter-registry"


def profile_default() -> Path:
    """The profile of the default data folder."""
    return data_dir_default() / "profile.json"


def private_write(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    staging = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    staging.replace(path)
