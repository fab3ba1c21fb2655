"""The rollout's fingerprint is of the rows as decoded: a wrong stitch or cut is seen by *applied*."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import whole_samples
from tests.unit.hf_model import facts
from tests.fakes.server import ROUTES, SimulatedEngine, prompt_for, rollout_section

from r3train.config import RunConfig
from r3train.cpu.device import prepare_device
from r3train.engine.backend import SamplingParams
from r3train.environments.environment import StepResult
from r3train.generation import conversation, stitch
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.layout.microbatch import slice_microbatch
from r3train.loop.prepare import data_rank_of_samples, Preparation, record_samples
from r3train.loop.rollout_file import read_samples, write_samples
from r3train.proof.step_verdict import StepTotals, judge_step
from r3train.routing.fingerprint import kept_hashes, route_hashes, to_unsigned
from r3train.types import (
    RankSlice,
    RankTopology,
    RolloutSample,
    SAMPLING_MASK,
    SAMPLING_MASK_LAYER,
    TrainSample,
)

prepare_device()
from tests.oracle.planted import MUTATIONS  # noqa: E402

LAYERS = (1, 2)
HF = facts(
    num_hidden_layers=ROUTES.num_layers,
    num_experts=ROUTES.num_experts,
    num_experts_per_tok=ROUTES.topk,
    moe_layer_numbers=LAYERS,
)
CONFIG = RunConfig.from_toml(
    "configs/tiny_cpu.toml",
    {"use_rollout_routing_replay": True, "enable_r3_correctness_check": True},
)


class Drawing(SimulatedEngine):
    """Rows and sampling masks that are told apart."""

    rng = np.random.default_rng(0)

    async def generate(self, request):
        segment = await super().generate(request)
        draw = [self.rng.permutation(ROUTES.num_experts) for _ in range(segment.rows.size // 2)]
        rows = np.array([ids[:2] for ids in draw], ROUTES.dtype).reshape(segment.rows.shape)
        segment = replace(segment, rows=rows)
        if request.sampling.mask_vocab is None:
            return segment
        counts = self.rng.integers(1, 5, len(segment.token_ids)).astype(np.int32)
        ids = self.rng.integers(0, request.sampling.mask_vocab, counts.sum()).astype(np.int32)
        return replace(segment, mask_counts=counts, mask_ids=ids)


class Talkative:
    async def step(self, turn):
        return StepResult([5, 6], turn.is_last, 1.0)


def play(sample_a_turn: bool, sampling: SamplingParams = SamplingParams(50)) -> list[RolloutSample]:
    """Three turns of four tokens, each asked for in two requests."""

    async def generate(resume_from=None, turn_limit=None):
        engine, more = Drawing(length=lambda _: 100), {"sample_id": 40, "limit": turn_limit // 2}
        half = await whole_samples.generate(
            engine, prompt_for(0), sampling, resume_from=resume_from, **more
        )
        return await whole_samples.generate(
            engine, prompt_for(0), sampling, resume_from=half, **more
        )

    episode = conversation.Conversation(
        Talkative,
        rollout_section(
            environment_max_turns=3,
            environment_max_turn_len=4,
            environment_samples="turn" if sample_a_turn else "trajectory",
        ),
        EnvironmentLoop(),
        encode=list,
        decode=str,
    )
    samples, _ = asyncio.run(episode(generate, prompt_for(0), sampling=sampling, sample_id=40))
    return samples


def expected_and_dispatched(samples: list[RolloutSample]) -> tuple[dict, dict, int, int]:
    """Fingerprints a layer and whole rows of layer 1: by the evidence, and of the packed rows."""
    trained = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in samples]
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    ready = Preparation(CONFIG, HF, ROUTES, [place], ("train",)).prepare(0, trained)
    dispatched, rows = dict.fromkeys(LAYERS, 0), 0
    for microbatch in ready.microbatches[0]:
        uids = torch.from_numpy(microbatch.row_uids)
        routes = np.concatenate(microbatch.routes)
        for layer in LAYERS:
            experts = torch.from_numpy(routes[:, layer - 1].astype(np.int64))
            hashes = route_hashes(uids, experts, layer)
            dispatched[layer] += int(hashes[experts != ROUTES.missing].sum())
        rows += int((routes[:, 0] != ROUTES.missing).all(axis=1).sum())
    data_rank_of = data_rank_of_samples(ready.steps)
    expectation = ready.expectation(record_samples(samples, data_rank_of, 1, LAYERS))
    return (
        expectation.streams["routes"].fingerprints,
        {layer: to_unsigned(value) for layer, value in dispatched.items()},
        expectation.streams["routes"].rows_replayed[1],
        rows,
    )


@pytest.mark.parametrize("sample_a_turn", [False, True])
def test_what_was_decoded_is_what_is_trained(sample_a_turn, tmp_path):
    samples = play(sample_a_turn)
    assert len(samples) == (3 if sample_a_turn else 1)
    expected, dispatched, rows, rows_dispatched = expected_and_dispatched(samples)
    assert expected == dispatched and rows == rows_dispatched
    assert rows == sum(s.num_tokens - 1 for s in samples), "earlier turns' rows count again"
    # out of a checkpoint's buffer or a dumped rollout
    write_samples(tmp_path / "s", [(s, 0.0) for s in samples], {})
    again = [s for s, _ in read_samples(tmp_path / "s")[0]]
    assert expected_and_dispatched(again) == (expected, dispatched, rows, rows_dispatched)


KEPT = SamplingParams(50, top_k=20, mask_vocab=100)


def masks_expected_and_trained(samples: list[RolloutSample]) -> tuple[int, int, int, int]:
    """The fingerprint and the rows of sampling masks: by the evidence, and of the packed rows."""
    among_20 = {"rollout": CONFIG.rollout.model_copy(update={"rollout_top_k": 20})}
    layer = SAMPLING_MASK_LAYER
    trained = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in samples]
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    config = CONFIG.model_copy(update=among_20)
    ready = Preparation(config, HF, ROUTES, [place], ("train",)).prepare(0, trained)
    recorded = record_samples(samples, data_rank_of_samples(ready.steps), 1, LAYERS)
    expectation, trained, rows = ready.expectation(recorded), 0, 0
    for microbatch in ready.microbatches[0]:
        counts = torch.from_numpy(microbatch.mask_counts)
        uids = torch.from_numpy(microbatch.row_uids).repeat_interleave(counts)
        ids = torch.from_numpy(microbatch.mask_ids.astype(np.int64))
        trained += int(kept_hashes(uids, ids[:, None], layer).sum())
        rows += int((counts > 0).sum())
    return (
        expectation.streams[SAMPLING_MASK].fingerprints[layer],
        to_unsigned(trained),
        expectation.streams[SAMPLING_MASK].rows_replayed[layer],
        rows,
    )


@pytest.mark.parametrize("sample_a_turn", [False, True])
def test_sampling_mask_as_decoded_are_those_that_are_trained(sample_a_turn, tmp_path):
    samples = play(sample_a_turn, KEPT)
    expected, trained, rows, rows_trained = masks_expected_and_trained(samples)
    assert expected == trained and rows == rows_trained > 0
    for sample in samples:
        assert ((sample.mask_counts > 0) >= sample.loss_mask).all()
    write_samples(tmp_path / "s", [(s, 0.0) for s in samples], {})
    again = [s for s, _ in read_samples(tmp_path / "s")[0]]
    assert again[0].decoded_masks == ()
    assert masks_expected_and_trained(again) == (expected, trained, rows, rows_trained)


@pytest.mark.parametrize("sample_a_turn", [False, True])
def test_sampling_mask_joined_in_the_wrong_order_are_caught(sample_a_turn, monkeypatch):
    right = stitch.extend

    def backwards(sample, segment):
        done = right(sample, segment)
        return replace(done, mask_ids=done.mask_ids[::-1])

    monkeypatch.setattr(stitch, "extend", backwards)
    expected, trained, _, _ = masks_expected_and_trained(play(sample_a_turn, KEPT))
    assert expected != trained


def failures_of_sampling_mask(
    monkeypatch, samples: list[RolloutSample], plant: Callable[[RankSlice], RankSlice]
) -> set[str]:
    """Quantities that the judge finds wrong of sampling masks, by the recorder of the only rank."""
    from r3train.trainer.megatron import sampling_mask, replay_evidence

    monkeypatch.setattr(sampling_mask.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    group = "get_tensor_model_parallel_group"
    monkeypatch.setattr(replay_evidence.parallel_state, group, lambda: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    config = CONFIG.model_copy(
        update={"rollout": CONFIG.rollout.model_copy(update={"rollout_top_k": 20})}
    )
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    trained = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in samples]
    ready = Preparation(config, HF, ROUTES, [place], ("train",)).prepare(3, trained)
    recorder = replay_evidence.CallRecorder(rank=0, topk=ROUTES.topk, counts_tokens=True)
    recorder.begin_pass("train", 3, counts_controls=True)
    for microbatch in ready.microbatches[0]:
        share = plant(slice_microbatch(microbatch, place))
        kept = sampling_mask.SamplingMask.from_slice(
            share, np.arange(share.num_rows), torch.device("cpu")
        )
        logits = torch.randn(share.num_rows, 100)
        counters = [
            recorder.count_sampling_mask(part, logits[rows], part.left_of(logits[rows]))
            for rows in (slice(0, 3), slice(3, share.num_rows))
            for part in [kept.take(rows)]
        ]
        recorder.record_sampling_mask(kept, torch.stack(counters).sum(0), vp_stage=0)
    totals = StepTotals(ROUTES)
    for call in recorder.collect(3):
        totals.add(call)
    recorded = record_samples(samples, data_rank_of_samples(ready.steps), 1, LAYERS)
    verdict = judge_step(totals, ready.expectation(recorded), ROUTES, mismatch_threshold=1.0)
    return {f.what for f in verdict.failures if f.stream == SAMPLING_MASK}


def test_sampling_mask_whose_versions_were_lost_are_not_covered(monkeypatch):
    """The threshold is of tokens that the actor's own weights drew: without any it proves nothing."""
    samples = [
        replace(s, weight_versions=np.where(s.loss_mask, 3, -1).astype(np.int32))
        for s in play(False, KEPT)
    ]
    sound = failures_of_sampling_mask(monkeypatch, samples, lambda share: share)

    def unknown(share):
        return replace(share, mask_versions=np.full_like(share.mask_versions, -1))

    def older(share):
        return replace(share, mask_versions=share.mask_versions - 1)

    for plant in (unknown, older):
        failed = failures_of_sampling_mask(monkeypatch, samples, plant)
        assert failed - sound == {"rows_current"}


def of_a_later_row(cut: Callable) -> Callable:
    def wrong(sample, index, start, end, *more, **options):
        step = cut(sample, index, start, end, *more, **options)
        return replace(step, routed_experts=sample.routed_experts[-(end - 1) :])

    return wrong


def test_a_cut_from_later_rows_is_caught(monkeypatch):
    monkeypatch.setattr(conversation, "one_turn", of_a_later_row(conversation.one_turn))
    expected, dispatched, _, _ = expected_and_dispatched(play(sample_a_turn=True))
    assert all(expected[layer] != dispatched[layer] for layer in LAYERS)


def test_the_planted_cut_from_earlier_positions_is_caught():
    with MUTATIONS["routes_of_earlier_positions"].patch(CONFIG, HF):
        expected, dispatched, _, _ = expected_and_dispatched(play(sample_a_turn=True))
    assert all(expected[layer] != dispatched[layer] for layer in LAYERS)


@pytest.mark.parametrize("sample_a_turn", [False, True])
def test_a_wrong_merge_is_caught(sample_a_turn, monkeypatch):
    right = stitch.joined

    def one_row_early(like, parts, num_rows):
        return right(like, [(max(first - 1, 0), rows) for first, rows in parts], num_rows)

    monkeypatch.setattr(stitch, "joined", one_row_early)
    expected, dispatched, rows, rows_dispatched = expected_and_dispatched(play(sample_a_turn))
    assert all(expected[layer] != dispatched[layer] for layer in LAYERS)


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_rows_of_the_actors_own_version_end_with_its_first_optimizer_step(optimizer_steps):
    """After it the actor holds weights that no server held; the reference holds others all along."""
    samples = [TrainSample(s, 1.0, np.zeros(s.num_tokens, np.float32)) for s in play(True)[:2]]
    versions = [np.full(s.sample.num_tokens, v, np.int32) for s, v in zip(samples, (3, 2))]
    samples = [
        replace(s, sample=replace(s.sample, weight_versions=v)) for s, v in zip(samples, versions)
    ]
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 1}
    config = CONFIG.model_copy(
        update={
            "rollout": CONFIG.rollout.model_copy(update=rollout),
            "trainer": CONFIG.trainer.model_copy(
                update={"global_batch_size": 2 // optimizer_steps}
            ),
        }
    )
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    passes = ("old_log_prob", "ref_log_prob", "train")

    def current(rollout_id: int) -> dict[str, int]:
        prepared = Preparation(config, HF, ROUTES, [place], passes).prepare(rollout_id, samples)
        recorded = record_samples([s.sample for s in samples], {}, 1, LAYERS)
        return prepared.expectation(recorded).streams["routes"].rows_current

    first, second = (s.sample.num_tokens - 1 for s in samples)
    assert current(3) == {"old_log_prob": first, "ref_log_prob": 0, "train": first}
    assert current(2) == {
        "old_log_prob": second,
        "ref_log_prob": 0,
        "train": second if optimizer_steps == 1 else 0,
    }


@pytest.mark.parametrize("mode, fresh", [("drain", True), ("abort", True), ("in_place", False)])
def test_rows_of_a_prompt_that_may_be_cached_from_before_an_update_are_of_no_known_version(
    mode, fresh
):
    rollout = CONFIG.rollout.model_copy(update={"pause_generation_mode": mode})
    assert rollout.fresh_prefixes == fresh
    kept = rollout.model_copy(update={"flush_cache_on_update": False})
    assert not kept.fresh_prefixes
    (sample, *_) = play(True)
    config = CONFIG.model_copy(
        update={
            "rollout": rollout.model_copy(
                update={"rollout_batch_size": 1, "n_samples_per_prompt": 1}
            )
        }
    )
    samples = [TrainSample(sample, 1.0, np.zeros(sample.num_tokens, np.float32))]
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    prepared = Preparation(config, HF, ROUTES, [place], ("train",)).prepare(0, samples)
    ((batch,),) = prepared.microbatches
    known = batch.row_versions[: sample.prompt_len - 1] >= 0
    assert known.all() == fresh and known.any() == fresh
