"""One bit of a checkpoint or of an export flipped, in every kind of file: a start refuses it and names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from r3train.hf_checkpoint import MARKER, check_export
from r3train.loop.rollout_file import BUFFER_FILE
from r3train.verify.tiny import task_prompts
from r3train.trainer.megatron.saved_state import CHECKSUMS, latest_checkpoint, read_checksums
from tests.e2e import jobs
from tests.e2e.test_sft import talk  # noqa: F401 - a fixture

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def flags(talk) -> list[str]:  # noqa: F811
    return [
        *f"--hf-checkpoint {talk / 'model'} --prompt-data {talk / 'talk.jsonl'}".split(),
        *f"--rollout-batch-size {len(task_prompts())} --no-plot".split(),
    ]


@pytest.fixture(scope="module", params=["--no-async-save", "--async-save"])
def written(request, flags, tmp_path_factory) -> Path:
    """A directory with a checkpoint (``saved``) and an export (``hf``) of a job on two ranks."""
    directory = tmp_path_factory.mktemp("written")
    job = jobs.run(
        directory / "run",
        *flags,
        *"--num-rollout 1".split(),
        "--save",
        str(directory / "saved"),
        request.param,
        *f"--save-interval 1 --save-hf {directory / 'hf'}".split(),
        recipe="configs/tiny_sft.toml",
    )
    assert job.code == 0, job.output
    return directory


def flip(path: Path) -> Callable[[], None]:
    """Flip a bit in the middle of a file; returns what undoes it."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return lambda: path.write_bytes(content)


def load(checkpoint: Path, monkeypatch) -> None:
    """Load as the one rank of a group would; a file that passes is not loaded, for there is no actor."""
    from r3train.cpu.device import prepare_device

    prepare_device()
    from r3train.trainer.megatron.checkpoint import load_checkpoint

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    load_checkpoint(None, checkpoint)


def test_every_file_of_a_checkpoint_and_of_an_export_is_checked_when_it_is_loaded(
    written, flags, tmp_path, monkeypatch
):
    checkpoint, export = latest_checkpoint(written / "saved"), written / "hf"
    files = {path.name for path in checkpoint.iterdir()}
    assert files - {CHECKSUMS} == read_checksums(checkpoint).keys() | files & {BUFFER_FILE}
    kinds = {".metadata", "metadata.json", "trainer_state.json", "config.toml"}
    kinds |= {"rng_00000.safetensors", "rng_00001.safetensors"}
    tensors = {name for name in files if name.endswith(".distcp")}
    assert kinds <= files and {name[:4] for name in tensors} == {"__0_", "__1_"}
    for name in sorted(kinds | tensors):
        undo = flip(checkpoint / name)
        with pytest.raises(ValueError, match=f"{checkpoint / name}: ") as raised:
            load(checkpoint, monkeypatch)
        assert "\n" not in str(raised.value) and "damaged" in str(raised.value)
        undo()
    for name in sorted(path.name for path in export.iterdir() if path.name != MARKER):
        undo = flip(export / name)
        with pytest.raises(ValueError, match=f"{export / name}: damaged"):
            check_export(export, weights=True)
        undo()
    check_export(export, weights=True)


# how the files were saved says nothing about who reads them
once = pytest.mark.parametrize("written", ["--no-async-save"], indirect=True, scope="module")


@once
def test_a_start_refuses_a_damaged_file_and_names_it(written, flags, tmp_path):
    checkpoint, export = latest_checkpoint(written / "saved"), written / "hf"
    tensor = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    for number, (place, start) in enumerate(
        [
            (tensor, ("--load", str(written / "saved"))),
            (export / "model-00001-of-00001.safetensors", ("--hf-checkpoint", str(export))),
            (export / "tokenizer.json", ("--hf-checkpoint", str(export))),
        ]
    ):
        undo = flip(place)
        run_dir = tmp_path / f"run{number}"
        job = jobs.run(
            run_dir, *flags, *start, "--num-rollout", "2", recipe="configs/tiny_sft.toml"
        )
        undo()
        assert job.code != 0 and f"{place}: damaged" in " ".join(job.output.split()), job.output
        assert not (run_dir / "metrics.jsonl").exists() or not job.metrics()


# test_one_run.py resumes from one with checksums: there is no note
@once
def test_a_checkpoint_and_an_export_of_before_there_were_checksums_load_with_a_note(
    written, flags, tmp_path
):
    old = tmp_path / "old"
    shutil.copytree(written / "saved", old)
    (latest_checkpoint(old) / CHECKSUMS).unlink()
    job = jobs.run(
        tmp_path / "run",
        *flags,
        "--load",
        str(old),
        *"--num-rollout 2".split(),
        recipe="configs/tiny_sft.toml",
    )
    assert job.code == 0, job.output
    assert f"has no {CHECKSUMS}" in " ".join(job.output.split())
