"""Cost of replay and its check in a train step: each over a step without replay, and check over replay.

Further arms are replay a second time, which shows what equal actors differ by; AdamW in several passes over
the memory, also with every product as torch makes it; and a step that skips the old-log-prob pass
(--reuse-log-probs).

All actors hold the same weights and take turns in one process, so that whatever else the machine
does falls on all alike; each ratio is of neighbours.  The routes that are replayed are the experts the
model chooses itself, so that all do the same work.

    python -m benchmarks.replay_overhead [--rounds 15] [--tokens 1024] [--topk 8]
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from r3train.cpu.device import prepare_device

warnings.filterwarnings("ignore")
DEVICE = prepare_device()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.measure import (  # noqa: E402
    flags,
    in_turns,
    own_clock,
    ratios,
    spreads,
    write_result,
)
from benchmarks.samples import sample_of_routes  # noqa: E402
from benchmarks.tiny_jobs import describe, tiny_model  # noqa: E402
from r3train.config import RunConfig  # noqa: E402
from r3train.config.data_settings import DataSection  # noqa: E402
from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.config.lora_settings import LoraSection  # noqa: E402
from r3train.config.model_settings import ModelSection  # noqa: E402
from r3train.config.parallel_settings import ParallelSection  # noqa: E402
from r3train.config.replay_settings import ReplaySection  # noqa: E402
from r3train.config.rollout_settings import RolloutSection  # noqa: E402
from r3train.config.trainer_settings import TrainerSection  # noqa: E402
from r3train.cpu import products as cpu_products  # noqa: E402
from r3train.engine.server import free_port  # noqa: E402
from r3train.layout.microbatch import (  # noqa: E402
    build_microbatch,
    slice_microbatch,
    Streams,
)
from r3train.verify.tiny import TinyOptions  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.replay import decoder_routers  # noqa: E402
from r3train.trainer.megatron.topology import (  # noqa: E402
    init_distributed,
    init_model_parallel,
    shutdown,
)
from r3train.types import RankSlice, RankTopology, RouteShape  # noqa: E402

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
PROMPT_LEN = 8


def main() -> None:
    arguments = flags(
        __doc__,
        rounds=15,
        tokens=1024,
        samples=8,
        layers=MODEL.num_layers,
        topk=MODEL.topk,
        experts=MODEL.num_experts,
    )
    model = replace(
        MODEL,
        num_layers=arguments.layers,
        topk=arguments.topk,
        num_experts=arguments.experts,
    )
    with tiny_model(model) as tiny, one_rank() as place:
        write_result(arguments.output, measure(tiny / "model", model, place, arguments))


@contextmanager
def one_rank() -> Iterator[RankTopology]:
    """This process as the only rank of a job, with one thread."""
    torch.set_num_threads(1)
    port = str(free_port("127.0.0.1"))
    os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    init_distributed("auto", 10)
    yield init_model_parallel(ParallelSection(), 1)
    shutdown()


def measure(
    checkpoint: Path, model: TinyOptions, place: RankTopology, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of a step (old-log-prob pass and train step) of each actor, and their ratios."""
    actors = {
        "native": make_actor(checkpoint, place),
        "replay and check": make_actor(checkpoint, place, replay=True, check=True),
        "again": make_actor(checkpoint, place, replay=True),
        "replay": make_actor(checkpoint, place, replay=True),
        "replay and drift": make_actor(checkpoint, place, replay=True, drift=True),
        "several passes": make_actor(checkpoint, place, replay=True),
    }
    for part in actors["several passes"].optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = False
    slices = make_slices(actors["native"], model, arguments.samples, arguments.tokens)

    def step_of(actor: MegatronActor, *, reuse: bool = False) -> Callable[[], None]:
        def step() -> None:
            old = None
            if not reuse:
                old = actor.compute_log_probs(slices, "old_log_prob", weight_version=0)
            actor.train_step(slices, old, None, weight_version=0)
            actor.collect_evidence(0)
            actor.collect_drift()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return step

    arms = {name: step_of(actor) for name, actor in actors.items()}
    arms["old pass skipped"] = step_of(actors["again"], reuse=True)

    def as_torch_does() -> None:
        with patch.object(cpu_products, "gains", lambda: False):
            arms["several passes"]()

    arms["products as torch makes them, several passes"] = as_torch_does
    seconds = in_turns(arms, arguments.rounds, warm_up=2, clock=own_clock())
    native, check, again = (seconds[name] for name in ("native", "replay and check", "again"))
    replay = seconds["replay"]
    several, skipped = seconds["several passes"], seconds["old pass skipped"]
    torchs = seconds["products as torch makes them, several passes"]
    return dict(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, 1 thread",
        model=f"{describe(model)} experts x {model.moe_intermediate_size}",
        layers=model.num_layers,
        topk=model.topk,
        experts=model.num_experts,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        seconds=spreads(seconds),
        check_over_native=ratios(check, native),
        replay_over_native=ratios(replay, native) | {"aim": 1.01},
        check_over_replay=ratios(check, replay) | {"aim": 1.05},
        drift_over_replay=ratios(seconds["replay and drift"], replay),
        again_over_replay=ratios(again, replay),
        several_over_replay=ratios(several, replay),
        skipped_over_replay=ratios(skipped, replay) | {"aim": 0.8},
        several_over_skipped=ratios(several, skipped),
        torchs_over_several=ratios(torchs, several),
        torchs_over_skipped=ratios(torchs, skipped) | {"aim": 1.74},
    )


def make_actor(
    checkpoint: Path,
    place: RankTopology,
    *,
    replay: bool = False,
    check: bool = False,
    drift: bool = False,
    lora: LoraSection = LoraSection(),
) -> MegatronActor:
    config = RunConfig(
        # on CUDA as recipes are: Transformer Engine has its fast attention in bfloat16 alone
        model=ModelSection(hf_checkpoint=checkpoint, bf16=DEVICE.type == "cuda"),
        lora=lora,
        data=DataSection(prompt_data="none"),
        rollout=RolloutSection(num_rollout=1000, rollout_batch_size=1, rollout_max_response_len=1),
        # with a learning rate of 0 the weights do not change: every round does the same work
        trainer=TrainerSection(lr=0.0),
        replay=ReplaySection(
            use_rollout_routing_replay=replay,
            enable_r3_correctness_check=check,
            log_route_drift=drift,
        ),
    )
    return MegatronActor(config, read_hf_facts(checkpoint), place, DEVICE)


def make_slices(
    actor: MegatronActor, model: TinyOptions, num_samples: int, num_tokens: int
) -> list[RankSlice]:
    """Two microbatches whose routes are the actor's own choice."""
    shape = RouteShape(model.num_layers, model.topk, model.num_experts)
    routes = np.zeros((num_tokens // num_samples - 1, *shape.row), shape.dtype)
    samples = [
        sample_of_routes(i, routes, prompt_len=PROMPT_LEN, vocab_size=model.vocab_size)
        for i in range(num_samples)
    ]
    half = num_samples // 2
    slices = [
        slice_microbatch(
            build_microbatch(i, part, Streams(shape), cp_size=1, tp_size=1), actor.topology
        )
        for i, part in enumerate((samples[:half], samples[half:]))
    ]
    maps: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda m, a, out: maps.append(out[1]))
        for chunk in actor.model.unwrapped
        for router in decoder_routers(chunk)
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
