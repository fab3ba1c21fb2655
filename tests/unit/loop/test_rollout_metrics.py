"""Numbers of a rollout, through the function that the loop calls."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.algo.rollouts import sample, scored
from tests.unit.config.test_config import config

from r3train.algo.reward_stats import group_stats
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.rank_zero import RankZero
from r3train.loop.prepare import train_samples
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.step_metrics import gap_warning, rollout_metrics, train_metrics
from r3train.loop.rollouts_only import generate_only
from r3train.loop.stop import StopSignal
from r3train.observe.metric_table import METRICS
from r3train.observe.metrics import RolloutsWithoutAdvantage, cut_answers, nothing_learned


def metrics(groups):
    samples, stats = train_samples(groups, AlgorithmSection(), 8)
    return rollout_metrics(0, stats, samples)


def test_pass_at_k_counts_answers_with_a_reward_of_1():
    got = metrics(scored([[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    # one of four passes: 1/4, 1/2, 1; two of four: 1/2, 5/6, 1
    assert got["rollout/pass_at_1"] == pytest.approx((1 / 4 + 1 / 2) / 3)
    assert got["rollout/pass_at_2"] == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert got["rollout/pass_at_4"] == pytest.approx(2 / 3)
    assert "rollout/pass_at_8" not in got


@pytest.mark.parametrize("other", [-0.1, 1.5])
def test_rewards_beyond_0_to_1_are_no_passes(other):
    assert group_stats(np.array([[1.0, other]])).pass_at_k == {}


def test_each_part_of_the_rewards_has_its_mean():
    groups = [
        [(sample(0, reward_parts=(1.0, 4.0)), 5.0), (sample(1, reward_parts=(0.0, 8.0)), 8.0)]
    ]
    samples, stats = train_samples(groups, AlgorithmSection(), 8)
    got = rollout_metrics(0, stats, samples, reward_keys=("right", "short"))
    assert (got["rollout/reward_mean_right"], got["rollout/reward_mean_short"]) == (0.5, 6.0)


def test_generation_alone_writes_the_mean_of_each_part_too(tmp_path):
    groups = [
        [(sample(0, reward_parts=(1.0, 4.0)), 5.0), (sample(1, reward_parts=(0.0, 8.0)), 8.0)]
    ]
    written = []

    class Source(RolloutSource):
        def next_batch(self, rollout_id, on_wait=None):
            return groups

    class Display:
        def __getattr__(self, name):
            return lambda *args, **options: None

    rank_zero = RankZero(
        servers=SimpleNamespace(fault_counts=dict),
        weights=None,
        rollouts=SimpleNamespace(start_producer=Source),
        display=Display(),
        metrics=SimpleNamespace(
            write=lambda _, record: written.append(record), write_samples=lambda *_: None
        ),
        evaluations=None,
    )
    settings = config(
        num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=2, reward_keys=["right", "short"]
    )
    generate_only(settings, tmp_path, rank_zero, StopSignal(1.0))
    [got] = written
    assert (got["rollout/reward_mean_right"], got["rollout/reward_mean_short"]) == (0.5, 6.0)


def test_lengths_and_truncated_answers():
    groups = [
        [(sample(0, 2), 0.0), (sample(1, 4), 0.0)],
        [(sample(2, 5), 0.0), (sample(3, 9), 1.0)],
    ]
    cut = [(replace(s, finish_reason="length"), reward) for s, reward in groups[1]]
    got = metrics([groups[0], cut])
    assert (got["rollout/response_len_median"], got["rollout/response_len_max"]) == (3.5, 8)
    assert (got["rollout/prompt_len_mean"], got["rollout/prompt_len_max"]) == (1.0, 1)
    assert (got["rollout/truncated"], got["rollout/truncated_share"]) == (2, 0.5)


def test_repetition_is_the_share_of_runs_of_four_that_came_before():
    def repeated(*response):
        tokens = np.array([99, *response], np.int32)
        one = replace(sample(0, len(tokens)), token_ids=tokens)
        return metrics([[(one, 0.0), (replace(one, sample_id=1), 0.0)]])["rollout/repetition"]

    assert repeated(1, 2, 3) == 0.0
    assert repeated(1, 2, 3, 4, 5, 6) == 0.0
    assert repeated(7, 7, 7, 7, 7, 7) == pytest.approx(2 / 3)  # three runs, one kind
    assert repeated(1, 2, 3, 4, 1, 2, 3, 4) == pytest.approx(1 / 5)
    assert repeated(4, 3, 2, 1, 1, 2, 3, 4) == 0.0  # order matters


def test_rollouts_in_a_row_without_an_advantage_are_said_while_they_happen():
    equal, other = scored([[1.0, 1.0], [0.5, 0.5]]), scored([[1.0, 1.0], [0.0, 1.0]])
    count = RolloutsWithoutAdvantage()
    groups = [equal, equal, other, *[equal] * 12]
    said = [count.warning(metrics(group)) for group in groups]
    assert [n for n, text in enumerate(said) if text] == [5, 12]  # the third and the tenth in a row
    assert "no sample of the last 3 rollouts had an advantage" in said[5]
    assert "in the last from 0.5 to 1.0" in said[5]
    assert not any(count.warning({"step": n}) for n in range(9)), "rollouts without the count"


def test_a_run_says_in_the_end_that_its_answers_grew_until_most_were_cut():
    rise = [{"step": n, "rollout/truncated_share": n / 19} for n in range(20)]
    assert cut_answers(rise).startswith("3% -> 97%")
    # of a fall, a rise to less than half, answers that were always cut, and no answers
    for records in (rise[::-1], rise[:10], rise[10:], [{"step": 0}]):
        assert cut_answers(records) == ""


def test_a_run_without_an_advantage_says_that_nothing_was_learned():
    equal = [metrics(scored([[1.0, 1.0], [0.0, 0.0]])) | {"step": n} for n in range(2)]
    assert equal[0]["rollout/taught_samples"] == 0
    assert "no answer had an advantage in any step" in nothing_learned(equal)
    other = metrics(scored([[1.0, 1.0], [0.0, 1.0]])) | {"step": 2}
    assert other["rollout/taught_samples"] == 2
    assert nothing_learned([*equal, other]) == ""
    assert (
        nothing_learned([{"step": 0, "train/loss": 1.0}]) == ""
    ), "a run before there was the count"


def test_a_masked_answer_is_as_stale_as_it_is():
    cut = replace(
        sample(0, 5),
        finish_reason="length",
        weight_versions=np.array([-1, 3, 3, 4, 4], np.int32),
    )
    new = replace(sample(1, 3), weight_versions=np.array([-1, 5, 5], np.int32))
    samples, stats = train_samples(
        [[(cut, 0.0), (new, 1.0)]], AlgorithmSection(mask_truncated=True), 8
    )
    got = rollout_metrics(5, stats, samples)
    assert (got["rollout/staleness_max"], got["rollout/spanning_samples"]) == (2, 1)


def test_a_maximum_of_several_optimizer_steps_is_the_largest():
    steps = [{"mine": 1.0, "loss": 1.0}, {"mine": 5.0, "loss": 3.0}]
    assert train_metrics(steps, ("mine",)) == {"train/mine": 5.0, "train/loss": 2.0}


TRAINED = {
    row.key.removeprefix("train/"): row.unit
    for rows in METRICS.values()
    for row in rows
    if row.key.startswith("train/") and not row.key.endswith(("_N", "_CLASS"))
}
# numbers of 1 and 3 of two optimizer steps, as their rollout has them: counts add up, other numbers have a mean
JOINED = {"tokens": 4.0, "steps": 4.0}
NO_MEAN = {"lr": 3.0, "log_prob_gap_p999": 3.0}


@pytest.mark.parametrize("name", TRAINED)
def test_numbers_of_several_optimizer_steps_are_joined_by_their_unit(name):
    expected = NO_MEAN.get(name, JOINED.get(TRAINED[name], 2.0))
    assert train_metrics([{name: 1.0}, {name: 3.0}]) == {f"train/{name}": expected}


def episode(sample_id, *turns, observed=2, **changes):
    """A sample of turns of so many tokens, with ``observed`` tokens between two."""
    versions = [-1]
    for length in turns:
        versions += [0] * length + [-1] * observed
    versions = np.array(versions[:-observed], np.int32)
    one = replace(sample(sample_id, len(versions)), weight_versions=versions, **changes)
    return replace(one, loss_mask=versions >= 0)


def test_turns_are_counted_and_lengths_leave_the_environments_tokens_out():
    groups = [[(episode(0, 3), 0.0), (episode(1, 2, 4, 1), 1.0)]]
    samples, stats = train_samples(groups, AlgorithmSection(), 20)
    got = rollout_metrics(0, stats, samples, turns=True)
    assert (got["rollout/turns_mean"], got["rollout/turns_max"]) == (2.0, 3)
    assert got["rollout/observation_len_mean"] == 2.0
    assert (got["rollout/response_len_mean"], got["rollout/response_len_max"]) == (5.0, 7)
    assert got["rollout/tokens"] == 10
    assert "rollout/turns_mean" not in metrics(groups), "without --environment"


def test_one_sample_a_turn_counts_its_episode_once():
    whole = episode(4, 2, 4, 1)
    steps = []
    for place, (start, end) in enumerate(((1, 3), (5, 9), (11, 12))):
        own = np.zeros(end, dtype=bool)
        own[start:] = True
        step = replace(
            whole,
            sample_id=4 + place,
            token_ids=whole.token_ids[:end],
            prompt_len=start,
            loss_mask=own,
            rollout_log_probs=whole.rollout_log_probs[:end],
            weight_versions=whole.weight_versions[:end],
            routed_experts=None,
            trajectory_id=4,
            is_last_step=place == 2,
        )
        steps.append((step, 1.0))
    other = [(replace(s, sample_id=s.sample_id + 10, trajectory_id=14), r) for s, r in steps]
    samples, stats = train_samples([[*steps, *other]], AlgorithmSection(), 20)
    got = rollout_metrics(0, stats, samples, turns=True)
    assert (got["rollout/turns_mean"], got["rollout/observation_len_mean"]) == (3.0, 4.0)
    assert got["rollout/response_len_mean"] == pytest.approx(7 / 3)


def test_a_turn_is_as_stale_as_its_own_tokens():
    """The prompt of a later turn holds the turns before, which are samples of their own."""
    versions = np.array([-1, 3, 3, -1, 4, 4, 5], np.int32)
    whole = replace(sample(0, 7), weight_versions=versions)
    turns = []
    for place, (start, end) in enumerate(((1, 3), (4, 7))):
        own = np.zeros(end, dtype=bool)
        own[start:] = True
        turns.append(
            replace(
                whole,
                sample_id=place,
                token_ids=whole.token_ids[:end],
                prompt_len=start,
                loss_mask=own,
                rollout_log_probs=whole.rollout_log_probs[:end],
                weight_versions=versions[:end],
                trajectory_id=0,
                is_last_step=place == 1,
            )
        )
    algorithm = AlgorithmSection(advantage_estimator="reinforce_plus_plus")
    samples, stats = train_samples([[(turn, 1.0) for turn in turns]], algorithm, 20)
    got = rollout_metrics(5, stats, samples)
    staleness = {k: v for k, v in got.items() if k.startswith("rollout/staleness_")}
    assert staleness == {
        "rollout/staleness_0": 0,
        "rollout/staleness_1": 1,
        "rollout/staleness_2": 1,
        "rollout/staleness_mean": 1.5,
        "rollout/staleness_max": 2,
    }
    assert got["rollout/spanning_samples"] == 1


def test_means_by_age_are_over_all_optimizer_steps_and_leave_out_ages_without_tokens():
    step = {"loss": 1.0, "loss_tokens_age_0": 3.0, "log_prob_gap_k1_age_0": 6.0}
    step |= {"loss_tokens_age_1": 0.0, "log_prob_gap_k1_age_1": 0.0}
    other = step | {"loss_tokens_age_0": 1.0, "log_prob_gap_k1_age_0": 4.0}
    assert train_metrics([step, other]) == {
        "train/loss": 1.0,
        "train/loss_tokens_age_0": 4.0,
        "train/log_prob_gap_k1_age_0": 2.5,
    }


def test_the_display_counts_tokens_of_its_own_wait_and_none_that_were_there_before():
    class Source:
        tokens = 900

        def stats(self):
            return {"generated_tokens": self.tokens, "buffered_groups": 1}

        def next_batch(self, rollout_id, on_wait):
            for _ in range(2):
                self.tokens += 50
                on_wait(self.stats())
            return scored([[1.0], [0.0]])

    shown = []
    display = SimpleNamespace(
        rollout_begin=lambda *_: None,
        train_update=lambda *_: None,
        rollout_update=lambda *done: shown.append(done),
    )
    RankZero(None, None, None, display, None, None).next_groups(Source(), 0, 2)
    assert shown == [(1, 50), (1, 100), (2, 100)]


def test_log_probs_of_another_model_are_told_with_their_gap():
    assert gap_warning(3, {}) is None and gap_warning(3, {"train/log_prob_gap_mean": 0.9}) is None
    text = gap_warning(3, {"train/log_prob_gap_mean": 2.07e27})
    assert text.startswith("step 3: train/log_prob_gap_mean is 2.07e+27, expected below 1")
