"""The batched decode step against SGLang's own loop over the requests."""

from types import SimpleNamespace

import pytest
import torch

from r3train.cpu.torchvision_stub import declare_torchvision_ops

declare_torchvision_ops()

from sglang.srt.layers.attention.torch_native_backend import (  # noqa: E402
    TorchNativeAttnBackend,
)

from r3train.cpu.batched_attention import BatchedAttention, alike  # noqa: E402

SLOTS, LONGEST = 4000, 128


def made(backend):
    pools = dict(req_to_token_pool=None, token_to_kv_pool=None)
    return backend(SimpleNamespace(device="cpu", **pools))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads, key_heads, value_size", [(8, 4, 16), (8, 8, 16), (6, 1, 12)])
@pytest.mark.parametrize("lengths", [(5, 100, 6, 90, 1), (33,) * 40], ids=["apart", "alike"])
def test_a_decode_step_of_all_requests_is_that_of_one_after_the_other(
    lengths, heads, key_heads, value_size, window
):
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    cache = draw(SLOTS, key_heads, 16)
    cache[-1] = torch.nan  # a slot of nobody
    free = torch.randperm(SLOTS - 1, generator=random).to(torch.int32)
    table = torch.full((2 * len(lengths), LONGEST), SLOTS - 1, dtype=torch.int32)
    places = torch.randperm(len(table), generator=random)[: len(lengths)]
    for place, part in zip(places, free[: sum(lengths)].split(lengths), strict=True):
        table[place, : len(part)] = part
    query = draw(len(lengths), heads, 16)
    found = []
    for backend in (TorchNativeAttnBackend, BatchedAttention):
        attention = made(backend)
        attention.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
        for values in (cache.neg()[..., :value_size], cache[..., :value_size]):  # two layers
            output = query.new_zeros(len(lengths), heads, value_size)
            attention._run_sdpa_forward_decode(
                query,
                output,
                cache,
                values,
                table,
                places,
                torch.tensor(lengths),
                scaling=0.3,
                enable_gqa=heads != key_heads,
                sliding_window_size=window,
            )
        found.append(output)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_requests_are_padded_to_twice_their_tokens_at_most():
    lengths = torch.randint(1, 5000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    groups = alike(lengths)
    assert sorted(i for group in groups for i in group) == list(range(300))
    assert len(groups) < 20
    for group in groups:
        group_lengths = [lengths[i] for i in group]
        assert max(group_lengths) * len(group) <= 2 * sum(group_lengths)
