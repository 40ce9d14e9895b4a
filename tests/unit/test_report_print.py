"""Reports on a terminal: a few lines for thousands of findings, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sample_adapter as sample

from cli import main as cli_main
from cli.artifacts import report_print
from cli.output import error_print
from cli.report_print import comparison_print, findings_print
from registry_service.domain.errors import RefusedError
from registry_service.domain.findings import Check, Code, refuse

LAYERS = 2_000


def missing(layer: int, module: str = "q_proj") -> Any:
    where = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_A.weight"
    return refuse(Check.STRUCTURE, Code.MISSING_TENSOR, where, "(8, 16)", "no tensor")


def test_thousands_of_findings_are_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    findings_print([missing(n, name) for n in range(LAYERS) for name in ("q_proj", "v_proj")])
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "refuse  check 5  MISSING_TENSOR  4000 times",
        "    base_model.model.model.layers.*.self_attn.q_proj.lora_A.weight",
        "        2000 times: expected (8, 16), got no tensor; at * = 0, 1, 2, …",
        "    base_model.model.model.layers.*.self_attn.v_proj.lora_A.weight",
        "        2000 times: expected (8, 16), got no tensor; at * = 0, 1, 2, …",
    ]
    assert shown.err.count("docs/findings.md#missing_tensor") == 1


def test_one_finding_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    findings_print([missing(7)], hint=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "refuse  check 5  MISSING_TENSOR",
        "    where     base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
        "    expected  (8, 16)",
        "    got       no tensor",
    ]
    assert shown.err == ""


def test_places_are_bounded_and_it_says_how_many_more(capsys: pytest.CaptureFixture[str]) -> None:
    findings_print([missing(0, f"m{n}") for n in range(2_000)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert lines[-1] == "    and 1994 more places; --json has them"


def test_text_of_others_is_escaped_and_folded(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {
        **missing(1).to_json(),
        "where": "\x1b[31m\u202e" + "x" * 600,
        "expected": "\n" * 3,
        "code": "CODE_OF_A_NEWER_SERVICE\x07",
    }
    findings_print([hostile])
    shown = capsys.readouterr()
    assert "CODE_OF_A_NEWER_SERVICE" in shown.out
    for text in (shown.out, shown.err):
        assert all(line.isprintable() and len(line) <= 100 for line in text.splitlines())


def test_an_error_shows_its_findings_and_the_page_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error_print(RefusedError("no", findings=(missing(1), missing(2))))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "MISSING_TENSOR  2 times" in shown.err
    assert shown.err.count("docs/findings.md#missing_tensor") == 1


def comparison(**changes: Any) -> dict[str, Any]:
    state = {"count": 4, "rank": 8, "scaling": 2.0}
    return {
        "alias": "prod",
        "generation": 3,
        "adapterDigest": "sha256:" + "a" * 64,
        "rankBefore": 8,
        "rankNow": 8,
        "alphaBefore": 16.0,
        "alphaNow": 160.0,
        "modules": [
            {
                "pattern": "model.layers.*.self_attn.q_proj",
                "change": "changed",
                "before": [state],
                "now": [{**state, "scaling": 20.0}],
                "normBefore": 1.5,
                "normNow": None,
            },
            {
                "pattern": "score",
                "change": "added",
                "before": [],
                "now": [{"count": 1, "rank": None, "scaling": None}],
                "normBefore": None,
                "normNow": 0.25,
            },
        ],
        **changes,
    }


def test_a_comparison_shows_before_and_now(capsys: pytest.CaptureFixture[str]) -> None:
    comparison_print(comparison())
    shown = capsys.readouterr()
    assert "compared with 'prod' (generation 3), sha256:" in shown.err
    assert "  rank 8\n  alpha 16 -> 160\n" in shown.err
    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert rows[0] == "CHANGE MODULES COUNT RANK SCALING NORM"
    assert rows[1] == "changed model.layers.*.self_attn.q_proj 4 8 2 -> 20 1.5 -> not measured"
    assert rows[2] == "added score - -> 1 - - - -> 0.25"
    assert max(map(len, shown.out.splitlines())) <= 100


def test_modules_that_were_not_kept_are_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    comparison_print(comparison(modules=None))
    assert "modules: not measured" in capsys.readouterr().err


def test_a_report_shows_modules_and_what_was_cut(capsys: pytest.CaptureFixture[str]) -> None:
    group = {"pattern": "model.layers.*.q_proj", "count": 2, "rank": 8, "scaling": 2.0}
    report_print(
        {
            "stage": "scan",
            "attempt": 1,
            "verdict": "refuse",
            "worker": "scanner",
            "createdAt": "2026-11-30T12:00:00Z",
            "findings": [missing(1).to_json()],
            "measurements": {"findings": 9, "modules": [group]},
            "comparison": [comparison()],
        }
    )
    shown = capsys.readouterr()
    assert "model.layers.*.q_proj" in shown.out
    assert "of 9 findings the report keeps 1" in shown.err
    assert "compared with 'prod'" in shown.err


def spoiled(folder: Path) -> list[str]:
    """An adapter without the prefix, and the arguments to check it."""
    tensors = {
        name.removeprefix("base_model.model."): value for name, value in sample.tensors().items()
    }
    sample.write(folder, sample.files(weights=sample.weights(tensors)))
    catalog = folder.parent / "catalog.json"
    catalog.write_bytes(sample.catalog().to_bytes())
    return ["check", str(folder), "--catalog", str(catalog)]


def test_check_names_the_deviation_first_and_points_to_its_page_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(spoiled(tmp_path / "a")) == 3
    shown = capsys.readouterr()
    heads = [line for line in shown.out.splitlines() if line.startswith("refuse")]
    assert heads[0] == "refuse  check 5  KEY_PREFIX_MISSING"
    assert heads[1:] == [
        "refuse  check 5  UNEXPECTED_TENSOR  8 times",
        "refuse  check 5  MISSING_TENSOR  8 times",
    ]
    assert shown.err.count("docs/findings.md#key_prefix_missing") == 1
    assert "model.layers.*.self_attn.q_proj" in shown.out


def test_check_in_json_has_all_findings_the_groups_and_the_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main([*spoiled(tmp_path / "a"), "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert len(result["findings"]) == 1 + 2 * len(sample.tensors())
    assert sum(group["count"] for group in result["groups"]) == len(result["findings"])
    assert result["modules"] == [
        {
            "pattern": f"model.layers.*.self_attn.{name}",
            "count": sample.LAYERS,
            "rank": sample.RANK,
            "scaling": 2.0,
        }
        for name in ("q_proj", "v_proj")
    ]
