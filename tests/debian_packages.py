"""Programs that tests use where they are, or that Debian's packages bring."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

_POLICY = Path("/usr/sbin/policy-rc.d")


def installed(program: str, *packages: str) -> str | None:
    """The path of a program; its packages are installed where it is missing and that is possible.

    No daemon of theirs is started.
    """
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    if found := shutil.which(program, path=path):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return None
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with ExitStack() as undo:
        if not _POLICY.exists():
            _POLICY.write_text("#!/bin/sh\nexit 101\n")
            _POLICY.chmod(0o755)
            undo.callback(_POLICY.unlink)
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
        ):
            try:
                subprocess.run(
                    command, env=environment, capture_output=True, timeout=240, check=True
                )
            except (subprocess.SubprocessError, OSError):
                return None
    return shutil.which(program, path=path)
