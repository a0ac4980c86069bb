"""The chat page, under a content security policy that allows only its own script and style."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

FILE = Path(__file__).with_name("index.html")


async def chat_page() -> Response:
    """index.html with its headers."""
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The text and the headers, read and hashed once."""
    html = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(html, "script"),
        "style-src": _hashes(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _hashes(html: str, tag: str) -> str:
    """Digests of the page's inline elements of one tag, in the policy's form."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(body.encode()).digest() for body in bodies)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
