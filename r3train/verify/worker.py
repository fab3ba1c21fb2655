"""One rank of a verification: runs jobs one after another and writes down what happened.

Started by ``runner`` under torchrun as ``python -m r3train.verify.worker JOBS.json``.  All jobs of a
file share a world size; the processes, with their slow imports, are started once.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r3train.trainer.megatron.cpu_device import prepare_device

warnings.filterwarnings("ignore")
DEVICE = prepare_device()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from r3train.config.hf_facts import read_hf_facts  # noqa: E402
from r3train.config.model import ModelSection  # noqa: E402
from r3train.config.trainer import TrainerSection  # noqa: E402
from r3train.routing.layers import recomputed_moe_layers  # noqa: E402
from r3train.layout import microbatch as microbatches  # noqa: E402
from r3train.layout.bins import deal_bins, pack_bins  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.export import export_hf_weights  # noqa: E402
from r3train.trainer.megatron.forward_step import LossSettings  # noqa: E402
from r3train.trainer.megatron.topology import (  # noqa: E402
    init_distributed,
    init_model_parallel,
    shutdown,
)
from r3train.types import RankSlice, RankTopology  # noqa: E402
from r3train.verify.job_evidence import write_evidence  # noqa: E402
from r3train.verify.jobs import Job  # noqa: E402
from r3train.verify.model_zoo import VARIANTS  # noqa: E402
from r3train.verify.mutations import MUTATIONS, Scene  # noqa: E402
from r3train.verify.oracle import BIAS, LossNumbers  # noqa: E402
from r3train.verify.probes import Probe, whole_gradients  # noqa: E402
from r3train.verify.rollouts import RolloutBatch, train_samples  # noqa: E402
from r3train.verify.settings import ADAM, SGD  # noqa: E402
from r3train.verify.topologies import TOPOLOGIES  # noqa: E402


class JobRun:
    """A job in progress on this rank."""

    def __init__(self, job: Job):
        self.job = job
        self.topology = TOPOLOGIES[job.topology]
        self.variant = VARIANTS[self.topology.variant]
        self.batch = RolloutBatch.load(Path(job.rollouts))
        self.output = Path(job.output)
        self.hf = read_hf_facts(job.checkpoint)
        self.loss = LossNumbers()
        self.mutation = MUTATIONS[job.mutation] if job.mutation else None

    def run(self) -> None:
        scene = Scene(self.topology, self.variant, self.batch)
        with self.mutation.plant(scene) if self.mutation else nullcontext():
            place = init_model_parallel(self.topology.parallel_section(), seed=1)
            adam = self._train(place, ADAM, "adam", record=True)
            if self.job.last_phase >= 4:
                self._train(place, SGD, "sgd", record=False)
        if place.rank == 0:
            (self.output / "adam.json").write_text(json.dumps(adam))

    def _actor(self, place: RankTopology, trainer: TrainerSection) -> MegatronActor:
        loss = self.loss
        return MegatronActor(
            topology=place,
            device=DEVICE,
            hf=self.hf,
            model=self._model(),
            parallel=self.topology.parallel_section(),
            trainer=trainer,
            loss=LossSettings(
                temperature=loss.temperature,
                eps_clip=loss.eps_clip,
                eps_clip_high=loss.eps_clip_high,
                kl_loss_coef=loss.kl_loss_coef,
                entropy_coef=loss.entropy_coef,
                use_tis=True,
                tis_clip=loss.tis_clip,
                tis_clip_low=loss.tis_clip_low,
            ),
            total_steps=10,
            use_routing_replay=True,
            enable_r3_correctness_check=True,
        )

    def _model(self) -> ModelSection:
        fields = dict(self.topology.model)
        overrides = self.variant.overrides | fields.pop("transformer_overrides", {})
        return ModelSection(
            hf_checkpoint=self.job.checkpoint,
            bf16=self.job.bf16,
            transformer_overrides=overrides | (self.mutation.overrides if self.mutation else {}),
            **fields,
        )

    def _train(
        self, place: RankTopology, trainer: TrainerSection, name: str, record: bool
    ) -> list[dict]:
        """Old-log-prob pass and one or two optimizer steps; returns the metrics of each step."""
        actor = self._actor(place, trainer)
        place = actor.topology
        slices = self._slices(place)
        old, ref = (
            self._streams(slices, stream)
            for stream in (self.batch.old_log_probs, self.batch.ref_log_probs)
        )
        if record and self.mutation is None:
            self._save_weights(actor, "export")
        metrics = []
        if record:
            embeddings = load_file(Path(self.job.checkpoint) / "model.safetensors")[
                "model.embed_tokens.weight"
            ].to(DEVICE, torch.bfloat16 if self.job.bf16 else torch.float32)
            probe = Probe(actor, embeddings)
            with probe.watch():
                if self.mutation is not None and self.mutation.decoy_pass:
                    probe.begin(None)
                    actor.compute_log_probs(self._decoys(place), "old_log_prob")
                    actor.collect_evidence(0)  # of no run's step
                probe.begin("old_log_prob")
                log_probs = actor.compute_log_probs(slices, "old_log_prob")
                probe.begin("train")
                self._save_gradients_before_step(actor)
                metrics.append(actor.train_step(slices, old, ref))
                probe.begin(None)
            self._save_rank(actor, slices, log_probs, probe)
        else:
            metrics.append(actor.train_step(slices, old, ref))
        if self.job.last_phase >= 4:
            self._save_weights(actor, f"{name}1")
            metrics.append(actor.train_step(slices, old, ref))
            self._save_weights(actor, f"{name}2")
        _drop_gradient_hooks(actor)
        return metrics

    def _slices(self, place: RankTopology) -> list[RankSlice]:
        """This rank's microbatches, by the production layout."""
        samples = train_samples(self.batch, self.variant)
        if self.job.order_seed is not None:
            order = torch.randperm(
                len(samples), generator=torch.Generator().manual_seed(self.job.order_seed)
            )
            samples = [samples[i] for i in order.tolist()]
        lengths = [s.sample.num_tokens for s in samples]
        interleaved = place.pp_size if place.vpp_size > 1 else 1
        bins = pack_bins(
            lengths,
            self.batch.token_budget * place.cp_size,
            num_bins_multiple=place.dp_size * interleaved,
        )
        if self.job.order_seed is not None:
            bins = bins[::-1]
        dealt = deal_bins(bins, lengths, place.dp_size)
        self.dealt = samples, {
            samples[i].sample.sample_id: data_rank
            for data_rank, groups in enumerate(dealt)
            for members in groups
            for i in members
        }
        mine = dealt[place.dp_rank]
        return [
            microbatches.slice_microbatch(
                microbatches.build_microbatch(
                    i,
                    [samples[j] for j in members],
                    cp_size=place.cp_size,
                    tp_size=place.tp_size if place.sequence_parallel else 1,
                    route_shape=self.variant.route_shape,
                ),
                place,
            )
            for i, members in enumerate(mine)
        ]

    def _decoys(self, place: RankTopology) -> list[RankSlice]:
        """The same microbatches with the routes of another rollout."""
        batch, dealt, rotated = (
            self.batch,
            self.dealt,
            (self.batch.routes + 1) % self.variant.num_experts,
        )
        self.batch = RolloutBatch(**{**vars(batch), "routes": rotated})
        slices = self._slices(place)
        self.batch, self.dealt = batch, dealt
        return slices

    def _streams(self, slices: list[RankSlice], stream: Any) -> dict[int, torch.Tensor]:
        """A flat per-token stream as {microbatch_id: float32[n]}, laid out as the slices are."""
        values = torch.from_numpy(stream)
        rows = torch.from_numpy(self.batch.row_of_token)
        out = {}
        for s in slices:
            row = rows[torch.from_numpy(s.tokens)]
            out[s.microbatch_id] = torch.where(row >= 0, values[row.clamp_min(0)], 0.0).to(DEVICE)
        return out

    # -- written down --------------------------------------------------------------------------

    def _save_gradients_before_step(self, actor: MegatronActor) -> None:
        """Save the reduced main gradients when the optimizer is first asked to step."""
        step = actor.optimizer.step

        def save_and_step() -> Any:
            actor.optimizer.step = step
            whole_gradients(actor)
            self._save_weights(actor, "grads", lambda p: getattr(p, "main_grad", p))
            return step()

        actor.optimizer.step = save_and_step

    def _save_weights(self, actor: MegatronActor, name: str, value_of: Any = None) -> None:
        if value_of is None:
            whole = actor.hf_weights()
        else:
            whole = export_hf_weights(actor.model.bridge, actor.model.chunks, value_of)
        tensors = {n: t.detach().cpu().clone().contiguous() for n, t in whole}
        if dist.get_rank() == 0:
            if name == "grads":
                tensors = {n: t for n, t in tensors.items() if not n.endswith(BIAS)}
            save_file(tensors, self.output / f"{name}.safetensors")

    def _save_rank(
        self, actor: MegatronActor, slices: list[RankSlice], log_probs: dict, probe: Probe
    ) -> None:
        place = actor.topology
        recording = asdict(probe.recording)
        recording["place"] = asdict(place)
        recording["route_bytes"] = sum(s.routes.nbytes for s in slices)
        recording["log_probs"] = [
            dict(
                tokens=torch.from_numpy(s.tokens),
                log_probs=log_probs[s.microbatch_id].float().cpu(),
            )
            for s in slices
            if s.microbatch_id in log_probs
        ]
        records = actor.collect_evidence(0)
        # a planted bug is to be caught by its phase, and by its evidence apart from that
        recording["evidence_problems"] = self.mutation is None and sum(
            e.duplicate_rows
            + e.rows_native
            + e.rows_recompute_differ
            + abs(e.map_sum - e.num_rows * e.topk)
            for e in records
        )
        samples, data_rank_of = self.dealt
        write_evidence(
            self.output,
            records,
            samples,
            data_rank_of,
            num_microbatches=len(slices),
            place=place,
            hf=self.hf,
            recomputed=recomputed_moe_layers(
                self.topology.parallel_section(), self._model(), self.hf
            ),
        )
        torch.save(recording, self.output / f"rank{place.rank:03d}.pt")


def run_jobs(jobs: list[Job]) -> None:
    """Run the jobs in order; the status of each is written by rank 0 once all ranks are through."""
    init_distributed("auto", timeout_minutes=2)
    for job in jobs:
        started = time.monotonic()
        error = ""
        try:
            JobRun(job).run()
        except Exception as e:  # noqa: BLE001 - a mutation may raise anything; it is the verdict
            error = f"{type(e).__name__}: {e}"
            traceback.print_exc()
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if dist.get_rank() == 0:
            status = dict(error=next(filter(None, errors), ""), seconds=time.monotonic() - started)
            (Path(job.output) / "status.json").write_text(json.dumps(status))
        _leave_model_parallel()
    shutdown()


def _drop_gradient_hooks(actor: MegatronActor) -> None:
    """Take Megatron's hooks from the gradient accumulators, which keep the model alive through them.

    Accumulator and hook hold each other across the border to C++, where Python's collector does not
    look; a model that is kept keeps its process groups, and they their threads.
    """
    for chunk in actor.model.chunks:
        for accumulator in chunk.grad_accs:
            accumulator.register_hook(lambda *_: None).hooks_dict_ref().clear()
        chunk.grad_accs.clear()


def _leave_model_parallel() -> None:
    """Forget the topology and close its process groups; the world stays.

    Megatron forgets its groups without closing them, and every gloo group holds threads.  Joining
    the world anew is no way out: torchrun's store still holds the addresses of the first time.
    """
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_jobs([Job(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())])
