"""The page to look at sessions with: sent as one file, which may load nothing and run nothing but itself."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()
FOLDER = Path(__file__).parent
FILES = ("page.html", "page.css", "curve.js", "page.js")
"""What the page is made of."""


@router.get("/ui")
def ui() -> Response:
    """The page; it asks for the key itself, where there is one."""
    text, headers = page()
    return Response(text, 200, headers, "text/html")


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The page, and headers that hold the browser to it."""
    text, style, *scripts = ((FOLDER / name).read_text("utf-8") for name in FILES)
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{''.join(scripts)}</script>")
    policy = {
        "default-src": "'none'",
        "script-src": digest(text, "script"),
        "style-src": digest(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "content-security-policy": "; ".join(" ".join(rule) for rule in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def digest(text: str, tag: str) -> str:
    """What a policy calls the one `tag` element of a page, so that no other is obeyed."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
