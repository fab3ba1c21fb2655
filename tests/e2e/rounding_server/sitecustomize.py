"""A server on a CPU that rounds as those on GPUs do; for jobs that are started with this folder in PYTHONPATH.

The output of every decoder layer is off by a relative ``ROUNDING_EPS``: a function of the value and of the batch's size, as
other kernels round otherwise, and of the process with ``ROUNDING_SEED=pid``, as another GPU does.  The noise follows the
size rounded up to a power of two.  ``STALE_DECODE=1`` is a fault: decode goes on with the weights of the start, as a CUDA graph
does that was captured before tensors were replaced.
"""

import importlib.abc
import importlib.util
import math
import os
import sys

_MODULE = "sglang.srt.models.qwen3_moe"


def _round_otherwise(module, eps: float, seed: float) -> None:
    import torch

    layer = module.Qwen3MoeDecoderLayer
    exact = layer.forward

    def forward(self, *args, **kwargs):
        out = exact(self, *args, **kwargs)
        hidden = out[0] if isinstance(out, tuple) else out
        if rows := hidden.shape[0]:
            phase = 1.7 * math.ceil(math.log2(rows)) + 3.1 * seed
            columns = torch.arange(hidden.shape[-1]) * 0.37
            noise = torch.sin(hidden.float() * 4e3 + phase + columns)
            hidden.mul_(1 + eps * noise.to(hidden.dtype))
        return out

    layer.forward = forward


def _keep_the_weights_of_decode(module) -> None:
    model = module.Qwen3MoeForCausalLM
    sound, kept = model.forward, {}

    def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        call = (self, input_ids, positions, forward_batch, *args)
        if not kept:
            kept.update({name: p.data.clone() for name, p in self.named_parameters()})
        if not forward_batch.forward_mode.is_decode():
            return sound(*call, **kwargs)
        now = {name: p.data for name, p in self.named_parameters()}
        for name, parameter in self.named_parameters():
            parameter.data = kept[name]
        try:
            return sound(*call, **kwargs)
        finally:
            for name, parameter in self.named_parameters():
                parameter.data = now[name]

    model.forward = forward


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the model when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if eps := float(os.environ.get("ROUNDING_EPS", "0")):
                own = os.environ.get("ROUNDING_SEED", "0")
                _round_otherwise(module, eps, os.getpid() % 97 if own == "pid" else float(own))
            if os.environ.get("STALE_DECODE"):
                _keep_the_weights_of_decode(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
