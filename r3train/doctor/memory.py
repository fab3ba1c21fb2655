"""The estimate of a run against the GPUs, the host's memory and the disk that are here.

Servers are placed by the training command's own rule (``launch.gpus``): the two cannot disagree.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.launch.job.finding import Findings, ok, problem, room, warning
from r3train.doctor.machine import Node, check_disk, existing_parent
from r3train.families.checks.family_checks import check_family
from r3train.launch.estimate.memory_use import (
    Model,
    StageRanks,
    amount,
    evidence_bytes,
    evidence_text,
    server_bytes,
    server_fraction,
    stages,
    training_checkpoint_bytes,
    value_bytes,
)
from r3train.launch.gpus import server_gpus
from r3train.launch.estimate.topology_search import MARGIN


def check_room(config: RunConfig, node: Node) -> Findings:
    """GPUs and disk for the run; without a readable checkpoint less of it."""
    model = fullest = None
    try:
        hf = read_hf_facts(config.model.hf_checkpoint)
        check_family(hf)
        model = Model(hf, config.lora)
        fullest = max(stages(config, model, node.world_size), key=lambda stage: stage.total)
    except ValueError:  # preflight has said so
        pass
    yield from check_gpus(config, node, fullest)
    run_dir, mode = config.run.run_dir or Path("runs"), config.trainer.update_weight_transfer_mode
    if fullest is None:
        yield from check_disk("run directory", run_dir, {"logs and evidence": 256 << 20})
        return
    weights = model.total.total * value_bytes(config)
    files = {"weights for the servers": 2 * weights} if mode == "disk" else {}
    if config.serves_fp8:
        files["the servers' checkpoint"] = server_bytes(config, model)
    yield from check_disk("run directory", run_dir, {"logs and evidence": 256 << 20} | files)
    if config.checkpoint.save is not None:
        # the new one is complete before the old one goes
        kept = (config.checkpoint.save_keep_last or 2) + 1
        parts = {f"{kept} checkpoints": kept * training_checkpoint_bytes(config, model)}
        yield from check_disk("checkpoints", config.checkpoint.save, parts)
    if config.r3_check_enabled and model.hf.is_moe:
        free = shutil.disk_usage(existing_parent(run_dir)).free
        yield from check_evidence(config, model, node.world_size, free)


def check_evidence(config: RunConfig, model: Model, world_size: int, free: float) -> Findings:
    """The R3 evidence of the whole run against the ``free`` bytes of its directory."""
    summed, by_call = evidence_bytes(config, model.hf, world_size)
    text = evidence_text(config, model.hf, world_size)
    if (summed if config.sums_evidence else by_call) > free:
        remedy = "free room there" if config.sums_evidence else "--r3-evidence summed"
        yield warning("evidence", f"{text}; {amount(free)} are free", remedy)
    else:
        yield ok("evidence", text)


def check_gpus(config: RunConfig, node: Node, rank: StageRanks | None) -> Findings:
    """The servers' GPUs, best those that no rank has, and memory of a GPU for all that is on it.

    rank: the fullest; None where the checkpoint does not tell.  No finding on a machine without GPUs.
    """
    if not node.num_gpus:
        return
    taken: list[int] = []
    try:
        servers = server_gpus(config, num_ranks=node.num_ranks, num_visible=node.num_gpus)
        taken = [gpu for gpus in servers for gpu in gpus]
    except ValueError as error:
        remedy = (
            "r3train docs several_machines says who takes which GPU; if this node has fewer than "
            f"{node.num_ranks} ranks, give their number with --nproc-per-node"
        )
        yield problem("servers", str(error), remedy)
    shared = [] if config.rollout.colocate else [gpu for gpu in taken if gpu < node.num_ranks]
    gpus = f"GPU {', '.join(map(str, shared or taken))}"
    if shared:
        text = f"SGLang and a rank share {gpus}, its memory and its time"
        remedy = (
            "leave the rank its part (--sglang-mem-fraction-static), or start fewer ranks than GPUs"
        )
        yield warning("servers", text, remedy)
    elif taken:  # colocated, one of the two at a time
        whose = "colocated with the ranks" if config.rollout.colocate else "no rank does"
        yield ok("servers", f"SGLang takes {gpus}, {whose}")
    if rank is None:
        return
    held = rank.held.rank
    parts = {"a rank": held, "activations and logits": rank.total - held}
    remedy = (
        "r3train estimate lists topologies that fit; --use-distributed-optimizer, --bf16,"
        " --optimizer-override (r3train docs models)"
    )
    if shared:
        parts["SGLang"] = server_fraction(config, node.gpu_bytes) * node.gpu_bytes
        remedy += ", a lower --sglang-mem-fraction-static, or a GPU of its own for SGLang"
    margin = MARGIN * node.gpu_bytes
    yield room("GPU memory", "a GPU", node.gpu_bytes, parts, remedy, margin=margin)
