"""Commands as harnesses, run as real processes under their real guard."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from r3train.agents.command import run_command
from r3train.agents.http import Access
from r3train.chat.base import AgentFailed
from r3train.config.agent_settings import AgentSection
from tests.unit.agents.scripted import until


_ACCESS = Access("http://127.0.0.1:1/v1", "sk-session")
_TASK = {"prompt": "ask", "metadata": {"a": [1]}}


async def _run(path, program, output=None, **settings):
    command = [sys.executable, "-c", program]
    given = AgentSection(**{"agent_timeout_s": 60.0} | settings)
    return await run_command(command, _ACCESS, _TASK, path, given, output)


async def test_a_harness_gets_its_task_and_its_reward_is_read(tmp_path):
    program = """if True:
        import json, os
        task = json.load(open(os.environ["R3TRAIN_TASK_FILE"]))
        assert task == {"prompt": "ask", "metadata": {"a": [1]}}, task
        assert os.environ["OPENAI_BASE_URL"] == os.environ["OPENAI_API_BASE"] == "http://127.0.0.1:1/v1"
        assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == "sk-session"
        assert os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
        assert os.environ["OPENAI_DEFAULT_MODEL"] == os.environ["ANTHROPIC_MODEL"] == "r3train"
        assert os.environ["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
        assert os.listdir() == [] and os.getpgid(0) == os.getpid()
        open("left_here", "w").close()
        open(os.environ["R3TRAIN_REWARD_FILE"], "w").write('{"correct": 1}')
    """
    assert await _run(tmp_path, program) == {"correct": 1.0}
    assert (tmp_path / "work" / "left_here").exists()


async def test_a_harness_finds_its_files_where_the_runs_directory_is_relative(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    program = "import os; open(os.environ['R3TRAIN_REWARD_FILE'], 'w').write(str(len(open(os.environ['R3TRAIN_TASK_FILE']).read())))"
    assert await _run(Path("."), program) == len(json.dumps(_TASK))


async def test_a_harness_without_a_reward_file_has_no_reward(tmp_path):
    assert await _run(tmp_path, "pass") is None


async def test_no_secret_of_the_run_is_in_a_harness_or_its_guard(tmp_path, monkeypatch):
    monkeypatch.setenv("R3TRAIN_ENGINE_API_KEY", "engine-secret")
    monkeypatch.setenv("WANDB_API_KEY", "tracker-secret")
    monkeypatch.setenv("OPENAI_ORG_TOKEN", "other-secret")
    monkeypatch.setenv("NAMED", "named-value")
    program = """if True:
        import os
        for pid in os.getpid(), os.getppid():
            open(f"environ{pid}", "wb").write(open(f"/proc/{pid}/environ", "rb").read())
            open(f"line{pid}", "wb").write(open(f"/proc/{pid}/cmdline", "rb").read())
    """
    await _run(tmp_path, program, agent_env=("NAMED",))
    files = {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()}
    environs = [content for name, content in files.items() if name.startswith("environ")]
    assert len(files) == 4 and len(environs) == 2
    assert b"-secret" not in b"".join(files.values())
    assert all(b"NAMED=named-value" in content and b"PATH=" in content for content in environs)


@pytest.mark.parametrize(
    "program, what",
    [
        ("print('why'); raise SystemExit(3)", "ended with exit code 3; its last lines:\nwhy$"),
        ("import os; os.abort()", "ended with signal SIGABRT; it wrote nothing$"),
        ("raise ValueError('é')", "exit code 1; its last lines:\nTraceback(.|\n)*ValueError: é$"),
        (
            "import os, sys; print('x' * 10**7); print('end'); sys.stdout.flush(); os._exit(1)",
            "x\nend$",
        ),
        (
            "import os; open(os.environ['R3TRAIN_REWARD_FILE'], 'w').write('good')",
            r"/reward.json: the reward b'good': expected a number",
        ),
        (
            "import os; open(os.environ['R3TRAIN_REWARD_FILE'], 'w').write('good'); os._exit(2)",
            "ended with exit code 2; .*/reward.json: the reward b'good'",
        ),
    ],
)
async def test_a_harness_that_fails_is_quoted_with_its_last_lines(tmp_path, program, what):
    with pytest.raises(AgentFailed, match=what) as failed:
        await _run(tmp_path, program)
    assert len(str(failed.value)) < 20_000


@pytest.mark.parametrize("end", ["os._exit(2)", "os.kill(os.getpid(), 9)"])
async def test_a_reward_that_was_written_counts_whatever_the_exit_code_unless_that_is_wanted(
    tmp_path, end
):
    program = f"import os; open(os.environ['R3TRAIN_REWARD_FILE'], 'w').write('0.5'); {end}"
    for name in "ab":
        (tmp_path / name).mkdir()
    assert await _run(tmp_path / "a", program) == 0.5
    with pytest.raises(AgentFailed, match="ended with (exit code 2|signal SIGKILL)") as failed:
        await _run(tmp_path / "b", program, agent_exit_code_fails=True)
    assert failed.value.reward == 0.5


async def test_a_reward_does_not_hide_that_the_time_was_up(tmp_path):
    program = (
        "import os, time; open(os.environ['R3TRAIN_REWARD_FILE'], 'w').write('0.5'); time.sleep(99)"
    )
    with pytest.raises(AgentFailed, match="took longer than 3 s") as failed:
        await _run(tmp_path, program, agent_timeout_s=3.0)
    assert failed.value.reward == 0.5


async def test_no_proxy_stands_between_a_harness_and_its_endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "a.example, b.example")
    program = """if True:
        import os, urllib.request
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
        assert urllib.request.proxy_bypass("127.0.0.1:1") and not urllib.request.proxy_bypass("c.example")
        open(os.environ["R3TRAIN_REWARD_FILE"], "w").write(str(bool(urllib.request.proxy_bypass("b.example")) + 0))
    """
    assert await _run(tmp_path, program, agent_env=("no_proxy",)) == 1.0


async def test_a_command_that_is_not_there_fails_by_name(tmp_path):
    with pytest.raises(AgentFailed, match="exit code 127; .*\nno-such-harness: No such file"):
        await run_command(
            ["no-such-harness", "x"], _ACCESS, _TASK, tmp_path, AgentSection(agent_timeout_s=60.0)
        )


# It ignores SIGTERM; so does a grandchild that left its group.  The reward must never count.
_STUBBORN = """if True:
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.environ["R3TRAIN_REWARD_FILE"], "w").write("1")
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    print("started", flush=True)
    open(f"pid{os.getpid()}", "w").close()
    if os.getsid(0) != os.getpid():  # the grandchild
        time.sleep(1000)
    while len([name for name in os.listdir() if name.startswith("pid")]) < 2:
        time.sleep(0.01)
    END
"""


def _pids(path) -> list[int]:
    return [int(file.name[3:]) for file in (path / "work").glob("pid*")]


def _run_on(pids):
    return [pid for pid in pids if psutil.pid_exists(pid)]


async def _ended(path, how):
    """Run a stubborn harness to its end; returns its outcome, and the ids of its processes and of those left."""
    path.mkdir()
    program = _STUBBORN.replace("END", "os._exit(0)" if how == "end" else "time.sleep(1000)")
    limit_s = 5.0 if how == "time-out" else 60.0
    running = asyncio.create_task(_run(path, program, agent_timeout_s=limit_s))
    await until(lambda: running.done() or len(_pids(path)) == 2)
    pids = _pids(path)
    if how == "cancel":
        running.cancel()
        await asyncio.sleep(0.5)
        running.cancel()  # as the run's own end does, while the guard is at work
    (outcome,) = await asyncio.gather(running, return_exceptions=True)
    return outcome, pids, _run_on(pids)


async def test_nothing_is_left_of_a_harness_that_ignores_sigterm(tmp_path):
    hows = ["end", "time-out", "cancel"]
    ended = await asyncio.gather(*(_ended(tmp_path / how, how) for how in hows))
    assert [(len(pids), left) for _, pids, left in ended] == [(2, [])] * 3
    (reward, late, cancelled) = (outcome for outcome, _, _ in ended)
    assert reward == 1.0
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(late, AgentFailed)
    assert "took longer than 5 s; its last lines:\nstarted" in str(late)


async def test_nothing_is_left_of_a_harness_whose_start_is_cancelled(tmp_path, monkeypatch):
    start, began = asyncio.create_subprocess_exec, asyncio.Event()

    async def late(*words, **options):
        """The process runs before the loop hears of it, as on a busy machine."""
        process = await start(*words, **options)
        await until(lambda: len(_pids(tmp_path)) == 2)
        began.set()
        await asyncio.sleep(0.5)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)
    running = asyncio.create_task(_run(tmp_path, _STUBBORN.replace("END", "time.sleep(1000)")))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert _run_on(_pids(tmp_path)) == []


async def test_sigterm_comes_before_sigkill(tmp_path):
    program = """if True:
        import signal, sys, time
        def told(*_):
            open("told", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, told)
        open("ready", "w").close()
        time.sleep(1000)
    """
    running = asyncio.create_task(_run(tmp_path, program))
    await until(lambda: running.done() or (tmp_path / "work" / "ready").exists())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "work" / "told").exists()


async def test_a_harness_ends_with_the_run_that_is_killed(tmp_path):
    owner = """if True:
        import asyncio, pathlib, sys
        from r3train.agents.command import run_command
        from r3train.agents.http import Access
        from r3train.config.agent_settings import AgentSection
        command, directory = [sys.executable, "-c", sys.argv[2]], pathlib.Path(sys.argv[1])
        access, bounds = Access("http://x/v1", "k"), AgentSection(agent_timeout_s=600)
        asyncio.run(run_command(command, access, {}, directory, bounds))
    """
    program = _STUBBORN.replace("END", "time.sleep(1000)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", owner, str(tmp_path), program
    )
    try:
        await until(lambda: process.returncode is not None or len(_pids(tmp_path)) == 2)
        pids = _pids(tmp_path)
        assert len(pids) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until(lambda: not _run_on(pids))
