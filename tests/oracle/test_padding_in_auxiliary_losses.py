"""The load-balancing loss under replay sees real rows only, on ranks with padding and without.

Two tensor-parallel ranks with sequence parallelism; the pack's padding all lies on the second.  The
router's gradient, summed over both, is compared with the loss's formula over the real rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from r3train.types import RankSlice
from tests.oracle.actors import rank_context

HIDDEN, EXPERTS, TOPK, ROWS, REAL, COEFF = 8, 6, 2, 6, 10, 0.5


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [2 * ROWS, HIDDEN] of both ranks, padding last, and the router's weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * ROWS, HIDDEN, generator=generator)
    return hidden, torch.randn(EXPERTS, HIDDEN, generator=generator)


def expected_gradient() -> torch.Tensor:
    """d/dW of coeff * E / (K T^2) * sum_e count_e * sum_t p_te (arXiv 2101.03961 eq. 4-6), float64."""
    hidden, weight = inputs()
    rows, weight = hidden[:REAL].double(), weight.double().requires_grad_()
    probs = (rows @ weight.T).softmax(-1)
    own = probs.topk(TOPK, dim=1).indices  # Megatron's auxiliary loss takes the router's own choice
    counts = torch.bincount(own.flatten(), minlength=EXPERTS).double()
    loss = COEFF * EXPERTS / (TOPK * REAL**2) * (counts * probs.sum(0)).sum()
    return torch.autograd.grad(loss, weight)[0]


def make_slice(rank: int) -> RankSlice:
    uids = np.arange(rank * ROWS, (rank + 1) * ROWS)
    uids[uids >= REAL] = -1
    zeros = np.zeros(ROWS, dtype=np.int64)
    return RankSlice(
        microbatch_id=0,
        cu_seqlens_padded=np.array([0, ROWS], dtype=np.int32),
        max_seqlen=ROWS,
        loss_weights=np.ones(1, dtype=np.float32),
        tokens=zeros,
        labels=zeros,
        positions=zeros,
        loss_mask=zeros.astype(bool),
        rollout_log_probs=zeros.astype(np.float32),
        advantages=zeros.astype(np.float32),
        token_uids=uids,
        layer_numbers=np.array([1], dtype=np.int32),
        routes=np.tile(np.array([4, 5], dtype=np.uint8), (ROWS, 1, 1)),
        route_uids=uids,
        route_versions=np.zeros(ROWS, dtype=np.int32),
    )


def router_gradient(rank: int, store: str, masked: bool, results) -> None:
    """One rank: the gradient of the auxiliary loss only, summed over ranks by rank 0."""
    torch.set_num_threads(1)
    from r3train.cpu.device import prepare_device

    device = prepare_device()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    from r3train.trainer.megatron.replay import RoutingReplayManager

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=COEFF,
        moe_ffn_hidden_size=8,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=False,
    )
    router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    manager = RoutingReplayManager(
        num_experts=EXPERTS,
        topk=TOPK,
        device=device,
        rank=rank,
        counts_tokens=True,
        checks=False,
    )
    manager.install([torch.nn.ModuleList([router])])
    if not masked:
        router._forward_pre_hooks.clear()
    hidden, weight = inputs()
    with torch.no_grad():
        router.weight.copy_(weight)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    manager.begin_pass("train", [make_slice(rank)])
    manager.begin_forward(0, 0)
    probs, routing_map = router(hidden[rank * ROWS : (rank + 1) * ROWS][:, None])
    real = make_slice(rank).route_uids >= 0
    assert routing_map[torch.from_numpy(real)][:, 4:].all()  # replay is on
    (0.0 * probs.sum()).backward()
    gradient = router.weight.grad
    dist.all_reduce(gradient)
    if rank == 0:
        results.put(gradient.numpy())
    dist.destroy_process_group()


def gradient_of_both_ranks(tmp_path: Path, masked: bool) -> torch.Tensor:
    context = rank_context()
    results = context.Queue()
    ranks = [
        context.Process(
            target=router_gradient, args=(rank, str(tmp_path / "store"), masked, results)
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    assert [process.exitcode for process in ranks] == [0, 0]
    return torch.from_numpy(results.get(timeout=5))


@pytest.mark.ranks
def test_the_gradient_is_that_of_the_real_rows_whichever_rank_holds_the_padding(tmp_path):
    got, expected = gradient_of_both_ranks(tmp_path, masked=True), expected_gradient()
    assert expected.norm() > 0.01
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)


# verify plants it too: padding_counted
@pytest.mark.ranks
@pytest.mark.slow
def test_without_the_mask_the_gradient_would_be_another(tmp_path):
    got, expected = gradient_of_both_ranks(tmp_path, masked=False), expected_gradient()
    assert (got - expected).norm() > 0.05 * expected.norm()
