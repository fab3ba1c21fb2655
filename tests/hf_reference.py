"""transformers in float32, for every family: log-probs and experts of a text, its own or given ones."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from r3train.config.hf_facts import OF_TEXT_AND_IMAGES
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.hf_checkpoint import read_transformers_config


class HfReference:
    """A checkpoint's model, with one hook on every layer's experts."""

    def __init__(self, directory: Path):
        declare_torchvision_ops()
        from transformers import AutoModelForCausalLM

        config = read_transformers_config(directory)
        self._of_text_and_images = config.model_type in OF_TEXT_AND_IMAGES
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32
        ).eval()
        self._given: np.ndarray | None = None  # int[T, L, K]
        self._chosen: dict[int, torch.Tensor] = {}
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("Experts"):
                layer = int(re.search(r"layers\.(\d+)\.", name)[1])
                block = self.model.get_submodule(name.rpartition(".")[0])
                router = getattr(block, "router", None) or block.gate
                biased = any(hasattr(m, "e_score_correction_bias") for m in (router, block))
                module.register_forward_pre_hook(self._hook(layer, router, biased))

    def _hook(self, layer: int, router: torch.nn.Module, biased: bool):
        config = self.model.config

        def hook(module, given):
            hidden, index, weights = given
            self._chosen[layer] = index.reshape(-1, index.shape[-1])
            if self._given is None:
                return None
            chosen = torch.from_numpy(self._given[:, layer].astype(np.int64))
            bias = getattr(router, "bias", None)  # gpt-oss
            logits = torch.nn.functional.linear(
                hidden.reshape(-1, hidden.shape[-1]), router.weight, bias
            )
            if biased:  # so has every family whose gates are sigmoids
                gates = logits.sigmoid().gather(1, chosen)
                gates = gates / gates.sum(-1, keepdim=True)
                gates = gates * getattr(config, "routed_scaling_factor", 1.0)
            elif getattr(config, "norm_topk_prob", True):
                gates = logits.gather(1, chosen).softmax(-1)
            else:
                gates = logits.softmax(-1).gather(1, chosen)
            return hidden, chosen.view(index.shape), gates.view(weights.shape)

        return hook

    def log_probs(self, tokens: np.ndarray, routes: np.ndarray | None = None) -> torch.Tensor:
        """Log-prob of each token but the first, float32[T-1]; ``routes``: int[T-1, L, K]."""
        self._chosen.clear()
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
        """The gradients under the hub's names: saving takes fused experts apart, where the hub does."""
        for parameter in self.model.parameters():
            parameter.data = parameter.grad
        self.model.save_pretrained(directory, save_original_format=not self._of_text_and_images)
        tensors = load_file(directory / "model.safetensors")
        if not self._of_text_and_images:
            return tensors
        # transformers took the language model out of the whole
        return {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
