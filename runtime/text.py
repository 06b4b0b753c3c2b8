"""Bytes of tokens to text as they arrive: characters kept whole, stop strings cut off."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character without finishing it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return decoder.getstate()[0]


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string that is first complete in `text` begins; the longest one if several end together."""
    found = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    return min(found)[1] if found else None


def open_suffix(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop if len(s) > n)), 0)


class TextStream:
    """The text of one answer, piece by piece.

    The pieces joined are the decoded bytes cut where the first stop string to be complete begins,
    whatever the sizes of the pushes. `tail` is the unfinished character at the end of the prompt:
    the answer's first bytes may complete it.
    """

    def __init__(self, stop: Sequence[str] = (), tail: bytes = b"") -> None:
        self.stopped = False
        self.decoded = 0
        """Characters decoded so far, those withheld and cut off included."""
        self._stop = tuple(stop)
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(tail)

    def push(self, data: bytes) -> str:
        """The text that is now certain to belong to the answer."""
        return self._advance(self._decoder.decode(data))

    def finish(self) -> str:
        """What was withheld, when no more bytes will come."""
        piece = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return piece + rest

    def _advance(self, text: str) -> str:
        self.decoded += len(text)
        if self.stopped:
            return ""
        text = self._held + text
        cut = find_stop(text, self._stop)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = len(text) - open_suffix(text, self._stop)
        self._held = text[keep:]
        return text[:keep]
