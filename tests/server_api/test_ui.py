"""Laws of the page at /ui, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, chromium
from engines import running_engine, until
from playwright.sync_api import Browser, Page, expect

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.entrance.security import KeyRing, new_key
from fednl_runtime.server_api.ui.page import page as whole_page

HTML = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, Debian's package chromium")


def test_the_page_needs_no_key_and_says_what_it_may_do(http):
    response = http.get("/ui")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_names_no_outside_resource():
    text, _ = whole_page()
    assert set(re.findall(r"(?:https?:)?//[a-z][^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert len(text) > 10_000


@pytest.fixture(name="browser", scope="module")
def browser_fixture() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(name="page")
def page_fixture(browser: Browser, engine: Engine) -> Iterator[Page]:
    """A page that asks this server only and makes no error; the server has no sessions before."""
    engine.backend.delay_s, engine.backend.fail_at = 0.0, None
    for record in engine.sessions.page("", limit=1000):
        engine.sessions.delete(record.key)
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.set_default_timeout(20_000)
        yield page
        assert errors == []
        here = page.url.partition("/ui")[0]
        assert [url for url in asked if not url.startswith((here, "data:", "blob:"))] == []


def open_page(page: Page, address: str, session: str | None = "a") -> None:
    """Open the page, and a new session in it."""
    page.goto(f"{address}/ui")
    expect(page.locator("#model")).not_to_be_empty()
    if session is not None:
        answer(page, "New session", session)
        expect(page.locator("#name")).to_have_text(session)


def answer(page: Page, button: str, text: str | None = None) -> None:
    """Press a button and answer the question that it asks."""
    page.get_by_role("button", name=button, exact=True).click()
    if text is not None:
        page.locator("#dialog-input").fill(text)
    page.locator("#dialog-yes").click()


def run(page: Page, mode: str, text: str, version: int | None = None) -> None:
    """Give the session a text, and wait for the version it makes."""
    page.get_by_text(mode, exact=True).first.click()
    page.locator("#prompt").fill(text)
    page.locator("#go").click()
    if version is not None:
        expect(page.locator("#facts")).to_contain_text(f"version {version} ")
        expect(page.locator("#go")).to_be_enabled()


def seen(http: httpx.Client, session: str = "a") -> int:
    return int(http.get(f"/v1/sessions/{session}").json()["tokens_seen"])


@in_browser
@pytest.mark.parametrize("mode", ["Complete", "Read"])
def test_what_is_read_is_shaded_drawn_and_told_as_the_server_tells_it(page, address, http, mode):
    open_page(page, address)
    text = "the hello of the € hello"
    run(page, mode, text, 1)
    assert page.locator(".read").inner_text() == text
    scores = http.post("/v1/completions", json={"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    known = [-p for p in scores["choices"][0]["logprobs"]["token_logprobs"] if p is not None]
    titles = [
        float(title.split()[0])
        for title in page.locator(".token").evaluate_all("all => all.map(e => e.title)")
        if title
    ]
    assert titles == pytest.approx(known, abs=0.006)
    expect(page.locator("#curve .dot")).to_have_count(len(known))
    (update,) = http.get("/v1/sessions/a/updates").json()["data"]
    expected = ["1", str(update["tokens"]), f"{update['surprise']:.2f}", f"{update['update_norm']:.2f}"]
    assert page.locator("#updates td").all_inner_texts()[:4] == expected


@in_browser
def test_undo_takes_a_turn_back_and_the_page_shows_it(page, address, http):
    open_page(page, address)
    run(page, "Complete", "one two", 1)
    before = seen(http)
    run(page, "Chat", "three four", 2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn.undone")).to_have_count(1)
    assert seen(http) == before
    page.get_by_role("button", name="Go back to version 2").click()
    expect(page.locator(".turn.undone")).to_have_count(0)
    page.get_by_role("button", name="Go back to version 1").click()
    expect(page.locator(".turn.undone")).to_have_count(1)


@in_browser
def test_a_page_that_is_opened_again_draws_what_was_learnt_before(page, address, http):
    open_page(page, address)
    run(page, "Read", "one two", 1)
    run(page, "Read", "three four five", 2)
    page.reload()
    expect(page.locator("#updates tr")).to_have_count(2)
    expect(page.locator("#curve .dot")).to_have_count(2)
    expect(page.locator(".turn")).to_have_count(0)


@in_browser
def test_a_fork_a_freeze_and_a_forgotten_session(page, address, http):
    open_page(page, address)
    run(page, "Read", "one two", 1)
    answer(page, "Fork", "b")
    expect(page.locator("#name")).to_have_text("b")
    expect(page.locator("#list li")).to_have_count(2)
    page.get_by_role("button", name="Freeze").click()
    expect(page.get_by_role("button", name="Freeze")).to_have_attribute("aria-pressed", "true")
    assert http.get("/v1/sessions/b").json()["frozen"] is True
    answer(page, "Forget")
    expect(page.locator("#name")).to_have_text("a")
    assert [session["id"] for session in http.get("/v1/sessions").json()["data"]] == ["a"]


@in_browser
def test_a_saved_session_is_the_servers_file(page, address, http):
    open_page(page, address)
    run(page, "Read", "one two", 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    assert download.value.suggested_filename == "a.safetensors"
    octets = {"content-type": "application/octet-stream"}
    http.post("/v1/sessions/import?id=b", content=download.value.path().read_bytes(), headers=octets).raise_for_status()
    assert seen(http, "b") == seen(http)


@in_browser
@pytest.mark.parametrize("mode", ["Complete", "Chat", "Read"])
def test_text_is_shown_as_text(page, address, mode):
    open_page(page, address)
    run(page, mode, HTML, 1)
    assert HTML in page.locator(".text").inner_text()
    assert page.locator(".text img, .text script").count() == 0
    assert page.evaluate("window.hacked") is None


@in_browser
def test_the_browser_runs_no_script_but_the_pages_own(page, address):
    open_page(page, address, None)
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked = 1\">')")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None


@in_browser
def test_a_turn_that_is_stopped_leaves_the_session_as_it_was(page, address, http, engine):
    open_page(page, address)
    engine.backend.delay_s = 0.05
    page.get_by_text("Options").click()
    page.locator("#max").fill("2000")
    run(page, "Complete", "one two")
    expect(page.locator(".answer")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".told")).to_contain_text("Stopped; the session is as it was before.")
    until(lambda: engine.scheduler.load() == (0, 0))
    assert seen(http) == 0


@in_browser
def test_what_is_not_to_be_learnt_leaves_the_session_as_it_was(page, address, http):
    open_page(page, address)
    page.get_by_text("Options").click()
    page.get_by_label("learn from this").uncheck()
    run(page, "Complete", "one two")
    expect(page.locator(".told")).to_contain_text("nothing kept")
    expect(page.locator("#go")).to_be_enabled()
    expect(page.locator("#curve .dot")).to_have_count(0)
    assert seen(http) == 0


@in_browser
def test_an_error_is_the_servers_sentence(page, address, http):
    open_page(page, address)
    http.delete("/v1/sessions/a")
    page.get_by_role("button", name="Freeze").click()
    expect(page.locator("#status")).to_have_text("There is no session 'a'.")
    open_page(page, address, "b")
    run(page, "Read", "x" * 501)
    expect(page.locator(".told.error")).to_contain_text("send at most 500 a turn")


@in_browser
def test_a_long_text_is_told_piece_by_piece(page, serve):
    with running_engine() as engine, serve(engine) as address:
        open_page(page, address)
        run(page, "Read", "the hello " * 2001)
        expect(page.locator("#status")).to_contain_text("of 10006 tokens")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".told")).to_contain_text("Stopped")


@in_browser
def test_a_key_is_asked_for_until_it_fits_and_stays_in_the_tab(page, engine, serve: Callable[..., Any]):
    secret, key = new_key("ann", ["infer", "sessions"])
    with serve(engine, keys=KeyRing([key])) as address:
        page.goto(f"{address}/ui")
        for given in ("wrong", secret):
            expect(page.locator("#dialog-title")).to_have_text("This server has a key")
            page.locator("#dialog-input").fill(given)
            page.locator("#dialog-yes").click()
        answer(page, "New session", "mine")
        run(page, "Read", "one two", 1)
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        page.reload()
        expect(page.locator("#name")).to_have_text("mine")
        page.get_by_role("button", name="Forget the key").click()
        expect(page.locator("#dialog-title")).to_have_text("This server has a key")
        assert page.evaluate("sessionStorage.length") == 0
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#status")).to_contain_text("The API key is missing or wrong.")


@in_browser
def test_everything_can_be_done_from_the_keyboard(page, address, http):
    open_page(page, address, None)
    page.locator("#new").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("keys")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("hello")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#facts")).to_contain_text("version 1 ")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.textContent"
            )
        )
    assert {"new", "undo", "fork", "freeze", "save", "forget", "mode", "prompt", "go", "learnt"} <= reached


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 900, 1280])
def test_nothing_is_cut_off_at_any_width_in_light_and_dark(page, address, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    open_page(page, address, "a-name-as-long-as-names-can-be." * 4)
    run(page, "Complete", "x" * 90, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#go").bounding_box()
    assert box
    assert box["x"] + box["width"] <= width
    ink, paper = (
        sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.documentElement).{name}"))[:3]))
        for name in ("color", "backgroundColor")
    )
    assert (ink < paper) == (scheme == "light")
    assert abs(ink - paper) > 450
