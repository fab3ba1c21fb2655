"""Rewards: what an answer is worth, and what is refused with the prompt's name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from r3train.rewards import get_reward
from r3train.types import Prompt


def prompt(label, metadata=None, prompt_id="p.jsonl:7") -> Prompt:
    return Prompt(prompt_id, 7, "text", np.zeros(1, np.int32), label, metadata or {})


def reward_of(rm_type, label, response, metadata=None) -> float:
    return get_reward(rm_type)(prompt(label, metadata), response, [])


ANIMALS = ["cat", "dog"]


@pytest.mark.parametrize(
    "label, response, metadata, reward",
    [
        (ANIMALS, "cat dog cat dog", {"num_words": 4}, 1.0),
        (ANIMALS, "cat apple dog saw", {"num_words": 4}, 0.5),
        ("cat dog", "cat apple", None, 0.5),
        (ANIMALS, "cat", {"num_words": 4}, 0.25),  # a short answer is measured by what was asked
        (ANIMALS, "cat dog cat dog apple apple apple apple", {"num_words": 4}, 0.5),
        (ANIMALS, "", None, 0.0),
        (ANIMALS, "cats", None, 0.0),
        (ANIMALS, " cat\n dog ", None, 1.0),
    ],
)
def test_accepted_words_is_the_share_of_right_words(label, response, metadata, reward):
    assert reward_of("accepted_words", label, response, metadata) == reward


@pytest.mark.parametrize(
    "label, metadata",
    [
        (7, {}),
        ([], {}),
        ("", {}),
        ([1], {}),
        ("cat", {"num_words": "8"}),
        ("cat", {"num_words": -1}),
    ],
)
def test_accepted_words_names_the_prompt_of_a_bad_label(label, metadata):
    with pytest.raises(ValueError, match="prompt p.jsonl:7"):
        reward_of("accepted_words", label, "cat", metadata)


def test_exact_match_compares_text_without_outer_space():
    assert reward_of("exact_match", "a b", " a b\n") == 1.0
    assert reward_of("exact_match", "a b", "a  b") == 0.0
    assert reward_of("exact_match", 42, "42") == 1.0
    with pytest.raises(ValueError, match="prompt p.jsonl:7: exact_match needs a label of text"):
        reward_of("exact_match", ["a"], "a")


@pytest.fixture(scope="module")
def math_reward():
    pytest.importorskip("math_verify")
    reward = get_reward("math", timeout_s=2.0)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    "label, response, reward",
    [
        ("42", r"The answer is \boxed{42}.", 1.0),
        (42, "so it is 42", 1.0),
        ("1/2", r"$\frac{1}{2}$", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"$x^2 + 1$", r"\boxed{1 + x^2}", 1.0),
        ("42", r"\boxed{41}", 0.0),
        ("42", "no idea", 0.0),
        ("42", "", 0.0),
    ],
)
def test_math_compares_by_value(math_reward, label, response, reward):
    assert math_reward(prompt(label), response, []) == reward


def test_math_works_from_several_threads_at_once(math_reward):
    results = {}

    def work(number):
        results[number] = math_reward(prompt(str(number)), rf"\boxed{{{number}}}", [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 1.0 for number in range(8)}


def test_an_answer_that_cannot_be_evaluated_scores_0_in_time_and_the_next_one_is_judged(
    math_reward,
):
    math_reward(prompt("4"), "4", [])
    start = time.monotonic()
    assert math_reward(prompt("4"), r"\boxed{9^{9^{9^{9}}}}", []) == 0.0
    assert time.monotonic() - start < 5
    assert math_reward(prompt("4"), r"\boxed{4}", []) == 1.0


@pytest.mark.parametrize("label", ["", ["4"], True])
def test_math_names_the_prompt_of_a_bad_label(math_reward, label):
    with pytest.raises(ValueError, match="prompt p.jsonl:7"):
        math_reward(prompt(label), "4", [])


def test_closing_math_ends_its_process(math_reward):
    math_reward(prompt("4"), "4", [])
    worker = math_reward.function._worker
    math_reward.close()
    assert worker.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_the_math_process_ends_with_an_owner_that_is_killed():
    pytest.importorskip("math_verify")
    code = (
        "import time\n"
        "import numpy as np\n"
        "from r3train.rewards import get_reward\n"
        "from r3train.types import Prompt\n"
        "reward = get_reward('math')\n"
        "reward(Prompt('p', 0, 't', np.zeros(1, np.int32), '4'), '4', [])\n"
        "print(reward.function._worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(owner.stdout.readline())
    assert is_running(worker)
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 5
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def test_a_math_process_that_breaks_is_an_error_and_no_reward():
    pytest.importorskip("math_verify")
    reward = get_reward("math")
    reward(prompt("4"), "4", [])
    reward.function._worker.stdin.close()
    reward.function._worker.wait()
    reward.function._worker.stdin = open(os.devnull, "w")
    with pytest.raises(ValueError, match="p.jsonl:7: .* the math process ended with code 0"):
        reward(prompt("4"), "4", [])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_unknown_reward_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"--rm-type maths: unknown.*Did you mean math\?"):
        get_reward("maths")


CUSTOM = """
import time
def half(prompt, text, ids): return 0.5
def number(prompt, text, ids): return len(ids)
def nan(prompt, text, ids): return float("nan")
def nothing(prompt, text, ids): return None
def fails(prompt, text, ids): raise KeyError("gold")
def short(text): return 1.0
async def later(prompt, text, ids): return 1.0
value = 3
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_for_test.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: get_reward("accepted_words", f"my_rewards_for_test:{name}")


def test_a_custom_reward_takes_the_place_of_rm_type(custom):
    assert get_reward("my_rewards_for_test:half")(prompt("x"), "", []) == 0.5
    assert custom("half")(prompt("x"), "", []) == 0.5
    assert custom("number")(prompt("x"), "", [1, 2, 3]) == 3.0


@pytest.mark.parametrize(
    "name, message",
    [
        ("nan", "must be a finite number, got nan"),
        ("nothing", "must be a finite number, got None"),
        ("fails", "raised KeyError: 'gold'"),
    ],
)
def test_a_custom_reward_that_gives_no_number_names_the_prompt(custom, name, message):
    with pytest.raises(ValueError, match=f"prompt p.jsonl:7: reward .*:{name} {message}"):
        custom(name)(prompt("x"), "", [])


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent", "has no absent"),
        ("value", "found 3, expected a function"),
        ("short", r"found a function \(text\), expected a function \(prompt, response_text"),
        ("later", "found an async function"),
    ],
)
def test_a_custom_path_that_leads_nowhere_is_refused(custom, name, message):
    with pytest.raises(ValueError, match=message):
        custom(name)


@pytest.mark.parametrize("path", ["no_colon", "no_such_module_here:f", ":f", "m:"])
def test_a_custom_path_that_cannot_be_imported_is_refused(path):
    with pytest.raises(ValueError, match="--custom-rm-path"):
        get_reward("accepted_words", path)
