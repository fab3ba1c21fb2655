"""The GPUs of a server on its node: those after the GPUs of ranks and of earlier servers.

GPUs are counted from 0 among those that CUDA_VISIBLE_DEVICES shows, as torch and SGLang do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from r3train.config import RunConfig
from r3train.cuda_environment import visible_gpus

# each size with its alias; parallel attention uses the GPUs of tensor parallelism
_SIZES = (
    ("tp_size", "tensor_parallel_size"),
    ("pp_size", "pipeline_parallel_size"),
    ("dp_size", "data_parallel_size"),
)
_BASE = ("base_gpu_id",)
_NODES = ("nnodes",)
_NODE_RANK, _MEETING = ("node_rank",), ("dist_init_addr", "nccl_init_addr")
_MOST_DIGITS = 7  # of a number of ranks
_SHARING = (
    "to share a rank's GPU, --sglang-base-gpu-id names it, with --update-weight-transfer-mode disk"
)


def gpus_here() -> tuple[int, int]:
    """Return the number of GPUs, and the bytes of the smallest."""
    try:
        import torch
    except ImportError:
        return 0, 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return count, min(sizes, default=0)


def torchruns_number(name: str, default: int) -> int:
    """Return a number of torchrun's environment (RANK, WORLD_SIZE, ...); raises ValueError for no number."""
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValueError(
            f"environment variable {name}: {text[:20]!r} is no number of ranks: start the job with torchrun,"
            " or unset it"
        )
    return int(text)


def server_gpus_here(config: RunConfig, num_ranks: int | None = None) -> list[range]:
    """Return ``server_gpus`` of this node; for rank 0.  num_ranks: None means as torchrun says."""
    num_visible = visible_gpus()
    if num_ranks is None:
        fitting = ranks_that_fit(torchruns_number("WORLD_SIZE", 1), num_visible)
        num_ranks = torchruns_number("LOCAL_WORLD_SIZE", fitting)
    return server_gpus(config, num_ranks=num_ranks, num_visible=num_visible)


def ranks_that_fit(world_size: int, num_visible: int) -> int:
    """Return the ranks on this node if torchrun does not say: one per GPU, all without GPUs."""
    return min(world_size, num_visible or world_size)


def server_gpus(config: RunConfig, *, num_ranks: int, num_visible: int) -> list[range]:
    """Return the GPUs of each server that rank 0 starts; empty without GPUs or such servers.

    Rank i of the node takes GPU i.  Servers take the GPUs after the ranks, with --colocate those of the
    ranks, or those from --sglang-base-gpu-id on.  Raises ValueError for a server that would share a GPU with a rank, or
    that needs a GPU which does not exist.
    """
    flags = config.rollout.sglang
    elsewhere = config.rollout.has_external_servers
    if not elsewhere and config.has_engines and _number(flags, _NODES, 1) > 1:
        raise ValueError(
            "sglang: nnodes: rank 0 starts servers on its own node only; start one over several nodes with"
            " r3train serve on each (r3train docs several_machines), and name it with --rollout-external-engine-addrs"
        )
    if elsewhere or not config.has_engines or not _on_gpus(flags, num_visible):
        return []
    # NCCL refuses one GPU twice in a group; the other transports have none, where the user asks for one
    has_group = config.trainer.update_weight_transfer_mode == "distributed"
    colocate = config.rollout.colocate
    may_share = colocate or (not has_group and bool(_given(flags, _BASE)))
    first = _number(flags, _BASE, 0 if colocate else num_ranks, least=0)
    found = [_gpus(flags, first, index) for index in range(config.rollout.rollout_num_engines)]
    for index, gpus in enumerate(found):
        _check_there(gpus, index, num_ranks, num_visible)
        shared = set(gpus) & set(range(num_ranks))
        if shared and not may_share:
            raise ValueError(
                f"server {index} of this node takes {_named(gpus)}, and the ranks of this node take"
                f" {_named(range(num_ranks))}: the two would share memory, and NCCL refuses new weights"
                " between them. Leave --sglang-base-gpu-id out, and start as many ranks"
                f" (--nproc-per-node) as leave GPUs free; or, {_SHARING}"
            )
    return found


def gpu_flags(
    flags: Mapping[str, object], *, num_gpus: int | None, local_index: int, num_visible: int
) -> dict[str, object]:
    """Return the flags that give a ``r3train serve`` its own GPUs on its node; {} without GPUs.

    num_gpus: its GPUs on this node; over all of its nodes (--sglang-nnodes) they are its tensor parallelism
    if ``flags`` name no size.
    local_index: its number on the node, from 0.
    Raises ValueError if sizes and ``num_gpus`` disagree, if a second server has neither, and if a
    GPU is missing.
    """
    if not _on_gpus(flags, num_visible):
        if num_gpus is not None:
            raise ValueError(
                f"--num-gpus {num_gpus}: no GPU is visible here, or --sglang-device is cpu"
            )
        return {}
    sized = any(_given(flags, names) for names in _SIZES)
    if local_index and num_gpus is None and not sized:
        raise ValueError(
            f"server {local_index} of this node: nothing says how many GPUs a server takes:"
            " --num-gpus does (GPUS_PER_SERVER of slurm/train_multi_node.sbatch), or"
            " --sglang-tp-size"
        )
    _check_nodes(flags)
    placed: dict[str, object] = {}
    if num_gpus is not None and not sized:
        placed["tp_size"] = num_gpus * _number(flags, _NODES, 1)
    wanted = {**flags, **placed}
    gpus = _gpus(wanted, _number(flags, _BASE, 0, least=0), local_index)
    if num_gpus is not None and len(gpus) != num_gpus:
        sizes = ", ".join(
            f"{name} {flags[name]}" for names in _SIZES for name in _given(flags, names)
        )
        raise ValueError(f"{sizes} takes {len(gpus)} GPUs, --num-gpus gives {num_gpus}")
    _check_there(gpus, local_index, 0, num_visible)
    return {**placed, "base_gpu_id": gpus.start}


def server_size(flags: Mapping[str, object]) -> int | None:
    """Return the GPUs that a server of these flags takes; None where they name no size."""
    if not any(_given(flags, names) for names in _SIZES):
        return None
    one_node = {name: value for name, value in flags.items() if name not in _given(flags, _NODES)}
    return len(_gpus({**one_node, "gpu_id_step": 1}, 0, 0))


def is_follower(flags: Mapping[str, object]) -> bool:
    """Return True for a further node of a server over several: it answers no requests of its own."""
    return _number(flags, _NODES, 1) > 1 and _number(flags, _NODE_RANK, 0, least=0) > 0


def _check_nodes(flags: Mapping[str, object]) -> None:
    """Raise ValueError for a server over several nodes that could not meet."""
    nodes = _number(flags, _NODES, 1)
    rank = _number(flags, _NODE_RANK, 0, least=0)
    if rank >= nodes:
        raise ValueError(f"sglang: node_rank {rank} is none of nnodes {nodes}, counted from 0")
    if nodes > 1 and not (_given(flags, _NODE_RANK) and _given(flags, _MEETING)):
        raise ValueError(
            f"sglang: nnodes {nodes} needs --sglang-node-rank, 0 to {nodes - 1}, and the same"
            " --sglang-dist-init-addr HOST:PORT of node 0 on every node"
        )


def _on_gpus(flags: Mapping[str, object], num_visible: int) -> bool:
    return num_visible > 0 and flags.get("device") != "cpu"


def _gpus(flags: Mapping[str, object], first: int, index: int) -> range:
    """Return the GPUs of server ``index``, if server 0 begins at GPU ``first``.

    Source: SGLang 0.5.23, ``Engine._launch_scheduler_processes``, ``compute_world_size``.
    """
    tp, pp, dp = (_number(flags, names, 1) for names in _SIZES)
    if flags.get("enable_dp_attention"):
        dp = 1  # the old name of attn_dp_size
    step = _number(flags, ("gpu_id_step",), 1)
    count = max(1, tp * pp * dp // _number(flags, _NODES, 1))
    base = first + index * count * step
    return range(base, base + count * step, step)


def _check_there(gpus: range, index: int, num_ranks: int, num_visible: int) -> None:
    if gpus[-1] < num_visible:
        return
    behind = ""
    if num_ranks:
        behind = f", and the ranks take {_named(range(num_ranks))}"
    raise ValueError(
        f"server {index} of this node takes {_named(gpus)}, counted from 0{behind}, but"
        f" {num_visible} {'GPU is' if num_visible == 1 else 'GPUs are'} visible: fewer ranks"
        " (--nproc-per-node), fewer servers or a smaller --sglang-tp-size, or servers elsewhere"
        f" (--rollout-external-engine-addrs); or, {_SHARING}"
    )


def _given(flags: Mapping[str, object], names: tuple[str, ...]) -> list[str]:
    """Return the flags that mean one of ``names``; SGLang's parser accepts a prefix."""
    return [flag for flag in flags if any(name.startswith(flag) for name in names)]


def _number(
    flags: Mapping[str, object], names: tuple[str, ...], default: int, *, least: int = 1
) -> int:
    given = _given(flags, names)
    if len(given) > 1:
        raise ValueError(f"sglang: {names[0]} is given twice: {', '.join(sorted(given))}")
    value = flags[given[0]] if given else default
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        above = "a number above 0" if least else "a number from 0 on"
        raise ValueError(f"sglang: {names[0]}: expected {above}, got {value!r}")
    return value


def _named(gpus: range) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
