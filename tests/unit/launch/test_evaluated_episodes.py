"""Requests of an evaluation, and its rows of episodes of several turns."""

from __future__ import annotations

import json

import pytest

from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags
from r3train.engine.backend import SamplingParams
from r3train.environments import StepResult
from r3train.launch.start.rollouts import GeneratedRollouts
from r3train.launch.start.servers import RunServers
from r3train.commands.eval_command import with_defaults
from r3train.launch.job.preflight import preflight_evaluation
from r3train.loop.route_transport import RoutesOnRank0
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import read_evaluations
from tests.unit.launch.test_evaluate import Server, evaluate, held_out

HERE = "tests.unit.launch.test_evaluated_episodes"


class ThreeTurns:
    """Says two tokens after each turn, and pays 1 at the third."""

    def __init__(self, prompt):
        pass

    async def step(self, turn):
        return StepResult([3, 4], done=turn.index == 2, reward=float(turn.index == 2))


@pytest.mark.parametrize("samples", ["turn", "trajectory"])
async def test_the_row_of_an_episode_tells_of_all_its_turns(samples, tiny, tmp_path):
    path = str(held_out(tmp_path / "a.jsonl", count=2))
    flags = ("--eval-prompt-data", "a", path, "--environment", f"{HERE}:ThreeTurns")
    flags += ("--environment-samples", samples, "--environment-max-turns", "5")
    flags += ("--eval-max-response-len", "20")
    result = await evaluate(Server(), tiny, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    [line] = read_evaluations(tmp_path / "run")
    assert line["eval/a/response_len_mean"] == line["eval/a/response_len_max"] == 3
    assert line["eval/a/mean"] == 1.0 and line["eval/a/num_samples"] == 2
    rows = (tmp_path / "run/eval/0000007-a.jsonl").read_text().splitlines()
    assert [json.loads(row)["response_len"] for row in rows] == [3, 3]
    answer = json.loads(rows[0])["answer"]
    assert len(answer.split()) == 7, "three turns of one token, two observations of two"


async def test_an_evaluation_stops_where_rollouts_do_and_has_the_runs_seed(tiny, tmp_path):
    path = str(held_out(tmp_path / "a.jsonl", count=1))
    flags = ("--eval-prompt-data", "a", path, "--rollout-stop-token-ids", "5", "6")
    server, other = Server(), Server()
    for each, seed in ((server, "11"), (other, "12")):
        run_dir = tmp_path / seed
        result = await evaluate(each, tiny, run_dir, *flags, "--rollout-seed", seed)
        assert result.exit_code == 0, result.output
    [asked], [elsewhere] = ([b["sampling_params"] for b in s.generated] for s in (server, other))
    own = read_hf_facts(tiny / "model").eos_token_ids
    assert asked["stop_token_ids"] == [*own, 9, 5, 6], "9 is the test server's"
    assert asked["sampling_seed"] != elsewhere["sampling_seed"]


def test_an_evaluation_set_is_sampled_by_its_settings_and_the_runs_limits(tiny, tmp_path):
    path = str(held_out(tmp_path / "a.jsonl", count=1))
    flags = ("--eval-prompt-data", "a", path, "--rm-type", "accepted_words")
    flags += ("--eval-max-response-len", "9", "--eval-temperature", "0.25", "--eval-top-p", "0.5")
    flags += ("--eval-top-k", "3", "--n-samples-per-eval-prompt", "2", "--rollout-seed", "11")
    flags += ("--rollout-max-context-len", "30", "--rollout-stop-token-ids", "5")
    flags += ("--rollout-segment-len", "4")
    words = with_defaults(tiny / "model", flags)
    job = preflight_evaluation(parse_train_flags(words, prog_name="eval"))
    display, routes = RunDisplay(1, enabled=False), RoutesOnRank0(None, ())
    [made] = GeneratedRollouts(RunServers(job, tmp_path, display, routes)).eval_sets()
    job.close()
    assert made.sampling == SamplingParams(
        max_new_tokens=9,
        temperature=0.25,
        top_p=0.5,
        top_k=3,
        stop_token_ids=(*read_hf_facts(tiny / "model").eos_token_ids, 5),
        may_stop_at=job.tokenizer_stop_ids,
        max_context_len=30,
        seed=11,
    )
    assert (made.name, made.num_samples, made.segment_len) == ("a", 2, 4)


def test_the_text_of_an_answer_keeps_special_tokens_but_the_one_that_ended_it(tiny, tmp_path):
    path = str(held_out(tmp_path / "a.jsonl", count=1))
    flags = ("--eval-prompt-data", "a", path, "--rm-type", "accepted_words")
    flags += ("--eval-max-response-len", "9", "--rollout-max-context-len", "30")
    flags += ("--rollout-stop-token-ids", "6")
    words = with_defaults(tiny / "model", flags)
    job = preflight_evaluation(parse_train_flags(words, prog_name="eval"))
    text_of, tokenizer = job.decoder(), job.tokenizer
    job.close()
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    shown = [tokenizer.pad_token, *tokenizer.convert_ids_to_tokens([5, 6])]
    assert text_of([pad, 5, 6, eos]).split() == shown
    assert text_of([pad, 5, 6]).split() == shown
    assert text_of([5, eos, 6, eos, eos]).count(tokenizer.eos_token) == 2
    assert text_of([]) == ""
