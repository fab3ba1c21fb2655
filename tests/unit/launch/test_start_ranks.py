"""``r3train train``: how many ranks, where they meet, what they get, and how the command ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from tests.unit.config.test_config import config
from tests.unit.doctor_setups import ROOT

from r3train.config import RunConfig
from r3train.engine.server import free_port
from r3train.launch.start import start_ranks as starts
from r3train.launch.start.start_ranks import OPTIONS, meeting, ranks_here, start_ranks, without


@pytest.fixture
def gpus(monkeypatch):
    """Says how many GPUs this machine shows."""

    def show(count: int) -> None:
        monkeypatch.setattr(starts, "visible_gpus", lambda: count)

    show(0)
    return show


@pytest.mark.parametrize(
    "visible, fields, nnodes, expected",
    [
        (0, {}, 1, 1),
        (0, {"expert_model_parallel_size": 2}, 1, 2),
        (0, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3}, 1, 6),
        (0, {"expert_model_parallel_size": 4}, 2, 2),
        (0, {"world_size": 4}, 2, 2),
        (8, {}, 1, 7),  # a server takes one GPU
        (8, {"sglang": {"tp_size": 4}, "expert_model_parallel_size": 4}, 1, 4),
        (8, {"sglang": {"tp_size": 1}, "expert_model_parallel_size": 4}, 1, 4),
        (8, {"rollout_external_engine_addrs": ["h:1"], "expert_model_parallel_size": 8}, 1, 8),
        (8, {"colocate": True, "max_weight_staleness": 0, "expert_model_parallel_size": 8}, 1, 8),
        (8, {"rollout_external_engine_addrs": ["h:1"], "expert_model_parallel_size": 16}, 2, 8),
    ],
)
def test_without_a_number_there_are_as_many_ranks_as_the_settings_need(
    visible, fields, nnodes, expected, gpus
):
    gpus(visible)
    assert ranks_here(config(**fields), None, nnodes) == expected


@pytest.mark.parametrize(
    "endpoint, expected",
    [("a:1", ("a", 1)), ("a", ("a", 29500)), ("10.0.0.1:99", ("10.0.0.1", 99))],
)
def test_machines_meet_at_the_endpoint(endpoint, expected):
    assert meeting(2, 1, endpoint) == expected


def test_a_machine_alone_meets_itself_at_a_free_port_of_loopback():
    host, port = meeting(1, 0, None)
    assert host == "127.0.0.1" and port > 1023


def test_the_ranks_get_every_flag_but_the_launchers():
    words = [
        "--nnodes",
        "2",
        "--config",
        "x",
        "--node_rank=1",
        "--lr",
        "--nnodes",
        "--master-addr",
        "h",
    ]
    assert without(OPTIONS, [*words[:5], *words[7:]]) == ["--config", "x"]
    assert without(OPTIONS, ["--prompt-data", "a", "b", "--nproc-per-node", "2"]) == [
        "--prompt-data",
        "a",
        "b",
    ]


def test_torchrun_at_a_taken_port_says_so_in_its_last_line():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        place = ("--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1")
        program = (ROOT / "train_async.py", "--config", ROOT / "configs/tiny_cpu.toml")
        command = [sys.executable, "-m", "torch.distributed.run", *place, *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "cannot meet" in last and f"port: {port}" in last, done.stderr


def test_a_python_without_the_packages_is_told_of_the_environment():
    command = [sys.executable, "-S", ROOT / "train_async.py", "--config", "tiny_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "take .venv/bin/python" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


RANK = """
import json, os, signal, sys, time
how, rank = sys.argv[1:], os.environ["RANK"]
threads = os.environ.get("OMP_NUM_THREADS")
def stopped(*_):
    sys.exit(int(how[1]))
if how[0] == "speaks" and rank == "1":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "x", "extraInfo": {"timestamp": "1"}}}, file)
    sys.exit(1)
if how[0] == "exits" and rank == "1":
    sys.exit(int(how[1]))
if how[0] == "dies" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how[0] == "waits":
    signal.signal(signal.SIGTERM, stopped)
    os.write(1, b"waits\\n")  # in one piece: both ranks write to one pipe
    time.sleep(60)
if how[0] == "stopped":  # and killed while it saves
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
if how[0] in ("stopped", "begins"):
    os.write(1, b"waits\\n")
if how[0] == "ends":
    sys.exit(0)
if how[0] == "writes":
    with open(f"{how[1]}.{rank}", "w") as file:
        json.dump(how, file)
    sys.exit(0)
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program in the place of a rank of ours."""
    (tmp_path / "small_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(starts, "PROGRAM", "small_rank")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    "flags, code, line",
    [
        (["ends"], 0, ""),
        (["speaks"], 1, ""),
        (["exits", "2"], 2, ""),  # a wrong setting, of which the rank has said a line
        (["exits", "3"], 3, r"rank 1 \(process \d+\) ended: exit code 3\n"),
        (
            ["dies"],
            1,
            r"rank 1 \(process \d+\) was ended by SIGKILL: often the kernel, out of memory .*\n",
        ),
    ],
)
def test_the_launcher_adds_a_line_only_where_no_rank_has_spoken(flags, code, line, program, capfd):
    assert start_ranks(flags, 2, 1, 0, *meeting(1, 0, None)) == code
    output = capfd.readouterr()
    assert output.out == ""
    assert re.fullmatch(line, output.err), output.err


def test_every_flag_arrives_at_every_rank_as_it_was_given(program, tmp_path):
    words = [
        "Judge $$x^2$$ of {response}",
        "${local_rank} $local_rank $rank $HOME",
        "kill -STOP $$",
    ]
    words += [
        "$",
        "$$$",
        "a=$1",
        "",
        " two  words ",
        "a,b",
        "'q\"",
        "\\n\n",
        "%s {0} *",
        "--",
        "\u00e9",
    ]
    flags = ["writes", str(tmp_path / "flags"), *words]
    assert start_ranks(flags, 2, 1, 0, *meeting(1, 0, None)) == 0
    for rank in range(2):
        assert json.loads((tmp_path / f"flags.{rank}").read_text()) == flags


def test_the_launcher_leaves_no_file(program, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for flags in (["ends"], ["speaks"]):
        start_ranks(flags, 2, 1, 0, *meeting(1, 0, None))
    assert not os.listdir(tmp_path / "temporary")


def test_a_port_that_is_taken_is_one_line(program, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert start_ranks(["ends"], 1, 1, 0, "127.0.0.1", port) == 1
    lines = capfd.readouterr().err.splitlines()
    said = f"Error: the ranks cannot meet at 127.0.0.1:{port}: "
    assert lines[-1].startswith(said) and "EADDRINUSE" in lines[-1] and len(lines) == 1, lines


@pytest.mark.parametrize(
    "flags, code, said",
    [
        (["waits", "0"], 0, ""),
        (["waits", "143"], 143, ""),
        (["begins"], 143, "stopped by SIGTERM before the first step\n"),
        (
            ["stopped"],
            1,
            r"rank \d \(process \d+\) was ended by SIGKILL: often the kernel, out of memory .*\n",
        ),
    ],
)
def test_a_signal_reaches_the_ranks_whose_exit_code_is_the_commands(flags, code, said, program):
    call = f"start_ranks({flags}, 2, 1, 0, '127.0.0.1', free_port('127.0.0.1'))"
    code_of = f"""
import sys
from r3train.engine.server import free_port
from r3train.config import RunConfig
from r3train.engine.server import free_port
from r3train.launch.start import start_ranks as starts
starts.PROGRAM = "small_rank"
sys.exit(starts.{call})
"""
    command = [sys.executable, "-c", code_of]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (code, "") and re.fullmatch(said, err), err


def test_a_signal_after_the_ranks_have_ended_is_no_stop(program):
    """The launcher is held where its ranks have ended, as it is while it closes its store."""
    code_of = """
import os, signal, sys
from torch.distributed.launcher import api
from r3train.engine.server import free_port
from r3train.launch.start import start_ranks as starts

class Launch(api.elastic_launch):
    def __call__(self, *command):
        found = super().__call__(*command)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

api.elastic_launch, starts.PROGRAM = Launch, "small_rank"
sys.exit(starts.start_ranks(["ends"], 2, 1, 0, "127.0.0.1", free_port("127.0.0.1")))
"""
    done = subprocess.run([sys.executable, "-c", code_of], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_while_a_ranks_interpreter_ends_does_not_count():
    code = """
import os
from r3train.launch.start.train import as_rank

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 15)

late = Late()
as_rank(lambda: None)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_signal_before_there_are_ranks_ends_the_command():
    code_of = """
import os, signal, sys
from torch.distributed.launcher import api
from r3train.launch.start import start_ranks as starts
api.elastic_launch = lambda *_: lambda *_: os.kill(os.getpid(), signal.SIGTERM)
starts.start_ranks(["ends"], 2, 1, 0, "127.0.0.1", 1)
"""
    done = subprocess.run([sys.executable, "-c", code_of], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM before the first step\n")


def test_the_package_offers_train_and_its_types_and_imports_nothing_before():
    code = """
import sys, r3train
assert not [name for name in sys.modules if name.startswith("r3train.")], "light"
from r3train import RunConfig, RolloutSample, train
assert "torch" not in sys.modules and callable(train) and RunConfig.from_toml("tiny_cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_train_starts_the_ranks_with_the_resolved_settings(monkeypatch, gpus):
    seen = []

    def start(flags, *how):
        seen.append((RunConfig.from_toml(flags[1]), how[:3]))
        return 0

    monkeypatch.setattr(starts, "start_ranks", start)
    asked = config(expert_model_parallel_size=2, num_rollout=3)
    assert starts.train(asked) == 0
    assert seen == [(asked, (2, 1, 0))]


def test_the_ranks_of_two_machines_meet_at_the_endpoint(tmp_path, monkeypatch):
    (tmp_path / "small_rank.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), 'of', dist.get_world_size(), flush=True)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    code = f"""
import sys
from r3train.engine.server import free_port
from r3train.launch.start import start_ranks as starts
starts.PROGRAM, node = "small_rank", int(sys.argv[1])
sys.exit(starts.start_ranks([], 1, 2, node, *starts.meeting(2, node, "{endpoint}")))
"""
    machines = [
        subprocess.Popen([sys.executable, "-c", code, str(node)], stdout=subprocess.PIPE, text=True)
        for node in (1, 0)
    ]
    try:
        said = sorted(machine.communicate(timeout=240)[0] for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
    assert said == ["0 of 2\n", "1 of 2\n"] and {m.returncode for m in machines} == {0}
