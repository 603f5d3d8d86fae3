"""Control a headless Chromium by the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
_QUIET = "--disable-component-update --disable-sync --hide-scrollbars"


class Browser:
    """One window of the browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script and return its result."""
        return self._post("execute/sync", {"script": script, "args": []})

    def press(self, *keys: str) -> None:
        """Send keys, by their WebDriver codes, to the focused element."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def drag(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Drag the mouse from one point of the window to another."""
        moves = [{"type": "pointerMove", "duration": 20, "x": x, "y": y} for x, y in (start, end)]
        pressed = [moves[0], {"type": "pointerDown", "button": 0}, moves[1], {"type": "pointerUp", "button": 0}]
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": pressed}]})

    def emulate(self, name: str, **params: Any) -> None:
        """Send a command of the DevTools protocol."""
        self._post("goog/cdp/execute", {"cmd": name, "params": params})

    def screenshot(self, path: Path, width: int, *, dark: bool = False, scale: float = 1) -> None:
        """Take a screenshot of the whole page at a given width."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.emulate("Emulation.setEmulatedMedia", features=scheme)
        for height in (800, None):  # the height depends on the width
            height = height or self.run("return document.documentElement.scrollHeight")
            metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
            self.emulate("Emulation.setDeviceMetricsOverride", **metrics)
            time.sleep(0.3)
        import base64

        path.write_bytes(base64.b64decode(self._get("screenshot")))

    def complaints(self) -> list[str]:
        """Return the console messages since the previous call."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def _get(self, name: str) -> Any:
        return _answer(urllib.request.Request(f"{self._session}/{name}"))

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        return _answer(urllib.request.Request(f"{self._session}/{name}", json.dumps(body).encode()))


def _answer(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yield a window, with a new profile in that folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    options = {
        "goog:chromeOptions": {"args": [*_FLAGS.split(), *_QUIET.split(), f"--user-data-dir={profile}"]},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    base = f"http://127.0.0.1:{port}/session"
    try:
        for _ in range(100):
            time.sleep(0.1)
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
        wanted = json.dumps({"capabilities": {"alwaysMatch": options}}).encode()
        session = f"{base}/{_answer(urllib.request.Request(base, wanted))['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _answer(urllib.request.Request(session, method="DELETE"))
    finally:
        driver.terminate()
        driver.wait(20)
