"""Who is on which GPU of rank 0's node, and whether what must be held there fits.

Where servers go is the training command's own rule (``launch.gpus``): the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator

from r3train.config import RunConfig
from r3train.doctor.estimates import Estimate
from r3train.doctor.finding import Finding, amount, ok, problem, warning
from r3train.doctor.machine import check_memory
from r3train.launch.gpus import server_gpus

# SGLang's own choice leaves 10 GiB of a large GPU, and more for CUDA graphs
_DEFAULT_FRACTION = 0.85
# activations, CUDA's context, the allocator's fragments
_MARGIN = 0.1


def check_placement(config: RunConfig, num_gpus: int, nproc_per_node: int) -> Iterator[Finding]:
    """Whether servers of our own have GPUs of their own; nothing to say where there are none."""
    if not num_gpus:
        return
    try:
        servers = _taken(config, num_gpus, nproc_per_node)
    except ValueError as error:
        remedy = (
            f"docs/slurm.md says who takes which GPU; if fewer than {nproc_per_node} ranks are on this"
            " node, --nproc-per-node says so"
        )
        yield problem("servers", str(error), remedy)
        return
    shared = [gpu for gpu in servers if gpu < nproc_per_node]
    if shared:
        text = f"SGLang and a rank share GPU {', '.join(map(str, shared))}: its memory and its time"
        remedy = "--sglang-mem-fraction-static leaves the rank its part; or fewer ranks than GPUs"
        yield warning("servers", text, remedy)
    elif servers:
        yield ok("servers", f"SGLang takes GPU {', '.join(map(str, servers))}, no rank does")


def check_gpu_memory(
    config: RunConfig, e: Estimate, gpu_bytes: int, num_gpus: int, nproc_per_node: int
) -> Iterator[Finding]:
    """A rank's weights, gradients and optimizer, and SGLang's share, against the GPU they are on."""
    needed, held = e.rank_bytes, f": {amount(e.rank_bytes)} of a rank"
    remedy = "more ranks (expert or pipeline parallel), --use-distributed-optimizer, --bf16"
    try:
        shared = any(gpu < nproc_per_node for gpu in _taken(config, num_gpus, nproc_per_node))
    except ValueError:
        shared = False  # check_placement says it
    if shared:
        share = _fraction(config) * gpu_bytes
        needed += share
        held += f", {amount(share)} of SGLang on the same GPU"
        remedy += ", a lower --sglang-mem-fraction-static, or a GPU of its own for SGLang"
    yield from check_memory(
        gpu_bytes,
        needed,
        margin_bytes=_MARGIN * gpu_bytes,
        subject="GPU memory",
        of_what=held,
        remedy=remedy,
        near=f"{remedy}: activations come on top",
    )


def _taken(config: RunConfig, num_gpus: int, nproc_per_node: int) -> list[int]:
    """GPUs that servers of our own take.  Raises ValueError where the training command would."""
    servers = server_gpus(config, num_ranks=nproc_per_node, num_visible=num_gpus)
    return [gpu for gpus in servers for gpu in gpus]


def _fraction(config: RunConfig) -> float:
    """The part of its GPU that SGLang takes."""
    given = [v for k, v in config.rollout.sglang.items() if "mem_fraction_static".startswith(k)]
    try:
        return float(given[0]) if given else _DEFAULT_FRACTION
    except (TypeError, ValueError):
        return _DEFAULT_FRACTION  # SGLang refuses such a flag itself
