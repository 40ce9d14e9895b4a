"""What the callers of the soak ask, what they know, and what the node's answers mean."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import httpx

from tests.integration import serving_world as sw
from tests.integration import soak_world as soak
from tests.integration.soak_witness import Witness, foreign
from tests.integration.soak_world import Cold, Who

# Whose turn it is moves on by one adapter after so many requests.
WINDOW, STRIDE = 4, 16
# Long enough that whoever leaves, and whatever is revoked, does so in the middle.
_LONG: Final = 700
_PATH: Final = "/v1/completions"
_STYLES: Final = {"whole": 45, "stream": 35, "leave": 8, "vanish": 6, "malformed": 6}
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "whole": {},
    "stream": {"stream": True},
    "leave": {"stream": True, "max_tokens": _LONG},
    "vanish": {"max_tokens": _LONG},
    "malformed": {"lora_path": "../x"},
}
_FAILED: Final = "the answer failed"
_BUSY: Final = (
    "no room",
    "the adapter could not be loaded again",
    "the adapter is being unloaded",
)


@dataclass(frozen=True)
class People:
    """Who asks: for twelve adapters of two tenants, for the base alone, and for one of NaN."""

    adapters: list[Who]
    bases: list[Who]
    broken: Who

    @property
    def all(self) -> list[Who]:
        return [*self.adapters, *self.bases, self.broken]


@dataclass(frozen=True)
class Ask:
    """One request. ``late`` is one that was sent after the node had heard of the revocation."""

    who: Who
    number: int
    style: str
    body: bytes
    headers: dict[str, str]
    late: bool
    aliased: bool


@dataclass
class Known:
    """What callers know: which adapter each tenant's alias names, and what is being revoked.

    What is in ``revoked`` is in ``revoking`` too, and the node has heard of it.
    """

    aliases: dict[str, Who]
    revoking: list[Who] = field(default_factory=list)
    revoked: list[Who] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass
class Asking:
    """Sends requests, and counts what came of them."""

    registry: sw.FakeRegistry
    people: People
    cold: Cold
    known: Known
    witness: Witness
    http: httpx.Client
    by_alias: set[Who] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, number: int) -> None:
        """The request of this number, and what came of it."""
        ask = self.make(number)
        if ask.style == "vanish":
            self.vanish(ask)
            self.count("vanished")
            return
        with self.http.stream("POST", _PATH, content=ask.body, headers=ask.headers) as answer:
            self.count(self.outcome(ask, answer))

    def count(self, outcome: str, number: int = 1) -> None:
        with self.known.lock:
            self.outcomes[outcome] += number

    def window(self, number: int) -> list[Who]:
        """The adapters whose turn it is, from the one that will not be asked for again soon."""
        turn = [(number // STRIDE + n) % soak.ADAPTERS for n in range(WINDOW)]
        return [who for n in turn if (who := self.people.adapters[n]) not in self.known.revoking]

    def make(self, number: int) -> Ask:
        """What is asked as this number, by whom, and in which session."""
        chance = random.Random(number)
        style = chance.choices(list(_STYLES), list(_STYLES.values()))[0]
        revoked, roll = list(self.known.revoked), chance.random()
        prompt, aliased = chance.randrange(soak.PROMPTS), False
        if roll < 0.05:
            who = self.people.broken
        elif roll < 0.1 and revoked:
            who = chance.choice(revoked)
        elif roll < 0.3:
            who, aliased = self.known.aliases[chance.choice(soak.TENANTS)[0]], True
        elif roll < 0.35:
            who = chance.choice(self.people.adapters)
        else:
            who = chance.choice([*self.people.bases, *self.window(number)])
        session = chance.choice(["s-0", "s-1", f"s-{who.digest}"])
        return self.of(who, prompt, style, session=session, aliased=aliased)

    def of(
        self, who: Who, number: int, style: str, *, session: str = "s-0", aliased: bool = False
    ) -> Ask:
        """A request with its routing context, which the witness hears of."""
        prompt = (
            self.cold.prompts.get((who, number)) or self.cold.prompts[self.people.bases[0], number]
        )
        body = soak.body_of(prompt, number, **_FIELDS[style])
        late = who in self.known.revoked
        context = soak.context_of(self.registry, who, body, session=session)
        self.witness.minted[context] = who.tuple(self.registry.base)
        return Ask(who, number, style, body, {"Routing-Context": context}, late, aliased)

    def vanish(self, ask: Ask) -> None:
        """Go away without waiting for the answer."""
        url = self.http.base_url
        connection = http.client.HTTPConnection(url.host, url.port)
        connection.request("POST", _PATH, ask.body, ask.headers)
        connection.close()

    def stream_begins(self, who: Who, begun: list[httpx.Response]) -> bool:
        """Ask for a long answer; False when there is no room now, else it has begun."""
        ask = self.of(who, 0, "leave")
        request = self.http.build_request("POST", _PATH, content=ask.body, headers=ask.headers)
        answer = self.http.send(request, stream=True)
        if answer.status_code == 200:
            begun.append(answer)
        else:
            refused = self.refusal(ask, answer.status_code, answer.read().decode())
            assert refused == "busy", answer.text
        return bool(begun)

    def outcome(self, ask: Ask, answer: httpx.Response) -> str:
        """What came of a request: ``right``, ``wrong``, or why there was no whole answer."""
        if answer.status_code != 200:
            return self.refusal(ask, answer.status_code, answer.read().decode())
        if ask.style == "whole":
            return self.said(ask, [json.loads(answer.read())], whole=True)
        leaves = ask.style == "leave"
        *said, last = islice(events_of(answer), 3 if leaves else None)
        if last is not None and "error" in last:
            cut = self.refusal(ask, 503, json.dumps(last))
            return cut if self.said(ask, said, whole=False) == "right" else "wrong"
        found = self.said(ask, said, whole=not leaves)
        return "left" if leaves and found == "right" else found

    def said(self, ask: Ask, documents: list[dict[str, Any]], *, whole: bool) -> str:
        """Compare words with what the same request gets alone."""
        words = "".join(document["choices"][0]["text"] for document in documents).split()
        ran = {document["system_fingerprint"] for document in documents}
        alone = self.cold.says.get((ask.who, ask.number), [])
        right = words == (alone if whole else alone[: len(words)])
        other = ran - {ask.who.digest} or foreign(ask.who, words)
        if ask.late or other or not right:
            return self.is_wrong(ask, documents)
        if ask.aliased:
            self.by_alias.add(ask.who)
        return "right"

    def refusal(self, ask: Ask, status: int, body: str) -> str:
        """What an error means, where it may come."""
        error, withdrawn = json.loads(body)["error"], ask.who in self.known.revoking
        self.errors.append(body)
        cancelled = error["code"] == "cancelled"
        allowed = {
            "refused": status == 400 and ask.style == "malformed",
            "denied": status == 403 and withdrawn,
            "cut": status == 503 and cancelled and withdrawn,
            "failed": error["message"].startswith(_FAILED) and ask.who == self.people.broken,
            "busy": status == 503 and error["message"].startswith(_BUSY),
        }
        found = next((outcome for outcome, fits in allowed.items() if fits), None)
        # What was revoked before is told in one way alone.
        late = ask.late and found not in ("denied", "refused")
        return self.is_wrong(ask, error) if late or found is None else found

    def is_wrong(self, ask: Ask, got: Any) -> str:
        self.wrong.append((ask, got))
        return "wrong"


def events_of(answer: httpx.Response) -> Iterator[Any]:
    """What is sent as events, as it comes; None is the mark of the end."""
    for line in answer.iter_lines():
        if line:
            text = line.removeprefix("data: ")
            yield None if text == "[DONE]" else json.loads(text)
