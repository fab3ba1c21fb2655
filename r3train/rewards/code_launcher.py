"""The processes that a model's program runs in: ``python -I code_launcher.py JOB_FD TESTS_FD RESULT_FD``.

There are two.  The second reads a job, JSON, from the first descriptor: ``program``, whether it is
``tested``, and its limits, ``cpu_s``, ``memory_bytes``, ``file_bytes``.  It runs the program and, if that is
tested, asks the first for the tests: Python code, which the first reads from the second descriptor.  It says
when program, tests and what they left to atexit have run to their end.

The first runs nothing of the model's.  It alone holds RESULT_FD, and writes to it when the second has said so
and has ended with 0.  A program that ends its process before its tests therefore does not pass, and finds in
its process nothing that makes it pass.  ``directory_bytes`` of the job is the size of the file system that the
first makes for the working directory, or null.  Knows the standard library only.
"""

import atexit
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_VERSION = 0x20080522
_MS_NOSUID, _MS_NODEV = 2, 4
_RAN, _ENDED, _PASSED = b"ran", b"ended", b"passed"

_libc = ctypes.CDLL(None)


def main() -> None:
    """Run one job."""
    job_fd, tests_fd, result_fd = map(int, sys.argv[1:])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _make_directory(job_fd)
    # the program, though it is of the same user, can then neither read this process nor open its files
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    launcher_socket, program_socket = socket.socketpair()
    run_state = os.getpid()
    child = os.fork()
    if child == 0:
        for fd in (tests_fd, result_fd):
            os.close(fd)
        launcher_socket.close()
        _give_up_rights()
        if os.getppid() != run_state:  # it was gone before the kernel was asked to tell
            os._exit(1)
        _run(job_fd, program_socket)
    program_socket.close()
    os.close(job_fd)
    if _came_to_its_end(child, launcher_socket, tests_fd):
        os.write(result_fd, _PASSED)
    os._exit(0)


def _make_directory(job_fd: int) -> None:
    """Put a file system of fixed size over the working directory, in a mount namespace of our own."""
    size = json.loads(os.pread(job_fd, os.fstat(job_fd).st_size, 0))["directory_bytes"]
    if size is None:
        return
    here = os.getcwd()
    options = f"size={size},nr_inodes=65536,mode=0700".encode()
    flags = _MS_NOSUID | _MS_NODEV
    if _libc.mount(b"tmpfs", here.encode(), b"tmpfs", flags, options) != 0:
        sys.exit("no file system for the working directory")
    os.chdir(here)


def _give_up_rights() -> None:
    """Leave root's rights over the other process, which a namespace gives; readable for itself again."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _came_to_its_end(child: int, control: socket.socket, tests_fd: int) -> bool:
    """True once the child has ended with 0 and has said all that it says at its end, and nothing else."""
    with open(tests_fd, encoding="utf-8") as file:
        tests = json.load(file)
    ended = os.pidfd_open(child)
    if tests is not None:
        ready = select.poll()
        ready.register(control, select.POLLIN)
        ready.register(ended, select.POLLIN)
        ready.poll()
        if _said(control, len(_RAN)) == _RAN:
            try:
                control.sendall(tests.encode())
                control.shutdown(socket.SHUT_WR)
            except OSError:  # it has ended
                pass
    _, status = os.waitpid(child, 0)
    return status == 0 and _said(control, len(_ENDED) + 1) == _ENDED


def _said(control: socket.socket, size: int) -> bytes:
    try:
        return control.recv(size, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _run(job_fd: int, control: socket.socket) -> None:
    """Run the program, and its tests; ends the process."""
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    for kind, amount in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        resource.setrlimit(kind, (amount, amount))
    sys.argv = ["program.py"]
    names = {"__name__": "__main__"}
    code = compile(job["program"], "program.py", "exec")
    if not job["tested"]:
        try:
            exec(code, names)
        except SystemExit as end:  # a program may end so, after its output
            if end.code not in (None, 0):
                raise
    else:
        exec(code, names)
        control.sendall(_RAN)
        parts = []
        while part := control.recv(1 << 16):
            parts.append(part)
        exec(compile(b"".join(parts), "tests.py", "exec"), names)
    failures: list[object] = []
    sys.unraisablehook = failures.append  # gets what their functions raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if failures:
        os._exit(1)
    control.sendall(_ENDED)
    os._exit(0)  # threads that a program left behind


main()
