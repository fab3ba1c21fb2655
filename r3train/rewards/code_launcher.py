"""The process that a model's program runs in: ``python -I code_launcher.py JOB_FD RESULT_FD``.

Reads a job, JSON, from the first descriptor: ``program``, ``tests`` (Python code that runs after it, or
null), ``token``, and limits of this process, ``cpu_s``, ``memory_bytes``, ``file_bytes``.  When program
and tests have run to their end, and what they left to atexit, it writes the token to the second.  A program that ends the process
before its tests therefore does not pass.  Knows the standard library alone.
"""

import atexit
import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one job."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    os.set_inheritable(result_fd, False)
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
    token = job.pop("token")
    code = compile(job["program"], "program.py", "exec")
    if job["tests"] is None:
        try:
            exec(code, names)
        except SystemExit as end:  # a program may end so, after its output
            if end.code not in (None, 0):
                raise
    else:
        exec(code, names)
        exec(compile(job["tests"], "tests.py", "exec"), names)
    failures: list[object] = []
    sys.unraisablehook = failures.append  # gets what their functions raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if failures:
        os._exit(1)
    os.write(result_fd, token.encode())
    os._exit(0)  # threads that a program left behind


main()
