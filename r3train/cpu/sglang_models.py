"""Plain twins of what SGLang's models compile with triton, put in once a model was built.

Importing a model earlier would run in a circle: the platform is made while SGLang's runner is being
imported.  Each function says which family it is for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def torch_native_backend(runner: Any) -> Any:
    """Make SGLang's torch_native attention, after the model and before its first forward."""
    from r3train.cpu import memory_saver
    from r3train.cpu.batched_attention import BatchedAttention

    memory_saver.runner = runner
    _gated_shared_expert()
    _norm_over_all_heads()
    _gated_delta_net()
    _gates_of_qwen3_5()
    return BatchedAttention(runner)


def sinks_backend(runner: Any) -> Any:
    """Make an attention with sinks, windows and plain torch (gpt-oss), in triton's name.

    SGLang serves gpt-oss by backends of a list only.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from r3train.cpu import memory_saver

    memory_saver.runner = runner

    class WithSinks(TorchNativeAttnBackend):
        """softmax(QK^T)V of one sequence after another; a sink is one more key, its value zeros."""

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            lengths = forward_batch.extend_seq_lens.tolist()
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, lengths)

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            lengths = [1] * len(forward_batch.seq_lens)
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, lengths)

        def _attend(self, q, k, v, layer, batch, save_kv_cache, sinks, lengths):
            """q: [n, heads * d], the last ``lengths`` tokens of each sequence."""
            pool, outputs = self.token_to_kv_pool, []
            if save_kv_cache and k is not None:
                where = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
                pool.set_kv_buffer(layer, where, k, v)
            keys, values = (
                get(layer.layer_id) for get in (pool.get_key_buffer, pool.get_value_buffer)
            )
            window = layer.sliding_window_size
            windowed = window is not None and window > -1
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(lengths)
            for i, own in enumerate(queries):
                total = int(batch.seq_lens[i])
                slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[i], :total]
                if windowed and self.use_sliding_window_kv_pool:
                    slots = pool.translate_loc_from_full_to_swa(slots)
                at, seen = torch.arange(total - len(own), total)[:, None], torch.arange(total)
                allowed = seen <= at
                if windowed:
                    allowed &= seen >= at - window
                mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, -torch.inf)
                key, value = (x[slots].to(q.dtype).movedim(0, 1) for x in (keys, values))
                if sinks is not None:
                    sink = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(own), 1)
                    mask = torch.cat([mask.expand(len(sink), -1, -1), sink], -1)
                    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
                out = F.scaled_dot_product_attention(
                    own.movedim(0, 1)[None],
                    key[None],
                    value[None],
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=len(key) != layer.tp_q_head_num,
                )
                outputs.append(out[0].movedim(0, 1).flatten(1))
            return torch.cat(outputs)

    return WithSinks(runner)


def _gated_shared_expert() -> None:
    """Put the shared expert's output [T, hidden] under its gate (Qwen2-MoE, Qwen3-Next, Qwen3.5)."""
    from sglang.srt.models import qwen2_moe

    def gated(hidden_states, gate_weight, shared_output):
        return torch.sigmoid(hidden_states @ gate_weight.reshape(-1, 1)) * shared_output

    def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states):
        final_hidden_states += gated(hidden_states, gate_weight, shared_output)

    qwen2_moe.fused_gate_sigmoid_mul = gated
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated


def _norm_over_all_heads() -> None:
    """Normalise queries and keys over all heads of one rank (MiniMax-M2)."""
    from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._world_size == 1, "a CPU server has no tensor parallelism"
        return tuple(
            F.rms_norm(x.float(), x.shape[-1:], eps=self._eps).to(x.dtype) * norm.weight
            for x, norm in ((q, self._q_norm), (k, self._k_norm))
        )

    MiniMaxM2QKRMSNorm.forward = forward


def _gated_delta_net() -> None:
    """Compute linear attention token by token (Qwen3-Next, Qwen3.5): convolution, gates, recurrence, norm."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.models import qwen3_next

    qwen3_next._is_cpu = True  # its plain way to take in_proj apart

    def norm(self, x: torch.Tensor, z: torch.Tensor | None = None, *_: Any, **__: Any):
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (y if z is None else y * F.silu(z.float())).to(x.dtype)

    layernorm_gated.RMSNorm.forward = fused_norm_gate.FusedRMSNormGated.forward = norm

    def extend(self, layer, forward_batch, mixed_qkv, a, b, **_):
        lengths = forward_batch.extend_seq_lens.tolist()
        fresh = (forward_batch.extend_prefix_lens == 0).tolist()
        return _delta_rule(self, layer, mixed_qkv, a, b, lengths, fresh)

    def decode(self, layer, forward_batch, mixed_qkv, a, b, **_):
        n = len(forward_batch.seq_lens)
        return _delta_rule(self, layer, mixed_qkv, a, b, [1] * n, [False] * n)

    GDNAttnBackend.forward_extend, GDNAttnBackend.forward_decode = extend, decode


def _gates_of_qwen3_5() -> None:
    """Take the input projections apart, and put attention's output under its gate (Qwen3.5)."""
    from sglang.srt.models import qwen3_5

    def unpack(*args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x.contiguous() for x in qwen3_5.qwen3_5_gdn_prefill_projection_views(*args))

    def gated(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
        out = x * torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype)
        return x.copy_(out) if inplace else out

    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = unpack
    qwen3_5.fused_sigmoid_mul = gated


def _delta_rule(
    backend: Any,
    layer: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    lengths: list[int],
    fresh: list[bool],
) -> torch.Tensor:
    """The output of the batch's sequences, [1, n, heads, head_dim]; moves their states in the cache."""
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    windows, states = cache.conv[0], cache.temporal
    weight = layer.conv_weights.reshape(mixed_qkv.shape[-1], 1, -1)
    slots = backend.forward_metadata.mamba_cache_indices.tolist()
    out: list[torch.Tensor] = []
    start = 0
    for slot, n, is_fresh in zip(slots, lengths, fresh):
        rows = slice(start, start + n)
        start += n
        if is_fresh:
            windows[slot], states[slot] = 0, 0
        x = torch.cat([windows[slot].to(mixed_qkv.dtype), mixed_qkv[rows].T], -1)
        windows[slot] = x[:, -windows.shape[-1] :]
        x = F.silu(F.conv1d(x[None], weight, layer.bias, groups=len(x))[0]).T.float()
        q, k, v = x.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
        q, k = (y.view(n, -1, layer.head_k_dim) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(layer.num_v_heads // layer.num_k_heads, 1) for y in (q, k))
        q, v = q * layer.head_k_dim**-0.5, v.view(n, layer.num_v_heads, -1)
        decay = (-layer.A_log.float().exp() * F.softplus(a[rows].float() + layer.dt_bias)).exp()
        beta = b[rows].float().sigmoid()
        state = states[slot].float()  # [heads, v, k], as SGLang's pool has it
        for t in range(n):
            state = state * decay[t, :, None, None]
            delta = (v[t] - (state * k[t][:, None]).sum(-1)) * beta[t, :, None]
            state = state + delta[..., None] * k[t][:, None]
            out.append((state * q[t][:, None]).sum(-1))
        states[slot] = state.to(states.dtype)
    return torch.stack(out)[None].to(mixed_qkv.dtype)
