"""Runs that are dumped, replayed, killed, resumed, exported: nothing changes and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from r3train.observe.starts import read_starts
from r3train.audit.audit_run import audit_run
from r3train.engine.control import EngineControl
from r3train.observe.metrics import read_metrics
from r3train.loop.run_state import BUFFER_FILE
from r3train.loop.rollout_file import read_samples
from r3train.trainer.megatron.saved_state import LATEST
from tests.e2e import jobs
from tests.e2e.accounts import (
    audited,
    buffered_samples,
    dumped_samples,
    trained_as_they_were,
    trained_groups,
)
from tests.e2e.live_jobs import output, pointer, rank_processes, running, steps_done, wait_for

pytestmark = pytest.mark.e2e

WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def base(tiny_flags) -> list[str]:
    return [*tiny_flags, *jobs.R3_FLAGS]


@pytest.fixture(scope="module")
def replay(recorded) -> list[str]:
    return ["--replay-rollouts", str(recorded.run_dir / "rollouts")]


@pytest.mark.slow
def test_another_advantage_estimator_trains_other_weights(tmp_path, recorded, base, replay):
    """A job that took the default estimator whatever the flags say would repeat the first step."""
    flags = [*base, *replay, "--num-rollout", "1", "--advantage-estimator", "rloo"]
    job = jobs.run(tmp_path / "run", *flags)
    assert job.code == 0, job.output
    (rloo,), gdpo = job.metrics(), recorded.metrics()[0]
    assert rloo["rollout/reward_mean"] == gdpo["rollout/reward_mean"], "of the same samples"
    assert rloo["train/grad_norm"] != pytest.approx(gdpo["train/grad_norm"], rel=1e-3)


def test_a_resumed_run_is_one_run_with_one_curve_and_one_evidence(tmp_path, replay_flags, recorded):
    """Of four steps the last two are lost with the checkpoint after them; one of them comes again."""
    first = jobs.run(
        tmp_path / "run",
        *replay_flags,
        "--save",
        str(tmp_path / "ck"),
        *"--save-interval 2".split(),
        torchrun=True,  # whose command is recorded
    )
    assert first.code == 0, first.output
    (tmp_path / "ck" / LATEST).write_text("2\n")
    flags = (*replay_flags, "--num-rollout", "3", "--save", str(tmp_path / "ck"), "--auto-resume")
    command = jobs.command(tmp_path / "run", *flags)
    at = command.index("--run-dir")
    del command[at : at + 2]
    before = {path.name for path in (jobs.ROOT / "runs").glob("*")}
    job = jobs.start(command, tmp_path / "out.txt")
    assert job.wait(timeout=300) == 0, (tmp_path / "out.txt").read_text()
    assert {path.name for path in (jobs.ROOT / "runs").glob("*")} == before
    assert [m["step"] for m in first.metrics()] == [0, 1, 2]
    jobs.same_numbers(recorded.metrics()[:3], first.metrics())
    lost = jobs.Job(0, "", first.run_dir / "superseded").metrics()
    assert [m["step"] for m in lost] == [2, 3]
    assert re.search(
        r"\bsteps:? +3\b", (tmp_path / "out.txt").read_text()
    ), "the summary is of all steps"
    audit = audit_run(first.run_dir)
    assert audit.verdict == "passed", audit.findings
    assert any("steps 2 were trained again" in note for note in audit.notes)
    starts = read_starts(first.run_dir)
    assert [start.first_step for start in starts] == [0, 2]
    assert all(start.ranks == 2 and " --num-rollout " in start.command for start in starts)
    assert starts[1].command.endswith(" --auto-resume") and starts[0].time < starts[1].time
    again = jobs.run(tmp_path / "run", *flags)
    assert again.code == 0 and "nothing was trained: 3 of 3" in again.output
    assert "nothing was trained" not in first.output


# sets whose answers show each setting: one is sampled, three are greedy, each for another reason
EVALUATION = """
[eval]
eval_interval = 2
n_samples_per_eval_prompt = 3
eval_temperature = 0.7
eval_top_k = -1
eval_max_response_len = 5
eval_rm_type = "accepted_words"
eval_input_key = "ask"
eval_label_key = "words"
datasets = [
    {{name = "sampled", path = "{path}", metadata_key = "facts"}},
    {{name = "cold", path = "{path}", n_samples_per_eval_prompt = 1, temperature = 0.0}},
    {{name = "narrow", path = "{path}", n_samples_per_eval_prompt = 1, top_p = 1e-6}},
    {{name = "short", path = "{path}", n_samples_per_eval_prompt = 1, top_k = 1, max_response_len = 3}},
]
"""
EVAL_SETS = ("sampled", "cold", "narrow", "short")


def evaluation_recipe(directory: Path, prompts: Path) -> Path:
    """The demo's recipe with evaluation sets over its first five prompts, under other keys."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()[:5]]
    held_out = [{"ask": x["input"], "words": x["label"], "facts": {"num_words": 10}} for x in lines]
    path, recipe = directory / "held_out.jsonl", directory / "recipe.toml"
    path.write_text("".join(json.dumps(line) + "\n" for line in held_out))
    demo = (jobs.ROOT / "configs/tiny_cpu.toml").read_text()
    demo = demo.replace("r3_correctness_check = true", "r3_correctness_check = false")
    demo = demo.replace("routing_replay = true", "routing_replay = false")
    recipe.write_text(demo + EVALUATION.format(path=path))
    return recipe


def answers(run_dir: Path, version: int) -> dict[str, list[dict]]:
    """The rows of every evaluation set by one weight version."""
    rows = {}
    for name in EVAL_SETS:
        lines = (run_dir / "eval" / f"{version:07d}-{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    return rows


def shows_its_settings(rows: dict[str, list[dict]], version: int) -> None:
    """Hold the rows of one version against the sampling, the keys and the reward of each set."""
    assert {row["version"] for of_set in rows.values() for row in of_set} == {version}
    assert {name: len(of_set) for name, of_set in rows.items()} == {
        **dict.fromkeys(EVAL_SETS, 5),
        "sampled": 15,
    }
    words = {name: [row["answer"].split() for row in of_set] for name, of_set in rows.items()}
    assert words["cold"] == words["narrow"]
    # some tokens have no text, so three tokens may be fewer words
    assert words["short"] == [long[: len(s)] for s, long in zip(words["short"], words["cold"])]
    assert any(words["short"])
    assert (
        words["sampled"][::3] != words["sampled"][1::3] and words["sampled"][::3] != words["cold"]
    )
    lengths = {name: {row["response_len"] for row in of_set} for name, of_set in rows.items()}
    assert max(lengths["sampled"]) == max(lengths["cold"]) == 5 and max(lengths["short"]) == 3
    for name, of_set in rows.items():
        for row, answer in zip(of_set, words[name]):
            right = sum(word in row["label"] for word in answer)
            assert row["reward"] == right / (10 if name == "sampled" else max(len(answer), 1))
            assert row["prompt"].startswith("name ")


def test_a_synchronous_greedy_run_that_is_killed_resumes_exactly_with_the_server(
    tmp_path, base, tiny, engine
):
    """Greedy groups have no variance: the entropy bonus is what trains.

    The run that is killed and resumed is evaluated too, and trains the same: bit for bit, with the R3
    evidence of every step.
    """
    flags = [
        *base,
        "--rollout-external-engine-addrs",
        engine,
        *"--max-weight-staleness 0 --rollout-top-k 1 --entropy-coef 0.01".split(),
    ]
    whole = jobs.run(
        tmp_path / "whole", *flags, "--num-rollout", "4", "--save-hf", str(tmp_path / "a")
    )
    assert whole.code == 0, whole.output
    assert all(m["train/grad_norm"] > 0 for m in whole.metrics())
    recipe = str(evaluation_recipe(tmp_path, tiny / "prompts.jsonl"))
    flags += ["--save", str(tmp_path / "ck"), "--save-interval", "2", "--num-rollout", "4"]
    flags += ["--config", recipe]
    run_dir = tmp_path / "run"
    evaluated = [run_dir / "eval" / f"0000002-{name}.jsonl" for name in EVAL_SETS]
    with running(run_dir, *flags) as job:
        # a step beyond it, whose end evaluates version 2; not within the update that follows
        wait_for(lambda: steps_done(run_dir) == 3 and pointer(tmp_path / "ck") == 2, job, run_dir)
        for process in [job, *job.children(recursive=True)]:
            process.kill()
    assert pointer(tmp_path / "ck") == 2, "it was killed before its end"
    with EngineControl([engine]) as control:  # as a kill within a weight update leaves the server
        control.begin_weight_update()
    written = [path.stat().st_mtime_ns for path in evaluated]
    second = jobs.run(run_dir, *flags, "--auto-resume", "--save-hf", str(tmp_path / "b"))
    assert second.code == 0, second.output
    # the engine's own log-probs carry the rounding of whichever batches it made of the requests
    # and of a step that was trained twice, once before the kill, the second time counts
    steps = read_metrics(run_dir)
    jobs.same_numbers(whole.metrics(), steps, but=jobs.OF_THE_GAP)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    # nothing was evaluated twice, and every answer tells by which settings it was sampled
    assert [path.stat().st_mtime_ns for path in evaluated] == written
    lines = (run_dir / "eval" / "metrics.jsonl").read_text().splitlines()
    done = [(json.loads(line)["step"], json.loads(line)["name"]) for line in lines]
    assert sorted(done) == sorted((version, name) for version in (0, 2, 4) for name in EVAL_SETS)
    for version in (0, 2, 4):
        shows_its_settings(answers(run_dir, version), version)
    assert "evaluation of sampled" in second.output and "(version 4)" in second.output
    # the checkpoint that the run exported, on a server of the command's own, gives the same answers
    last = answers(run_dir, 4)
    again = r3train_eval(tmp_path / "b", recipe, tmp_path / "alone")
    served = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [words for words in served if str(tmp_path / "b") in words], "its server is left"
    shows_its_settings(again, 0)
    # a server that is there holds the weights of the run's last update
    external = r3train_eval(
        tmp_path / "b", recipe, tmp_path / "there", "--rollout-external-engine-addrs", engine
    )
    shows_its_settings(external, 4)
    for name in EVAL_SETS[1:]:
        expected = [row["answer"] for row in last[name]]
        assert [row["answer"] for row in again[name]] == expected
        assert [row["answer"] for row in external[name]] == expected


def r3train_eval(
    checkpoint: Path, recipe: str, run_dir: Path, *flags: str
) -> dict[str, list[dict]]:
    """Run the command; returns the rows of the one version that it found."""
    command = [sys.executable, "-m", "r3train.cli", "eval", str(checkpoint), "--config", recipe]
    command += ["--run-dir", str(run_dir), "--no-tensorboard", *flags]
    done = subprocess.run(
        command, cwd=jobs.ROOT, env=jobs.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (version,) = {int(path.name[:7]) for path in (run_dir / "eval").glob("*-*.jsonl")}
    return answers(run_dir, version)


@pytest.mark.slow
def test_the_model_alone_loads_into_another_topology(tmp_path, base, replay, replayed):
    """Saved with two expert-parallel ranks, loaded into two tensor-parallel ones."""
    checkpoint = str(replayed.run_dir.parent / "ck")
    flags = [
        *base,
        *replay,
        *"--num-rollout 1".split(),
        "--load",
        checkpoint,
        *"--lr 0 --lr-warmup-iters 0 --expert-model-parallel-size 1".split(),
        *"--tensor-model-parallel-size 2 --sequence-parallel --r3-mismatch-threshold 1".split(),
    ]
    loaded = jobs.run(
        tmp_path / "run", *flags, "--load-model-only", "--save-hf", str(tmp_path / "hf")
    )
    assert loaded.code == 0, loaded.output
    whole = replayed.run_dir.parent / "hf" / WEIGHTS
    assert (tmp_path / "hf" / WEIGHTS).read_bytes() == whole.read_bytes()


# tests/oracle/test_algorithm.py and test_optimizer_steps.py hold a skipped step against an oracle
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nan_once", "inf_once"])
def test_one_step_that_is_not_finite_is_skipped(fault, tmp_path, base, replay):
    flags = [*base, *replay, "--num-rollout", "4", "--max-bad-steps", "2"]
    once = jobs.run(tmp_path / "run", *flags, "--plant-fault", fault)
    assert once.code == 0, once.output
    assert [m["train/skipped_steps"] for m in once.metrics()] == [0, 1, 0, 0]
    assert np.isfinite(once.metrics()[2]["train/loss"])
    assert (once.run_dir / "bad_steps" / "rollout_0000001.safetensors").exists()


@pytest.mark.slow
def test_two_steps_in_a_row_that_are_not_finite_end_the_run(tmp_path, base, replay):
    flags = [*base, *replay, "--num-rollout", "4", "--max-bad-steps", "2"]
    always = jobs.run(tmp_path / "always", *flags, "--plant-fault", "nan_always")
    assert always.code != 0 and "2 in a row, max_bad_steps 2" in always.output
    assert [m["train/skipped_steps"] for m in always.metrics()] == [0, 1, 1]


@pytest.mark.slow
def test_a_disk_full_while_saving_ends_with_its_cause_and_the_checkpoint_before_it(
    tmp_path, base, replay
):
    flags = [*base, *replay, "--num-rollout", "4", "--save", str(tmp_path / "ck")]
    job = jobs.run(tmp_path / "run", *flags, "--save-interval", "1", "--plant-fault", "disk_full")
    assert job.code != 0
    assert "No space left on device" in job.output
    assert "the checkpoint after 1 rollouts is intact" in job.output
    assert sorted(p.name for p in (tmp_path / "ck").glob("iter_*")) == ["iter_0000001"]
    # and it resumes, but not with another prompt file
    prompts = tmp_path / "prompts.jsonl"
    original = Path(base[base.index("--prompt-data") + 1]).read_text()
    prompts.write_text(original.replace("\n", "\n\n", 1))
    changed = jobs.run(tmp_path / "changed", *flags, "--auto-resume", "--prompt-data", str(prompts))
    assert changed.code != 0 and "was trained on prompts of another content" in changed.output


@pytest.fixture
def small_disk(tmp_path, replayed) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    whole = replayed.run_dir.parent / "ck" / "iter_0000004"
    size = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("not run: no right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "saving", ["--no-async-save", pytest.param("--async-save", marks=pytest.mark.slow)]
)
def test_a_disk_that_is_really_full_leaves_the_checkpoint_before_it(
    small_disk, tmp_path, base, replay, saving
):
    flags = [*base, *replay, "--num-rollout", "3", "--save", str(small_disk / "ck")]
    job = jobs.run(tmp_path / "run", *flags, "--save-interval", "1", saving)
    assert job.code != 0
    assert "cannot write the checkpoint" in job.output
    assert "the checkpoint after 1 rollouts is intact" in job.output
    assert sorted(p.name for p in (small_disk / "ck").glob("iter_*")) == ["iter_0000001"]
    resumed = jobs.run(
        tmp_path / "resumed",
        *base,
        *replay,
        *"--num-rollout 2".split(),
        "--load",
        str(small_disk / "ck"),
    )
    assert resumed.code == 0 and [m["step"] for m in resumed.metrics()] == [1]


@pytest.mark.slow
def test_a_full_disk_leaves_a_checkpoint_the_samples_that_it_had(
    small_disk, tmp_path, base, engine
):
    """Generation fails after the save that was due: its samples are written again, in vain."""
    checkpoint, prompts = small_disk / "ck", tmp_path / "prompts.jsonl"
    lines = Path(base[base.index("--prompt-data") + 1]).read_text().splitlines()[:12]
    last = json.loads(lines[-1])  # of the third rollout
    last["metadata"] = {"checkpoints": str(checkpoint), "num_rollouts": 2}
    last["metadata"]["copy"] = str(tmp_path / "copy")
    prompts.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    job = jobs.run(
        tmp_path / "run",
        *base,
        "--prompt-data",
        str(prompts),
        *"--no-rollout-shuffle --num-rollout 6".split(),
        "--rollout-external-engine-addrs",
        engine,
        "--save",
        str(checkpoint),
        *"--save-interval 2 --custom-rm-path tests.e2e.disk_filling_reward:reward".split(),
        "--reward-timeout-s",
        "90",  # it waits for a checkpoint
    )
    assert job.code != 0
    text = " ".join(job.output.split())
    assert "generation failed after 2 rollouts" in text and "the disk is full now" in text
    assert "CheckpointError" in text and "cannot write its samples again" in text
    assert "No space left on device" in text and "the checkpoint after 2 rollouts is intact" in text
    assert pointer(checkpoint) == 2 and len(job.metrics()) == 2
    whole = checkpoint / "iter_0000002"
    assert (whole / BUFFER_FILE).read_bytes() == (tmp_path / "copy").read_bytes()
    read_samples(whole / BUFFER_FILE)
    assert not [p for p in whole.iterdir() if ".tmp" in p.name]


def test_a_signal_saves_and_exits_0_and_no_prompt_is_lost_or_trained_twice(tmp_path, base, engine):
    """SIGUSR1 to one rank of an asynchronous run, as Slurm would send it before the time is up.

    The resumed run gets SIGTERM.  Answers are short and asked for two steps ahead, so that whenever
    the signal comes some are complete.
    """
    flags = [*base, "--rollout-external-engine-addrs", engine, "--save", str(tmp_path / "ck")]
    flags += ["--auto-resume", "--async-save", "--num-rollout", "100000", "--dump-rollouts"]
    flags += ["--max-weight-staleness", "2", "--rollout-max-response-len", "2", "--lr", "1e-4"]
    runs, done, kept = [tmp_path / "stopped", tmp_path / "resumed"], 0, []
    for run_dir, number in zip(runs, (signal.SIGUSR1, signal.SIGTERM)):
        with running(run_dir, *flags) as job:
            wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
            rank_processes(job)[1].send_signal(number)
            assert job.wait(timeout=120) == 0, output(run_dir)
        first = json.loads((run_dir / "prompts.jsonl").read_text().splitlines()[0])
        assert first["step"] == done
        done = pointer(tmp_path / "ck")
        assert done == first["step"] + steps_done(run_dir)
        assert f"after {done} rollouts; a checkpoint was saved" in output(run_dir)
        kept.append(buffered_samples(tmp_path / "ck", done))
    records = audited(runs)
    assert trained_groups(records) == list(range(4 * done))
    # complete samples of the buffer came through the restart: made before it, trained after it
    assert kept[0]
    trained_as_they_were(kept[0], dumped_samples(runs[1], (r["step"] for r in records)))
    # with another reward those that wait are scored again
    flags += [
        "--num-rollout",
        str(done + 3),
        *"--custom-rm-path tests.unit.reward_functions:five_and_more".split(),
    ]
    other = jobs.run(tmp_path / "other", *flags)
    assert other.code == 0, other.output
    assert "samples that wait are scored again: custom_rm_path was None" in other.output
    samples = [
        one for path in (tmp_path / "other/rollouts").iterdir() for one in read_samples(path)[0]
    ]
    assert len(samples) == 3 * 16 and {reward for _, reward in samples} <= {6.0, 7.0}
    trained_as_they_were(kept[1], dumped_samples(tmp_path / "other", range(done, done + 3)))


@pytest.mark.slow
def test_a_killed_rank_ends_all_within_a_minute_and_torchrun_goes_on_from_the_checkpoint(
    tmp_path, base, engine
):
    run_dir = tmp_path / "run"
    flags = [*base, "--rollout-external-engine-addrs", engine, "--save", str(tmp_path / "ck")]
    flags += ["--auto-resume", "--save-interval", "2", "--num-rollout", "10"]
    with running(run_dir, *flags, torchrun=("--max-restarts", "1")) as job:
        wait_for(lambda: steps_done(run_dir) >= 5, job, run_dir)
        old = rank_processes(job)
        os.kill(old[1].pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(list(old.values()), timeout=60)
        assert not alive
        assert job.wait(timeout=200) == 0, output(run_dir)
    assert "resuming from" in output(run_dir)
    records = audited([run_dir])
    assert [r["step"] for r in records] == list(range(10))
    assert trained_groups(records) == list(range(40))
