"""Faults that a soak does to a running job, and the half of them that the job does to itself.

Signals and a server's retractions come from outside.  A spoiled answer and a full disk are done in the
job: it runs as ``-m benchmarks.chaos ORDERS [flags of train_async.py]``, and a file ORDERS/FAULT asks
for the fault once.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# fault -> role of the process that gets the signal, and the signal; "rank" is the last one
SIGNALS = {
    "kill_engine": ("scheduler", signal.SIGKILL),
    "hang_engine": ("scheduler", signal.SIGSTOP),
    "kill_rank": ("rank", signal.SIGKILL),
    "stop_job": ("rank 0", signal.SIGUSR1),
}
RETRACT, DROP_ROWS, FULL_DISK = "retract", "drop_rows", "full_disk"
ORDERED = (DROP_ROWS, FULL_DISK)
RETRACTED = "retracted"  # the job says here that an answer was
FAULTS = (*SIGNALS, RETRACT, *ORDERED)
ENDS_THE_RANKS = ("kill_rank", "stop_job", FULL_DISK)
PROGRAM = "benchmarks.chaos"
_RETRACT_WITHIN_S = 5.0


class Planned(NamedTuple):
    """A fault, and the rollouts that are trained before it."""

    step: int
    fault: str


def read_plan(text: str) -> list[Planned]:
    """Read ``kill_engine@5,drop_rows@9``; raises ValueError naming the part that is wrong."""
    plan = []
    for part in text.split(","):
        fault, _, step = part.strip().partition("@")
        if fault not in FAULTS or not (step.isascii() and step.isdigit()) or int(step) < 1:
            raise ValueError(f"{part!r}: expected FAULT@STEP with one of {', '.join(FAULTS)}")
        plan.append(Planned(int(step), fault))
    if [p.step for p in plan] != sorted({p.step for p in plan}):
        raise ValueError(f"{text!r}: expected steps that rise")
    return plan


def retract(port: int, key: str, said: Path) -> bool:
    """Have a server retract its running requests, as it does for lack of room; True if one answered.

    said: the file that the job makes when it gets an answer that was retracted.
    """
    said.unlink(missing_ok=True)
    deadline = time.monotonic() + _RETRACT_WITHIN_S
    while not said.exists() and time.monotonic() < deadline:
        # the server's count of running requests is old: they may end before the pause
        if _call(port, key, "/v1/loads?include=core")["loads"][0]["num_running_reqs"]:
            try:
                _call(port, key, "/pause_generation", {"mode": "retract"})
            finally:
                _call(port, key, "/continue_generation", {})
        time.sleep(0.05)
    return said.exists()


def _call(port: int, key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _taken(order: Path) -> bool:
    """True once for each order."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def obeying(orders: Path) -> Iterator[None]:
    """Spoil the next answer with routes, or fill the disk at the next save, when ordered to."""
    from r3train.engine.client import DirectTransport
    from r3train.trainer.megatron.checkpoint import Checkpointer
    from r3train.verify.mutations import patched

    async def generate(original, self, *request):
        answer = await original(self, *request)
        meta = answer["meta_info"]
        if meta.get("num_retractions"):
            orders.with_name(RETRACTED).touch()
        if meta.get("routed_experts") and _taken(orders / DROP_ROWS):
            meta["routed_experts"] = meta["routed_experts"][:-8]  # six bytes less
        return answer

    def save(original, self, next_rollout_id, facts, write_extra=None):
        def write(directory: Path) -> None:
            if write_extra is not None:
                write_extra(directory)
            if _taken(orders / FULL_DISK):
                raise OSError(errno.ENOSPC, "No space left on device")

        original(self, next_rollout_id, facts, write)

    with ExitStack() as patches:
        patches.enter_context(patched(DirectTransport, "generate", generate))
        patches.enter_context(patched(Checkpointer, "save", save))
        yield


if __name__ == "__main__":  # writers of torch_dist checkpoints import this file again
    if sys.argv[1:] in ([], ["--help"]):
        print("usage: torchrun -m benchmarks.chaos ORDERS [flags of train_async.py]")
        sys.exit()
    given = Path(sys.argv.pop(1))
    from r3train.cpu.device import prepare_device
    from train_async import main

    prepare_device()
    with obeying(given):
        main()
