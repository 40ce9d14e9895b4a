"""Dockerfile and compose.yaml: what they say fits the programs, and nothing runs as root."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from gpu_worker.serving.options import options_parse
from registry_service.settings import Settings
from registry_service.store.migrate import APP, AUDITOR, SYSTEM
from tests.architecture.sources import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
ONCE = {"migrate", "keys"}
# Values that are asked for; `:-` gives a default, which a secret must not have.
ASKED = re.compile(r"\$\{([A-Z_]+):\?[^}]+\}")
PINNED = re.compile(r"[a-z0-9./-]+:\d+\.\d+(?:\.\d+)?(?:-[a-z]+)*")
NAMES = sorted(SERVICES)


def stages() -> dict[str, str]:
    """The last USER of each stage that is built for use."""
    users: dict[str, str] = {}
    stage = ""
    for line in DOCKERFILE.splitlines():
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            stage = found[2]
            users[stage] = users.get(found[1], "root")
        elif line.startswith("USER "):
            users[stage] = line.removeprefix("USER ")
    return users


def test_the_parts_of_the_product_are_there() -> None:
    assert {*SERVICES} == {
        *("postgres", "migrate", "keys", "service", "background", "validator", "node")
    }


@pytest.mark.parametrize("name", NAMES)
def test_nobody_runs_as_root(name: str) -> None:
    assert str(SERVICES[name]["user"]).partition(":")[0] not in {"", "0", "root"}
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in SERVICES[name]["security_opt"]
    assert not SERVICES[name].get("privileged", False)


@pytest.mark.parametrize("name", NAMES)
def test_images_are_pinned_and_built_from_a_stage_that_drops_root(name: str) -> None:
    assert PINNED.fullmatch(SERVICES[name]["image"])
    if name != "postgres":
        assert stages()[SERVICES[name]["build"]["target"]] == "10001:10001"


def test_base_images_are_pinned() -> None:
    images = [
        image
        for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
        if image not in stages()
    ]
    assert images
    assert all(PINNED.fullmatch(image) for image in images)


def test_what_is_copied_into_an_image_exists() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / path).exists() for paths in copied for path in paths.split())


def test_installations_are_pinned() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert installs
    assert all("--constraint constraints.txt" in line for line in installs)


@pytest.mark.parametrize("name", NAMES)
def test_what_keeps_running_has_a_healthcheck_or_a_reason(name: str) -> None:
    service = SERVICES[name]
    if name in ONCE:
        assert service["restart"] == "no"
    elif service["healthcheck"].get("disable"):
        assert service["x-no-healthcheck"]
    else:
        assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"postgres"}))
def test_commands_are_those_of_the_programs(name: str) -> None:
    python, flag, module, *arguments = SERVICES[name]["command"]
    assert (python, flag) == ("python", "-m")
    if module == "gpu_worker.serving":
        options = options_parse(arguments)
        assert options.name == "node-1"
    elif module == "gpu_worker.validation":
        from gpu_worker.validation.__main__ import _parser

        assert _parser().parse_args(arguments).name == "validator-1"
    else:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, "--help"],
            cwd=ROOT,
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_known_and_the_service_gets_all_that_it_needs(name: str) -> None:
    given = {key for key in SERVICES[name].get("environment", {}) if key.startswith("REGISTRY_")}
    known = {f"REGISTRY_{field.upper()}" for field in Settings.model_fields}
    passwords = {f"REGISTRY_{role}_PASSWORD" for role in ("APP", "SYSTEM", "AUDITOR")}
    assert given <= known | {"REGISTRY_OWNER_DATABASE_URL"} | passwords
    if name in {"service", "background"}:
        needed = {
            f"REGISTRY_{field.upper()}"
            for field, info in Settings.model_fields.items()
            if info.is_required()
        }
        assert needed <= given


def test_only_the_migration_is_the_databases_administrator() -> None:
    holders = {
        name
        for name, service in SERVICES.items()
        if "POSTGRES_PASSWORD" in str(service.get("environment", {}))
    }
    assert holders == {"postgres", "migrate"}
    environment = SERVICES["service"]["environment"]
    for setting, role in (
        ("REGISTRY_DATABASE_URL", APP),
        ("REGISTRY_SYSTEM_DATABASE_URL", SYSTEM),
        ("REGISTRY_AUDITOR_DATABASE_URL", AUDITOR),
    ):
        assert environment[setting].startswith(f"postgresql://{role}:")
        assert f"CREATE ROLE {role} LOGIN PASSWORD" in COMPOSE["configs"]["roles"]["content"]


def test_secrets_are_asked_for_and_never_written_down() -> None:
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key:
                assert ASKED.fullmatch(value), (name, key)
            if "DATABASE_URL" in key:
                password = re.fullmatch(r"postgresql://\w+:(.+)@postgres/registry", value)
                assert password is not None, (name, key)
                assert ASKED.fullmatch(password[1]), (name, key)
    assert all(secret["file"].startswith("./secrets/") for secret in COMPOSE["secrets"].values())
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert {"/secrets/", "/.env"} <= {*ignored}


def test_workers_have_neither_database_nor_blobs_nor_keys() -> None:
    for name in ("validator", "node"):
        service = SERVICES[name]
        assert "environment" not in service
        mounted = {volume.partition(":")[0] for volume in service["volumes"]}
        assert not mounted & {"postgres", "blobs", "keys"}


@pytest.mark.parametrize("name", NAMES)
def test_ports_are_published_on_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


def test_what_is_referred_to_is_declared() -> None:
    for service in SERVICES.values():
        assert {*service.get("secrets", [])} <= {*COMPOSE["secrets"]}
        assert {*service.get("depends_on", {})} <= {*SERVICES}
        named = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        assert {name for name in named if not name.startswith(("$", "/", "."))} <= {
            *COMPOSE["volumes"]
        }
