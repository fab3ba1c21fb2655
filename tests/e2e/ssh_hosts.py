"""Two hosts of one machine, 127.0.0.1 and 127.0.0.2, by an sshd of the tests' own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.debian_packages import installed

from r3train.engine.server import free_port

HOSTS = ("127.0.0.1", "127.0.0.2")


def programs() -> tuple[str, str] | None:
    """The paths of sshd and ssh; None where they are missing and cannot be installed."""
    found = installed("sshd", "openssh-server"), installed("ssh", "openssh-client")
    return None if None in found else found


@contextmanager
def hosts(directory: Path, sshd: str, ssh: str) -> Iterator[Path]:
    """An sshd that both hosts answer by, with keys of its own.

    Gives a directory for PATH whose ssh knows the keys and the port, and asks nothing of the user's files.
    """
    port = free_port(HOSTS[0])
    for name in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name]
        subprocess.run(make, check=True)
    key = (directory / "host_key.pub").read_text()
    (directory / "known_hosts").write_text("".join(f"[{host}]:{port} {key}" for host in HOSTS))
    (directory / "authorized_keys").write_bytes((directory / "user_key.pub").read_bytes())
    (directory / "sshd_config").write_text(
        f"Port {port}\n"
        + "".join(f"ListenAddress {host}\n" for host in HOSTS)
        + f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/authorized_keys\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 20\n"
    )
    (directory / "ssh_config").write_text(
        f"Host *\nPort {port}\nIdentityFile {directory}/user_key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {directory}/known_hosts\nStrictHostKeyChecking yes\n"
    )
    wrapper = directory / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {directory}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd, as root, refuses to start without it
    log = (directory / "sshd.log").open("wb")
    daemon = subprocess.Popen([sshd, "-D", "-e", "-f", directory / "sshd_config"], stderr=log)
    try:
        for _ in range(200):
            with socket.socket() as connection:
                if connection.connect_ex((HOSTS[0], port)) == 0:
                    break
            assert daemon.poll() is None, (directory / "sshd.log").read_text()
            time.sleep(0.1)
        yield wrapper.parent
    finally:
        daemon.terminate()
        daemon.wait()
        log.close()
