"""Bugs that a refactoring of agents, their sessions and their custody makes: each is planted, and a claim fails.

A claim is a function of the sound program that raises nothing; with its bug it raises AssertionError.
"""

from __future__ import annotations

import __future__
import asyncio
import inspect
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.unit.audit import test_custody as audited
from tests.unit.chat.test_token_ledger import (
    cut_session,
    PLANTED as LEDGERS,
    session as two_samples,
)
from tests.unit.data.test_replies import GPT_OSS
from tests.unit.data.test_session_templates import CHATML
from tests.unit.evidence_dirs import edit, write_run
from tests.unit.generation import test_recheck as recheck
from tests.unit.generation.session_play import Play, TOOLS, user
from tests.unit.generation.test_agent_episode import ask, play

from r3train.audit import audit_run
from r3train.algo import trajectories
from r3train.chat import token_ledger
from r3train.chat.base import AgentFailed, ChatRequest
from r3train.config import RunConfig
from r3train.data.templates import ChatTemplate
from r3train.engine.backend import SamplingParams
from r3train.generation import agent_episode, episode_task, sessions, stitch
from r3train.launch.job import agents
from r3train.proof import custody_verdict


class Bug(NamedTuple):
    """A piece of a function's source, other words in its place, and the claim that fails then."""

    owner: Any
    name: str
    old: str
    new: str
    claim: Callable[[pytest.MonkeyPatch], None]


def planted(bug: Bug) -> Callable:
    """The function with the bug in it."""
    function = vars(bug.owner)[bug.name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.old) == 1, "the bug has no place any more"
    code = compile(
        source.replace(bug.old, bug.new),
        f"<{bug.name} with a bug>",
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[bug.name]


# ---- sessions --------------------------------------------------------------------------------------


def other_tools_of_the_same_number_are_a_root(monkeypatch):
    made = Play()
    first = [user("go")]
    answer = asyncio.run(made.ask(first, tools=TOOLS))
    function = TOOLS[0]["function"] | {"name": "subtract"}
    others = ({"type": "function", "function": function},)
    asyncio.run(made.ask([*first, answer, user("on")], tools=others))
    assert [chain.begins for chain in made.session.chains] == ["root", "root"]
    assert "subtract" in made.text(made.session.samples()[-1].token_ids)


def stop_texts_keep_to_max_tokens(monkeypatch):
    made = Play()
    made.engine.answers = ["y" * 40]
    answer, _ = asyncio.run(
        made.session.answer(ChatRequest([user("go")], b"", max_tokens=5, stop=("x",)))
    )
    assert (answer.completion_tokens, answer.finish_reason) == (5, "length")
    assert [limit for _, limit in made.engine.asked] == [5]


def a_fork_keeps_to_the_longest_response(monkeypatch):
    made = Play(sampling=SamplingParams(max_new_tokens=60))
    made.engine.answers = ["a" * 19 + "<|end|>", "b<|end|>", "c" * 2000]
    first = [user("go")]
    answer = asyncio.run(made.ask(first))
    asyncio.run(made.ask([*first, answer, user("x")]))
    asyncio.run(made.ask([*first, answer, user("y")], max_tokens=1000))
    samples = made.session.samples()
    prompt = made.session.calls[0].start
    assert [s.num_tokens <= prompt + 60 for s in samples] == [True, True]
    assert samples[-1].num_tokens == prompt + 60 and samples[-1].finish_reason == "length"


def a_prompt_in_the_middle_is_the_templates_own(monkeypatch):
    made = Play(history="template")
    made.engine.end = made.words.encode("<|call|>")[0]
    made.engine.answers = ["well<|call|>", "good<|call|>"]
    answer = asyncio.run(made.ask([user("go")]))
    asyncio.run(made.ask([user("go"), answer, user("and?")]))
    assert [chain.begins for chain in made.session.chains] == ["root", "fork"]
    _, two = made.session.samples()
    whole = [user("go"), answer, user("and?")]
    rendered = made.settings.template.whole_text(whole, ())
    assert made.text(two.token_ids[: made.session.calls[1].start]) == rendered


def another_prefix_of_the_right_length_is_said(monkeypatch):
    forked = stitch.forked

    def wrong(sample, end, token_ids, *, sample_id):
        done = forked(sample, end, token_ids, sample_id=sample_id)
        tokens = done.token_ids.copy()
        tokens[2] += 1
        return replace(done, token_ids=tokens)

    monkeypatch.setattr(stitch, "forked", wrong)
    made = Play()
    first = [user("go")]
    answer = asyncio.run(made.ask(first))
    for text in ("a", "b"):
        asyncio.run(made.ask([*first, answer, user(text)]))
    try:
        made.session.samples()
    except AssertionError as error:
        assert "sample 641 has another beginning" in str(error)
    else:
        raise AssertionError("nothing was said")


def a_sample_ends_as_its_last_answer_that_was_taken(monkeypatch):
    for first, second in (("one<|end|>", "two"), ("one", "two<|end|>")):
        made = Play()
        made.engine.answers = [first, second]
        messages = [user("go")]
        answer = asyncio.run(made.ask(messages, max_tokens=4))
        asyncio.run(made.ask([*messages, answer, user("on")], delivered=False))
        [sample] = made.session.samples()
        call = made.session.calls[0]
        assert sample.finish_reason == ("stop" if "end" in first else "length")
        assert sample.text == "one" and sample.num_tokens == call.end
        assert made.text(sample.token_ids[sample.loss_mask]) == first


def a_cut_call_is_length(monkeypatch):
    made = Play()
    made.engine.answers = ['I [add {"a": 1}]']
    answer, _ = asyncio.run(made.session.answer(ChatRequest([user("go")], b"", tools=TOOLS)))
    assert answer.finish_reason == "length" and answer.message["tool_calls"]


def the_second_call_is_carried_and_not_written_again(monkeypatch):
    template = (
        GPT_OSS.partition("{% if m.role == 'assistant' and m.tool_calls %}")[0]
        + "{% if m.role == 'assistant' %}<|start|>assistant: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|start|>to={{ c.function.name }} {}<|call|>{% endfor %}"
        "{% if not m.tool_calls %}<|end|>{% endif %}"
        "{% elif m.role == 'tool' and not loop.previtem.tool_calls and loop.previtem.role != 'tool' %}"
        "{{ raise_exception('a tool, and no call') }}"
        "{% else %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    made = Play(template)
    chat = made.settings.template
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(("add", "look"))
    ]
    answer = {"role": "assistant", "content": "I", "tool_calls": calls}
    result = {"role": "tool", "content": "42", "tool_call_id": "c0", "name": "add"}
    [last] = made.words.encode("<|call|>")
    tokens, keeps = chat.behind(answer, [result], TOOLS, last)
    assert chat.with_calls and keeps
    assert made.text(tokens) == "<|start|>tool: 42<|end|><|start|>assistant"


# ---- episodes --------------------------------------------------------------------------------------


def the_last_posted_reward_counts(monkeypatch):
    async def posts(access) -> None:
        await ask(access, user("go"))
        for reward in (0.25, 1.0):
            access.take_reward(reward)

    assert play(posts, agent_reward_post=True).outcome()[1] == 1.0


def a_session_samples_as_it_is_told(monkeypatch):
    async def calls(access) -> float:
        await ask(access, user("go"))
        return 1.0

    made = play(calls, evaluates=True)  # of 50 tokens, where the run's have 4000
    made.outcome()
    assert [limit for _, limit in made.engine.asked] == [50]


def an_evaluated_failure_counts_as_configured(monkeypatch):
    async def fails(access) -> float:
        raise AgentFailed("it raised KeyError")

    made = play(fails, evaluates=True, agent_on_failure="drop", agent_failure_reward=-1.0)
    assert made.outcome()[1] == -1.0


# ---- settings --------------------------------------------------------------------------------------

# a value off its default, and where sessions have it
SETTINGS = {
    "agent_history": ("template", lambda made: made.history),
    "agent_max_calls": (3, lambda made: made.max_calls),
    "rollout_max_response_len": (17, lambda made: made.sampling.max_new_tokens),
    "rollout_max_context_len": (99, lambda made: made.max_context_len),
    "apply_chat_template_kwargs": (
        {"bye": True},
        lambda made: {"bye": made.template.whole_text([user("go")], ()).startswith("bye")},
    ),
}


def settings_arrive(monkeypatch):
    words = Play("{% if bye %}bye{% endif %}" + CHATML).words
    read = object()
    for name, (value, found) in SETTINGS.items():
        given = {"agent": "m:f", "apply_chat_template": True, name: value}
        config = RunConfig.from_toml("configs/tiny_cpu.toml", given)
        hf = SimpleNamespace(max_position_embeddings=512)
        made = agents.session_settings(config, hf, words, read)
        assert found(made) == value, name
        assert made.read is read and made.decode([words.encode("<|end|>")[0]]) == "<|end|>"


# ---- custody ---------------------------------------------------------------------------------------


def a_row_too_many_is_said(monkeypatch):
    samples = two_samples()
    rows = samples[0].routed_experts
    samples[0] = replace(samples[0], routed_experts=np.append(rows, rows[-1:], axis=0))
    [ledger] = token_ledger.session_ledgers(samples)
    assert [text for text in token_ledger.ledger_problems(ledger) if "640: 1 rows" in text]


def each_session_is_judged(monkeypatch):
    sound, broken = (
        token_ledger.session_ledgers(samples)[0]
        for samples in (two_samples(), LEDGERS["a lost fork"][0](two_samples()))
    )
    for ledgers in ([sound, broken], [broken, sound], [sound, sound, broken]):
        verdict = custody_verdict.judge_custody(ledgers)
        assert verdict.verdict == "failed" and "sample 640 is not there" in verdict.failures[0]
        assert verdict.sessions == len(ledgers)


def cut_answers_alone_lose_their_loss(monkeypatch):
    [masked] = trajectories.without_truncated([cut_session()])
    assert [Play().text(s.token_ids[s.loss_mask]) for s in masked] == ["one<|end|>three<|end|>", ""]
    [ledger] = token_ledger.session_ledgers(masked, mask_truncated=True)
    assert list(token_ledger.ledger_problems(ledger)) == []


def the_files_are_judged(monkeypatch):
    lost = LEDGERS["a token without its loss"][0]
    with tempfile.TemporaryDirectory() as directory:
        sound = write_run(Path(directory) / "sound", custody=audited.two_sessions)
        assert audit_run.audit_run(sound).claims["custody"] == "passed"
        run = write_run(
            Path(directory) / "run", custody=lambda step: audited.two_sessions(step, lost)
        )
        records = (run / audited.CUSTODY).read_text()
        (sound / audited.CUSTODY).write_text(records + "".join(_later(sound, run)))
        found = audited.said(audit_run.audit_run(sound))
    assert any(re.match("sample 640: tokens .* have loss", text) for text in found), found


def _later(sound: Path, run: Path) -> list[str]:
    """Records of a sound run that stand after those of one that ended before."""
    lines = [
        (path / audited.CUSTODY).read_text().splitlines(keepends=True) for path in (sound, run)
    ]
    return lines[0][len(lines[1]) :]


def a_session_that_the_files_lost_is_missed(monkeypatch):
    with tempfile.TemporaryDirectory() as directory:
        run = write_run(Path(directory) / "run", custody=audited.two_sessions)
        edit(run, audited.CUSTODY, lambda lines: lines[1:])
        assert audit_run.audit_run(run).claims["custody"] == "failed"


def every_place_of_a_session_is_rechecked(monkeypatch):
    recheck.test_of_a_session_with_several_samples_every_place_is_rechecked()


SESSION, EPISODE = sessions.Session, agent_episode.AgentEpisode
BUGS = {
    "tools are counted, not compared": Bug(
        sessions,
        "_prefixes",
        "json.dumps(list(request.tools), sort_keys=True)",
        "str(len(request.tools))",
        other_tools_of_the_same_number_are_a_root,
    ),
    "a piece of an answer passes the room": Bug(
        SESSION,
        "_sampled",
        "min(tokens_left, _STOP_PIECE) if stops",
        "_STOP_PIECE if stops",
        stop_texts_keep_to_max_tokens,
    ),
    "max_tokens above the room": Bug(
        SESSION,
        "_sampled",
        "self._room(place), place.request.max_tokens,",
        "place.request.max_tokens or self._room(place),",
        a_fork_keeps_to_the_longest_response,
    ),
    "the template's history keeps the end token": Bug(
        SESSION,
        "_render",
        "_Rendered(parent, behind, keeps_last)",
        "_Rendered(parent, behind, True)",
        a_prompt_in_the_middle_is_the_templates_own,
    ),
    "beginnings are compared by their lengths": Bug(
        sessions,
        "_misplaced",
        "np.array_equal(\n        call_tokens, parent_tokens\n    )",
        "len(call_tokens) == len(parent_tokens)",
        another_prefix_of_the_right_length_is_said,
    ),
    "the finish reason of an answer that nobody took": Bug(
        SESSION,
        "_finished",
        "_finish(last.finish_reason)",
        "_finish(chain.tip.finish_reason)",
        a_sample_ends_as_its_last_answer_that_was_taken,
    ),
    "the text of an answer that nobody took": Bug(
        SESSION,
        "_finished",
        "self._text(last)",
        "self._text(chain.tip)",
        a_sample_ends_as_its_last_answer_that_was_taken,
    ),
    "tokens of an answer that nobody took": Bug(
        SESSION,
        "_finished",
        "stitch.cut(sample, last.end)",
        "stitch.cut(sample, chain.tip.start)",
        a_sample_ends_as_its_last_answer_that_was_taken,
    ),
    "calls that were cut are calls": Bug(
        SESSION,
        "answer",
        'reason == "stop" and "tool_calls" in answer',
        '"tool_calls" in answer',
        a_cut_call_is_length,
    ),
    "calls end at the first place of their token": Bug(
        ChatTemplate,
        "_behind_calls",
        "end[len(end) - end[::-1].index(last) :]",
        "end[end.index(last) + 1 :]",
        the_second_call_is_carried_and_not_written_again,
    ),
    "the first posted reward": Bug(
        EPISODE, "__call__", "posted[-1]", "posted[0]", the_last_posted_reward_counts
    ),
    "an evaluated session samples as rollouts": Bug(
        EPISODE,
        "__call__",
        "replace(agents.sessions, sampling=sampling)",
        "agents.sessions",
        a_session_samples_as_it_is_told,
    ),
    "an evaluated failure counts 0": Bug(
        EPISODE,
        "__call__",
        "samples or [nothing], agents.settings.agent_failure_reward",
        "samples or [nothing], 0.0",
        an_evaluated_failure_counts_as_configured,
    ),
    **{
        f"{line.partition('=')[0]} is not handed over": Bug(
            agents, "session_settings", line, instead, settings_arrive
        )
        for line, instead in (
            ("history=config.agent.agent_history,", "history='append',"),
            ("max_calls=config.agent.agent_max_calls,", "max_calls=64,"),
            ("SamplingParams(config.rollout.rollout_max_response_len)", "SamplingParams(16)"),
            ("context_len(config, hf)", "512"),
            (
                "ChatTemplate(tokenizer, config.data)",
                'ChatTemplate(tokenizer, config.data.model_copy(update={"apply_chat_template_kwargs": {}}))',
            ),
        )
    },
    "rows too many pass": Bug(
        token_ledger, "_rows_lacking", "abs(", "max(0, ", a_row_too_many_is_said
    ),
    "the first session is judged": Bug(
        custody_verdict,
        "judge_custody",
        "for record in records for text",
        "for record in records[:1] for text",
        each_session_is_judged,
    ),
    "whole samples lose their loss": Bug(
        trajectories,
        "_masked",
        "steps[-1].token_ledger is not None",
        "False",
        cut_answers_alone_lose_their_loss,
    ),
    "answers that were cut are not in the ledger": Bug(
        sessions,
        "ledger_entry",
        'int(sample.finish_reason == "length")',
        "0",
        cut_answers_alone_lose_their_loss,
    ),
    "records of custody are not audited": Bug(
        audit_run, "_findings", "in step.sessions:", "in ():", the_files_are_judged
    ),
    "the audit takes the run's word for its custody": Bug(
        audit_run._RunAudit,
        "_judge_steps",
        "custody=judge_custody(trained)",
        "custody=line.custody",
        a_session_that_the_files_lost_is_missed,
    ),
    "the first sample of a session is rechecked": Bug(
        episode_task.EpisodeTask,
        "to_recheck",
        "samples[sample_seed(seed, self.sample_id) % len(samples)]",
        "samples[0]",
        every_place_of_a_session_is_rechecked,
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_that_is_planted_fails_its_claim(bug, monkeypatch):
    with monkeypatch.context() as sound:
        bug.claim(sound)
    monkeypatch.setattr(bug.owner, bug.name, planted(bug))
    with pytest.raises((AssertionError, ValueError)):
        bug.claim(monkeypatch)
