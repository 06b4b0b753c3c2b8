"""Chat messages to text: the model file's template, or a plain one for a base model that has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fednl_runtime.errors import ModelFileError, RequestError
from fednl_runtime.tokenizer import END_OF_TEXT

METADATA_KEY = "chat_template"
"""Where a model file keeps its template."""

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'developer') %}{{ message.role | upper }}.\n{% endif %}"
    "{{ message.content }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT.\n{% endif %}"
)
"""A play: the name of who speaks, a speech, an empty line; what a system says stands there as a stage direction.

Plays are the only dialogue that the shipped model was trained on. A message more only adds text, so a
conversation that is sent again begins with exactly what its session has read.
"""
PLAIN_STOP = ("\n\n",)
PLAIN_NOTE = "base model, plain template"

MAX_TEMPLATE = 1 << 16
MAX_RENDERED = 1 << 23
MAX_SECONDS = 2.0


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without the operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply and divide numbers of a modest size, and no more. Raises SecurityError."""
        for value in (left, right):
            if operator == "**" or not isinstance(value, int | float) or abs(value) > 1_000_000:
                raise SecurityError(f"{operator} is not for this here")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> None:
    raise RequestError(f"The model's chat template refuses these messages: {message}.", "messages")


class ChatTemplate:
    """Renders messages; `stop` are the strings that end an answer, `note` says what a user should know.

    The names a template finds are those that Hugging Face's have: messages, add_generation_prompt,
    bos_token, eos_token, raise_exception. The text it makes is text: a special token in it is read as the
    characters it is written with, as it is in a message.

    Raises:
        ModelFileError: the template is not Jinja's language, or too long.
    """

    def __init__(self, source: str | None = None) -> None:
        self.source = PLAIN if source is None else source
        self.stop: tuple[str, ...] = PLAIN_STOP if source is None else ()
        self.note = PLAIN_NOTE if source is None else "the model's own template"
        if len(self.source) > MAX_TEMPLATE:
            raise ModelFileError(f"The chat template of the model file is longer than {MAX_TEMPLATE} characters.")
        environment = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]
        )
        kept = {name: environment.globals[name] for name in ("range", "namespace", "dict")}
        environment.globals = {**kept, "raise_exception": _refuse, "bos_token": "", "eos_token": END_OF_TEXT}
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"The chat template of the model file cannot be read ({error}).") from error

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> ChatTemplate:
        """The template in a model file's metadata, the plain one if there is none. Raises ModelFileError."""
        return cls(metadata.get(METADATA_KEY))

    def render(self, messages: Sequence[Mapping[str, str]], clock: Callable[[], float] = time.monotonic) -> str:
        """The text of `messages`, each with role and content, up to where the answer begins.

        Raises:
            RequestError: the template refuses the messages, fails on them, or makes too much of them.
        """
        pieces, size, deadline = [], 0, clock() + MAX_SECONDS
        try:
            for piece in self._template.generate(messages=list(messages), add_generation_prompt=True):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED or clock() > deadline:
                    raise RequestError("The messages are too much for the model's chat template.", "messages")
        except RequestError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(
                f"The model's chat template cannot render these messages ({error}).", "messages"
            ) from error
        return "".join(pieces)
