"""``r3train convert`` up to the model: tests/e2e/test_sft.py compares the weights that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config.options import parse_train_flags
from r3train.launch.job.resume import adapter_facts
from r3train.trainer.megatron.saved_state import LATEST, STATE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def saved(tiny, tmp_path) -> Path:
    """A directory of --save with all but the tensors of its checkpoint."""
    checkpoint = tmp_path / "saved" / "iter_0000007"
    save(checkpoint, tiny)
    (tmp_path / "saved" / LATEST).write_text("7\n")
    return tmp_path / "saved"


def save(checkpoint: Path, tiny: Path, *flags: str, run: dict = {}) -> None:
    config = parse_train_flags(
        [
            "--config",
            str(ROOT / "configs/tiny_cpu.toml"),
            *flags,
            "--hf-checkpoint",
            str(tiny / "model"),
            "--prompt-data",
            str(tiny / "prompts.jsonl"),
        ],
        prog_name="train",
    )
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.toml").write_text(config.to_toml())
    state = {"num_rollouts": 7, "weight_version": 7, "topology": {"world_size": 2}, "run": run}
    (checkpoint / STATE).write_text(json.dumps(state))


def convert(*words: object):
    result = CliRunner().invoke(main, ["convert", *map(str, words)], env={"RANK": None})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("which", [".", "iter_0000007"])
def test_an_export_replaces_nothing_else_whichever_way_the_checkpoint_is_named(
    saved, which, tmp_path
):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/thesis.tex").touch()
    code, output = convert(saved / which, tmp_path / "{rollout_id}")
    assert code == 2 and "holds something that is no earlier export" in output, output


def test_a_pointer_to_no_checkpoint_is_a_message(saved, tmp_path):
    (saved / LATEST).write_text("8\n")
    code, output = convert(saved, tmp_path / "model")
    assert code == 2 and "says '8', but there is no whole checkpoint of that name" in output, output


def test_adapters_are_merged_onto_their_own_base_alone(saved, tiny, tmp_path):
    at = saved / "iter_0000007"
    rank = ("--lora-rank", "4")
    save(at, tiny, *rank)
    facts = adapter_facts(parse_train_flags(["--config", str(at / "config.toml")], prog_name="t"))
    save(at, tiny, *rank, run={"lora": facts | {"base": "0" * 64}})
    code, output = convert(saved, tmp_path / "model")
    assert code == 2 and "its adapters belong to another base than --hf-checkpoint" in output


def test_settings_of_another_device_build_the_model_here(saved, tiny, tmp_path):
    """The tensors alone are missing, which is found once the model is built."""
    save(saved / "iter_0000007", tiny, "--distributed-backend", "nccl", "--attention-backend", "te")
    code, output = convert(saved, tmp_path / "model")
    assert code == 2 and ".metadata: refused: FileNotFoundError" in output, output


def test_code_that_a_checkpoint_names_is_not_imported(saved, tiny, tmp_path):
    """The tensors alone are missing: the model has been built by then, with its loss."""
    written = tmp_path / "ran"
    (tmp_path / "evil_of_a_checkpoint.py").write_text(
        f"open({str(written)!r}, 'w').close()\n\ndef loss(*_): ...\n"
    )
    at = saved / "iter_0000007"
    code = "evil_of_a_checkpoint:loss"
    save(at, tiny, "--policy-loss", code, "--advantage-estimator", code, "--environment", code)
    done = subprocess.run(
        [sys.executable, "-m", "r3train.cli", "convert", str(saved), str(tmp_path / "model")],
        env={name: value for name, value in os.environ.items() if name != "RANK"}
        | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and ".metadata: refused: FileNotFoundError" in done.stderr, done
    assert not written.exists()
