"""The judge on every kind of record: recomputations, copies, sampling masks.

Each test starts from a step that passes, changes one thing, and names the quantities that fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest

from r3train.proof.suspicion import Suspicions
from r3train.proof.step_verdict import (
    agreement_shares,
    COUNTS,
    expected_calls,
    expert_id_sums,
    Failure,
    judge_step,
    Recheck,
    StepExpectation,
    StepTotals,
    StepVerdict,
    StreamExpectation,
)
from r3train.types import ReplayEvidence, RouteShape, SAMPLING_MASK
from r3train.types import SAMPLING_MASK_LAYER as OUTPUT
from tests.unit.evidence_dirs import record

SHAPE = RouteShape(2, 2, 8)
PASSES = ("old_log_prob", "ref_log_prob", "train")
ROWS, FILLED, PADDING, KEPT = 100, 4, 6, 50
# of the actor's own weight version: rows of routers, and tokens with a sampling mask
CURRENT = {"old_log_prob": 60, "ref_log_prob": 0, "train": 40}
KEPT_CURRENT = {"old_log_prob": 30, "ref_log_prob": 0, "train": 20}


def right_step() -> list[ReplayEvidence]:
    """Two microbatches of two layers and of sampling masks; layer 1 is recomputed; rank 1 sees copies."""
    calls = []
    for replay_pass in PASSES:
        for microbatch in (0, 1):
            for layer, stage in (
                (1, "replay_forward"),
                (2, "replay_forward"),
                (1, "replay_backward"),
            ):
                if stage == "replay_backward" and replay_pass != "train":
                    continue
                current = CURRENT[replay_pass]
                calls.append(
                    record(
                        0,
                        0,
                        replay_pass,
                        layer,
                        stage=stage,
                        microbatch_id=microbatch,
                        num_rows=ROWS + FILLED + PADDING,
                        rows_replayed=ROWS,
                        rows_filled=FILLED,
                        rows_padding=PADDING,
                        map_sum=2 * (ROWS + FILLED + PADDING),
                        fingerprint=(1 << 63) + layer,
                        rows_current=current,
                        rows_current_equal=current,
                        rows_current_mismatch=0,
                    )
                )
            current = KEPT_CURRENT[replay_pass]
            calls.append(
                record(
                    0,
                    0,
                    replay_pass,
                    OUTPUT,
                    stream=SAMPLING_MASK,
                    microbatch_id=microbatch,
                    rows_replayed=KEPT,
                    rows_filled=ROWS + FILLED - KEPT,
                    num_rows=ROWS + FILLED + PADDING,
                    rows_padding=PADDING,
                    replay_idx_sum=321,
                    map_sum=321,
                    fingerprint=5,
                    rows_equal=40,
                    rows_overlap=9,
                    rows_mismatch=1,
                    rows_current=current,
                    rows_current_equal=current,
                    rows_current_mismatch=0,
                )
            )
    # a rank that sees copies of rank 0's tokens: its calls and their errors count, its rows do not
    return calls + [replace(c, rank=1, counts_tokens=False, fingerprint=77) for c in calls]


def expectation(routes=None, masks=None) -> StepExpectation:
    """Expectation of ``right_step``; routes, masks: changes of their streams."""
    num_rows = 2 * (ROWS + FILLED)
    expected = {
        "routes": dict(
            fingerprints={1: 2, 2: 4},  # of two microbatches, mod 2^64
            rows_replayed={1: 2 * ROWS, 2: 2 * ROWS},
            rows_filled={1: 2 * FILLED, 2: 2 * FILLED},
            rows_without_choice=2 * FILLED,
            rows_current={p: 2 * n for p, n in CURRENT.items()},
            calls=expected_calls((1, 2), 4, PASSES, (1,)),
        )
        | (routes or {}),
        SAMPLING_MASK: dict(
            fingerprints={OUTPUT: 10},
            rows_replayed={OUTPUT: 2 * KEPT},
            rows_filled={OUTPUT: num_rows - 2 * KEPT},
            rows_without_choice=None,
            rows_current={p: 2 * n for p, n in KEPT_CURRENT.items()},
            calls=expected_calls((OUTPUT,), 4, PASSES),
        )
        | (masks or {}),
    }
    return StepExpectation(
        step=3,
        streams={name: StreamExpectation(**fields) for name, fields in expected.items()},
    )


def judged(calls, threshold: float = 0.03, limit: float = 1.0, **changes) -> StepVerdict:
    """limit: of suspicion; at 1 the first suspect step fails."""
    totals = StepTotals(SHAPE)
    for call in calls:
        totals.add(call)
    first_fails = Suspicions(limit, calibrating=0)
    return judge_step(
        totals, expectation(**changes), SHAPE, mismatch_threshold=threshold, suspicions=first_fails
    )


def at(
    calls: list[ReplayEvidence], change: Callable[[ReplayEvidence], dict], **place
) -> list[ReplayEvidence]:
    """The calls, the first one at ``place`` changed."""
    found = [i for i, c in enumerate(calls) if all(getattr(c, k) == v for k, v in place.items())]
    changed = list(calls)
    changed[found[0]] = replace(calls[found[0]], **change(calls[found[0]]))
    return changed


def test_a_right_step_passes_and_its_counts_are_those_of_router_calls_of_ranks_that_count():
    verdict = judged(right_step())
    assert verdict.passed and not verdict.failures and verdict.stale_warning is None
    calls = 2 * (3 * 2 + 1)  # microbatches x (passes x layers + the recomputation)
    assert verdict.counts["num_calls"] == verdict.counts["num_calls_expected"] == 2 * calls
    assert verdict.counts["rows_replayed"] == calls * ROWS
    assert verdict.counts["rows_current"] == 2 * (2 * 60 + 3 * 40)
    assert verdict.counts["rows_mismatch"] == calls  # without that of sampling masks
    assert set(verdict.counts) == {*COUNTS, "num_calls", "num_calls_expected"}


def test_agreement_is_that_of_the_first_forwards_and_of_sampling_mask_there():
    shares = judged(right_step()).agreement
    compared = 2 * 2 * ROWS  # layers x microbatches x rows
    assert shares["equal"] == 2 * 2 * 90 / compared and shares["mismatch"] == 4 / compared
    assert shares["control_token_plus"] == 2 * 2 * 21 / compared
    assert shares["current_equal"] == 1.0 and shares["current_mismatch"] == 0.0
    assert shares["stale_equal"] == (90 - 60) / 40 and shares["stale_mismatch"] == 1 / 40
    assert shares["kept_equal"] == 40 / 50 and shares["kept_mismatch"] == 1 / 50
    assert shares["chance_equal"] == pytest.approx(1 / 28)
    # without an old-log-prob pass the train forward is the first
    calls = [c for c in right_step() if c.replay_pass == "train"]
    route_calls = expected_calls((1, 2), 4, ("train",), (1,))
    mask_calls = expected_calls((OUTPUT,), 4, ("train",))
    verdict = judged(
        calls,
        routes={"calls": route_calls, "rows_current": {"train": 80}},
        masks={"calls": mask_calls, "rows_current": {"train": 40}},
    )
    assert verdict.passed and verdict.agreement["stale_equal"] == (90 - 40) / 60


def test_no_row_has_no_shares_and_rows_of_one_kind_have_no_shares_of_the_other():
    zero = StepTotals(SHAPE).counters(("train", "routes", "replay_forward", 1))
    assert agreement_shares([zero], SHAPE) == {}
    whole = {**zero, "rows_replayed": 10, "rows_current": 12, "rows_equal": 5}
    shares = agreement_shares([whole], SHAPE)  # of those current, two have a missing slot
    assert shares["equal"] == 0.5 and "stale_equal" not in shares
    stale = agreement_shares([{**whole, "rows_current": 0}], SHAPE)
    assert stale["stale_equal"] == 0.5 and "current_equal" not in stale


FAULTS = {
    "padding for rows": (
        lambda c: {"rows_replayed": c.rows_replayed - 2, "rows_padding": c.rows_padding + 2},
        {"rows_replayed", "rows_compared"},
    ),
    "filled for rows": (
        lambda c: {
            "rows_replayed": c.rows_replayed - 2,
            "rows_filled": c.rows_filled + 2,
            "rows_equal": c.rows_equal - 2,
        },
        {"rows_replayed", "rows_filled"},
    ),
    "a row more": (lambda c: {"num_rows": c.num_rows + 1}, {"row_kinds_off", "map_deviation"}),
    "a row less": (lambda c: {"num_rows": c.num_rows - 1}, {"row_kinds_off", "map_deviation"}),
    "a choice of the map": (lambda c: {"map_sum": c.map_sum + 1}, {"map_deviation"}),
    "a choice less": (lambda c: {"map_sum": c.map_sum - 1}, {"map_deviation"}),
    "top-k": (
        lambda c: {"topk": 3, "map_sum": 3 * c.num_rows},
        {"topk_off"},
    ),
    "ids too small": (lambda c: {"replay_idx_sum": c.num_rows - 1}, {"replay_idx_sum_off"}),
    "ids too large": (lambda c: {"replay_idx_sum": 13 * c.num_rows + 1}, {"replay_idx_sum_off"}),
    "duplicates": (lambda c: {"duplicate_rows": 1}, {"duplicate_rows"}),
    "native": (
        lambda c: {"rows_native": 2, "rows_padding": c.rows_padding - 2},
        {"rows_native"},
    ),
    "native, and served nothing": (
        lambda c: {
            "rows_native": 2,
            "rows_padding": c.rows_padding - 2,
            "replay_idx_sum": 0,
        },
        {"rows_native"},
    ),
    "recomputed": (lambda c: {"rows_recompute_differ": 1}, {"rows_recompute_differ"}),
    "fingerprint": (lambda c: {"fingerprint": c.fingerprint + 1}, {"fingerprint"}),
    "current": (lambda c: {"rows_current": c.rows_current + 1}, {"rows_current"}),
    "more current than rows": (
        lambda c: {"rows_current": ROWS + FILLED + 1},
        {"rows_current", "part_rows_off"},
    ),
    "more current compared than current": (
        lambda c: {"rows_current_mismatch": 1},
        {"part_rows_off"},
    ),
    "more current equal than equal": (
        lambda c: {"rows_equal": 59, "rows_overlap": 40, "rows_current": 60},
        {"part_rows_off"},
    ),
    "more current mismatch than mismatch": (
        lambda c: {"rows_current_mismatch": 2, "rows_current_equal": 50},
        {"part_rows_off"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_call_of_an_old_log_prob_pass_fails_its_own_quantities(fault):
    change, what = FAULTS[fault]
    place = dict(replay_pass="old_log_prob", stage="replay_forward", layer_number=2, rank=0)
    failures = judged(at(right_step(), change, **place), threshold=1.0).failures
    assert {f.what for f in failures} == what
    assert {(f.replay_pass, f.stage, f.layer_number) for f in failures} == {
        ("old_log_prob", "replay_forward", 2)
    }


@pytest.mark.parametrize(
    "change",
    [
        {"rows_current": ROWS + FILLED},  # the missing slots' rows among them
        {"replay_idx_sum": ROWS + FILLED + PADDING},
        {"replay_idx_sum": 13 * (ROWS + FILLED + PADDING)},
    ],
    ids=str,
)
def test_the_most_and_the_least_that_a_call_can_have_pass(change):
    place = dict(replay_pass="old_log_prob", stage="replay_forward", layer_number=2, rank=0)
    failed = judged(at(right_step(), lambda c: change, **place), threshold=1.0).failures
    assert not {f.what for f in failed} - {"rows_current"}


@pytest.mark.parametrize(
    "name, counts",
    [
        ("duplicate_rows", True),
        ("rows_recompute_differ", False),
        ("rows_mismatch", False),
        ("rows_current", False),
        ("fingerprint", False),
        ("control_token_plus", False),
    ],
)
def test_of_a_rank_that_sees_copies_calls_and_their_errors_count_alone(name, counts):
    calls = right_step()
    place = dict(replay_pass="train", stage="replay_forward", layer_number=1, rank=1)
    changed = at(calls, lambda c: {name: getattr(c, name) + 1}, **place)
    assert {f.what for f in judged(changed, threshold=1.0).failures} == (
        {name} if counts else set()
    )
    native = at(calls, lambda c: {"rows_native": 1, "rows_padding": c.rows_padding - 1}, **place)
    assert {f.what for f in judged(native).failures} == {"rows_native"}
    kinds = at(calls, lambda c: {"rows_padding": c.rows_padding + 1}, **place)
    assert {f.what for f in judged(kinds).failures} == {"row_kinds_off"}
    maps = at(calls, lambda c: {"map_sum": c.map_sum - 1}, **place)
    assert {f.what for f in judged(maps).failures} == {"map_deviation"}
    assert {f.what for f in judged(calls[:-1]).failures} == {"num_calls"}


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda c: {"map_sum": c.map_sum + 1}, {"map_deviation"}),
        (lambda c: {"map_sum": 322, "replay_idx_sum": 322}, set()),  # as many are left as kept
        (lambda c: {"replay_idx_sum": 10**6, "map_sum": 10**6}, set()),  # no sum of expert ids
        (lambda c: {"fingerprint": 6}, {"fingerprint"}),
        (lambda c: {"rows_current": c.rows_current + 1}, {"rows_current"}),
        (
            lambda c: {"rows_native": 1, "rows_filled": c.rows_filled - 1},
            {"rows_native", "rows_filled"},
        ),
        (lambda c: {"duplicate_rows": 1}, {"duplicate_rows"}),
        (lambda c: {"rows_equal": 39}, {"rows_compared"}),
    ],
)
def test_a_fault_in_sampling_mask_fails_its_own_quantities(change, what):
    place = dict(replay_pass="train", stream=SAMPLING_MASK, rank=0)
    failures = judged(at(right_step(), change, **place), threshold=1.0).failures
    assert {f.what for f in failures} == what
    assert {f.layer_number for f in failures} <= {OUTPUT}


@pytest.mark.parametrize("never", [2 * FILLED - 1, 2 * FILLED + 1, None])
def test_rows_that_are_filled_are_those_that_no_server_computed(never):
    failures = judged(right_step(), routes={"rows_without_choice": never}).failures
    assert {f.what for f in failures} == ({"rows_left_out"} if never else set())
    assert SAMPLING_MASK not in {f.stream for f in failures}
    assert {f.got for f in failures} == ({2 * FILLED - never} if never else set())


def test_the_sums_of_distinct_expert_ids():
    assert expert_id_sums(10, 4, 16) == (10 * (0 + 1 + 2 + 3), 10 * (15 + 14 + 13 + 12))
    assert expert_id_sums(1, 1, 5) == (0, 4) and expert_id_sums(0, 8, 64) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"replay_pass": "old_log_prob", "stage": "replay_backward"},
        {"layer_number": 5},
        {"stream": SAMPLING_MASK, "layer_number": 2, "map_sum": 777},
    ],
    ids=str,
)
def test_a_call_in_a_place_where_nobody_expected_one_fails(change):
    calls = right_step()
    (extra, *_) = [c for c in calls if (c.replay_pass, c.layer_number) == ("old_log_prob", 2)]
    verdict = judged([*calls, replace(extra, **change)], threshold=1.0)
    failure = verdict.failures[-1]
    assert not verdict.passed and (failure.what, failure.got, failure.expected) == (
        "num_calls",
        1,
        0,
    )
    place = attrgetter("replay_pass", "stream", "stage", "layer_number")
    assert place(failure) == place(replace(extra, **change))


def test_calls_of_a_pass_that_nobody_expected_fail():
    calls = right_step()
    two = ("old_log_prob", "train")
    only = expectation(
        routes={"calls": expected_calls((1, 2), 4, two, (1,))},
        masks={"calls": expected_calls((OUTPUT,), 4, two)},
    )
    totals = StepTotals(SHAPE)
    for call in calls:
        totals.add(call)
    verdict = judge_step(totals, only, SHAPE, mismatch_threshold=1.0)
    assert {(f.replay_pass, f.what, f.got, f.expected) for f in verdict.failures} == {
        ("ref_log_prob", "num_calls", 4, 0)
    }
    assert not verdict.passed
    claim, text = verdict.failed_claim()
    assert claim == "claim"
    assert "step 3:\n  ref_log_prob/replay_forward layer 1: num_" in text


PLACE = dict(replay_pass="old_log_prob", stage="replay_forward", layer_number=1, rank=0)


def mismatching(n: int) -> Callable[[ReplayEvidence], dict]:
    """Of 60 current rows of a call n share no expert with the trainer's own choice, and one of the others."""
    return lambda c: {
        "rows_mismatch": n + 1,
        "rows_equal": 90 - n,
        "rows_current_mismatch": n,
        "rows_current_equal": 60 - n,
    }


def kept_mismatching(n: int) -> Callable[[ReplayEvidence], dict]:
    return lambda c: {
        "rows_mismatch": n + 1,
        "rows_equal": 40 - n,
        "rows_current_mismatch": n,
        "rows_current_equal": 20 - n,
    }


def test_a_share_above_the_threshold_is_suspect_and_fails_where_it_lasts():
    suspicions, verdicts = Suspicions(5.0, calibrating=0), []
    totals = StepTotals(SHAPE)
    in_layer_2 = at(right_step(), mismatching(16), **{**PLACE, "layer_number": 2})
    for call in at(in_layer_2, mismatching(16), **PLACE):
        totals.add(call)
    for _ in range(5):
        verdict = judge_step(
            totals, expectation(), SHAPE, mismatch_threshold=0.01, suspicions=suspicions
        )
        verdicts.append(verdict.verdict)
    assert verdicts == ["suspect"] * 4 + ["failed"] and not verdict.failures
    above, _ = verdict.above_threshold
    assert (above.what, above.got, above.expected) == ("rows_current_mismatch", 16, 1.2)
    claim, text = verdict.failed_claim()
    assert claim == "threshold" and text == verdict.threshold_error
    assert text.startswith(
        "R3 mismatch tokens (16) > threshold (1.2) at step 3, old_log_prob/replay_forward, layer 1, of 120"
    )
    assert "of 80 rows of other weights, which are not judged, 2 mismatch" in text


def test_a_share_that_is_wrong_from_the_first_step_on_does_not_become_usual():
    """Half of a sequence's rows on the wrong context-parallel rank gave 8% once: some share an expert by chance."""
    suspicions, verdicts = Suspicions(5.0), []
    totals = StepTotals(SHAPE)
    for call in right_step():
        wrong = call.stream != SAMPLING_MASK and call.replay_pass == PLACE["replay_pass"]
        totals.add(replace(call, **mismatching(8)(call)) if wrong else call)
    for _ in range(24):
        verdict = judge_step(
            totals, expectation(), SHAPE, mismatch_threshold=0.01, suspicions=suspicions
        )
        verdicts.append(verdict.verdict)
    assert verdicts[:8] == ["passed"] * 8 and verdicts.index("failed") < 24, verdict.statistics


def test_a_share_that_the_threshold_allows_and_a_few_rows_are_nothing():
    for n, threshold in ((3, 0.05), (2, 0.0)):
        verdict = judged(at(right_step(), mismatching(n), **PLACE), threshold=threshold)
        assert verdict.verdict == "passed" and not verdict.above_threshold


def test_sampling_masks_are_judged_by_the_threshold_too():
    kept = dict(replay_pass="train", stream=SAMPLING_MASK, rank=0)
    verdict = judged(at(right_step(), kept_mismatching(20), **kept), threshold=0.001)
    assert [f.stream for f in verdict.above_threshold] == [SAMPLING_MASK]
    # the place that is farthest above is the one that the error names
    both = at(at(right_step(), mismatching(20), **PLACE), kept_mismatching(20), **kept)
    verdict = judged(both, threshold=0.001)
    assert len(verdict.above_threshold) == 2 and "sampling_mask" in str(verdict.above_threshold[0])


@pytest.mark.parametrize("n, passes", [(16, True), (17, False)])
def test_one_layer_with_a_quarter_of_chances_mismatches_fails_at_once(n, passes):
    """With 8 experts and top 2 a random choice shares none in 53.6% of the rows."""
    calls = at(right_step(), mismatching(n), **PLACE)
    verdict = judged(calls, threshold=0.01, limit=0.0)
    assert verdict.passed == passes, (verdict.threshold_error, n / 120)


def test_rows_of_other_weights_above_the_share_are_a_warning_that_names_the_worst_place():
    def stale(n):
        return lambda c: {"rows_mismatch": n, "rows_equal": 91 - n}

    place = dict(stage="replay_forward", rank=0)
    old = dict(place, replay_pass="old_log_prob", layer_number=1)
    train = dict(place, replay_pass="train", layer_number=2)
    # each of a second microbatch adds one of 40 and 60 rows
    assert judged(at(right_step(), stale(3), **old), threshold=0.05).stale_warning is None
    verdict = judged(at(right_step(), stale(4), **old), threshold=0.05)
    assert verdict.passed and "5 of 80 rows at step 3, old_log_prob/replay_forward, layer 1" in (
        verdict.stale_warning
    )
    # 13 of 80 rows are a larger share than 15 of 120, and a smaller one than 21 of 120
    for n, worst in (
        (14, "13 of 80 rows at step 3, old_log_prob/replay_forward, layer 1"),
        (20, "21 of 120 rows at step 3, train/replay_forward, layer 2"),
    ):
        both = at(at(right_step(), stale(12), **old), stale(n), **train)
        assert worst in judged(both, threshold=0.05).stale_warning
    # the reference's own weights and sampling masks are not those that grow stale
    reference = dict(place, replay_pass="ref_log_prob", layer_number=1)
    assert judged(at(right_step(), stale(50), **reference), threshold=0.05).stale_warning is None
    kept = dict(replay_pass="old_log_prob", stream=SAMPLING_MASK, rank=0)

    def of_kept(c):
        return {"rows_mismatch": 20, "rows_equal": 30, "rows_overlap": 0}

    assert judged(at(right_step(), of_kept, **kept), threshold=0.05).stale_warning is None


def test_a_failure_ends_a_job_with_the_first_eight_and_the_number_of_the_others():
    failures = [
        Failure("train", "routes", "replay_forward", n, "num_calls", n, 0) for n in range(1, 12)
    ]

    def text(found, **more) -> str:
        claim, said = StepVerdict(3, found, [], None, {}, **more).failed_claim()
        assert claim == "claim"
        return said

    assert text(failures[:1]) == (
        "R3 check failed at step 3:\n  train/replay_forward layer 1: num_calls is 1, expected 0"
    )
    assert "more" not in text(failures[:8]) and text(failures[:8]).count("\n") == 8
    assert text(failures[:9]).endswith("layer 8: num_calls is 8, expected 0\n  and 1 more")
    assert text(failures).endswith("and 3 more")
    untrue = Recheck("failed", 1, 0, failures[:1])
    assert text([], recheck=untrue).endswith("num_calls is 1, expected 0")
    assert not StepVerdict(3, [], [], None, {}, recheck=untrue).passed
    sound = StepVerdict(3, [], [], None, {}, recheck=Recheck("passed", 1, 0, []))
    assert sound.passed and sound.failed_claim() == ("", "")
    assert StepVerdict(3, [], [], None, {}).failed_claim() == ("", "")


def test_expected_calls_are_those_of_each_layer_and_again_of_recomputed_ones_in_train():
    calls = expected_calls((2, 3), 12, ("old_log_prob", "train"), (1, 3))
    forward = {2: 12, 3: 12}
    assert calls == {
        "old_log_prob": {"replay_forward": forward, "replay_backward": {}},
        "train": {"replay_forward": forward, "replay_backward": {3: 12}},
    }
    assert expectation(routes={"calls": calls}).total_calls() == 12 * 5


def test_a_table_holds_every_place_and_counter_and_totals_merge():
    one, other = StepTotals(SHAPE), StepTotals(SHAPE)
    calls = right_step()
    for i, call in enumerate(calls):
        (one if i % 2 else other).add(call)
    whole = StepTotals(SHAPE)
    for call in calls:
        whole.add(call)
    again = StepTotals.from_table(one.to_table(PASSES) + other.to_table(PASSES), PASSES, SHAPE)
    assert again.cells == whole.cells
    one.merge(other)
    assert one.cells == whole.cells
    place = "train", "routes", "replay_backward"
    assert again.counters((*place, 2)) == dict.fromkeys(again.counters((*place, 1)), 0)
