"""An event loop on a thread of its own, for code that is not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class LoopThread:
    """Runs one coroutine to its end on its own thread; ``failed`` gets the error that ended it."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self.loop = asyncio.new_event_loop()
        self._main: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self._thread.start()

    def _run(self) -> None:
        assert self._main is not None
        try:
            self.loop.run_until_complete(self._main())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._failed(error)
        finally:
            self.loop.close()

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call in the loop; do nothing if the loop has ended."""
        if not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop ended since the check
                self.loop.call_soon_threadsafe(call, *arguments)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
