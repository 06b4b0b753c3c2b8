"""A headless Chromium of the system's own, for tests of the page and for its picture."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, Error, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, closed at the end."""
    assert CHROMIUM, "there is no Chromium; install Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            with contextlib.suppress(Error):
                browser.close()
