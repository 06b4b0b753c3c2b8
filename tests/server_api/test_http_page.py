"""docs/http.md names every route, field and code of the server, no more and no less."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from engines import running_engine
from fastapi.routing import APIRoute

from fednl_runtime.engine import EngineLimits
from fednl_runtime.sampling import MAX_BIAS, MAX_LOGPROBS, RANGES, SamplingParams
from fednl_runtime.server_api.answering.answers import session_object
from fednl_runtime.server_api.answering.chat_template import PLAIN_NOTE, ChatTemplate
from fednl_runtime.server_api.answering.turn_of import SESSION_HEADERS
from fednl_runtime.server_api.app import ROUTES
from fednl_runtime.server_api.entrance.edge import MAX_BODY_BYTES
from fednl_runtime.server_api.errors import CODES, INTERNAL, STATUSES
from fednl_runtime.server_api.schemas.chat import DEFAULT_MAX_TOKENS, ChatRequest
from fednl_runtime.server_api.schemas.completions import MAX_COMPLETION_LOGPROBS, MAX_STOPS, CompletionRequest
from fednl_runtime.turn import TurnReport, TurnRequest

PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text()
SECTIONS = dict(re.findall(r"^##? (.*?)\n(.*?)(?=^##? |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def rows(section: str) -> list[list[str]]:
    """The cells of each row of the section's table, without its head."""
    lines = [line for line in SECTIONS[section].splitlines() if re.match(r"\| [`45]", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_page_lists_every_route() -> None:
    routes = [route for module in ROUTES for route in module.router.routes]
    paths = {f"{m} {r.path.replace(':path', '')}" for r in routes if isinstance(r, APIRoute) for m in r.methods}
    assert {names(row[0])[0] for row in rows("The HTTP interface")} == paths


def test_the_page_lists_every_field() -> None:
    listed = [name for row in rows("Completions") for name in names(row[0])]
    assert sorted(listed) == sorted(CompletionRequest.model_fields)


def test_the_page_lists_every_field_of_a_chat_that_is_new_or_differs() -> None:
    listed = {name for row in rows("Chat completions") for name in names(row[0])}
    gone = set(CompletionRequest.model_fields) - set(ChatRequest.model_fields)
    assert gone == {"prompt", "echo", "best_of", "suffix"}
    assert (
        set(ChatRequest.model_fields) - set(CompletionRequest.model_fields) <= listed <= set(ChatRequest.model_fields)
    )
    assert f"0 to {MAX_LOGPROBS}" in SECTIONS["Chat completions"]
    assert f"{DEFAULT_MAX_TOKENS}, or" in SECTIONS["Chat completions"]


def test_the_page_shows_the_plain_template_and_names_its_note() -> None:
    text = "A street in Verona."
    talk = [("system", text), ("user", "Who's there?"), ("assistant", "A friend.")]
    shown = ChatTemplate().render([{"role": role, "content": content} for role, content in talk])
    assert shown.removesuffix("ASSISTANT.\n") in SECTIONS["Chat completions"]
    assert PLAIN_NOTE in SECTIONS["Chat completions"].replace("\n", " ")


def test_the_page_names_every_header_that_names_a_session() -> None:
    listed = {name.lower() for name in names(SECTIONS["Sessions"])}
    assert set(SESSION_HEADERS) <= listed


def test_the_page_tells_the_defaults_and_limits_of_sampling() -> None:
    table = {names(row[0])[0]: row for row in rows("Completions")}
    for field in dataclasses.fields(SamplingParams):
        default = field.default if field.default not in (None, ()) else "none"
        assert table[field.name][2] == (f"{default:g}" if isinstance(default, float) else str(default))
    assert f"0 to {MAX_COMPLETION_LOGPROBS}" in table["logprobs"][1]
    assert f"up to {MAX_STOPS} strings" in table["stop"][1]
    assert f"-{MAX_BIAS} to {MAX_BIAS}" in table["logit_bias"][1]
    assert "0 to {1}".format(*RANGES["temperature"]) in table["temperature"][1]


def test_the_page_lists_what_a_session_object_says() -> None:
    with running_engine() as engine:
        *_, report = engine.turn(TurnRequest((1,)))
    assert isinstance(report, TurnReport)
    listed = [names(row[0])[0] for row in rows("A request is a transaction")]
    assert listed == list(session_object(report))


def test_the_page_lists_every_status_with_its_codes() -> None:
    listed = {(int(row[0]), code) for row in rows("Errors") for code in names(row[1])}
    known = {(s.status, s.code) for s in (*STATUSES.values(), INTERNAL) if s.code}
    assert listed == known | set(CODES.items())
    assert f"above {MAX_BODY_BYTES >> 20} MiB" in SECTIONS["Errors"]
    assert f"for {EngineLimits().busy_wait_s:g} seconds" in SECTIONS["Errors"]
