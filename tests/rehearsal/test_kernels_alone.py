"""The first day's step that takes kernels alone, over Transformer Engine's stand-in: a sound one passes, a planted bug fails.

On a CPU the kernels are the stand-in's, so nothing is said of CUDA's; what is held are the comparison and its shapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/rehearsal/stand_ins/transformer_engine.py"
# a change of the stand-in, and the kernels that must fail
PLANTED = {
    "a window of half its length": (
        "self.kernel.softmax_offset = self.softmax_offset",
        "self.kernel.softmax_offset = self.softmax_offset; self.kernel.window = self.kernel.window and 63",
        "attention",
    ),
    "experts in another order": (
        'weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]',
        'weights = [getattr(self, f"weight{i}") for i in reversed(range(self.num_gemms))]',
        "grouped linear",
    ),
    "a kernel that is lacking": (
        'assert self._backends(query.dtype), "no attention backend is available"',
        'assert query.shape[1] != 5, "no attention backend is available"',
        "attention 5/5",
    ),
    "no decay": (
        "weight_decay=weight_decay)\n        super().__init__(params",
        "weight_decay=0.0)\n        super().__init__(params",
        "FusedAdam",
    ),
}


def kernels(directory: Path, source: str) -> tuple[int, dict]:
    """The exit code, and by kernel what was found, with a stand-in of this source."""
    directory.mkdir()
    (directory / "transformer_engine.py").write_text(source, encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), env.get("PYTHONPATH", "")]))
    report = directory / "kernels.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_kernels", "--size", "tiny"]
    done = subprocess.run(
        [*command, "--output", str(report)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert report.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(report.read_text())["kernels"]


def test_every_recipes_attention_experts_and_optimizer_pass_alone(tmp_path):
    code, found = kernels(tmp_path / "sound", STAND_IN.read_text(encoding="utf-8"))
    assert code == 0 and all(kernel["passed"] for kernel in found.values()), found
    for part in ("heads of 192", "heads of 256", "window 127, sinks", "grouped", "FusedAdam"):
        assert any(part in name for name in found), (part, sorted(found))


def test_a_planted_bug_of_each_kind_fails_and_is_named(tmp_path):
    source = STAND_IN.read_text(encoding="utf-8")
    for _, (before, after, kind) in PLANTED.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    code, found = kernels(tmp_path / "planted", source)
    failed = {name for name, kernel in found.items() if not kernel["passed"]}
    assert code == 1
    for _, _, kind in PLANTED.values():
        assert any(name.startswith(kind) for name in failed), (kind, found)
