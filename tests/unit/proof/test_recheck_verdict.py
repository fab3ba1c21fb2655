"""recheck: answers that their server rechecked, compared and judged, live and offline."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from tests.unit.config.test_config import config
from tests.unit.evidence_dirs import comparison, LAYERS, NOISE, rows_apart, write_run
from tests.unit.hf_model import facts

from r3train.cli import main
from r3train.audit.audit_run import audit_run
from r3train.loop.step_proof import StepProof
from r3train.proof.live import LiveProof
from r3train.proof.recheck_verdict import (
    compare,
    compare_rollout,
    judge_recheck,
    log_probs_twice,
    measured_noise,
    Noise,
    recheck_failures,
    RecheckRecord,
)
from r3train.proof.suspicion import Suspicions
from r3train.proof.writer import RECHECK_FILE
from r3train.types import Prompt, Rechecked, RecheckedRollout, RolloutSample, RowClass

EXPERTS, TOPK, PROMPT, TOKENS = 16, 3, 20, 120
EXACT = NOISE
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
        row_classes=np.where(
            np.arange(TOKENS) >= PROMPT, RowClass.DECODED, RowClass.PREFILLED
        ).astype(np.uint8),
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


def suspects(*records: RecheckRecord, suspicions: Suspicions | None = None) -> list[str]:
    """The statistics that one step makes suspect, where nothing is calibrated by the steps before."""
    recheck = judge_recheck(records, 0, suspicions or Suspicions(calibrating=0))
    assert (recheck.verdict in ("suspect", "failed")) >= any(s.sum >= 1 for s in recheck.statistics)
    return [s.name for s in recheck.statistics if s.sum >= 1]


def test_equal_sets_of_experts_and_log_probs_pass_and_all_of_them_are_counted():
    record, failures = judged(sample_of(), again_of(sample_of()))
    assert not failures and not suspects(record)
    assert record.decoded == rows_apart(rows=TOKENS - 1 - PROMPT)
    assert record.prefilled == rows_apart(rows=PROMPT)
    assert (record.num_rows, record.num_log_probs) == (TOKENS - 1, TOKENS - PROMPT)


def test_a_sample_that_is_not_trained_is_compared_all_the_same():
    masked = replace(sample_of(), loss_mask=np.zeros(TOKENS, bool))
    record, failures = judged(masked, again_of(sample_of()))
    assert not failures and record.num_log_probs == TOKENS - PROMPT


def test_rows_of_another_sample_are_gross_in_every_layer():
    record, failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)))
    assert {f.layer_number for f in failures} == set(LAYERS)
    assert suspects(record) == ["decoded rows", "prefilled rows"]


def test_layers_of_a_lost_stage_fail_alone():
    sample = sample_of()
    delivered = sample.routed_experts.copy()
    delivered[:, 2] = 0
    _, failures = judged(replace(sample, routed_experts=delivered), again_of(sample))
    assert [(f.layer_number, f.got) for f in failures] == [(3, TOKENS - 1 - PROMPT), (3, PROMPT)]


def test_prompt_rows_of_another_version_are_gross():
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


def test_a_few_rows_near_a_tie_are_nothing_and_a_third_of_them_is_suspect_and_not_gross():
    sample = sample_of()
    for differing, expected in ((2, []), (33, ["decoded rows"])):
        rows = sample.routed_experts.copy()
        rows[PROMPT : PROMPT + differing] = routes(9)[:differing]
        record, failures = judged(sample, again_of(sample, rows=rows))
        assert not failures and suspects(record) == expected


def test_what_was_measured_on_a_server_is_usual_there_for_decoded_and_prefilled_rows_apart():
    record = comparison(4, decoded=rows_apart({1: 20, 2: 20, 3: 20}))
    assert suspects(record) == ["decoded rows"]
    noisy = rows_apart({1: 150, 2: 150, 3: 150}, rows=1000)
    assert suspects(replace(record, noise=replace(EXACT, decoded=noisy))) == []
    # a prompt's rows differ less: they do not dilute an answer's, nor excuse it
    assert suspects(replace(record, noise=replace(EXACT, prefilled=noisy))) == ["decoded rows"]
    assert suspects(replace(record, prefilled=rows_apart(rows=9000))) == ["decoded rows"]


@pytest.mark.parametrize("rows, differ, gross", [(100, 81, True), (100, 80, False), (7, 7, False)])
def test_more_than_four_fifths_of_a_layers_rows_are_gross_where_noise_changes_few(
    rows, differ, gross
):
    for name in ("decoded", "prefilled"):
        record = comparison(4, **{name: rows_apart({2: differ}, rows=rows)})
        found = [(f.layer_number, f.got, f.expected) for f in recheck_failures(record)]
        assert found == [(2, differ, rows * 4 // 5)] * gross
        tenth = replace(EXACT, **{name: rows_apart({2: 100}, rows=1000)})
        assert recheck_failures(replace(record, noise=tenth)) == []


def test_a_fault_that_begins_after_the_calibration_fails_within_five_steps():
    suspicions, sound = Suspicions(), comparison(4)
    for _ in range(12):
        assert judge_recheck([sound], 0, suspicions).verdict == "passed"
    wrong = comparison(4, decoded=rows_apart({2: 60}))
    verdicts = [judge_recheck([wrong], 0, suspicions).verdict for _ in range(5)]
    assert verdicts == ["suspect"] * 4 + ["failed"]


def test_a_fault_from_the_first_step_on_does_not_become_usual():
    suspicions = Suspicions()
    wrong = comparison(4, decoded=rows_apart(dict.fromkeys(LAYERS, 60)))
    verdicts = [judge_recheck([wrong], 0, suspicions).verdict for _ in range(13)]
    assert verdicts == ["passed"] * 8 + ["suspect"] * 4 + ["failed"]


def test_long_answers_that_differ_more_often_than_those_that_were_measured_become_usual():
    noise = replace(EXACT, decoded=rows_apart({1: 5, 2: 5, 3: 5}, rows=512))
    long = comparison(4, decoded=rows_apart(dict.fromkeys(LAYERS, 30), rows=1000), noise=noise)
    suspicions = Suspicions()
    assert {judge_recheck([long], 0, suspicions).verdict for _ in range(200)} == {"passed"}


def test_a_server_that_is_wrong_from_its_first_answer_on_does_not_excuse_itself():
    broken = [(sample_of(i), again_of(sample_of(i), rows=routes(i + 50))) for i in range(8)]
    noise = measured_noise(broken, list(LAYERS), "float32")[0]
    failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)), noise)[1]
    assert {f.layer_number for f in failures} == set(LAYERS)
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
    assert exact.log_prob_off == 0 and 0.006 < noisy.log_prob_off < 0.01
    assert exact.usual_off == exact.least_off == 1e-6 and noisy.usual_off == noisy.log_prob_off
    assert exact.decoded.rows == 4 * (TOKENS - 1 - PROMPT) and exact.prefilled.rows == 4 * PROMPT


def test_log_probs_of_other_weights_are_suspect_and_only_where_temperature_is_1():
    sample = sample_of()
    other = again_of(sample, log_probs=sample.rollout_log_probs[1:] + np.float32(0.01))
    record, failures = judged(sample, other)
    assert not failures and suspects(record) == ["log-probs"]
    assert record.log_prob_off_max == pytest.approx(0.01, rel=1e-3)
    assert not suspects(judged(sample, other, log_probs=False)[0])


def test_log_probs_behind_a_row_that_differs_are_that_rows_doing():
    """One expert chosen otherwise, near a tie, moves every later token a little."""
    sample = sample_of()
    rows, log_probs = sample.routed_experts.copy(), sample.rollout_log_probs[1:].copy()
    rows[50, 0] = routes(9)[50, 0]
    log_probs[50:] += 0.01
    assert not suspects(judged(sample, again_of(sample, rows=rows, log_probs=log_probs))[0])
    log_probs[:50] += 0.01
    assert suspects(judged(sample, again_of(sample, rows=rows, log_probs=log_probs))[0])


def test_the_log_prob_of_the_row_that_differs_is_that_rows_doing_and_the_one_before_is_not():
    """Token t + 1 is sampled from row t: an exact server's log-probs before it are its own business."""
    sample = sample_of()
    rows = sample.routed_experts.copy()
    rows[50, 0] = routes(9)[50, 0]
    for count in (49, 50, 51):
        log_probs = sample.rollout_log_probs[1:].copy()
        log_probs[count:] += 0.01
        record, _ = judged(sample, again_of(sample, rows=rows, log_probs=log_probs))
        assert (record.log_prob_off_max > 0.009) == (count == 49)
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
        recheck = judge_recheck(records, 0, Suspicions(calibrating=0))
        assert {s.server for s in recheck.statistics if s.sum >= 1} == {1}
    # nor is a server without a measurement judged by another's
    rollout = RecheckedRollout(parts, 0, exact)
    records = compare_rollout(
        4, rollout, [sample], lambda s: s, list(LAYERS), log_probs=True, dtype="float32"
    )
    assert records[0].noise is None and records[1].noise is not None
    assert judge_recheck(records, 0, Suspicions()).parts == 1


def test_log_probs_behind_a_row_that_differs_count_where_that_is_common():
    """Only there are they part of what was measured."""
    sample = sample_of()
    rows = sample.routed_experts.copy()
    rows[50, 0] = routes(9)[50, 0]
    again = again_of(sample, rows=rows)
    seldom, common = (replace(EXACT, decoded=rows_apart({2: n}, rows=4200)) for n in (49, 50))
    assert judged(sample, again, seldom)[0].num_log_probs == 50 - (PROMPT - 1)
    assert judged(sample, again, common)[0].num_log_probs == TOKENS - PROMPT


def test_one_token_far_off_counts_as_thirty_and_many_are_suspect():
    sample = sample_of()
    log_probs = sample.rollout_log_probs[1:].copy()
    log_probs[60] += 3
    record, _ = judged(sample, again_of(sample, log_probs=log_probs))
    assert record.log_prob_off == pytest.approx(30e-6 / (TOKENS - PROMPT)) and not suspects(record)
    log_probs[60:] += 3
    assert suspects(judged(sample, again_of(sample, log_probs=log_probs))[0]) == ["log-probs"]


@pytest.mark.parametrize("dtype, suspect", [("float32", ["log-probs"]), ("bfloat16", [])])
def test_one_rounding_of_a_logit_is_nothing_of_a_server_in_half_precision(dtype, suspect):
    """It moves every later token of its sample, and may be in none of those that were measured."""
    sample = sample_of()
    exact = [(sample_of(i), again_of(sample_of(i))) for i in range(8)]
    noise = measured_noise(exact, list(LAYERS), dtype)[0]
    log_probs = sample.rollout_log_probs[1:].copy()
    log_probs[60:] += 0.004
    assert suspects(judged(sample, again_of(sample, log_probs=log_probs), noise)[0]) == suspect
    # what other weights do is beyond both
    log_probs[60:] += 0.1
    assert suspects(judged(sample, again_of(sample, log_probs=log_probs), noise)[0])


def test_noise_without_log_probs_is_the_least():
    silent = sample_of(weight_versions=np.full(TOKENS, -1, np.int32))
    noise = measured_noise([(silent, again_of(silent))], list(LAYERS), "float32")[0]
    assert (noise.num_log_probs, noise.log_prob_off, noise.usual_off) == (0, 0.0, 1e-6)


@pytest.mark.parametrize("at_start, failed", [(300, []), (301, [(2, 301, 300)])])
def test_the_most_that_rounding_explains_at_the_start_is_three_tenths(at_start, failed):
    noise = replace(EXACT, decoded=rows_apart({2: at_start}, rows=1001))
    found = recheck_failures(comparison(4, noise=noise))
    assert [(f.layer_number, f.got, f.expected) for f in found] == failed


def test_the_verdict_of_a_step_counts_what_was_judged_and_what_was_missed():
    right, wrong = comparison(4), comparison(4, decoded=rows_apart({1: 99}))
    unknown = replace(wrong, noise=None)
    for records, verdict, parts in (
        ([right], "passed", 1),
        ([right, wrong], "failed", 2),
        ([right, unknown], "passed", 1),
        ([unknown], "no evidence", 0),
    ):
        recheck = judge_recheck(records, 3, Suspicions())
        assert (recheck.verdict, recheck.parts, recheck.missed) == (verdict, parts, 3)
        assert len(recheck.failures) == (verdict == "failed")


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


def test_a_part_that_is_not_compared_is_missed_by_its_step(monkeypatch):
    sample, judged_by = sample_of(), {}
    parts = [again_of(sample, part="prompt", weight_version=v) for v in (3, 4)]
    rollout = RecheckedRollout(parts, 2, [(sample_of(1), again_of(sample_of(1)))])
    monkeypatch.setattr(LiveProof, "prove_step", lambda *of: judged_by.update(vars(of[-1])))
    proof = StepProof(
        config(use_rollout_routing_replay=True, enable_r3_correctness_check=True),
        facts(moe_layer_numbers=LAYERS),
        SimpleNamespace(collect_evidence=lambda step: []),
        evidence=SimpleNamespace(),
        routes=SimpleNamespace(recorded=lambda prepared: None, read=lambda sample: sample),
        canaries=None,
    )
    prepared = SimpleNamespace(
        samples=[SimpleNamespace(sample=sample)], expectation=lambda recorded: None
    )
    proof.judge(4, prepared, SimpleNamespace(rechecked=lambda: rollout))
    # two that no server computed, and the prompt of another version
    assert (len(judged_by["rechecked"]), judged_by["missed"]) == (1, 3)


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
    assert [(r.sample_id, r.decoded.share) for r in records] == [(0, 0.0)]
    with pytest.raises(AssertionError):
        compare_rollout(
            4, rollout, [sample_of(), sample_of(7)], *how, log_probs=True, dtype="float32"
        )
    with pytest.raises(KeyError):
        whole = replace(rollout, parts=[again_of(sample_of(7))])
        compare_rollout(4, whole, [sample], *how, log_probs=True, dtype="float32")


def test_nothing_computed_again_is_no_evidence_and_no_known_noise_neither():
    assert judge_recheck([], 1, Suspicions()).verdict == "no evidence"
    record, failures = judged(sample_of(), again_of(sample_of(), rows=routes(1)), None)
    assert not failures and judge_recheck([record], 0, Suspicions()).verdict == "no evidence"


@pytest.mark.parametrize("beside", [[], [EXACT], [None], [EXACT, None]])
@pytest.mark.parametrize("noise", [EXACT, None])
@pytest.mark.parametrize("server", [0, 1])
def test_a_version_is_exact_and_fails_its_step_whatever_is_known_of_the_servers(
    server, noise, beside
):
    other = judged(sample_of(), again_of(sample_of(), server=server, held_version=9), noise)[0]
    sound = [judged(sample_of(), again_of(sample_of()), known)[0] for known in beside]
    for records in ([*sound, other], [other, *sound]):
        recheck = judge_recheck(records, 0, Suspicions())
        assert recheck.verdict == "failed" and [f.got for f in recheck.failures] == [9]


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
        "rows": 3 * 3 * 120,
        "rows_differ": 0,
        "log_probs": 180,
        "log_prob_off": 3 * 60 * 3e-7,
    }
    shown = CliRunner().invoke(main, ["check-evidence", str(run)]).output
    assert "3 samples rechecked: other experts in 0 of 1,080 rows" in shown


@pytest.mark.parametrize("run_saw_it", [True, False], ids=["in the run", "in the file"])
def test_a_layer_that_differs_fails_the_claim_with_step_and_layer(tmp_path, run_saw_it):
    wrong = {"decoded": rows_apart({2: 90})}

    def rechecked(step):
        return [comparison(step, **(wrong if step == 1 and run_saw_it else {}))]

    run = write_run(tmp_path / "run", rechecked=rechecked)
    if not run_saw_it:
        path = run / "evidence" / RECHECK_FILE
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1]["decoded"]["differ"]["2"] = 90
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = said(run)
    assert audit["verdict"] == "failed"
    assert {c for c, v in audit["claims"].items() if v == "failed"} == {CLAIM}
    found, *sums = audit["findings"]
    assert {(f["step"], f["claim"]) for f in sums} == ({(2, CLAIM)} if not run_saw_it else set())
    assert (found["step"], found["layer_number"], found["got"]) == (1, 2, "90")
    assert found["expected"] == "at most 80" and "sample 8 on server 0" in found["what"]


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
