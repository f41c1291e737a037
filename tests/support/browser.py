"""A headless browser for tests on the built documentation."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Path to the first installed browser, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """Headless Chromium, controlled over pipes by the DevTools protocol."""

    def __init__(self, program: str, profile: Path):
        (self._read, theirs_out), (theirs_in, self._write) = os.pipe(), os.pipe()
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("the browser ended")
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, until: str = "", **arguments: Any) -> dict[str, Any]:
        """Send a command and return its result; with `until`, wait for that event too."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        result: dict[str, Any] | None = None
        while result is None or until:
            received = self._message()
            if received.get("id") == self._count:
                assert "error" not in received, received
                result = received["result"]
            elif received.get("method") == until:
                until = ""
        return result

    def open(self, address: str, width: int, scheme: str = "light", height: int = 900) -> None:
        """Load a page in a window of `width` pixels under a color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", until="Page.loadEventFired", url=address)

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the open page; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)
        os.close(self._write)
