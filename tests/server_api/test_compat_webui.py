"""Traffic as Open WebUI sends it: the whole history each time, an edit, a regeneration, and chores besides."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
from engines import committed

from fednl_runtime.engine import Engine

NUMBER = itertools.count()
CHORES = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history",
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next",
)


class WebUI:
    """A front end that holds a chat: streams its turns, and asks for a title, tags and more after each."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self.chat_id = http, f"chat-{next(NUMBER)}"
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "A street."}]

    def say(self, text: str) -> dict[str, Any]:
        """Send a message after the history; return the answer's last chunk."""
        self.messages.append({"role": "user", "content": text})
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Ask for an answer to the messages, then have the chores done."""
        chunks = self._stream(self.messages)
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        self.messages.append({"role": "assistant", "content": said})
        for chore in CHORES:
            text = f"{chore}\n### Chat History:\n<chat_history>\n{json.dumps(self.messages)}\n</chat_history>"
            self._stream([{"role": "user", "content": text[:300]}])
        return chunks[-2] | {"usage": chunks[-1]["usage"]}

    def regenerate(self) -> dict[str, Any]:
        """Ask for the last answer once more."""
        self.messages.pop()
        return self.answer()

    def edit(self, index: int, text: str) -> dict[str, Any]:
        """Change what was said and go on from there."""
        self.messages = [*self.messages[:index], {"role": "user", "content": text}]
        return self.answer()

    def _stream(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = {
            "model": "tiny",
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
            "user": "somebody",
            "metadata": {"chat_id": self.chat_id},
        }
        headers = {"X-OpenWebUI-Chat-Id": self.chat_id, "X-OpenWebUI-User-Name": "somebody"}
        answer = self._http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return [json.loads(part) for part in answer.text.split("data: ")[1:-1]]


def cached(chunk: dict[str, Any]) -> int:
    """Tokens of the prompt that the session had read before."""
    return chunk["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_is_learnt_one_turn_a_turn_and_read_once(http: httpx.Client, engine: Engine) -> None:
    ui, before = WebUI(http), 0
    for turn in range(1, 4):
        last = ui.say("the other day")
        assert last["session"]["version"] == turn == committed(engine, ui.chat_id).version
        assert cached(last) == before
        before = last["usage"]["total_tokens"]


def test_a_regenerated_answer_takes_the_place_of_the_first(http: httpx.Client, engine: Engine) -> None:
    ui = WebUI(http)
    first, second = ui.say("hello"), ui.say("the other day")
    again = ui.regenerate()
    assert again["session"]["parent_version"] == first["session"]["version"]
    assert cached(again) == cached(second) == first["usage"]["total_tokens"]
    assert committed(engine, ui.chat_id).tokens_seen == again["usage"]["total_tokens"]


def test_the_first_answer_can_be_asked_for_again(http: httpx.Client, engine: Engine) -> None:
    ui = WebUI(http)
    ui.say("hello")
    again = ui.regenerate()
    assert (again["session"]["parent_version"], cached(again)) == (0, 0)
    assert committed(engine, ui.chat_id).tokens_seen == again["usage"]["total_tokens"]


def test_an_edited_message_goes_on_from_what_came_before_it(http: httpx.Client, engine: Engine) -> None:
    ui = WebUI(http)
    first = ui.say("hello")
    ui.say("one")
    ui.say("two")
    edited = ui.edit(3, "the other day")
    assert edited["session"]["parent_version"] == first["session"]["version"]
    assert cached(edited) == first["usage"]["total_tokens"]
    assert committed(engine, ui.chat_id).version == 4


def test_an_edited_first_message_begins_anew(http: httpx.Client, engine: Engine) -> None:
    ui = WebUI(http)
    ui.say("hello")
    edited = ui.edit(1, "the other day")
    assert cached(edited) == 0
