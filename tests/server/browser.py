"""A headless Chromium, driven over its DevTools protocol."""

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE_S = 30.0
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
_KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}


@dataclass
class Page:
    """A tab. `faults`: errors of scripts and of the content policy."""

    socket: ClientConnection
    session: str
    faults: list[str] = field(default_factory=list[str])
    _sent: int = 0

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        call = {"id": self._sent, "method": method, "params": parameters, "sessionId": self.session}
        self.socket.send(json.dumps(call))
        while True:
            message = json.loads(self.socket.recv(_PATIENCE_S))
            if message.get("id") == self._sent:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, event: str, told: Mapping[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.faults.append(str(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            entry = told["entry"]
            if entry["source"] != "network":  # refused requests are shown by the page itself
                self.faults.append(entry["text"])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.querySelector('[role=tab]')")

    def value(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = _PATIENCE_S) -> None:
        ends = time.monotonic() + seconds
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < ends, f"{condition}: {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Focus an input, and replace its text as a person would."""
        self.value(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.send("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        code = _KEYS[key]
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def view(self, width: int, height: int, scheme: str = "light", calm: bool = False) -> None:
        """Set the size in pixels, the colour scheme, and whether motion is reduced."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}
        features = [{"name": "prefers-color-scheme", "value": scheme}, motion]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        found = self.send("Page.captureScreenshot", format=path.suffix[1:])
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Generator[Page, None, None]:
    """Start Chromium with a fresh profile in a folder, and open one tab."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(found[0] for line in process.stderr if (found := re.search(r"ws://\S+", line)))
        with connect(address, max_size=None, compression=None) as socket:
            root = Page(socket, "")
            yield _tab(root)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)
        if process.stderr is not None:
            process.stderr.close()


def _tab(root: Page) -> Page:
    # Sessions share the socket: only one of them may wait for an answer at a time.
    target = _plain(root, "Target.createTarget", url="about:blank")["targetId"]
    session = _plain(root, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(root.socket, session, _sent=100)
    for domain in ("Page", "Runtime", "Log"):
        page.send(f"{domain}.enable")
    return page


def _plain(root: Page, method: str, **parameters: Any) -> dict[str, Any]:
    """Call a method of the browser itself, which has no session."""
    root.socket.send(json.dumps({"id": 1, "method": method, "params": parameters}))
    while True:
        message = json.loads(root.socket.recv(_PATIENCE_S))
        if message.get("id") == 1:
            return dict(message["result"])
