"""Rows without loss go through no output layer: all that comes of a step is what it is with all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.types import RankSlice, TrainSample
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle import actors
from tests.oracle.actors import actor_of, configuration, in_ranks, samples
from tests.oracle.test_families import STAND_INS, TE, TOPOLOGIES, make
from tests.oracle.test_sampling_mask import with_sampling_mask

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

PASSES = ("old_log_prob", "ref_log_prob", "train")
MOE, DENSE, TIED = "qwen3_moe", "qwen3", "tied"
# of other ends of a layer: latent attention, sinks, Mamba, delta nets
MODELS = [DENSE, TIED, MOE, "kimi_k2", "gpt_oss", "nemotron_h", "qwen3_next"]
# ranks that split the vocabulary and not the rows: Megatron takes them for dense models alone
TP2_WHOLE = "TP2 of whole sequences"
WORLDS = {name: TOPOLOGIES[name] for name in ("1", "TP2", TP2_WHOLE, "EP2", "CP2", "PP2", TE)}
LORA = dict(lora_rank=4, lora_alpha=8.0)


def with_loss_on(s: TrainSample, mask: np.ndarray) -> TrainSample:
    """The sample with these of its trained tokens alone in the loss; the others stay as they were drawn."""
    mask = mask & s.sample.loss_mask
    return replace(
        s,
        sample=replace(s.sample, loss_mask=mask),
        advantages=np.where(mask, s.advantages, 0).astype(np.float32),
    )


def prompts_and_answers(hf: HfModelFacts) -> list[TrainSample]:
    return samples(hf, [(9, 5), (5, 14), (2, 6), (12, 3)])


def turns(hf: HfModelFacts) -> list[TrainSample]:
    """Answers between words of an environment; one sample has no loss at all."""
    out = []
    for i, s in enumerate(samples(hf, [(3, 19), (5, 16), (4, 8), (2, 20)])):
        place = np.arange(s.sample.num_tokens)
        out.append(with_loss_on(s, (place // 3 % 2 == 0) & (i != 2)))
    return out


def one_row(hf: HfModelFacts) -> list[TrainSample]:
    """One sample with one row of loss: other data-parallel and context-parallel ranks have none."""
    return samples(hf, [(22, 1)])


def sampled(hf: HfModelFacts) -> list[TrainSample]:
    """Every token of an answer has a sampling mask, and every second one is in the loss."""
    drawn = with_sampling_mask(hf, samples(hf, [(9, 5), (5, 14), (2, 6)]))
    return [with_loss_on(s, np.arange(s.sample.num_tokens) % 2 == 0) for s in drawn]


SAMPLED = dict(rollout_top_k=6, rollout_temperature=0.7)
Case = tuple[str, Callable[[HfModelFacts], list[TrainSample]], dict[str, Any]]


def cases(topology: str) -> dict[str, Case]:
    """Model, samples and settings by name."""
    if topology == TP2_WHOLE:
        return {"dense": (DENSE, turns, {})}
    found: dict[str, Case] = {
        "prompts and answers": (MOE, prompts_and_answers, {}),
        "turns": (MOE, turns, {}),
        "one row": (MOE, one_row, {}),
        "sampling masks": (MOE, sampled, SAMPLED),
        "bf16": (MOE, turns, dict(bf16=True)),
        "lora": (MOE, turns, LORA),
    }
    if topology == TE:
        found |= {model: (model, turns, {}) for model in MODELS if model != MOE}
    return found


def settings(checkpoint: Path, parallel: dict[str, Any], fields: dict[str, Any]) -> Any:
    is_dense = not read_hf_facts(checkpoint).is_moe
    return configuration(
        checkpoint,
        rollout_batch_size=1,
        n_samples_per_prompt=4,
        max_tokens_per_gpu=24,
        use_rollout_routing_replay=not is_dense,
        enable_r3_correctness_check=not is_dense,
        r3_mismatch_threshold=1.0,
        entropy_coef=0.01,
        kl_loss_coef=0.1,
        log_probs_chunk_size=7,
        optimizer="sgd",
        clip_grad=1e9,
        **{**parallel, **fields},
    )


def step(config: Any, hf: HfModelFacts, batch: Sequence[TrainSample]) -> dict[str, Any]:
    """The passes of a rollout with one optimizer step, as production makes them: all that comes of them."""
    from r3train.launch.start.build_actor import build_routes
    from r3train.loop.distribute import broadcast_json, gather_topologies
    from r3train.loop.prepare import Preparation
    from r3train.trainer.megatron import lora
    from r3train.trainer.megatron.export import export_hf_weights

    with actor_of(config) as actor:
        topologies, prepared = gather_topologies(actor.topology), None
        routes = build_routes(config, hf)
        routes.open(actor.topology)
        if actor.topology.rank == 0:
            given = (config, hf, routes.row_shape, topologies, PASSES)
            prepared = Preparation(*given).prepare(0, batch)
        slices = routes.slices(prepared, broadcast_json(prepared and prepared.counts[0]))
        old, ref = (
            actor.compute_log_probs(slices, name, weight_version=version, loss_rows_only=True)
            for name, version in (("old_log_prob", 0), ("ref_log_prob", None))
        )
        metrics = actor.train_step(slices, old, ref, weight_version=0)
        if config.lora.enabled:
            gradients = lora.export_adapters(actor.model.chunks, lambda p: p.main_grad)
        else:
            gradients = export_hf_weights(
                actor.model.weights,
                actor.model.chunks,
                # buffers and an indexer's parameters have none
                lambda p: getattr(p, "main_grad", torch.zeros_like(p)),
            )
        return dict(
            log_probs={
                s.microbatch_id: (old[s.microbatch_id], ref[s.microbatch_id]) for s in slices if old
            },
            needed={s.microbatch_id: torch.from_numpy(needed(s)) for s in slices},
            metrics=metrics,
            gradients={name: g.detach().clone() for name, g in gradients},
            evidence=[asdict(record) for record in actor.collect_evidence(0)],
        )


def needed(s: RankSlice) -> np.ndarray:
    """True for rows in the loss or with a sampling mask, bool[n]."""
    return s.loss_mask if s.mask_counts is None else s.loss_mask | (s.mask_counts > 0)


def both(directory: Path, topology: str, names: Sequence[str], bug: str | None) -> dict[str, Any]:
    """Of each case a step with the rows of loss, and one with all rows by Megatron's own end of a model; in a rank."""
    from r3train.trainer.megatron import forward_step
    from tests.oracle.planted import MUTATIONS, patched

    found = {}
    for name in names:
        model, batch, fields = cases(topology)[name]
        config = settings(directory / model, WORLDS[topology][1], fields)
        hf = read_hf_facts(directory / model)
        with MUTATIONS[bug or "null"].planted(config, hf):
            loss_rows = step(config, hf, batch(hf))
        with ExitStack() as megatrons:
            every = patched(forward_step, "loss_rows", lambda _, s: np.arange(s.num_rows))
            megatrons.enter_context(every)
            own = mock.patch.object(forward_step, "logits_of_rows", None)
            megatrons.enter_context(own)
            found[name] = loss_rows, step(config, hf, batch(hf))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in MODELS:
        if name == TIED:
            write_checkpoint(VARIANTS[TIED], directory / name)
        else:
            make(directory / name, name)
    return directory


def largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def differences(ranks: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """The largest difference of a log-prob, of a gradient as a part of its norm, and of a metric.

    Rows that need no log-prob have one with all rows alone.
    """
    log_probs = []
    for few, every in (rank[name] for rank in ranks):
        assert few["log_probs"].keys() == every["log_probs"].keys()
        for i, passes in few["log_probs"].items():
            rows = few["needed"][i]
            left_out = (
                ~rows if rows.any() else torch.arange(len(rows)) > 0
            )  # of none the first is taken
            for one, other in zip(passes, every["log_probs"][i]):
                log_probs.append(largest((one - other)[rows]))
                assert not one[left_out].any() and other[left_out].all(), name
    few, every = ranks[0][name]
    norms = {tensor: float(g.norm()) for tensor, g in every["gradients"].items()}
    floor = 1e-3 * max(norms.values())
    gradients = [
        float((few["gradients"][tensor] - g).norm()) / max(norms[tensor], floor)
        for tensor, g in every["gradients"].items()
    ]
    metrics = [
        abs(few["metrics"][key] - value) / max(abs(value), 1e-3)
        for key, value in every["metrics"].items()
    ]
    return dict(log_probs=max(log_probs), gradients=max(gradients), metrics=max(metrics))


@pytest.fixture
def stepped(models, tmp_path, monkeypatch) -> Callable[..., list[dict[str, Any]]]:
    def run(topology: str, names: Sequence[str], bug: str | None = None) -> list[dict[str, Any]]:
        if topology == TE:
            monkeypatch.setattr(actors, "SEARCHED", [str(STAND_INS)])
        return in_ranks(WORLDS[topology][0], tmp_path, both, models, topology, names, bug)

    return run


@pytest.mark.parametrize("topology", WORLDS)
def test_a_step_with_the_rows_of_loss_is_the_step_with_all_rows(topology, stepped, models):
    """Evidence and counts are equal; of floats a product of fewer rows may round otherwise, and sums have fewer terms."""
    names = list(cases(topology))
    ranks = stepped(topology, names)
    for name in names:
        for few, every in (rank[name] for rank in ranks):
            assert few["evidence"] == every["evidence"], name
            for key in ("num_loss_tokens", "skipped_steps", "low_ess_steps"):
                assert few["metrics"][key] == every["metrics"][key], (name, key)
        if name not in ("dense", DENSE):  # which has no routes
            assert any(rank[name][0]["evidence"] for rank in ranks), name
        off = differences(ranks, name)
        assert off["log_probs"] < 2e-6, (name, off)
        assert max(off["gradients"], off["metrics"]) < 1e-5, (name, off)


@pytest.mark.parametrize(
    "topology, bug", [("EP2", "rows_shifted_by_one"), ("TP2", "rows_of_another_rank")]
)
def test_a_planted_bug_shows_in_log_probs_and_gradients_and_not_in_the_evidence(
    topology, bug, stepped
):
    ranks = stepped(topology, ["turns"], bug)
    off = differences(ranks, "turns")
    assert off["log_probs"] > 0.1 and off["gradients"] > 0.1, off
    assert all(few["evidence"] == every["evidence"] for few, every in (r["turns"] for r in ranks))
