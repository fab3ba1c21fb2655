"""The loss of a recipe's longest microbatch fits beside the model: its logits are never copied whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
QWEN3_VOCAB = 151936


def peaks(directory: Path, *words: int) -> dict[str, dict[str, float]]:
    """GiB at the peak, by temperature and case; words: TP, rows, vocabulary and chunk."""
    report = directory / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.loss_memory", str(report)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    return {t: {case: n / GIB for case, n in cases.items()} for t, cases in found.items()}


def test_the_loss_of_20480_rows_at_tp_4_takes_little_beside_its_logits(tmp_path):
    found = peaks(tmp_path, 4, 20480, QWEN3_VOCAB)
    logits = 20480 * QWEN3_VOCAB // 4 * 2 / GIB
    for temperature, cases in found.items():
        for case, peak in cases.items():
            assert logits < peak < 2.2, (temperature, case, peak)


def test_without_chunks_the_count_finds_the_copies(tmp_path):
    """It finds what it is there to find."""
    found = peaks(tmp_path, 4, 20480, QWEN3_VOCAB, -1)
    assert min(peak for cases in found.values() for peak in cases.values()) > 6
