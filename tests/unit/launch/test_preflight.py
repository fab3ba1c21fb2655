"""Bad input ends with a clear error before any server starts: the whole command, up to that point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import train_async

ROOT = Path(__file__).resolve().parents[3]


def start(tiny: Path, *flags: str, world_size: int = 2):
    """Run the command as torchrun's rank 0 would; it must not get as far as joining the ranks."""
    return CliRunner().invoke(
        train_async.main,
        [
            *("--config", str(ROOT / "configs/tiny_cpu.toml"), "--use-rollout-routing-replay"),
            *("--hf-checkpoint", str(tiny / "model")),
            *("--prompt-data", str(tiny / "prompts.jsonl")),
            *flags,
        ],
        env={"RANK": "0", "WORLD_SIZE": str(world_size)},
    )


def test_good_input_passes_the_dry_run_and_prints_the_resolved_config(tiny):
    result = start(tiny, "--dry-run", "--lr", "0.5")
    assert result.exit_code == 0, result.output
    assert "lr = 0.5" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2"),
        (json.dumps({"label": "x"}), "input"),
        (json.dumps({"input": "", "label": "x"}), "empty"),
        (json.dumps({"input": "cat " * 600, "label": "x"}), "tokens"),
    ],
)
def test_a_bad_prompt_names_file_and_line(line, message, tiny, tmp_path):
    good = (tiny / "prompts.jsonl").read_text().splitlines()[0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{good}\n{line}\n")
    result = start(tiny, "--prompt-data", str(prompts))
    assert result.exit_code == 2
    assert str(prompts) in result.output and "2" in result.output and message in result.output


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (["--prompt-data", "missing.jsonl"], 2, "missing.jsonl: no such prompt file"),
        (["--num-rollout", "0"], 2, "num-rollout"),
        (["--num-rollouts", "3"], 2, "--num-rollout"),
        (["--hf-checkpoint", "nowhere"], 2, "nowhere"),
        (["--tensor-model-parallel-size", "3", "--sequence-parallel"], 2, "world size 2"),
        (["--expert-model-parallel-size", "3"], 3, "experts"),
        (["--transformer-override", "moe_router_fusion=true"], 2, "moe_router_fusion"),
        (["--sglang-enable-return-routed-experts", "false"], 2, "routed"),
        (["--rm-type", "no_such_reward"], 2, "no_such_reward"),
    ],
)
def test_a_bad_setting_is_named(flags, world_size, message, tiny):
    result = start(tiny, *flags, world_size=world_size)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_a_dense_checkpoint_is_refused_with_r3(dense):
    result = start(dense)
    assert result.exit_code == 2 and "expert" in result.output


def test_all_faults_are_told_at_once(tiny):
    result = start(tiny, "--rm-type", "nothing", "--sglang-foo", "3", world_size=3)
    assert result.exit_code == 2
    for fault in ("world size 3 does not divide", "--sglang-foo", "--rm-type"):
        assert fault in result.output


@pytest.mark.parametrize("backend", ["auto", "te", "local"])
def test_a_cuda_device_without_transformer_engines_torch_part_is_refused(
    backend, tiny, tmp_path, monkeypatch
):
    # installed without its part for torch, as pip leaves it where that part was not compiled
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--dry-run", "--attention-backend", backend]
    assert start(tiny, *flags).exit_code == 0  # a login node has no device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = start(tiny, *flags)
    assert result.exit_code == 2, result.output
    named = "hide the device" if backend == "local" else "transformer_engine.pytorch"
    assert f"--attention-backend {backend}" in result.output and named in result.output
