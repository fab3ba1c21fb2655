"""The actor computes what transformers does on the toy of the first day, by both kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_toys import FAMILIES
from r3train.verify.tiny import random_model, save
from r3train.families.tiny_options import SIZES, TinyOptions
from tests.oracle import actors
from tests.oracle.actors import actor_log_probs, actor_of, configuration, in_ranks

STAND_INS = Path(__file__).parents[1] / "rehearsal/stand_ins"
TOY = replace(TinyOptions(), **SIZES["gpu"])


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(2, TOY.vocab_size, 200).astype(np.int32)


def actors_log_probs(checkpoint: str) -> dict[str, Any]:
    """Log-probs of the text by the layers of each kind; in a rank."""
    found = {}
    for layers in ("local", "te"):
        config = configuration(Path(checkpoint), attention_backend=layers, max_tokens_per_gpu=256)
        with actor_of(config) as actor:
            log_probs = actor_log_probs(actor, [actor.topology], text())
            found[layers] = torch.from_numpy(log_probs)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("family", [TOY.family, *FAMILIES])
def test_an_actor_of_the_toy_gives_the_log_probs_of_transformers(family, tmp_path, monkeypatch):
    options = replace(TOY, dtype="float32", num_layers=2, family=family)
    model = random_model(options).eval()
    (tmp_path / "model").mkdir()
    save(model, tmp_path / "model", options)
    ids = torch.from_numpy(text()).long()
    with torch.no_grad():
        every = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    expected = every[:-1].gather(1, ids[1:, None])[:, 0]
    assert expected.std() > 0.5  # logits that say something
    monkeypatch.setattr(actors, "SEARCHED", [str(STAND_INS)])
    (found,) = in_ranks(1, tmp_path / "ranks", actors_log_probs, str(tmp_path / "model"))
    for layers, log_probs in found.items():
        assert (log_probs[1:] - expected).abs().max() < 1e-4, layers
