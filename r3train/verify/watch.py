"""A watch on a running actor: it records each router call and block output without the trainer's help.

A row is named by its embedding: on the first stage the decoder's input is looked up in the embedding
table, and since no token id occurs twice in the batch the row's token is known.  Later stages see the
same rows in the same order.  A microbatch is the n-th forward of its chunk; a recomputation belongs to
the forward whose router logits it repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from r3train.trainer.megatron.actor import MegatronActor
from r3train.verify.mutations import patched


@dataclass
class Recording:
    """The record of one rank: plain tensors and numbers throughout (torch.save, weights_only)."""

    rows: dict[str, list[Tensor]] = field(default_factory=dict)  # pass -> [microbatch] int64[m]
    # one router call or block each: replay_pass, is_recomputation, vp_stage, layer_number,
    # microbatch, and its tables (logits, probs and chosen; or blocks) by name
    records: list[dict[str, Any]] = field(default_factory=list)
    # layer number -> tokens this rank counted for each expert's bias, before they were reduced
    loads: dict[int, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Watch:
    """Records the passes of one actor while ``open`` is."""

    def __init__(self, actor: MegatronActor, embeddings: Tensor):
        self._actor = actor
        self._embeddings = embeddings  # [vocab, hidden] of the checkpoint, in the model's dtype
        self.recording = Recording()
        self._pass: str | None = None
        self._count: dict[int, int] = {}
        self._current: dict[int, int] = {}
        self._logits: Tensor | None = None

    def begin(self, name: str | None) -> None:
        """Begin a pass; None stops the recording."""
        self._pass = name
        self._count.clear()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hooks on the chunks, their blocks and routers; taken off again at the end."""

        def routing(original: Callable, router: Any, logits: Tensor, **kwargs: Any) -> Any:
            self._logits = logits.detach().reshape(-1, logits.shape[-1]).clone()
            return original(router, logits, **kwargs)

        def finalize(original: Callable, *args: Any, **kwargs: Any) -> Any:
            self._note_loads()
            return original(*args, **kwargs)

        config = self._actor.model.config
        with ExitStack() as opened:
            opened.enter_context(patched(TopKRouter, "routing", routing))
            opened.enter_context(patched(config, "finalize_model_grads_func", finalize))
            for handle in self._hooks():
                opened.callback(handle.remove)
            yield

    def _hooks(self) -> Iterator[RemovableHandle]:
        for vp_stage, chunk in enumerate(self._actor.model.unwrapped):
            yield chunk.register_forward_pre_hook(partial(self._start_chunk, vp_stage))
            yield chunk.decoder.register_forward_pre_hook(
                partial(self._name_rows, vp_stage), with_kwargs=True
            )
            for layer in chunk.decoder.layers:
                place = (vp_stage, layer.layer_number)
                yield layer.register_forward_hook(partial(self._record_block, *place))
                router = getattr(layer.mlp, "router", None)
                if router is not None:
                    yield router.register_forward_hook(partial(self._record_call, *place))

    def _note_loads(self) -> None:
        for chunk in self._actor.model.unwrapped:
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if router is not None and router.enable_expert_bias:
                    load = router.local_tokens_per_expert.detach().cpu().clone()
                    self.recording.loads[layer.layer_number] = load

    def _start_chunk(self, vp_stage: int, *_: Any) -> None:
        self._current[vp_stage] = self._count.get(vp_stage, 0)
        self._count[vp_stage] = self._current[vp_stage] + 1

    def _name_rows(self, vp_stage: int, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and vp_stage == 0
        if self._pass is None or not first:
            return
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        rows = hidden.detach()[:, 0]
        distance = torch.cdist(rows.float(), self._embeddings.float(), p=1)
        nearest = distance.min(1)
        if float(nearest.values.max()) > 0:
            self.recording.problems.append("a row of the decoder's input is no token's embedding")
        self.recording.rows.setdefault(self._pass, []).append(nearest.indices.cpu())

    def _record_block(
        self, vp_stage: int, number: int, module: Any, args: Any, output: Any
    ) -> None:
        if not _in_backward():
            hidden = output[0] if isinstance(output, tuple) else output
            self._record(vp_stage, number, blocks=hidden[:, 0].float())

    def _record_call(
        self, vp_stage: int, number: int, module: Any, args: Any, output: tuple
    ) -> None:
        probs, routing_map = output
        tables = dict(logits=self._logits.float(), probs=probs.float(), chosen=routing_map)
        self._record(vp_stage, number, **tables)

    def _record(self, vp_stage: int, number: int, **tables: Tensor) -> None:
        """Keep what a router or a block gave out, unless no pass is being recorded."""
        if self._pass is None:
            return
        record = dict(
            replay_pass=self._pass,
            vp_stage=vp_stage,
            layer_number=number,
            is_recomputation=_in_backward(),
            tables={name: values.detach().cpu().clone() for name, values in tables.items()},
        )
        if _in_backward():
            record["microbatch"] = self._matching_forward(record)
        else:
            record["microbatch"] = self._current[vp_stage]
        self.recording.records.append(record)

    def _matching_forward(self, record: dict[str, Any]) -> int:
        """The microbatch whose forward had these router logits; -1 where none did."""
        same = ("replay_pass", "vp_stage", "layer_number")
        for other in self.recording.records:
            if other["is_recomputation"] or any(other[k] != record[k] for k in same):
                continue
            a, b = other["tables"].get("logits"), record["tables"]["logits"]
            if a is not None and a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3):
                return other["microbatch"]
        number = record["layer_number"]
        self.recording.problems.append(f"a recomputation of layer {number} repeats no forward")
        return -1


def _in_backward() -> bool:
    """Say if autograd is walking a graph right now: anything that runs then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def whole_gradients(actor: MegatronActor) -> None:
    """Make every rank's gradient buffers whole again where the distributed optimizer shards them."""
    for chunk in actor.model.chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                share = bucket.grad_data.numel() // group.size()
                shard = bucket.grad_data[group.rank() * share : (group.rank() + 1) * share].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
