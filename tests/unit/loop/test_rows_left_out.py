"""A server that computes a row and reports it as missing (-1) fails *covered*, live and offline.

The trainer's own choice fills such a row as it fills that of a last token, so every other count is right.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from datetime import timedelta

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
from tests import whole_samples
from tests.unit.hf_model import facts
from tests.fakes.server import (
    PROMPT_LEN,
    prompt_for,
    rollout_section,
    ROUTES,
    SimulatedEngine,
)

from r3train.config import RunConfig
from r3train.engine.backend import SamplingParams
from r3train.environments.environment import StepResult
from r3train.generation import conversation
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop.prepare import data_rank_of_samples, Preparation, record_samples
from r3train.audit.audit_run import audit_run
from r3train.audit.check_evidence import claim_facts
from r3train.proof.live import LiveProof
from r3train.proof.writer import EvidenceWriter
from r3train.types import RankTopology, ReplayEvidence, TrainSample

LAYERS = (1, 2)
PASSES = ("old_log_prob", "train")
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


class Hiding(SimulatedEngine):
    """Rows of experts 0 and 1; in the answer number ``at`` a slot, a row or all rows are missing."""

    def __init__(self, hidden: tuple = (), at: int = -1):
        super().__init__(length=lambda _: 100)
        self.hidden, self.at = hidden, at

    async def generate(self, request):
        number = self.answered
        segment = await super().generate(request)
        rows = np.zeros_like(segment.rows) + np.array([0, 1], ROUTES.dtype)
        if number == self.at:
            rows[self.hidden] = ROUTES.missing
        return replace(segment, rows=rows)


class Talkative:
    """Two tokens after each turn, also after one that no turn follows."""

    async def step(self, turn):
        return StepResult([5, 6], False, 1.0)


def play(engine: SimulatedEngine, samples: str = "trajectory", aborted: bool = False) -> list:
    """Three turns of four tokens; aborted: before the last turn has a token."""
    turns = []

    async def generate(resume_from=None, turn_limit=None):
        turns.append(None)
        if aborted and len(turns) == 3:
            return replace(resume_from, finish_reason="abort")
        more = {"sample_id": 40, "resume_from": resume_from, "limit": turn_limit}
        return await whole_samples.generate(engine, prompt_for(0), SamplingParams(50), **more)

    episode = conversation.Conversation(
        Talkative,
        rollout_section(
            environment_max_turns=3, environment_max_turn_len=4, environment_samples=samples
        ),
        EnvironmentLoop(),
        encode=list,
        decode=str,
    )
    sampling = SamplingParams(50)
    return asyncio.run(episode(generate, prompt_for(0), sampling=sampling, sample_id=40))[0]


@pytest.fixture
def one_rank(caplog):
    caplog.set_level(logging.CRITICAL)
    join_ranks("gloo", dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def proved(run_dir, samples: list):
    """The verdicts of a job and of its audit, if the trainer does all that the rollout asks for."""
    trained = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in samples]
    place = RankTopology(moe_layer_numbers=(LAYERS,))
    ready = Preparation(CONFIG, HF, ROUTES, [place], PASSES).prepare(0, trained)
    data_ranks = data_rank_of_samples(ready.steps)
    expected = ready.expectation(record_samples(samples, data_ranks, 1, LAYERS))
    calls = [
        call_of(expected, replay_pass, layer, sum(ready.counts))
        for replay_pass in PASSES
        for layer in LAYERS
    ]
    writer = EvidenceWriter(run_dir, 0)
    verdict = LiveProof(writer, HF.route_shape, PASSES, 0.02).prove_step(calls, expected)
    writer.close()
    return verdict, audit_run(run_dir)


def call_of(expected, replay_pass: str, layer: int, num_calls: int) -> ReplayEvidence:
    """The record of a trainer that replayed each recorded row and filled every other."""
    rows, filled = (
        expected.streams["routes"].rows_replayed[layer],
        expected.streams["routes"].rows_filled[layer],
    )
    zeros = [
        name
        for name in ReplayEvidence.__dataclass_fields__
        if name.startswith(("rows_", "control_"))
    ]
    return ReplayEvidence(
        **dict.fromkeys(zeros, 0)
        | dict(
            step=0,
            rank=0,
            replay_pass=replay_pass,
            stream="routes",
            stage="replay_forward",
            vp_stage=0,
            microbatch_id=0,
            layer_number=layer,
            num_rows=rows + filled,
            rows_replayed=rows,
            rows_filled=filled,
            duplicate_rows=0,
            topk=2,
            replay_idx_sum=rows + filled,
            map_sum=2 * (rows + filled),
            fingerprint=expected.streams["routes"].fingerprints[layer],
            rows_equal=rows,
            rows_current=expected.streams["routes"].rows_current[replay_pass],
            rows_current_equal=min(rows, expected.streams["routes"].rows_current[replay_pass]),
            num_calls=num_calls,
        )
    )


@pytest.mark.parametrize("samples", ["trajectory", "turn"])
@pytest.mark.parametrize("aborted", [False, True])
def test_rows_that_no_server_computed_are_filled_and_pass(one_rank, tmp_path, samples, aborted):
    """The last token's only, and after an abort those of an environment's tokens without an answer."""
    played = play(Hiding(), samples, aborted)
    verdict, audit = proved(tmp_path, played)
    assert verdict.passed, verdict.failures
    assert audit.claims["covered"] == "passed", audit.findings
    lost = len(played) + 2 * aborted
    assert verdict.counts["rows_filled"] == lost * len(PASSES) * len(LAYERS)


@pytest.mark.parametrize("at", [0, 1, 2], ids="turn {}".format)
@pytest.mark.parametrize(
    "hidden, rows, layers",
    [((slice(None),), 4, LAYERS), ((-1,), 1, LAYERS), ((0, 1, 1), 1, (2,))],
    ids=["every row", "the last row", "a slot"],
)
def test_a_row_that_a_server_computed_and_left_out_fails(
    one_rank, tmp_path, hidden, rows, layers, at
):
    verdict, audit = proved(tmp_path, play(Hiding(hidden, at)))
    assert {f.what for f in verdict.failures} == {"rows_left_out"}
    assert {(f.replay_pass, f.layer_number) for f in verdict.failures} == {
        (replay_pass, layer) for replay_pass in PASSES for layer in layers
    }
    brought = {0: 5, 1: 6, 2: 6}[at] if rows == 4 else rows
    assert {(f.got, f.expected) for f in verdict.failures} == {(brought, 0)}
    assert audit.verdict == "failed" and audit.claims["covered"] == "failed"
    assert audit.claims["applied"] != "failed"
    found = audit.findings[0]
    assert found.what == "rows_left_out"


def spoiled(expected, **counts):
    """The expectation of a rollout whose classes are counted otherwise."""
    by_class = {**expected.rows_by_class, **counts}
    return msgspec.structs.replace(expected, rows_by_class=by_class)


@pytest.mark.parametrize(
    "counts, what",
    [
        ({"decoded": {0: 8}}, {"rows_of_classes"}),
        ({"cached": {-1: 1}}, {"rows_of_classes"}),
        ({"filled": {-1: 2}}, {"rows_of_class_filled"}),
    ],
)
def test_classes_that_do_not_add_up_to_the_rows_that_were_replayed_fail(
    one_rank, tmp_path, monkeypatch, counts, what
):
    played = play(Hiding())
    verdict, audit = proved(tmp_path / "right", played)
    assert verdict.passed and audit.verdict == "passed"
    shown = claim_facts(audit)["covered"]
    rows = f"9 decoded, {PROMPT_LEN + 6} prefilled, 1 filled"
    assert shown.endswith(f"; rows of the rollouts: {rows}")
    # three turns: the prompt, two times an answer's last token with the environment's two, and answers but their last
    line = json.loads((tmp_path / "right" / "evidence" / "steps.jsonl").read_text())
    assert line["rows_by_class"] == {
        "decoded": {"0": 9},
        "prefilled": {"0": PROMPT_LEN + 6},
        "prefilled_again": {},
        "cached": {},
        "filled": {"-1": 1},
    }
    real = LiveProof.prove_step

    def lying(proof, calls, expected):
        return real(proof, calls, spoiled(expected, **counts))

    monkeypatch.setattr(LiveProof, "prove_step", lying)
    verdict, audit = proved(tmp_path / "wrong", played)
    assert {f.what for f in verdict.failures} == what
    assert audit.verdict == "failed" and audit.claims["covered"] == "failed"
    # and where only the file was changed
    path = tmp_path / "right" / "evidence" / "steps.jsonl"
    line["rows_by_class"].update(
        {k: {str(v): n for v, n in of.items()} for k, of in counts.items()}
    )
    path.write_text(json.dumps(line) + "\n")
    audit = audit_run(tmp_path / "right")
    assert {f.what for f in audit.findings} == what and audit.claims["covered"] == "failed"
