"""The rows that SGLang's own capturer keeps, where a GPU's batches have more: shared experts, padding, ranks.

The capturer is real and its buffers are on the host.  A CPU server never fuses shared experts, never pads a batch
and has no data-parallel attention.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from r3train.cpu.torchvision_stub import declare_torchvision_ops

declare_torchvision_ops()

from sglang.srt.layers import dp_attention  # noqa: E402
from sglang.srt.state_capturer import base, routed_experts  # noqa: E402

LAYERS, TOP_K = 3, 2


def capturer_of(world: ExitStack, *, dp: int = 1, rank: int = 0, shared: int = 0):
    """A capturer of one of ``dp`` data-parallel ranks; ``shared`` experts are fused into the routed ones."""
    config = SimpleNamespace(num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS)
    schedule = SimpleNamespace(chunked_prefill_size=16)
    parallel = SimpleNamespace(num_dp_ranks=dp, attn_tp_size=1)
    for module, name, answer in (
        (routed_experts, "get_schedule", schedule),
        (routed_experts, "get_parallel", parallel),
        (routed_experts, "_is_scattered_a2a_backend", False),
        (routed_experts, "is_dp_attention_enabled", dp > 1),
        (dp_attention, "dp_gather_width", dp),
        (dp_attention, "dp_gather_slot", rank),
    ):
        world.enter_context(patch.object(module, name, lambda answer=answer: answer))
    world.enter_context(patch.dict(base.ALLOC_MEMORY_FUNCS, {"cpu": _plain}))
    return routed_experts.RoutedExpertsCapturer(
        SimpleNamespace(hf_text_config=config),
        num_tokens=64,
        max_running_requests=8,
        num_fused_shared_experts=shared,
        device="cpu",
    )


def _plain(shape: tuple[int, ...], dtype: torch.dtype, **_how: object) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def choices(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Expert ids of a batch, int32[layers, tokens, width], no two equal."""
    order = torch.randperm(LAYERS * tokens * width, generator=torch.manual_seed(seed)) + 1
    return order.reshape(LAYERS, tokens, width).int()


def forward(capturer, chosen: torch.Tensor, slots: list[int], *, virtual: bool = False, **batch):
    """One forward: every layer's choice, then the rows of the KV slots that the batch writes."""
    for layer, ids in enumerate(chosen):
        capturer.capture(layer, ids)
    slot_ids = torch.tensor(slots)
    padding = torch.zeros(len(chosen[0]) - len(slots), dtype=torch.int64)
    forward_batch = SimpleNamespace(
        out_cache_loc=torch.cat([slot_ids, padding]) if virtual else slot_ids,
        out_cache_loc_virtual=slot_ids if virtual else None,
        global_num_tokens_cpu=batch.get("tokens_of_ranks"),
    )
    capturer.on_forward_end(
        forward_batch,
        can_run_graph=batch.get("graph_requests") is not None,
        cuda_graph_batch=batch.get("graph_requests"),
    )
    return capturer.host_cache.buffer[slot_ids]


@pytest.mark.parametrize("appended_later", [False, True])
def test_the_column_of_fused_shared_experts_is_none_of_the_rows(appended_later):
    with ExitStack() as world:
        capturer = capturer_of(world, shared=1)
        chosen = choices(5, TOP_K + 1)
        given = chosen[..., :TOP_K] if appended_later else chosen
        kept = forward(capturer, given, [7, 9, 11, 8, 60])
    assert torch.equal(kept, chosen[..., :TOP_K].transpose(0, 1))


@pytest.mark.parametrize("virtual", [False, True])
def test_a_graphs_padding_is_in_no_row(virtual):
    with ExitStack() as world:
        capturer = capturer_of(world)
        chosen = choices(8, TOP_K)  # a graph of 8 with 3 requests
        kept = forward(capturer, chosen, [4, 2, 33], virtual=virtual, graph_requests=8)
        others = [i for i in range(64) if i not in (4, 2, 33)]
        assert not capturer.host_cache.buffer[others].any()
    assert torch.equal(kept, chosen[:, :3].transpose(0, 1))


@pytest.mark.parametrize("graph", [None, 4])
def test_a_data_parallel_rank_keeps_the_rows_of_its_own_requests(graph):
    """Ranks of 3 and 2 tokens lie one after the other, in a graph each at the start of its padded part."""
    with ExitStack() as world:
        capturer = capturer_of(world, dp=2, rank=1)
        start = graph or 3
        chosen = choices(2 * graph if graph else 5, TOP_K)
        kept = forward(capturer, chosen, [5, 6], tokens_of_ranks=[3, 2], graph_requests=graph)
    assert torch.equal(kept, chosen[:, start : start + 2].transpose(0, 1))


NOT_MENDED = "SGLang has fixed it: r3train/engine/refusals.py may let data-parallel attention pass"


def test_in_a_graph_of_prefills_a_data_parallel_rank_keeps_rows_of_another_so_they_are_refused():
    """Each rank's prefill of 8 tokens fills its part; SGLang passes the size of the last decoding graph, 2."""
    with ExitStack() as world:
        capturer = capturer_of(world, dp=2, rank=1)
        chosen = choices(16, TOP_K)
        slots = list(range(20, 28))
        kept = forward(capturer, chosen, slots, tokens_of_ranks=[8, 8], graph_requests=2)
    assert not torch.equal(kept, chosen[:, 8:].transpose(0, 1)), NOT_MENDED


def test_with_drafts_a_data_parallel_rank_keeps_rows_of_another_so_they_are_refused():
    """A graph of 2 requests has 4 tokens each; SGLang passes the requests as the size of a rank's part."""
    drafts, requests = 4, 2
    with ExitStack() as world:
        capturer = capturer_of(world, dp=2, rank=1)
        chosen = choices(2 * requests * drafts, TOP_K)
        ours = slice(requests * drafts, 2 * requests * drafts)
        kept = forward(
            capturer,
            chosen,
            list(range(20, 28)),
            tokens_of_ranks=[requests * drafts, requests * drafts],
            graph_requests=requests,
        )
    assert not torch.equal(kept, chosen[:, ours].transpose(0, 1)), NOT_MENDED
