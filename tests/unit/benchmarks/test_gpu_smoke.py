"""make gpu-smoke: what it says without a GPU, where it ends, and the table that it writes."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import train_async
from benchmarks import gpu_smoke, gpu_toys
from r3train.cli import SUBCOMMANDS
from r3train.config.options import parse_train_flags
from r3train.families import tiny_model_of
from r3train.families.published import PUBLISHED
from r3train.families.tiny_options import SIZES, TinyOptions
from r3train.launch.gpus import server_gpus


def test_without_a_gpu_every_step_says_not_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu_smoke, "gpu_names", list)
    assert gpu_smoke.main([]) == gpu_smoke.NOT_RUN
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_smoke.STEPS)
    assert all(line.endswith("not run: no CUDA device") for line in lines)


def test_nothing_runs_behind_a_step_that_failed(tmp_path, monkeypatch, capsys):
    ok, two, fails, last = (
        replace(gpu_smoke.STEPS[0], name=name, command=command, num_gpus=num_gpus)
        for name, command, num_gpus in (
            ("ok", "python --version", 1),
            ("two", "python --version", 2),
            ("fails", "python -c 'import sys; sys.exit(7)'", 1),
            ("last", "python --version", 1),
        )
    )
    found = gpu_smoke.outcomes([ok, two, fails, last], 1, tmp_path)
    assert [outcome.word for outcome in found] == ["passed", "not run", "failed", "not run"]
    assert found[1].reason == "needs 2 GPUs, 1 here" and found[3].reason == "fails failed"
    assert "Python 3" in (tmp_path / "ok.log").read_text()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_smoke.BEGIN}\nold\n{gpu_smoke.END}\nafter\n")
    gpu_smoke.write_page(page, found, ["H100"])
    text = page.read_text()
    assert "1 x H100" in text and "| fails | `python -c" in text and "| failed |" in text
    assert "| not run |" in text and "old" not in text and text.endswith("after\n")
    monkeypatch.setattr(gpu_smoke, "gpu_names", lambda: ["H100"])
    monkeypatch.setattr(gpu_smoke, "STEPS", (fails,))
    assert gpu_smoke.main([]) == 1
    monkeypatch.setattr(gpu_smoke, "STEPS", (ok, two))
    assert gpu_smoke.main([]) == gpu_smoke.NOT_RUN
    monkeypatch.setattr(gpu_smoke, "STEPS", (ok,))
    assert gpu_smoke.main([]) == 0


def test_a_job_finds_no_earlier_run_in_its_directory(tmp_path):
    left = tmp_path / "job"
    left.mkdir()
    command = f"bash -c 'test ! -e {left}' --run-dir {left}"
    job = replace(gpu_smoke.STEPS[0], name="another job", command=command)
    assert [outcome.word for outcome in gpu_smoke.outcomes([job], 1, tmp_path)] == ["passed"]


def test_one_gpu_runs_kernels_a_job_its_evidence_variants_figures_and_topologies(tmp_path):
    steps = [replace(step, command="python --version") for step in gpu_smoke.STEPS]
    ran = [o.step.name for o in gpu_smoke.outcomes(steps, 1, tmp_path) if o.word == "passed"]
    assert ran[:5] == ["model", "toys", "doctor", "kernels", "replay"], ran
    assert ran[5:7] == ["colocated", "colocated_evidence"], ran
    toys, figures = "latent delta_nets sinks adapters optimizer", "replay_overhead rollout_rate"
    assert ran[7:] == [*toys.split(), *figures.split(), "topologies"], ran


def independent(name: str, command: str, num_gpus: int) -> gpu_smoke.Step:
    return gpu_smoke.Step(name, command, "", num_gpus, is_independent=True)


def test_independent_steps_run_at_once_each_on_gpus_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # each waits for a file of every other: one after the other would never end
    wait = "touch {own}; until [ -e {other} ]; do sleep 0.1; done; echo $CUDA_VISIBLE_DEVICES"
    one, two = tmp_path / "one", tmp_path / "two"
    steps = [
        independent(own.name, f"bash -c '{wait.format(own=own, other=other)}'", 2)
        for own, other in ((one, two), (two, one))
    ]
    found = gpu_smoke.outcomes(steps, 4, tmp_path / "logs")
    assert [outcome.word for outcome in found] == ["passed", "passed"]
    seen = {(tmp_path / f"logs/{name}.log").read_text().strip() for name in ("one", "two")}
    assert seen == {"0,1", "2,3"}


def test_a_failure_among_independent_steps_ends_what_comes_behind_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    steps = [
        independent("fails", "false", 1),
        independent("fine", "bash -c 'echo $CUDA_VISIBLE_DEVICES'", 1),
        independent("pair", "python --version", 4),
        gpu_smoke.Step("last", "python --version", ""),
    ]
    found = gpu_smoke.outcomes(steps, 2, tmp_path)
    assert [o.word for o in found] == ["failed", "passed", "not run", "not run"]
    assert (tmp_path / "fine.log").read_text().strip() in ("5", "7")


def test_a_list_says_the_commands_and_runs_none(capsys):
    assert gpu_smoke.main(["--list", "--recipe", "olmoe_1b_7b_one_node"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_smoke.STEPS) + 2
    rollouts, training = lines[-2:]
    assert rollouts.endswith("--debug-rollout-only") and "--replay-rollouts" in training


@pytest.mark.parametrize("step", gpu_smoke.recipe_steps("olmoe_1b_7b_one_node", 8))
def test_a_recipes_parts_are_commands_that_parse(step):
    words = shlex.split(step.command)
    assert words[:2] == ["r3train", "train"]
    config = parse_train_flags(words[2:], prog_name="train")
    assert config.rollout.num_rollout == 2 and config.r3_check_enabled


def test_the_page_has_every_step_in_its_order_with_its_gpus_and_minutes():
    page = (Path(gpu_smoke.ROOT) / "docs/run/gpus.md").read_text()
    table = page.partition("| step | GPUs | min |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [tuple(cell.strip() for cell in row.strip("|").split(" | ")[:4]) for row in table]
    expected = [(s.name, str(s.num_gpus), str(s.minutes), s.proves) for s in gpu_smoke.STEPS]
    assert told == expected


def test_prompts_are_lengthened_before_their_question_and_toys_are_built(tiny, tmp_path):
    shutil.copy(tiny / "prompts.jsonl", tmp_path)
    assert gpu_toys.main([str(tmp_path), "--size", "tiny"]) == 0
    short, long = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "long.jsonl")
    )
    for before, after in zip(short, long, strict=True):
        assert len(after["input"].split()) == gpu_toys.PROMPT_TOKENS
        assert after["input"].endswith(before["input"]) and after["label"] == before["label"]
    assert gpu_toys.PROMPT_TOKENS + 1000 <= SIZES["gpu"]["max_position_embeddings"]
    for family in gpu_toys.FAMILIES:
        assert (tmp_path / family / "model/config.json").exists()


def test_the_toys_have_the_head_sizes_for_which_kernels_are_made():
    """FlashMLA has latent attention of these sizes alone."""
    options = replace(TinyOptions(), **SIZES["gpu"], family="moonlight")
    toy = tiny_model_of(options).sizes(options)
    published = json.loads((PUBLISHED / "Moonlight-16B-A3B/config.json").read_text())
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert toy[key] == published[key], key


@pytest.mark.parametrize("step", gpu_smoke.STEPS, ids=lambda step: step.name)
def test_a_step_is_a_command_that_is_there(step):
    program, *words = shlex.split(step.command)
    root = Path(gpu_smoke.ROOT)
    if program == "r3train":
        assert words[0] in SUBCOMMANDS
    elif "train_async.py" in words:
        config = parse_train_flags(
            words[words.index("train_async.py") + 1 :], prog_name="train_async.py"
        )
        assert config.trainer.check_weight_update_equal and config.r3_check_enabled
    elif words[1] == "pytest":
        assert (root / words[2]).is_file()
    else:
        assert (root / f"{words[1].replace('.', '/')}.py").is_file()
    if "--config" in words and program == "r3train":
        parse_train_flags(words[1:], prog_name="doctor")


JOBS = [step for step in gpu_smoke.STEPS if "train_async.py" in step.command]


@pytest.mark.parametrize("step", JOBS, ids=lambda step: step.name)
def test_a_job_is_taken_by_the_dry_run_and_needs_its_gpus_and_no_fewer(step, tiny, tmp_path):
    words = shlex.split(step.command)
    ranks = int(words[words.index("--nproc-per-node") + 1])
    flags = words[words.index("train_async.py") + 1 :]
    config = parse_train_flags(flags, prog_name="train_async.py")
    servers = server_gpus(config, num_ranks=ranks, num_visible=step.num_gpus)
    assert step.num_gpus == max(ranks, *(gpus.stop for gpus in servers))
    model = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    elsewhere = ("--run-dir", str(tmp_path / "run"))  # runs/gpu may hold a run already
    short = ("--rollout-max-response-len", "64")  # the demo's model has 512 positions
    dry = [*flags, *model, *elsewhere, *short, "--dry-run", "--world-size", str(ranks)]
    result = CliRunner().invoke(train_async.main, dry, env={"RANK": None, "WORLD_SIZE": None})
    assert result.exit_code == 0, result.output


def test_a_step_that_is_too_slow_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_smoke, "_TIMEOUT_S", 3)
    slow = replace(gpu_smoke.STEPS[0], name="slow", command="bash -c 'sleep 61 & echo $!; wait'")
    (found,) = gpu_smoke.outcomes([slow], 1, tmp_path)
    assert found.word == "failed" and found.reason.startswith("not done after 3 s")
    child = int((tmp_path / "slow.log").read_text())
    # a killed process may still run for a moment where the machine is busy
    with suppress(psutil.NoSuchProcess):
        ended = psutil.Process(child)
        until = time.monotonic() + 30
        while ended.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, ended.status()
            time.sleep(0.05)
