"""The Megatron actor of one rank: log-prob passes, optimizer steps, weights out.

It takes this rank's slices.  It gives log-probs, which stay on the rank that computed them, metrics
and replay evidence.  All ranks call every method together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.nn.utils import get_total_norm

from r3train.algo.losses.guarded import GuardedLoss
from r3train.algo.losses.policy_losses import configured_loss, is_users
from r3train.algo.policy_loss import metric_names
from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.trainer.megatron import hf_weights, lora
from r3train.trainer.megatron.auxiliary_losses import AuxiliaryLosses
from r3train.trainer.megatron.export import export_hf_weights, GatherTo
from r3train.trainer.megatron.forward_step import (
    DeviceSlice,
    make_log_prob_step,
    make_train_step,
    TrainingRule,
    reduce_metrics,
)
from r3train.trainer.megatron.model import build_model
from r3train.trainer.megatron.offload import DeviceMemory, on_host
from r3train.trainer.megatron.optimizer import build_optimizer, build_scheduler
from r3train.trainer.megatron.actor_routes import ActorRoutes
from r3train.trainer.megatron.replay import (
    decoder_indexers,
    decoder_routers,
    RoutingReplayManager,
)
from r3train.trainer.megatron.route_drift import RouteDrift
from r3train.trainer.megatron.topology import with_layers
from r3train.types import RankSlice, RankTopology, ReplayEvidence


class MegatronActor:
    """Model, optimizer and replay of one rank, with the weights of ``config.model.hf_checkpoint``.

    topology: this rank's place.  ``self.topology`` adds the layers that the built model holds.
    """

    def __init__(
        self, config: RunConfig, hf: HfModelFacts, topology: RankTopology, device: torch.device
    ):
        self.device = device
        self._algorithm = config.algorithm
        self.lora = config.lora
        self._temperature = config.rollout.rollout_temperature
        self._log_probs_chunk_size = config.trainer.log_probs_chunk_size
        # weights that draw tokens are this many rollouts old at most; sft draws none
        is_sft = config.algorithm.loss_type == "sft"
        num_ages = 1 if is_sft else config.rollout.max_weight_staleness + 1
        loss = configured_loss(config.algorithm)
        self._metric_names = metric_names(
            loss, config.algorithm, num_ages, config.replay.use_rollout_routing_replay
        )
        self._guarded_loss: GuardedLoss | None = None  # code of the user
        if is_users(config.algorithm):
            loss = self._guarded_loss = GuardedLoss(loss, config.algorithm, self._metric_names)
        self._rule = TrainingRule(
            loss, config.algorithm, self._temperature, self._log_probs_chunk_size, num_ages
        )
        self.maxima = self._metric_names[
            1
        ]  # names of step metrics that are reduced by max, not mean
        self.model = build_model(config, hf, device)
        self.optimizer = build_optimizer(config, self.model.chunks)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.memory = DeviceMemory(self.model.chunks, self.optimizer, device)
        self._wire_megatron(overlap_grad_reduce=config.parallel.overlap_grad_reduce)

        layers = tuple(
            tuple(r.layer_number for r in decoder_routers(c)) for c in self.model.unwrapped
        )
        indexers = tuple(
            tuple(a.layer_number for a in decoder_indexers(c)) for c in self.model.unwrapped
        )
        self.topology = with_layers(topology, layers, indexers)
        self.replay: RoutingReplayManager | ActorRoutes | None = None
        if config.replay.use_routing_replay:
            self.replay = ActorRoutes(device)
            self.replay.install(self.model.unwrapped)
        if config.replay.use_rollout_routing_replay:
            # without sequence parallelism all TP ranks route the same tokens: one counts
            counts_tokens = topology.sequence_parallel or topology.tp_rank == 0
            drift = None
            if config.replay.log_route_drift:
                drift = RouteDrift(
                    hf.moe_layer_numbers, hf.num_experts, device, counts_tokens=counts_tokens
                )
            self.replay = RoutingReplayManager(
                num_experts=hf.num_experts,
                topk=hf.num_experts_per_tok,
                device=device,
                rank=topology.rank,
                counts_tokens=counts_tokens,
                checks=config.r3_check_enabled,
                drift=drift,
            )
            self.replay.install(self.model.unwrapped)
        self._auxiliary_losses = AuxiliaryLosses(
            self.model.unwrapped,
            topology,
            device,
            without_padding=config.replay.use_rollout_routing_replay,
        )
        # weights on the host, of another model than the actor
        self._reference: dict[str, torch.Tensor] | None = None
        self._teacher: dict[str, torch.Tensor] | None = None
        self._reference_is_base = config.reference_is_base

    def _wire_megatron(self, *, overlap_grad_reduce: bool) -> None:
        """Give Megatron's schedules their callbacks, as Megatron's own training loop does."""
        config, chunks = self.model.config, self.model.chunks
        config.finalize_model_grads_func = (
            _finalize_adapter_grads if self.lora.enabled else finalize_model_grads
        )
        config.grad_scale_func = self.optimizer.scale_loss
        if overlap_grad_reduce:
            no_sync = [c.no_sync for c in chunks]
            config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        if chunks[0].ddp_config.overlap_param_gather:
            sync = [c.start_param_sync for c in chunks]
            config.param_sync_func = sync if len(chunks) > 1 else sync[0]

    # -- passes ------------------------------------------------------------------------------

    @torch.no_grad()
    def compute_log_probs(
        self,
        slices: Sequence[RankSlice],
        replay_pass: str | None,
        temperature: float | None = None,
        weight_version: int | None = None,
        *,
        with_teacher: bool = False,
        routing: Literal["replay", "native"] = "replay",
        loss_rows_only: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Compute log-probs of each microbatch's labels, {microbatch_id: float32[n]}.

        replay_pass: old_log_prob, ref_log_prob (with the reference's weights), or None: as with
        ``routing`` native routers choose for themselves, with the teacher's weights if ``with_teacher``.
        temperature: the rollout's unless given.  weight_version: the version that the weights of this
        pass have on the servers, for the evidence; None if they have none.
        The last pipeline stage gets one log-prob for each row of its slices, 0 for rows that ``loss_rows_only``
        leaves out: those that a train step leaves out too.  The other stages get an empty dict.
        """
        batches = {
            s.microbatch_id: DeviceSlice.from_slice(s, self.device, loss_rows_only=loss_rows_only)
            for s in slices
        }
        for chunk in self.model.chunks:
            chunk.eval()
        if temperature is None:
            temperature = self._temperature
        weights = self._reference_weights() if replay_pass == "ref_log_prob" else nullcontext()
        if with_teacher:
            weights = self._teacher_weights()
        if routing == "native":
            replay_pass = None
        # without a pass nothing is replayed, and nothing is evidence
        replay = self.replay if replay_pass else None
        step = make_log_prob_step(batches, replay, temperature, self._log_probs_chunk_size)
        counts_controls = replay_pass == "old_log_prob"
        with (
            weights,
            self._pass(replay_pass, slices, weight_version, counts_controls=counts_controls),
        ):
            results = self._run_schedule(step, slices, forward_only=True)
        return {i: log_probs for result in results for i, log_probs in result.items()}

    def train_step(
        self,
        slices: Sequence[RankSlice],
        old_log_probs: dict[int, torch.Tensor] | None,
        ref_log_probs: dict[int, torch.Tensor] | None,
        weight_version: int | None = None,
        *,
        teacher_log_probs: dict[int, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step over all microbatches of the global batch.

        old_log_probs: None if this is the rollout's only step: its own forward gives them.
        teacher_log_probs: of a teacher that the ranks hold.
        weight_version: the version that the actor's weights have before the step; None from the second
        step of a rollout on, because no server ever holds them.
        Returns the same metrics on all ranks: means over the global loss tokens, grad norm, and the
        learning rate of this step.  If a loss or a gradient is not finite, all ranks skip the step:
        weights, expert biases, moments and schedule do not change, and ``skipped_steps`` is 1.  So they
        do below ``min_ess``, and ``low_ess_steps`` is 1.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        # Megatron moves the expert biases at the end of the backward pass
        biases = [(bias, bias.clone()) for bias in self._expert_biases()]
        results = self.backward(
            slices,
            old_log_probs,
            ref_log_probs,
            weight_version,
            teacher_log_probs=teacher_log_probs,
        )
        metrics = reduce_metrics(results, self.topology, self._metric_names, self.device)
        finite = self._finite(metrics["loss"])
        enough = metrics["ess"] >= self._algorithm.min_ess
        success, grad_norm = False, math.nan
        if finite and enough:
            success, grad_norm, _ = self.optimizer.step()
            self.scheduler.step(increment=1)
        else:
            for bias, before in biases:
                bias.copy_(before)
        metrics["grad_norm"] = float(grad_norm) if grad_norm is not None else 0.0
        if success and self.lora.enabled:
            _check_adapters_learn(metrics)
        metrics["lr"] = lr
        metrics["update_successful"] = float(success)
        metrics["skipped_steps"] = float(not finite)
        metrics["low_ess_steps"] = float(finite and not enough)
        return metrics

    @property
    def loss_errors(self) -> list[str]:
        """Errors of a loss of the user's on this rank."""
        return self._guarded_loss.errors if self._guarded_loss is not None else []

    def _expert_biases(self) -> list[torch.Tensor]:
        """The routers' expert biases, float32 [E] each; none in a family without them."""
        routers = (r for chunk in self.model.unwrapped for r in decoder_routers(chunk))
        return [r.expert_bias for r in routers if r.expert_bias is not None]

    def _finite(self, loss: float) -> bool:
        """Return True if the loss and every gradient on every rank are finite; a collective.

        False too where a loss of the user's failed, on rows of padding only for instance.
        """
        finite = torch.tensor(math.isfinite(loss) and not self.loss_errors, device=self.device)
        for chunk in self.model.chunks:
            grads = [p.main_grad for p in chunk.parameters() if p.requires_grad]
            finite &= torch.isfinite(get_total_norm(grads, norm_type=math.inf))
        flag = finite.to(torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    def backward(
        self,
        slices: Sequence[RankSlice],
        old_log_probs: dict[int, torch.Tensor] | None,
        ref_log_probs: dict[int, torch.Tensor] | None,
        weight_version: int | None = None,
        *,
        teacher_log_probs: dict[int, torch.Tensor] | None = None,
    ) -> list[dict]:
        """Run forward and backward over the global batch; returns the loss reports.

        The gradients are left in the buffers, reduced over ranks and divided by the global number of
        loss tokens.
        """
        batches = {s.microbatch_id: DeviceSlice.from_slice(s, self.device) for s in slices}
        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._auxiliary_losses.begin_step(slices)
        step = make_train_step(
            batches,
            self.replay,
            self._rule,
            old_log_probs,
            ref_log_probs,
            teacher_log_probs,
        )
        with self._pass("train", slices, weight_version, counts_controls=old_log_probs is None):
            return self._run_schedule(step, slices, forward_only=False)

    def _run_schedule(self, step, slices: Sequence[RankSlice], *, forward_only: bool) -> list[dict]:
        """Run Megatron's schedule over the microbatches; the last stage gets the results."""
        chunks = self.model.chunks
        order = [s.microbatch_id for s in slices]
        iterators = [iter(order) for _ in chunks]
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(order),
            # the schedules require it, and ignore it under variable_seq_lengths
            seq_length=max(s.num_rows for s in slices),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @contextmanager
    def _pass(
        self,
        replay_pass: str | None,
        slices: Sequence[RankSlice],
        weight_version: int | None = None,
        *,
        counts_controls: bool = False,
    ) -> Iterator[None]:
        """Stage routes for exactly one pass; after an exception none are left.

        counts_controls: as for ``RoutingReplayManager.begin_pass``.
        """
        if self.replay is None or replay_pass is None:
            yield
            return
        self.replay.begin_pass(replay_pass, slices, weight_version, counts_controls=counts_controls)
        try:
            yield
        except BaseException:
            self.replay.reset()
            raise
        self.replay.end_pass()

    def check_replay(self, on: bool) -> None:
        """Turn the recording of router calls in the passes that follow on or off; no-op with the check off."""
        if self.replay is not None:
            self.replay.records = on

    def collect_evidence(self, step: int) -> list[ReplayEvidence]:
        """Return the records of router calls since the last collection; none with the check off."""
        return [] if self.replay is None else self.replay.collect(step)

    def collect_drift(self) -> dict[str, float]:
        """Return the metrics of the router's drift in the rollout's first forwards; a collective.

        Empty without --log-route-drift.
        """
        if self.replay is None or self.replay.drift is None:
            return {}
        return self.replay.drift.collect()

    # -- weights -----------------------------------------------------------------------------

    def hf_weights(
        self,
        *,
        targets_alone: bool = False,
        layers: range | None = None,
        gather_to: GatherTo = "rank_0",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors under Hugging Face names on rank 0; every rank must drain it.

        With LoRA the adapters are merged; targets_alone leaves out the tensors that have none.
        layers: of these layer ids only; what is in no layer comes with layer 0.  gather_to: as for ``export_hf_weights``.
        """
        self.gather_parameters()
        chunks = self.model.chunks
        merged, is_adapted = lora.merged_weights(chunks)

        def is_wanted(one: hf_weights.ChunkWeight) -> bool:
            is_of_layers = layers is None or (one.hf.layer_id or 0) in layers
            return is_of_layers and (not targets_alone or is_adapted(one.tensor))

        return export_hf_weights(self.model.weights, chunks, merged, is_wanted, gather_to=gather_to)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole factors by name on rank 0; every rank must drain it."""
        self.gather_parameters()
        return lora.export_adapters(self.model.chunks)

    def parameters_unlike(self, checkpoint: Path) -> list[str]:
        """Names of this rank's parameters that are not those of an HF checkpoint; a collective.

        With LoRA those of the base count with their adapters merged.
        """
        self.gather_parameters()
        merged, _ = lora.merged_weights(self.model.chunks)
        return hf_weights.parameters_unlike(
            self.model.weights, self.model.chunks, checkpoint, merged
        )

    def gather_parameters(self) -> None:
        """Gather every rank's parameters, before anything but a forward reads them.

        With overlap_param_gather a step updates only this rank's shard.  The next forward would gather
        the rest.
        """
        for chunk in self.model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def load_reference(self, checkpoint: Path) -> None:
        """Keep a copy of the KL reference's weights on the host; the actor's do not change."""
        self._reference = self._load_weights(checkpoint)

    def load_teacher(self, checkpoint: Path) -> None:
        """Keep a copy of the teacher's weights on the host; the actor's do not change."""
        self._teacher = self._load_weights(checkpoint)

    @torch.no_grad()
    def _load_weights(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        actor = self._copy_weights()
        hf_weights.load_hf_weights(self.model.weights, self.model.chunks, checkpoint)
        found = self._copy_weights()
        self._write_weights(actor)
        return found

    def _reference_weights(self) -> AbstractContextManager[None]:
        if self._reference_is_base:
            return lora.switched_off(self.model.chunks)
        assert self._reference is not None, "load_reference first"
        return self._in_place_of_the_actor(self._reference)

    def _teacher_weights(self) -> AbstractContextManager[None]:
        assert self._teacher is not None, "load_teacher first"
        return self._in_place_of_the_actor(self._teacher)

    @contextmanager
    def _in_place_of_the_actor(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        actor = self._copy_weights()
        self._write_weights(weights)
        try:
            with lora.switched_off(self.model.chunks):
                yield
        finally:
            self._write_weights(actor)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and the routers' expert biases: all that a checkpoint holds."""
        for i, chunk in enumerate(self.model.unwrapped):
            yield from ((f"{i}.{name}", p.data) for name, p in chunk.named_parameters())
        yield from ((f"expert_bias.{i}", bias) for i, bias in enumerate(self._expert_biases()))

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        self.gather_parameters()
        return {name: on_host(tensor) for name, tensor in self._weights()}

    def _write_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._weights():
            tensor.copy_(weights[name])


def _finalize_adapter_grads(chunks: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
    """Reduce and divide the gradients as Megatron does, then sum what it leaves in parts."""
    finalize_model_grads(chunks, *args, **kwargs)
    lora.sum_over_expert_tp(chunks)


def _check_adapters_learn(metrics: dict[str, float]) -> None:
    """Raise AssertionError where a loss reaches no adapter.

    Behind a frozen base a lost gradient is exactly 0 and no error.  Where a loss clips tokens 0 may be
    right: all others may be of groups without an advantage.
    """
    if metrics["grad_norm"] == 0.0 and metrics["loss"] != 0.0 and not metrics.get("clipped"):
        raise AssertionError(
            f"the loss is {metrics['loss']:g} and the gradient norm of the adapters exactly 0: no"
            " gradient reached them"
        )
