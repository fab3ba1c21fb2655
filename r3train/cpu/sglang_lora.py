"""LoRA adapters in SGLang's server without an accelerator: plain twins of what needs one.

SGLang 0.5.23 asks for pinned memory in its LoRA layers whatever the device, and computes adapters of
routed experts, and of latent attention's kv_b_proj, by triton kernels only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from r3train.patches import BUILTIN, patch


class _PlainTorch:
    """``torch`` for a module that pins host memory: on a CPU there is nothing to pin it for."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found

        def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return found(*arguments, **options)

        return unpinned


def serve_adapters() -> None:
    """Let SGLang's ``torch_native`` LoRA backend run here, adapters of routed experts included."""
    from sglang.srt.lora import deepseek_mla_correction, layers, lora_manager
    from sglang.srt.lora.backend import torch_backend

    why = "it pins host memory, which wants a device"
    patch(layers, "torch", _PlainTorch(), expects="module", why=why)
    patch(torch_backend, "torch", _PlainTorch(), expects="module", why=why)
    patch(torch.Tensor, "pin_memory", lambda self, *_, **__: self, expects=BUILTIN, why=why)
    experts = _experts(layers)
    for module in (layers, lora_manager):
        patch(
            module,
            "FusedMoEWithLoRA",
            experts,
            expects="(base_layer, lora_backend, *, experts_shared_outer_loras=False, max_lora_rank=None)",
            why="adapters of routed experts are triton kernels",
        )
    backend = torch_backend.TorchNativeLoRABackend
    for owner, name, replacement, expects in (
        # a triton kernel fills a table of tokens; the experts above read the batch's segments instead
        (
            backend,
            "_add_moe_lora_info",
            lambda self, forward_batch, info: info,
            "(self, forward_batch, batch_info)",
        ),
        (
            backend,
            "init_cuda_graph_moe_buffers",
            lambda self, *_, **__: None,
            "(self, max_bs, max_loras, compute_dtype, moe_layer, *, prefill=False)",
        ),
        (
            deepseek_mla_correction,
            "apply_q_correction",
            _add_to_queries,
            "(attn_module, q_nope, q_nope_out)",
        ),
        (
            deepseek_mla_correction,
            "apply_v_correction",
            _add_to_values,
            "(attn_module, attn_output, attn_bmm_flat)",
        ),
    ):
        patch(owner, name, replacement, expects=expects, why="it is a triton kernel")


def _add_to_queries(attention: Any, q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add the adapter of kv_b_proj where keys are folded into queries [n, heads, nope]; returns ``out``."""
    for rows, a, b in _kv_b_adapters(attention):
        low = torch.einsum("nhi,hir->nhr", q[rows], b[:, : attention.qk_nope_head_dim])
        out[rows] += low @ a
    return out


def _add_to_values(attention: Any, latent: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add the adapter of kv_b_proj to the values of [n, heads, latent]; returns ``out``."""
    values = out.view(-1, attention.num_local_heads, attention.v_head_dim)
    for rows, a, b in _kv_b_adapters(attention):
        b = b[:, attention.qk_nope_head_dim :]
        values[rows] += torch.einsum("nhr,hir->nhi", latent[rows] @ a.T, b)
    return out


def _kv_b_adapters(attention: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each adapter of the batch: its rows, A [r, latent], scaled B [heads, nope + value, r]."""
    linear = attention.kv_b_proj
    info = linear.lora_backend.batch_info
    if info is None or not hasattr(linear, "A_buffer"):
        return
    slots = _slots(info)
    for slot in slots.unique().tolist():
        if rank := int(info.lora_ranks_cpu[slot]):
            b = linear.B_buffer[slot, :, :rank] * info.scalings_cpu[slot]
            by_head = b.unflatten(0, (attention.num_local_heads, -1))
            yield torch.where(slots == slot)[0], linear.A_buffer[slot, :rank], by_head


def _slots(info: Any) -> torch.Tensor:
    """The place of each row's adapter in SGLang's pool, int64[n]."""
    return torch.repeat_interleave(info.weight_indices_cpu.long(), info.seg_lens_cpu.long())


def _experts(layers: Any) -> type:
    """Make the class of a layer's routed experts, which SGLang gives each expert's factors."""

    class ExpertsWithLoRA(layers.FusedMoEWithLoRA):
        def __init__(
            self,
            base_layer: Any,
            lora_backend: Any,
            *,
            experts_shared_outer_loras: bool = False,
            max_lora_rank: int | None = None,
        ):
            if experts_shared_outer_loras:
                raise ValueError("experts_shared_outer_loras has no plain twin: not on a CPU")
            layers.BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
            lora_backend.is_moe_lora = True
            self.experts_shared_outer_loras = False
            # DeepSeek's layers read these
            self.moe_runner_config = base_layer.moe_runner_config
            self.moe_runner_config.inplace = False
            self.quant_method = base_layer.quant_method
            self.should_fuse_routed_scaling_factor_in_topk = (
                base_layer.should_fuse_routed_scaling_factor_in_topk
            )
            self.tp_size, self.tp_rank = base_layer.moe_tp_size, base_layer.moe_tp_rank
            self.intermediate_size_per_partition = base_layer.intermediate_size_per_partition
            self._uses_interleaved_gate_up = False

        def forward(self, hidden_states: torch.Tensor, topk_output: Any, **options: Any):
            """Sum each token's experts, each with its factors of the token's adapter: [n, hidden]."""
            info, base = self.lora_backend.batch_info, self.base_layer
            if info is None or not info.has_active_lora:
                return base.forward(hidden_states, topk_output, **options)
            slots = _slots(info)
            weights, experts, _ = topk_output
            ranks, out = info.lora_ranks_cpu.tolist(), torch.zeros_like(hidden_states)
            for slot in slots.unique().tolist():
                in_slot = (slots == slot)[:, None]
                for e in experts[in_slot[:, 0]].unique().tolist():
                    rows, columns = torch.where((experts == e) & in_slot)
                    x = hidden_states[rows]
                    h = F.linear(x, base.w13_weight[e])
                    if ranks[slot]:
                        # A's of gate and up lie max_lora_rank apart, zeros beyond the adapter's rank, and
                        # SGLang's pool has multiplied B by the scale
                        low = F.linear(x, self.gate_up_lora_a_weights[slot, e]).chunk(2, -1)
                        high = self.gate_up_lora_b_weights[slot, e].chunk(2)
                        h = h + torch.cat([F.linear(a, b) for a, b in zip(low, high)], -1)
                    gate, up = h.chunk(2, -1)
                    act = F.silu(gate) * up
                    y = F.linear(act, base.w2_weight[e])
                    if ranks[slot]:
                        low = F.linear(act, self.down_lora_a_weights[slot, e])
                        y = y + F.linear(low, self.down_lora_b_weights[slot, e])
                    out.index_add_(0, rows, y * weights[rows, columns, None].to(y.dtype))
            return out

    return ExpertsWithLoRA
