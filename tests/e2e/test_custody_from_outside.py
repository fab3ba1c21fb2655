"""Custody, held from outside: what the server said and what a disorderly harness got, against what was trained.

A proxy writes down each answer of the server, the harness each answer that came to it.  No code of the package judges:
the trained samples are read, and each token with loss must be one that the server said and the harness got, once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.e2e import jobs
from tests.e2e.accounts import dumped_samples
from tests.e2e.disorderly_agent import GOT, HELD, LEFT_EARLY
from tests.e2e.lying_proxy import Record, lying_proxy
from tests.e2e.tool_calculator import use_template
from transformers import AutoTokenizer

from r3train.types import RolloutSample
from r3train.verify.tiny import TinyOptions, build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS, SESSIONS = 3, 4, 4
ANSWERS = 12  # that a session's harness gets
END = 1
HOLDS_S = {LEFT_EARLY: 10.0, HELD: 600.0}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The demo's model with a chat template, and prompts of which no two are equal."""
    directory = tmp_path_factory.mktemp("custody")
    build(directory, TinyOptions(), force=True)
    use_template(directory / "model")
    rows = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    different = {row["input"]: row for row in rows}
    assert len(different) >= 4 * PROMPTS * STEPS
    lines = [json.dumps(row) + "\n" for row in different.values()]
    (directory / "prompts.jsonl").write_text("".join(lines))
    return directory


def hold_s(asked: dict) -> float:
    return HOLDS_S.get(asked["sampling_params"]["max_new_tokens"], 0.0)


def runs_with_loss(sample: RolloutSample) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.r_[0, sample.loss_mask.astype(int), 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


MODES = {
    "in_place": "--pause-generation-mode in_place --max-weight-staleness 2",
    "abort": "--pause-generation-mode abort --max-weight-staleness 1",
    "in turn": "--max-weight-staleness 0 --agent-history template",
}


@pytest.mark.parametrize("mode", MODES)
def test_each_token_said_and_got_is_trained_once_and_no_other(
    mode, task, engine, tmp_path, monkeypatch
):
    monkeypatch.setenv(GOT, str(tmp_path / "got.jsonl"))
    record = Record(hold_s=hold_s)
    with lying_proxy(engine, record) as proxy:
        job = jobs.run(
            tmp_path / "run",
            *f"--hf-checkpoint {task / 'model'} --prompt-data {task / 'prompts.jsonl'}".split(),
            *f"--rollout-batch-size {PROMPTS} --n-samples-per-prompt {SESSIONS}".split(),
            *f"--num-rollout {STEPS} --dump-rollouts --no-plot --no-tensorboard".split(),
            *jobs.FEW_ROWS,
            *jobs.R3_FLAGS,
            *jobs.NO_CANARIES,
            *"--r3-recheck-share 0 --apply-chat-template".split(),
            *"--agent tests.e2e.disorderly_agent:run --agent-reasoning-parser none".split(),
            *"--agent-tool-call-parser tests.e2e.disorderly_agent:words_are_a_call".split(),
            *"--rollout-max-response-len 80 --rollout-max-context-len 120".split(),
            *MODES[mode].split(),
            *f"--rollout-external-engine-addrs {proxy}".split(),
        )
    assert job.code == 0, job.output
    samples = dumped_samples(job.run_dir, range(STEPS))
    as_the_server_said(samples, record)
    as_the_harness_got(samples, tmp_path / "got.jsonl", task / "model")
    assert sum(m.get("agent/retries_joined", 0) for m in job.metrics()) > 0
    # and this would have found one token more, and one answer less
    sample_id, sample = next(iter(samples.items()))
    more = replace(sample, loss_mask=sample.loss_mask | (np.arange(sample.num_tokens) == 0))
    with pytest.raises(AssertionError):
        as_the_server_said(samples | {sample_id: more}, record)
    less = {k: s for k, s in samples.items() if k != sample_id}
    with pytest.raises(AssertionError):
        as_the_harness_got(less, tmp_path / "got.jsonl", task / "model")


def as_the_server_said(samples: dict[int, RolloutSample], record: Record) -> None:
    """Each token with loss, and its log-prob, is of one answer of the server to the tokens before it."""
    said = defaultdict(list)
    for told in record.told:
        said[told.sample].append(told)
    for sample_id, sample in samples.items():
        times_said = np.zeros(sample.num_tokens, int)
        for told in said[sample_id]:
            begins, out = len(told.asked["input_ids"]), told.truth["output_ids"]
            tokens = [*told.asked["input_ids"], *out]
            ends = begins + len(out)
            if sample.token_ids[:ends].tolist() != tokens:
                continue  # nobody took it
            scored = [entry[0] for entry in told.truth["meta_info"]["output_token_logprobs"]]
            assert (sample.rollout_log_probs[begins:ends] == np.float32(scored)).all()
            times_said[begins:ends] += 1
        assert (times_said == sample.loss_mask).all(), f"sample {sample_id}"


def as_the_harness_got(samples: dict[int, RolloutSample], got: Path, model: Path) -> None:
    """By prompt: the answers with loss are the answers that the sessions' harnesses got."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained, came = defaultdict(Counter), defaultdict(Counter)
    for sample in samples.values():
        for begins, ends in runs_with_loss(sample):
            ids = [token for token in sample.token_ids[begins:ends].tolist() if token != END]
            words = tokenizer.decode(ids, skip_special_tokens=False).split()
            trained[json.dumps(sample.prompt.content)][" ".join(words)] += 1
    for line in got.read_text().splitlines():
        session = json.loads(line)
        words = (" ".join(answer.split()) for answer in session["got"])
        came[json.dumps(session["prompt"])].update(words)
    assert len(trained) == PROMPTS * STEPS
    for prompt, answers in trained.items():
        assert answers.total() == SESSIONS * ANSWERS
        assert answers == came[prompt], f"prompt {prompt}"
