"""transformers in float32, for every family: log-probs and experts of a text, its own or given ones.

So too the tokens that an indexer chooses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.families import FAMILIES
from r3train.hf_checkpoint import is_trained, read_transformers_config
from r3train.verify.tiny import save_weights
from tests.published import model_class


class HfReference:
    """A checkpoint's model, with its own forward of every router, in which experts can be given."""

    def __init__(self, directory: Path):
        declare_torchvision_ops()
        config = read_transformers_config(directory)
        self._hf = read_hf_facts(directory)
        self.model = (
            model_class(config)
            .from_pretrained(directory, config=config, dtype=torch.float32)
            .eval()
        )
        self._given: np.ndarray | None = None  # int[T, L, K]
        self._chosen: dict[int, torch.Tensor] = {}
        self._tokens: np.ndarray | None = None  # uint64[R, L, W], see routing.indexer_topk
        # by layer_id, of the last text: int[T, K]
        self.own_tokens: dict[int, torch.Tensor] = {}
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("Router"):
                module.forward = self._forced(
                    int(re.search(r"layers\.(\d+)\.", name)[1]), module.forward
                )
            if type(module).__name__.endswith("Indexer"):
                layer = int(re.search(r"layers\.(\d+)\.", name)[1])
                module.forward = self._with_tokens(layer, module.forward)
            if getattr(module, "skip_topk", False):  # it attends to what the layer before chose
                layer = int(re.search(r"layers\.(\d+)\.", name)[1])
                module.forward = self._with_shared_tokens(layer, module.forward)

    def _with_tokens(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return an indexer's forward whose choice, int32[1, T, K], is the given one."""
        return lambda *args, **kwargs: self._tokens_of(layer, forward(*args, **kwargs))

    def _with_shared_tokens(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of attention without an indexer, to the tokens that are given to its layer."""

        def attend(*args: Any, prev_topk_indices: torch.Tensor, **kwargs: Any) -> Any:
            tokens = self._tokens_of(layer, prev_topk_indices)
            return forward(*args, prev_topk_indices=tokens, **kwargs)

        return attend

    def _tokens_of(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the given choice of a layer, int32[1, T, K], or its own where none is given."""
        self.own_tokens[layer] = own[0]
        if self._tokens is None:
            return own
        rows, length, topk = [], *own.shape[1:]
        for position in range(length):
            row = list(range(position + 1))
            if self._hf.index_topk <= position < length - 1:
                bits = self._tokens[position - self._hf.index_topk, layer]
                row = np.flatnonzero(np.unpackbits(bits.view("u1"), bitorder="little")).tolist()
            # of a short row the first once more: a place in the mask has one value; the last row is nobody's
            rows.append((row + row[:1] * topk)[:topk])
        return torch.tensor([rows], dtype=torch.int32)

    def _forced(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a router's forward whose last choice, of experts, is the given one: gates are transformers' own."""
        topk = torch.topk

        def choose(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            experts = torch.from_numpy(self._given[:, layer].astype(np.int64))
            if scores.shape[-1] != self._hf.num_experts:  # groups of experts
                return topk(scores, k, *args, **kwargs)
            return torch.return_types.topk((scores.gather(-1, experts), experts))

        def forced(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._given is None else mock.patch.object(torch, "topk", choose):
                out = forward(*args, **kwargs)
            self._chosen[layer] = out[2].reshape(-1, out[2].shape[-1])
            return out

        return forced

    def log_probs(
        self,
        tokens: np.ndarray,
        routes: np.ndarray | None = None,
        indexer_topk: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Log-prob of each token but the first, float32[T-1].

        routes: int[T-1, L, K]; indexer_topk: as in ``RolloutSample``.
        """
        self._chosen.clear()
        self._tokens = indexer_topk
        # the last token was never an input: any experts, nobody looks at its row
        self._given = None if routes is None else np.concatenate([routes, routes[-1:]])
        ids = torch.from_numpy(np.asarray(tokens)).long()
        every = self.model(ids[None]).logits[0].log_softmax(-1)
        return every[:-1].gather(1, ids[1:, None])[:, 0]

    @torch.no_grad()
    def answer(self, tokens: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Log-probs float32[T], the first 0, and by layer_id the experts that it chose, int[T-1, K]."""
        log_probs = np.concatenate([[0.0], self.log_probs(tokens).numpy()]).astype(np.float32)
        return log_probs, {layer: c[:-1].numpy() for layer, c in self._chosen.items()}

    def gradients(self, directory: Path) -> dict[str, torch.Tensor]:
        """The gradients under the hub's names, zeros of a parameter that has none."""
        for parameter in self.model.parameters():
            none = parameter.grad is None
            parameter.data = torch.zeros_like(parameter) if none else parameter.grad
        family = FAMILIES[self._hf.model_type]
        save_weights(self.model, directory, next(iter(family.tiny.values())))
        tensors = load_file(directory / "model.safetensors")
        if not any(name.startswith(family.weights.prefix) for name in tensors):
            # transformers took the language model out of the whole
            prefix = family.weights.prefix
            tensors = {name.replace("model", prefix, 1): t for name, t in tensors.items()}
        return {name: t for name, t in tensors.items() if is_trained(name, self._hf)}
