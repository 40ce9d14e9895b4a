"""The grammar of names, digests and shown text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from registry_service.domain import limits, names
from registry_service.domain.digests import digest_of, digest_parse, is_digest
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import bounded, shown

COMPONENTS = [names.tenant_name, names.adapter_name, names.base_name, names.node_name]
HEX = "a" * 64


@pytest.mark.parametrize("parse", COMPONENTS)
@pytest.mark.parametrize("name", ["t-1042", "a", "support-zh", "a.b", "a__b", "a--b", "x" * 63])
def test_component_names(parse: Callable[[object], str], name: str) -> None:
    assert parse(name) == name


@pytest.mark.parametrize("parse", COMPONENTS)
@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "a/b",
        "../a",
        "-a",
        "a-",
        "a..b",
        "a b",
        "a\n",
        "é",
        "a_.b",
        "x" * 64,
        None,
        1,
        b"a",
    ],
)
def test_other_component_names_are_refused(parse: Callable[[object], str], name: object) -> None:
    with pytest.raises(MalformedError):
        parse(name)


def test_the_platform_is_no_tenant() -> None:
    with pytest.raises(MalformedError, match="reserved"):
        names.tenant_name("platform")


@pytest.mark.parametrize("tag", ["prod", "v3", "_x", "1.0-rc.1", "A" * 128])
def test_tags(tag: str) -> None:
    assert names.tag_name(tag) == tag


@pytest.mark.parametrize(
    "tag", ["", ".a", "-a", "a:b", "a/b", "a\n", "A" * 129, HEX, f"sha256-{HEX}", f"sha256:{HEX}"]
)
def test_tags_that_could_be_mistaken_are_refused(tag: str) -> None:
    with pytest.raises(MalformedError):
        names.tag_name(tag)


@pytest.mark.parametrize("subject", ["ci@example.com", "repo:org/x", "u+1", "a" * 128])
def test_subjects(subject: str) -> None:
    assert names.subject_name(subject) == subject


@pytest.mark.parametrize("subject", ["", "@a", "a b", "a\n", "é", "a" * 129, None])
def test_other_subjects_are_refused(subject: object) -> None:
    with pytest.raises(MalformedError):
        names.subject_name(subject)


@pytest.mark.parametrize("reason", ["", "  ", "a\nb", "a\u202eb", "x" * (limits.REASON_CHARS + 1)])
def test_a_reason_is_one_printable_line(reason: str) -> None:
    assert names.reason_text(" fine, ümlaut ") == "fine, ümlaut"
    with pytest.raises(MalformedError):
        names.reason_text(reason)


@pytest.mark.parametrize(
    "text",
    [HEX, f"sha256:{HEX[1:]}", f"sha256:{HEX.upper()}", f"sha512:{HEX}", f"sha256:{HEX}\n", None],
)
def test_a_digest_has_one_spelling(text: object) -> None:
    assert digest_parse(digest_of(b"")) == digest_of(b"")
    assert not is_digest(text)
    with pytest.raises(MalformedError):
        digest_parse(text)


def test_shown_text_is_one_bounded_ascii_line() -> None:
    assert shown("a\n\u202eb") == r"'a\n\u202eb'"
    assert len(shown("x" * 10_000)) < 200
    assert "10000 characters" in shown("x" * 10_000)
    assert bounded("é\0") == r"\xe9\x00"
    assert len(bounded("x" * 10_000)) <= limits.SHOWN_CHARS
