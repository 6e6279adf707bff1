"""A headless Chromium for tests, driven by its DevTools protocol over a pipe. Without the program a test is skipped."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

LIMIT_S = 60.0


class Browser:
    """One page of a browser of its own."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("chromium is not installed; as root on Debian, scripts/test setup does that")
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        argv += [
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        argv += ["--hide-scrollbars", f"--user-data-dir={folder}", "about:blank"]
        # The browser reads messages from descriptor 3 and writes them to 4.
        shell = f'exec 3<&{its_in} 4>&{its_out}; exec "$@"'
        with (folder.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", shell, "bash", *argv],
                pass_fds=[its_in, its_out],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(its_in)
        os.close(its_out)
        self._numbers = itertools.count(1)
        self._data = b""
        self._session = ""
        self.complaints: list[str] = []
        """Errors and warnings of the page's program, and what its policy refused."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End it with all its processes."""
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + scaled(LIMIT_S)
        while True:
            answer = self._next(until, method)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"the browser has ended, or did not answer within {LIMIT_S} s: {what}"
            self._data += data
        first, _, self._data = self._data.partition(b"\0")
        value: dict[str, Any] = json.loads(first)
        return value

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to a URL."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives in the page; None if it raises an error."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return None if "exceptionDetails" in told else told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression gives something true, and return it."""
        end = time.monotonic() + scaled(LIMIT_S)
        while not (found := self.value(expression)):
            page = "document.body ? document.body.innerText : ''"
            assert time.monotonic() < end, f"still not {expression}; the page: {self.value(page)}; {self.complaints}"
            time.sleep(0.05)
        return found

    def key(self, name: str) -> None:
        """Press a key: Tab, Enter, or a character."""
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        code = {"Tab": 9, "Enter": 13}.get(name, ord(name[0].upper()))
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window and the colours that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, is_whole: bool = False) -> None:
        """Write a screenshot as PNG. `is_whole`: also what is below the window."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(told["data"]))
