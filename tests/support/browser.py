"""A headless Chromium that tests drive like a user, by pointer, wheel and keys: the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync",
         "--disable-background-networking", "--remote-debugging-pipe", "about:blank")
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
SETTLED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


class Browser:
    """One page of a browser. `errors`: those of its scripts; `requests`: the addresses that it asked for."""

    def __init__(self, profile: Path) -> None:
        """Start the browser, or skip the test if there is none. profile: an empty folder."""
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            pytest.skip(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
        ours, theirs = socket.socketpair()
        ours.settimeout(120)

        def plug() -> None:  # Chromium reads commands from 3 and writes results to 4
            os.dup2(theirs.fileno(), 3)
            os.dup2(3, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}"], preexec_fn=plug, pass_fds=(3, 4),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._socket, self._received, self._last = ours, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.sendall(json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._last:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = self._socket.recv(1 << 20)
            assert part, "the browser has gone"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        reply = json.loads(text)
        if reply.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(reply["params"]["exceptionDetails"]))
        if reply.get("method") == "Network.requestWillBeSent":
            self.requests.append(reply["params"]["request"]["url"])
        return reply

    def open(self, page: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Load a file, and wait until it has been drawn."""
        self.errors, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.dark(dark)
        self.call("Page.navigate", url=page.as_uri())
        self("document.readyState === 'complete' || new Promise((done) => addEventListener('load', done))")
        self(SETTLED)

    def dark(self, dark: bool) -> None:
        """Set the user's preference for dark colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def __call__(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element, once earlier changes have been drawn."""
        self(SETTLED)
        return self(f"document.querySelector({json.dumps(selector)}).innerText")

    def pointer(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event. kind: "Moved", "Pressed", "Released", or "Wheel" with deltaX and deltaY."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("Pressed", "Released"):
            self.pointer(kind, x, y, button="left", buttons=int(kind == "Pressed"), clickCount=1)

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = CODES.get(key, ord(key[0]))
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)
        self._socket.close()
