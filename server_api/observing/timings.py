"""How long a turn took, under llama.cpp's names."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fednl_runtime.engine import Event
from fednl_runtime.turn import PromptEvent, TokenEvent, TurnReport


class Stopwatch:
    """Times one turn by its events; begins when it is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = self._prompt_end = self._end = clock()
        self._read = 0

    def see(self, event: Event | None) -> None:
        """Note when `event` came."""
        if isinstance(event, PromptEvent):
            self._read += len(event.tokens)
            self._prompt_end = self._end = self._clock()
        elif isinstance(event, TokenEvent):
            self._end = self._clock()

    def progress(self, total: int) -> dict[str, Any]:
        """Tokens read of a prompt of `total`, those that its session had read before not among them; milliseconds."""
        spent = round(1000 * (self._prompt_end - self._begun))
        return {"total": total, "processed": self._read, "time_ms": spent}

    def timings(self, report: TurnReport) -> dict[str, Any]:
        """Tokens and milliseconds of prompt and answer; a prompt's include its wait for a free slot."""
        prompt = _rate("prompt", self._read, 1000 * (self._prompt_end - self._begun))
        answer = _rate("predicted", report.completion_tokens, 1000 * (self._end - self._prompt_end))
        return {"cache_n": report.cached_tokens, **prompt, **answer}


def _rate(name: str, tokens: int, ms: float) -> dict[str, Any]:
    each, rate = (ms / tokens, 1000 * tokens / ms) if tokens and ms else (0.0, 0.0)
    return {f"{name}_n": tokens, f"{name}_ms": ms, f"{name}_per_token_ms": each, f"{name}_per_second": rate}
