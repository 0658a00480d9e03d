"""A headless Chromium driven over a pipe by its DevTools protocol: no package, no port.

Frames are JSON objects that end with a zero byte, on the browser's descriptors 3 (in) and 4 (out).
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class Browser:
    """One window with one page; a context manager."""

    def __init__(self, profile: Path) -> None:
        if PROGRAM is None:
            raise FileNotFoundError("there is no chromium")
        theirs, self._to = os.pipe()
        self._from, out = os.pipe()
        command = [PROGRAM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{theirs} 4>&{out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(theirs, out), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(out)
        self._numbers, self._read = itertools.count(1), b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """All that the page reported: its log, its errors, its requests."""
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
        while (message := self._receive()).get("id") != number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], 60)[0]:
                raise TimeoutError("the browser says nothing")
            self._read += os.read(self._from, 1 << 20)
        frame, _, self._read = self._read.partition(b"\0")
        return json.loads(frame)

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """A window of this size at the address, loaded."""
        mobile = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What JavaScript makes of the expression."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", expression))
        return done["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{expression} is {found!r}; the page shows {self.value('document.body.innerText')!r}"
                )
            time.sleep(0.05)
        return found

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is."""
        return self.value(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")

    def point_at(self, selector: str, *, click: bool = False) -> None:
        """The mouse over the middle of an element, and a click there if wanted."""
        box = self.box(selector)
        place: dict[str, Any] = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str) -> None:
        """Into what has the focus; a line break is the key Enter."""
        for part in text.splitlines(keepends=True):
            self.send("Input.insertText", text=part.rstrip("\n"))
            for kind in ("keyDown", "keyUp") if part.endswith("\n") else ():
                self.send(
                    "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
                )

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors that the page reported: exceptions, refused loads, violations of its policy."""
        said = [event["params"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [event["params"] for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return [str(one["entry"]) for one in said if one["entry"]["level"] == "error"] + list(map(str, thrown))

    def addresses(self) -> set[str]:
        """All that was asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in sent}

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
