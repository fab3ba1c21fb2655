"""The twins of SGLang's sparse attention: what is chosen, and attention to it."""

from types import SimpleNamespace

import pytest
import torch

from r3train.cpu.torchvision_stub import declare_torchvision_ops

declare_torchvision_ops()

from r3train.cpu.sglang_sparse_attention import SparseAttention, choose, requests_of  # noqa: E402

SLOTS, HEADS, SIZE, OF_VALUE = 60, 3, 16, 12
# tokens of two requests, the last of which are in the batch
LENGTHS, NEW = (5, 9), (2, 9)


def batch(new: tuple[int, ...], decodes: bool = False) -> SimpleNamespace:
    mode = SimpleNamespace(is_decode=lambda: decodes)
    lengths = torch.tensor(LENGTHS)
    return SimpleNamespace(
        forward_mode=mode,
        extend_seq_lens=None if decodes else torch.tensor(new),
        extend_prefix_lens=None if decodes else lengths - torch.tensor(new),
        req_pool_indices=torch.tensor([1, 0]),
        seq_lens=lengths,
        encoder_lens=None,
        out_cache_loc=None,
    )


@pytest.fixture
def table() -> torch.Tensor:
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0)).int()
    return torch.stack([slots[:20], slots[20:40]])


def test_the_best_of_the_tokens_up_to_a_rows_own_are_chosen(table):
    keys = torch.tensor([[1.0], [3.0], [2.0], [9.0]])
    query, weights = torch.ones(2, 2, 1), torch.tensor([[1.0, 0.5], [-1.0, -0.5]])
    (first, _) = requests_of(batch((2, 9)), torch.zeros(2, 20, dtype=torch.int32))
    behind = SimpleNamespace(rows=slice(0, 2), slots=torch.zeros(4))
    behind = type(first)(behind.rows, behind.slots).behind
    assert behind.tolist() == [[False, False, False, True], [False] * 4]
    chosen = choose(query, keys, weights, behind, topk=3)
    # the second row's weights are negative: its best score is the lowest key's
    assert chosen.dtype == torch.int32 and chosen.tolist() == [[1, 2, 0], [0, 2, 1]]
    assert choose(query[:1], keys[:2], weights[:1], behind[:1, :2], topk=4).tolist() == [
        [1, 0, -1, -1]
    ]
    alone = torch.tensor([[False, True]])
    assert choose(query[:1], keys[:2], weights[:1], alone, topk=2).tolist() == [[0, -1]]


@pytest.mark.parametrize("decodes", [False, True])
def test_a_row_of_a_long_request_attends_to_what_was_chosen(decodes, table):
    random = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    cache, topk = draw(SLOTS, 1, SIZE), 6
    counts = (1, 1) if decodes else NEW
    rows = sum(counts)
    query, given = draw(rows, HEADS * SIZE), batch(counts, decodes)
    chosen = torch.full((rows, topk), -1, dtype=torch.int32)
    expected = torch.empty(rows, HEADS, OF_VALUE)
    for one, length in zip(requests_of(given, table), LENGTHS, strict=True):
        for row in range(one.rows.start, one.rows.stop):
            position = length - one.rows.stop + row
            seen = torch.randperm(position + 1, generator=random)[:topk]
            chosen[row, : len(seen)] = seen
            if length <= topk:  # all of them
                seen = torch.arange(position + 1)
            own = cache[one.slots[seen], 0]
            weights = (query[row].view(HEADS, SIZE) @ own.T * 0.3).softmax(-1)
            expected[row] = weights @ own[:, :OF_VALUE]
    pools = dict(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda layer: cache, get_value_buffer=lambda layer: cache[..., :OF_VALUE]
        ),
    )
    attention = SparseAttention(SimpleNamespace(device="cpu", **pools))
    attention._groups = None
    layer = SimpleNamespace(
        **dict(layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=1, scaling=0.3, attn_type=None),
        **dict(qk_head_dim=SIZE, v_head_dim=OF_VALUE, is_cross_attention=False),
        sliding_window_size=-1,
    )
    forward = attention.forward_decode if decodes else attention.forward_extend
    got = forward(query, None, None, layer, given, topk_indices=chosen)
    torch.testing.assert_close(got.view(rows, HEADS, OF_VALUE), expected, rtol=1e-5, atol=1e-6)
