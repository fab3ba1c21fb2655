"""The far end of ``r3train launch``: a process on a host that starts one command there, as it is told by lines.

It reads from standard input, so nothing of the environment is in a command line, and the end of the connection
is seen: 1. JSON of what to look at; it answers with a line of facts; 2. JSON of a command and its environment;
3. names of signals for that command, or SIGKILL for all that it has started.  What the command prints goes
through.  Where the connection ends, the command gets SIGTERM: a training saves and ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import psutil

import r3train
from r3train.config.recipes import recipe_path

ANSWER = b"r3train on this host: "  # before the facts; a shell may print lines of its own


def facts(directory: str, recipe: str | None) -> dict[str, str]:
    """Return what must be the same on all hosts, by its name; goes to the directory.

    recipe: the file or name of --config.  Raises OSError or ValueError naming what is not here.
    """
    os.chdir(directory)
    root = Path(r3train.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    found = {"r3train": f"{version('r3train')} of code {digest.hexdigest()[:12]}"}
    if recipe is not None:
        found[recipe] = hashlib.sha256(recipe_path(recipe).read_bytes()).hexdigest()[:12]
    return found


def main() -> int:
    """Answer, start the command, wait for it; returns its exit code, 128 and the number for a signal."""
    orders = sys.stdin.buffer
    try:
        answer: Any = facts(**json.loads(orders.readline()))
    except (OSError, ValueError) as error:
        answer = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    sys.stdout.buffer.write(ANSWER + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    line = orders.readline()
    if not line:  # another host was refused
        return 0
    order = json.loads(line)
    bin_directory = os.path.dirname(
        sys.executable
    )  # ninja is there, for kernels that are compiled at the start
    path = f"{bin_directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "r3train.cli", *order["command"]],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": path} | order["environment"],
    )
    threading.Thread(target=_obey, args=(orders, child), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _obey(orders: BinaryIO, child: subprocess.Popen) -> None:
    """Pass on the signals that are named, and SIGTERM at the end of the connection."""
    for line in orders:
        name = line.decode().strip()
        if name != "SIGKILL":
            child.send_signal(signal.Signals[name])
            continue
        try:
            started = psutil.Process(child.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        child.kill()
        for process in started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
    child.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the other thread holds standard input
