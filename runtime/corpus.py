"""Text files as documents and tokens."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import numpy as np

from fednl_runtime.errors import RequestError
from fednl_runtime.state import Tokens
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer


def read_text(path: Path) -> str:
    """A UTF-8 text file, plain or `.xz`; bytes that are not UTF-8 become U+FFFD.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        raw = path.read_bytes()
        return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8", "replace")
    except (OSError, lzma.LZMAError) as error:
        raise RequestError(f"{path} cannot be read ({error}). Give a text file, plain or .xz.") from error


def documents(text: str) -> list[str]:
    """The documents of a text: what stands between lines that hold the end-of-text marker."""
    parts = re.split(rf"^{re.escape(END_OF_TEXT)}\r?$", text, flags=re.MULTILINE)
    return [d.strip("\r\n") for d in parts if d.strip()]


def encode_documents(tokenizer: Tokenizer, text: str) -> Tokens:
    """Token ids of all documents, each followed by the end-of-text token."""
    parts = [[*tokenizer.encode(d), tokenizer.end_of_text] for d in documents(text)]
    return np.array([token for part in parts for token in part], np.int64)
