"""A small process between the trainer and a server, so that the server dies with its owner.

``python -m r3train.engine.server_guard --owner-pid PID -- COMMAND...`` runs COMMAND.  It ends
COMMAND and everything that COMMAND started when - the owner is gone: stdin reaches its end, or the
guard's parent changes, - the guard gets SIGTERM or SIGINT, - COMMAND itself or one of its worker
processes ends.  The guard exits with COMMAND's exit status.

Why a process: PR_SET_PDEATHSIG follows the *thread* that forked, a trainer forks from many, and a
SIGKILL of the trainer runs no handler.  On Linux the guard is a child subreaper, so a helper that
leaves the session (torch_shm_manager calls setsid) still ends up among its descendants.

A guard that gets SIGKILL leaves files behind, in the temporary directory and in /dev/shm.  The next one
removes those of its own user (``remove_leftovers``).

Imports nothing heavy: it starts in a fraction of a second and holds a few megabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from r3train.cuda_environment import set_kernel_cache
from r3train.process_tree import adopt_orphans, signal_when_parent_ends

_POLL_S = 0.5
_SIGHTINGS = 6  # on a crowded machine a helper may wait for a second before it runs its own program
_SCAN_S = 1.0
_REPORT_GRACE_S = 3.0
# Helpers remove shared memory once its users are gone, and end.  On an idle machine that takes no
# time.  Helpers that are killed earlier leave semaphores behind.
_HELPER_GRACE_S = 10.0
_HELPER_MARKS = ("resource_tracker", "torch_shm_manager")
# SGLang renames its workers; the server cannot serve without any one of them.
_WORKER_MARK = "sglang::"
_SHM_PREFIXES = ("/dev/shm/sglang_", "/dev/shm/sgl_shm")
_DIRECTORY_PREFIX = "r3t-"
# in a guard's directory: the list of its server's shared memory, JSON, locked while the guard lives
_LIST = ".shared_memory"


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    left = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.Error:
            continue
    return left


def _wait_until(done: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() <= end:
        time.sleep(0.05)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue


def _shared_memory_files(processes: list[psutil.Process]) -> set[str]:
    """List SGLang's files under /dev/shm that these processes map; a killed server leaves them."""
    found: set[str] = set()
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
                paths = (line.rstrip("\n").split(maxsplit=5)[-1] for line in maps)
                found.update(path for path in paths if path.startswith(_SHM_PREFIXES))
        except OSError:
            continue
    return found


@contextlib.contextmanager
def _own_directory() -> Iterator[tuple[str, Callable[[set[str]], None]]]:
    """Make a temporary directory for a server, and remove it in the end.

    The second value writes the list of files that the next guard removes if this one cannot.
    """
    directory = tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX)
    try:
        # another guard finds the list under its name, and that has its lock by then
        with open(os.path.join(directory, f"{_LIST}.new"), "w+", encoding="utf-8") as file:
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: nobody removes it then
                fcntl.flock(file, fcntl.LOCK_EX)
            json.dump([], file)
            file.flush()
            os.rename(file.name, os.path.join(directory, _LIST))

            def note(paths: set[str]) -> None:
                text = json.dumps(sorted(paths))
                file.seek(0)
                file.write(text)
                file.truncate()
                file.flush()

            yield directory, note
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove what guards of this user left that are gone: their directories, and the files on their lists.

    A guard's lock says that it lives: process numbers mean nothing in another container of the machine.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not _is_own_directory(directory):
                continue
            fd = os.open(directory / _LIST, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in json.load(file):
                    _remove_shared_memory(path)
            shutil.rmtree(directory, ignore_errors=True)


def _is_own_directory(path: Path) -> bool:
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _remove_shared_memory(path: object) -> None:
    """Remove a file of SGLang's under /dev/shm, and nothing else, if it is there."""
    if isinstance(path, str) and path.startswith(_SHM_PREFIXES) and path.count("/") == 3:
        with contextlib.suppress(OSError):
            os.unlink(path)


def end_tree(child: subprocess.Popen, leftovers: set[str]) -> None:
    """Kill the child and every descendant, helpers last, and remove ``leftovers`` (files).

    SGLang's own shutdown is a SIGKILL of its tree after a drain, so no cleanup is lost here.
    Returns when nothing is left.
    """
    tree = _descendants()
    leftovers |= _shared_memory_files(tree)
    _kill([p for p in tree if not any(mark in _command_line(p) for mark in _HELPER_MARKS)])
    _wait_until(lambda: not _alive(_descendants()), _HELPER_GRACE_S)
    for _ in range(100):
        left = _alive(_descendants())
        if not left:
            break
        _kill(left)
        time.sleep(0.05)
    child.wait()
    for orphan in psutil.Process().children():
        os.waitpid(orphan.pid, os.WNOHANG)  # orphans became children of this subreaper: reap them
    for path in leftovers:
        _remove_shared_memory(path)


def _owner_gone(owner_pid: int, stdin_fd: int, timeout_s: float) -> bool:
    readable, _, _ = select.select([stdin_fd], [], [], timeout_s)
    if readable and not os.read(stdin_fd, 4096):
        return True
    return os.getppid() != owner_pid


def _watch(
    owner_pid: int,
    child: subprocess.Popen,
    stopping: list[int],
    leftovers: set[str],
    note: Callable[[set[str]], None],
) -> int | None:
    """Wait for a reason to end; returns the child's status if that is the reason, else None.

    It adds files to remove to ``leftovers``, and calls ``note`` with them, while their users live: after
    a crash no process shows them any more.
    """
    workers: dict[int, psutil.Process] = {}
    seen: dict[psutil.Process, int] = {}  # scans in a row that found it
    next_scan = 0.0
    while not stopping:
        if _owner_gone(owner_pid, sys.stdin.fileno(), _POLL_S):
            return None
        status = child.poll()
        if status is not None:
            return status
        # A helper that a worker forks has the worker's name until it runs its own program.  A process
        # that keeps the name over several scans is a worker, and the server needs all workers.
        marked = [p for p in _descendants() if _command_line(p).startswith(_WORKER_MARK)]
        if time.monotonic() > next_scan:
            next_scan = time.monotonic() + _SCAN_S
            if found := _shared_memory_files(marked) - leftovers:
                leftovers |= found
                note(leftovers)
        seen = {p: seen.get(p, 0) + 1 for p in marked}
        workers |= {p.pid: p for p, times in seen.items() if times >= _SIGHTINGS}
        dead = [process for process in workers.values() if not _alive([process])]
        if dead:
            # SGLang writes the cause to its log when it notices: wait for that.
            _wait_until(lambda: child.poll() is not None, _REPORT_GRACE_S)
            print(f"server_guard: worker process {dead[0].pid} has ended", flush=True)
            return child.poll() or 1
    return None


def run(owner_pid: int, command: list[str]) -> int:
    """Run ``command`` under guard.

    Returns its exit status, 128+n when signal n ended it, and 0 when the guard ended it.
    """
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    adopt_orphans()
    remove_leftovers()
    # SGLang leaves its sockets in the temporary directory: give it one that can be removed.
    with _own_directory() as (directory, note):
        env = dict(os.environ)
        # compiled kernels are worth keeping
        set_kernel_cache(env, os.path.join(directory, "torchinductor"))
        env["TMPDIR"] = directory
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
            # Were the guard itself killed, the server must not outlive it.
            preexec_fn=lambda: signal_when_parent_ends(signal.SIGKILL),
        )
        leftovers: set[str] = set()
        status = _watch(owner_pid, child, stopping, leftovers, note)
        end_tree(child, leftovers)
    if status is None:
        return 0
    return 128 - status if status < 0 else status


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) < 4 or arguments[0] != "--owner-pid" or arguments[2] != "--":
        sys.exit("usage: python -m r3train.engine.server_guard --owner-pid PID -- COMMAND...")
    sys.exit(run(int(arguments[1]), arguments[3:]))


if __name__ == "__main__":
    main()
