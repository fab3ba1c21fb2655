"""What replay and its check cost a train step: each over a step without replay, and check over replay.

Three actors hold the same weights and take turns in one process, so that whatever else the machine
does falls on all alike; each ratio is of neighbours.  The routes that are replayed are the experts the
model chooses itself, so that all three do the same work.

    python -m benchmarks.replay_overhead [--rounds 15] [--tokens 1024] [--topk 8]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

from r3train.trainer.megatron.cpu_device import prepare_device

warnings.filterwarnings("ignore")
DEVICE = prepare_device()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

from benchmarks.measure import ratios, spread, write_result  # noqa: E402
from r3train.config import RunConfig  # noqa: E402
from r3train.config.data import DataSection  # noqa: E402
from r3train.config.hf_facts import read_hf_facts  # noqa: E402
from r3train.config.model import ModelSection  # noqa: E402
from r3train.config.parallel import ParallelSection  # noqa: E402
from r3train.config.replay import ReplaySection  # noqa: E402
from r3train.config.rollout import RolloutSection  # noqa: E402
from r3train.config.trainer import TrainerSection  # noqa: E402
from r3train.layout.microbatch import build_microbatch, slice_microbatch  # noqa: E402
from r3train.engine.server import free_port  # noqa: E402
from r3train.tiny import TinyOptions, build  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.topology import (  # noqa: E402
    init_distributed,
    init_model_parallel,
    shutdown,
)
from r3train.types import Prompt, RankSlice, RolloutSample, RouteShape, TrainSample  # noqa: E402

# one process, one thread: its own time is free of what else the machine does
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

MODEL = TinyOptions(
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    num_experts=16,
    topk=4,
    moe_intermediate_size=512,
    vocab_size=512,
    max_position_embeddings=4096,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--topk", type=int, default=MODEL.topk)
    parser.add_argument("--experts", type=int, default=MODEL.num_experts)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port("127.0.0.1")))
    model = replace(
        MODEL,
        num_layers=arguments.layers,
        topk=arguments.topk,
        num_experts=arguments.experts,
    )
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch) / "tiny", model)
        result = measure(Path(scratch) / "tiny" / "model", model, arguments)
    shutdown()
    write_result(arguments.output, result)


def measure(checkpoint: Path, model: TinyOptions, arguments: argparse.Namespace) -> dict:
    """Seconds of a step (old-log-prob pass and train step) of each actor, and their ratios."""
    init_distributed("auto", 10)
    place = init_model_parallel(ParallelSection(), 1)
    actors = {
        "native": make_actor(checkpoint, place, replay=False, check=False),
        "replay": make_actor(checkpoint, place, replay=True, check=False),
        "replay and check": make_actor(checkpoint, place, replay=True, check=True),
    }
    slices = make_slices(actors["native"], model, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for round_number in range(arguments.rounds + 2):
        order = list(actors.items())  # none is always the first after another's caches
        for name, actor in order[round_number % 3 :] + order[: round_number % 3]:
            started = clock()
            old = actor.compute_log_probs(slices, "old_log_prob")
            actor.train_step(slices, old, None)
            actor.collect_evidence(round_number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_number >= 2:  # the first rounds warm up
                seconds[name].append(clock() - started)
    return dict(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, 1 thread",
        model=f"{model.num_layers} layers x {model.hidden_size}, top {model.topk} of "
        f"{model.num_experts} experts x {model.moe_intermediate_size}",
        layers=model.num_layers,
        topk=model.topk,
        experts=model.num_experts,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        seconds={name: spread(values) for name, values in seconds.items()},
        replay_over_native=ratios(seconds["replay"], seconds["native"]) | {"aim": 1.01},
        check_over_replay=ratios(seconds["replay and check"], seconds["replay"]) | {"aim": 1.05},
        check_over_native=ratios(seconds["replay and check"], seconds["native"]),
    )


def make_actor(checkpoint: Path, place, *, replay: bool, check: bool) -> MegatronActor:
    config = RunConfig(
        model=ModelSection(hf_checkpoint=checkpoint),
        data=DataSection(prompt_data="none"),
        rollout=RolloutSection(num_rollout=1000, rollout_batch_size=1, rollout_max_response_len=1),
        # with a learning rate of 0 the weights do not change: every round does the same work
        trainer=TrainerSection(lr=0.0),
        replay=ReplaySection(use_rollout_routing_replay=replay, enable_r3_correctness_check=check),
    )
    return MegatronActor(config, read_hf_facts(checkpoint), place, DEVICE)


def make_slices(
    actor: MegatronActor, model: TinyOptions, arguments: argparse.Namespace
) -> list[RankSlice]:
    """Two microbatches whose routes are the actor's own choice."""
    generator = np.random.default_rng(0)
    length = arguments.tokens // arguments.samples
    shape = RouteShape(model.num_layers, model.topk, model.num_experts)
    samples = []
    for i in range(arguments.samples):
        mask = np.arange(length) >= 8
        samples.append(
            TrainSample(
                RolloutSample(
                    sample_id=i,
                    group_id=i,
                    prompt=Prompt("p", i, "", np.zeros(0, np.int32), None),
                    token_ids=generator.integers(3, model.vocab_size, length).astype(np.int32),
                    prompt_len=8,
                    loss_mask=mask,
                    rollout_log_probs=np.where(mask, -6.0, 0).astype(np.float32),
                    routed_experts=np.zeros((length - 1, *shape.row), shape.dtype),
                    weight_versions=np.zeros(length, np.int32),
                    finish_reason="stop",
                ),
                reward=0.0,
                advantages=np.where(mask, generator.standard_normal(), 0).astype(np.float32),
            )
        )
    half = len(samples) // 2

    def cut(parts: list[TrainSample], i: int) -> RankSlice:
        microbatch = build_microbatch(i, parts, cp_size=1, tp_size=1, route_shape=shape)
        return slice_microbatch(microbatch, actor.topology)

    slices = [cut(samples[:half], 0), cut(samples[half:], 1)]
    maps: list[torch.Tensor] = []
    hooks = [
        m.register_forward_hook(lambda m, a, out: maps.append(out[1]))
        for chunk in actor.model.unwrapped
        for m in chunk.modules()
        if isinstance(m, TopKRouter)
    ]
    actor.compute_log_probs(slices, "old_log_prob")
    for hook in hooks:
        hook.remove()
    for i, s in enumerate(slices):
        for layer in range(model.num_layers):
            routing_map = maps[i * model.num_layers + layer]
            experts = routing_map.int().topk(model.topk, dim=1).indices
            s.routes[:, layer] = experts.cpu().numpy().astype(shape.dtype)
    return slices


if __name__ == "__main__":
    main()
