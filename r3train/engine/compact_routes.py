"""Schedulers of SGLang that send their routes in the smallest type that holds them, not in int32.

The scheduler hands an answer's routes to the one event loop of the server, which encodes them, writes them
into JSON and sends them.  All of that is a quarter of the bytes where an id is a byte.

Source: SGLang 0.5.23, ``SchedulerBatchResultProcessor._maybe_collect_routed_experts``, and
``TokenizerManager._handle_batch_output``, which encodes tensors and takes a text as it is.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler
from sglang.srt.managers.scheduler import run_scheduler_process as _run_scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor as _Processor,
)

from r3train.patches import patch
from r3train.routing.wire import shortened

_WHY = "SGLang sends routes as int32: four bytes of an id that one holds"
_collect = _Processor._maybe_collect_routed_experts


def _collect_short(self: Any, req: Any) -> None:
    _collect(self, req)
    if req.routed_experts is not None:
        short = shortened(req.routed_experts.numpy())
        if short is not None:
            req.routed_experts = short


def shorten() -> None:
    """Let the scheduler of this process send short routes."""
    patch(
        _Processor, "_maybe_collect_routed_experts", _collect_short, expects="(self, req)", why=_WHY
    )


def run_scheduler(*arguments: Any, **named: Any) -> Any:
    """Run a scheduler that sends short routes: what SGLang starts, and a spawned process finds by this name."""
    shorten()
    return _run_scheduler(*arguments, **named)


def install() -> None:
    """Let servers of this process start such schedulers; before SGLang's HTTP server is imported."""
    patch(
        scheduler,
        "run_scheduler_process",
        run_scheduler,
        expects="(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, ...)",
        why=_WHY,
    )
