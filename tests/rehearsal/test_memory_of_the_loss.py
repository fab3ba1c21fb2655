"""The loss of a recipe's longest microbatch fits next to the model: its logits are never copied whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.config.trainer_settings import TrainerSection

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
QWEN3_VOCAB = 151936
pytestmark = pytest.mark.slow


def peaks(directory: Path, *words: int) -> list[dict[str, dict[str, float]]]:
    """GiB at the peak by chunk, temperature and case; words: TP, rows, those with loss, vocabulary and chunks."""
    report = directory / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.loss_memory", str(report)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        {t: {case: n / GIB for case, n in cases.items()} for t, cases in of_chunk.items()}
        for of_chunk in json.loads(report.read_text())
    ]


def test_the_loss_of_20480_rows_at_tp_4_takes_little_beside_its_logits(tmp_path):
    """Without chunks the count finds the copies: it finds what it is there to find."""
    chunk = TrainerSection.model_fields["log_probs_chunk_size"].default
    found, whole = peaks(tmp_path, 4, 20480, 20480, QWEN3_VOCAB, chunk, -1)
    logits = 20480 * QWEN3_VOCAB // 4 * 2 / GIB
    for temperature, cases in found.items():
        for case, peak in cases.items():
            assert logits < peak < 2.2, (temperature, case, peak)
    assert min(peak for cases in whole.values() for peak in cases.values()) > 6


@pytest.mark.parametrize("prompt, most", [(1, 1.5), (4, 1.05), (16, 0.55)])
def test_prompts_take_nothing_of_the_loss(prompt, most, tmp_path):
    """Of prompts that are ``prompt`` times as long as the answers; all rows together take 2.2 GiB."""
    chunk = TrainerSection.model_fields["log_probs_chunk_size"].default
    (found,) = peaks(tmp_path, 4, 20480, 20480 // (prompt + 1), QWEN3_VOCAB, chunk)
    assert max(peak for cases in found.values() for peak in cases.values()) < most, found
