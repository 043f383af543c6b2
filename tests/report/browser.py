"""A real browser for tests: Chromium over the DevTools protocol on a pipe, without any library."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # root, as in a container, has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium; None: there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def onto_3_and_4(commands: int, answers: int) -> None:
    """Moves a pipe's ends to where Chromium reads commands and writes answers."""
    apart = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
    for end, place in zip(apart, (3, 4), strict=True):
        os.dup2(end, place)


class Browser:
    """One tab. `requests` has the address of everything that the page asked for."""

    def __init__(self, profile: Path) -> None:
        chromium = find_chromium()
        assert chromium is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [chromium, *OPTIONS, f"--user-data-dir={profile}"],
            preexec_fn=lambda: onto_3_and_4(commands, answers),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._next_id = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of one DevTools command."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(seconds=60)
            if answer.get("id") == self._next_id:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, hash_part: str = "") -> float:
        """Opens a page of ours and returns the seconds until it was ready."""
        self.send("Page.navigate", url="about:blank")
        self.requests.clear()
        self.errors.clear()
        start = time.perf_counter()
        self.send("Page.navigate", url=page.absolute().as_uri() + hash_part)
        self.until("document.documentElement?.dataset.ready === 'yes'")
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """Value of an expression in the page; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, *, seconds: float = 60) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{seconds} s: {condition}; {self.errors}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move(self, selector: str, *, click: bool = False) -> None:
        """Moves the pointer to the middle of an element, and clicks."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{node}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"{node}.getBoundingClientRect().toJSON()")
        x, y = box["left"] + box["width"] / 2, box["top"] + box["height"] / 2
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window's inside."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """The user's colour scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        picture = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def _receive(self, *, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            assert ready, f"Chromium has not answered for {seconds} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        """Keeps what the page asked for and what went wrong in it."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
