"""--colocate: servers and trainer hold the memory in turns; the real server, and whole jobs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher
from r3train.engine.server import SGLangServer
from r3train.engine.sglang_http import HTTPSettings
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import jobs
from tests.e2e.accounts import all_trained_once
from tests.e2e.live_jobs import (
    output,
    pointer,
    rank_processes,
    running,
    scheduler,
    steps_done,
    wait_for,
)
from tests.e2e.sglang_support import checkpoint_tensors, probe_log_probs, prompt_of, Reference
from tests.e2e.test_demo_learns import learns

pytestmark = pytest.mark.e2e

_SAVED = re.compile(r"memory saver: (released|resumed) (\w+), (\d+) to (\d+) bytes resident")


def turns(log: Path) -> list[tuple[str, str, int]]:
    """List what a server's memory saver did: (released or resumed, tag, growth in bytes)."""
    return [
        (done, tag, int(after) - int(before))
        for done, tag, before, after in _SAVED.findall(log.read_text())
    ]


def test_a_server_gives_its_memory_back_and_serves_the_weights_that_are_published_after_it(
    models, tmp_path
):
    """Twice around: the KV cache takes pages only once it was written to."""
    log, text = tmp_path / "sglang.log", prompt_of(3, 40).token_ids
    saving = {"enable_memory_saver": True, "max_total_tokens": 200_000}
    pool = 2 * 2 * 16 * 4 * 3 * 200_000
    with SGLangServer(models[0], log, server_args=saving) as server:
        with EngineControl([server.addr], HTTPSettings(check_alive=server.check_alive)) as engine:
            publisher = DistributedPublisher(engine, bucket_bytes=1 << 20)
            for version in (1, 2):
                engine.keep_onloaded()
                assert engine.members.all() == [None]  # nothing is sent to it
                engine.keep_onloaded("weights")
                tensors = checkpoint_tensors(models[version % 2])
                publisher.publish(iter(tensors.items()), version=version)
                engine.keep_onloaded("weights", "kv_cache")
                assert engine.members.all() == [version]
                expected = Reference(models[version % 2])(text)[0]
                np.testing.assert_allclose(probe_log_probs(server.addr, text), expected, atol=1e-4)
            # what comes back is undefined: without a publish every log-prob is NaN
            engine.keep_onloaded("kv_cache")
            engine.keep_onloaded("weights", "kv_cache")
            with pytest.raises((EngineError, ValueError)):
                probe_log_probs(server.addr, text)
            publisher.close()
    done = turns(log)
    assert [(what, tag) for what, tag, _ in done] == 2 * [
        ("released", "kv_cache"),
        ("released", "weights"),
        ("resumed", "weights"),
        ("resumed", "kv_cache"),
    ] + [("released", "weights"), ("resumed", "weights")]
    weights = sum(t.nbytes for t in checkpoint_tensors(models[0]).values())
    assert [growth for _, tag, growth in done[:4] if tag == "kv_cache"][-1] > 0.9 * pool
    assert done[4][2] < -0.9 * pool
    assert all(
        growth < -0.5 * weights
        for what, tag, growth in done
        if (what, tag) == ("released", "weights")
    )


COLOCATED = ["--colocate", "--max-weight-staleness", "0", *jobs.R3_FLAGS]
IN_MEMORY = "--update-weight-transfer-mode shared_memory --check-weight-update-equal".split()
_HOLDS = re.compile(r"(the actor|servers) holds? (.+)")
ONE_TURN = [
    ("servers", "nothing"),
    ("the actor", "weights, gradients, optimizer"),
    ("the actor", "weights"),
    ("servers", "weights"),
    ("the actor", "nothing"),
    ("servers", "weights, kv_cache"),
]


def held(run_dir: Path) -> list[tuple[str, str]]:
    """List what actor and servers held, as rank 0 says it."""
    log = run_dir / "logs" / "rank_00000.log"
    return _HOLDS.findall(log.read_text()) if log.exists() else []


def proved(run_dir: Path, steps: range, unchecked: Sequence[int] = ()) -> None:
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert [m["step"] for m in metrics] == list(steps)
    passed = [m["step"] for m in metrics if m.get("r3/passed")]
    assert passed == [step for step in steps if step not in unchecked]
    assert all(m["rollout/staleness_max"] == 0 for m in metrics)
    # of the same weights: after one step they are a hundred times as far apart
    assert all(m["train/log_prob_gap_mean"] < 1e-5 for m in metrics)


def released_its_pool(job: jobs.Job, expected: list[str]) -> None:
    """Hold what the server did with its KV cache; from the second time on it had pages to release."""
    done = turns(job.run_dir / "logs" / "sglang.log")
    kv = [(what, growth) for what, tag, growth in done if tag == "kv_cache"]
    assert [what for what, _ in kv] == expected
    pool = 4 * 2 * 2 * 16 * 4 * 8192
    assert all(growth < -0.9 * pool for what, growth in kv[1:] if what == "released"), kv


@pytest.mark.gate
def test_a_colocated_job_takes_turns_and_learns_what_another_learns_from_its_rollouts(
    tmp_path, tiny_flags
):
    """R3 proved, and the same numbers as a trainer that never left its memory."""
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--max-weight-staleness", "0", "--ci-test"]
    flags += ["--num-rollout", "4"]
    job = jobs.run(tmp_path / "run", *flags, "--colocate", "--dump-rollouts")
    assert job.code == 0, job.output
    proved(job.run_dir, range(4))
    # the actor reads what a server said in its turn, before it trains on that turn's samples
    assert [m["served/passed"] for m in job.metrics()] == 4 * [True]
    assert held(job.run_dir) == [("the actor", "nothing"), *(3 * ONE_TURN), *ONE_TURN[:2]]
    released_its_pool(job, [*(3 * ["released", "resumed"]), "released"])
    replayed = jobs.run(
        tmp_path / "replayed", *flags, "--replay-rollouts", str(job.run_dir / "rollouts")
    )
    assert replayed.code == 0, replayed.output
    jobs.same_numbers(job.metrics(), replayed.metrics())


def test_a_colocated_job_resumes_and_all_its_updates_are_equal_bit_for_bit(tmp_path, tiny_flags):
    """By shared memory, in which every rank writes its experts, and after the resumption by the default transport."""
    saved = tmp_path / "ck"
    flags = [*tiny_flags, *COLOCATED, "--save", str(saved), "--auto-resume"]
    job = jobs.run(tmp_path / "run", *flags, *IN_MEMORY, "--num-rollout", "3")
    assert job.code == 0, job.output
    proved(job.run_dir, range(3))
    assert [m["served/passed"] for m in job.metrics()] == 3 * [True]
    # its server is sent the checkpoint's weights before it generates
    flags += ["--save-interval", "1", "--check-weight-update-equal", "--r3-check-interval", "3"]
    resumed = jobs.run(tmp_path / "resumed", *flags, "--num-rollout", "5")
    assert resumed.code == 0, resumed.output
    assert pointer(saved) == 5
    proved(resumed.run_dir, range(3, 5), unchecked=[4])  # the first of a start is checked
    metrics = resumed.metrics()
    assert len(metrics) == 2
    assert all(m["served/passed"] and m["served/gap_max"] <= 1e-4 for m in metrics)


def test_a_colocated_server_without_the_update_ends_the_run_before_its_samples_are_trained(
    tmp_path, tiny_flags
):
    saved = tmp_path / "ck"
    flags = [*tiny_flags, *COLOCATED, "--save", str(saved), "--save-interval", "1"]
    flags += ["--lr-warmup-iters", "0", "--num-rollout", "4", "--auto-resume"]
    job = jobs.run(tmp_path / "run", *flags, "--plant-bug", "weights_frozen")
    assert job.code != 0
    text = " ".join(job.output.split())
    assert "not served: MOVED: server 0, weight version 1" in text, text
    first, second = job.metrics()
    assert first["r3/passed"] and first["served/passed"]
    assert second["served/passed"] is False and "train/loss" not in second
    assert pointer(saved) == 1  # as it was saved before the update
    # samples of such a server are not kept: a run that goes on generates them again
    resumed = jobs.run(tmp_path / "resumed", *flags)
    assert resumed.code == 0, resumed.output
    assert [m["step"] for m in resumed.metrics()] == [1, 2, 3]


# where every push is tested, the test above holds its numbers against those of a job that learns apart
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns_in_turns_with_weights_equal_bit_for_bit_and_memory_released(
    seed, tmp_path
):
    build(tmp_path / "tiny", TinyOptions(seed=seed))
    job = jobs.run(
        tmp_path / "run",
        *COLOCATED,
        *"--num-rollout 50 --check-weight-update-equal".split(),
        "--hf-checkpoint",
        str(tmp_path / "tiny/model"),
        "--prompt-data",
        str(tmp_path / "tiny/prompts.jsonl"),
        *f"--seed {seed} --rollout-seed {seed}".split(),
    )
    learns(job, steps=50)
    proved(job.run_dir, range(50))
    assert all(m["served/gap_max"] <= 1e-4 for m in job.metrics())
    # the last version is published too: it is compared
    released_its_pool(job, 50 * ["released", "resumed"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_that_die_in_any_phase_of_the_turn_come_back_and_nothing_is_lost(
    tmp_path, tiny_flags
):
    """Killed while released, while resuming, and while generating."""
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *COLOCATED, "--num-rollout", "8", "--max-engine-restarts", "3"]
    phases = (1, ONE_TURN[1]), (3, ONE_TURN[2]), (5, ONE_TURN[5])
    with running(run_dir, *flags) as job:
        for step, phase in phases:
            wait_for(lambda: steps_done(run_dir) >= step, job, run_dir)
            before = held(run_dir).count(phase)
            wait_for(lambda: held(run_dir).count(phase) > before, job, run_dir)
            os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=400) == 0, output(run_dir)
    assert "restart 3 of 3" in output(run_dir)
    proved(run_dir, range(8))
    all_trained_once([run_dir], 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_or_a_dead_rank_while_the_actor_is_away_ends_as_it_does_elsewhere(
    tmp_path, tiny_flags
):
    """A stop saves what was away; after a kill torchrun starts the job again from that checkpoint."""
    run_dir, directory = tmp_path / "run", tmp_path / "ck"
    flags = [
        *tiny_flags,
        *COLOCATED,
        *"--num-rollout 6".split(),
        "--save",
        str(directory),
        "--auto-resume",
    ]

    def away(run_dir: Path, steps: int, job) -> None:
        wait_for(lambda: steps_done(run_dir) >= steps, job, run_dir)
        wait_for(lambda: held(run_dir)[-1] == ONE_TURN[5], job, run_dir)

    with running(run_dir, *flags) as job:
        away(run_dir, 2, job)
        for process in rank_processes(job).values():
            process.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=200) == 0, output(run_dir)
    stopped_at = pointer(directory)
    assert stopped_at == steps_done(run_dir) >= 2
    again = tmp_path / "again"
    with running(again, *flags, "--save-interval", "1", torchrun=("--max-restarts", "1")) as job:
        away(again, 1, job)
        rank_processes(job)[1].kill()
        assert job.wait(timeout=300) == 0, output(again)
    assert pointer(directory) == 6
    last = jobs.Job(0, "", again).metrics()[-1]
    assert last["step"] == 5 and last["r3/passed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_too_many_restarts_the_memory_that_was_away_is_saved(tmp_path, tiny_flags):
    run_dir, directory = tmp_path / "run", tmp_path / "ck"
    flags = [*tiny_flags, *COLOCATED, "--num-rollout", "100", "--save", str(directory)]
    with running(run_dir, *flags, "--max-engine-restarts", "1") as job:
        for step in (1, 3):
            wait_for(lambda: steps_done(run_dir) >= step, job, run_dir)
            wait_for(lambda: held(run_dir)[-1] == ONE_TURN[5], job, run_dir)
            os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=300) != 0
    assert "max_engine_restarts 1" in output(run_dir)
    assert held(run_dir)[-1] == ONE_TURN[1]
    assert pointer(directory) in (steps_done(run_dir), steps_done(run_dir) + 1)


WAYS = {
    # more groups than are trained are in flight when a rollout is complete
    "evaluated": "--eval-prompt-data words PROMPTS --eval-interval 1 --over-sampling-batch-size 6"
    " --save CHECKPOINTS --save-interval 1 --async-save --save-hf EXPORTS/{rollout_id}",
    # the base was released with the rest
    "adapters": "--lora-rank 4 --lora-alpha 8",
    # as in the recipes
    "by shared memory to two servers": "--update-weight-transfer-mode shared_memory --rollout-num-engines 2",
    "by disk to two servers": "--update-weight-transfer-mode disk --rollout-num-engines 2",
    "by shared memory with merged adapters": "--update-weight-transfer-mode shared_memory --lora-rank 4"
    " --lora-alpha 8 --check-weight-update-equal",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug, text",
    [
        ("experts_of_rank_0", r"two ranks have written \S+\.experts\.0\.\S+"),
        ("no_expert_of_other_ranks", r"\.experts\.\d+\.\S+, .* was not sent"),
        ("experts_exchanged", r"tensors of engine 0 are not the actor's: rank 0 \S+\.experts\."),
    ],
)
def test_a_rank_that_writes_other_experts_or_none_is_caught_by_name(
    bug, text, tmp_path, tiny_flags
):
    program = ("-m", "tests.e2e.train_with_bug", bug)
    job = jobs.run(
        tmp_path / "run", *tiny_flags, *COLOCATED, *IN_MEMORY, "--num-rollout", "2", program=program
    )
    assert job.code != 0, job.output
    assert re.search(text, " ".join(job.output.split())), job.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_turns_go_with_evaluations_exports_adapters_and_several_servers(
    tmp_path, tiny, tiny_flags, way
):
    places = {
        "PROMPTS": f"{tiny}/prompts.jsonl",
        "CHECKPOINTS": f"{tmp_path}/ck",
        "EXPORTS": f"{tmp_path}/hf",
    }
    words = WAYS[way]
    for name, place in places.items():
        words = words.replace(name, place)
    job = jobs.run(tmp_path / "run", *tiny_flags, *COLOCATED, "--num-rollout", "3", *words.split())
    assert job.code == 0, job.output
    proved(job.run_dir, range(3))
    if way != "evaluated":
        return
    rows = [json.loads(line) for line in (job.run_dir / "eval/metrics.jsonl").open()]
    assert len(rows) == 4, "versions 0 to 3"
    assert pointer(tmp_path / "ck") == 3
    files = [file for n in (1, 2, 3) for file in (tmp_path / "hf" / str(n)).glob("*.safetensors")]
    exports = [load_file(file) for file in files]
    assert len(exports) == 3
    for one, other in zip(exports, exports[1:]):
        assert any(not torch.equal(one[name], other[name]) for name in one)
        assert all(torch.isfinite(tensor).all() for tensor in other.values())
