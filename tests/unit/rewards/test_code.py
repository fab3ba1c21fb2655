"""Programs of a model in real processes: tests that pass, and programs that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.unit.rewards.test_scoring import is_running, sample, scored, settings, wait_for

from r3train.rewards.scoring import Scorer
from r3train.rewards.code import isolation, program_of

CODE = {"rm_type": "code", "reward_timeout_s": 5.0}


def reward_of(program, label, **more) -> float:
    answer = sample(f"So:\n```python\n{program}\n```\n", label=label)
    (reward,) = scored(settings(**CODE | more), answer)
    return reward


ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = "print(sum(int(word) for word in input().split()))"
ECHO_TESTS = {"inputs": ["1 2\n", "4 5"], "outputs": ["3\n", "9"]}


@pytest.mark.parametrize(
    "program, label, reward",
    [
        (ADD, ADD_TESTS, 1.0),
        (ADD, "\n".join(ADD_TESTS), 1.0),
        (ADD, json.dumps(ADD_TESTS), 1.0),
        (ADD.replace("+", "-"), ADD_TESTS, 0.0),
        (ECHO, ECHO_TESTS, 1.0),
        (ECHO, json.dumps(ECHO_TESTS), 1.0),
        (ECHO + "\nraise SystemExit", ECHO_TESTS, 1.0),
        (f"import atexit\n@atexit.register\ndef end(): {ECHO}", ECHO_TESTS, 1.0),
        (f"import atexit\n{ECHO}\natexit.register(lambda: 1 / 0)", ECHO_TESTS, 0.0),
        (ECHO.replace("sum", "max"), ECHO_TESTS, 0.0),
        ("print(3", ECHO_TESTS, 0.0),
        ("1 / 0", ADD_TESTS, 0.0),
        # no test is passed by a program that does not let it run
        ("import os; os._exit(0)", ADD_TESTS, 0.0),
        ("import sys; sys.exit(0)", ADD_TESTS, 0.0),
        ("print('passed')", ADD_TESTS, 0.0),
    ],
)
def test_a_program_earns_1_if_it_passes_every_test(program, label, reward):
    assert reward_of(program, label) == reward


def test_the_last_block_of_python_counts():
    text = "```\n1\n```\n```\n2\n```\n```json\n3\n```"
    assert program_of(text) == "2\n"
    assert program_of("no block") is None
    assert program_of("```python\ncut off") is None
    assert scored(settings(**CODE), sample("no block", label="assert True")) == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        f"```{language}\n{ADD}```"
        for language in (
            "Python",
            "PYTHON",
            "python3",
            "py3",
            "py",
            " python",
            "python title=a.py",
            "{.python}",
        )
    ]
    + [
        f"~~~python\n{ADD}~~~",
        f"````python\n{ADD}````",
        "1. First:\n   ```python\n" + textwrap.indent(ADD, "   ") + "   ```\n",
        "- ```python\n" + textwrap.indent(ADD, "  ") + "  ```\n",
        f"```python\n{ADD}```\nIt prints:\n```\n3\n```",
        f"Inline ```x``` first.\n```python\n{ADD}```",
        f"<think>\n```python\n1 / 0\n```\n</think>\n```\n{ADD}```",
        f"```python\n{ADD}```\n```bash\nls\n```",
        f"```python\r\n{ADD}```",
    ],
)
def test_a_right_program_is_found_whatever_its_fence(text):
    assert scored(settings(**CODE), sample(text, label=ADD_TESTS)) == [1.0]


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
CALLED = {"inputs": [[1, 2], [0, 0]], "outputs": [3, [0]], "fn_name": "add"}


@pytest.mark.parametrize(
    "label, metadata",
    [
        (CHECK, {"entry_point": "add"}),
        (CHECK + "\ncheck(add)", {}),
        (CALLED, {}),
        (str(CALLED), {}),
        (json.dumps(json.dumps(CALLED)), {}),
        ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, {}),
        (str(ADD_TESTS), {}),
    ],
)
def test_tests_of_other_sets_are_understood(label, metadata):
    prompts = [sample(label=label, metadata=metadata).prompt]
    Scorer(settings(**CODE)).check(prompts)
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    programs = {ADD: 1.0, ADD.replace("+", "-"): 0.0, "x = 1": 0.0}
    if "fn_name" in str(label):
        programs[method] = 1.0
    answers = [
        sample(f"```python\n{program}\n```", label=label, metadata=metadata) for program in programs
    ]
    assert scored(settings(**CODE), *answers) == list(programs.values())


def test_a_table_of_parquet_has_the_keys_of_all_rows():
    assert reward_of(ECHO, ECHO_TESTS | {"fn_name": None}) == 1.0
    assert (
        reward_of(f"def f(): return (1, 2)", {"inputs": [[]], "outputs": [[1, 2]], "fn_name": "f"})
        == 1.0
    )


@pytest.mark.parametrize(
    "label, message",
    [
        (CHECK, r"runs no test: end with a call of check, or name the function in metadata.entry"),
        ("def test_add():\n    assert add(1, 2) == 3", "runs no test: end with a call of test_add"),
        ("add(1, 2) == 3", r"add\(1, 2\) == 3 cannot fail: write assert CONDITION"),
        (["assert add(1, 2) == 3", "add(1, 1) == 2"], "add.1, 1. == 2 cannot fail"),
        ("assert (add(1, 2) == 3, 'sum')", "cannot fail: write assert CONDITION"),
        ("def check(f):\n    assert (f(1), 'x')\ncheck(add)", "cannot fail: write assert"),
        ("# no tests", "runs no test: write assert CONDITION"),
        ("result = add(1, 2)", "runs no test: write assert CONDITION"),
        ("assert add(1, 2) ==", "the tests are no Python"),
        ("assert True", "an empty program passes the tests"),
        ("for x in []:\n    assert add(x, x)", "an empty program passes the tests"),
        ({"inputs": ["1"], "outputs": [" \n"]}, "needs an output that is not empty"),
        (
            {**ECHO_TESTS, "timeout": 3},
            r"needs tests of inputs, outputs and perhaps fn_name, not \['timeout'\]",
        ),
        ({"inputs": [1], "outputs": [2], "fn_name": "f"}, "fn_name needs inputs that are lists of"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f()"}, "fn_name needs inputs that are li"),
        ({"inputs": [{"a": 1}], "outputs": [2], "fn_name": "f"}, "fn_name needs inputs that are"),
        ("{'inputs': ['1'], 'outputs': []}", "as many texts in inputs as in outputs"),
    ],
)
def test_tests_that_every_program_passes_or_none_are_refused_with_their_prompt(label, message):
    with pytest.raises(ValueError, match=f"prompt p.jsonl:7: code.*{message}.*, got ") as caught:
        Scorer(settings(**CODE)).check([sample(label=label).prompt])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(3600)",
        "while True: print('x' * 100_000)",
        "x = bytearray(3 << 30)",
        "open('big', 'wb').write(bytes(200 << 20))",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
    ],
)
def test_a_program_that_takes_too_much_scores_0_in_time(program):
    assert reward_of(program, {"inputs": [""], "outputs": ["x"]}, reward_timeout_s=2.0) == 0.0


def test_children_of_a_program_are_killed_with_it(tmp_path):
    # one that stays in the group, and one that leaves it
    program = f"""
import os, subprocess, sys
children = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
os._exit(0)
"""
    before = sleepers()
    assert reward_of(program, ADD_TESTS) == 0.0
    wait_for(lambda: sleepers() == before)


def test_a_program_scores_where_descriptors_are_many():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        assert reward_of(ECHO, ECHO_TESTS) == 1.0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')",
        "import os\nos.makedirs('a/b'); os.chmod('a', 0)",
    ],
)
def test_the_directory_of_a_program_goes_whatever_it_holds(program, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert reward_of(program, ["assert False"]) == 0.0
    assert not list(tmp_path.iterdir())


def test_a_program_ends_with_a_trainer_that_is_killed(tmp_path):
    there = tmp_path / "there"
    program = f"import time; open({str(there)!r}, 'w'); time.sleep(600)"
    code = f"from r3train.rewards.code import passes; passes({program!r}, [(None, '', None)], 600)"
    ours = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=ours) as trainer:
        wait_for(there.exists)
        started = psutil.Process(trainer.pid).children(recursive=True)
        trainer.kill()
    assert started
    wait_for(lambda: not any(is_running(process.pid) for process in started))


def sleepers() -> set[int]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read() == b"sleep\x00600\x00" and is_running(int(pid)):
                    found.add(int(pid))
        except OSError:
            continue
    return found


def test_a_program_has_no_network_where_namespaces_can_be_had():
    if not isolation():
        pytest.skip("not run: this machine lets nobody make a network namespace (unshare)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection({server.getsockname()}, timeout=3)"
        assert reward_of(f"try:\n    {connect}\nexcept OSError: print('none')", no_network()) == 1.0
        socket.create_connection(server.getsockname(), timeout=3).close()


def no_network() -> dict:
    return {"inputs": [""], "outputs": ["none"]}


def test_a_program_sees_none_of_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "gold")
    program = "import os\nprint(os.environ.get('SECRET_OF_OURS', 'none'))"
    assert reward_of(program, no_network()) == 1.0


@pytest.mark.parametrize("label", ["", [], [1], {"inputs": ["1"], "outputs": []}, 7])
def test_a_label_without_tests_is_refused_with_its_prompt(label):
    with pytest.raises(ValueError, match="p.jsonl:7: code needs a label of Python code"):
        Scorer(settings(**CODE)).check([sample(label=label).prompt])


def test_a_program_is_not_blamed_for_time_in_which_nothing_runs_it(tmp_path):
    there = tmp_path / "there"
    program = f"import time\nopen({str(there)!r}, 'w').close()\nbegan = time.process_time()\n"
    program += "while time.process_time() - began < 1: pass\nprint(3)"

    def stop_it_for_8_s():
        wait_for(there.exists)
        started = psutil.Process().children(recursive=True)
        for process in started:
            process.suspend()
        time.sleep(8)
        for process in started:
            process.resume()

    with ThreadPoolExecutor() as threads:
        stopped = threads.submit(stop_it_for_8_s)
        tests = {"inputs": [""], "outputs": ["3"]}
        assert reward_of(program, tests, reward_timeout_s=4.0) == 1.0
        stopped.result()
