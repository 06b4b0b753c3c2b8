"""Text to token ids, and token ids back to exact bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import tokenizers

from fednl_runtime.errors import ModelFileError, RequestError

END_OF_TEXT = "<|endoftext|>"


def byte_alphabet() -> dict[str, int]:
    """The byte that each printable stand-in character of byte-level BPE means (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A byte-level BPE tokenizer whose one special token is `<|endoftext|>`.

    Text never turns into the special token: the library is told to read special tokens as the
    ordinary characters they are written with, so only a caller who gives token ids can use it.

    Raises:
        ModelFileError: the JSON is not a byte-level BPE tokenizer with that special token, or it has more
            tokens than the `vocab_size` of its model.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int | None = None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises nothing more specific
            raise ModelFileError(f"The tokenizer in the model file cannot be read ({error}).") from error
        if not isinstance(self._tokenizer.model, tokenizers.models.BPE):
            raise ModelFileError("The tokenizer in the model file is not byte-level BPE. Export the model again.")
        self.fingerprint = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        """SHA-256 of the JSON that the tokenizer was made from."""
        self._tokenizer.model._resize_cache(0)  # it would keep words of one session for all, and grow with new text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        end_of_text = self._tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ModelFileError(f"The tokenizer in the model file lacks {END_OF_TEXT}.")
        self.end_of_text: int = end_of_text
        self._bytes = self._bytes_by_token()
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise ModelFileError(
                f"The tokenizer has token ids up to {self.vocab_size - 1}, its model ends at {vocab_size - 1}. "
                "Export the model again."
            )

    def _bytes_by_token(self) -> dict[int, bytes]:
        alphabet = byte_alphabet()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        table = {self.end_of_text: b""}
        for text, token in vocab.items():
            if token == self.end_of_text:
                continue
            if not set(text) <= alphabet.keys():
                raise ModelFileError(f"The tokenizer in the model file is not byte-level BPE: it holds {text!r}.")
            table[token] = bytes(alphabet[char] for char in text)
        return table

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none of them special, whatever the text says.

        Raises:
            RequestError: the text holds half a surrogate pair, which no UTF-8 text can.
        """
        require_unicode(text, "prompt")
        # As a batch of one: `encode` keeps the interpreter's lock, and a long text would stop all else for seconds.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for `<|endoftext|>` and for ids the vocabulary leaves free."""
        return self._bytes.get(token, b"")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """The exact bytes of `tokens`, which may begin or end inside a character."""
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")


def require_unicode(text: str, param: str) -> None:
    """Raise RequestError, naming `param`, if `text` holds half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"The text is not Unicode: half a surrogate pair at {error.start}.", param) from error
