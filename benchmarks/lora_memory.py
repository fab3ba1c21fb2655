"""Memory of a rank that trains all weights, adapters on all linears, and adapters without the experts'.

Each arm is a process of its own, which takes two steps: bytes of weights, gradient buffers and optimizer
state as they are allocated, what the estimate has for them, and the largest resident set.

    python -m benchmarks.lora_memory [--rank 8]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.replay_overhead import (  # first: it prepares the device
    MODEL,
    make_actor,
    make_slices,
    one_rank,
)

import torch

from benchmarks.measure import flags, write_result
from benchmarks.tiny_jobs import describe, tiny_model
from r3train.config import RunConfig
from r3train.config.data_settings import DataSection
from r3train.config.hf_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.config.model_settings import ModelSection
from r3train.config.rollout_settings import RolloutSection
from r3train.launch.estimate import Model, stages

ARMS = {
    "all weights": lambda rank: LoraSection(),
    "adapters on all linears": lambda rank: LoraSection(lora_rank=rank),
    "without experts": lambda rank: LoraSection(lora_rank=rank, exclude_modules=("experts",)),
}


def main() -> None:
    arguments = flags(__doc__, rank=8, tokens=1024, arm="", checkpoint="")
    if arguments.arm:
        lora = ARMS[arguments.arm](arguments.rank)
        return print(json.dumps(measure(Path(arguments.checkpoint), lora, arguments.tokens)))
    found = {}
    with tiny_model(MODEL) as tiny:
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.lora_memory", "--arm", arm]
            command += ["--rank", str(arguments.rank), "--tokens", str(arguments.tokens)]
            command += ["--checkpoint", str(tiny / "model")]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[arm] = json.loads(done.stdout.splitlines()[-1])
    write_result(
        arguments.output, {"model": describe(MODEL), "rank": arguments.rank, "arms": found}
    )


def measure(checkpoint: Path, lora: LoraSection, tokens: int) -> dict[str, Any]:
    """Bytes of one rank after two steps."""
    with one_rank() as place:
        actor = make_actor(checkpoint, place, replay=True, lora=lora)
        slices = make_slices(actor, MODEL, 8, tokens)
        for _ in range(2):
            old = actor.compute_log_probs(slices, "old_log_prob", weight_version=0)
            actor.train_step(slices, old, None, weight_version=0)
            actor.collect_evidence(0)
        chunks = actor.model.chunks
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        config = config_of(checkpoint, lora)
        counted = stages(config, Model(read_hf_facts(checkpoint), lora), 1)[0].held
        return dict(
            weights=sum(p.nbytes for c in chunks for p in c.parameters()),
            gradients=sum(b.grad_data.nbytes for b in buffers),
            optimizer=sum(moments(actor.optimizer)),
            counted=dict(
                weights=counted.weights, gradients=counted.gradients, optimizer=counted.optimizer
            ),
            resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def moments(optimizer: Any) -> Iterator[int]:
    """Bytes of each tensor of the optimizer's state."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():
            yield from (t.nbytes for t in state.values() if torch.is_tensor(t) and t.dim())


def config_of(checkpoint: Path, lora: LoraSection) -> RunConfig:
    """The configuration of ``make_actor``, as far as it takes memory."""
    return RunConfig(
        model=ModelSection(hf_checkpoint=checkpoint),
        lora=lora,
        data=DataSection(prompt_data="none"),
        rollout=RolloutSection(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=1),
    )


if __name__ == "__main__":
    main()
