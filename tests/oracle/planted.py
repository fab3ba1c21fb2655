"""Bugs that only tests plant, next to those of ``r3train.verify.mutations``; they are in its registry.

Each names the topology that shows it and the phase that must fail: ``tests.oracle.verify_planted`` plants these
as ``r3train verify`` plants its own.  Some end in a clear error of production or of Megatron instead
(``expect_error``).  One batch of given log-probs cannot show the others: they name the test that plants them in
a whole job or on a real server instead (``caught_by``).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router as megatron_router

from r3train import hf_checkpoint, types
from r3train.algo import policy_loss
from r3train.config import RunConfig
from r3train.engine import adapters, client, publish, publish_memory
from r3train.generation import conversation, scheduler, stitch
from r3train.layout import microbatch
from r3train.loop import distribute, kl_reward, prepare, weight_update
from r3train.trainer.megatron import actor, forward_step, hf_weights, lora, optimizer, replay
from r3train.trainer.megatron.indexer_replay import ReplayedCall
from r3train.trainer.megatron.replay import IndexerReplay, RouterReplay, RoutingReplayManager
from r3train.trainer.megatron.sampling_mask import DROPPED, SamplingMask, shard_of
from r3train.verify.compare_outcomes import FORWARD, GRADIENTS, LOSS, ROUTES
from r3train.verify.mutations import (
    ANSWERS,
    MUTATIONS,
    Patch,
    mutation,
    patched,
    planted_by,
    replaces,
    spoils_routes,
    without_second_stage,
)

__all__ = ["MUTATIONS", "patched", "planted_by"]


@mutation("one")
def null_with_mtp(config, hf):
    """A multi-token-prediction router is there and left alone."""
    return attached_mtp()


@spoils_routes("ep2")
def token_shift_minus(routes, hf):
    """Every token gets the route of the token after it."""
    for r in routes:
        r[:] = np.roll(r, -1, axis=0)


@spoils_routes("tp2")
def layer_shift(routes, hf):
    """Every layer gets the routes of the layer before it."""
    for r in routes:
        r[:] = np.roll(r, 1, axis=1)


@spoils_routes("cp2")
def last_row_dropped(routes, hf):
    """The last recorded row of every sample is lost."""
    for r in routes:
        r[-1] = hf.route_shape.missing


@spoils_routes("dp2")
def group_samples_swapped(routes, hf):
    """Two samples of a group get each other's routes."""
    for a, b in zip(routes[::2], routes[1::2]):
        if a.shape == b.shape:
            a[:], b[:] = b.copy(), a.copy()


@spoils_routes("dp2")
def duplicate_in_row(routes, hf):
    """One row names an expert twice."""
    row = routes[0][2, hf.moe_layer_numbers[0] - 1]
    row[:] = row[0]


@spoils_routes("recompute_uniform")
def dense_offset_dropped(routes, hf):
    """Layers are counted without the dense ones before them."""
    moe = [n - 1 for n in hf.moe_layer_numbers]
    for r in routes:
        r[:, moe] = r[:, : len(moe)].copy()


@mutation("one_wide300", ROUTES, expect_error="twice")  # of 300 experts some row holds 13 and 269
def uint8_wrap(config, hf):
    """Expert ids above 255 wrap round."""
    return mock.patch.object(types.RouteShape, "dtype", np.dtype(np.uint8))


@replaces(replay, "fill_missing", "dp2", ROUTES)
def cyclic_fill(original, scores, experts, missing):
    """Missing slots are filled with experts 0, 1, ... in turn, whatever the row holds."""
    turn = torch.arange(experts.numel(), device=experts.device).view_as(experts)
    return torch.where(missing, turn % scores.shape[1], experts)


# -- dealing, slicing, sending -----------------------------------------------------------------


@replaces(prepare, "assign_microbatches", "dp2", ROUTES)
def sample_not_dealt(original, *args):
    """The last sample of the first microbatch is dealt to nobody."""
    dealt = original(*args)
    dealt[0][0].pop()
    return dealt


@replaces(distribute, "send_slices", "dp2", ROUTES)
def first_data_rank_everywhere(original, microbatches, topologies):
    """Every data rank is sent the first one's microbatches."""
    return original(microbatches, [replace(t, dp_rank=0) for t in topologies])


@replaces(distribute, "slice_microbatch", "tp2", ROUTES)
def neighbours_routes(original, batch, t):
    """Every tensor rank is sent its neighbour's routes."""
    neighbours = original(batch, replace(t, tp_rank=t.tp_size - 1 - t.tp_rank))
    return replace(original(batch, t), routes=neighbours.routes)


@replaces(forward_step, "logits_of_rows", "ep2", FORWARD)
def rows_shifted_by_one(original, *, context, **given):
    """Every row's logits are those of the next row that has any."""
    return original(context=context.roll(-1), **given)


@replaces(forward_step, "gather_from_sequence_parallel_region", "tp2", FORWARD)
def rows_of_another_rank(original, share, **how):
    """Logits are of rows that another tensor rank holds."""
    return original(share, **how).roll(len(share), 0)


@replaces(forward_step, "loss_rows", "dp2", LOSS)
def loss_row_left_out(original, s):
    """The last row with loss goes through no output layer."""
    rows = original(s)
    return rows[:-1] if len(rows) > 1 else rows


@replaces(microbatch, "cp_rows", "cp2", FORWARD)
def contiguous_cp(original, rows, cu_seqlens_padded, cp_size, cp_rank):
    """Context-parallel ranks take contiguous shares."""
    share = np.diff(cu_seqlens_padded) // cp_size
    starts = cu_seqlens_padded[:-1] + share * cp_rank
    return np.concatenate([rows[s : s + n] for s, n in zip(starts, share)])


@replaces(microbatch, "cp_rows", "cp2", FORWARD)
def cp_halves_swapped(original, rows, cu_seqlens_padded, cp_size, cp_rank):
    """The two zigzag chunks of a rank change places."""
    own = original(rows, cu_seqlens_padded, cp_size, cp_rank)
    parts, start = [], 0
    for n in np.diff(cu_seqlens_padded) // (2 * cp_size):
        parts += [own[start + n : start + 2 * n], own[start : start + n]]
        start += 2 * n
    return np.concatenate(parts)


@replaces(distribute, "slice_microbatch", "cp2", ROUTES)
def contiguous_cp_routes(original, batch, t):
    """Routes are cut by a contiguous share where the tokens are cut in a zigzag."""
    out = original(batch, t)
    n = len(batch.layout.rows) // t.cp_size
    rows = batch.layout.rows[n * t.cp_rank : n * (t.cp_rank + 1)]
    marker = types.missing_marker(out.routes.dtype)
    own = microbatch.take_routes(batch.routes, out.layer_numbers, rows, marker)
    return replace(out, routes=own)


@replaces(microbatch, "sp_rows", "tp2", ROUTES, expect_error="the router sees")
def sp_slice_skipped(original, rows, tp_size, tp_rank):
    """Routes are not cut for sequence parallelism."""
    return rows


@replaces(microbatch, "sp_rows", "tp2", ROUTES)
def sp_first_share(original, rows, tp_size, tp_rank):
    """Every tensor rank replays the first rank's rows."""
    return original(rows, tp_size, 0)


@replaces(microbatch, "sp_rows", "tp2", ROUTES)
def tp_ranks_reversed(original, rows, tp_size, tp_rank):
    """Tensor ranks are counted backwards."""
    return original(rows, tp_size, tp_size - 1 - tp_rank)


# -- replay: layers ----------------------------------------------------------------------------


@contextmanager
def layers_read(as_layer: Callable[[int, int], int]) -> Iterator[None]:
    """Make every replay object serve another layer's routes: (vp_stage, layer) -> layer.

    The rank is sent those layers' routes as well, so nothing is missing: they are just wrong.
    """

    def init(original, self, manager, vp_stage, layer_number, gates):
        original(self, manager, vp_stage, as_layer(vp_stage, layer_number), gates)

    def with_layers(original, topology, layers, indexers):
        also = tuple(
            tuple(dict.fromkeys([*chunk, *(as_layer(v, n) for n in chunk)]))
            for v, chunk in enumerate(layers)
        )
        return original(topology, also)

    with patched(RouterReplay, "__init__", init), patched(actor, "with_layers", with_layers):
        yield


@mutation("pp2_uneven", ROUTES)
def uneven_first_stage_ignored(config, hf):
    """Layers are counted as if all pipeline stages were equal."""
    first = config.parallel.decoder_first_pipeline_num_layers
    even = hf.num_hidden_layers // config.parallel.pipeline_model_parallel_size

    def as_layer(vp_stage, layer):
        behind = parallel_state.get_pipeline_model_parallel_rank() > 0
        return min(layer - first + even, hf.num_hidden_layers) if behind else layer

    return layers_read(as_layer)


@mutation("vpp2pp2", ROUTES)
def first_chunk_reused(config, hf):
    """The second model chunk replays the first one's layers."""
    stride = hf.num_hidden_layers // config.parallel.virtual_pipeline_model_parallel_size
    return layers_read(lambda vp_stage, layer: layer - vp_stage * stride)


@mutation("one", ROUTES)
@contextmanager
def mtp_router_counted(config, hf):
    """The router of a multi-token-prediction layer, whose numbers restart, counts as layer 1."""

    def all_routers(original, chunk):
        # the later of two routers with the same number is the one that keeps the layer's name
        routers = {
            m.layer_number: m for m in chunk.modules() if isinstance(m, megatron_router.TopKRouter)
        }
        return [routers[number] for number in sorted(routers)]

    with attached_mtp(), patched(replay, "decoder_routers", all_routers):
        yield


def attached_mtp() -> AbstractContextManager[Any]:
    """Give every chunk a multi-token-prediction router that routes the decoder's output, natively.

    A real Megatron router numbered 1; its weight is no parameter, so that checkpoints do not ask
    for it.  (No family has an MTP block that runs without Transformer Engine.)
    """

    def attach(chunk):
        first = next(m for m in chunk.modules() if isinstance(m, megatron_router.TopKRouter))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        router = megatron_router.TopKRouter(config=first.config, pg_collection=groups)
        router.set_layer_number(1)
        weight = first.weight.detach().clone()
        del router._parameters["weight"]
        router.register_buffer("weight", weight, persistent=False)
        # inside the decoder: Megatron walks an ``mtp`` of the model itself, layer by layer
        chunk.decoder.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([router])})

        @torch.no_grad()
        def run(module, args, output):
            router(output.detach())

        chunk.decoder.register_forward_hook(run)

    def load(original, weights, chunks, path):
        original(weights, chunks, path)
        for chunk in map(hf_weights.unwrap, chunks):
            if not hasattr(chunk.decoder, "mtp"):
                attach(chunk)

    return patched(hf_weights, "load_hf_weights", load)


@mutation("dp2", ROUTES, decoy_pass=True)
@contextmanager
def routes_not_cleared(config, hf):
    """The routes of a forward-only pass stay and are served to the next one."""

    def end_pass(original, self):
        staged = dict(self._staged)
        original(self)
        self._staged = staged

    def begin_pass(original, self, *args, **settings):
        stale = dict(self._staged)
        original(self, *args, **settings)
        self._staged.update(stale)

    with patched(RoutingReplayManager, "end_pass", end_pass):
        with patched(RoutingReplayManager, "begin_pass", begin_pass):
            yield


@replaces(RoutingReplayManager, "current_microbatch", "pp2_uneven_level", ROUTES)
def last_in_first_out_recompute(original, self, vp_stage):
    """Recomputation uses the microbatch that ran forward last."""
    return self._forward[vp_stage] if self._active else None


@mutation("vpp2pp2_level", ROUTES)
def last_in_first_out_interleaved(config, hf):
    """Recomputation uses the last microbatch forward, interleaved."""
    return last_in_first_out_recompute(config, hf)


@replaces(RoutingReplayManager, "staged", "recompute_uniform", ROUTES)
def native_recompute(original, self, vp_stage):
    """Recomputation routes for itself."""
    return None if replay.in_recomputation() else original(self, vp_stage)


@replaces(RoutingReplayManager, "begin_forward", "one_level", ROUTES)
def stale_microbatch(original, self, vp_stage, microbatch_id):
    """Every microbatch gets the routes of the one before."""
    before = getattr(self, "_before", microbatch_id)
    self._before = microbatch_id
    original(self, vp_stage, before if before in self._staged else microbatch_id)


@replaces(megatron_router, "topk_routing_with_score_function", "tp2", ROUTES)
def fused_router(original, *args, router_replay=None, **kwargs):
    """The fused router returns before it asks for a replay."""
    return original(*args, router_replay=None, **kwargs)


@mutation("one", ROUTES, overrides={"moe_router_fusion": True}, expect_error="fused")
def fused_router_flag(config, hf):
    """The flag moe_router_fusion is set in spite of the start-up check."""
    return nullcontext()


@replaces(RoutingReplayManager, "_mask_padding", "cp2_glm", ROUTES)
def padding_counted(original, *args):
    """Padding rows count as load for the expert biases."""
    return None


@replaces(actor.MegatronActor, "_run_schedule", "dp2", LOSS)
def last_microbatch_skipped(original, self, step, slices, *, forward_only):
    """The last microbatch of the step is left out."""
    kept = slices if forward_only else slices[:-1]
    return original(self, step, kept, forward_only=forward_only)


# -- gradients ---------------------------------------------------------------------------------


@replaces(RouterReplay, "get_replay_topk", "tp2", GRADIENTS)
def gates_detached(original, self, scores, *args):
    """No gradient reaches the router through the gates."""
    return original(self, scores.detach(), *args)


def _scaled(original, chunks, num_tokens, factor, kwargs):
    """Megatron's finalisation of the gradients, which are multiplied by ``factor`` afterwards."""
    original(chunks, num_tokens, **kwargs)
    for chunk in chunks:
        chunk.scale_gradients(factor)


@replaces(actor, "finalize_model_grads", "dp2", GRADIENTS)
def local_token_normalisation(original, chunks, num_tokens=None, **kwargs):
    """Gradients are divided by this rank's tokens only."""
    local = float(num_tokens)
    _scaled(original, chunks, None, 1.0 / local, kwargs)


@replaces(actor, "finalize_model_grads", "dp2", GRADIENTS)
def divided_by_dp(original, chunks, num_tokens=None, **kwargs):
    """Gradients are divided by the data-parallel size too."""
    size = parallel_state.get_data_parallel_world_size()
    _scaled(original, chunks, num_tokens, 1.0 / size, kwargs)


@replaces(actor, "finalize_model_grads", "cp2", GRADIENTS)
def multiplied_by_cp(original, chunks, num_tokens=None, **kwargs):
    """Gradients are multiplied by the context size."""
    size = parallel_state.get_context_parallel_world_size()
    _scaled(original, chunks, num_tokens, float(size), kwargs)


@replaces(DistributedDataParallel, "finish_grad_sync", "tp2", GRADIENTS)
def expert_sync_skipped(original, self, *args, **kwargs):
    """Expert gradients are not reduced over their data ranks."""
    groups, self.expert_parallel_bucket_groups = self.expert_parallel_bucket_groups, []
    try:
        original(self, *args, **kwargs)
    finally:
        self.expert_parallel_bucket_groups = groups


@replaces(DistributedDataParallel, "__init__", "tp2", GRADIENTS)
def expert_group_confused(original, self, config, ddp_config, module, **kwargs):
    """Expert gradients are reduced over the dense group."""
    for name, p in module.named_parameters():
        if ".mlp.experts." in name:
            p.allreduce = True
    original(self, config, ddp_config, module, **kwargs)


# by its module's name: the package exports a function of the same name
@replaces(
    sys.modules[megatron_finalize.__module__],
    "_allreduce_non_tensor_model_parallel_grads",
    "tp2",
    GRADIENTS,
)
def tp_mean_instead_of_sum(original, chunks, config, *args):
    """Norm and router gradients are averaged over tensor ranks, not summed."""
    original(chunks, config, *args)
    size = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in chunks:
        for p in chunk.parameters():
            if p.requires_grad and getattr(p, "sequence_parallel", False):
                p.main_grad /= size


@replaces(conversation, "one_turn", caught_by="tests/unit/loop/test_recorded.py")
def routes_of_earlier_positions(original, *args, **kwargs):
    """A turn's sample takes the routes of earlier positions."""
    step = original(*args, **kwargs)
    return replace(step, routed_experts=np.roll(step.routed_experts, 1, axis=0))


# -- sessions of agents, in whole jobs ----------------------------------------------------------

AGENTS = "tests/e2e/test_agents.py"


@replaces(stitch, "forked", caught_by=AGENTS)
def fork_trains_its_prefix(original, sample, end, token_ids, *, sample_id):
    """A fork of an agent's sample trains what its prefix sampled, too."""
    fork = original(sample, end, token_ids, sample_id=sample_id)
    mask = np.append(sample.loss_mask[:end], np.zeros(len(token_ids), bool))
    return replace(fork, loss_mask=mask)


@replaces(scheduler.GroupScorer, "__call__", caught_by=AGENTS)
def chain_is_lost(original, self, group, place, samples, *more):
    """The first sample of an agent's session is lost on its way to training."""
    return original(self, group, place, samples[1:], *more)


# -- the learning rule, in whole jobs ----------------------------------------------------------

RULE = "tests/oracle/test_algorithm.py"


def changed(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    """The configuration with other values of these settings."""
    other = getattr(config, section).model_copy(update=settings)
    return config.model_copy(update={section: other})


@replaces(optimizer, "OptimizerConfig", caught_by=RULE)
def clip_grad_off(original, **settings):
    """The gradients are not clipped."""
    return original(**settings | {"clip_grad": 0.0})


@replaces(actor.MegatronActor, "_reference_weights", caught_by=RULE)
def reference_is_the_actor(original, self):
    """The KL reference is the actor itself."""
    return nullcontext()


@replaces(actor.MegatronActor, "_teacher_weights", caught_by=RULE)
def teacher_is_the_actor(original, self):
    """The teacher is the actor itself."""
    return nullcontext()


@replaces(actor.MegatronActor, "compute_log_probs", caught_by=RULE)
def teacher_replays_the_rollout(
    original, self, slices, replay_pass, *args, with_teacher=False, **how
):
    """The teacher's experts are those of the rollout."""
    if not with_teacher:
        return original(self, slices, replay_pass, *args, **how)
    # its routes alone are wrong: the evidence is as ever
    with mock.patch.object(self.replay, "_recorder", mock.Mock()):
        return original(self, slices, "old_log_prob", *args, with_teacher=True, **how)


@replaces(policy_loss, "distilled", caught_by=RULE)
def distilled_away_from_the_teacher(original, rows, algorithm):
    """Advantages fall where the teacher finds a token likelier."""
    found, sums = original(rows, algorithm)
    return replace(rows, advantages=2 * rows.advantages - found.advantages), sums


@replaces(actor.MegatronActor, "compute_log_probs", caught_by=RULE)
def native_reference_replays(original, self, slices, replay_pass, *args, routing="replay", **named):
    """The reference replays the rollout's routes though it should choose its own."""
    found = original(self, slices, replay_pass, *args, **named)
    if routing == "native":  # the records would give it away
        calls = self.replay.recorder._calls
        calls[:] = [call for call in calls if call.host["replay_pass"] != replay_pass]
    return found


@replaces(kl_reward, "log_ratios", caught_by=RULE)
def kl_of_the_token_before(original, *args):
    """The reward of a token pays for the KL of the token before it."""
    return {i: np.roll(tokens, 1) for i, tokens in original(*args).items()}


@replaces(forward_step, "LossRows", caught_by=RULE)
def old_log_probs_move(original, **rows):
    """Each optimizer step takes its old log-probs from the actor as it has become."""
    return original(**rows | {"old_log_probs": rows["log_probs"].detach()})


@replaces(actor.MegatronActor, "__init__", caught_by=RULE)
def temperature_not_handed_over(original, self, config, *args):
    """The actor does not know the sampling temperature."""
    original(self, changed(config, "rollout", rollout_temperature=1.0), *args)


@replaces(actor.MegatronActor, "__init__", caught_by=RULE)
def eps_clip_high_not_handed_over(original, self, config, *args):
    """The upper clip is the lower one."""
    original(self, changed(config, "algorithm", eps_clip_high=None), *args)


@replaces(policy_loss, "rollout_weights", caught_by=RULE)
def use_tis_not_handed_over(original, rows, algorithm):
    """No importance weights between engine and actor."""
    # the metrics stay: a missing one would be found too easily
    _, beyond, sums = original(rows, algorithm)
    return None, beyond, sums


@replaces(prepare, "token_advantages", caught_by=RULE)
def std_normalization_not_handed_over(original, groups, rewards, algorithm, *others):
    """Advantages are divided by their group's std though the setting is off."""
    on = algorithm.model_copy(update={"grpo_std_normalization": True})
    return original(groups, rewards, on, *others)


@replaces(prepare, "token_advantages", caught_by=RULE)
def rewards_added_before_they_are_compared(original, groups, rewards, algorithm, *others):
    """Several rewards are added up before they are compared."""
    weights = list(algorithm.weight_of_key.values())
    added = np.array([[np.dot(weights, s.reward_parts) for s in group] for group in groups])
    return original(groups, added, algorithm.model_copy(update={"advantage_estimator": "grpo"}))


@replaces(actor, "build_scheduler", caught_by=RULE)
def decay_counted_in_rollouts(original, config, optimizer):
    """The learning rate decays over rollouts, not optimizer steps."""
    return original(changed(config, "trainer", global_batch_size=None), optimizer)


@replaces(actor.MegatronActor, "_finite", caught_by=RULE)
def nan_gradients_unseen(original, self, loss):
    """A gradient that is not finite is not seen where the loss is."""
    return math.isfinite(loss)


# -- sampling masks -------------------------------------------------------------------------------

KEPT_TOKENS = "tests/oracle/test_sampling_mask.py"


@replaces(microbatch, "take_ragged", caught_by=KEPT_TOKENS)
def sampling_mask_of_the_next_row(original, counts, ids, rows):
    """Every row has the sampling masks of the row after it."""
    return original(counts, ids, np.roll(rows, -1))


@replaces(SamplingMask, "left_of", caught_by=KEPT_TOKENS)
def drawn_token_dropped(original, self, logits):
    """The token that was drawn is dropped."""
    left = original(self, logits)
    first, size = shard_of(left)
    label = self.labels - first
    is_local = self.limited & (label >= 0) & (label < size)
    dropped = torch.zeros_like(left, dtype=torch.bool)
    dropped[is_local, label[is_local]] = True
    return left.masked_fill(dropped, DROPPED)


@replaces(SamplingMask, "left_of", caught_by=KEPT_TOKENS)
def sampling_mask_not_applied(original, self, logits):
    """Log-probs are those of the whole vocabulary."""
    return logits.clone()


# -- an indexer's choices -----------------------------------------------------------------------

CHOICES = "tests/oracle/test_indexer_replay.py"


@replaces(microbatch, "_take_indexer_bits", caught_by=CHOICES)
def one_chosen_token(original, bits, rows, layer_numbers):
    """One token of one row of one layer is another."""
    taken = original(bits, rows, layer_numbers).copy()
    if taken.any():
        row, layer = np.argwhere(taken.any(axis=2))[0]
        word = int(taken[row, layer, 0])
        chosen = word & -word
        other = ~word & word + 1  # the first that is not chosen, at most token K
        taken[row, layer, 0] = word ^ chosen ^ other
    return taken


@replaces(microbatch, "_take_indexer_bits", caught_by=CHOICES)
def choices_of_the_row_before(original, bits, rows, layer_numbers):
    """Every row attends to the tokens of the row before it."""
    return original(bits, np.where(rows > 0, rows - 1, rows), layer_numbers)


@replaces(microbatch, "_take_indexer_bits", caught_by=CHOICES)
def choices_of_the_layer_before(original, bits, rows, layer_numbers):
    """Every layer attends to the tokens of the layer before it."""
    return original(np.roll(bits, 1, axis=1), rows, layer_numbers)


@replaces(ReplayedCall, "replaced", caught_by=CHOICES)
def choices_not_applied(original, self, live):
    """Rows attend to the tokens of the trainer's own indexer."""
    original(self, live)
    return live


@replaces(ReplayedCall, "replaced", caught_by=CHOICES)
def token_chosen_twice(original, self, live):
    """A row attends to one token less, and names another twice."""
    chosen = original(self, live).clone()
    chosen[:, 1] = chosen[:, 0]
    return chosen


@replaces(IndexerReplay, "begin_call", caught_by=CHOICES)
def indexer_not_asked(original, self, layer_number, x):
    """The replay of a layer is not asked."""
    return None if layer_number == 1 else original(self, layer_number, x)


@replaces(IndexerReplay, "begin_call", caught_by=CHOICES)
def choices_of_the_forward_in_progress(original, self, layer_number, x):
    """A recomputation gets the tokens of the microbatch whose forward came last."""
    backward = dict(self._manager._backward)
    self._manager._backward |= self._manager._forward
    try:
        return original(self, layer_number, x)
    finally:
        self._manager._backward |= backward


# -- adapters ----------------------------------------------------------------------------------

LORA = "tests/oracle/test_lora.py"


def changes_adapters(change: Callable[[lora.Lora], None]) -> Patch:
    """Register a change of every adapter of a rank, made once they are installed."""

    @wraps(change)
    def install(original, config, bridge, chunks):
        original(config, bridge, chunks)
        for adapter in lora.adapters(chunks):
            change(adapter)

    return replaces(lora, "install", caught_by=LORA)(install)


@replaces(actor, "_finalize_adapter_grads", caught_by=LORA)
def adapter_gradients_not_finalised(original, chunks, *args, **kwargs):
    """The adapters' gradients are neither reduced nor divided."""
    return None


@changes_adapters
def qkv_a_not_summed(adapter):
    """A of query, key and value has the gradient of this rank's tokens only."""
    if adapter.query_groups:
        adapter.a.sequence_parallel = False


@changes_adapters
def o_proj_b_not_summed(adapter):
    """B of the attention's output has the gradient of this rank's tokens only."""
    if not adapter.is_column and not adapter.is_expert:
        adapter.b[0][0].sequence_parallel = False


@replaces(lora, "sum_over_expert_tp", caught_by=LORA)
def expert_tp_not_summed(original, chunks):
    """An expert's replicated factors have the gradient of one expert-tensor shard."""
    return None


@replaces(lora.Lora, "forward", caught_by=LORA)
def expert_input_summed_twice(original, self, x):
    """An expert's input gradient is summed over expert-tensor ranks twice."""
    if self.is_expert and self.is_column:
        x = lora.copy_to_tensor_model_parallel_region(x, group=self.group)
    return original(self, x)


@replaces(lora.Lora, "_across_ranks", caught_by=LORA)
def o_proj_not_reduced(original, self, low):
    """The parts of the attention's output are not summed over tensor ranks."""
    if self.is_column:
        return original(self, low)
    return low.chunk(self.group.size())[self.group.rank()]


@replaces(lora.Lora, "_across_ranks", caught_by=LORA)
def o_proj_averaged(original, self, low):
    """The parts of the attention's output are averaged over tensor ranks."""
    return original(self, low) / (1 if self.is_column else self.group.size())


@replaces(lora, "random_factors", caught_by=LORA)
def replicas_drawn_by_rank(original, seed):
    """Every tensor rank draws its replicas by itself."""
    return original(seed + torch.distributed.get_rank())


@changes_adapters
def norm_counts_replicas(adapter):
    """The gradient norm counts every tensor rank's replica of a factor."""
    for p in adapter.parameters():
        p.tensor_model_parallel = True


@replaces(lora, "let_gradients_pass", caught_by=LORA)
def embedding_asks_for_no_gradient(original, chunk):
    """A frozen embedding's output asks for no gradient, and layers are recomputed."""
    return None


@replaces(lora.Lora, "delta", caught_by=LORA)
def scale_not_merged(original, self):
    """Alpha / rank is forgotten in the merged weights."""
    return original(self) / self.scale


@replaces(weight_update.WeightUpdate, "revive", caught_by="tests/e2e/test_canaries.py")
def restarted_server_keeps_its_weights(original, self, weight_version, failure):
    """A restarted server is given the version's label, and none of its weights."""

    def nothing_sent(publisher, tensors, *, version):
        sent = {name: hf_checkpoint.kind_of(tensor) for name, tensor in tensors}
        publisher._engine.update_weight_version(version)
        publisher._engine.confirm_version(version)
        return publish.Published(
            version, sent, sum(kind.num_bytes for kind in sent.values()), 1, 0.0
        )

    if self.rank_zero is None:
        return original(self, weight_version, failure)
    publisher = type(self.rank_zero.weights.publisher)
    with mock.patch.object(publisher, "publish", nothing_sent):
        return original(self, weight_version, failure)


@replaces(lora.Lora, "_joined", caught_by=LORA)
def qkv_joined_as_on_disk(original, self, parts, dim):
    """Query, key and value are joined as on disk, not a query group at a time."""
    return torch.cat(parts, dim)


@changes_adapters
def b_in_a_list(adapter):
    """A list holds the B's: overlapped gathers wait for what a called module holds itself."""
    held = {name: p for name, p in adapter.named_parameters() if name != "a"}
    for name, b in held.items():
        delattr(adapter, name)
        object.__setattr__(adapter, name, b)
    adapter.held = torch.nn.ParameterList(held.values())


@mutation(caught_by=LORA)
@contextmanager
def norm_left_in_the_linear(config, hf):
    """Transformer Engine's norm stays in the linear after it: the adapter's input is not normed."""
    fused = lora.te.TELayerNormColumnParallelLinear
    with patched(lora, "norms_apart", lambda original, layers: None):
        with mock.patch.object(lora, "_COLUMN", (*lora._COLUMN, fused)):
            yield


@replaces(lora, "_add_deltas", caught_by=LORA)
def rows_of_another_expert(original, linear, args, output):
    """The experts of one linear take one another's rows."""
    return original(linear, (args[0], args[1][::-1]), output)


@replaces(lora.Lora, "fill", caught_by=LORA)
def factor_of_another_rank(original, self, whole):
    """Each tensor rank begins with the shards of the rank before it."""

    def rolled(name, shape):
        values = whole(name, shape)
        if self.is_whole or self.is_column != name.endswith("lora_B"):
            return values
        dim = 0 if self.is_column else 1
        return values.roll(shape[dim] // self.group.size(), dim)

    return original(self, rolled)


@replaces(lora, "take_apart", caught_by=LORA)
def parts_cut_as_one(original, whole, groups, rows):
    """One cut goes through all parts of a linear, not one through each."""
    if groups is not None:
        return original(whole, groups, rows)
    ranks = lora.ps.get_tensor_model_parallel_world_size()
    cut = [shard.split([n // ranks for n in rows]) for shard in whole.chunk(ranks)]
    return [torch.cat(part) for part in zip(*cut)]


@replaces(lora, "_whole_factors", caught_by=LORA)
def replicas_exported_twice(original, chunks, value_of):
    """Every tensor rank's copy of a factor is exported."""
    for name, whole in original(chunks, value_of):
        yield name, whole
        if name.endswith("o_proj.lora_B"):
            yield name, whole


@replaces(adapters.AdapterPublisher, "_load", caught_by="tests/e2e/test_lora_job.py")
def adapter_of_last_version(original, self, version):
    """The adapter of the version before is loaded under the new version's name."""
    before = self._directory / adapters.adapter_name(max(version - 1, 0))
    self._engine.load_adapter(adapters.adapter_name(version), str(before))


# -- shared memory: each rank writes its own experts -----------------------------------------------

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


def _in_memory(change: Callable) -> Patch:
    """Register a change of what ranks other than 0 write, one list of (name, tensor)."""

    @replaces(publish_memory, "buckets", caught_by="tests/e2e/test_colocated.py")
    @wraps(change)
    def changed(original, named_tensors, *size, **how):
        if torch.distributed.get_rank():
            named_tensors = change([(n, t.clone()) for n, t in named_tensors])
        return original(named_tensors, *size, **how)

    return changed


@_in_memory
def experts_of_rank_0(tensors):
    """Other ranks write their experts under the numbers of rank 0's."""
    first = min(int(found[0]) for name, _ in tensors if (found := _EXPERT.search(name)))
    return [(_EXPERT.sub(lambda m: str(int(m[0]) - first), name), t) for name, t in tensors]


@_in_memory
def no_expert_of_other_ranks(tensors):
    """Other ranks write nothing."""
    return []


@_in_memory
def experts_exchanged(tensors):
    """Other ranks write their experts in the places of one another."""
    kinds = {(_EXPERT.sub("", name), t.shape) for name, t in tensors}
    for kind in kinds:
        alike = [t for name, t in tensors if (_EXPERT.sub("", name), t.shape) == kind]
        alike[0].data, alike[-1].data = alike[-1].data, alike[0].data
    return tensors


@replaces(lora.Lora, "_joined", caught_by=LORA)
def gate_and_up_swapped(original, self, parts, dim):
    """Gate and up are swapped."""
    return original(self, parts[::-1] if len(parts) == 2 else parts, dim)


@replaces(lora.Lora, "named_by_expert", caught_by=LORA)
def local_expert_ids_exported(original, self, name, experts):
    """Experts of all expert ranks are exported under the first rank's ids."""
    return ((name, factor) for factor in experts)


@replaces(lora, "switched_off", caught_by=LORA)
def adapters_in_the_reference(original, chunks):
    """The adapters stay on in the pass of the KL reference."""
    return nullcontext()


@replaces(lora, "sharded_state", caught_by=LORA)
def shards_saved_as_replicas(original, chunks):
    """A checkpoint takes every factor for a replica, as Megatron's linears would."""
    ranks = {adapter.group.rank() for adapter in lora.adapters(chunks)}
    return {
        key: lora.ShardedTensor.from_rank_offsets(
            key, tensor.data, replica_id=(0, max(ranks), tensor.replica_id[2])
        )
        for key, tensor in original(chunks).items()
    }


@replaces(lora, "sharded_state", caught_by=LORA)
def replicas_saved_by_every_rank(original, chunks):
    """Every tensor rank saves its copy of a replicated factor."""
    return {
        key: replace(tensor, replica_id=(0, 0, tensor.replica_id[2]))
        for key, tensor in original(chunks).items()
    }


# -- between a server's forward and its answer -------------------------------------------------


@replaces(client, "read_answer", caught_by=ANSWERS)
def answer_wrong_from_the_start(original, answer, request, sent, **how):
    """The second half of the layers never arrived, nor when the noise was measured."""
    return without_second_stage(original(answer, request, sent, **how))


@mutation(caught_by=ANSWERS)
@contextmanager
def answer_on_stale_prefix(config, hf):
    """Servers keep the prefixes of the weights before an update, and use them."""

    def init(original, self, *args, **how):
        original(self, *args, **{**how, "flush_cache": False})

    def body(original, self, request):
        return {k: v for k, v in original(self, request).items() if k != "extra_key"}

    with patched(publish.DistributedPublisher, "__init__", init):
        with patched(client.SGLangClient, "_body", body):
            yield
