"""An episode that ends because what its environment says does not fit is counted as cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.environments.test_environments import Script, play
from tests.unit.generation.test_stitch import segment, start, with_kept
from tests.fakes.server import SimulatedEngine

from r3train.algo.trajectories import without_truncated
from r3train.engine.backend import SamplingParams
from r3train.generation.conversation import one_turn
from r3train.generation.stitch import extend


class Stops(SimulatedEngine):
    """Ends each turn by itself after 3 tokens."""

    def __init__(self):
        super().__init__(length=lambda sample_id: 1000)

    async def generate(self, request):
        most = min(3, request.max_new_tokens)
        segment = await super().generate(replace(request, max_new_tokens=most))
        return replace(segment, finish_reason="stop") if most == 3 else segment


@pytest.mark.parametrize("sample_a_turn", [False, True])
@pytest.mark.parametrize(
    "budget, turns, reason",
    [
        # 3 + 2 + 3 tokens: the next observation and one token of an answer need 3 more
        (10, 2, "length"),
        (11, 3, "length"),  # the third turn has one token
        (5, 1, "length"),
        (100, 3, "stop"),  # the most turns: the environment was told
    ],
)
async def test_an_observation_that_does_not_fit_cuts_the_episode(
    budget, turns, reason, sample_a_turn
):
    script = Script()
    options = {"engine": Stops(), "max_turn_len": 9, "sample_a_turn": sample_a_turn}
    samples, _ = await play(script, SamplingParams(budget), **options)
    assert len(script.seen) == turns and len(samples) == (turns if sample_a_turn else 1)
    assert [s.finish_reason for s in samples] == ["stop"] * (len(samples) - 1) + [reason]
    [masked] = without_truncated([samples])
    assert masked[-1].loss_mask.any() == (reason == "stop")


async def test_an_episode_that_is_done_is_not_cut_by_what_is_said_at_its_end():
    options = {"engine": Stops(), "max_turn_len": 9}
    [sample], _ = await play(Script(done_at=1), SamplingParams(10), **options)
    assert sample.finish_reason == "stop" and sample.response_len == 8


async def test_a_turn_that_the_server_aborted_is_the_last_and_its_environment_is_told():
    class Aborts(Stops):
        async def generate(self, request):
            return replace(await super().generate(request), finish_reason="abort")

    script = Script()
    [sample], reward = await play(script, SamplingParams(100), engine=Aborts(), max_turn_len=9)
    assert [turn.is_last for turn in script.seen] == [True] and reward == 0.25
    assert sample.finish_reason == "abort" and sample.response_len == 3


@pytest.mark.parametrize("budget, told", [(4, True), (5, False)])
async def test_an_environment_is_told_where_no_observation_and_answer_fit_any_more(budget, told):
    """After 3 tokens one is left: an observation of a token leaves none for an answer."""
    script = Script()
    [sample], _ = await play(script, SamplingParams(budget), engine=Stops(), max_turn_len=9)
    assert [turn.is_last for turn in script.seen] == [told]
    assert sample.finish_reason == ("stop" if told else "length")


async def test_a_sample_of_one_turn_has_log_probs_and_text_of_its_own_tokens_alone():
    samples, _ = await play(Script(), engine=Stops(), max_turn_len=9, sample_a_turn=True)
    for turn in samples:
        assert ((turn.rollout_log_probs != 0) == turn.loss_mask).all()
        assert turn.text == "9 9 9"


def test_a_turn_ends_before_the_tokens_of_the_next_though_nothing_was_said_between():
    """An empty observation: the next answer begins where the turn ends."""
    sample = start(2)
    for source in (1, 2):
        answer = segment(sample, 2, source)
        sample = extend(sample, with_kept(answer, [50 + source, 7], [50 + source]))
    first = one_turn(sample, 0, 2, 4, 1, is_last=False)
    assert [place for place, _, _ in first.decoded_masks] == [2]
    assert first.mask_counts.tolist() == [0, 0, 2, 1] and first.mask_ids.tolist() == [51, 7, 51]
    second = one_turn(sample, 1, 4, 6, 2, is_last=True)
    assert [place for place, _, _ in second.decoded_masks] == [2, 4]
    assert len(first.decoded) == 1 and len(second.decoded) == 2
