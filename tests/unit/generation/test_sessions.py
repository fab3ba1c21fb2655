"""An agent's calls as samples: what is sampled and delivered is trained once, on the rows of one prefill."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.data.test_replies import GLM, GPT_OSS
from tests.unit.data.test_session_templates import CHATML
from tests.unit.generation.session_play import assert_sound, Play, TOOLS, user, without

from r3train.chat.base import ChatRefused, ChatRequest, Parsed
from r3train.chat.messages import shown
from r3train.engine.backend import EngineError, SamplingParams

CALL = '(hm)I add [add {"a": 1, "b": 2.0}]<|end|>'


def tool(call: dict, text: str = "3") -> dict:
    return {"role": "tool", "content": text, "tool_call_id": call["tool_calls"][0]["id"]}


async def three_turns(play: Play, change=lambda turn, messages: None) -> list[dict]:
    """Two calls of a tool and a text; ``change`` edits the history after each."""
    play.engine.answers = [CALL, CALL, "(ok)it is 3<|end|>"]
    messages = [{"role": "system", "content": "you add"}, user("go")]
    for turn in range(3):
        answer = await play.ask(copy.deepcopy(messages), tools=TOOLS)
        messages.append(without(answer, "reasoning_content"))  # as most harnesses do
        change(turn, messages)
        if answer.get("tool_calls"):
            messages.append(tool(answer))
    return messages


def test_a_conversation_that_only_grows_is_one_sample():
    play = Play()
    asyncio.run(three_turns(play))
    [sample] = play.session.samples()
    assert_sound([sample])
    assert play.text(sample.token_ids[sample.loss_mask]) == (CALL * 2 + "(ok)it is 3<|end|>")
    assert play.text(sample.token_ids[~sample.loss_mask]).endswith(
        "\n<|start|>tool: 3<|end|>\n<|start|>assistant: " * 2
    )
    assert sample.text == "(ok)it is 3" and sample.finish_reason == "stop"
    assert (sample.sample_id, sample.trajectory_id, sample.is_last_step) == (640, 640, True)
    assert [(e[0], e[2] - e[1]) for e in sample.token_ledger] == [(640, len(CALL) - 6)] * 2 + [
        (640, 12)
    ]
    assert play.session.counts["roots"] == 1 and not play.session.counts["forks"]


def written_anew(turn, messages):
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = '{"b":2,"a":1.0}'


def as_parts(turn, messages):
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]


def with_nulls(turn, messages):
    for message in messages:
        message.update(refusal=None, tool_calls=message.get("tool_calls"))
        message["content"] = message["content"] or None


def edited(turn, messages):
    if turn == 1:
        messages[2]["content"] = "(removed)"


def without_text_next_to_calls(turn, messages):
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = None


def without_text_and_id(turn, messages):
    if turn == 1:
        messages[2]["content"] = ""
        messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "call_of_another"


def other_id(turn, messages):
    if turn == 1:
        messages[3]["tool_call_id"] = "call_of_another"


def compacted(turn, messages):
    if turn == 1:
        messages[:] = [messages[0], user("in short: 3, go on")]


def reordered(turn, messages):
    if turn == 1:
        messages[2], messages[3] = messages[3], messages[2]


def shortened(turn, messages):
    if turn == 1:
        del messages[2:4]


def rethought(turn, messages):
    if turn == 1:
        messages[2]["reasoning_content"] = "another thought"


@pytest.mark.parametrize(
    "change, begins",
    [
        (written_anew, ["root"]),
        (as_parts, ["root"]),
        (with_nulls, ["root"]),
        (edited, ["root", "root"]),
        (without_text_next_to_calls, ["root"]),
        (without_text_and_id, ["root", "root"]),
        (other_id, ["root", "fork"]),
        (compacted, ["root", "root"]),
        (reordered, ["root", "root"]),
        (shortened, ["root", "root"]),
        (rethought, ["root", "root"]),
    ],
)
def test_a_history_that_was_rewritten_begins_a_chain_and_one_that_was_not_goes_on(change, begins):
    play = Play()
    asyncio.run(three_turns(play, change))
    assert [chain.begins for chain in play.session.chains] == begins
    samples = play.session.samples()
    assert_sound(samples)
    assert sum(int(s.loss_mask.sum()) for s in samples) == 2 * (len(CALL) - 6) + 12
    assert [s.is_last_step for s in samples] == [False] * (len(begins) - 1) + [True]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_requests_at_once_behind_one_answer_are_one_extension_and_forks(order):
    async def ask() -> Play:
        play = Play(seed=3)
        first = [user("name tools")]
        answer = await play.ask(first)
        play.engine.gates = {1 + n: asyncio.Event() for n in range(3)}
        asked = [
            asyncio.create_task(play.ask([*first, answer, user(word)])) for word in ("a", "b", "c")
        ]
        await asyncio.sleep(0)
        for place in order:
            play.engine.gates[1 + place].set()
            await asked[place]
        return play

    play = asyncio.run(ask())
    assert [chain.begins for chain in play.session.chains] == ["root", "fork", "fork"]
    samples = play.session.samples()
    assert_sound(samples)
    assert sorted(s.sample_id for s in samples) == [640, 641, 642]
    # in the order of their last calls
    assert [s.sample_id - 640 for s in samples] == list(order)
    lengths = [call.end - call.start for call in play.session.calls]
    assert sum(int(s.loss_mask.sum()) for s in samples) == sum(lengths)


def test_two_equal_requests_are_two_answers():
    play = Play(seed=5)
    for _ in range(2):
        asyncio.run(play.ask([user("best of two")]))
    first, second = play.session.samples()
    assert {first.sample_id, second.sample_id} == {
        640,
        641,
    }, "they are sampled with seeds of their own"


def test_other_tools_begin_a_conversation_of_their_own():
    play = Play()
    first = [user("go")]
    answer = asyncio.run(play.ask(first))
    asyncio.run(play.ask([*first, answer, user("more")], tools=TOOLS))
    assert [chain.begins for chain in play.session.chains] == ["root", "root"]
    assert "add" in play.text(play.session.samples()[-1].token_ids)


def test_a_failed_call_leaves_no_chain_takes_no_id_and_the_next_one_goes_on():
    async def ask() -> Play:
        play = Play()
        first = [user("go")]
        answer = await play.ask(first)
        play.engine.errors = {1: EngineError("no server"), 2: EngineError("no server")}
        for messages in ([*first, answer, user("a")], [user("else")]):
            with pytest.raises(ChatRefused) as refused:
                await play.ask(messages)
            assert refused.value.status == 400, "clients do not ask again"
        await play.ask([*first, answer, user("a")])
        await play.ask([user("else")])
        return play

    play = asyncio.run(ask())
    assert [str(error) for error in play.failures] == ["no server"] * 2
    assert [c.sample.sample_id for c in play.session.chains] == [640, 641]
    assert_sound(play.session.samples())


def test_a_cancelled_call_leaves_no_chain_and_its_chain_is_free():
    async def ask() -> Play:
        play = Play()
        first = [user("go")]
        answer = await play.ask(first)
        play.engine.gates = {1: asyncio.Event(), 2: asyncio.Event()}
        tasks = [
            asyncio.create_task(play.ask(messages))
            for messages in ([*first, answer, user("a")], [user("else")])
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await play.ask([*first, answer, user("a")])
        return play

    play = asyncio.run(ask())
    assert len(play.session.chains) == 1 and play.session.counts["forks"] == 0
    assert_sound(play.session.samples())


def test_a_request_that_is_refused_changes_nothing():
    play = Play(max_context_len=60)
    play.engine.most = 3
    first = [user("go")]
    answer = asyncio.run(play.ask(first))
    before = copy.deepcopy(play.session.chains[0].sample.token_ids), len(play.session.chains)
    for messages in ([*first, answer, user("x" * 60)], [user("y" * 60)]):
        with pytest.raises(ChatRefused) as refused:
            asyncio.run(play.ask(messages))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        assert "maximum context length is 60 tokens" in str(refused.value)
    np.testing.assert_array_equal(play.session.chains[0].sample.token_ids, before[0])
    assert len(play.session.chains) == before[1] and len(play.engine.asked) == 1
    asyncio.run(play.ask([*first, answer, user("x")]))
    assert [chain.begins for chain in play.session.chains] == ["root"], "its chain is free"


def test_a_chain_has_the_longest_response_behind_its_first_prompt():
    from r3train.engine.backend import SamplingParams

    play = Play(sampling=SamplingParams(max_new_tokens=60))
    first = [user("go")]
    play.engine.answers = ["a" * 20]
    answer = asyncio.run(play.ask(first))
    play.engine.answers = ["b" * 500]
    asyncio.run(play.ask([*first, answer, user("x")]))
    [sample] = play.session.samples()
    assert sample.response_len == 60 and sample.finish_reason == "length"
    with pytest.raises(ChatRefused, match="maximum context length"):
        asyncio.run(play.ask([*first, answer, user("z" * 40)]))


def test_the_calls_of_a_session_are_counted():
    play = Play(max_calls=2)
    for text in ("a", "b"):
        asyncio.run(play.ask([user(text)]))
    with pytest.raises(ChatRefused) as refused:
        asyncio.run(play.ask([user("c")]))
    assert refused.value.status == 403


def test_calls_in_flight_count_too():
    async def ask() -> None:
        play = Play(max_calls=2)
        play.engine.gates = {0: asyncio.Event(), 1: asyncio.Event()}
        asked = [asyncio.create_task(play.ask([user(text)])) for text in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(ChatRefused, match="the session has had its 2 calls"):
            await play.ask([user("c")])
        for gate in play.engine.gates.values():
            gate.set()
        await asyncio.gather(*asked)

    asyncio.run(ask())


def test_an_answer_that_nobody_took_is_not_trained_and_one_that_is_shown_was_taken():
    play = Play(seed=2)
    first = [user("go")]
    shown = asyncio.run(play.ask(first, delivered=None))
    lost = asyncio.run(play.ask([*first, shown, user("a")], delivered=False))
    another_answer = asyncio.run(play.ask([*first, shown, user("a")]))
    assert lost != another_answer
    samples = play.session.samples()
    assert_sound(samples)
    calls = play.session.calls
    assert [call.delivered for call in calls] == [True, False, True]
    lengths = [call.end - call.start for call in calls]
    assert sum(int(s.loss_mask.sum()) for s in samples) == lengths[0] + lengths[2]
    assert play.session.counts["undelivered"] == 1
    assert play.session.counts["undelivered_tokens"] == lengths[1]
    assert [s.num_tokens for s in samples][0] == calls[0].end, "nor is what was asked before it"


def test_an_answer_that_a_rendering_from_the_beginning_shows_was_taken_too():
    play = Play(history="template")
    play.engine.answers = ["(hm)well<|end|>", "good<|end|>"]
    answer = asyncio.run(play.ask([user("go")], delivered=None))
    asyncio.run(play.ask([user("go"), answer, user("and?")]))
    assert [chain.begins for chain in play.session.chains] == ["root", "root"]
    assert len(play.session.samples()) == 2


def test_a_session_whose_answers_nobody_took_has_no_sample():
    play = Play()
    asyncio.run(play.ask([user("go")], delivered=False))
    assert play.session.samples() == []


@pytest.mark.parametrize("template, last", [(GPT_OSS, "<|call|>"), (CHATML, "<|call|>")])
def test_a_stop_token_that_the_template_would_not_keep_is_trained_and_not_carried(template, last):
    play = Play(template)
    play.engine.end = play.words.encode(last)[0]
    play.engine.answers = ["well" + last, "good" + last]
    first = [user("go")]
    answer = asyncio.run(play.ask(first))
    asyncio.run(play.ask([*first, answer, user("and?")]))
    one, two = play.session.samples()
    assert_sound([one, two])
    assert play.text(one.token_ids).endswith("well" + last) and one.loss_mask.sum() == 5
    assert "well<|end|>" in play.text(two.token_ids) and two.loss_mask.sum() == 5


def test_a_role_that_ended_an_answer_is_not_written_twice():
    play = Play(GLM)
    play.engine.end = play.words.encode("<|user|>")[0]
    play.engine.answers = ["well<|user|>", "good<|user|>"]
    answer = asyncio.run(play.ask([user("go")]))
    asyncio.run(play.ask([user("go"), answer, user("and?")]))
    [sample] = play.session.samples()
    assert play.text(sample.token_ids) == (
        "<|user|>\ngo<|assistant|>well<|user|>\nand?<|assistant|>good<|user|>"
    )


def test_an_answer_that_was_cut_is_closed_before_what_follows():
    play = Play()
    play.engine.answers = ["one two", "three<|end|>"]
    answer = asyncio.run(play.ask([user("go")], max_tokens=3))
    assert answer["content"] == "one"
    play.engine.rest_of_answer = []
    asyncio.run(play.ask([user("go"), answer, user("and?")]))
    [sample] = play.session.samples()
    assert "assistant: one<|end|>\n<|start|>user: and?" in play.text(sample.token_ids)
    assert_sound([sample])


@pytest.mark.parametrize("at", [0, 29, 31, 32, 33, 70])
def test_an_answer_ends_with_the_token_that_completes_a_stop_text(at):
    play = Play()
    play.engine.answers = ["x" * at + "Observation: much more" + "y" * 40, "next<|end|>"]
    messages = [user("go")]
    answer = asyncio.run(play.ask(messages, stop=("Never", "Observation:")))
    assert answer["content"] == "x" * at
    assert all(limit <= 32 for _, limit in play.engine.asked)
    thrown = play.session.counts["cut_tokens"]
    play.engine.rest_of_answer = []
    asyncio.run(play.ask([*messages, answer, user("so")]))
    [sample] = play.session.samples()
    assert_sound([sample])
    assert (
        play.text(sample.token_ids[sample.loss_mask]) == "x" * at + "Observation:" + "next<|end|>"
    )
    assert thrown == (32 - (at + 12) % 32) % 32


def test_stop_tokens_count_as_such_with_stop_texts():
    play = Play()
    play.engine.answers = ["well<|end|>"]
    assert asyncio.run(play.ask([user("go")], stop=("nothing",)))["content"] == "well"
    [sample] = play.session.samples()
    assert play.text(sample.token_ids).endswith("well<|end|>")


def test_versions_rise_over_a_session_and_a_fork_keeps_those_of_its_prefix():
    play = Play(seed=1)
    first = [user("go")]
    answer = asyncio.run(play.ask(first))
    play.engine.version = 3
    asyncio.run(play.ask([*first, answer, user("a")]))
    play.engine.version = 4
    asyncio.run(play.ask([*first, answer, user("b")]))
    one, two = play.session.samples()
    assert set(one.weight_versions[one.loss_mask]) == {0, 3}
    assert set(two.weight_versions[two.loss_mask]) == {4}
    assert set(two.weight_versions) == {-1, 0, 4}


def test_thoughts_that_the_template_drops_make_a_root_with_the_history_of_the_template():
    texts = ["(hm)well<|end|>", "(ho)good<|end|>"]
    kinds = {}
    for history in ("append", "template"):
        play = Play(history=history)
        play.engine.answers = list(texts)
        answer = asyncio.run(play.ask([user("go")]))
        asyncio.run(play.ask([user("go"), answer, user("and?")]))
        samples = play.session.samples()
        assert_sound(samples)
        kinds[history] = [chain.begins for chain in play.session.chains]
        assert ("(hm)" in play.text(samples[-1].token_ids)) == (history == "append")
    assert kinds == {"append": ["root"], "template": ["root", "root"]}


@pytest.mark.parametrize("history", ["append", "template"])
def test_turns_of_tools_keep_thoughts_with_either_history(history):
    play = Play(history=history)
    play.engine.answers = ["(hm)[add {}]<|end|>", "good<|end|>"]
    answer = asyncio.run(play.ask([user("go")], tools=TOOLS))
    asyncio.run(play.ask([user("go"), answer, tool(answer)], tools=TOOLS))
    assert_sound(play.session.samples())
    if history == "append":
        assert [chain.begins for chain in play.session.chains] == ["root"]


@pytest.mark.parametrize(
    "texts, tools, history, differs",
    [
        (["well<|end|>", "good<|end|>"], (), "append", 0),
        (["(hm)well<|end|>", "good<|end|>"], (), "append", 1),  # the template drops the thought
        (["(hm)well<|end|>", "good<|end|>"], (), "template", 0),
        (['[add {"a": 1}]<|end|>', "good<|end|>"], TOOLS, "append", 1),  # it writes [add a=1]
    ],
)
def test_samples_that_the_template_would_write_otherwise_are_counted(
    texts, tools, history, differs
):
    play = Play(history=history)
    play.engine.answers = list(texts)
    answer = asyncio.run(play.ask([user("go")], tools=tools))
    shown = without(answer, "reasoning_content")
    follows = tool(answer) if tools else user("and?")
    asyncio.run(play.ask([user("go"), shown, follows], tools=tools))
    assert play.session.samples() and play.session.counts["template_differs"] == differs


def test_a_parser_that_fails_ends_the_run_and_leaves_no_chain():
    async def broken(text, tools):
        raise ValueError("--agent-tool-call-parser x:y raised KeyError")

    play = Play(read=broken)
    with pytest.raises(ChatRefused):
        asyncio.run(play.ask([user("go")]))
    assert play.session.chains == [] and len(play.failures) == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["go on", "again", "edit", "compact", "drop reasoning", "cut", "tools", "stop"]
        ),
        st.integers(0, 10**6),
        st.booleans(),  # delivered
        st.booleans(),  # at once with the next
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    actions=ACTIONS, seed=st.integers(0, 10**6), template=st.sampled_from([CHATML, GLM, GPT_OSS])
)
def test_any_tree_of_requests_is_trained_once_on_the_rows_of_one_prefill(actions, seed, template):
    async def play_it() -> Play:
        play = Play(template, seed=seed)
        histories: list[list[dict]] = [[user("go")]]
        waiting = []

        async def one(messages, action, delivered):
            more = {
                "cut": {"max_tokens": 2},
                "tools": {"tools": TOOLS},
                "stop": {"stop": (":", "a")},
            }.get(action, {})
            answer = await play.ask(copy.deepcopy(messages), delivered=delivered, **more)
            play.engine.rest_of_answer = []
            if delivered:
                answer = (
                    without(answer, "reasoning_content") if action == "drop reasoning" else answer
                )
                histories.append([*messages, answer, user(f"u{len(histories)}")])

        for action, number, delivered, at_once in actions:
            messages = list(histories[number % len(histories)])
            if action == "edit":
                place = number % len(messages)
                messages[place] = messages[place] | {"content": f"edited {number}"}
            elif action == "compact":
                messages = [user(f"in short {number}")]
            waiting.append(asyncio.create_task(one(messages, action, delivered)))
            if not at_once or action in ("cut", "stop"):
                await asyncio.gather(*waiting)
                waiting.clear()
        await asyncio.gather(*waiting)
        return play

    play = asyncio.run(play_it())
    samples = play.session.samples()
    assert_sound(samples)
    delivered_calls = [call for call in play.session.calls if call.delivered]
    assert sum(int(s.loss_mask.sum()) for s in samples) == sum(
        c.end - c.start for c in delivered_calls
    )
    for call in delivered_calls:
        [sample] = [s for s in samples if s.sample_id == call.chain.sample.sample_id]
        assert sample.loss_mask[call.start : call.end].all()
    # what the engine was sent for each call stands at the beginning of a chain
    sent = [ids.tobytes() for ids, _ in play.engine.asked]
    for call in delivered_calls:
        assert call.chain.sample.token_ids[: call.start].tobytes() in sent
    assert len({s.sample_id for s in samples}) == len(samples)
    assert json.dumps([list(entry) for s in samples for entry in s.token_ledger or ()])


async def test_a_text_of_20_mb_costs_a_second_of_cpu_and_holds_nobody_up():
    play = Play()
    text, held, done = "the lawn is green. " * (1 << 20), [0.0], asyncio.Event()

    async def beats():
        while not done.is_set():
            began = time.thread_time()  # what the loop computes, whoever else has the core
            await asyncio.sleep(0)
            held.append(time.thread_time() - began)

    beating = asyncio.create_task(beats())
    for messages in ([user(text)], [user("a"), user(text)]):
        began = time.process_time()
        with pytest.raises(ChatRefused, match="more than 5000 tokens") as refused:
            await play.ask(messages)
        assert refused.value.code == "context_length_exceeded"
        assert time.process_time() - began < 1.0
    done.set()
    await beating
    assert max(held) < 0.2
    assert play.engine.asked == [] and not play.session.chains


async def test_many_characters_in_few_tokens_are_no_refusal():
    """A token of many characters: what counts is tokens."""
    play = Play(max_context_len=60)
    play.words.add_tokens(["x" * 99])
    assert (await play.ask([user("x" * 99 * 20)]))["role"] == "assistant"


@pytest.mark.parametrize("history", ["append", "template"])
async def test_long_texts_go_on_as_short_ones_do(history):
    """Rendered on a thread: two at once behind one answer are one sample and its fork."""
    play, long = Play(history=history), "x" * 99
    play.words.add_tokens([long])
    play.engine.answers = ["a<|end|>", "b<|end|>", "c<|end|>"]
    first = await play.ask([user(long * 350)])
    behind = [[user(long * 350), first, user(long * 340 + str(n))] for n in range(2)]
    await asyncio.gather(*map(play.ask, behind))
    samples = play.session.samples()
    assert_sound(samples)
    assert sorted(c.begins for c in play.session.chains) == ["fork", "root"]


async def test_tokens_are_counted_as_they_are_sent():
    play = Play()
    play.engine.answers = ["a<|end|>", "b<|end|>"]
    messages = [user("go")]
    for _ in range(2):
        request = ChatRequest(list(messages), b"")
        counted = await play.session.count_tokens(request)
        answer, commit = await play.session.answer(request)
        commit(True)
        assert counted == answer.prompt_tokens
        messages += [answer.message, user("on")]
    assert len(play.session.calls) == 2


async def test_a_call_that_the_request_does_not_want_is_text():
    play = Play()
    play.engine.answers = ["I [add {}]<|end|>"] * 2
    assert "tool_calls" in await play.ask([user("go")], tools=TOOLS)
    text = await play.ask([user("go on")], tools=TOOLS, readable=[])
    assert text["content"] == "I [add {}]" and "tool_calls" not in text


async def test_variables_that_the_template_does_not_read_are_taken_and_others_are_refused():
    play = Play("{% if bye %}bye{% endif %}" + CHATML)
    for values in ({"unread": 1}, {"bye": False}):
        await play.ask([user("go")], template_values=values)
    with pytest.raises(
        ChatRefused, match="chat_template_kwargs {'bye': True}: .*for the whole run"
    ):
        await play.ask([user("go")], template_values={"bye": True})


async def test_the_stop_text_is_told_and_what_begins_is_told_once_it_is_not_refused():
    play, told = Play(), []
    play.engine.answers = ["one END two<|end|>"]
    begun = lambda: told.append(len(play.engine.asked))  # noqa: E731
    answer, _ = await play.session.answer(
        ChatRequest([user("go")], b"", stop=("two", "END"), begun=begun)
    )
    assert (answer.stop_text, answer.message["content"], told) == ("END", "one ", [0])
    with pytest.raises(ChatRefused):
        await play.session.answer(ChatRequest([user("go " * 9999)], b"", begun=begun))
    assert told == [0]


@pytest.mark.parametrize(
    "ids, said",
    [("functions.{name}:{index}", "functions.add:0 functions.add:1 functions.add:2"), (None, None)],
)
async def test_ids_of_calls_are_counted_over_the_conversation_where_the_parser_says_so(ids, said):
    async def two_calls(text, tools):
        calls = ({"name": "add", "arguments": "{}"},) * text.count("[")
        return Parsed(text.replace("[", ""), None, calls, ids)

    play = Play(read=two_calls)
    play.engine.answers = ["a[[<|end|>", "b[<|end|>", "c<|end|>"]
    messages = [user("go")]
    while (answer := await play.ask(messages, tools=TOOLS)).get("tool_calls"):
        results = [
            {"role": "tool", "content": c["id"], "tool_call_id": c["id"]}
            for c in answer["tool_calls"]
        ]
        messages += [answer, *results]
    [sample] = play.session.samples()
    found = [m["content"] for m in messages if m["role"] == "tool"]
    if said is None:
        assert len(set(found)) == 3 and all(re.fullmatch("call_[0-9a-f]{24}", i) for i in found)
    else:
        assert " ".join(found) == said
    assert all(name in play.text(sample.token_ids) for name in found), "the model sees them"


@pytest.mark.parametrize("ended, reason", [("<|end|>", "tool_calls"), ("", "length")])
async def test_an_answer_with_calls_that_was_cut_says_length(ended, reason):
    play = Play()
    play.engine.answers = [CALL.replace("<|end|>", ended)]
    answer, _ = await play.session.answer(ChatRequest([user("go")], b"", tools=TOOLS))
    assert (answer.finish_reason, len(answer.message["tool_calls"])) == (reason, 1)


async def test_calls_that_end_at_a_stop_text_are_calls():
    play = Play()
    play.engine.answers = ['I [add {"a": 1}]END more']
    answer, _ = await play.session.answer(
        ChatRequest([user("go")], b"", tools=TOOLS, stop=("END",))
    )
    assert answer.finish_reason == "tool_calls"


async def test_answers_that_the_harness_itself_cuts_are_counted():
    play = Play(sampling=SamplingParams(max_new_tokens=9))
    play.engine.answers = ["one<|end|>", "two is long", "three is longer"]
    for number, most in enumerate((4, 4, None)):
        await play.ask([user(str(number))], max_tokens=most)
        play.engine.rest_of_answer = []
    reasons = [call.finish_reason for call in play.session.calls]
    assert reasons == ["stop", "length", "length"] and play.session.counts["cut_by_client"] == 1


async def test_text_that_is_dropped_without_calls_begins_a_chain():
    play = Play()
    play.engine.answers = ["well<|end|>", "good<|end|>"]
    answer = await play.ask([user("go")])
    await play.ask([user("go"), answer | {"content": ""}, user("and?")])
    assert [chain.begins for chain in play.session.chains] == ["root", "root"]


async def test_special_tokens_are_counted_once_in_each_text_that_is_new():
    play = Play()
    messages = [user("a <|end|> b")]
    for text in ("<|start|><|end|>", "no"):
        play.engine.answers = ["own <|start|><|end|>"]
        messages += [await play.ask(messages), user(text)]
    await play.ask(messages)
    assert play.session.counts["special_in_text"] == 3


async def test_a_stop_token_that_the_template_does_not_write_is_told_with_what_it_costs():
    play = Play()
    [end] = play.words.encode("<|call|>")
    play.engine.end, play.engine.answers = end, ["one<|call|>", "two<|call|>", "three<|call|>"]
    messages = [user("go")]
    for _ in range(3):
        messages += [await play.ask(messages), user("on")]
    first, second, _ = play.session.calls
    assert play.session.stop_token == end and play.session.counts["stop_token_forks"] == 2
    again = first.end + second.end - 2
    assert play.session.counts["stop_token_again"] == again


def test_a_sample_has_its_whole_conversation_with_the_answers_as_the_model_gave_them():
    made = Play()

    async def agent() -> None:
        made.engine.answers = ['(why) so [add {"a": 1}]<|end|>', "three<|end|>", "four<|end|>"]
        messages = [user("add")]
        messages.append(without(await made.ask(messages, tools=TOOLS), "reasoning_content"))
        call = messages[-1]["tool_calls"][0]["id"]
        messages.append({"role": "tool", "tool_call_id": call, "content": "it is 3"})
        await made.ask(messages, tools=TOOLS)
        await made.ask([user("other")])

    asyncio.run(agent())
    first, second = (sample.conversation for sample in made.session.samples())
    assert first[:1] == ("user: add",) and first[2:] == ("tool: it is 3", "assistant: three")
    assert first[1].splitlines() == ["assistant: (why)", " so ", 'calls add {"a": 1}']
    assert second == ("user: other", "assistant: four")


def test_an_answer_that_nobody_took_is_in_no_conversation_and_a_fork_has_its_own():
    made = Play()

    async def agent() -> None:
        made.engine.answers = [f"{word}<|end|>" for word in ("one", "two", "three")]
        begun = [user("go")]
        begun.append(await made.ask(begun))
        await made.ask([*begun, user("lost")], delivered=False)
        await made.ask([*begun, user("on")])

    asyncio.run(agent())
    found = [sample.conversation for sample in made.session.samples()]
    whole = ("user: go", "assistant: one", "user: on", "assistant: three")
    assert found == [whole[:2], whole]


def test_a_long_conversation_says_what_it_leaves_out():
    messages = [user(f"{number}" + "x" * 5000 * (number == 1)) for number in range(100)]
    texts = shown(messages)
    assert texts[0] == "user: 0" and texts[-1] == "user: 99" and len(texts) < 30
    assert "(76 messages" in texts[4] and texts[1].endswith("... (4,007 more characters)")
