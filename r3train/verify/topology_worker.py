"""One rank of a verification: it runs cases one after another and writes down what happened.

``runner`` starts it under torchrun as ``python -m r3train.verify.topology_worker CASES.json``.  All cases of a
file share a world size, so the processes, with their slow imports, are started once.  A case goes
the way of a training job: ``build_actor``, ``prepare`` on rank 0, ``RoutesOnRank0``, the passes of the
actor, ``judge``.  The batch's log-probs alone are given, for both oracles to start from the same ones.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # while all is imported

from r3train.cpu.device import prepare_device  # noqa: E402

warnings.filterwarnings("ignore")
DEVICE = prepare_device()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from r3train.config import RunConfig  # noqa: E402
from r3train.config.data_settings import DataSection  # noqa: E402
from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.config.model_settings import ModelSection  # noqa: E402
from r3train.config.replay_settings import ReplaySection  # noqa: E402
from r3train.config.rollout_settings import RolloutSection  # noqa: E402
from r3train.config.trainer_settings import TrainerSection  # noqa: E402
from r3train.host_group import host_group  # noqa: E402
from r3train.launch.start.build_actor import build_actor  # noqa: E402
from r3train.launch.job.checked_job import Job  # noqa: E402
from r3train.launch.job.resume import ResumePoint  # noqa: E402
from r3train.loop.prepare import Plant, Preparation  # noqa: E402
from r3train.loop.route_transport import RoutesOnRank0  # noqa: E402
from r3train.loop.distribute import broadcast_json, gather_json, gather_topologies  # noqa: E402
from r3train.proof.step_verdict import StepExpectation  # noqa: E402
from r3train.proof.live import LiveProof  # noqa: E402
from r3train.proof.writer import EvidenceWriter  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.export import export_hf_weights  # noqa: E402
from r3train.trainer.megatron.topology import init_distributed, shutdown  # noqa: E402
from r3train.types import RankSlice, ROUTES  # noqa: E402
from r3train.verify.model_zoo import VARIANTS  # noqa: E402
from r3train.verify.mutations import planted_at  # noqa: E402
from r3train.verify.oracle import ADAM, ALGORITHM, BIAS, SGD, TEMPERATURE  # noqa: E402
from r3train.verify.rollouts import RolloutBatch, train_samples  # noqa: E402
from r3train.verify.runner import EVIDENCE_RUN, Case  # noqa: E402
from r3train.verify.topologies import TOPOLOGIES  # noqa: E402
from r3train.verify.watch import Watch, whole_gradients  # noqa: E402

PASSES = ("old_log_prob", "train")


class CaseRun:
    """A case in progress on this rank."""

    def __init__(self, case: Case):
        self.case = case
        self.topology = TOPOLOGIES[case.topology]
        self.variant = VARIANTS[self.topology.variant]
        self.batch = RolloutBatch.load(Path(case.rollouts))
        self.output = Path(case.output)
        self.hf = read_hf_facts(case.checkpoint)
        self.mutation = planted_at(case.mutation) if case.mutation else None
        self.plant: Plant | None = None

    def run(self) -> None:
        """Train with AdamW, watched, then with SGD; the last phase says how far."""
        config = self._job(ADAM).config
        with self.mutation.planted(config, self.hf) if self.mutation else nullcontext() as plant:
            self.plant = plant
            metrics = self._train(ADAM, "adam")
            if self.case.last_phase >= 4:
                leave_model_parallel()
                self._train(SGD, "sgd")
        if dist.get_rank() == 0:
            (self.output / "adam.json").write_bytes(json.dumps(metrics).encode())

    def _job(self, trainer: TrainerSection) -> Job:
        """The training job whose parts the case runs; it has no prompts and no servers."""
        model = dict(self.topology.model)
        overrides = self.variant.overrides | (self.mutation.overrides if self.mutation else {})
        config = RunConfig(
            model=ModelSection(
                hf_checkpoint=self.case.checkpoint,
                attention_backend=self.case.attention_backend,
                bf16=self.case.bf16,
                transformer_overrides=overrides,
                **model,
            ),
            parallel=self.topology.parallel_section(),
            data=DataSection(prompt_data="none"),
            rollout=RolloutSection(
                num_rollout=10,
                rollout_batch_size=len(self.batch.lengths) // 2,
                n_samples_per_prompt=2,
                rollout_max_response_len=int(self.batch.lengths.max()),
                rollout_temperature=TEMPERATURE,
            ),
            algorithm=ALGORITHM,
            trainer=trainer.model_copy(update={"max_tokens_per_gpu": self.batch.token_budget}),
            replay=ReplaySection(
                use_rollout_routing_replay=True,
                enable_r3_correctness_check=True,
                # the batch's routes are no router's choice: agreement says nothing here
                r3_mismatch_threshold=1.0,
            ),
        )
        return Job(config, self.hf, prompts=[], tokenizer=None, reward=None, prompt_file=None)

    def _train(self, trainer: TrainerSection, name: str) -> list[dict[str, float]]:
        """Two optimizer steps, the first of AdamW watched; returns the metrics of each step."""
        job = self._job(trainer)
        actor = build_actor(job, DEVICE, ResumePoint())
        slices, expectation = self._slices(job, actor, self.batch)
        old = self._streams(slices, self.batch.old_log_probs)
        ref = self._streams(slices, self.batch.ref_log_probs)
        if name == "adam":
            metrics = [self._watched_step(job, actor, slices, expectation, old, ref)]
        else:
            metrics = [actor.train_step(slices, old, ref)]
        if self.case.last_phase >= 4:
            self._save_weights(f"{name}1", actor.hf_weights())
            metrics.append(actor.train_step(slices, old, ref))
            self._save_weights(f"{name}2", actor.hf_weights())
        drop_gradient_hooks(actor)
        return metrics

    def _watched_step(
        self,
        job: Job,
        actor: MegatronActor,
        slices: list[RankSlice],
        expectation: StepExpectation | None,
        old: dict[int, torch.Tensor],
        ref: dict[int, torch.Tensor],
    ) -> dict[str, float]:
        """The old-log-prob pass and the first step, with all that the routers did on record."""
        if self.mutation is None:
            self._save_weights("export", actor.hf_weights())
            other = actor.parameters_unlike(Path(self.case.checkpoint))
            assert not other, f"{len(other)} parameters are not the checkpoint's: {other[0]}"
        source = load_file(Path(self.case.checkpoint) / "model.safetensors")
        dtype = torch.bfloat16 if self.case.bf16 else torch.float32
        watch = Watch(actor, source["model.embed_tokens.weight"].to(DEVICE, dtype))
        with watch.open():
            if self.mutation is not None and self.mutation.decoy_pass:
                routes = self.batch.routes
                # a slot that was not recorded stays so
                rotated = np.where(routes < 0, -1, (routes + 1) % self.variant.num_experts)
                decoys, _ = self._slices(job, actor, replace(self.batch, routes=rotated))
                watch.begin(None)
                actor.compute_log_probs(decoys, "old_log_prob", weight_version=0)
                actor.collect_evidence(0)  # of no run's step
            watch.begin("old_log_prob")
            log_probs = actor.compute_log_probs(slices, "old_log_prob", weight_version=0)
            watch.begin("train")
            self._save_gradients_before_step(actor)
            metrics = actor.train_step(slices, old, ref, weight_version=0)
            watch.begin(None)
        writer = EvidenceWriter(self.output / EVIDENCE_RUN, actor.topology.rank)
        proof = LiveProof(writer, job.hf.route_shape, PASSES, job.config.mismatch_threshold)
        proof.prove_step(actor.collect_evidence(0), expectation)
        writer.close()
        place = actor.topology
        recording = asdict(watch.recording) | {
            "place": asdict(place),
            "route_bytes": sum(s.routes.nbytes for s in slices),
            "log_probs": [
                dict(
                    tokens=torch.from_numpy(s.tokens),
                    log_probs=log_probs[s.microbatch_id].float().cpu(),
                )
                for s in slices
                if s.microbatch_id in log_probs
            ],
        }
        torch.save(recording, self.output / f"rank{place.rank:03d}.pt")
        return metrics

    def _slices(
        self, job: Job, actor: MegatronActor, batch: RolloutBatch
    ) -> tuple[list[RankSlice], StepExpectation | None]:
        """This rank's microbatches, and on rank 0 what their evidence must show; a collective."""
        topologies, prepared = gather_topologies(actor.topology), None
        routes = RoutesOnRank0(self.hf.route_shape, self.hf.moe_layer_numbers)
        routes.open(actor.topology)
        if actor.topology.rank == 0:
            samples = train_samples(batch, self.variant)
            if self.case.order_seed is not None:
                order = np.random.default_rng(self.case.order_seed).permutation(len(samples))
                samples = [samples[i] for i in order]
            preparation = Preparation(job.config, job.hf, routes.row_shape, topologies, PASSES)
            prepared = preparation.prepare(0, samples, self.plant)
        count = broadcast_json(prepared.counts[0] if prepared else None)
        slices, recorded = routes.slices(prepared, count), routes.recorded(prepared)
        if self.case.order_seed is not None:
            slices.reverse()
        # the batch has holes that stand for rows which an engine did not report
        expectation = prepared.expectation(recorded) if prepared else None
        if expectation is not None:
            routes = msgspec.structs.replace(expectation.streams[ROUTES], rows_without_choice=None)
            streams = {**expectation.streams, ROUTES: routes}
            expectation = msgspec.structs.replace(expectation, streams=streams)
        return slices, expectation

    def _streams(self, slices: list[RankSlice], stream: np.ndarray) -> dict[int, torch.Tensor]:
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
            gradients = export_hf_weights(
                actor.model.weights, actor.model.chunks, lambda p: getattr(p, "main_grad", p)
            )
            self._save_weights("grads", (g for g in gradients if not g[0].endswith(BIAS)))
            return step()

        actor.optimizer.step = save_and_step

    def _save_weights(self, name: str, whole: Any) -> None:
        """Write whole tensors by Hugging Face name from rank 0; a collective."""
        tensors = {n: t.detach().cpu().clone().contiguous() for n, t in whole}
        if dist.get_rank() == 0:
            save_file(tensors, self.output / f"{name}.safetensors")


def run_cases(cases: Sequence[Case]) -> None:
    """Run the cases in order; rank 0 writes each one's status once all ranks are through."""
    gc.freeze()
    gc.enable()
    init_distributed("auto", timeout_minutes=2)
    for case in cases:
        started = time.monotonic()
        error = ""
        try:
            CaseRun(case).run()
        except Exception as e:  # noqa: BLE001 - a mutation may raise anything; it is the verdict
            error = f"{type(e).__name__}: {e}"
            traceback.print_exc()
        errors = gather_json(error)
        if dist.get_rank() == 0:
            status = dict(error=next(filter(None, errors), ""), seconds=time.monotonic() - started)
            (Path(case.output) / "status.json").write_bytes(json.dumps(status).encode())
        leave_model_parallel()
        gc.freeze()  # what is left are imports: searching them took a fifth of a case
    shutdown()


def drop_gradient_hooks(actor: MegatronActor) -> None:
    """Take Megatron's hooks from the gradient accumulators, which keep the model alive through them.

    Accumulator and hook hold each other across the border to C++, where Python's collector does not
    look; a model that is kept keeps its process groups, and they their threads.
    """
    for chunk in actor.model.chunks:
        for accumulator in chunk.grad_accs:
            accumulator.register_hook(lambda *_: None).hooks_dict_ref().clear()
        chunk.grad_accs.clear()


def leave_model_parallel() -> None:
    """Forget the topology and close its process groups; those of all ranks stay.

    Megatron forgets its groups without closing them, and every gloo group holds threads.  Joining
    the world anew is no way out: torchrun's store still holds the addresses of the first time.
    """
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, host_group()):
            dist.destroy_process_group(group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases([Case(**fields) for fields in json.loads(Path(sys.argv[1]).read_bytes())])
