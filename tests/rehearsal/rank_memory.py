"""Peak bytes of a recipe's ranks over one training step at real size, counted of tensors without content.

    PYTHONPATH=tests/rehearsal/stand_ins python -m tests.rehearsal.rank_memory REPORT RECIPE:RANK[,RANK...][?JSON] ...

Model, forward step, loss, Megatron's schedule and the step of the optimizer are production's, on the meta device;
JSON are settings of the configuration.  Other stages send nothing: what comes from them is a new tensor.  Kernels
are those of ``meta_kernels``.  Every stage gets one microbatch more than there are stages, of interleaved chunks twice
as many as stages, all of them full.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.rehearsal.meta_kernels import Dispatcher, Kernel, install  # first: it adapts Megatron
from tests.rehearsal.loss_memory import slice_of
from tests.rehearsal.real_size import META, Places, built_rank, step

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import layers, mappings

from r3train.algo.losses.policy_losses import configured_loss
from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.trainer.megatron.forward_step import make_train_step, TrainingRule
from tests.published import RECIPES, Recipe, shapes_of, write_config


class Done:
    """A message that is there."""

    def wait(self) -> None: ...


def communicate(shape: tuple[int, ...]) -> Any:
    """Megatron's exchange between stages, with tensors of this shape."""

    def received(self: Any, *, recv_prev: bool, recv_next: bool, wait_on_reqs: bool = True, **sent):
        found = [
            (
                torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True)
                if on
                else None
            )
            for on in (recv_prev, recv_next)
        ]
        there = {"recv_prev": recv_prev, "recv_next": recv_next} | {
            name.replace("tensor_", ""): tensor is not None for name, tensor in sent.items()
        }
        return *found, None if wait_on_reqs else {name: Done() for name in there if there[name]}

    return received


def prepare(built: Any, config: RunConfig, num_experts: int) -> None:
    """Replace what no tensor without content goes through: the embedding, positions, and the way to the experts."""
    p, rows = config.parallel, config.trainer.max_tokens_per_gpu
    width = built.config.hidden_size
    shape = rows // p.tensor_model_parallel_size, 1, width

    def embedded(weight: torch.Tensor) -> torch.Tensor:
        return Kernel.apply(shape, torch.bfloat16, (), ((rows, width),), weight)

    P2PCommunicator._communicate = communicate(shape)
    for model in built.unwrapped:
        if model.pre_process:
            words = model.embedding.word_embeddings
            model.embedding.forward = lambda *_, of=words, **__: embedded(of.weight)
        if hasattr(model, "rotary_pos_emb"):
            pair = (None, None) if model.position_embedding_type == "yarn" else None
            model.rotary_pos_emb.forward = lambda *_, pair=pair, **__: pair
        for layer in model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                local = num_experts // p.expert_model_parallel_size
                layer.mlp.token_dispatcher = Dispatcher(built.config, local)


def train(built: Any, config: RunConfig) -> None:
    """Run the schedule, as the actor does."""
    pp = config.parallel.pipeline_model_parallel_size
    # the schedule of chunks takes whole rounds of the stages
    number = 2 * pp if config.parallel.virtual_pipeline_model_parallel_size else pp + 1
    with torch.device(META):
        batch = slice_of(config.trainer.max_tokens_per_gpu)
    production = make_train_step(
        dict.fromkeys(range(number), batch),
        None,
        TrainingRule(
            configured_loss(config.algorithm),
            config.algorithm,
            config.rollout.rollout_temperature,
            config.trainer.log_probs_chunk_size,
        ),
        None,
        None,
        None,
    )

    def step(iterator: Any, model: torch.nn.Module) -> Any:
        out, finish = production(iterator, model)

        def finished(logits: torch.Tensor) -> tuple:
            loss, _, report = finish(logits)
            return loss, torch.tensor(0), report

        return out, finished

    chunks = built.chunks
    iterators = [iter(range(number)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=number,
        seq_length=config.trainer.max_tokens_per_gpu,
        micro_batch_size=1,
        forward_only=False,
    )


def measure(recipe: Recipe, ranks: list[int], settings: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes that each rank holds between steps, and those that passes and the optimizer's step take next to."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / recipe.model
        write_config(directory, recipe.model)
        shapes, hf = shapes_of(directory), read_hf_facts(directory)
        alone = {"overlap_param_gather": False, "overlap_grad_reduce": False}
        given = {"hf_checkpoint": str(directory), "attention_backend": "te", **alone, **settings}
        config, found = RunConfig.from_toml(recipe.path, given), []
        for rank in ranks:
            with Places() as places, built_rank(recipe, rank, config, hf, shapes) as (built, of):
                held, own = places.live, step(config, built.chunks, places)
                prepare(built, config, hf.num_experts)
                before = places.peak = places.live
                train(built, config)
                passes = places.peak - before
            found.append(
                {
                    "rank": rank,
                    "stage": of["stage"],
                    "held": held + own["optimizer"],
                    "passes": passes,
                    "step": own["step"],
                }
            )
    return found


dist.all_reduce = lambda *_, **__: Done()
for module in (layers, mappings):
    module.dist_all_gather_func = module.dist_reduce_scatter_func = lambda *_, **__: Done()

if __name__ == "__main__":
    install()
    report = {}
    for word in sys.argv[2:]:
        place, _, settings = word.partition("?")
        file, _, ranks = place.partition(":")
        (recipe,) = (r for r in RECIPES if r.file == file)
        report[word] = measure(
            recipe, list(map(int, ranks.split(","))), json.loads(settings or "{}")
        )
    Path(sys.argv[1]).write_text(json.dumps(report))
