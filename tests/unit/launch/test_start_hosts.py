"""The flags of ``r3train launch``; tests/e2e/test_launch_over_ssh.py has the runs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.launch.start_hosts import _hosts, _serving, _training

ALONE = ["--hosts", "a"]


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--hosts", "a:2,b:3"], "--hosts: every host has the same number of ranks"),
        (["--hosts", "a:2,b"], "--hosts: every host has the same number of ranks"),
        (["--hosts", "a,,b"], "--hosts: expected HOST or HOST:N, got ''"),
        (["--hosts", "a:0"], "--hosts: expected HOST or HOST:N, got 'a:0'"),
        (["--hosts", "a:x"], "--hosts: expected HOST or HOST:N, got 'a:x'"),
        (["--hosts=-oProxyCommand=x"], "--hosts: expected HOST or HOST:N, got '-oProxyCommand=x'"),
        (["--hosts", "a,b,a"], "--hosts: a is named twice"),
        (["--hosts", "a", "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: no such environment"),
        (
            ["--hosts", "a", "--serve-hosts", "b", "--rollout_external_engine_addrs=c:1"],
            "--serve-hosts starts the servers that --rollout-external-engine-addrs would name",
        ),
        (["--hosts", "a", "--", "--num-rollouts", "3"], "No such option "),
        (ALONE, "ssh: no such program on PATH"),
        ([], "Missing option '--hosts'"),
    ],
)
def test_a_wrong_flag_is_refused_before_a_host_is_asked(flags, line, monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho a host was asked >&2\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", "" if flags == ALONE else str(tmp_path))
    done = CliRunner().invoke(main, ["launch", "--config", "tiny_cpu", *flags])
    assert done.exit_code == 2 and line in " ".join(done.output.split()), done.output


def words(commands) -> list[str]:
    return [f"{command.host} {' '.join(command.words)}" for command in commands]


def test_every_host_gets_its_number_and_the_flags():
    assert words(_training(_hosts("me@a:2,b:2", "--hosts"), None, ["--lr", "1"])) == [
        "me@a train --nproc-per-node 2 --nnodes 2 --rdzv-endpoint a --lr 1",
        "b train --nproc-per-node 2 --nnodes 2 --rdzv-endpoint a --node-rank 1 --lr 1",
    ]
    assert words(_training(_hosts("a", "--hosts"), None, ["--lr", "1"])) == ["a train --lr 1"]
    assert words(_serving(_hosts("c:2,me@d", "--serve-hosts"), ["--lr", "1"])) == [
        "c serve --host c --index 0 --local-index 0 --lr 1",
        "c serve --host c --index 1 --local-index 1 --lr 1",
        "me@d serve --host d --index 2 --local-index 0 --lr 1",
    ]
