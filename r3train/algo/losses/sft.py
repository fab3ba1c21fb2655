"""Supervised fine-tuning."""

from __future__ import annotations

from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.config.algorithm_settings import AlgorithmSection


def sft(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Take ``-new`` of each row: the cross-entropy of the tokens that are trained."""
    return RowLoss(-rows.log_probs)
