"""Schedulers of SGLang that send their routes in the smallest type that holds them, not in int32.

The scheduler hands an answer's routes to the one event loop of the server, which encodes them, writes them
into JSON and sends them.  All of that is a quarter of the bytes where an id is a byte.

The tokens that an indexer chose are sent as bits, of the rows that were asked for and are not implied: see
``routing.indexer_topk``.  SGLang sends ids of all rows, and collects them for requests that do not ask, too.

Source: SGLang 0.5.23, ``SchedulerBatchResultProcessor._maybe_collect_routed_experts`` and
``_maybe_collect_indexer_topk``, and ``TokenizerManager._handle_batch_output``, which encodes tensors and takes a
text as it is.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler
from sglang.srt.managers.scheduler import run_scheduler_process as _run_scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor as _Processor,
)
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

from r3train.patches import patch
from r3train.routing import indexer_topk
from r3train.routing.wire import shortened

_WHY = "SGLang sends routes as int32: four bytes of an id that one holds"
BLOCK_BYTES = 1 << 24  # of ids that are copied at a time
collect_routes = _Processor._maybe_collect_routed_experts
collect_all_chosen = _Processor._maybe_collect_indexer_topk


def collect_short(self: Any, req: Any) -> None:
    """Put the routes of a finished request into its answer, in the shortest type that holds them."""
    collect_routes(self, req)
    if req.routed_experts is not None:
        short = shortened(req.routed_experts.numpy())
        if short is not None:
            req.routed_experts = short


def collect_chosen(self: Any, req: Any) -> None:
    """Put the rows that an indexer chose, and that the prefix does not imply, into the answer of a finished request."""
    capturer = get_global_indexer_capturer()
    if capturer is None or not req.return_indexer_topk:
        return
    num_tokens = len(req.origin_input_ids) + len(req.output_ids_through_stop)
    start = max(req.routed_experts_start_len or 0, capturer.topk_size)
    step = max(1, BLOCK_BYTES // (4 * capturer.num_layers * capturer.topk_size))
    blocks = (
        capturer.get_topk(
            req_pool_idx=req.kv.req_pool_idx,
            seqlen=min(first + step + 1, num_tokens),
            req_to_token_pool=self.req_to_token_pool,
            start_len=first,
        ).numpy()
        for first in range(start, num_tokens - 1, step)
    )
    req.indexer_topk = indexer_topk.shortened(blocks, start, num_tokens)
    if req.indexer_topk is None:
        collect_all_chosen(self, req)


def shorten() -> None:
    """Let the scheduler of this process send short routes, and an indexer's choices as bits."""
    for name, collect, why in (
        ("_maybe_collect_routed_experts", collect_short, _WHY),
        (
            "_maybe_collect_indexer_topk",
            collect_chosen,
            "SGLang sends an indexer's choices of all rows as int32",
        ),
    ):
        patch(_Processor, name, collect, expects="(self, req)", why=why)


def run_scheduler(*arguments: Any, **named: Any) -> Any:
    """Run a scheduler that sends short answers: what SGLang starts, and a spawned process finds by this name."""
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
