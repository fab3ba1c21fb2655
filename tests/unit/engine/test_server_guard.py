"""The guard, with cheap processes in the server's place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

# A "server" with a child of its own, and a helper that left the session as torch_shm_manager does.
SERVER = """
import json, os, subprocess, sys, tempfile, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
away = subprocess.Popen([sys.executable, "-c",
    "import os, time; os.setsid(); (os.fork() and os._exit(0)); "
    "open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); time.sleep(1000)"])
away.wait()
while not (os.path.exists(os.environ["PID_FILE"]) and open(os.environ["PID_FILE"]).read()):
    time.sleep(0.02)
open(os.path.join(tempfile.gettempdir(), "socket"), "w").close()
print(json.dumps([os.getpid(), child.pid, int(open(os.environ["PID_FILE"]).read()),
                  tempfile.gettempdir()]), flush=True)
time.sleep(1000)
"""
OWNER = """
import os, subprocess, sys, time
guard = subprocess.Popen([sys.executable, "-m", "r3train.engine.server_guard", "--owner-pid",
    str(os.getpid()), "--", sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE,
    start_new_session=True)
if len(sys.argv) > 2:  # a forked child that keeps the write end of the guard's stdin open
    if os.fork() == 0:
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(1000)
print(guard.pid, flush=True)
time.sleep(1000)
"""


def guard(command, tmp_path, owner_pid=None):
    return subprocess.Popen(
        [sys.executable, "-m", "r3train.engine.server_guard", "--owner-pid"]
        + [str(owner_pid or os.getpid()), "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PID_FILE": str(tmp_path / "pid")},
        text=True,
    )


def started(process):
    """Processes of the fake server and its temporary directory, once it runs."""
    *pids, directory = json.loads(process.stdout.readline())
    assert os.path.exists(os.path.join(directory, "socket"))
    return [psutil.Process(pid) for pid in pids], directory


def gone(processes, timeout=60):
    _, left = psutil.wait_procs(processes, timeout=timeout)
    return not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("how", ["stdin", signal.SIGTERM, signal.SIGINT])
def test_every_descendant_ends_even_one_that_left_the_session(how, tmp_path):
    process = guard([sys.executable, "-c", SERVER], tmp_path)
    tree, directory = started(process)
    if how == "stdin":
        process.stdin.close()
    else:
        process.send_signal(how)
    assert process.wait(timeout=60) == 0
    assert gone(tree, timeout=0)  # it ended after them
    assert not os.path.exists(directory)
    process.stdout.close()


@pytest.mark.parametrize("forked", [False, True])
def test_sigkill_of_the_owner_ends_the_tree(forked, tmp_path):
    """Also while a forked child of the owner holds the guard's stdin open."""
    extra = [str(tmp_path / "forked")] if forked else []
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, SERVER, *extra],
        stdout=subprocess.PIPE,
        env=os.environ | {"PID_FILE": str(tmp_path / "pid")},
        text=True,
    )
    guard_process = psutil.Process(int(owner.stdout.readline()))
    tree, directory = started(owner)
    owner.kill()
    owner.wait()
    try:
        assert gone([guard_process, *tree])
        assert not os.path.exists(directory)
    finally:
        if forked:
            os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)
        owner.stdout.close()


def test_sigkill_of_the_guard_ends_the_server(tmp_path):
    process = guard([sys.executable, "-c", SERVER], tmp_path)
    tree, directory = started(process)
    process.kill()
    process.wait()
    assert gone(tree[:1]), "the server itself follows its guard"
    for other in tree[1:]:
        other.kill()
    shutil.rmtree(directory, ignore_errors=True)  # the guard of another test removes it, too
    process.stdout.close()


@pytest.mark.parametrize(
    "code, status", [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_servers_own_end_is_noticed_with_its_status(code, status, tmp_path):
    process = guard([sys.executable, "-c", code], tmp_path)
    assert process.wait(timeout=60) == status
    process.stdin.close()
    process.stdout.close()


def test_the_end_of_one_worker_ends_a_server_that_does_not_notice(tmp_path):
    """The server starts a worker again and again, each for longer, until the guard has seen one."""
    script = tmp_path / "server.py"
    script.write_text(
        "import setproctitle, subprocess, sys, time\n"
        "if len(sys.argv) > 1:\n"
        "    setproctitle.setproctitle('sglang::scheduler')\n"
        "    time.sleep(float(sys.argv[1]))\n"
        "else:\n"
        "    for life in (2, 4, 8, 16, 32, 1000):\n"
        "        subprocess.run([sys.executable, __file__, str(life)])\n"
    )
    process = guard([sys.executable, str(script)], tmp_path)
    assert process.wait(timeout=200) == 1
    assert "worker process" in process.stdout.read()
    process.stdin.close()
    process.stdout.close()


def test_a_helper_that_a_worker_forks_is_no_worker(tmp_path):
    """It has the worker's name until it runs its own program, and ends when it likes."""
    script = tmp_path / "server.py"
    script.write_text(
        "import os, setproctitle, subprocess, sys, time\n"
        "if len(sys.argv) > 1:\n"
        "    setproctitle.setproctitle('sglang::scheduler')\n"
        "    for _ in range(150):\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(0.01)\n"
        "            os._exit(0)\n"
        "        os.wait()\n"
        "    print('helpers have ended', flush=True)\n"
        "    time.sleep(1000)\n"
        "else:\n"
        "    subprocess.Popen([sys.executable, __file__, 'worker'])\n"
        "    time.sleep(1000)\n"
    )
    process = guard([sys.executable, str(script)], tmp_path)
    assert process.stdout.readline() == "helpers have ended\n"
    time.sleep(1.5)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()


def test_an_owner_that_is_gone_before_the_guard_starts_is_noticed(tmp_path):
    process = guard([sys.executable, "-c", "import time; time.sleep(1000)"], tmp_path, owner_pid=1)
    assert process.wait(timeout=60) == 0
    process.stdin.close()
    process.stdout.close()


def test_a_wrong_command_line_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "r3train.engine.server_guard", "sleep", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "usage:" in done.stderr
