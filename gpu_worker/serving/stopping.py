"""Stop texts: they may begin and end inside tokens, and nothing of them is shown."""

from __future__ import annotations

from gpu_worker.serving.sequence import TextDecoder


class StopText:
    """Releases an answer's text as far as no stop text can begin in it."""

    def __init__(self, stops: tuple[str, ...], decoder: TextDecoder) -> None:
        self._stops = stops
        self._decoder = decoder
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that is released now, and whether a stop text was reached."""
        self._held += self._decoder.push(token)
        return self._release()

    def finish(self) -> tuple[str, bool]:
        """What is left when the answer ended by itself; the decoder's rest may still stop it."""
        self._held += self._decoder.flush()
        text, stopped = self._release()
        if not stopped:
            text, self._held = text + self._held, ""
        return text, stopped

    def _release(self) -> tuple[str, bool]:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        kept = max(_overlap(self._held, stop) for stop in self._stops) if self._stops else 0
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
