"""The attack on torchrun's port: whoever reaches its store puts pickles in it, and hopes to run code."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import pathlib, sys, time
from r3train.cpu.device import prepare_device
prepare_device()
from r3train.trainer.megatron import topology

topology.init_distributed("gloo", 1)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
WAIT_S = 120.0


class Attack:
    """A pickle that leaves a file where it is opened."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def attacked(port: int, mark: Path) -> int:
    """Replace every value in a store by the attack; returns how many there were."""
    bare = pickle.dumps(Attack(mark))
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False
        )
        keys = store.list_keys()
        for key in keys:
            # the rendezvous keeps its state in base64
            store.set(key, base64.b64encode(bare) if "rendezvous" in key else bare)
        return len(keys)
    except (RuntimeError, dist.DistError):  # not there yet, or gone
        return 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("held", [True, False], ids=["master-port", "rendezvous of torchrun's own"])
def test_pickles_put_in_torchruns_store_run_where_its_rendezvous_is_its_own_and_not_as_we_start_it(
    held, tmp_path
):
    """With --master-port, as the pages and scripts start one node; without, the attack is one."""
    port, mark, joined = free_port(), tmp_path / "code ran", tmp_path / "joined"
    ours = ("--master-port", str(port))
    own = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a")
    (tmp_path / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", *(ours if held else own)]
    torchrun = subprocess.Popen(
        [*launcher, str(tmp_path / "rank.py"), str(joined)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline, replaced = time.monotonic() + WAIT_S, 0
        while not mark.exists() and time.monotonic() < deadline:
            replaced += attacked(port, mark)
            if torchrun.poll() is not None:  # what it read was nonsense to it
                break
            if held and joined.exists() and replaced > 20:
                break
            time.sleep(0.1)
        assert replaced, "nothing was attacked"
        assert joined.exists() or not held, "the rank never joined"
        assert mark.exists() != held
    finally:
        # its ranks have sessions of their own, and no parent where it has ended
        for process in psutil.process_iter(["cmdline"]):
            if str(tmp_path / "rank.py") in (process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        torchrun.wait()
