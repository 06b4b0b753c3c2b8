"""Draw docs/ui.png: the page at /ui after a session of the shipped model has read, answered and gone back."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
SERVE = "from fednl_runtime.server_api.cli import main; main()"


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a server that keeps nothing."""
    command = [sys.executable, "-c", SERVE, "serve", "--in-memory", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            yield next(found[1] for line in server.stderr if (found := re.search(r"curl -N (http://\S+)/v1/", line)))
        finally:
            server.terminate()


def turn(page: Page, mode: str, text: str, version: int) -> None:
    """Give the session a text and wait until it is learnt."""
    page.get_by_text(mode, exact=True).first.click()
    page.locator("#prompt").fill(text)
    page.locator("#go").click()
    expect(page.locator("#facts")).to_contain_text(f"version {version} ", timeout=120_000)
    expect(page.locator("#go")).to_be_enabled()


def new_session(page: Page, name: str) -> None:
    """Make a session."""
    page.locator("#new").click()
    page.locator("#dialog-input").fill(name)
    page.locator("#dialog-yes").click()
    expect(page.locator("#name")).to_have_text(name)


def play(page: Page, address: str, text: str) -> None:
    """What the picture shows: three sessions, one of which reads a text and goes on from a line of it."""
    page.goto(f"{address}/ui")
    expect(page.locator("#model")).not_to_be_empty()
    for name in ("garden-notes", "server-logs", "house-rules"):
        new_session(page, name)
    paragraphs = text.split("\n\n")
    half = len(paragraphs) // 2
    turn(page, "Read", "\n\n".join(paragraphs[:half]), 1)
    turn(page, "Read", "\n\n".join(paragraphs[half:]), 2)
    turn(page, "Chat", "Which rules does the house have?", 3)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#facts")).to_contain_text("version 4 ")
    page.get_by_text("Options").click()
    page.locator("#max").fill("40")
    page.locator("#temperature").fill("0.5")
    page.get_by_text("Options").click()
    turn(
        page, "Complete", "Functions are short; public ones say in a sentence what they do. Tests are flat functions", 5
    )


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/ui.png")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="The browser [default: chromium].")
    parser.add_argument("--text", type=Path, default=ROOT / "CONTRIBUTING.md", help="What the session reads.")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    arguments = parser.parse_args()
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=arguments.scheme)
        play(page, address, arguments.text.read_text())
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=arguments.output)
        browser.close()


if __name__ == "__main__":
    main()
