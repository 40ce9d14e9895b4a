"""``adapterctl demo``: the main job on real input; it ends at the first step that does not hold."""

from __future__ import annotations

import shutil
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from registry_service.domain.errors import NotFoundError

if TYPE_CHECKING:
    from cli.demo_world import World

_SUPPORT: Final = ("t-1042", "support-zh")
_LEGAL: Final = ("t-2001", "legal-faq")
_TRAINING: Final = "gpu_worker.demo_training"
_SHORT_TOKENS: Final = 24
# Long enough for an alias to move and a revocation to start meanwhile, on any machine.
_LONG_SECONDS: Final = 10.0
_LONG_TOKENS: Final = (60, 2_000)
_REVOKED_SECONDS: Final = 60


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(demo)


def demo(
    var: Annotated[Path, typer.Option(help="Where the base is cached and all else made anew.")] = (
        Path("var")
    ),
) -> None:
    """One real adapter from training to serving and out again, with every claim checked."""
    from cli.demo_world import World, alone, line

    world = World(var.resolve())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with alone(world.var / "demo"):
        _run(world)
    line(f"\n[{time.monotonic() - world.started:5.1f} s] demo: ok")


def _run(world: World) -> None:
    from cli.demo_world import stack_running

    _base(world)
    _train(world)
    world.step(3, "start the stack")
    shutil.rmtree(world.stack, ignore_errors=True)
    with stack_running(world):
        _tenants(world)
        _publish(world)
        _review(world)
        _serve(world)
        _move(world)
        _revoke(world)
        _audit(world)


def _base(world: World) -> None:
    from cli.demo_world import line, process_relay

    world.step(1, "make the base model, SmolLM2-135M-Instruct in fp32")
    if (world.base / "config.json").exists():
        line(f"  cached in {world.base}")
    else:
        process_relay([_TRAINING, "base", str(world.base)])


def _train(world: World) -> None:
    from cli.demo_world import process_relay

    world.step(2, "train three LoRA adapters with peft, and make one for a base of another width")
    arguments = ["adapters", "--base", str(world.base), "--out", str(world.adapters)]
    process_relay([_TRAINING, *arguments])


def _tenants(world: World) -> None:
    from cli.demo_world import line

    with world.client("admin") as admin, world.client("operator") as operator:
        for tenant in (_SUPPORT[0], _LEGAL[0]):
            made = admin.tenant_create(tenant)
            token = admin.token_create(f"pipeline@{tenant}", "publisher", tenant)
            world.publishers[tenant] = token["token"]
            operator.base_grant("smollm2", tenant)
            line(f"  admin made tenant {tenant} ({made['id']}), which may use base smollm2")


def _publish(world: World) -> None:
    from cli.demo_world import claim, line

    world.step(4, "as a training pipeline: publish the four")
    for name, (tenant, adapter), label in (
        ("support-zh-v1", _SUPPORT, "v1"),
        ("support-zh-v2", _SUPPORT, "v2"),
        ("legal-faq", _LEGAL, "v1"),
    ):
        result = _publish_one(world, name, tenant, adapter, label, 0)
        claim(result["state"] == "IN_REVIEW", f"{tenant}/{adapter}:{label} passed all checks")
        world.digests[name] = result["adapterDigest"]
        line(f"  {tenant}/{adapter}:{label} is {result['adapterDigest']}")
    result = _publish_one(world, "other-width", _SUPPORT[0], "other-width", "v1", 3)
    claim(result["state"] == "REJECTED", "the adapter for another width is refused")
    shapes = [f for f in result["findings"] if f["code"] == "SHAPE_MISMATCH"]
    claim(bool(shapes), "its report names tensors with expected and got shapes")
    for found in shapes[:3]:
        line(f"    {found['where']}: expected {found['expected']}, got {found['got']}")
    line(f"    … {len(shapes)} in all, for {result['adapterDigest']}")


def _publish_one(
    world: World, name: str, tenant: str, adapter: str, label: str, expect: int
) -> dict[str, Any]:
    found: dict[str, Any] = world.command(
        world.publishers[tenant],
        *("publish", str(world.adapters / name), f"{tenant}/{adapter}", "--base", "smollm2"),
        *("--training-data-version", "demo-1", "--label", label, "--wait"),
        expect=expect,
    )
    return found


def _review(world: World) -> None:
    from cli.demo_world import claim, line

    tokens = world.profile["tokens"]
    world.step(5, "as a reviewer: look and approve; as an operator: point prod at v1")
    waiting = world.command(tokens["reviewer"], "review", "list")
    claim(
        {item["adapterDigest"] for item in waiting} == set(world.digests.values()),
        "the three that passed wait for review",
    )
    names = dict.fromkeys(("support-zh-v1", "support-zh-v2"), _SUPPORT) | {"legal-faq": _LEGAL}
    for name, (tenant, adapter) in names.items():
        version = f"{tenant}/{adapter}@{world.digests[name]}"
        if name == "support-zh-v1":
            for report in world.command(tokens["reviewer"], "report", version):
                line(f"    {report['stage']}: {report['verdict']}, on {report.get('device')}")
        item = world.command(
            tokens["reviewer"], "review", "approve", version, "-m", "the report is clean"
        )
        claim(item["admitted"], f"{name} is admitted: the signed verdict is there")
    _alias(world, "v1")


def _alias(world: World, label: str) -> None:
    from cli.demo_world import claim

    moved = world.command(
        world.profile["tokens"]["operator"],
        *("alias", "set", f"{'/'.join(_SUPPORT)}:prod", label, "-m", f"roll out {label}"),
    )
    digest = world.digests[f"support-zh-{label}"]
    claim(moved["adapterDigest"] == digest, f"{'/'.join(_SUPPORT)}:prod is {digest}")


def _serve(world: World) -> None:
    from cli.demo_world import claim, line

    world.step(6, "as a serving node: resolve, pull, prove offline, load, generate")
    _prove(world)
    with world.client("operator") as operator:
        for tenant, adapter in (_SUPPORT, _LEGAL):
            operator.grant_set(tenant, adapter, "alice")
            line(f"  operator lets alice run {tenant}/{adapter}")
    said = world.sentence("support-zh-v1")
    tuned = world.complete(*_SUPPORT, "prod", _SHORT_TOKENS)
    began = time.monotonic()
    world.complete(*_SUPPORT, "prod", _SHORT_TOKENS)
    world.token_seconds = (time.monotonic() - began) / _SHORT_TOKENS
    claim(tuned["adapterDigest"] == world.digests["support-zh-v1"], "prod ran v1")
    claim(said in tuned["text"], f"with the adapter: {said!r}", f"got {tuned['text']!r}")
    base = world.complete(_SUPPORT[0], None, None, _SHORT_TOKENS)
    claim(said not in base["text"], f"without it: {base['text']!r}")
    other = world.complete(*_LEGAL, "v1", _SHORT_TOKENS)
    said = world.sentence("legal-faq")
    claim(said in other["text"], f"{_LEGAL[0]} hears its own: {said!r}", f"got {other['text']!r}")
    try:
        world.complete(_LEGAL[0], _SUPPORT[1], "prod", _SHORT_TOKENS)
    except NotFoundError:
        claim(True, f"{_LEGAL[0]} asking for support-zh hears that there is none")
    else:
        claim(False, "another tenant's adapter is refused")


def _prove(world: World) -> None:
    from cli.demo_proof import verdict_prove
    from cli.demo_world import claim

    with world.client("node") as node:
        found = node.resolve(*_SUPPORT, "prod")
        digest = found["adapterDigest"]
        claim(digest == world.digests["support-zh-v1"], f"prod resolves to {digest}")
        into = world.var / "demo" / "pulled"
        shutil.rmtree(into, ignore_errors=True)
        manifest = node.pull(*_SUPPORT, digest, into)
        claim(manifest.digest == digest, f"pulled {len(manifest.files)} verified files")
        envelope = node.verdict(_SUPPORT[0], digest)
    claims = verdict_prove(
        envelope,
        trust=Path(world.profile["trust"]),
        digest=digest,
        base_digest=world.profile["bases"]["smollm2"]["digest"],
        tenant_id=UUID(found["tenantId"]),
        now=datetime.now(UTC),
    )
    files = {(file.path, file.digest) for file in manifest.files}
    claim(
        set(claims.files) == files,
        f"offline, the verdict of {claims.verifier_id} names these files, base and tenant, "
        f"until {claims.not_after:%Y-%m-%d}",
    )


def _move(world: World) -> None:
    from cli.demo_world import Running, claim

    world.step(7, "move prod to v2 while a long request runs on v1")
    long = Running(lambda: world.complete(*_SUPPORT, "prod", _long_tokens(world)))
    world.running_wait(long)
    _alias(world, "v2")
    claim(long.is_alive(), "the long request still runs")
    after = world.complete(*_SUPPORT, "prod", _SHORT_TOKENS)
    claim(after["adapterDigest"] == world.digests["support-zh-v2"], "the next request ran v2")
    said = world.sentence("support-zh-v2")
    claim(said in after["text"], f"and says {said!r}", f"got {after['text']!r}")
    before = long.result()
    _claim_v1(world, before)


def _long_tokens(world: World) -> int:
    least, most = _LONG_TOKENS
    return max(least, min(most, int(_LONG_SECONDS / world.token_seconds)))


def _claim_v1(world: World, answer: dict[str, Any]) -> None:
    from cli.demo_world import claim

    digest, text = world.digests["support-zh-v1"], answer["text"]
    claim(answer["adapterDigest"] == digest, f"the long request finished on v1, {digest}")
    times = text.count(world.sentence("support-zh-v1"))
    none = text.count(world.sentence("support-zh-v2"))
    claim(times > 1 and none == 0, f"it says v1's sentence {times} times and v2's never")


def _revoke(world: World) -> None:
    from cli.demo_world import Running, claim, line

    digest = world.digests["support-zh-v1"]
    world.step(8, f"revoke v1, {digest}, while a request runs on it")
    long = Running(lambda: world.complete(*_SUPPORT, digest, _long_tokens(world)))
    world.running_wait(long)
    operator = world.profile["tokens"]["operator"]
    version = f"{'/'.join(_SUPPORT)}@{digest}"
    shown = world.command(operator, "revoke", version, "-m", "the demo's training data was wrong")
    claim(shown["state"] in {"REVOKING", "REVOKED"}, f"it is {shown['state']}")
    world.command(operator, "resolve", version, expect=4)
    world.command(operator, "pull", version, str(world.var / "demo" / "never"), expect=4)
    _claim_v1(world, long.result())
    until = time.monotonic() + _REVOKED_SECONDS
    with world.client("operator") as client:
        while shown["state"] != "REVOKED" and time.monotonic() < until:
            time.sleep(0.2)
            shown = client.revocation_show(_SUPPORT[0], digest)
    claim(shown["state"] == "REVOKED", "it is REVOKED", f"got {shown['state']}")
    for node in shown["nodes"]:
        line(f"  {node['node']} acknowledged at {node['acknowledgedAt']}: {node['freedBytes']} B")
        claim(node["acknowledgedAt"] is not None, "the node drained, unloaded and acknowledged")
    claim(digest not in world.residents(), "the node no longer holds it")


def _audit(world: World) -> None:
    from cli.audit import events_print
    from cli.demo_world import claim

    digest = world.digests["support-zh-v1"]
    world.step(9, f"the audit trail of v1, {digest}")
    events = world.command(
        world.profile["tokens"]["auditor"], "audit", "list", f"{'/'.join(_SUPPORT)}@{digest}"
    )
    events_print(events)
    kinds = [event["kind"] for event in events]
    wanted = ["artifact.submitted", "artifact.approved", "alias.set", "artifact.revoked"]
    wanted += ["revocation.acknowledged", "artifact.drained"]
    positions = [kinds.index(kind) if kind in kinds else -1 for kind in wanted]
    claim(
        -1 not in positions and positions == sorted(positions),
        "it tells the whole life, in order",
        f"got {', '.join(kinds)}",
    )
