"""From what a request asks to the tokens of its prompt, and the sampling of its answers."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import UUID

from gpu_worker.serving.chat_template import ChatTemplates
from gpu_worker.serving.openai_bodies import (
    Body,
    BodyError,
    ChatBody,
    CompletionBody,
    PromptTooLongError,
)
from gpu_worker.serving.pieces import Pieces
from gpu_worker.serving.places import TurnLock
from gpu_worker.serving.reading import TokenText
from gpu_worker.serving.sequence import Sampling
from registry_service.domain import limits

_SEEDS: Final = 2**63


class PromptText(TokenText, Protocol):
    """Turns text into tokens too."""

    @property
    def token_chars(self) -> int:
        """The most characters of a prompt for one token."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt."""
        ...

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered chat."""
        ...


class Prompts:
    """Makes prompts for one base; tenants take turns at the tokenizer. Thread-safe.

    What one of them waits for there is one prompt of each other tenant, bounded in characters.
    """

    def __init__(
        self, text: PromptText, templates: ChatTemplates, template: str, *, lane_tokens: int
    ) -> None:
        """``template`` is the base's; ``lane_tokens`` bounds prompt and answer together."""
        self.text = text
        self._templates = templates
        self._template = template
        self._lane_tokens = lane_tokens
        self._turns = TurnLock()

    def tokens(
        self, body: Body, template: str | None, tenant_id: UUID
    ) -> tuple[tuple[int, ...], int]:
        """A prompt, and how many new tokens may follow it; ``template`` is the adapter's own.

        Raises:
            PromptTooLongError: they do not fit together. BodyError: no tokens, or a chat that the
                template refuses. UnavailableError: it could not be rendered now.
        """
        wanted = body.new_tokens
        most = max(min(limits.PROMPT_TOKENS, self._lane_tokens - (wanted or 1)), 0)
        if isinstance(body, ChatBody):
            field = "messages"
            chosen = self._template if template is None else template
            rendered = self._templates.render(chosen, body.messages, tenant_id)
            text, encode = self._bounded(rendered, field, most), self.text.encode_rendered
        elif isinstance(body, CompletionBody):
            field = "prompt"
            text, encode = self._bounded(body.prompt, field, most), self.text.encode
        else:
            raise TypeError(type(body).__name__)
        with self._turns.held(tenant_id):
            prompt = encode(text)
        if not prompt:
            raise BodyError(f"{field}: expected at least one token, got none", field)
        if len(prompt) > most:
            raise PromptTooLongError(
                f"{field}: expected at most {most} tokens beside {wanted or 1} new ones, "
                f"got {len(prompt)}",
                field,
            )
        return prompt, wanted or min(limits.NEW_TOKENS, self._lane_tokens - len(prompt))

    def sampling(self, body: Body, index: int) -> Sampling:
        """How the answer of one choice is sampled; each choice has a seed of its own."""
        return Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            seed=None if body.seed is None else (body.seed + index) % _SEEDS,
            logprobs=body.alternatives,
            stop=body.stops,
            decoder=Pieces(self.text) if body.stops else None,
        )

    def _bounded(self, text: str, field: str, tokens: int) -> str:
        """Text that may be turned into so many tokens: that takes time, and others wait for it."""
        most = min(limits.PROMPT_CHARS, tokens * self.text.token_chars)
        if len(text) > most:
            raise PromptTooLongError(
                f"{field}: expected at most {most} characters, got {len(text)}", field
            )
        return text
