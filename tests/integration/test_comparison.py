"""A new version's report compares it with the version that an alias points to now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from registry_service.domain import wire
from tests.integration.conftest import RANK, World, lora_tensors, report, safetensors_bytes
from tests.integration.test_wire import fits

TENANT, ADAPTER = "t-1042", "support-zh"
Q, V = (f"model.layers.*.self_attn.{name}" for name in ("q_proj", "v_proj"))


def validate(world: World, **norms: float) -> None:
    """Do the next validation as a worker that measured these norms of two modules each."""
    patterns = {"q": Q, "v": V}
    measured = {patterns[name]: {"modules": 2, "norm": norm} for name, norm in norms.items()}
    with world.client("validator") as worker:
        job = worker.job_claim("w1", ["validate"], [world.base_digest])
        result = {**report(), "measurements": {"spectrum": {"norms": measured}}}
        worker.job_complete(job["id"], job["lease"], report=result)


def admitted(world: World, folder: Path, **norms: float) -> str:
    digest = world.publish(folder)
    world.settle()
    validate(world, **norms)
    world.approve(digest)
    return digest


def second(world: World, folder: Path) -> str:
    """A version on q_proj alone, with another alpha; scanned and not yet validated."""
    tensors = {name: s for name, s in lora_tensors().items() if "q_proj" in name}
    digest = world.publish(
        folder,
        weights=safetensors_bytes(tensors, 2),
        config={"target_modules": ["q_proj"], "lora_alpha": 80},
        declare={"target_modules": ("q_proj",), "alpha": 80.0},
    )
    world.settle()
    return digest


def comparisons(world: World, digest: str) -> dict[str, Any]:
    """The comparison of each report, by stage; every report fits its schema."""
    with world.client("reviewer") as reviewer:
        reports = reviewer.report_list(TENANT, digest)
    for shown in reports:
        fits(wire.Report, shown)
    return {shown["stage"]: shown["comparison"] for shown in reports}


def test_a_report_compares_with_what_the_alias_points_to(world: World, tmp_path: Path) -> None:
    first = admitted(world, tmp_path / "a", q=1.5, v=2.5)
    assert comparisons(world, first) == {"scan": None, "validate": None}
    with world.client("operator") as operator:
        operator.alias_set(TENANT, ADAPTER, "prod", first, 0, "first")
    assert comparisons(world, first) == {"scan": None, "validate": None}
    digest = second(world, tmp_path / "b")
    same = {"count": 2, "rank": RANK}
    expected = {
        "alias": "prod",
        "generation": 1,
        "adapterDigest": first,
        "rankBefore": RANK,
        "rankNow": RANK,
        "alphaBefore": 8.0,
        "alphaNow": 80.0,
        "modules": [
            {
                "pattern": V,
                "change": "removed",
                "before": [{**same, "scaling": 2.0}],
                "now": [],
                "normBefore": 2.5,
                "normNow": None,
            },
            {
                "pattern": Q,
                "change": "changed",
                "before": [{**same, "scaling": 2.0}],
                "now": [{**same, "scaling": 20.0}],
                "normBefore": 1.5,
                "normNow": None,
            },
        ],
    }
    assert comparisons(world, digest) == {"scan": [expected]}
    validate(world, q=15.0)
    expected["modules"][1]["normNow"] = 15.0
    assert comparisons(world, digest) == {"scan": [expected], "validate": None}


def test_every_alias_is_compared_and_no_other_adapters(world: World, tmp_path: Path) -> None:
    first = admitted(world, tmp_path / "a")
    with world.client("operator") as operator:
        for alias in ("canary", "prod"):
            operator.alias_set(TENANT, ADAPTER, alias, first, 0, "first")
    digest = second(world, tmp_path / "b")
    assert [item["alias"] for item in comparisons(world, digest)["scan"]] == ["canary", "prod"]
    other = world.publish(tmp_path / "c", adapter="support-en", declare={"adapter": "support-en"})
    world.settle()
    assert comparisons(world, other) == {"scan": None}


def test_a_scan_keeps_modules_with_rank_and_effective_scaling(world: World, tmp_path: Path) -> None:
    digest = second(world, tmp_path / "a")
    with world.client("reviewer") as reviewer:
        (scan,) = reviewer.report_list(TENANT, digest)
    assert scan["measurements"]["modules"] == [
        {"pattern": Q, "count": 2, "rank": RANK, "scaling": 20.0}
    ]


def test_a_scan_flags_a_factor_far_from_the_alias_version(world: World, tmp_path: Path) -> None:
    first = admitted(world, tmp_path / "a")
    with world.client("operator") as operator:
        operator.alias_set(TENANT, ADAPTER, "prod", first, 0, "first")
    digest = second(world, tmp_path / "b")
    with world.client("reviewer") as reviewer:
        (scan,) = reviewer.report_list(TENANT, digest)
    flagged = {(f["code"], f["severity"], f["where"], f["got"]) for f in scan["findings"]}
    assert ("SCALING_CHANGED", "review", Q, "20") in flagged
