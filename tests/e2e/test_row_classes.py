"""The class of every route row on the real server, counted by hand; and what a row from the cache is."""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile

import numpy as np
import pytest
from tests import whole_samples
from tests.e2e import jobs
from tests.e2e.sglang_support import Reference, ROUTES, checkpoint_tensors, prompt_of

from r3train.audit.audit_run import audit_run
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher
from r3train.loop.rollout_file import read_samples
from r3train.types import RolloutSample, RowClass

pytestmark = pytest.mark.e2e
PROMPT, RESPONSE = 24, 10


@pytest.fixture(scope="module")
def server(model_server):
    return model_server


def counts(sample: RolloutSample) -> dict[str, int]:
    found = np.bincount(sample.row_classes, minlength=len(RowClass)).tolist()
    return {row_class.label: n for row_class, n in zip(RowClass, found) if n}


def same_sets(ours: np.ndarray, theirs: np.ndarray) -> list[bool]:
    """For each row: the experts of every layer are the same."""
    return (np.sort(ours, -1) == np.sort(theirs, -1)).all(axis=(1, 2)).tolist()


@pytest.mark.parametrize("flush", [True, False])
def test_rows_of_a_cached_prefix_are_those_of_the_weights_that_filled_the_cache(
    flush, server, models
):
    """Each text is answered under a's weights and, after an update, under b's."""
    a, b = (Reference(path) for path in models)

    async def ask(prompt: int, sample_id: int, version: int) -> RolloutSample:
        client = SGLangClient([server.addr], routes=ROUTES)
        sampling = SamplingParams(RESPONSE, ignore_eos=True)
        sample = await whole_samples.generate(
            client, prompt_of(prompt), sampling, sample_id=sample_id, weight_version=version
        )
        await client.aclose()
        return sample

    with EngineControl([server.addr]) as control:
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        first, again = asyncio.run(ask(1, 0, 0)), asyncio.run(ask(1, 1, 0))
        prefilled = {"decoded": RESPONSE - 1, "prefilled": PROMPT, "filled": 1}
        cached = {"decoded": RESPONSE - 1, "prefilled": 1, "cached": PROMPT - 1, "filled": 1}
        assert counts(first) == prefilled and counts(again) == cached
        of_first = a(again.token_ids[:PROMPT])[1]
        assert all(same_sets(again.routed_experts[: PROMPT - 1], of_first))
        publisher = DistributedPublisher(control, bucket_bytes=1 << 20, flush_cache=flush)
        publisher.publish(checkpoint_tensors(models[1]).items(), version=1)
        publisher.close()
        later = asyncio.run(ask(1, 2, 1))
    prompt = later.token_ids[:PROMPT]
    of_a, of_b = (same_sets(later.routed_experts[: PROMPT - 1], r(prompt)[1]) for r in (a, b))
    assert counts(later) == (prefilled if flush else cached)
    assert all(of_b if flush else of_a)
    print(f"flush {flush}: of {len(of_a)} rows {sum(of_a)} are a's, {sum(of_b)} b's")
    assert sum(of_a if flush else of_b) < PROMPT / 2


def prefix_of(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two texts have in common from the beginning on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def trained(job: jobs.Job, step: int) -> list[RolloutSample]:
    path = job.run_dir / "rollouts" / f"rollout_{step:07d}.safetensors"
    return sorted((sample for sample, _ in read_samples(path)[0]), key=lambda s: s.sample_id)


def evidence_of(job: jobs.Job) -> list[dict]:
    path = job.run_dir / "evidence" / "steps.jsonl"
    return [json.loads(line)["rows_by_class"] for line in path.read_text().splitlines()]


def test_a_job_counts_rows_from_the_cache_as_the_texts_before_tell(tmp_path, served_flags):
    """One request at a time: what the cache holds of a text is the longest beginning that an earlier one had."""
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 2 --max-weight-staleness 0 --rollout-max-concurrency 1".split(),
        # whose texts would be in the cache, too
        *"--r3-recheck-share 0 --r3-canaries 0 --dump-rollouts".split(),
    )
    assert job.code == 0, job.output
    for step, (metrics, found) in enumerate(zip(job.metrics(), evidence_of(job), strict=True)):
        expected, before = dict.fromkeys((c.label for c in RowClass), 0), []
        for sample in trained(job, step):
            shared = max((prefix_of(sample.token_ids, text) for text in before), default=0)
            cached = min(shared, sample.prompt_len - 1)
            # the keys of the last token were never computed
            before.append(sample.token_ids[:-1])
            expected["cached"] += cached
            expected["prefilled"] += sample.prompt_len - cached
            expected["decoded"] += sample.response_len - 1
            expected["filled"] += 1
        assert {k: metrics[f"rows/{k}"] for k in expected} == expected and expected["cached"] > 0
        # all of the weights that were asked; a last token has no row
        of_version = {k: {"-1" if k == "filled" else str(step): n} for k, n in expected.items()}
        assert found == {k: of_version[k] if n else {} for k, n in expected.items()}
        tokens = {k: metrics.get(f"train/loss_tokens_rows_{k}", 0) for k in expected}
        assert tokens["prefilled"] == metrics["rollout/num_samples"]
        assert tokens["decoded"] == expected["decoded"] and tokens["filled"] == 0
        assert metrics["train/log_prob_gap_mean_rows_cached"] < 1e-5
    assert audit_run(job.run_dir).verdict == "passed"


@pytest.mark.slow  # whether an update finds a sample in flight follows the machine; test_updates_in_flight has a job where it must
def test_a_job_counts_rows_that_were_prefilled_again_after_updates(tmp_path, served_flags):
    """The row at which newer weights went on, once for every update that a sample spans; every class occurs."""
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 4 --pause-generation-mode abort --max-weight-staleness 2".split(),
        *"--rollout-max-response-len 300 --rollout-ignore-eos --dump-rollouts".split(),
        *"--over-sampling-batch-size 6 --rollout-max-concurrency 64".split(),
    )
    assert job.code == 0, job.output
    again = cached = 0
    for step, (metrics, found) in enumerate(zip(job.metrics(), evidence_of(job), strict=True)):
        samples = trained(job, step)
        versions = [s.weight_versions[s.prompt_len :] for s in samples]
        updates = sum(int((np.diff(own) > 0).sum()) for own in versions)
        got = {c.label: metrics[f"rows/{c.label}"] for c in RowClass}
        assert got["prefilled_again"] == updates
        assert got["decoded"] == sum(s.response_len - 1 for s in samples) - updates
        assert got["prefilled"] + got["cached"] == sum(s.prompt_len for s in samples)
        assert got["filled"] == len(samples)
        assert {k: sum(of.values()) for k, of in found.items()} == got
        # a row that was decoded is of the weights of the token that it predicted
        of = [np.bincount(own[1:][np.diff(own) == 0], minlength=5) for own in versions]
        decoded = {str(v): n for v, n in enumerate(np.sum(of, axis=0).tolist()) if n}
        assert found["decoded"] == decoded
        again, cached = again + updates, cached + got["cached"]
    assert again > 0 and cached > 0
    assert audit_run(job.run_dir).verdict == "passed"
