"""``train_async.py``, and a file of what ran in one asynchronous step, of every thread of a rank.

    torchrun -m tests.e2e.train_traced DIRECTORY STEP [flags of train_async.py]

``DIRECTORY/rank_N.json`` has the functions of r3train that ran from the step's begin to that of the next, by file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import r3train
from r3train.cpu.device import prepare_device
from train_async import main

PACKAGE = Path(r3train.__file__).parent


class Trace:
    """Notes the functions of r3train that run from the begin of a step to that of the next."""

    def __init__(self, file: Path, step: int) -> None:
        self._file, self._step = file, step
        self._codes: set[CodeType] = set()
        self._notes = False

    def step_begins(self) -> None:
        """Tell it that a step begins: the first is step 0."""
        self._notes = self._step == 0
        if self._step == -1:
            self._write()
        self._step -= 1

    def see(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a function, for ``sys.setprofile``."""
        if self._notes and event == "call":
            self._codes.add(frame.f_code)

    def _write(self) -> None:
        functions: dict[str, list[int]] = {}
        for code in self._codes:
            if code.co_filename.startswith(f"{PACKAGE}/"):
                file = str(Path(code.co_filename).relative_to(PACKAGE))
                functions.setdefault(file, []).append(code.co_firstlineno)
        text = json.dumps({file: sorted(lines) for file, lines in sorted(functions.items())})
        self._file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    prepare_device()
    from r3train.loop import async_loop

    directory, step = sys.argv.pop(1), int(sys.argv.pop(1))
    trace = Trace(Path(directory) / f"rank_{os.environ['RANK']}.json", step)

    class Clock(async_loop.PhaseClock):
        """The clock of a step, which the loop makes at its begin."""

        def __init__(self) -> None:
            trace.step_begins()
            super().__init__()

    async_loop.PhaseClock = Clock
    threading.setprofile(trace.see)
    sys.setprofile(trace.see)
    main()
