"""The attention of machines without Transformer Engine."""

from r3train.cpu.device import prepare_device

prepare_device()

from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from r3train.cpu.packed_attention import PackedCoreAttention  # noqa: E402

LENGTHS = (9, 17, 4)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_a_pass_without_gradients_or_on_another_device_gives_the_same_numbers_to_the_last_bit(
    softmax_type, monkeypatch
):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        softmax_type=softmax_type,
        attention_dropout=0.0,
    )
    alone = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    attention = PackedCoreAttention(
        config, 1, attn_mask_type=None, attention_type="self", pg_collection=alone
    )
    torch.manual_seed(0)
    for parameter in attention.parameters():  # the sinks
        torch.nn.init.normal_(parameter)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        before = attention(query, key, value, packed_seq_params=packed)
    query.requires_grad_()
    now = attention(query, key, value, packed_seq_params=packed)
    assert now.requires_grad
    torch.testing.assert_close(now.detach(), before, rtol=0, atol=0)
    with torch.device(
        "meta"
    ):  # everything is on the device of what it is given, and not on the default one
        there = attention(query, key, value, packed_seq_params=packed)
    torch.testing.assert_close(there.detach(), before, rtol=0, atol=0)
