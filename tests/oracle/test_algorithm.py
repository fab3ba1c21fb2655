"""Whole jobs with every setting of the learning rule off its default, compared with float64.

Recorded rollouts go through ``train_async.py --replay-rollouts`` in several topologies: unequal lengths,
holes in the loss mask, an empty answer, a group whose rewards are equal, last tokens without
rows, a KL reference that is another checkpoint.  The oracle (``algorithm.py``) shares no code with
them.  Then each bug of the learning rule is planted, and the same comparison must find it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.algo.advantages.estimators import ADVANTAGES
from r3train.algo.losses.policy_losses import POLICY_LOSSES
from r3train.config.algorithm_settings import AlgorithmSection, Rejection
from r3train.cpu.device import prepare_device
from r3train.engine.server import free_port
from r3train.loop.replay_source import dump_rollout
from r3train.observe.metrics import read_metrics
from r3train.types import Prompt, RolloutSample
from r3train.verify.model_zoo import VARIANTS, VOCAB_SIZE, ModelVariant, write_checkpoint
from tests.oracle.algorithm import (
    Expected,
    Rollout,
    Rule,
    Sample,
    predictions,
    rollout_metrics,
    train,
)

from tests.oracle import rule_pairs

prepare_device()
from tests.oracle.planted import planted_by  # noqa: E402

ROOT = Path(__file__).parents[2]
GROUPS, GROUP_SIZE, ROLLOUTS = 4, 3, 2
# of the weights' movement; and six digits of a metric
DELTA, DIGITS = 2e-4, 5e-6
# a quantile is the upper edge of a bin, of which there are 32 a decade
BIN = 10 ** (1 / 32)
# the least that a planted bug misses a bound by
FOUND = 100

EVERYTHING = Rule(
    rollout_temperature=0.7,
    grpo_std_normalization=False,
    eps_clip=0.02,
    eps_clip_high=0.12,
    kl_loss_coef=0.3,
    entropy_coef=0.05,
    use_tis=True,
    tis_clip=1.3,
    tis_clip_low=0.6,
    global_batch_size=4,
    lr=2e-3,
    min_lr=4e-4,
    lr_decay_style="cosine",
    lr_warmup_iters=1,
    weight_decay=0.2,
    clip_grad=0.5,
    adam_beta1=0.8,
    adam_beta2=0.9,
    adam_eps=1e-5,
    mask_truncated=True,
    loss_aggregation="seq-mean-token-mean",
    eps_clip_c=1.04,
    kl_loss_type="k2",
    use_unbiased_kl=True,
    rollout_rs=("token_k2", "seq_mean_k3"),
    rollout_rs_threshold=("0.4", "0.12"),
    opsm_delta=0.002,
    moe_z_loss_coeff=0.02,
)
RULES = {
    "everything": EVERYTHING,
    "sgd": replace(
        EVERYTHING,
        optimizer="sgd",
        lr=0.2,
        min_lr=0.05,
        lr_decay_style="linear",
        lr_warmup_iters=0,
        grpo_std_normalization=True,
        length_penalty_coef=0.4,
        overlong_buffer_len=8,
        overlong_penalty_factor=0.7,
        loss_aggregation="constant",
        clip_grad=0.0,
    ),
    "gspo": replace(
        EVERYTHING,
        grpo_std_normalization=True,
        advantage_estimator="rloo",
        normalize_advantages=True,
        policy_loss="gspo",
        eps_clip=0.003,
        eps_clip_high=0.005,
        eps_clip_c=1.01,
        use_tis=False,
        rollout_is="sequence",
        rollout_is_mode="mask",
        tis_clip_low=0.2,
        tis_clip=4.0,
        rollout_rs=("seq_max_k2", "token_k3"),
        rollout_rs_threshold=("0.5", "0.3"),
        kl_loss_coef=0.0,
        kl_loss_type="k3",
        use_unbiased_kl=False,
        kl_coef=0.05,
        ref_routing="native",
        use_opd=True,
        opd_type="megatron",
        opd_kl_coef=0.4,
    ),
    "cispo": replace(
        EVERYTHING,
        grpo_std_normalization=True,
        advantage_estimator="max_rl",
        policy_loss="cispo",
        eps_clip_c=None,
        use_tis=False,
        rollout_is="geometric",
        # the rollouts were recorded at another temperature than this rule's
        tis_clip_low=1.6,
        tis_clip=2.6,
        rollout_rs=("token_k2",),
        rollout_rs_threshold=("0.6",),
        opsm_delta=None,
        kl_loss_type="k3+",
        ref_routing="native",
        loss_aggregation="seq-mean-token-sum",
        # a served teacher's log-probs are those at this temperature
        rollout_temperature=1.0,
        use_opd=True,
        opd_type="sglang",
    ),
    "anchor": replace(
        EVERYTHING,
        grpo_std_normalization=True,
        advantage_estimator="reinforce_plus_plus",
        gamma=0.9,
        mask_truncated=False,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        ratio_anchor="rollout",
        eps_clip=0.3,
        eps_clip_high=0.4,
        eps_clip_c=1.6,
        rollout_rs=("seq_mean_k1", "seq_sum_k3"),
        rollout_rs_threshold=("0.9_1.1", "2.5"),
        kl_loss_coef=0.0,
        kl_loss_type="k3",
        use_unbiased_kl=False,
        kl_coef=0.1,
        loss_aggregation="token-mean",
    ),
    "dppo_tv": replace(
        EVERYTHING,
        grpo_std_normalization=True,
        advantage_estimator="reinforce_plus_plus_baseline",
        policy_loss="dppo_tv",
        kl_loss_type="k1",
        dppo_delta=0.002,
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=None,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
    ),
    "dppo_kl": replace(
        EVERYTHING,
        grpo_std_normalization=True,
        advantage_estimator="gdpo",
        reward_keys=("right", "short"),
        reward_weights=("1.0", "0.4"),
        policy_loss="dppo_kl",
        dppo_delta=0.001,
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=None,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        min_ess=0.85,
    ),
    "sft": replace(
        EVERYTHING,
        loss_type="sft",
        grpo_std_normalization=True,
        eps_clip=0.2,
        eps_clip_high=None,
        eps_clip_c=None,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        use_unbiased_kl=False,
        rollout_rs=(),
        rollout_rs_threshold=(),
        opsm_delta=None,
    ),
    "k1_unbiased": replace(EVERYTHING, kl_loss_type="k1", use_unbiased_kl=True),
    "k3+_unbiased": replace(EVERYTHING, kl_loss_type="k3+", use_unbiased_kl=True),
    "balanced": replace(EVERYTHING, moe_aux_loss_coeff=0.2, max_tokens_per_gpu=400),
    # one optimizer step per rollout: there is no old pass to be found in the weights
    "one_step": replace(
        EVERYTHING,
        global_batch_size=GROUPS * GROUP_SIZE,
        lr_warmup_iters=0,
        use_unbiased_kl=False,
        opsm_delta=None,
    ),
    "starved": replace(EVERYTHING, min_ess=1.0),
    "nan_gradient": replace(EVERYTHING, policy_loss="tests.oracle.nan_gradient:loss"),
}
PAIRS = {"-".join(row): row for row in rule_pairs.rows()}
RULES |= {name: replace(EVERYTHING, **rule_pairs.settings(row)) for name, row in PAIRS.items()}


@dataclass(frozen=True)
class Job:
    """A job by its name: a rule, a model, a topology and at most one bug.

    Jobs of a batch and a world size run under one torchrun; those of a named batch are not run in CI.
    """

    name: str
    world_size: int = 1
    rule: str = "everything"
    variant: str = "moe4"
    parallel: tuple[str, ...] = ()
    bug: str | None = None
    batch: str = ""


TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2_CP2 = ("--pipeline-model-parallel-size", "2", "--context-parallel-size", "2")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")
DP2_EP2 = ("--expert-model-parallel-size", "2")
ETP2 = ("--expert-tensor-parallel-size", "2")
PP2_CP2_FULL = (*PP2_CP2, *FULL, "--recompute-num-layers", "1")
JOBS = [
    *(Job(name, rule=name) for name in RULES if name not in ("everything", "starved", *PAIRS)),
    Job("one"),
    Job("null", bug="null"),
    Job("one_step_old_pass", rule="one_step", parallel=("--reuse-log-probs", "off")),
    # expert biases, in the actor and in the reference, moved by every step
    Job("expert_biases", variant="glm"),
    Job("dp2_ep2_expert_biases", 2, variant="glm", parallel=DP2_EP2),
    Job("tp2", 2, parallel=TP2),
    Job("dp2_ep2", 2, parallel=DP2_EP2),
    Job("dp2_ep2_gspo", 2, "gspo", parallel=DP2_EP2, batch="slow"),
    Job("etp2", 2, parallel=ETP2),
    Job("pp2_cp2_recompute", 4, parallel=PP2_CP2_FULL),
    Job("pp2_cp2_recompute_gspo", 4, "gspo", parallel=PP2_CP2_FULL, batch="slow"),
    Job("pp2_cp2_recompute_one_step", 4, "one_step", parallel=PP2_CP2_FULL, batch="slow"),
    Job("pp2_cp2_recompute_sft", 4, "sft", parallel=PP2_CP2_FULL),
    Job("tp2_sft", 2, "sft", parallel=TP2, batch="slow"),
    Job("dp2_sft", 2, "sft", batch="slow"),
    # teachers, which the ranks hold and which is served
    Job("tp2_gspo", 2, "gspo", parallel=TP2, batch="slow"),
    Job("tp2_cispo", 2, "cispo", parallel=TP2, batch="slow"),
    Job("dp2_cispo", 2, "cispo", batch="slow"),
    # steps below --min-ess, which all ranks skip
    Job("dp2_dppo_kl", 2, "dppo_kl", batch="slow"),
    Job("pp2_cp2_dppo_kl", 4, "dppo_kl", parallel=PP2_CP2, batch="slow"),
    *(
        Job(name, 2, name, parallel=rule_pairs.TOPOLOGIES[row[-1]], batch=f"{row[-1]}-{i % 2}")
        for i, (name, row) in enumerate(PAIRS.items())
    ),
]
# a bug shows under the first rule unless it needs another
RULE_OF_BUG = {
    "teacher_is_the_actor": "gspo",
    "teacher_replays_the_rollout": "gspo",
    "distilled_away_from_the_teacher": "cispo",
    "nan_gradients_unseen": "nan_gradient",
    # there tokens lie between the two bounds that no mask drops
    "eps_clip_high_not_handed_over": "anchor",
    "kl_of_the_token_before": "anchor",
    "native_reference_replays": "cispo",
    "rewards_added_before_they_are_compared": "dppo_kl",
}
BUGS = [
    Job(bug.name, rule=RULE_OF_BUG.get(bug.name, "everything"), bug=bug.name)
    for bug in planted_by("tests/oracle/test_algorithm.py")
]
STARVED = Job("starved", rule="starved", parallel=("--max-bad-steps", "2"))
ALL_JOBS = {job.name: job for job in [*JOBS, *BUGS, STARVED]}

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


# -- what is trained ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A model, its reference, its teacher, the recorded rollouts, and the files that a job reads."""

    variant: ModelVariant
    directory: Path
    start: dict[str, torch.Tensor]  # float64
    reference: dict[str, torch.Tensor]
    teacher: dict[str, torch.Tensor]
    rollouts: list[Rollout]

    def expected(self, rule: Rule) -> Expected:
        others = self.reference, self.teacher
        return train(self.variant, self.start, *others, self.rollouts, rule)

    def flags(self, rule: Rule) -> list[str]:
        held = {"opd-teacher-load": "teacher"} if rule.opd_type == "megatron" else {}
        files = held | {
            "hf-checkpoint": "model",
            "ref-load": "reference",
            "prompt-data": "prompts.jsonl",
            "replay-rollouts": "rollouts",
        }
        return [
            x for flag, file in files.items() for x in (f"--{flag}", str(self.directory / file))
        ]


def give(variant: ModelVariant, directory: Path) -> Given:
    """Write checkpoint, reference, teacher, tokenizers, prompts and rollouts."""
    model = write_checkpoint(variant, directory / "model")
    write_tokenizer(model)
    start = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    others = {}
    for name in ("reference", "teacher"):
        other = {n: t + 0.02 * torch.randn(t.shape, generator=noise) for n, t in start.items()}
        (directory / name).mkdir()
        (directory / name / "config.json").write_text((model / "config.json").read_text())
        save_file(other, directory / name / "model.safetensors", {"format": "pt"})
        others[name] = {n: t.double() for n, t in other.items()}
    write_tokenizer(directory / "teacher")
    line = {"input": "w5 w6", "label": "w7"}
    (directory / "prompts.jsonl").write_text((json.dumps(line) + "\n") * GROUPS)
    exact = {n: t.double() for n, t in start.items()}
    generator = np.random.default_rng(0)
    rollouts = [record(i, variant, exact, generator) for i in range(ROLLOUTS)]
    for rollout_id, groups in enumerate(rollouts):
        dump_rollout(directory / "rollouts", rollout_id, as_recorded(rollout_id, groups, variant))
    return Given(variant, directory, exact, **others, rollouts=rollouts)


def write_tokenizer(model: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0")
    fast.save_pretrained(model)


def record(
    rollout_id: int,
    variant: ModelVariant,
    weights: dict[str, torch.Tensor],
    generator: np.random.Generator,
) -> Rollout:
    """Answers of 0 to 24 tokens, some with an environment's words; their last tokens have no rows."""
    groups = []
    for group in range(GROUPS):
        samples = []
        for member in range(GROUP_SIZE):
            prompt_len, answer = 3 + group, int(generator.integers(2, 25))
            if (group, member) == (1, 2):
                answer = 0
            length = prompt_len + answer
            mask = np.arange(length) >= prompt_len
            if group == 2 and answer > 4:
                mask[prompt_len + 2 : prompt_len + 4] = False  # an environment's words
            scores = generator.random((length - 1, variant.num_layers, variant.num_experts))
            routes = np.argsort(scores, axis=-1)[..., : variant.topk]
            if not answer:
                routes[:] = -1  # aborted in the server's queue: no row was computed
            versions = np.where(mask, rollout_id, -1)
            if member == 0:  # the update came in the middle of this answer
                versions[mask.nonzero()[0][:2]] = max(rollout_id - 1, 0)
            sample = Sample(
                tokens=generator.integers(2, VOCAB_SIZE, length).astype(np.int32),
                prompt_len=prompt_len,
                mask=mask,
                routes=routes,
                rollout_log_probs=np.zeros(length, np.float32),
                teacher_log_probs=np.zeros(length, np.float32),
                weight_versions=versions.astype(np.int32),
                # all of the last group's are equal
                reward=0.1 if group == GROUPS - 1 else float(generator.normal()),
                finish_reason="abort" if not answer else "length" if answer > 20 else "stop",
            )
            other = np.random.default_rng([rollout_id, group, member])
            sample = replace(sample, parts=(float(other.normal()), 5 * float(other.random())))
            own, _, _ = predictions(weights, variant, sample, EVERYTHING.rollout_temperature)
            near = own.numpy() + 0.4 * generator.standard_normal(length - 1)
            near = np.append(0, np.minimum(near, -1e-3))
            drawn = np.where(mask, near, 0).astype(np.float32)
            samples.append(replace(sample, rollout_log_probs=drawn))
        groups.append(samples)
    # a generator of its own leaves all else as it was
    taught = np.random.default_rng(100 + rollout_id)
    return [[_taught(sample, taught) for sample in samples] for samples in groups]


def _taught(sample: Sample, generator: np.random.Generator) -> Sample:
    """The sample with a served teacher's log-probs, somewhere near the engine's."""
    near = sample.rollout_log_probs + generator.standard_normal(len(sample.tokens))
    own = np.where(sample.mask, np.minimum(near, -1e-3), 0)
    return replace(sample, teacher_log_probs=own.astype(np.float32))


def as_recorded(
    rollout_id: int, groups: Rollout, variant: ModelVariant
) -> list[list[tuple[RolloutSample, float]]]:
    """The rollout as --dump-rollouts writes it."""
    out = []
    for group_id, group in enumerate(groups):
        prompt = Prompt(f"p{group_id}", group_id, "", group[0].tokens[: group[0].prompt_len], "w7")
        scored = []
        for s in group:
            marker = variant.route_shape.missing
            recorded = RolloutSample(
                sample_id=100 * rollout_id + GROUP_SIZE * group_id + len(scored),
                group_id=GROUPS * rollout_id + group_id,
                prompt=prompt,
                token_ids=s.tokens,
                prompt_len=s.prompt_len,
                loss_mask=s.mask,
                rollout_log_probs=s.rollout_log_probs,
                routed_experts=np.where(s.routes < 0, marker, s.routes).astype(np.uint8),
                weight_versions=s.weight_versions,
                finish_reason=s.finish_reason,
                teacher_log_probs=s.teacher_log_probs,
                reward_parts=s.parts,
            )
            scored.append((recorded, s.reward))
        out.append(scored)
    return out


# -- what is run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A job that is over: its error, and the directory with its run and its exported weights."""

    error: str
    directory: Path

    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.directory / "hf").glob("*.safetensors")
        return load_file(file)


class Jobs:
    """Runs jobs, all of a batch and a world size under one torchrun, when one is asked for."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self.given = cache(lambda name: give(VARIANTS[name], scratch / name))
        self.expected = cache(self._expected)
        self._launch = cache(self._launch)

    def _expected(self, variant: str, rule: str) -> Expected:
        return self.given(variant).expected(RULES[rule])

    def ended(self, job: Job) -> Ended:
        self._launch(job.world_size, job.batch)
        directory = self._scratch / job.name
        end = directory / "ended.json"
        log = self._scratch / f"ranks{job.world_size}-{job.batch}.log"
        assert end.is_file(), log.read_text(errors="replace")[-3000:]
        return Ended(json.loads(end.read_text())["error"], directory)

    def _launch(self, world_size: int, batch: str) -> None:
        jobs = [j for j in ALL_JOBS.values() if (j.world_size, j.batch) == (world_size, batch)]
        plan = self._scratch / f"jobs{world_size}-{batch}.json"
        plan.write_text(json.dumps([self._planned(job) for job in jobs]))
        command = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
        command += [str(free_port("127.0.0.1")), "--nproc-per-node", str(world_size)]
        command += ["-m", "tests.oracle.algorithm_worker"]
        with (self._scratch / f"ranks{world_size}-{batch}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, str(plan)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
            try:
                for job in jobs:  # the oracle computes next to them
                    self.expected(job.variant, job.rule)
                process.wait(timeout=700)
            finally:
                process.terminate()
                process.wait()

    def _planned(self, job: Job) -> dict:
        directory = self._scratch / job.name
        directory.mkdir()
        overrides = VARIANTS[job.variant].overrides
        flags = [
            *self.given(job.variant).flags(RULES[job.rule]),
            *RULES[job.rule].flags(),
            *job.parallel,
            *(f"--transformer-override={n}={v}" for n, v in overrides.items()),
            "--run-dir",
            str(directory / "run"),
            "--save-hf",
            str(directory / "hf"),
            "--num-rollout",
            str(ROLLOUTS),
            "--rollout-batch-size",
            str(GROUPS),
            "--n-samples-per-prompt",
            str(GROUP_SIZE),
            "--rm-type",
            "exact_match",
            "--use-rollout-routing-replay",
            "--enable-r3-correctness-check",
            # the routes are no router's choice: agreement says nothing here
            "--r3-mismatch-threshold",
            "1.0",
            "--no-plot",
            "--no-tensorboard",
            "--no-progress",
        ]
        return {"flags": flags, "bug": job.bug, "directory": str(directory)}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    torch.set_num_threads(1)
    return Jobs(tmp_path_factory.mktemp("algorithm"))


# -- what is compared --------------------------------------------------------------------------


def errors(ended: Ended, expected: Expected, given: Given, rule: Rule) -> dict[str, float]:
    """Each tensor's and each metric's error, over what it may be: 1 is the bound."""
    out = movements(ended.weights(), expected, given)
    records = read_metrics(ended.directory / "run")
    assert len(records) == ROLLOUTS
    for i, record in enumerate(records):
        trainer_metrics = {
            n.removeprefix("train/"): x for n, x in record.items() if n.startswith("train/")
        }
        found = metric_errors(trainer_metrics, expected.metrics[i], expected.scales[i])
        # one that the trainer lacks is infinitely wrong
        assert trainer_metrics.keys() <= expected.metrics[i].keys()
        for name, wanted in rollout_metrics(i, given.rollouts[i], rule).items():
            off = difference(record.get(f"rollout/{name}"), wanted)
            found[f"rollout/{name}"] = factor(off, 1e-12 * max(1.0, abs(wanted)))
        out |= {f"{name} of rollout {i}": error for name, error in found.items()}
        assert record["r3/passed"] is True
    return out


def movements(
    weights: dict[str, torch.Tensor], expected: Expected, given: Given
) -> dict[str, float]:
    """The error of each tensor, over its bound."""
    out = {}
    for name, wanted in expected.weights.items():
        moved = float((wanted - given.start[name]).norm())
        out[name] = factor(float((weights[name].double() - wanted).norm()), DELTA * moved)
    return out


def metric_errors(
    got: dict[str, float], metrics: dict[str, float], scales: dict[str, float]
) -> dict[str, float]:
    """The error of each metric of the trainer, over its bound."""
    out = {}
    for name, wanted in metrics.items():
        size = max(abs(wanted), scales[name]) if scales[name] else 0.0
        off = difference(got.get(name), wanted)
        if name == "log_prob_gap_p999" and 0 < off < math.inf:
            off = max(0.0, got[name] - BIN * wanted)
        out[f"train/{name}"] = factor(off, DIGITS * size)
    return out


def difference(got: float | None, wanted: float) -> float:
    """The error of a metric; a missing one is infinitely wrong, and NaN is right where it is wanted."""
    if got is None:
        return math.inf
    return 0.0 if math.isnan(got) and math.isnan(wanted) else got - wanted


def factor(error: float, bound: float) -> float:
    """The error over its bound; anything is far beyond a bound of 0, and so is NaN."""
    if error == 0:
        return 0.0
    return abs(error) / bound if bound and math.isfinite(error) else math.inf


def worst(found: dict[str, float]) -> str:
    """The largest errors of metrics and of tensors, in words."""
    words = []
    for is_metric, count in ((True, 3), (False, 2)):
        names = [name for name in found if ("rollout" in name) == is_metric]
        largest = sorted(names, key=found.get, reverse=True)[:count]
        words += [f"{name}: {found[name]:.2g} times its bound" for name in largest]
    return ", ".join(words)


def compared(jobs: Jobs, job: Job) -> dict[str, float]:
    ended = jobs.ended(job)
    assert not ended.error, ended.error
    expected = jobs.expected(job.variant, job.rule)
    return errors(ended, expected, jobs.given(job.variant), RULES[job.rule])


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=[pytest.mark.slow] * bool(job.batch), id=job.name) for job in JOBS],
)
def test_weights_and_metrics_are_those_of_the_float64_oracle(job: Job, jobs: Jobs):
    found = compared(jobs, job)
    print(f"{job.name}: {len(found)} compared; {worst(found)}")
    # no token so near to a clipping bound that float32 may put it on the other side
    assert jobs.expected(job.variant, job.rule).margin > 1e-5
    assert max(found.values()) <= 1, worst(found)


def test_a_skipped_old_pass_changes_neither_weights_nor_metrics_nor_claims(jobs: Jobs):
    skipped, made = (jobs.ended(ALL_JOBS[name]) for name in ("one_step", "one_step_old_pass"))
    theirs = made.weights()
    for name, tensor in skipped.weights().items():
        assert torch.equal(tensor, theirs[name]), name
    evidence = []
    for job in (skipped, made):
        steps = job.directory / "run" / "evidence" / "steps.jsonl"
        evidence.append([json.loads(line) for line in steps.read_text().splitlines()])
    passes = [{tuple(step["passes"]) for step in steps} for steps in evidence]
    assert passes == [{("ref_log_prob", "train")}, {("old_log_prob", "ref_log_prob", "train")}]
    for one, other in zip(*evidence, strict=True):
        # the trainer's own choice next to the controls, in whichever forward is the first
        assert one["agreement"] == other["agreement"] and one["agreement"]["control_token_plus"]
        first, second = (step["streams"]["routes"]["fingerprints"] for step in (one, other))
        assert one["passed"] and first == second
    for one, other in zip(*(read_metrics(j.directory / "run") for j in (skipped, made))):
        for name in one:
            if name.startswith("train/"):
                assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-7), name


def test_a_job_that_min_ess_keeps_from_learning_ends_with_the_reason(jobs: Jobs):
    run = jobs.ended(STARVED).directory / "run"
    text = "".join(file.read_text() for file in (run / "logs").iterdir())
    assert "RuntimeError: rollout 1: 2 rollouts in a row had train/ess below --min-ess 1.0" in text
    assert [m["train/low_ess_steps"] for m in read_metrics(run)] == [3, 3]


DEFAULTS = {n: f.default for n, f in AlgorithmSection.model_fields.items()}


def off_default(rule: Rule) -> set[str]:
    """The settings of the learning rule that differ from their defaults."""
    return {n for n, default in DEFAULTS.items() if getattr(rule, n) != default}


def test_every_setting_of_the_learning_rule_is_off_its_default_in_some_job():
    assert set(DEFAULTS) == set().union(*map(off_default, RULES.values()))


# these say nothing without another setting, which shows
OF_OTHERS = {"rollout_rs_threshold", "reward_keys"}


@pytest.mark.slow
def test_every_setting_would_show_if_it_were_not_handed_over(jobs: Jobs):
    given, shows = jobs.given("moe4"), dict.fromkeys(DEFAULTS, 0.0)
    for name, rule in RULES.items():
        right = jobs.expected("moe4", name)
        for setting in off_default(rule) - OF_OTHERS:
            if shows[setting] >= 10:
                continue
            change = {setting: DEFAULTS[setting]}
            if setting == "eps_clip_high":
                change[setting] = rule.eps_clip  # unset, it means that
            if setting == "loss_type":
                change["eps_clip_high"] = rule.eps_clip
            if setting == "rollout_rs":
                change["rollout_rs_threshold"] = ()
            if setting == "use_opd":
                change |= {"opd_type": None, "opd_kl_coef": 1.0}
            if setting == "opd_type":
                change |= {"opd_type": "megatron" if rule.opd_type == "sglang" else "sglang"}
            wrong = given.expected(replace(rule, **change))
            found = movements(wrong.weights, right, given)
            for got, metrics, scales in zip(wrong.metrics, right.metrics, right.scales):
                found |= metric_errors(got, metrics, scales)
            shows[setting] = max(shows[setting], *found.values())
    for setting in OF_OTHERS:
        del shows[setting]
    print({name: f"{times:.2g}" for name, times in shows.items()})
    assert min(shows.values()) >= 10


def test_every_two_parts_of_the_learning_rule_meet_in_a_job_of_two_ranks():
    met = [{frozenset(pair) for pair in combinations(row, 2)} for row in PAIRS.values()]
    wanted = {
        frozenset((a, b))
        for one, other in combinations(rule_pairs.PARTS, 2)
        for a, b in product(one, other)
        if not rule_pairs.refused(a, b)
    }
    assert wanted <= set().union(*met)
    parts = [set(part) for part in rule_pairs.PARTS[:3]]
    known = (set(ADVANTAGES), set(POLICY_LOSSES), set(get_args(_annotation("loss_aggregation"))))
    assert (parts[0], parts[1] - {"dual_clip"}, parts[2]) == known
    masks = {
        name for part in rule_pairs.CORRECTIONS.values() for name in part.get("rollout_rs", ())
    }
    assert masks == set(get_args(Rejection))
    kinds = {RULES[name].kl_loss_type for name in PAIRS}
    assert kinds == set(get_args(_annotation("kl_loss_type")))


def _annotation(setting: str) -> object:
    return AlgorithmSection.model_fields[setting].annotation


@pytest.mark.parametrize("job", BUGS, ids=lambda job: job.name)
def test_a_planted_bug_is_found(job: Job, jobs: Jobs):
    ended = jobs.ended(job)
    assert not ended.error, ended.error
    found = compared(jobs, job)
    print(f"{job.name}: {worst(found)}")
    assert max(found.values()) >= FOUND, worst(found)
