"""gpt-oss: sinks, sliding windows, biases everywhere, all experts of a layer in one tensor on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import Config, Family
from r3train.families.weight_rows import (
    ATTENTION,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    fused_experts,
    qkv,
    router,
    vector,
)
from r3train.families.tiny_options import TinyModel, TinyOptions, with_local_experts
from r3train.families.transformer import Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _conflicts(config: Config) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        yield f"rope_type is {rope.get('rope_type')!r}, expected 'yarn' as in the published models"
    if not isinstance(config.get("sliding_window"), int):
        yield f"sliding_window is {config.get('sliding_window')!r}, expected a number of tokens"


def _transformer(keys: Keys) -> Fields:
    every_other = ["sliding_attention", "full_attention"] * keys["num_hidden_layers"]
    kinds = list(keys.get("layer_types", every_other))[: keys["num_hidden_layers"]]
    return experts_of(keys, "intermediate_size") | {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": keys["swiglu_limit"],
        "bias_activation_fusion": False,
        "softmax_type": "learnable",
        # a window of n tokens holds the token and n - 1 before it
        "window_size": (keys.integer("sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _rotary(keys: Keys) -> Fields:
    return {"position_embedding_type": "yarn", "rotary_base": keys.rope["rope_theta"]}


def _yarn(keys: Keys) -> Fields:
    """Return what GPTModel asks for by name."""
    rope = keys.rope
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_beta_fast": rope["beta_fast"],
        "yarn_beta_slow": rope["beta_slow"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
    }


_LAYOUT = dict(alternate=True, transposed=True)


def _tiny(o: TinyOptions) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
    }
    return with_local_experts(o, head_dim=o.head_dim, sliding_window=8, rope_parameters=rope)


GPT_OSS = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            qkv("bias"),
            vector(f"{ATTENTION}linear_proj.bias", "self_attn.o_proj.bias", "hidden"),
            vector(
                f"{ATTENTION}core_attention.softmax_offset",
                "self_attn.sinks",
                "heads",
                sharded="rows",
            ),
            MLP_NORM,
            router("mlp.router.weight"),
            vector("mlp.router.bias", "mlp.router.bias", "experts", layers=("sparse",)),
            *fused_experts(**_LAYOUT),
            *fused_experts("bias", **_LAYOUT),
        ),
        expert_width="intermediate_size",
    ),
    _transformer,
    {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (True, True),
        "swiglu_alpha": (1.702, 1.702),
    },
    rope_types=("yarn",),
    alone={"expert_tensor_parallel_size": "its experts have biases"},
    served_in_less=True,  # its sinks, in bfloat16
    log_prob_gap=1e-3,
    lora=True,
    conflicts=_conflicts,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "swiglu_limit": 7.0},
    rotary=_rotary,
    attributes=_yarn,
    layers="biased_experts",
    cpu_attention="triton",  # which has a plain twin there
    activation_steps=8,  # its activation is made of several steps
    refused_overrides={
        "apply_rope_fusion": "for packed sequences Megatron's fused kernel leaves out the factor of yarn by"
        " which this model's queries and keys grow, and every log-prob would be another"
    },
    tiny={"gpt_oss": TinyModel("GptOss", _tiny, recipe_version=2)},
)


def attention_with_sinks(runner: Any) -> Any:
    """Make SGLang's attention with sinks and windows of plain torch, for a server on a CPU."""
    import torch
    import torch.nn.functional as F
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

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
            for i, query in enumerate(queries):
                total = int(batch.seq_lens[i])
                slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[i], :total]
                if windowed and self.use_sliding_window_kv_pool:
                    slots = pool.translate_loc_from_full_to_swa(slots)
                at, seen = torch.arange(total - len(query), total)[:, None], torch.arange(total)
                allowed = seen <= at
                if windowed:
                    allowed &= seen >= at - window
                mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, -torch.inf)
                key, value = (x[slots].to(q.dtype).movedim(0, 1) for x in (keys, values))
                if sinks is not None:
                    sink = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(query), 1)
                    mask = torch.cat([mask.expand(len(sink), -1, -1), sink], -1)
                    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
                out = F.scaled_dot_product_attention(
                    query.movedim(0, 1)[None],
                    key[None],
                    value[None],
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=len(key) != layer.tp_q_head_num,
                )
                outputs.append(out[0].movedim(0, 1).flatten(1))
            return torch.cat(outputs)

    return WithSinks(runner)
