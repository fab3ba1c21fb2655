"""Plain twins of SGLang's LoRA kernels; tests/e2e/test_adapters_on_the_server.py holds them in a server."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from r3train.cpu.sglang_lora import _add_to_queries, _add_to_values

HEADS, NOPE, VALUE, LATENT, RANK = 4, 6, 5, 12, 3


def test_kv_b_of_each_request_is_added_by_its_own_adapter_as_if_it_were_merged():
    """Requests of 2, 3 and 4 rows: an adapter, the base, an adapter of a lower rank in the same pool."""
    torch.manual_seed(0)
    pool = SimpleNamespace(
        A_buffer=torch.randn(3, RANK, LATENT),
        B_buffer=torch.randn(3, HEADS * (NOPE + VALUE), RANK),
        lora_backend=SimpleNamespace(
            batch_info=SimpleNamespace(
                weight_indices_cpu=torch.tensor([1, 0, 2]),
                seg_lens_cpu=torch.tensor([2, 3, 4]),
                lora_ranks_cpu=torch.tensor([0, RANK, 2]),
                scalings_cpu=torch.tensor([0.0, 2.0, 0.5]),
            )
        ),
    )
    attention = SimpleNamespace(
        kv_b_proj=pool, num_local_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=VALUE
    )
    q, latent = torch.randn(9, HEADS, NOPE), torch.randn(9, HEADS, LATENT)
    keys = _add_to_queries(attention, q, torch.ones(9, HEADS, LATENT)) - 1
    values = _add_to_values(attention, latent, torch.ones(9, HEADS * VALUE)) - 1
    for rows, slot, rank, scale in ((slice(0, 2), 1, RANK, 2.0), (slice(5, 9), 2, 2, 0.5)):
        merged = scale * pool.B_buffer[slot, :, :rank] @ pool.A_buffer[slot, :rank]
        by_head = merged.view(HEADS, NOPE + VALUE, LATENT)
        wanted = torch.einsum("nhi,hil->nhl", q[rows], by_head[:, :NOPE])
        torch.testing.assert_close(keys[rows], wanted, atol=1e-4, rtol=1e-4)
        wanted = torch.einsum("nhl,hil->nhi", latent[rows], by_head[:, NOPE:])
        torch.testing.assert_close(values[rows], wanted.flatten(1), atol=1e-4, rtol=1e-4)
    assert not keys[2:5].any() and not values[2:5].any()
