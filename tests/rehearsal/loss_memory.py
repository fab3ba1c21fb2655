"""Peak bytes of the log-prob pass and of the loss at real size, counted of tensors without content.

    python -m tests.rehearsal.loss_memory REPORT TP ROWS OF_LOSS VOCAB CHUNK [CHUNK ...]

A rank's bfloat16 logits come out of production's bfloat16 wrapper and go through production's forward
steps, forward and backward, under FakeTensorMode and a group that sends nothing.  The logits count.
OF_LOSS of the rows have loss.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from r3train.algo.losses.policy_losses import configured_loss
from r3train.cpu.device import prepare_device

prepare_device()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from r3train.config.algorithm_settings import AlgorithmSection  # noqa: E402
from r3train.trainer.megatron import forward_step, model  # noqa: E402
from r3train.trainer.megatron.forward_step import DeviceSlice  # noqa: E402


class Account(TorchDispatchMode):
    """Bytes of all storages that live, and the most that did."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def were_there(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out these, of which an operation may return a view."""
        self._seen.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.discard(key)


class Head(torch.nn.Module):
    """The end of a model: its logits, which autograd computes gradients of."""

    vp_stage = None

    def __init__(self, vocab: int):
        super().__init__()
        self.vocab = vocab
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, *, output_processor_context: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.scale.expand(1, len(output_processor_context), self.vocab).clone()


def slice_of(rows: int, of_loss: int | None = None) -> DeviceSlice:
    """A microbatch of these rows, of which some, or all, have loss."""

    def stream(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, dtype=dtype)

    numbers, reals = torch.int64, torch.float32
    streams = dict(
        microbatch_id=0,
        tokens=stream(numbers),
        labels=stream(numbers),
        positions=stream(numbers),
        loss_mask=stream(torch.bool),
        rollout_log_probs=stream(reals),
        advantages=stream(reals),
        samples=stream(numbers),
        ages=stream(numbers),
        loss_weights=torch.ones(1),
        rows=torch.arange(rows if of_loss is None else of_loss),
    )
    return DeviceSlice(**{field.name: None for field in fields(DeviceSlice)} | streams)


CASES = {
    "log-probs": None,
    "loss": AlgorithmSection(),
    "loss with entropy": AlgorithmSection(entropy_coef=0.01),
}


def peaks(rows: int, of_loss: int, vocab: int, temperature: float, chunk: int) -> dict[str, int]:
    """The peak of each case, of one rank's shard of the vocabulary."""
    found = {}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    for name, algorithm in CASES.items():
        chunk_model = model._Bf16Chunk(config, Head(vocab))
        with FakeTensorMode(allow_non_fake_inputs=True), Account() as account:
            batches = {0: slice_of(rows, of_loss)}
            if algorithm is None:
                step = forward_step.make_log_prob_step(batches, None, temperature, chunk)
                with torch.no_grad():
                    out, finish = step(iter([0]), chunk_model)
                    finish(out)
            else:
                make = forward_step.make_train_step
                others = [n for n in signature(make).parameters if n.endswith("_log_probs")]
                loss = configured_loss(algorithm)
                rule = forward_step.TrainingRule(loss, algorithm, temperature, chunk)
                step = make(batches, None, rule, **dict.fromkeys(others))
                out, finish = step(iter([0]), chunk_model)
                finish(out)[0].backward()
            found[name] = account.peak
    return found


if __name__ == "__main__":
    report = Path(sys.argv[1])
    tp, rows, of_loss, vocab = map(int, sys.argv[2:6])
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, create_gloo_process_groups=False
    )
    found = [
        {f"T={t}": peaks(rows, of_loss, vocab // tp, t, int(chunk)) for t in (1.0, 0.7)}
        for chunk in sys.argv[6:]
    ]
    report.write_text(json.dumps(found))
