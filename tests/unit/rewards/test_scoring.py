"""The one path that scores: every signature, its concurrency, and functions that misbehave.

Functions of a user run in a real process of their own, as in production.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.unit.reward_functions import NO_NUMBERS, PATH

from r3train.config.data_settings import DataSection
from r3train import process_tree
from r3train.rewards.weighted_sum import scored as with_parts
from r3train.rewards.scoring import Scorer
from r3train.types import Prompt, RolloutSample


def sample(text="", index=7, number=0, label="x", metadata=None) -> RolloutSample:
    prompt = Prompt(f"p.jsonl:{index}", index, "text", np.zeros(2, np.int32), label, metadata or {})
    length = 2 + len(text)
    return RolloutSample(
        sample_id=number,
        group_id=index,
        prompt=prompt,
        token_ids=np.arange(length, dtype=np.int32),
        prompt_len=2,
        loss_mask=np.arange(length) >= 2,
        rollout_log_probs=np.zeros(length, np.float32),
        routed_experts=np.zeros((length - 1, 2, 2), np.uint8),
        weight_versions=np.zeros(length, np.int32),
        finish_reason="stop",
        text=text,
    )


def settings(name=None, **more) -> DataSection:
    if name is not None:
        more["custom_rm_path"] = PATH + name
    return DataSection(prompt_data="-", **more)


def scored(data: DataSection, *samples: RolloutSample, group=False, **options) -> list[float]:
    """Rewards of samples, asked for all at once, and the scorer's end."""

    async def ask(scorer: Scorer) -> list[float]:
        if group:
            return await scorer.group(samples)
        return list(await asyncio.gather(*(scorer(s) for s in samples)))

    scorer = Scorer(data, **options)
    try:
        return asyncio.run(ask(scorer))
    finally:
        scorer.close()


@pytest.mark.parametrize(
    "name, reward",
    [
        ("half", 0.5),
        ("number", 4.0),
        ("numpy_number", 0.25),
        ("length_of_text", 4.0),
        ("later", 1.0),
        ("later_of_sample", 4.0),
    ],
)
def test_a_function_of_an_answer_or_of_a_sample_async_or_not(name, reward):
    assert scored(settings(name), sample("four")) == [reward]
    # by --rm-type, and as an evaluation's own
    assert scored(settings(rm_type=PATH + name), sample("four")) == [reward]
    assert scored(settings("fails"), sample("four"), rm_type=PATH + name) == [reward]


@pytest.mark.parametrize("name", ["ranks", "ranks_later"])
def test_a_function_of_a_group_sees_all_its_samples_and_keeps_their_order(name):
    samples = [sample("x" * length, number=n) for n, length in enumerate([5, 1, 9])]
    assert scored(settings(name, group_rm=True), *samples, group=True) == [1.0, 0.0, 2.0]


def test_any_reward_scores_a_group():
    samples = [sample("x" * length) for length in (5, 1)]
    assert scored(settings("length_of_text"), *samples, group=True) == [5.0, 1.0]
    assert scored(settings(rm_type="exact_match"), *samples, group=True) == [0.0, 1.0]


def test_a_reward_of_a_group_that_forgets_one_is_an_error():
    message = "reward .*one_too_few got 2 samples and must return a number for each, got 1 numbers"
    with pytest.raises(ValueError, match=f"prompt p.jsonl:7: {message}"):
        scored(settings("one_too_few", group_rm=True), sample(), sample(), group=True)


def test_reward_keys_add_up_and_their_numbers_stay_on_the_sample():
    weights = {"length": 0.5, "score": 10.0}
    (reward,) = scored(settings("tables"), sample("four"), weight_of_key=weights)
    assert (reward, reward.parts) == (7.0, (4.0, 0.5))
    kept, number = with_parts(sample("four"), reward)
    assert (kept.reward_parts, number, type(number)) == ((4.0, 0.5), 7.0, float)
    assert with_parts(sample("four"), 1.0)[0].reward_parts is None
    for name, message in (
        ("half", "must return a table"),
        ("tables", "without a finite number at key why"),
    ):
        with pytest.raises(ValueError, match=message):
            scored(settings(name), sample("four"), weight_of_key={"score": 1.0, "why": 1.0})


def test_reward_key_picks_from_a_table():
    assert scored(settings("tables", reward_key="score"), sample("four")) == [0.5]
    assert scored(settings("tables", reward_key="length"), sample("four")) == [4.0]
    data = settings("tables_of_group", group_rm=True, reward_key="score")
    assert scored(data, sample(), sample(), group=True) == [0.0, 1.0]
    for key, message in ((None, "--reward-key is not set"), ("why", "no number at key why")):
        with pytest.raises(ValueError, match=f"returned a table, and {message}"):
            scored(settings("tables", reward_key=key), sample())
    with pytest.raises(ValueError, match="must return a table"):
        scored(settings("half", reward_key="score"), sample())


def test_a_reward_that_may_be_missing_scores_where_it_is_named():
    data = settings(rm_type="exact_match")
    assert scored(data, sample("x"), sample("y"), optional=True) == [1.0, 0.0]
    assert scored(settings(), sample("x"), optional=True) == [0.0]


def test_all_calls_share_the_state_of_one_process():
    many = [sample(number=n) for n in range(20)]
    assert sorted(scored(settings("counts_calls"), *many)) == [float(n + 1) for n in range(20)]


def test_512_rewards_are_computed_at_once_and_no_more_than_their_concurrency():
    samples = [sample(number=n) for n in range(512)]
    together = settings("with_511_others", reward_concurrency=512)
    assert scored(together, *samples) == [1.0] * 512
    began = time.monotonic()
    assert scored(settings("one_second", reward_concurrency=256), *samples) == [1.0] * 512
    assert time.monotonic() - began >= 2


@pytest.mark.parametrize(
    "name, message",
    [
        ("nan", "must be a finite number, got nan"),
        ("nothing", "must be a finite number, got None"),
        ("text", "must be a finite number, got '1.0'"),
        ("fails", "raised KeyError: 'gold'"),
        ("fails_mutely", r"raised Mute: a Mute without a str \(RuntimeError\)"),
        ("cancels", "raised CancelledError: "),
        ("exits", "raised SystemExit: 0"),
        ("exits_later", "raised SystemExit: 0"),
        ("ends_its_process", r"ended its process \(exit code 3\)"),
        ("crashes", r"ended its process \(signal SIGABRT\)"),
        ("hangs_async", "took longer than reward_timeout_s 1"),
        ("holds_the_interpreter", "took longer than reward_timeout_s 1"),
    ],
)
def test_a_reward_that_misbehaves_ends_in_one_message_with_prompt_and_function(name, message):
    about = f"^prompt p.jsonl:7: reward tests.unit.reward_functions:{name} {message}"
    with pytest.raises(ValueError, match=about):
        scored(settings(name, reward_timeout_s=1.0), sample())


# forms of a reward: function, settings, weights of keys, whether it is of a group
_SUM = {"sound": 1.0, "spoilt": 0.0}
FORMS = {
    "number": ("spoilt", {}, None, False),
    "key": ("spoilt_table", {"reward_key": "spoilt"}, None, False),
    "first of keys": ("spoilt_table", {}, dict(reversed(_SUM.items())), False),
    "last of keys": ("spoilt_table", {}, _SUM, False),
    "group": ("spoilt_group", {"group_rm": True}, None, True),
    "key in a group": (
        "spoilt_group_of_tables",
        {"group_rm": True, "reward_key": "spoilt"},
        None,
        True,
    ),
    "keys in a group": ("spoilt_group_of_tables", {"group_rm": True}, _SUM, True),
}


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_no_finite_number_is_refused_in_every_form_of_a_reward(form):
    name, fields, weights, of_group = FORMS[form]
    scorer = Scorer(settings(name, **fields), weight_of_key=weights)

    async def ask(text: str) -> list[float]:
        last = sample(text, number=1)
        return await scorer.group([sample(), last]) if of_group else [await scorer(last)]

    try:
        assert (await ask("sound"))[-1] == 1.0
        for text in NO_NUMBERS:
            with pytest.raises(ValueError, match="prompt p.jsonl:7: .* number"):
                await ask(text)
    finally:
        scorer.close()


@pytest.mark.parametrize("name", ["floods", "returns_much"])
def test_a_reward_that_floods_ends_in_a_short_message(name, capfd):
    with pytest.raises(ValueError, match=f"p.jsonl:7: reward .*:{name}") as caught:
        scored(settings(name), sample())
    assert len(str(caught.value)) < 1500 and "characters)" in str(caught.value)
    assert capfd.readouterr().out == "", "what it prints does not reach our stdout"


def test_a_reward_that_hangs_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    data = settings("hangs_with_child", reward_timeout_s=1.0)
    with pytest.raises(ValueError, match="took longer than reward_timeout_s 1 .sample 3"):
        scored(data, sample(number=3, metadata={"pids": pids}))
    assert not [pid for pid in map(int, pids.read_text().split()) if is_running(pid)]


def test_children_of_a_process_whose_main_thread_has_ended_are_found(tmp_path):
    """It reads as a zombie, and its other threads and its children still run."""
    pids = tmp_path / "pids"
    script = f"""
import ctypes, subprocess, threading, time
child = subprocess.Popen(["sleep", "600"])
threading.Thread(target=time.sleep, args=(600,)).start()
open({str(pids)!r}, "w").write(str(child.pid))
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: pids.exists() and pids.read_text() and not is_running(process.pid))
        child = int(pids.read_text())
        assert process.poll() is None and is_running(child)
        assert child in process_tree.descendants()
    finally:
        process.kill()
        process.wait()
        if pids.exists():
            os.kill(int(pids.read_text()), signal.SIGKILL)


def test_the_process_of_a_reward_ends_with_an_owner_that_is_killed(tmp_path):
    script = """
import sys
from pathlib import Path
from tests.unit.rewards.test_scoring import sample, scored, settings
scored(settings("hangs_with_child", reward_timeout_s=60.0), sample(metadata={"pids": Path(sys.argv[1])}))
"""
    pids = tmp_path / "pids"
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(pids)], cwd=Path(__file__).parents[3]
    )
    try:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        reward = int(pids.read_text().split()[0])
        assert is_running(reward)
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: not any(map(is_running, map(int, pids.read_text().split()))))


def wait_for(condition, timeout_s=30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent", "has no absent"),
        ("value", "found 3, expected a function"),
        ("two", r"found a function \(prompt, text\), expected a function \(prompt, response_text"),
    ],
)
def test_a_custom_path_that_leads_nowhere_is_refused(name, message):
    with pytest.raises(ValueError, match=f"--custom-rm-path .*{message}"):
        Scorer(settings(name))


@pytest.mark.parametrize("path", ["no_colon", "no_such_module_here:f", ":f", "m:"])
def test_a_custom_path_that_cannot_be_imported_is_refused(path):
    with pytest.raises(ValueError, match="--rm-type|pattern"):
        Scorer(settings(rm_type=path))


def test_a_group_function_is_asked_for_and_refused_without_one():
    with pytest.raises(ValueError, match=r"--custom-rm-path .*expected a function \(samples\)"):
        Scorer(settings("half", group_rm=True))
    with pytest.raises(ValueError, match="--group-rm needs --custom-rm-path"):
        Scorer(settings(rm_type="math", group_rm=True))


def test_an_unknown_reward_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"--rm-type maths: unknown.*Did you mean math\?"):
        Scorer(settings(rm_type="maths"))


def test_a_row_may_name_its_own_reward():
    rows = [
        sample(r"so \boxed{0.5}", label="1/2", metadata={"rm_type": "math"}),
        sample("a red house", label="the red car", metadata={"rm_type": "f1"}),
        sample(r"\boxed{yes}", label="yes", metadata={"rm_type": "boxed_exact_match"}),
        sample("yes", label="yes"),
    ]
    assert scored(settings(rm_type="exact_match"), *rows) == [1.0, 0.5, 1.0, 1.0]
    assert scored(settings(), *rows[:3]) == [1.0, 0.5, 1.0]
    assert scored(settings("half"), *rows) == [0.5] * 4, "a function of the user scores all rows"


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({}, r"--rm-type is required: prompt p.jsonl:7: metadata.rm_type is missing"),
        ({"rm_type": "nothing"}, "prompt p.jsonl:7: metadata.rm_type nothing: unknown"),
        ({"rm_type": 3}, "prompt p.jsonl:7: metadata.rm_type must be a registered name, got 3"),
        ({"rm_type": "os:getcwd"}, "metadata.rm_type must be a registered name"),
    ],
)
def test_a_row_without_a_reward_is_refused_before_anything_is_scored(metadata, message):
    with pytest.raises(ValueError, match=message):
        Scorer(settings()).check([sample(metadata=metadata).prompt])


def test_a_label_that_the_reward_needs_must_be_there():
    with pytest.raises(ValueError, match="p.jsonl:7: gsm8k needs a label, and key answer is"):
        Scorer(settings(rm_type="gsm8k", label_key="answer")).check([sample(label=None).prompt])
    Scorer(settings("half")).check([sample(label=None).prompt])
