"""served: each of the six tests in a case that it must pass and in one that it must fail."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from r3train.proof.served_verdict import (
    CanaryNoise,
    CanaryStart,
    compare_servers,
    Difference,
    difference,
    inconclusive,
    judge_served,
    ServedRecord,
    ServerScores,
    statistics_again,
    TESTS,
)
from r3train.proof.suspicion import Suspicions
from r3train.types import CanaryScores, Scores

LAYERS, EXPERTS, TOPK, VOCAB, TOKENS = (2, 3), 16, 3, 200, 120
HALF = TOKENS // 2
TEXTS = [np.arange(n, n + TOKENS, dtype=np.int32) for n in range(4)]
NONE = Difference(0.0, 0.0, 0, 8 * (TOKENS - 1))
DRAWN = 8
# servers that repeat themselves and one another bit by bit, in float32
EXACT = CanaryNoise(NONE, NONE, 4e-6, 4e-6, 3e-5, 0.0, 1e-6, 0.0, 4000, 0)


def canary_scores(seed: int = 0, off: float = 0.0) -> list[CanaryScores]:
    """Of all texts; off: added to every log-prob."""
    random = np.random.default_rng(seed)
    found = []
    for _ in TEXTS:
        shape = (TOKENS + DRAWN - 1, 3, EXPERTS)
        rows = random.random(shape).argsort(-1)[..., :TOPK].astype(np.uint8)
        log_probs = (random.normal(-3, 1, TOKENS + DRAWN) + off).astype(np.float32)
        log_probs[0] = 0
        late = log_probs[HALF:TOKENS].copy()
        late[0] = 0
        given = rows[: TOKENS - 1]
        sampled = random.integers(0, VOCAB, DRAWN).astype(np.int32)
        early, warm = Scores(late, given, 0), Scores(late, given, HALF)
        found.append(CanaryScores(early, warm, Scores(log_probs, rows, 0, sampled)))
    return found


def read(version: int = 7, server: int = 0, seed: int = 7, of=None, actor=None) -> ServerScores:
    of = of or canary_scores(seed)
    return ServerScores(version, server, of, actor or [r.whole.log_probs for r in of])


def record(now=None, earlier=None, noise=EXACT, router=(952, 0), suspicions=None) -> ServedRecord:
    """Judged alone, and failed where it is suspect."""
    return compare_servers(
        now or read(),
        [read(6, seed=6)] if earlier is None else earlier,
        CanaryStart(TEXTS, [HALF] * 4, noise, LAYERS, EXPERTS, VOCAB),
        router,
        suspicions or Suspicions(1.0),
    )


def test_of(*records: ServedRecord) -> str:
    verdict = judge_served(records)
    assert (verdict.verdict == "failed") == bool(verdict.failures) == bool(verdict.decided_by)
    assert all(text.startswith(tuple(f"{t}: server " for t in TESTS)) for text in verdict.failures)
    return verdict.decided_by


test_of.__test__ = False


def changed(which: str, **fields) -> list[CanaryScores]:
    """Readings of which the first text's is another in ``which``."""
    first, *rest = canary_scores(7)
    return [replace(first, **{which: replace(getattr(first, which), **fields)}), *rest]


def test_sound_servers_pass_all_six():
    others = record(read(server=1))
    assert test_of(record(), others) == ""
    verdict = judge_served([record(), others])
    assert (verdict.verdict, verdict.servers, verdict.inconclusive) == ("passed", 2, 0)
    assert judge_served([]) is None


def test_EARLY_fails_where_the_first_request_finds_something_in_the_cache():
    assert test_of(record(read(of=changed("early", cached_tokens=HALF)))) == "EARLY"


def test_WARM_fails_where_a_cached_row_is_another_than_was_cached():
    rows = canary_scores(7)[0].early.rows.copy()
    rows[HALF - 1, 1] = [13, 14, 15]
    assert record(read(of=changed("warm", rows=rows))).warm_cached_rows == 1
    assert test_of(record(read(of=changed("warm", rows=rows)))) == "WARM"


def test_WARM_shows_nothing_where_other_requests_evicted_the_cached_half():
    of = record(read(of=changed("warm", cached_tokens=0)))
    assert test_of(of) == "" and of.warm_evicted == 1


def test_WARM_is_suspect_where_the_cached_half_is_much_farther_off_than_rounding():
    """In bfloat16 one of 245 sound updates had rounded the cached half otherwise, and 192 of them quintupled it in float32."""
    early = canary_scores(7)[0].early
    for off, expected in ((9e-6, ""), (3e-4, "WARM")):
        of = changed("warm", log_probs=early.log_probs + np.float32(off))
        assert test_of(record(read(of=of))) == expected
    rows = early.rows.copy()
    rows[HALF + 1 :, 1] = [13, 14, 15]
    other = record(read(of=changed("warm", rows=rows)))
    assert (
        other.warm.rows_differ > 50 and test_of(other) == ""
    ), "its own half is not what was cached"


def test_MOVED_fails_where_a_server_stands_still_and_the_actor_moved():
    still = read(6, of=canary_scores(7), actor=[r.whole.log_probs + 1e-3 for r in canary_scores(7)])
    noise = replace(EXACT, gap_mean=0.05, gap_max=0.5)
    assert test_of(record(earlier=[still], noise=noise)) == "MOVED"
    assert test_of(record(earlier=[read(6, seed=6), still], noise=noise)) == "MOVED"


def test_MOVED_is_inconclusive_and_counted_where_the_actor_hardly_moved():
    actor = [r.whole.log_probs.copy() for r in canary_scores(7)]
    actor[0][1:] += 1e-3  # a quarter of the tokens
    found = record(earlier=[read(6, of=canary_scores(7), actor=actor)])
    assert found.earlier[0].actor_moved == 0.25 and inconclusive(found) == 1
    verdict = judge_served([found])
    assert (verdict.verdict, verdict.inconclusive) == ("passed", 1)


def test_MOVED_passes_where_one_bit_or_one_expert_moved():
    actor = [r.whole.log_probs + 1e-3 for r in canary_scores(7)]
    bit = canary_scores(7)[0].whole.log_probs.copy()
    bit[9] = np.nextafter(bit[9], 0)
    rows = canary_scores(7)[0].whole.rows.copy()
    rows[9, 1] = [13, 14, 15]
    for fields in ({"log_probs": bit}, {"rows": rows}):
        assert test_of(record(earlier=[read(6, of=changed("whole", **fields), actor=actor)])) == ""


def test_MOVED_fails_where_a_server_moves_as_little_as_its_batches_make_it_and_the_actor_by_more():
    noise = replace(EXACT, repeat=Difference(2e-5, 1e-6, 1, 952), gap_mean=1.0, decoded_mean=1.0)
    was = [r.whole.log_probs + np.float32(1e-6) for r in canary_scores(7)]
    of = [replace(r, whole=replace(r.whole, log_probs=w)) for r, w in zip(canary_scores(7), was)]
    moves = {1e-3: "MOVED", 5e-5: ""}  # of the actor: four times the largest noise is a move
    for nats, test in moves.items():
        still = read(
            6, of=of, actor=[r.whole.log_probs + np.float32(nats) for r in canary_scores(7)]
        )
        assert test_of(record(earlier=[still], noise=noise)) == test


def off_by(nats: float) -> ServerScores:
    return read(actor=[r.whole.log_probs + np.float32(nats) for r in canary_scores(7)])


def test_BOUND_is_suspect_where_the_mean_is_far_above_the_usual_and_not_by_one_token():
    assert test_of(record(off_by(6e-5))) == "BOUND"
    assert test_of(record(off_by(9e-6))) == ""
    one = [r.whole.log_probs.copy() for r in canary_scores(7)]
    one[0][5] -= 6
    assert test_of(record(read(actor=one))) == ""


def test_BOUND_is_suspect_for_some_updates_before_it_fails_and_says_so():
    suspicions, found = Suspicions(5.0), []
    for _ in range(5):
        found.append(judge_served([record(off_by(6e-5), suspicions=suspicions)]))
    assert [of.verdict for of in found] == ["suspect"] * 4 + ["failed"]
    assert found[0].suspects and not found[0].failures and not found[0].decided_by
    assert found[-1].decided_by == "BOUND" and not found[-1].suspects
    one_good = judge_served([record(suspicions=suspicions)])
    assert one_good.verdict == "suspect"


def test_each_server_has_sums_of_its_own():
    suspicions = Suspicions(5.0)
    for _ in range(4):
        bad, good = record(off_by(6e-5), suspicions=suspicions), read(server=1)
        assert judge_served([record(good, suspicions=suspicions)]).verdict == "passed"
    assert judge_served([bad]).verdict == "suspect"


def test_a_limit_of_0_never_fails():
    suspicions = Suspicions(0.0)
    verdicts = {
        judge_served([record(off_by(6e-5), suspicions=suspicions)]).verdict for _ in "x" * 20
    }
    assert verdicts == {"suspect"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_log_prob_that_is_not_finite_is_no_rounding(value):
    one = [r.whole.log_probs.copy() for r in canary_scores(7)]
    one[3][-1] = value
    found = record(read(actor=one), suspicions=Suspicions(5.0))
    assert test_of(found) == "BOUND" and found.not_finite == 1


def test_BOUND_is_never_below_the_floor_of_servers_that_store_less():
    assert test_of(record(off_by(1e-4))) == "BOUND"
    floor = replace(EXACT, gap_floor=1e-3)
    assert test_of(record(off_by(1e-4), noise=floor)) == ""
    assert test_of(record(off_by(1e-3), noise=floor)) == "BOUND"


def test_a_start_that_was_bit_equal_allows_the_least_mean():
    noise = replace(EXACT, gap_mean=0.0, gap_max=0.0)
    assert test_of(record(off_by(1e-6), noise=noise)) == ""
    assert test_of(record(off_by(5e-4), noise=noise)) == "BOUND"


def test_ROUTER_is_suspect_where_the_actors_routers_leave_more_rows_than_is_usual():
    assert test_of(record(router=(4096, 7))) == ""
    assert test_of(record(router=(4096, 20))) == "ROUTER"
    rounding = replace(EXACT, rows_left=72)  # 1.8%
    assert test_of(record(router=(4096, 130), noise=rounding)) == ""
    assert test_of(record(router=(4096, 480), noise=rounding)) == "ROUTER"


def test_MOVED_needs_bit_equal_readings_and_an_actor_that_moved_beyond_its_own_noise():
    actor = [r.whole.log_probs + 1 for r in canary_scores(7)]
    noise = replace(EXACT, repeat=Difference(1e-6, 1e-7, 0, 952))
    same, near = (read(6, of=canary_scores(7, off=off), actor=actor) for off in (0.0, 2e-6))
    assert test_of(record(earlier=[same], noise=noise)) == "MOVED"
    assert test_of(record(earlier=[near], noise=noise)) == ""
    still = record(earlier=[same], noise=replace(noise, actor_repeat=2.0))
    assert still.earlier[0].actor_moved == 0


def test_log_probs_behind_a_row_of_other_experts_are_not_compared():
    one, other = canary_scores(7)[0].whole, canary_scores(8)[0].whole
    rows = one.rows.copy()
    rows[20, 1] = [13, 14, 15]
    log_probs = one.log_probs.copy()
    log_probs[21:] += 1
    assert difference([(one, Scores(log_probs, rows, 0))], LAYERS) == Difference(0.0, 0.0, 1, 238)
    log_probs[20] += 1
    assert difference([(one, Scores(log_probs, rows, 0))], LAYERS).log_prob_off > 0.9
    assert difference([(one, other)], LAYERS).rows_differ > 200


def test_the_order_of_a_rows_experts_and_dense_layers_are_no_difference():
    one = canary_scores(7)[0].whole
    rows = one.rows[..., ::-1].copy()
    rows[:, 0] = 0  # layer 1 is dense
    assert difference([(one, replace(one, rows=rows))], LAYERS) == Difference(0.0, 0.0, 0, 238)


def test_the_first_test_in_order_decides_and_all_are_named():
    off = [r.whole.log_probs + 1 for r in canary_scores(7)]
    bad = record(read(of=changed("early", cached_tokens=3), actor=off), router=(900, 300))
    verdict = judge_served([bad])
    assert [text.split(":")[0] for text in verdict.failures] == [
        "EARLY",
        "BOUND",
        "DECODED",
        "ROUTER",
    ]
    assert verdict.decided_by == "EARLY"


def test_coverage_counts_pairs_and_ids_that_the_canaries_use():
    found = record().coverage
    assert (found.experts, found.vocabulary) == (2 * EXPERTS, VOCAB)
    assert found.tokens_used == TOKENS + 3 and 0 < found.experts_used <= found.experts


def test_a_record_survives_its_line():
    one = record()
    line = msgspec.json.encode(one)
    assert msgspec.json.decode(line, type=ServedRecord) == one


def test_the_sums_of_a_record_are_those_that_its_values_add_up_to():
    suspicions, again = Suspicions(5.0), Suspicions(5.0)
    for nats in (1e-6, 9e-5, 2e-6, 9e-5):
        found = record(off_by(nats), router=(952, 3), suspicions=suspicions)
        assert statistics_again(found, again) == found.statistics
    assert [s.name for s in found.statistics if s.sum > 0] == ["BOUND", "DECODED"]


def test_DECODED_is_suspect_where_drawn_tokens_alone_are_far_off():
    """Weights of an update that a prefill has and a decode has not."""
    sound = [r.whole.log_probs for r in canary_scores(7)]
    of = [
        replace(
            r, whole=replace(r.whole, log_probs=np.append(r.whole.log_probs[:TOKENS], actor + 1e-3))
        )
        for r, actor in zip(canary_scores(7), (a[TOKENS:] for a in sound))
    ]
    found = record(read(of=of, actor=sound))
    assert test_of(found) == "DECODED" and found.num_decoded == 4 * DRAWN
    by_name = {s.name: s for s in found.statistics}
    assert by_name["BOUND"].sum == 0 < by_name["DECODED"].sum
    # what drawn tokens usually have is measured on such tokens
    usual = replace(EXACT, decoded_mean=1e-3)
    assert test_of(record(read(of=of, actor=sound), noise=usual)) == ""


def test_drawn_tokens_are_no_difference_of_two_readings():
    one = canary_scores(7)[0].whole
    log_probs, rows = one.log_probs.copy(), one.rows.copy()
    log_probs[TOKENS:] += 1
    rows[TOKENS - 1 :] = (rows[TOKENS - 1 :] + 1) % EXPERTS
    other = Scores(log_probs, rows, 0, one.sampled + 1)
    assert difference([(one, other)], LAYERS).is_none
    # scores of before canaries drew any
    none = Scores(log_probs[:TOKENS], rows[: TOKENS - 1], 0)
    assert difference([(one, none)], LAYERS).is_none


def test_a_drawn_token_without_a_finite_log_prob_is_never_sound():
    log_probs = canary_scores(7)[0].whole.log_probs.copy()
    log_probs[-1] = np.nan
    assert record(read(of=changed("whole", log_probs=log_probs))).not_finite == 1
