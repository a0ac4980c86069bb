"""Headless Chromium, driven over its debugging pipe: no driver and no port."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The browser's path, if this machine has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Chromium without a window. Use as a context manager."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_us, theirs_out = os.pipe()
        theirs_in, to_them = os.pipe()
        self._in, self._out = to_us, to_them
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--remote-debugging-pipe", "--window-size=1280,900", f"--user-data-dir={self._folder.name}",
        ]  # fmt: skip
        # The browser reads from descriptor 3 and writes to 4; the shell puts them there.
        os.set_inheritable(theirs_in, True)
        os.set_inheritable(theirs_out, True)
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", path, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, session: str, method: str, **params: object) -> dict[str, Any]:
        """One command of the DevTools protocol, to a page or, with an empty session, to the browser."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30.0)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One page, which shares nothing with the browser's others. Use as a context manager."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._session = browser, ""
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exc: object) -> None:
        self._browser.call("", "Target.disposeBrowserContext", browserContextId=self._context)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the browser told about this page."""
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        return self._browser.call(self._session, method, **params)

    def open(self, url: str, *, dark: bool = False) -> None:
        """Load a document as if it were the first: in a window of the usual size, without the events of others."""
        self._browser.events = [event for event in self._browser.events if event not in self.events]
        self.call("Emulation.clearDeviceMetricsOverride")
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until a JavaScript condition holds."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true; the page says {self.run('document.body.innerText')!r}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def nameless(self, roles: set[str]) -> list[str]:
        """Elements of these roles that a screen reader cannot name."""
        tree = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = (node for node in tree if not node["ignored"] and node["role"]["value"] in roles)
        return [json.dumps(node) for node in shown if not node.get("name", {}).get("value")]

    def complaints(self) -> list[str]:
        """Errors, exceptions and blocked resources that the page caused."""
        self.run("0")
        thrown = [event["params"] for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        return [json.dumps(one)[:400] for one in [*thrown, *(entry for entry in logged if entry["level"] in ("warning", "error"))]]

    def requested(self) -> set[str]:
        """Addresses that the page asked the network for."""
        sent = [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return {url for url in sent if not url.startswith("data:")}
