"""``python -m r3train.engine.launch_server FLAGS...``: SGLang's server as this project starts it.

- A key comes from the environment.  SGLang takes it as a flag, which everybody on the node could read
  in ``ps``, and writes it to its log with all its arguments: here the flag is added inside the
  process, and hidden in the log.
- Schedulers send routes in the smallest type that holds them, and an indexer's choices as bits.
- Without CUDA the workers are forks of this process, and not new ones that import everything again,
  --enable-memory-saver releases memory of the CPU, and memory for a bucket of weights is kept for the next one.

Source: SGLang 0.5.23, ``launch_server.py`` (arguments from ``sys.argv``),
``Engine._launch_subprocesses`` (``logger.info(f"server_args=...")``) and ``_set_envs_and_config``
(``mp.set_start_method("spawn", force=True)``).
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import runpy
import sys

from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.patches import note, patch, stand_in
from r3train.cpu.torchvision_stub import declare_torchvision_ops

_HIDDEN = "***"


def hide_in_logs(secret: str) -> None:
    """Replace a text in every log record of this process, for all loggers and handlers."""
    make = logging.getLogRecordFactory()

    def record_without(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a bad format string: the handler reports it
            return record
        if secret in message:
            record.msg, record.args = message.replace(secret, _HIDDEN), None
        return record

    note("logging's record factory", "SGLang writes its key to its log")
    logging.setLogRecordFactory(record_without)


def fork_workers() -> None:
    """Make workers forks of this process whatever start method is asked for.

    SGLang asks for spawn, because CUDA does not survive a fork.  On a CPU the scheduler and the
    detokenizer would import for 15 s each what this process has imported already.  It has one
    thread when it starts them.  No process searches those imports for garbage, which took a quarter of
    the time that they take.
    """
    set_start_method = multiprocessing.set_start_method
    gc.disable()

    def set_fork(_method: str, force: bool = False) -> None:
        gc.freeze()
        gc.enable()
        set_start_method("fork", force)

    patch(
        multiprocessing,
        "set_start_method",
        set_fork,
        expects="(method, force=False)",
        why="SGLang's workers would import everything once more",
    )


def do_without_cuda() -> None:
    """Fork workers, release the CPU's memory, keep that of weight updates, and import no Megatron.

    SGLang's dumper of tensors would import it.
    """
    from r3train.cpu import memory_saver  # it imports torch

    stand_in("torch_memory_saver", memory_saver, "it releases CUDA's memory only")
    stand_in("megatron", None, "SGLang's dumper of tensors imports it, for most of a second")
    fork_workers()
    # they import SGLang, once the stand-ins are in place
    from r3train.cpu import received_bucket, sparse_model

    received_bucket.keep()
    sparse_model.leave_sparse_attention_to_the_model()
    sparse_model.record_choices()


def main() -> None:
    """Run SGLang's server in this process; its workers inherit no key."""
    key = os.environ.pop(ENGINE_KEY_VARIABLE, None)
    if key:
        hide_in_logs(key)
        sys.argv += ["--api-key", key]
    import torch

    from r3train.cpu import platform  # it imports torch

    platform.in_our_server = True
    declare_torchvision_ops()
    if not torch.cuda.is_available():
        do_without_cuda()
    from r3train.engine import compact_routes  # imports SGLang

    compact_routes.install()
    # as __main__ under its own name: spawned workers import it by that name
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
