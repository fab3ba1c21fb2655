"""One rank of test_algorithm: whole jobs one after another, as ``train_async.py`` runs them.

    torchrun --nproc-per-node N -m tests.oracle.algorithm_worker JOBS.json

A job is its flags.  It goes through ``train_async.main``, from the command line to the exported weights,
but for the world: that is joined once, because the imports of a rank take longer than a job.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from r3train.cpu.device import prepare_device

prepare_device()

import torch  # noqa: E402

import train_async  # noqa: E402
from r3train.trainer.megatron import topology  # noqa: E402
from tests.oracle.planted import MUTATIONS  # noqa: E402
from r3train.verify.topology_worker import leave_model_parallel  # noqa: E402


def run_job(flags: list[str], bug: str | None) -> str:
    """Run one job to its end, with a bug planted in every rank; returns its error, or nothing."""
    with ExitStack() as planted:
        if bug is not None:
            planted.enter_context(
                MUTATIONS[bug].patch(None, None)
            )  # these look at no configuration
        try:
            train_async.main.main(flags, standalone_mode=False)
        except SystemExit as end:
            return f"exit code {end.code}" if end.code else ""
        except Exception as error:  # noqa: BLE001 - the test judges it
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    topology.init_distributed("gloo", timeout_minutes=2)
    join = mock.patch.object(topology, "init_distributed", lambda *_: None)
    leave = mock.patch.object(topology, "shutdown", leave_model_parallel)
    with join, leave:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            error = run_job(job["flags"], job["bug"])
            if torch.distributed.get_rank() == 0:
                (Path(job["directory"]) / "ended.json").write_text(json.dumps({"error": error}))
            gc.collect()  # the next job freezes what is left
    topology.shutdown()


if __name__ == "__main__":
    main()
