"""Environments, and conversations with them: tokens in, tokens out, rows without a gap."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests import whole_samples
from tests.all_prompts import all_prompts
from tests.e2e.test_environments import as_the_template_writes_them
from tests.e2e.tool_calculator import ToolCalculator, use_template
from tests.fakes.server import PROMPT_LEN, SimulatedEngine, rollout_section

from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate
from r3train.data.tokenizer import load_tokenizer

from r3train.environments import StepResult, Turn, get_environment
from r3train.environments.named_environments import begin_environment
from r3train.environments.tool_calls import ToolCall, tool_calls
from r3train.rewards.code import run_program
from r3train.environments.calculator import Calculator, calculator_prompts, calculator_words
from r3train.algo.trajectories import validate_trajectories
from r3train.engine.backend import SamplingParams
from r3train.generation.conversation import Conversation
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.verify.tiny import TinyOptions, build
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.types import Prompt

PROMPT = Prompt("p", 0, "make 7", np.array([3, 4], np.int32), 7)


def press(calculator, text, index=0):
    import asyncio

    return asyncio.run(calculator.step(Turn(index, [], text, False)))


def test_the_calculator_adds_subtracts_clears_and_shows_its_total():
    calculator = Calculator(PROMPT)
    assert press(calculator, "3 please 2").observation == "total 5"
    assert press(calculator, "minus 1 4").observation == "total 8"
    assert press(calculator, "20").observation == "total many"
    assert press(calculator, "clear 7") == StepResult("total 7", False, 1.0)
    assert press(calculator, "done 9").done


def test_the_calculators_rewards_add_up_to_how_close_it_came():
    calculator = Calculator(PROMPT)
    rewards = [press(calculator, text).reward for text in ("2", "20", "clear 6")]
    assert rewards[0] == pytest.approx(2 / 7) and rewards[1] == pytest.approx(-2 / 7)
    assert sum(rewards) == pytest.approx(6 / 7)


@pytest.mark.parametrize("label", [0, "7", None, True])
def test_a_label_that_is_no_total_is_refused_with_the_prompt(label):
    with pytest.raises(
        ValueError,
        match="^prompt p: --environment calculator: the calculator needs a label above 0",
    ):
        begin_environment("calculator", Calculator, replace(PROMPT, label=label))


def test_the_calculators_prompts_are_of_its_words():
    words = set(calculator_words())
    assert all(set(line["input"].split()) <= words for line in calculator_prompts())


class NoStep:
    pass


class PlainStep:
    def step(self, turn):
        pass


@pytest.mark.parametrize(
    "name, message",
    [
        ("calculater", "--environment calculater: unknown.*Did you mean calculator"),
        ("nowhere.at.all:X", "cannot import nowhere.at.all"),
        ("tests.unit.environments.test_environments:Gone", "has no Gone"),
        ("tests.unit.environments.test_environments:NoStep", "NoStep has no async method step"),
        (
            "tests.unit.environments.test_environments:PlainStep",
            "PlainStep has no async method step",
        ),
    ],
)
def test_an_environment_that_is_none_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        get_environment(name)


def test_an_environment_is_found_by_name_and_by_path():
    assert get_environment("calculator") is Calculator
    assert get_environment("r3train.environments.calculator:Calculator") is Calculator


GUESTS = EnvironmentLoop()


class Script:
    """Says two tokens after every turn; ``done_at`` ends it."""

    def __init__(self, done_at=99, rewards=(0.25, 0.5, 0.125)):
        self.seen: list[Turn] = []
        self.done_at = done_at
        self.rewards = rewards

    async def step(self, turn):
        self.seen.append(turn)
        return StepResult([60, 61], turn.index == self.done_at, self.rewards[turn.index])


def conversation(
    script, environments=None, *, sample_a_turn=False, max_turn_len=3, reply=None, **limits
):
    return Conversation(
        lambda: script,
        rollout_section(**in_turns(sample_a_turn), environment_max_turn_len=max_turn_len, **limits),
        environments or GUESTS,
        encode=lambda text: [ord(c) for c in text],
        decode=lambda ids: " ".join(map(str, ids)),
        reply=reply,
    )


def in_turns(sample_a_turn):
    samples = "turn" if sample_a_turn else "trajectory"
    return {"environment_max_turns": 3, "environment_samples": samples}


async def play(script, sampling=SamplingParams(100), engine=None, **changes):
    engine = engine or SimulatedEngine(length=lambda _: 1000)

    async def generate(resume_from=None, turn_limit=None):
        return await whole_samples.generate(
            engine, PROMPT, sampling, sample_id=40, resume_from=resume_from, limit=turn_limit
        )

    return await conversation(script, **changes)(generate, PROMPT, sampling=sampling, sample_id=40)


async def test_loss_is_on_the_models_tokens_alone_and_every_row_is_there():
    script = Script()
    (sample,), reward = await play(script)
    model_tokens, observed_tokens = [True] * 3, [False] * 2
    assert sample.loss_mask.tolist() == [
        False,
        False,
        *model_tokens,
        *observed_tokens,
        *model_tokens,
        *observed_tokens,
        *model_tokens,
    ]
    assert sample.token_ids.tolist() == [3, 4, 9, 9, 9, 60, 61, 9, 9, 9, 60, 61, 9, 9, 9]
    assert sample.routed_experts.shape[0] == sample.num_tokens - 1
    assert ((sample.weight_versions >= 0) == sample.loss_mask).all()
    assert ((sample.rollout_log_probs != 0) == sample.loss_mask).all()
    assert reward == 0.875
    assert [(t.index, t.token_ids, t.is_last) for t in script.seen] == [
        (0, [9, 9, 9], False),
        (1, [9, 9, 9], False),
        (2, [9, 9, 9], True),
    ]


@pytest.mark.parametrize("budget, turns", [(100, 3), (12, 3), (10, 2), (5, 1), (3, 1)])
async def test_a_conversation_ends_where_no_further_turn_fits(budget, turns):
    script = Script()
    (sample,), _ = await play(script, SamplingParams(budget))
    assert len(script.seen) == turns and sample.response_len <= budget
    assert sample.loss_mask[-1], "it never ends with what the environment says"


async def test_done_ends_it():
    script = Script(done_at=1)
    (sample,), reward = await play(script)
    assert len(script.seen) == 2 and reward == 0.75 and sample.response_len == 8


async def test_one_sample_a_turn_makes_a_trajectory_that_passes_the_check():
    samples, reward = await play(Script(), sample_a_turn=True)
    whole = (await play(Script()))[0][0]
    assert [s.sample_id for s in samples] == [40, 41, 42]
    validate_trajectories(samples)
    for sample, prompt_len in zip(samples, (2, 7, 12), strict=True):
        assert (sample.prompt_len, sample.response_len) == (prompt_len, 3)
        assert sample.loss_mask.tolist() == [False] * prompt_len + [True] * 3
        np.testing.assert_array_equal(sample.token_ids, whole.token_ids[: prompt_len + 3])
        np.testing.assert_array_equal(sample.routed_experts, whole.routed_experts[: prompt_len + 2])
    assert sum(int(s.loss_mask.sum()) for s in samples) == int(whole.loss_mask.sum())


async def test_a_gap_in_the_rows_is_refused_with_the_sample():
    class Gappy(SimulatedEngine):
        async def generate(self, request):
            segment = await super().generate(request)
            return replace(segment, rows=segment.rows[:-1])

    with pytest.raises(ValueError, match="sample 40: an answer brings rows 0..2, expected .* to 3"):
        await play(Script(), engine=Gappy(length=lambda _: 1000))


async def test_rewards_and_observations_that_are_none_are_refused_with_the_sample():
    step = "^prompt p, sample 40, turn 0: the step of --environment None gave the"
    with pytest.raises(ValueError, match=f"{step} reward nan, expected a finite number"):
        await play(Script(rewards=(float("nan"),)))
    with pytest.raises(ValueError, match="^prompt p, sample 40: --environment .* gave no reward"):
        await play(Script(rewards=(None, None, None)), sample_a_turn=True)

    class Odd(Script):
        async def step(self, turn):
            return StepResult([1.5])

    with pytest.raises(ValueError, match=rf"{step} observation \[1.5\], which is no text"):
        await play(Odd())


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
@pytest.mark.parametrize("sample_a_turn", [False, True])
def test_conversations_go_on_over_weight_updates_in_every_mode(mode, sample_a_turn):
    engine = SimulatedEngine(length=lambda _: 1000, tick_s=0.002)
    with Producer(
        rollout_section(
            max_weight_staleness=2,
            rollout_max_concurrency=4,
            pause_generation_mode=mode,
            **in_turns(sample_a_turn),
        ),
        lambda: engine,
        lambda group: replace(PROMPT, prompt_id=str(group)),
        RequestSettings(SamplingParams(100)),
        episodes=Episodes(
            samples=3,
            make=lambda prompt: conversation(Script(), max_turn_len=8, sample_a_turn=sample_a_turn),
        ),
    ) as producer:
        ids = []
        for step in range(4):
            for group in producer.next_batch(step):
                assert len(group) == (6 if sample_a_turn else 2)
                for sample, reward in group:
                    ids.append(sample.sample_id)
                    assert reward == 0.875
                    assert int(sample.loss_mask.sum()) == (8 if sample_a_turn else 24)
                    assert sample.routed_experts.shape[0] == sample.num_tokens - 1
                    assert step - sample.weight_versions[sample.loss_mask].min() <= 2
            with producer.quiesced():
                engine.version = step + 1
                producer.set_version(step + 1)
    assert len(ids) == len(set(ids)), "sample ids name one sample each"


class Misbehaving:
    """Does in its step what an environment must not."""

    def __init__(self, act):
        self.act = act

    async def step(self, turn):
        result = self.act()
        if result is not None:
            await result
        return StepResult([60], True, 1.0)


class Unprintable(Exception):
    def __repr__(self):
        raise RuntimeError


class OddNumber:
    def __float__(self):
        raise RuntimeError

    def __repr__(self):
        return "odd"


def raises(error):
    def act():
        raise error

    return act


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: asyncio.sleep(60), "took longer than --environment-timeout-s 0.1"),
        (raises(SystemExit(0)), r"raised SystemExit\(0\)"),
        (raises(KeyboardInterrupt()), r"raised KeyboardInterrupt\(\)"),
        (raises(asyncio.CancelledError()), r"raised CancelledError\(\)"),
        (raises(KeyError("gold")), r"raised KeyError\('gold'\)"),
        (raises(TimeoutError("its own")), r"raised TimeoutError\('its own'\)"),
        (raises(Unprintable()), r"raised a Unprintable without a repr \(RuntimeError\)"),
        (
            raises(KeyError("x" * 5000)),
            r"raised KeyError\('x+\.\.\. \(5012 characters\) \(test_environments\.py:\d+\)$",
        ),
    ],
)
async def test_a_step_that_hangs_or_leaves_is_an_error_that_names_sample_and_turn(act, message):
    about = f"^prompt p, sample 40, turn 0: the step of --environment calculator {message}"
    with pytest.raises(ValueError, match=about):
        await play(Misbehaving(act), environment="calculator", environment_timeout_s=0.1)


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "prompt p, sample 40, turn 0: .* returned NoneType, expected a StepResult"),
        ("right", "sample 40, turn 0: .* returned str, expected a StepResult"),
        (StepResult("x", True, "many"), "sample 40, turn 0: .* reward 'many', expected a finite"),
        (StepResult("x", True, 10**400), "sample 40, turn 0: .* reward 10+, expected a finite"),
        (StepResult("x", True, OddNumber()), "sample 40, turn 0: .* reward odd, expected a finite"),
        (StepResult(None), "sample 40, turn 0: .* observation None, which is no text"),
    ],
)
async def test_a_step_that_returns_something_else_is_an_error_that_names_the_sample(
    result, message
):
    class Returns:
        async def step(self, turn):
            return result

    with pytest.raises(ValueError, match=message):
        await play(Returns())


async def test_a_rollout_that_is_cancelled_in_a_step_of_its_environment_stays_so():
    task = asyncio.create_task(play(Misbehaving(lambda: asyncio.sleep(60))))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_step_that_blocks_its_event_loop_is_named_and_the_others_wait_in_a_checkpoint():
    release, blocked = threading.Event(), []

    def step():
        blocked.append(release.wait(60))

    settings = rollout_section(**in_turns(False))
    environments = EnvironmentLoop()
    producer = Producer(
        settings,
        lambda: SimulatedEngine(length=lambda _: 1000),
        lambda group: replace(PROMPT, prompt_id=str(group)),
        RequestSettings(SamplingParams(100)),
        episodes=Episodes(
            samples=3,
            make=lambda prompt: conversation(
                Misbehaving(step), environments, environment_timeout_s=0.2
            ),
        ),
    )
    # whichever comes first: on a busy machine that is not always sample 0
    step_of = r"prompt \d+, sample \d+, turn 0: the step of --environment .*"
    blocks = (
        f"^({step_of} took longer than --environment-timeout-s 0.2: it|prompt .* waited longer than"
        f" --environment-timeout-s 0.2: {step_of}) blocks the event loop"
    )
    try:
        with pytest.raises(ValueError, match=blocks):
            producer.next_batch(0, lambda _: None)
        assert not blocked and producer.snapshot() is not None
    finally:
        release.set()
        producer.close()


async def test_calls_that_wait_for_one_another_have_their_limit_from_their_begin_on():
    environments = EnvironmentLoop()
    asked = [environments.ask(lambda: time.sleep(0.1), f"call {i}", 0.6) for i in range(10)]
    assert await asyncio.gather(*asked) == [None] * 10


async def test_an_environment_that_waits_when_it_is_made_has_the_bound_of_a_step():
    def begin():
        return time.sleep(2)

    late = "^prompt 0, sample 40: --environment .* took longer than --environment-timeout-s 0.2"
    section = rollout_section(**in_turns(False), environment_timeout_s=0.2)
    episode = Conversation(begin, section, EnvironmentLoop(), encode=list, decode=str)
    with pytest.raises(ValueError, match=late):
        await episode(
            None, replace(PROMPT, prompt_id="0"), sampling=SamplingParams(9), sample_id=40
        )


class Messages(Script):
    async def step(self, turn):
        self.seen.append(turn)
        return StepResult([{"role": "tool", "content": "so"}], turn.index == 1, 0.5)


async def test_messages_are_written_by_the_template_behind_the_turns_last_token():
    asked = []

    def reply(messages, last):
        asked.append((messages, last))
        return [60, 61]

    (sample,), _ = await play(Messages(), reply=reply)
    assert asked[0] == ([{"role": "tool", "content": "so"}], 9)
    assert sample.token_ids.tolist() == [3, 4, 9, 9, 9, 60, 61, 9, 9, 9]
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3


async def test_messages_without_a_template_or_that_it_cannot_write_are_refused_with_the_sample():
    with pytest.raises(
        ValueError, match="sample 40, turn 0: .*messages, which need --apply-chat-template"
    ):
        await play(Messages())

    def fails(messages, last):
        raise ValueError("the chat template fails")

    with pytest.raises(ValueError, match="sample 40, turn 0: .* observation .* template fails"):
        await play(Messages(), reply=fails)


class OddTools:
    tools = [{"name": "search"}]

    async def step(self, turn):
        pass


def test_tools_that_are_no_schemas_are_refused():
    with pytest.raises(ValueError, match="OddTools.tools must be a list of schemas"):
        get_environment("tests.unit.environments.test_environments:OddTools")


def test_calls_of_tools_are_read_and_what_is_none_says_why():
    good = '{"name": "search", "arguments": {"query": "a"}}'
    text = f"so <tool_call>\n{good}\n</tool_call><tool_call>{{</tool_call><tool_call>[]</tool_call>"
    first, second, third = tool_calls(text)
    assert first == ToolCall("search", {"query": "a"})
    assert second.error.startswith("the call is not JSON: ")
    assert third.error == "a call is an object with name and arguments"
    assert tool_calls("no call") == []
    call = '<tool_call>{"name": "search", "arguments": {"query": "moon"}}</tool_call>'
    real = ToolCall("search", {"query": "moon"})
    draft = call.replace("moon", "sun")
    for thought in (f"<think>maybe {draft}</think>", f"maybe {draft} no.</think>"):
        assert tool_calls(f"{thought}No need. 4") == []
        assert tool_calls(f"{thought}{call}") == [real]
        assert tool_calls(f"{thought}{call}<think>{draft}</think>{call}") == [real, real]
        assert tool_calls(f"{thought}{call}<think>and {draft}") == [real], "a thought that was cut"
    assert tool_calls(call.replace("moon", "<think>")) == [ToolCall("search", {"query": "<think>"})]
    assert tool_calls(call.replace("arguments", "parameters")) == [real]
    assert tool_calls(call.removesuffix("</tool_call>")) == [real], "the answer ended with the call"
    [deep] = tool_calls(f"<tool_call>{100_000 * '['}</tool_call>")
    assert deep.error.startswith("the call is not JSON: ")


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples/tools"))


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def turn_of(text):
    return Turn(0, [], text, False)


async def test_the_python_tool_runs_programs_and_shows_their_errors(examples):
    episode = get_environment("python_tool:PythonTool")(PROMPT)
    said = [call("python", code="print(6 * 7)"), call("python", code="1 / 0"), call("sing")]
    result = await episode.step(turn_of("I compute " + "".join(said)))
    contents = [message["content"] for message in result.observation]
    assert contents[0] == "42\n" and not result.done
    assert "ZeroDivisionError: division by zero" in contents[1]
    assert contents[2].startswith("there is one tool, python")
    assert {message["role"] for message in result.observation} == {"tool"}
    answer = await episode.step(turn_of("it is 42"))
    assert answer.done and answer.reward is None, "--rm-type scores the answer"


async def test_a_program_of_the_python_tool_ends_in_time(examples, monkeypatch):
    environment = get_environment("python_tool:PythonTool")
    monkeypatch.setattr("python_tool.TIMEOUT_S", 0.5)
    result = await environment(PROMPT).step(turn_of(call("python", code="while True: pass")))
    assert result.observation[0]["content"].startswith("the programs of a turn have 0.5 s")


async def test_the_programs_of_a_turn_share_its_time_and_have_a_bound(examples, monkeypatch):
    environment = get_environment("python_tool:PythonTool")
    monkeypatch.setattr("python_tool.TIMEOUT_S", 0.5)
    monkeypatch.setattr("python_tool.MOST_CALLS", 12)
    seconds: list[float] = []

    def noted(program, given, timeout_s):
        seconds.append(timeout_s)
        return run_program(program, given, timeout_s)

    monkeypatch.setattr("python_tool.run_program", noted)
    said = 14 * call("python", code="while True: pass")
    result = await environment(PROMPT).step(turn_of(said))
    *answers, last = (message["content"] for message in result.observation)
    assert len(answers) == 12 and last == "2 more calls were not run: a turn may have 12"
    assert all(text.startswith("the programs of a turn have 0.5 s") for text in answers)
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] <= 0, "not 0.5 s for each"


async def test_the_search_tool_finds_documents_by_rare_words(examples):
    documents = ["the cat sat on the mat", "the moon is far", "the sun is near"]
    environment = get_environment("search_tool:SearchTool")
    episode = environment(replace(PROMPT, metadata={"documents": documents}))
    found = await episode.step(
        turn_of(call("search", query="the moon") + call("search", query="x"))
    )
    first, second = (message["content"] for message in found.observation)
    assert first.startswith("the moon is far") and second == "nothing was found"
    assert (await episode.step(turn_of("the moon"))).done
    with pytest.raises(ValueError, match="prompt p: expected texts in metadata.documents"):
        environment(PROMPT)


class DrawingEngine(SimulatedEngine):
    """Draws any token of a small vocabulary, and stops at two of them."""

    def __init__(self, vocabulary, stops):
        super().__init__()
        self._drawn = np.random.default_rng(3)
        self._vocabulary, self._stops = vocabulary, stops

    async def generate(self, request):
        tokens = []
        while len(tokens) < request.max_new_tokens and not set(tokens) & self._stops:
            tokens.append(int(self._drawn.integers(self._vocabulary)))
        self.length = lambda _: len(request.token_ids) - PROMPT_LEN + len(tokens)
        segment = await super().generate(request)
        return replace(segment, token_ids=np.array(tokens, np.int32))


def test_a_dumped_episode_reads_as_the_template_writes_it(tmp_path):
    """With a real tokenizer, and read by the checker of the whole job; a wrong reply fails it."""
    build(tmp_path, TinyOptions(task="calculator"))
    use_template(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    path, tools = tmp_path / "prompts.jsonl", ToolCalculator.tools
    template = ChatTemplate(tokenizer, DataSection(prompt_data=str(path)), tools)
    template.check_tools()
    prompts = all_prompts(path, tokenizer, apply_chat_template=True, tools=tools)
    engine = DrawingEngine(len(tokenizer), {1, 2})

    def episode(prompt, reply):
        def generate(resume_from=None, turn_limit=None):
            return whole_samples.generate(
                engine, prompt, SamplingParams(40), resume_from=resume_from, limit=turn_limit
            )

        play = Conversation(
            lambda: ToolCalculator(prompt),
            rollout_section(environment_max_turns=3, environment_max_turn_len=6),
            GUESTS,
            encode=tokenizer.encode,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            reply=reply,
        )
        played = play(generate, prompt, sampling=SamplingParams(40), sample_id=0)
        (sample,), _ = asyncio.run(played)
        return as_the_template_writes_them(sample, tokenizer)

    assert sum(episode(prompt, template.reply) for prompt in prompts[:12]) > 0
    with pytest.raises(AssertionError):  # the end of the model's message is left out
        for prompt in prompts[:12]:
            episode(prompt, lambda messages, last: template.reply(messages, last)[1:])
