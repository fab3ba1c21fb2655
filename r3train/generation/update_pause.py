"""What a weight update does to requests in flight: wait for them, abort them, or freeze them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from r3train.engine.backend import EngineError, RolloutBackend

PAUSE_MODES = ("drain", "in_place", "abort", "retract")
_ABORT_EVERY_S = 0.3

OnLoop = Callable[[Callable[[RolloutBackend], Any]], None]


class UpdatePause:
    """Holds generation still.

    ``on_loop`` makes a call of the backend and waits for it; ``empty(until)`` waits until nothing
    is in flight or ``until`` (time.monotonic, None: as long as it takes) and says whether that is
    so; both raise what the producer or an engine did.
    """

    def __init__(self, mode: str, on_loop: OnLoop, empty: Callable[[float | None], bool]) -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause_generation_mode is {mode!r}, expected one of {PAUSE_MODES}")
        self._mode = mode
        self._on_loop = on_loop
        self._empty = empty
        self._freezes = mode in ("in_place", "retract")
        self._frozen = False
        self.aborting = False  # an aborted request of now is to be gone on with

    @property
    def exact_version(self) -> bool:
        """Whether the version never changes under a request in flight."""
        return not self._freezes

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is generated inside; nothing new may be sent meanwhile."""
        if self._freezes:
            self._frozen = True
            self._on_loop(lambda backend: backend.pause_generation(self._mode))
        elif self._mode == "abort":
            self._abort_until_empty()
        else:
            self._empty(None)
        try:
            yield
        except BaseException:
            if self._frozen:  # somebody else's servers must not stay paused
                with contextlib.suppress(Exception):
                    self._thaw()
            raise
        if self._frozen:
            self._thaw()
        self.aborting = False

    def _thaw(self) -> None:
        self._on_loop(lambda backend: backend.continue_generation())
        self._frozen = False

    def _abort_until_empty(self) -> None:
        """Again and again: a request on its way to a server is not aborted by the first call."""
        self.aborting = True
        while not self._empty(time.monotonic()):
            self._on_loop(lambda backend: backend.abort())
            self._empty(time.monotonic() + _ABORT_EVERY_S)

    def forget(self) -> None:
        """The servers that were held are gone, and new ones have taken their place."""
        self._frozen = self.aborting = False

    async def close(self, backend: RolloutBackend) -> None:
        """Let frozen servers go on, where the producer ends in the middle of an update."""
        if self._frozen:
            with contextlib.suppress(EngineError):
                await backend.continue_generation()
