"""A task whose best policy is random: answer with one token, drawn from a distribution that the prompt names.

The reward of an answer is the log of its probability under the target.  The loss takes the answer's own log-prob off
it, so what it maximises is -KL(policy || target), and at the target every advantage is 0: no noise of sampling is
left there.  Used by benchmarks/replay_learning.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from r3train.algo.advantages.building_blocks import spread
from r3train.types import Prompt
from r3train.verify.tiny import task_words

if TYPE_CHECKING:
    from r3train.algo.loss_rows import LossRows, RowLoss

WORDS_OF_PROMPT = 4


def write_prompts(model_dir: Path, path: Path, *, prompts: int, tilt: float, seed: int) -> None:
    """Write prompts of random words, each with its target's log-probs.

    A target is the checkpoint's own distribution in float32, times exp(tilt z) with z normal: the best policy
    for rewards tilt z with a KL penalty of weight 1 from the checkpoint.
    """
    random = np.random.default_rng(seed)
    texts = [
        " ".join(random.choice(task_words(), WORDS_OF_PROMPT, replace=False))
        for _ in range(prompts)
    ]
    start = first_log_probs(model_dir, texts)
    logits = start + tilt * random.standard_normal(start.shape[1])
    targets = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    lines = [
        {"input": text, "metadata": {"target": target.round(6).tolist()}}
        for text, target in zip(texts, targets)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def first_log_probs(model_dir: Path, texts: Sequence[str]) -> np.ndarray:
    """The checkpoint's log-probs of the first token after each text, float64 [texts, vocabulary]."""
    from r3train.cpu.torchvision_stub import declare_torchvision_ops

    declare_torchvision_ops()
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text) for text in texts])).logits[:, -1]
    return logits.double().log_softmax(-1).numpy()


def log_target(prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
    """The target's log-probs of the answer's tokens, summed."""
    return math.fsum(prompt.metadata["target"][token] for token in response_ids)


def as_given(groups: Sequence, rewards: np.ndarray, algorithm: object) -> list:
    """Advantages that are the rewards themselves."""
    return spread(groups, rewards)


def towards_target(rows: LossRows, algorithm: object) -> RowLoss:
    """-(log target - log p) log p, p the policy: the score function's gradient of KL(policy || target)."""
    import torch

    from r3train.algo.loss_rows import RowLoss

    sums = {}
    for name, log_probs in (("actor", rows.log_probs), ("server", rows.rollout_log_probs)):
        ratio = rows.advantages - log_probs.detach()
        sums[f"{name}_kl"] = torch.where(rows.mask, ratio.expm1() - ratio, 0).sum()
    return RowLoss((rows.log_probs.detach() - rows.advantages) * rows.log_probs, sums=sums)
