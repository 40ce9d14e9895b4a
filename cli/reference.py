"""How artifacts are named on the command line.

``TENANT/ADAPTER``, ``TENANT/ADAPTER:NAME`` (an alias or a version label) and
``TENANT/ADAPTER@sha256:…``. The tenant may be left out when the token is bound to one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from registry_service.domain import names
from registry_service.domain.digests import Digest, digest_parse, is_digest
from registry_service.domain.errors import ConflictError, MalformedError, NotFoundError
from registry_service.domain.text import shown

if TYPE_CHECKING:
    from registry_service.client import RegistryClient

_PREFIX: Final = re.compile(r"sha256:[0-9a-f]{12,63}")
_FORM: Final = "TENANT/ADAPTER, TENANT/ADAPTER:NAME or TENANT/ADAPTER@sha256:…"


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed name; ``version`` is a digest (or its first digits), an alias, a label or None."""

    tenant: str | None
    adapter: str
    version: str | None

    def version_needed(self) -> str:
        """The version. Raises MalformedError when none was named."""
        if self.version is None:
            raise MalformedError(
                f"{self.adapter}: name a version too, as in {self.adapter}:prod or "
                f"{self.adapter}@sha256:…"
            )
        return self.version


def reference_parse(text: str) -> Reference:
    """Parse a name of the command line. Raises MalformedError."""
    path, at, digest = text.partition("@")
    tag: str | None = None
    if not at:
        path, colon, name = path.partition(":")
        tag = names.tag_name(name) if colon else None
    elif not (is_digest(digest) or _PREFIX.fullmatch(digest)):
        digest_parse(digest)
    tenant, slash, adapter = path.rpartition("/")
    if "/" in tenant or (slash and not tenant):
        raise MalformedError(f"expected {_FORM}, got {shown(text)}")
    return Reference(
        names.tenant_name(tenant) if slash else None,
        names.adapter_name(adapter),
        digest if at else tag,
    )


def tenant_of(client: RegistryClient, reference: Reference) -> str:
    """The reference's tenant, or the one that the token is bound to.

    Raises:
        MalformedError: neither is there.
    """
    return tenant_or_own(client, reference.tenant)


def tenant_or_own(client: RegistryClient, tenant: str | None) -> str:
    """``tenant``, or the one that the token is bound to. Raises MalformedError for neither."""
    own = tenant or client.whoami().get("tenant")
    if not isinstance(own, str):
        raise MalformedError("name the tenant, as in TENANT/ADAPTER: this token is bound to none")
    return own


def artifact_find(
    client: RegistryClient, reference: Reference, *, exact: bool = False
) -> tuple[str, Digest]:
    """Tenant and digest of an artifact in any state.

    ``exact`` refuses a shortened digest: two artifacts can be made to share their first digits,
    so a decision about one needs all of them.

    Raises:
        NotFoundError: no such artifact. ConflictError: several begin with these digits.
    """
    tenant, version = tenant_of(client, reference), reference.version_needed()
    if is_digest(version):
        return tenant, Digest(version)
    if exact and version.startswith("sha256:"):
        raise MalformedError("name the whole digest here; 'adapterctl show' prints it")
    found = [
        item["adapterDigest"]
        for item in client.artifact_list(tenant=tenant, adapter=reference.adapter)
        if item["adapterDigest"].startswith(version) or version in item["labels"]
    ]
    if len(found) > 1:
        raise ConflictError(f"{version} fits {len(found)} artifacts; name more digits")
    if found:
        return tenant, digest_parse(found[0])
    if version.startswith("sha256:"):
        raise NotFoundError(f"no artifact of {tenant}/{reference.adapter} begins with {version}")
    alias: dict[str, Any] = client.alias_show(tenant, reference.adapter, version)
    return tenant, digest_parse(alias["adapterDigest"])
