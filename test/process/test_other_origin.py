"""A page of another origin uses the API from headless Chromium, if --allow-origins names its origin."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Browser, Page, find
from fake import dummy_model, serving

CALL = """
fetch('%s/v1/completions', {method: 'POST', headers: {'Content-Type': 'application/json', Authorization: 'Bearer secret'},
  body: JSON.stringify({prompt: [1, 2, 3], max_tokens: 4, ignore_eos: true, stream: true})})
  .then(async (answer) => [answer.status, answer.headers.get('x-request-id') !== null, (await answer.text()).includes('[DONE]')])
  .catch((error) => String(error))
"""


@contextmanager
def site(folder: Path) -> Iterator[str]:
    """A web site of its own origin with an empty page."""
    (folder / "index.html").write_text("<!doctype html><title>other</title>")
    handler = partial(_Silent, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_only_a_page_of_an_allowed_origin_uses_the_api(tmp_path: Path) -> None:
    path = find()
    if path is None:
        pytest.skip("no Chromium on this machine; the package `chromium` brings it")
    model = dummy_model(tmp_path / "model")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with site(tmp_path / "a") as allowed, site(tmp_path / "b") as other:
        flags = ["--allow-origins", f"{allowed},https://app.example", "--api-key", "secret"]
        with serving(model, *flags) as server, Browser(path) as browser, Page(browser) as page:
            page.open(allowed)
            assert page.run(CALL % server.url) == [200, True, True]
            page.open(other)
            assert page.run(CALL % server.url) == "TypeError: Failed to fetch"
