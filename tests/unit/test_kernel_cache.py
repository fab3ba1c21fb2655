"""The directory of torch's compiled kernels: none that another user could have filled first."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.engine.server import SGLangServer

SHOW = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
HEADERS = (
    "from torch._inductor import config; print(int(config.cpp_cache_precompile_headers)); " + SHOW
)


def planted(tmp_path: Path) -> dict[str, str]:
    """A home and a temporary directory in which somebody has made the names that torch would use."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for directory in (home, temporary, temporary / f"torchinductor_{getpass.getuser()}"):
        directory.mkdir()
        directory.chmod(0o777)
    home.chmod(0o755), temporary.chmod(0o1777)
    return {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": ""}


def of_a_server(environment: dict[str, str], tmp_path: Path, monkeypatch) -> str:
    """Start a server as production does; return the words that its process prints."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(SGLangServer, "command", lambda self: [sys.executable, "-c", HEADERS])
    server = SGLangServer(tmp_path, tmp_path / "log", device="cpu").start()
    assert server._guard.wait(120) == 0, (tmp_path / "log").read_text()
    server.stop()
    return (tmp_path / "log").read_text()


def of_a_rank(environment: dict[str, str], _tmp_path: Path, _monkeypatch) -> str:
    """Prepare the device as a rank does; return the words that its process prints."""
    code = "from r3train.cpu.device import prepare_device; prepare_device()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + HEADERS],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    """Forget the settings of this process."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("process", [of_a_server, of_a_rank])
def test_kernels_are_kept_in_a_directory_of_this_user_alone(process, tmp_path, monkeypatch):
    environment = planted(tmp_path)
    headers, cache = process(environment, tmp_path, monkeypatch).split()
    home = Path(environment["HOME"])
    assert Path(cache) == home / ".cache" / "r3train" / "torchinductor"
    assert headers == "0", "torch keeps them under the known name, wherever the cache is"
    for directory in (Path(cache), Path(cache).parent):
        assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("process", [of_a_server, of_a_rank])
def test_a_cache_that_the_user_names_is_taken(process, tmp_path, monkeypatch):
    environment = planted(tmp_path) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "mine")}
    assert process(environment, tmp_path, monkeypatch).split()[1] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    "wrong, process",
    [
        ("writable", of_a_server),
        ("writable", of_a_rank),
        ("a link", of_a_server),
        ("of another", of_a_server),
        ("renamable", of_a_server),
    ],
)
def test_a_cache_that_others_could_have_made_is_not_used(wrong, process, tmp_path, monkeypatch):
    environment = planted(tmp_path)
    ours = Path(environment["HOME"]) / ".cache" / "r3train"
    known = Path(environment["TMPDIR"]) / f"r3train-{os.getuid()}"
    for parent in (ours, known):
        parent.mkdir(parents=True)
        cache = parent / "torchinductor"
        if wrong == "writable":
            cache.mkdir()
            cache.chmod(0o770)
        elif wrong == "a link":
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            cache.symlink_to(tmp_path / "elsewhere")
        elif wrong == "of another":
            if os.getuid() != 0:
                pytest.skip("not run: only root can give a directory away")
            os.chown(parent, 12345, 12345)
        else:
            parent.parent.chmod(0o777)
    cache = Path(process(environment, tmp_path, monkeypatch).split()[1])
    assert (
        ours not in cache.parents and known not in cache.parents and "elsewhere" not in str(cache)
    )
    assert Path(environment["TMPDIR"]) in cache.parents
    assert not cache.exists(), "it ends with its process"
