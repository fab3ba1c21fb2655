"""Which GPUs of its node a server takes: behind those of the ranks and of the servers before it.

Numbers are those that the process sees (CUDA_VISIBLE_DEVICES), as torch and SGLang count them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from r3train.config import RunConfig

_TP = ("tp_size", "tensor_parallel_size")
# each size with its alias; attention's parallelism is inside tensor parallelism and takes no more
_SIZES = (_TP, ("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size"))


def server_gpus_here(config: RunConfig) -> list[range]:
    """``server_gpus`` of this process's node and torchrun, for rank 0."""
    import torch

    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return server_gpus(config, num_ranks=num_ranks, num_visible=num_visible)


def server_gpus(config: RunConfig, *, num_ranks: int, num_visible: int) -> list[range]:
    """GPUs of each server that rank 0 starts; none without GPUs, and none where it starts none.

    Raises ValueError as ``own_server_gpus``.
    """
    flags = config.rollout.sglang
    elsewhere = config.rollout.rollout_external_engine_addrs
    if not num_visible or elsewhere or config.checkpoint.replay_rollouts is not None:
        return []
    by_disk = config.trainer.update_weight_transfer_mode == "disk"
    return own_server_gpus(
        flags,
        num_servers=config.rollout.rollout_num_engines,
        num_ranks=num_ranks,
        num_visible=num_visible,
        # NCCL takes a GPU once into a group, files do not mind; and it must have been asked for
        may_share=by_disk and "base_gpu_id" in flags,
    )


def own_server_gpus(
    flags: Mapping[str, object],
    *,
    num_servers: int,
    num_ranks: int,
    num_visible: int,
    may_share: bool,
) -> list[range]:
    """GPUs of each of rank 0's servers, which lie behind its node's ranks unless a base is given.

    flags: the servers' own.  num_ranks: torchrun's on this node; rank i takes GPU i.  may_share: a
    base that was given may lie on the ranks' GPUs.
    Raises ValueError where a server would share a GPU with a rank, or need one that is not there.
    """
    first = _number(flags, ("base_gpu_id",), num_ranks, least=0)
    found = [_gpus(flags, first, index) for index in range(num_servers)]
    for index, gpus in enumerate(found):
        _check_there(gpus, index, num_ranks, num_visible)
        shared = set(gpus) & set(range(num_ranks))
        if shared and not may_share:
            raise ValueError(
                f"server {index} of this node takes {_named(gpus)}, and the ranks of this node take"
                f" {_named(range(num_ranks))}: the two would share memory, and NCCL refuses new weights"
                " between them. Leave --sglang-base-gpu-id out, and start as many ranks"
                " (--nproc-per-node) as leave GPUs free; or, if they are to share, give"
                " --update-weight-transfer-mode disk"
            )
    return found


def served_gpus(
    flags: Mapping[str, object], *, num_gpus: int | None, local_index: int, num_visible: int
) -> dict[str, object]:
    """The flags that put a ``r3train serve`` on GPUs of its own among the servers of its node.

    num_gpus: how many it gets; without any size among ``flags`` its tensor parallelism.
    local_index: its number on the node.  Empty without GPUs.
    Raises ValueError where sizes and ``num_gpus`` disagree, where neither is there for a second
    server, and where a GPU is missing.
    """
    if num_visible == 0:
        if num_gpus is not None:
            raise ValueError(f"--num-gpus {num_gpus}: no GPU is visible here")
        return {}
    sized = any(_given(flags, names) for names in _SIZES)
    if local_index and num_gpus is None and not sized:
        raise ValueError(
            f"server {local_index} of this node: nothing says how many GPUs a server takes:"
            " --num-gpus does (GPUS_PER_SERVER of slurm/train_multi_node.sbatch), or"
            " --sglang-tp-size"
        )
    placed: dict[str, object] = {}
    if num_gpus is not None and not sized:
        placed["tp_size"] = num_gpus
    wanted = {**flags, **placed}
    gpus = _gpus(wanted, _number(flags, ("base_gpu_id",), 0, least=0), local_index)
    if num_gpus is not None and len(gpus) != num_gpus:
        sizes = ", ".join(
            f"{name} {flags[name]}" for names in _SIZES for name in _given(flags, names)
        )
        raise ValueError(f"{sizes} takes {len(gpus)} GPUs, --num-gpus gives {num_gpus}")
    _check_there(gpus, local_index, 0, num_visible)
    return {**placed, "base_gpu_id": gpus.start}


def _gpus(flags: Mapping[str, object], first: int, index: int) -> range:
    """GPUs of the server ``index`` of those that begin at GPU ``first``.

    Source: SGLang 0.5.23, ``Engine._launch_scheduler_processes``, ``compute_world_size``.
    """
    tp, pp, dp = (_number(flags, names, 1) for names in _SIZES)
    if flags.get("enable_dp_attention"):
        dp = 1  # the old spelling of attn_dp_size
    step = _number(flags, ("gpu_id_step",), 1)
    count = max(1, tp * pp * dp // _number(flags, ("nnodes",), 1))
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
        " (--rollout-external-engine-addrs)"
    )


def _given(flags: Mapping[str, object], names: tuple[str, ...]) -> list[str]:
    """Those flags that are a spelling of one; like SGLang's parser, a beginning is enough."""
    return [flag for flag in flags if any(name.startswith(flag) for name in names)]


def _number(
    flags: Mapping[str, object], names: tuple[str, ...], default: int, *, least: int = 1
) -> int:
    given = _given(flags, names)
    if len(given) > 1:
        raise ValueError(f"sglang: {names[0]} is given twice: {', '.join(sorted(given))}")
    value = flags[given[0]] if given else default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        above = "a number above 0" if least else "a number from 0 on"
        raise ValueError(f"sglang: {names[0]}: expected {above}, got {value!r}")
    return value


def _named(gpus: range) -> str:
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
