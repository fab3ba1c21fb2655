"""A run's own rollout as a test: what is refused, what fits, and that every kind of error shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.unit.loop.test_rollout_file import groups

from r3train.cli import main
from r3train.config import RunConfig
from r3train.loop.replay_source import dump_rollout, load_rollout
from r3train.verify import from_run
from r3train.verify.compare_outcomes import DELTAS, GATES, GRADIENTS, LOSS
from r3train.verify.from_run import FromRun, Step, compare_steps, layouts, verify_run
from r3train.verify.verify_report import verdict
from r3train.verify.topologies import TOPOLOGIES

RECIPE = Path(__file__).parents[3] / "configs/tiny_cpu.toml"


@pytest.fixture
def run_dir(tiny, tmp_path):
    """The directory of a run that dumped its rollouts 3 and 4."""
    fields = {
        **{"hf_checkpoint": tiny / "model", "prompt_data": [str(tiny / "prompts.jsonl")]},
        **{"rollout_batch_size": 2, "n_samples_per_prompt": 2, "use_rollout_routing_replay": True},
        **{"debug_rollout_only": True, "num_rollout": 9, "min_ess": 0.5},
        **{"optimizer_overrides": {"decoupled_weight_decay": True}},
    }
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(RunConfig.from_toml(RECIPE, fields).to_toml())
    for rollout_id in (3, 4):
        dump_rollout(directory / "rollouts", rollout_id, groups())
    return directory


def refused(run_dir, *flags):
    result = CliRunner().invoke(main, ["verify", "--from", str(run_dir), *flags])
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return " ".join(result.output.split())


def test_what_is_missing_is_refused_by_its_path(run_dir):
    assert "rollout_0000007.safetensors: no such file" in refused(run_dir, "--rollout", "7")
    assert "runs no planted bugs" in refused(run_dir, "--mutations")
    assert "--topology one alone compares nothing" in refused(run_dir, "--topology", "one")
    for path in (run_dir / "rollouts").iterdir():
        path.unlink()
    assert "rollouts: holds no dumped rollout: start the run with --dump" in refused(run_dir)
    (run_dir / "config.toml").unlink()
    assert "config.toml: no such file" in refused(run_dir)


def test_each_topology_is_a_job_of_the_runs_own_settings(run_dir, tmp_path):
    test = FromRun(run_dir, None, tmp_path / "scratch")
    [first, second] = load_rollout(tmp_path / "scratch/rollouts", 0)
    assert [s.sample_id for s, _ in (*first, *second)] == [0, 1, 2, 3], "its first rollout"
    job = test.job(TOPOLOGIES["tp2ep2"])
    assert RunConfig.from_sources(file=write(tmp_path, job)) == job
    assert (job.model.hf_checkpoint, job.rollout.n_samples_per_prompt) == (
        test.config.model.hf_checkpoint,
        2,
    )
    assert job.parallel.tensor_model_parallel_size == 2 and job.r3_check_enabled
    assert job.rollout.num_rollout == 1 and not job.has_engines
    assert not job.checkpoint.debug_rollout_only and job.trainer.optimizer == "sgd"
    assert not job.trainer.optimizer_overrides and job.algorithm.min_ess == 0


def write(directory, config):
    path = directory / "job.toml"
    path.write_text(config.to_toml())
    return path


def test_topologies_that_do_not_fit_the_model_say_why(run_dir, tmp_path):
    test = FromRun(run_dir, 4, tmp_path / "scratch")
    assert test.misfit(TOPOLOGIES["tp2ep2"]) == test.misfit(TOPOLOGIES["one"]) == ""
    assert "is below the 8 data-parallel ranks" in test.misfit(TOPOLOGIES["dp8"])


def test_a_layout_is_tried_once_whatever_model_it_was_for():
    names = [t.name for t in layouts((), ci=False)]
    assert "pp2" in names and "pp2_tied" not in names and "one" not in names
    assert "recompute_moe" in names, "one rank that recomputes is another layout than one"
    assert [t.name for t in layouts(("cp2",), ci=False)] == ["cp2"]
    assert set(t.name for t in layouts((), ci=True)) < {t.name for t in TOPOLOGIES.values() if t.ci}


START = {"a": torch.ones(4, 4), "b": torch.ones(4)}
METRICS = {
    **{"train/loss": 0.25, "train/pg_loss": 0.2, "train/entropy": 3.0},
    **{"train/num_loss_tokens": 40.0, "train/grad_norm": 2.0},
}
REFERENCE = Step(METRICS, {"a": START["a"] + 0.5, "b": START["b"] - 0.25}, "passed")


def with_weight(name, change):
    weights = {n: t.clone() for n, t in REFERENCE.weights.items()}
    change(weights)
    return replace(REFERENCE, weights=weights)


@pytest.mark.parametrize(
    "found, phase, where",
    [
        (replace(REFERENCE, metrics=METRICS | {"train/loss": 0.2501}), LOSS, "train/loss"),
        (replace(REFERENCE, metrics=METRICS | {"train/num_loss_tokens": 41.0}), LOSS, "num_loss"),
        (replace(REFERENCE, metrics=METRICS | {"train/entropy": float("nan")}), LOSS, "entropy"),
        (replace(REFERENCE, metrics=METRICS | {"train/grad_norm": 2.1}), GRADIENTS, "grad norm"),
        (with_weight("a", lambda w: w["a"][0].add_(0.1)), DELTAS, "step of a"),
        (with_weight("b", lambda w: w.pop("b")), DELTAS, "step of b is missing"),
    ],
)
def test_an_error_of_every_kind_is_found_where_it_is(found, phase, where):
    same = compare_steps(REFERENCE, REFERENCE, START, bf16=False)
    assert all(error.error == 0 for error in same.values()) and same.keys() == {
        LOSS,
        GRADIENTS,
        DELTAS,
    }
    errors = compare_steps(found, REFERENCE, START, bf16=False)
    assert errors[phase].error > GATES[phase] and where in errors[phase].where
    assert all(error.error == 0 for p, error in errors.items() if p != phase)
    assert DELTAS not in compare_steps(found, REFERENCE, START, bf16=True)


def test_verdicts_of_the_topologies(run_dir, tmp_path, monkeypatch):
    """Jobs are faked: one that differs, one whose evidence fails, one that ends in an error."""
    ends = {
        "one": REFERENCE,
        "tp2": REFERENCE,
        "ep2": with_weight("a", lambda w: w["a"][0].add_(0.1)),
        "cp2": replace(REFERENCE, evidence="failed"),
    }

    def run(self, topology):
        if topology.name not in ends:
            raise RuntimeError("the job ended with 1: out of memory")
        return ends[topology.name]

    monkeypatch.setattr(FromRun, "run", run)
    monkeypatch.setattr(from_run, "load_weights", lambda directory: START)
    test = FromRun(run_dir, None, tmp_path / "scratch")
    names = ("tp2", "ep2", "cp2", "pp2", "tp2ep2etp2")
    said: list[str] = []
    result = verify_run(test, layouts(names, ci=False), 2, said.append)
    verdicts = {t.name: (t.status, t.reason.partition(":")[0]) for t in result.topologies}
    assert verdicts == {
        "tp2": ("passed", ""),
        "ep2": ("failed", "step of a"),
        "cp2": ("failed", "check-evidence"),
        "pp2": ("failed", "the job ended with 1"),
        "tp2ep2etp2": ("not run", "needs 4 ranks, 2 can run here"),
    }
    assert not result.ok


@pytest.mark.parametrize(
    "reference, names, status, reason",
    [
        (RuntimeError("out of memory"), ("tp2",), "failed", "out of memory"),
        (replace(REFERENCE, evidence="failed"), ("tp2",), "failed", "check-evidence: failed"),
        (REFERENCE, ("tp2ep2etp2",), "not run", "needs 4 ranks, 2 can run here"),
    ],
)
def test_world_size_1_that_fails_and_nothing_compared_are_no_success(
    reference, names, status, reason, run_dir, tmp_path, monkeypatch
):
    def run(self, topology):
        if isinstance(reference, Exception):
            raise reference
        return reference if topology.name == "one" else REFERENCE

    monkeypatch.setattr(FromRun, "run", run)
    monkeypatch.setattr(from_run, "load_weights", lambda directory: START)
    test = FromRun(run_dir, None, tmp_path / "scratch")
    result = verify_run(test, layouts(names, ci=False), 2, lambda line: None)
    assert (result.topologies[0].status, result.topologies[0].reason) == (status, reason)
    assert not result.ok
    assert ("nothing was compared" in verdict(result)) == (status == "not run")
