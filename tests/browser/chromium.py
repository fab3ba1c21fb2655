"""A headless Chromium that opens one page at a given width and says what it saw.

It is driven by the DevTools protocol: a window of headless Chromium has a least width of some 500
pixels, so --window-size=390 shows another page than a telephone does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_START_S, _ANSWER_S = 60.0, 60.0
_MEASURE = """(() => {
  // plotly measures texts in an element beyond the window's edge
  const shown = of => [...document.querySelectorAll(of)].filter(e => !e.closest('#js-plotly-tester'));
  const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const wide = shown('body *').filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5) && !scrolls(e.parentElement);
  });
  const cut = shown('h1,h2,h3,p,td,th').filter(e =>
    e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !scrolls(e));
  return {
    width: innerWidth, height: document.documentElement.scrollHeight,
    page: document.documentElement.scrollWidth,
    wide: wide.map(e => e.outerHTML.slice(0, 120)), cut: cut.map(e => e.outerHTML.slice(0, 120)),
    smallest: Math.min(...shown('body *').filter(e => e.textContent.trim() &&
      !e.children.length && e.getBoundingClientRect().width && e.tagName != 'title').map(e => {
        const m = e.getScreenCTM ? e.getScreenCTM() : null;
        return parseFloat(getComputedStyle(e).fontSize) * (m ? Math.hypot(m.a, m.b) : 1);  // a turned text too
      })),
    text: document.body.innerText,
  };
})()"""


@dataclass
class Seen:
    """A page as it was shown; lengths in CSS pixels."""

    width: int  # window.innerWidth
    page_width: int  # what the document takes, beyond the window too
    height: int
    wide: list[str]  # elements beyond the window's edge that nothing scrolls
    cut: list[str]  # texts that are wider than their box
    smallest_font: float
    text: str
    answer: Any = None  # of ``ask``
    complaints: list[str] = field(default_factory=list)  # console errors and warnings, exceptions
    requests: list[str] = field(
        default_factory=list
    )  # addresses that were asked for, but the page's
    screenshot: bytes = b""  # PNG of the whole page


@contextlib.asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[str]:
    """A running browser's DevTools address, http://127.0.0.1:PORT; ended with all its children."""
    command = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--hide-scrollbars",
        *"--no-first-run --disable-background-networking about:blank".split(),
    ]
    log = profile.with_suffix(".log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        port = profile / "DevToolsActivePort"
        for _ in range(int(_START_S / 0.1)):
            if port.is_file() and port.read_text().count("\n"):
                break
            assert process.poll() is None, profile.with_suffix(".log").read_text()[-2000:]
            await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port.read_text().splitlines()[0]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the browser and its children
        process.wait()
        log.close()


class _Tab:
    """Commands to one tab, and the events that came meanwhile."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_ANSWER_S)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    async def until(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(await self._socket.receive_json(timeout=_ANSWER_S))


async def look(
    devtools: str, page: Path, width: int, height: int = 844, fragment: str = "", ask: str = "null"
) -> Seen:
    """Open a page, at a fragment of it, in a new tab of a device that is ``width`` pixels wide.

    ask: JavaScript whose value, of JSON, is wanted.
    """
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{devtools}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = _Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            # a mobile device: a page that is too wide widens the window, as a telephone does
            screen = {"width": width, "height": height, "deviceScaleFactor": 1}
            await tab.call("Emulation.setDeviceMetricsOverride", **screen, mobile=width < 600)
            tab.events.clear()
            await tab.call("Page.navigate", url=page.as_uri() + fragment)
            await tab.until("Page.loadEventFired")
            measured = await tab.call("Runtime.evaluate", expression=_MEASURE, returnByValue=True)
            assert "exceptionDetails" not in measured, measured
            found = measured["result"]["value"]
            answer = await tab.call("Runtime.evaluate", expression=ask, returnByValue=True)
            assert "exceptionDetails" not in answer, answer
            shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
            await asyncio.sleep(0.2)  # what a script or a font asks for late
            await tab.call("Page.stopLoading")
            seen = Seen(
                width=found["width"],
                page_width=found["page"],
                height=found["height"],
                wide=found["wide"],
                cut=found["cut"],
                smallest_font=found["smallest"],
                text=found["text"],
                answer=answer["result"].get("value"),
                complaints=_complaints(tab.events),
                requests=[u for u in _requests(tab.events) if u.partition("#")[0] != page.as_uri()],
                screenshot=base64.b64decode(shot["data"]),
            )
        async with session.get(f"{devtools}/json/close/{target['id']}"):
            return seen


def _requests(events: list[dict[str, Any]]) -> list[str]:
    sent = [e["params"]["request"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [request["url"] for request in sent if not request["url"].startswith("data:")]


def _complaints(events: list[dict[str, Any]]) -> list[str]:
    out = []
    for event in events:
        method, params = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            out.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            out.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            out.append(params["entry"]["text"])
    return out
