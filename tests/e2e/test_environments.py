"""Jobs of several turns: the calculator, with R3, as one sample an episode and one per turn."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby

import numpy as np
import pytest
from click.testing import CliRunner
from tests.e2e import jobs
from tests.e2e.tool_calculator import use_template

from r3train.cli import main
from r3train.data.tokenizer import load_tokenizer
from r3train.environments import Turn
from r3train.environments.calculator import Calculator
from r3train.loop.replay_source import load_rollout
from r3train.verify.tiny import TinyOptions, build
from r3train.types import RolloutSample

pytestmark = pytest.mark.e2e

STEPS = 3
LIMIT_S = 3


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calculator")
    build(directory, TinyOptions(task="calculator"), force=True)
    use_template(directory / "model")
    return directory


def turns(sample: RolloutSample) -> list[tuple[bool, list[int]]]:
    """The response in parts: (True where the model wrote them, tokens)."""
    response = zip(sample.loss_mask[sample.prompt_len :], sample.token_ids[sample.prompt_len :])
    runs = groupby(response, key=lambda pair: bool(pair[0]))
    return [(own, [int(token) for _, token in run]) for own, run in runs]


def as_the_template_writes_them(sample: RolloutSample, tokenizer) -> int:
    """Play the episode again from the model's tokens; returns how many turns end with <unk>."""
    eos, unk = tokenizer.convert_tokens_to_ids(["<eos>", "<unk>"])
    game, ended = Calculator(sample.prompt), 0
    assert tokenizer.decode(sample.token_ids[: sample.prompt_len].tolist()) == (
        f"please make <eos> {sample.prompt.text.split('<eos>')[1].strip()} <eos> to"
    )
    parts = turns(sample)
    for place, (own, tokens) in enumerate(parts):
        if not own:
            continue
        assert not {eos, unk} & set(tokens[:-1]), "nothing follows a token that ends a turn"
        ended += tokens[-1] == unk
        text = tokenizer.decode(tokens[:-1] if tokens[-1] in (eos, unk) else tokens)
        shown = asyncio.run(game.step(Turn(0, [], text, False))).observation
        if place + 1 < len(parts):
            reply = (
                f"count {shown} <eos> to" if tokens[-1] == eos else f"<eos> count {shown} <eos> to"
            )
            assert parts[place + 1] == (False, tokenizer.encode(reply))
    return ended


def flags_of(calculator, samples: str) -> list[str]:
    """Flags of a job that plays the calculator; its last rollout blocks."""
    return [
        "--hf-checkpoint",
        str(calculator / "model"),
        *f"--prompt-data {calculator / 'prompts.jsonl'} --no-rollout-shuffle".split(),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --no-plot".split(),
        *jobs.FEW_ROWS,
        "--no-tensorboard",
        "--num-rollout",
        str(STEPS + 1),
        *jobs.R3_FLAGS,
        *"--environment tests.e2e.tool_calculator:ToolCalculator --apply-chat-template".split(),
        *f"--environment-max-turns 3 --environment-timeout-s {LIMIT_S}".split(),
        *"--environment-max-turn-len 6 --rollout-max-response-len 40".split(),
        "--environment-samples",
        samples,
        *"--rollout-stop <unk>".split(),
        "--max-weight-staleness",
        "0",  # nothing of the rollout that hangs begins early
    ]


@pytest.mark.parametrize("samples", ["trajectory", "turn"])
def test_a_job_trains_on_turns_with_a_calculator_and_its_dump_replays_with_the_same_losses(
    samples, calculator, engine, tmp_path
):
    flags = flags_of(calculator, samples)
    job = jobs.run(
        tmp_path / "run",
        *flags,
        "--rollout-external-engine-addrs",
        engine,
        *f"--dump-rollouts --save {tmp_path / 'saved'}".split(),
    )
    assert job.code == 1, job.output
    said = " ".join(job.output.split())
    assert f"generation failed after {STEPS} rollouts; a checkpoint was saved: prompt" in said
    assert f"longer than --environment-timeout-s {LIMIT_S}: " in said
    assert "blocks the event loop" in said
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert any(m["rollout/reward_mean"] > 0 for m in metrics)
    assert all(m["r3/rows_native"] == m["r3/duplicate_rows"] == 0 for m in metrics)
    # the actor's log-probs of the model's own tokens are the engine's: nothing was tokenised anew
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    counts = [m["rollout/num_samples"] for m in metrics]
    if samples == "trajectory":
        assert counts == [16] * STEPS
        tokenizer, ended = load_tokenizer(calculator / "model"), 0
        for step, m in enumerate(metrics):
            groups = load_rollout(job.run_dir / "rollouts", step)
            dumped = [sample for group in groups for sample, _ in group]
            ended += sum(as_the_template_writes_them(sample, tokenizer) for sample in dumped)
            played = [sum(own for own, _ in turns(sample)) for sample in dumped]
            assert m["rollout/turns_mean"] == np.mean(played)
            assert m["rollout/response_len_mean"] == np.mean([s.loss_mask.sum() for s in dumped])
        assert ended > 0, "a wrong --rollout-stop would show"
    else:
        assert all(16 < count <= 48 for count in counts)
    replayed = jobs.run(
        tmp_path / "replayed",
        *flags,
        "--num-rollout",
        str(STEPS),
        "--replay-rollouts",
        str(job.run_dir / "rollouts"),
    )
    assert replayed.code == 0, replayed.output
    assert not (replayed.run_dir / "logs" / "sglang.log").exists()
    jobs.same_numbers(metrics, replayed.metrics())
    assert [m["rollout/num_samples"] for m in replayed.metrics()] == counts


@pytest.mark.slow
def test_a_turn_with_the_routes_of_earlier_positions_fails_the_check(calculator, engine, tmp_path):
    job = jobs.run(
        tmp_path / "run",
        *flags_of(calculator, "turn"),
        *"--num-rollout 1".split(),
        "--rollout-external-engine-addrs",
        engine,
        program=("-m", "tests.e2e.train_with_bug", "routes_of_earlier_positions"),
    )
    assert job.code != 0 and "R3 mismatch tokens" in job.output, job.output
    (metrics,) = job.metrics()
    assert metrics["r3/passed"] is False
    checked = CliRunner().invoke(main, ["check-evidence", str(job.run_dir), "--json"])
    (audit,) = json.loads(checked.stdout)["audits"]
    # fingerprints of the rows as they were decoded, the router's own choices, and the server's again
    failed = {claim for claim, of in audit["claims"].items() if of == "failed"}
    assert {"applied", "agreement", "recheck"} == failed, audit
    assert any("fingerprint" in str(finding) for finding in audit["findings"])
