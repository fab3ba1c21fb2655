"""``train_async.py``, and a file of what ran in one asynchronous step, of every thread of a rank.

    torchrun -m tests.e2e.train_traced DIRECTORY STEP [flags of train_async.py]

``DIRECTORY/rank_N.json`` has the functions of r3train that ran from the step's begin to that of the next: by file, the line at
which each begins, and the ways that pass it.

    prompt    it ran in the producer's thread, or in one that reads answers for it
    routes    it was given routes (uint8 [rows, layers, K]), or a record that has some
    update    the training thread ran it for a weight update

benchmarks/house.py counts their lines of code.
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
_UPDATE = str(PACKAGE / "loop" / "weight_update.py")


class Trace:
    """Notes the functions of r3train that run from the begin of a step to that of the next."""

    def __init__(self, file: Path, step: int) -> None:
        self._file, self._step = file, step
        self._ways: dict[CodeType, set[str]] = {}
        self._notes = False

    def step_begins(self) -> None:
        """Tell it that a step begins: the first is step 0."""
        self._notes = self._step == 0
        if self._step == -1:
            self._write()
        self._step -= 1

    def see(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a function, for ``sys.setprofile``."""
        code = frame.f_code
        if not self._notes or event != "call" or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        ways = self._ways.setdefault(code, set())
        thread = threading.current_thread()
        if thread.name == "producer" or thread.name.startswith("asyncio_"):
            ways.add("prompt")
        if "update" not in ways and thread is threading.main_thread() and _in_update(frame):
            ways.add("update")
        if "routes" not in ways:
            count = code.co_argcount + code.co_kwonlyargcount
            given = (
                frame.f_locals.get(name) for name in code.co_varnames[:count] if name != "self"
            )
            if any(_has_routes(value) for value in given):
                ways.add("routes")

    def _write(self) -> None:
        functions: dict[str, dict[int, list[str]]] = {}
        for code, ways in self._ways.items():
            lines = functions.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), {})
            lines[code.co_firstlineno] = sorted(ways.union(lines.get(code.co_firstlineno, ())))
        self._file.write_text(json.dumps(functions, sort_keys=True), encoding="utf-8")


def _in_update(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _UPDATE:
        frame = frame.f_back
    return frame is not None


def _has_routes(value: object, depth: int = 2) -> bool:
    """True for uint8 [rows, layers, K], for a list whose first member has routes and for a record of r3train that has."""
    if hasattr(value, "ndim"):
        return value.ndim == 3 and str(value.dtype).endswith("uint8")
    if isinstance(value, list | tuple):
        return bool(value) and _has_routes(value[0], depth)
    if not depth or not type(value).__module__.startswith("r3train."):
        return False
    names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
    return any(_has_routes(getattr(value, name, None), depth - 1) for name in names)


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
