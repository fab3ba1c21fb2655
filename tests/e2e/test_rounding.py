"""Jobs whose server rounds as GPUs do (``rounding_server``): sound ones go on, and a decode that keeps old weights ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e import jobs
from tests.e2e.scripted_agent import WAITS_FOR
from tests.e2e.test_agents_in_every_mode import flags_of, use_template

from r3train.audit.audit_run import audit_run
from r3train.verify.tiny import build, TinyOptions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
SERVER = Path(__file__).parent / "rounding_server"
NAMES = ("ROUNDING_EPS", "ROUNDING_SEED", "STALE_DECODE")
# 0.018 nats on average, and other experts in some per cent of the decoded rows
EPS = "1e-1"


def run(run_dir: Path, tiny_flags, steps: int, *flags: str, **variables: str) -> jobs.Job:
    python_path = f"{SERVER}:{jobs.ROOT}"
    flags = (*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", str(steps), *flags)
    return jobs.run(
        run_dir,
        *flags,
        "--rollout-server-env",
        *NAMES,
        timeout=1000,
        env={"PYTHONPATH": python_path, **variables},
    )


def sound(job: jobs.Job, steps: int) -> None:
    """The job went to its end, and nothing was near it."""
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert metrics[-1]["step"] == steps - 1
    sums = [
        max(m.get(f"{claim}/suspect") or 0 for m in metrics)
        for claim in ("served", "recheck", "agreement")
    ]
    gaps = [m["served/gap_mean"] for m in metrics if "served/gap_mean" in m]
    print(f"served, recheck, agreement {sums}; {min(gaps):.3g} to {max(gaps):.3g} nats")
    assert max(sums) < 5
    assert audit_run(job.run_dir).verdict in ("passed", "suspect")


def test_a_server_that_rounds_by_its_batches_ends_no_run(tmp_path, tiny_flags):
    job = run(tmp_path / "run", tiny_flags, 16, "--r3-recheck-share", "0.3", ROUNDING_EPS=EPS)
    sound(job, 16)
    assert job.metrics()[0]["served/gap_mean"] > 5e-3


MODES = {
    "in turn": ["--max-weight-staleness", "0"],
    "two servers": ["--rollout-num-engines", "2"],
    "in place": "--pause-generation-mode in_place --max-weight-staleness 4 --rollout-max-response-len 64"
    " --lr 2e-3".split(),
    "colocated": ["--colocate", "--max-weight-staleness", "0"],
    "LoRA": ["--lora-rank", "4", "--lr", "1e-3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_sixty_updates_end_no_run(mode, tmp_path, tiny_flags):
    job = run(tmp_path / "run", tiny_flags, 60, *MODES[mode], ROUNDING_EPS=EPS, ROUNDING_SEED="pid")
    sound(job, 60)


@pytest.mark.slow
def test_a_run_is_resumed_on_a_server_that_rounds_otherwise(tmp_path, tiny_flags):
    save = ("--save", str(tmp_path / "ck"), "--auto-resume")
    sound(run(tmp_path / "exact", tiny_flags, 3, *save), 3)
    job = run(tmp_path / "rounding", tiny_flags, 12, *save, ROUNDING_EPS=EPS)
    sound(job, 12)
    assert "another machine" in " ".join(job.output.split())


@pytest.mark.slow
def test_agents_on_a_server_that_rounds_end_no_run(tmp_path):
    build(tmp_path, TinyOptions(), force=True)
    use_template(tmp_path / "model")
    waits_for = {WAITS_FOR: str(tmp_path / "run" / "metrics.jsonl")}
    job = run(tmp_path / "run", flags_of(tmp_path), 30, ROUNDING_EPS=EPS, **waits_for)
    sound(job, 30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, eps", [("float32", EPS), ("bfloat16", "0")])
def test_answers_of_a_thousand_tokens_end_no_run(dtype, eps, tmp_path, tiny_flags):
    build(tmp_path, TinyOptions(max_position_embeddings=2048), force=True)
    flags = (
        f"--hf-checkpoint {tmp_path / 'model'} --rollout-max-response-len 1000 --rollout-ignore-eos"
    )
    flags += " --rollout-batch-size 2 --n-samples-per-prompt 4 --r3-recheck-share 0.5 --max-tokens-per-gpu 4096"
    more = ["--bf16"] if dtype == "bfloat16" else []
    sound(run(tmp_path / "run", tiny_flags, 12, *flags.split(), *more, ROUNDING_EPS=eps), 12)


@pytest.mark.slow
@pytest.mark.parametrize("lr", ["1e-6", "1e-5", "5e-4"])
def test_long_answers_in_bfloat16_end_no_run(lr, tmp_path, tiny_flags):
    flags = "--bf16 --rollout-max-response-len 300 --n-samples-per-prompt 8 --r3-recheck-share 0.5".split()
    sound(run(tmp_path / "run", tiny_flags, 14, *flags, "--lr", lr), 14)


def test_a_decode_that_keeps_the_weights_of_the_start_is_found_by_canaries_alone(
    tmp_path, tiny_flags
):
    flags = "--r3-recheck-share 0 --lr 1e-4 --lr-warmup-iters 0".split()
    job = run(tmp_path / "run", tiny_flags, 20, *flags, STALE_DECODE="1")
    assert job.code != 0, job.output
    assert "not served: DECODED: server 0" in " ".join(job.output.split())
    suspects = [m["served/suspect"] for m in job.metrics()]
    print(f"ended at update {len(suspects) - 1}: {suspects}")
    assert suspects[-1] >= 5 and len(suspects) <= 12
    assert audit_run(job.run_dir).claims["served"] == "failed"
