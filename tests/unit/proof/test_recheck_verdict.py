"""recheck: answers that their server rechecked, compared and judged, live and offline."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tests.unit.evidence_dirs import comparison, LAYERS, write_run

from r3train.cli import main
from r3train.audit.audit_run import audit_run
from r3train.proof.recheck_verdict import (
    compare,
    compare_rollout,
    judge_recheck,
    limit,
    log_probs_twice,
    measured_noise,
    Noise,
    recheck_failures,
)
from r3train.proof.writer import RECHECK_FILE
from r3train.types import Prompt, Rechecked, RecheckedRollout, RolloutSample

EXPERTS, TOPK, PROMPT, TOKENS = 16, 3, 20, 120
EXACT = Noise(5000, dict.fromkeys(LAYERS, 0), 2000, 0, 1e-4)
CLAIM = "recheck"


def routes(seed: int, tokens: int = TOKENS) -> np.ndarray:
    """uint8 [tokens - 1, 3, 3]; a row has no expert twice."""
    random = np.random.default_rng(seed)
    order = random.random((tokens - 1, len(LAYERS), EXPERTS)).argsort(axis=-1)
    return order[..., :TOPK].astype(np.uint8)


def sample_of(seed: int = 0, **changes) -> RolloutSample:
    tokens = np.arange(TOKENS, dtype=np.int32)
    mask = np.arange(TOKENS) >= PROMPT
    log_probs = np.random.default_rng(seed).normal(-2, 1, TOKENS)
    sample = RolloutSample(
        sample_id=seed,
        group_id=0,
        prompt=Prompt("p", 0, "", tokens[:PROMPT], None),
        token_ids=tokens,
        prompt_len=PROMPT,
        loss_mask=mask,
        rollout_log_probs=np.where(mask, log_probs, 0).astype(np.float32),
        routed_experts=routes(seed),
        weight_versions=np.where(mask, 4, -1).astype(np.int32),
        finish_reason="stop",
    )
    return replace(sample, **changes)


def again_of(sample: RolloutSample, first_row: int = 0, **changes) -> Rechecked:
    """The same, rechecked without any noise; each row's experts in another order."""
    again = Rechecked(
        sample_id=sample.sample_id,
        part="last" if first_row else "whole",
        server=0,
        weight_version=4,
        held_version=4,
        token_ids=sample.token_ids,
        first_row=first_row,
        rows=sample.routed_experts[first_row:, :, ::-1],
        log_probs=sample.rollout_log_probs[first_row + 1 :],
    )
    return replace(again, **changes)


def judged(sample, again, noise=EXACT, *, log_probs=True):
    record = compare(4, sample, again, noise, list(LAYERS), log_probs=log_probs)
    return record, recheck_failures(record)


def test_equal_sets_of_experts_and_log_probs_pass_and_all_of_them_are_counted():
    record, failures = judged(sample_of(), again_of(sample_of()))
    assert not failures and record.rows_differ == dict.fromkeys(LAYERS, 0)
    assert (record.num_rows, record.num_log_probs) == (TOKENS - 1, TOKENS - PROMPT)


def test_a_sample_that_is_not_trained_is_compared_all_the_same():
    masked = replace(sample_of(), loss_mask=np.zeros(TOKENS, bool))
    record, failures = judged(masked, again_of(sample_of()))
    assert not failures and record.num_log_probs == TOKENS - PROMPT


def test_rows_of_another_sample_fail_in_every_layer_far_above_what_may_differ():
    record, failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)))
    assert [f.layer_number for f in failures] == list(LAYERS)
    assert min(record.rows_differ.values()) > 30 * limit(record.num_rows, 0)


def test_layers_of_a_lost_stage_fail_alone():
    sample = sample_of()
    delivered = sample.routed_experts.copy()
    delivered[:, 2] = 0
    _, failures = judged(replace(sample, routed_experts=delivered), again_of(sample))
    assert [(f.layer_number, f.got) for f in failures] == [(3, TOKENS - 1)]


def test_prompt_rows_of_another_version_fail():
    """As after a retraction: rows 0..18 were rechecked under newer weights."""
    sample = sample_of()
    delivered = sample.routed_experts.copy()
    delivered[: PROMPT - 1] = routes(9)[: PROMPT - 1]
    prompt = again_of(sample, part="prompt", token_ids=sample.token_ids[:PROMPT])
    prompt = replace(prompt, rows=prompt.rows[: PROMPT - 1], log_probs=prompt.log_probs[:19])
    record, failures = judged(replace(sample, routed_experts=delivered), prompt)
    assert record.num_rows == PROMPT - 1 and record.num_log_probs == 0
    assert [f.layer_number for f in failures] == list(LAYERS)
    assert not judged(sample, prompt)[1]


def test_a_few_rows_near_a_tie_pass_and_more_of_them_fail():
    sample, most = sample_of(), limit(TOKENS - 1, 0)
    for differing in (most, most + 1):
        rows = sample.routed_experts.copy()
        rows[:differing, 1] = routes(9)[:differing, 1]
        _, failures = judged(sample, again_of(sample, rows=rows))
        assert [(f.layer_number, f.got) for f in failures] == [(2, most + 1)] * (differing > most)


def test_measured_noise_of_a_layer_allows_so_much_more_there():
    assert limit(1000, 0.0) == 5 and limit(1000, 0.01) == 59
    assert limit(3, 0.0) == 2 and limit(0, 0.1) == 0
    sample, rows = sample_of(), sample_of().routed_experts.copy()
    rows[:30, 1:] = routes(9)[:30, 1:]
    noise = Noise(1000, {1: 0, 2: 0, 3: 100}, 2000, 0, 1e-4)
    _, failures = judged(sample, again_of(sample, rows=rows), noise)
    assert [(f.layer_number, f.expected) for f in failures] == [(2, 2)]


def test_a_server_that_is_wrong_from_its_first_answer_on_does_not_excuse_itself():
    broken = [(sample_of(i), again_of(sample_of(i), rows=routes(i + 50))) for i in range(8)]
    noise = measured_noise(broken, list(LAYERS), "float32")[0]
    failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)), noise)[1]
    assert [f.layer_number for f in failures] == list(LAYERS)
    assert all("in the baseline" in f.what and f.got > 3 * f.expected for f in failures)


def test_noise_is_measured_for_each_server():
    random = np.random.default_rng(0)
    pairs = []
    for i in range(8):
        sample = sample_of(i)
        off = random.normal(0, 0.01, TOKENS - 1).astype(np.float32) * (i % 2)
        pairs.append(
            (sample, again_of(sample, server=i % 2, log_probs=sample.rollout_log_probs[1:] + off))
        )
    exact, noisy = measured_noise(pairs, list(LAYERS), "float32").values()
    assert exact.log_prob_tolerance == 1e-4 and 0.04 < noisy.log_prob_tolerance < 0.07
    assert exact.num_rows == 4 * (TOKENS - 1) and noisy.log_probs_differ <= 1


def test_log_probs_of_other_weights_fail_and_only_where_temperature_is_1():
    sample = sample_of()
    other = again_of(sample, log_probs=sample.rollout_log_probs[1:] + np.float32(0.01))
    record, (failure,) = judged(sample, other)
    assert failure.layer_number == 0 and failure.got == TOKENS - PROMPT
    assert record.log_prob_off_max == pytest.approx(0.01, rel=1e-3)
    assert not judged(sample, other, log_probs=False)[1]


def test_log_probs_behind_a_row_that_differs_are_that_rows_doing():
    """One expert chosen otherwise, near a tie, moves every later token a little."""
    sample = sample_of()
    rows, log_probs = sample.routed_experts.copy(), sample.rollout_log_probs[1:].copy()
    rows[50, 0] = routes(9)[50, 0]
    log_probs[50:] += 0.01
    assert not judged(sample, again_of(sample, rows=rows, log_probs=log_probs))[1]
    log_probs[:50] += 0.01
    assert judged(sample, again_of(sample, rows=rows, log_probs=log_probs))[1]


def test_the_log_prob_of_the_row_that_differs_is_that_rows_doing_and_the_one_before_is_not():
    """Token t + 1 is sampled from row t: an exact server's log-probs before it are its own business."""
    sample = sample_of()
    rows = sample.routed_experts.copy()
    rows[50, 0] = routes(9)[50, 0]
    for count in (49, 50, 51):
        log_probs = sample.rollout_log_probs[1:].copy()
        log_probs[count:] += 0.01
        record, _ = judged(sample, again_of(sample, rows=rows, log_probs=log_probs))
        assert record.log_probs_differ == (1 if count == 49 else 0)
        assert record.num_log_probs == 50 - (PROMPT - 1)


def test_each_server_is_judged_by_its_own_noise():
    """A wrong server cannot hide behind another one that is noisy."""
    noisy, exact = [], []
    for i in range(8):
        sample, rows = sample_of(i), sample_of(i).routed_experts.copy()
        rows[::5] = routes(i + 50)[::5]
        noisy.append((sample, again_of(sample, server=0, rows=rows)))
        exact.append((sample, again_of(sample, server=1)))
    sample, rows = sample_of(), sample_of().routed_experts.copy()
    rows[::6] = routes(9)[::6]
    parts = [again_of(sample, server=server, rows=rows) for server in (0, 1)]
    for pairs in (noisy + exact, exact + noisy):
        records = compare_rollout(
            4,
            RecheckedRollout(parts, 0, pairs),
            [sample],
            lambda s: s,
            list(LAYERS),
            log_probs=True,
            dtype="float32",
        )
        assert [r.noise.rows_seldom_differ for r in records] == [False, True]
        assert [bool(recheck_failures(r)) for r in records] == [False, True]
    # nor is a server without a measurement judged by another's
    rollout = RecheckedRollout(parts, 0, exact)
    records = compare_rollout(
        4, rollout, [sample], lambda s: s, list(LAYERS), log_probs=True, dtype="float32"
    )
    assert records[0].noise is None and records[1].noise is not None
    assert judge_recheck(records, 0).parts == 1


def test_log_probs_behind_a_row_that_differs_count_where_that_is_common():
    """Only there does the tolerance cover them; one row of 5000 is not in a 99th percentile."""
    sample = sample_of()
    rows = sample.routed_experts.copy()
    rows[50, 0] = routes(9)[50, 0]
    log_probs = sample.rollout_log_probs[1:].copy()
    log_probs[50:] += 0.01
    again = again_of(sample, rows=rows, log_probs=log_probs)
    seldom, common = (Noise(5000, {1: 0, 2: n, 3: 0}, 2000, 0, 1e-4) for n in (49, 50))
    record, failures = judged(sample, again, seldom)
    assert record.num_log_probs == 50 - (PROMPT - 1) and not failures
    record, (failure,) = judged(sample, again, common)
    assert record.num_log_probs == TOKENS - PROMPT and failure.got == TOKENS - 1 - 50


@pytest.mark.parametrize("dtype, fails", [("float32", True), ("bfloat16", False)])
def test_one_rounding_of_a_logit_is_no_fault_of_a_server_in_half_precision(dtype, fails):
    """It moves every later token of its sample, and may be in none of those that were measured."""
    sample = sample_of()
    exact = [(sample_of(i), again_of(sample_of(i))) for i in range(8)]
    noise = measured_noise(exact, list(LAYERS), dtype)[0]
    log_probs = sample.rollout_log_probs[1:].copy()
    log_probs[60:] += 0.004
    assert bool(judged(sample, again_of(sample, log_probs=log_probs), noise)[1]) == fails
    # what other weights do is beyond both
    log_probs[60:] += 0.1
    assert judged(sample, again_of(sample, log_probs=log_probs), noise)[1]


def test_noise_without_log_probs_has_the_least_tolerance_and_a_wild_server_the_most():
    silent = sample_of(weight_versions=np.full(TOKENS, -1, np.int32))
    noise = measured_noise([(silent, again_of(silent))], list(LAYERS), "float32")[0]
    assert (noise.num_log_probs, noise.log_prob_tolerance) == (0, 1e-4)
    sample = sample_of()
    wild = again_of(sample, log_probs=sample.rollout_log_probs[1:] + np.float32(10))
    noise = measured_noise([(sample, wild)], list(LAYERS), "float32")[0]
    assert (noise.log_prob_tolerance, noise.log_probs_differ) == (0.5, TOKENS - PROMPT)
    # so it does not excuse itself either
    record, failures = judged(sample, replace(wild, held_version=9), noise)
    assert [(f.layer_number, f.got) for f in failures] == [(0, 9)]


def test_a_log_prob_differs_beyond_the_tolerance_alone():
    sample = sample_of(rollout_log_probs=np.full(TOKENS, -1, np.float32))
    noise = replace(EXACT, log_prob_tolerance=0.25)
    for off, differ in ((0.25, 0), (0.5, TOKENS - PROMPT)):
        again = again_of(sample, log_probs=np.full(TOKENS - 1, -1 - off, np.float32))
        record, failures = judged(sample, again, noise)
        assert record.log_probs_differ == differ and bool(failures) == bool(differ)


def differing(layer: int, count: int, noise: Noise) -> list:
    """The failures of a sample of which so many rows differ in a layer (1-based)."""
    record = comparison(4, num_rows=200, noise=noise, rows_differ={1: 0, 2: 0, 3: 0, layer: count})
    return [(f.layer_number, f.got, f.expected) for f in recheck_failures(record)]


def test_the_share_of_a_layer_is_of_the_rows_that_were_measured():
    noise = Noise(1000, {1: 0, 2: 0, 3: 100}, 2000, 20, 1e-4)
    most = limit(200, 0.1)
    assert most == 100  # 60 + 5 sqrt(60) + 2 = 100.7
    assert differing(3, most, noise) == [] and differing(3, most + 1, noise) == [(3, 101, 100)]
    assert differing(2, 3, noise) == [] and differing(2, 4, noise) == [(2, 4, 3)]
    # a layer that was not measured has no noise, and with no row measured there is none either
    assert differing(3, 4, replace(noise, rows_differ={1: 0})) == [(3, 4, 3)]
    assert differing(3, 4, Noise(0, dict.fromkeys(LAYERS, 0), 0, 0, 1e-4)) == [(3, 4, 3)]
    most = limit(60, 0.01)
    assert most == 10  # 1.8 + 5 sqrt(1.8) + 2 = 10.5
    for count, failed in ((most, []), (most + 1, [(0, 11, 10)])):
        found = recheck_failures(comparison(4, noise=noise, log_probs_differ=count))
        assert [(f.layer_number, f.got, f.expected) for f in found] == failed


@pytest.mark.parametrize("at_start, failed", [(300, []), (301, [(2, 301, 300)])])
def test_the_most_that_rounding_explains_at_the_start_is_three_tenths(at_start, failed):
    assert differing(2, 0, Noise(1001, {1: 0, 2: at_start, 3: 0}, 2000, 0, 1e-4)) == failed


def test_the_verdict_of_a_step_counts_what_was_judged_and_what_was_missed():
    right, wrong = comparison(4), comparison(4, rows_differ={1: 99, 2: 0, 3: 0})
    unknown = replace(wrong, noise=None)
    for records, verdict, parts in (
        ([right], "passed", 1),
        ([right, wrong], "failed", 2),
        ([right, unknown], "passed", 1),
        ([unknown], "no evidence", 0),
    ):
        sampling = judge_recheck(records, 3)
        assert (sampling.verdict, sampling.parts, sampling.missed) == (verdict, parts, 3)
        assert len(sampling.failures) == (verdict == "failed")


@pytest.mark.parametrize("version", [0, 4])
def test_of_a_sample_under_two_versions_the_last_part_is_compared_whatever_the_first_was(version):
    older = np.where(np.arange(TOKENS) >= PROMPT, version, -1)
    versions = np.where(np.arange(TOKENS) > 70, version + 1, older).astype(np.int32)
    sample = sample_of(weight_versions=versions)
    last = again_of(sample, first_row=70, weight_version=version + 1, held_version=version + 1)
    of_prompt = {"part": "prompt", "token_ids": sample.token_ids[:PROMPT]}
    prompts = [
        again_of(
            sample,
            **of_prompt,
            weight_version=v,
            held_version=v,
            rows=sample.routed_experts[: PROMPT - 1],
            log_probs=sample.rollout_log_probs[1:PROMPT],
        )
        for v in (version, version + 1)
    ]
    rollout = RecheckedRollout([last, *prompts], 0, [(sample_of(1), again_of(sample_of(1)))])
    records = compare_rollout(
        4, rollout, [sample], lambda s: s, list(LAYERS), log_probs=True, dtype="float32"
    )
    compared = [(r.part, r.weight_version, len(recheck_failures(r))) for r in records]
    assert compared == [("last", version + 1, 0), ("prompt", version, 0)]


def test_missing_slots_and_an_environments_tokens_are_left_out():
    sample = sample_of()
    delivered = sample.routed_experts.copy()
    delivered[-5:] = 255
    mask = sample.loss_mask.copy()
    mask[60:80] = False
    versions = np.where(mask, sample.weight_versions, -1)
    sample = replace(sample, routed_experts=delivered, loss_mask=mask, weight_versions=versions)
    record, failures = judged(sample, again_of(sample_of()))
    assert not failures and record.num_rows == TOKENS - 6
    assert record.num_log_probs == TOKENS - PROMPT - 20


def test_of_one_sample_a_turn_the_log_probs_of_earlier_turns_are_left_out_and_their_rows_are_not():
    whole, turn = sample_of(), 70  # tokens PROMPT..69 are an earlier turn's
    own = np.arange(TOKENS) >= turn
    log_probs = np.where(own, whole.rollout_log_probs, np.float32(0))
    last = replace(whole, prompt_len=turn, loss_mask=own, rollout_log_probs=log_probs)
    record, failures = judged(last, again_of(whole))
    assert failures == [] and record.num_log_probs == TOKENS - turn
    assert record.num_rows == TOKENS - 1


def test_the_last_part_is_compared_from_its_first_row_and_its_version_on():
    versions = np.where(np.arange(TOKENS) > 70, 4, 3).astype(np.int32)
    sample = sample_of(weight_versions=versions)
    record, failures = judged(sample, again_of(sample_of(), first_row=70))
    assert not failures and (record.num_rows, record.num_log_probs) == (TOKENS - 71, TOKENS - 71)


def test_another_version_than_the_tokens_claim_fails():
    (failure,) = judged(sample_of(), again_of(sample_of(), held_version=5))[1]
    assert str(failure).endswith("is 5, expected 4") and "weight version" in str(failure)


def test_a_prompt_whose_answer_began_under_a_newer_version_is_not_compared():
    sample = sample_of()
    parts = [again_of(sample, part="prompt", weight_version=v) for v in (3, 4)]
    rollout = RecheckedRollout(parts, 0, [(sample_of(1), again_of(sample_of(1)))])
    records = compare_rollout(
        4, rollout, [sample], lambda s: s, list(LAYERS), log_probs=True, dtype="float32"
    )
    assert [r.weight_version for r in records] == [4]


def test_the_prompt_of_an_agents_request_that_was_never_answered_is_not_compared():
    """Its sample is not there, or another request has its id since; of other samples that is our bug."""
    session = {"trajectory_id": 0, "is_last_step": True}
    sample = sample_of(**session)
    other = sample_of(1, token_ids=np.arange(TOKENS, dtype=np.int32) + 1)
    given_up = again_of(other, part="prompt", sample_id=7)
    parts = [given_up, replace(given_up, sample_id=0), again_of(sample, part="prompt")]
    rollout = RecheckedRollout(parts, 0, [(sample_of(1), again_of(sample_of(1)))])
    how = (lambda s: s, list(LAYERS))
    records = compare_rollout(4, rollout, [sample], *how, log_probs=True, dtype="float32")
    assert [(r.sample_id, r.rows_differ) for r in records] == [(0, dict.fromkeys(LAYERS, 0))]
    with pytest.raises(AssertionError):
        compare_rollout(
            4, rollout, [sample_of(), sample_of(7)], *how, log_probs=True, dtype="float32"
        )
    with pytest.raises(KeyError):
        whole = replace(rollout, parts=[again_of(sample_of(7))])
        compare_rollout(4, whole, [sample], *how, log_probs=True, dtype="float32")


def test_nothing_computed_again_is_no_evidence_and_no_known_noise_neither():
    assert judge_recheck([], 1).verdict == "no evidence"
    record, failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)), None)
    assert not failures and judge_recheck([record], 0).verdict == "no evidence"


# -- offline -----------------------------------------------------------------------------------


def said(run, *flags: str):
    result = CliRunner().invoke(main, ["check-evidence", str(run), "--json", *flags])
    (audit,) = json.loads(result.stdout)["audits"]
    return audit


def test_a_run_whose_samples_were_computed_again_passes_with_its_numbers(tmp_path):
    run = write_run(tmp_path / "run", rechecked=lambda step: [comparison(step)])
    audit = said(run)
    assert set(audit["claims"].values()) == {"passed"} and audit["verdict"] == "passed"
    assert audit["numbers"]["rechecked"] == {
        "samples": 3,
        "parts": 3,
        "missed": 0,
        "rows": 900,
        "rows_differ": 0,
        "log_probs": 180,
        "log_probs_differ": 0,
    }
    shown = CliRunner().invoke(main, ["check-evidence", str(run)]).output
    assert "3 samples rechecked: other experts in 0 of 900 rows" in shown


@pytest.mark.parametrize("run_saw_it", [True, False], ids=["in the run", "in the file"])
def test_a_layer_that_differs_fails_the_claim_with_step_and_layer(tmp_path, run_saw_it):
    wrong = {"rows_differ": {1: 0, 2: 90, 3: 0}}

    def rechecked(step):
        return [comparison(step, **(wrong if step == 1 and run_saw_it else {}))]

    run = write_run(tmp_path / "run", rechecked=rechecked)
    if not run_saw_it:
        path = run / "evidence" / RECHECK_FILE
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1]["rows_differ"]["2"] = 90
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = said(run)
    assert audit["verdict"] == "failed"
    assert {c for c, v in audit["claims"].items() if v == "failed"} == {CLAIM}
    (found,) = audit["findings"]
    assert (found["step"], found["layer_number"], found["got"]) == (1, 2, "90")
    assert found["expected"] == "at most 2" and "sample 8 on server 0" in found["what"]


def test_steps_without_a_comparison_are_no_fault_and_no_claim_is_made_without_one(tmp_path):
    some = write_run(tmp_path / "some", rechecked=lambda step: [comparison(step)] * (step == 0))
    audit = audit_run(some)
    assert audit.claims[CLAIM] == "passed" and audit.verdict == "passed"
    assert audit.numbers["rechecked"]["parts"] == 1
    none = audit_run(write_run(tmp_path / "none", rechecked=lambda step: []))
    assert none.claims[CLAIM] == "no evidence" and none.verdict == "passed"


def test_log_probs_twice_are_those_of_the_parts_own_tokens_as_they_came_and_as_they_were_computed():
    two = [sample_of(0), sample_of(1, weight_versions=sample_of().weight_versions.copy())]
    split = PROMPT + 10
    two[1].weight_versions[PROMPT:split] = 3  # of weights that the server no longer held
    off = [replace(again, log_probs=again.log_probs + 0.5) for again in map(again_of, two)]
    again = [off[0], again_of(two[1], split - 2, log_probs=off[1].log_probs[split - 2 :])]
    found = RecheckedRollout([*again, again_of(two[0], part="prompt", weight_version=9)], 0, [])
    delivered, computed = log_probs_twice(found, two)
    own = [two[0].rollout_log_probs[PROMPT:], two[1].rollout_log_probs[split:]]
    np.testing.assert_array_equal(delivered, np.concatenate(own))
    np.testing.assert_allclose(computed, delivered + 0.5, rtol=1e-6)
    nothing = log_probs_twice(RecheckedRollout([], 1, []), two)
    assert [len(x) for x in nothing] == [0, 0]
