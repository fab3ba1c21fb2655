"""Trackers, memory and dtypes that a start, a dry run and the doctor judge before anything runs."""

from __future__ import annotations

import json
import re
import shutil
import socket

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from r3train.cli import main
from r3train.config.recipes import recipe_names
from tests.unit.launch.test_preflight import ROOT, start, words


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_cannot_start_is_known_before_anything_starts(
    name, tiny, tmp_path, monkeypatch
):
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = {"wandb": (), "mlflow": ("--mlflow-tracking-uri", address)}[name]
        flags = (f"--use-{name}", *flags)
        refused = start(tiny, *flags, environment={"LOCAL_RANK": "0"})
        assert refused.exit_code == 2, refused.output
        assert refused.output.splitlines()[-1].startswith(f"Error: --use-{name}: ")
        shown = start(tiny, *flags, "--dry-run")
        assert shown.exit_code == 0, shown.output
        assert shown.output.splitlines()[-1].startswith(f"warning: --use-{name}: ")
        assert problems_of_the_doctor(tiny, *flags)[0].startswith(f"machine: --use-{name}: ")


def problems_of_the_doctor(tiny, *flags: str) -> list[str]:
    words = (
        "doctor",
        "--world-size",
        "2",
        "--json",
        "--config",
        str(ROOT / "configs/tiny_cpu.toml"),
    )
    files = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    result = CliRunner().invoke(main, [*words, *files, *flags])
    found = json.loads(result.output[result.output.index("[\n") :])
    return [f"{each['subject']}: {each['text']}" for each in found if each["level"] == "problem"]


def test_a_start_that_the_hosts_memory_cannot_hold_is_refused(tiny):
    ranks = {"LOCAL_WORLD_SIZE": "900000"}
    said = r"the host: [\d.]+ GiB available, about [\d.]+ TiB needed: .* fewer ranks"
    refused = start(tiny, environment=ranks | {"LOCAL_RANK": "0"})
    assert refused.exit_code == 2 and re.search(f"Error: {said}", words(refused)), refused.output
    shown = start(tiny, "--dry-run", environment=ranks)
    assert shown.exit_code == 0 and re.search(f"warning: {said}", words(shown)), shown.output


def test_a_bfloat16_checkpoint_that_trains_in_float32_is_a_warning(tiny, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(narrow, model / "model.safetensors", metadata={"format": "pt"})
    flags, said = ("--hf-checkpoint", str(model), "--dry-run"), "and will train in float32"
    assert said in start(tiny, *flags).output.splitlines()[-1]
    assert said not in start(tiny, *flags, "--bf16").output


def test_each_recipe_says_what_it_is_for():
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["recipes"]).output
    assert all(len(line) <= 80 for line in shown.splitlines())
    for name in recipe_names():
        assert re.search(rf"^{name} +\S+ .*\w", shown, re.MULTILINE), name


@pytest.mark.parametrize("flags, counted", [((), 2), (("--world-size", "4"), 4)])
def test_the_doctor_counts_the_ranks_that_a_recipe_needs(flags, counted, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "r3train.doctor.diagnosis.diagnose",
        lambda config, world_size, *_args, **_kwargs: seen.append(world_size) or [],
    )
    result = CliRunner(env={"WORLD_SIZE": None}).invoke(
        main, ["doctor", *flags, "--config", "tiny_cpu"]
    )
    assert result.exit_code == 0 and seen == [counted], result.output
