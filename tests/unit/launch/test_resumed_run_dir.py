"""A resumed run goes on in its run directory, and nothing of another run is touched."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from r3train.config.options import train_options
from r3train.hf_checkpoint import MARKER
from r3train.launch.job.run_dir import claim_directories, taken_directories
from r3train.loop.rollout_file import BUFFER_FILE, write_samples
from r3train.observe.metrics import read_metrics
from tests.unit.launch.test_preflight import ROOT, saved, start, words


def config_of(tiny: Path, *flags: str):
    model = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    command = train_options(lambda config: config)
    recipe = ("--config", str(ROOT / "configs/tiny_cpu.toml"))
    return command.main([*recipe, *model, *flags], standalone_mode=False)


def claimed(config) -> Path:
    with ExitStack() as claims:
        return claim_directories(config, claims)


OF_ANOTHER = "ck: holds checkpoints of another run (iter_0000003 to iter_0000009)"
EXPORT = "hf: holds the export of another run"
# flags -> what is complained of
STARTS = {
    "--save ck": OF_ANOTHER,
    "--save ck --load other": OF_ANOTHER,
    "--save ck --load ck --load-model-only": OF_ANOTHER,
    "--save ck --load ck": None,
    "--save ck --auto-resume": None,
    "--save empty": None,
    "--load ck": None,
    "--save-hf hf": EXPORT,
    "--save-hf {rollout_id}-hf": "2-hf: holds the export of another run",
    "--save-hf hf --load ck --load-model-only": EXPORT,
    "--save-hf hf --load ck": None,
    "--save-hf fresh": None,
}


@pytest.fixture
def files_of_another(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for directory in ("ck", "other"):
        saved(tmp_path / directory, 3)
        saved(tmp_path / directory, 9)
    for export in ("hf", "2-hf"):
        (tmp_path / export).mkdir()
        (tmp_path / export / MARKER).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("flags", STARTS)
def test_checkpoints_and_exports_of_another_run_are_refused(flags, tiny, files_of_another):
    config = config_of(tiny, *flags.split(), "--num-rollout", "2")
    said = [text for _, text in taken_directories(config, {})]
    assert len(said) == (STARTS[flags] is not None)
    assert all(text.startswith(STARTS[flags]) for text in said)
    # torchrun starts a job again after a failure, with the flags of before
    assert not list(taken_directories(config, {"TORCHELASTIC_RESTART_COUNT": "1"}))


def test_a_start_refuses_them_and_a_dry_run_with_another_directory_does_not(tiny, files_of_another):
    refused = start(tiny, "--dry-run", "--save", "ck", "--save-hf", "hf")
    assert refused.exit_code == 2
    assert OF_ANOTHER in words(refused) and EXPORT in words(refused)
    assert start(tiny, "--dry-run", "--save", "mine", "--save-hf", "my_hf").exit_code == 0


def written(run_dir: Path, name: str, steps) -> None:
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"step": step, "value": f"of {name}"}) + "\n" for step in steps)
    (run_dir / name).write_text("".join(lines))


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def first(tiny, tmp_path, monkeypatch) -> Path:
    """The directory of a run that trained steps 0 to 5 and saved after four, in ck."""
    monkeypatch.chdir(tmp_path)
    run_dir = claimed(config_of(tiny, "--save", "ck"))
    (run_dir / "config.toml").write_text("")
    written(run_dir, "metrics.jsonl", range(6))
    facts = {"run_dir": str(run_dir.resolve()), "save_dir": str(tmp_path / "ck")}
    saved(tmp_path / "ck", 4, **facts)
    return run_dir


@pytest.mark.parametrize("flags", [("--auto-resume",), ("--load", "../{here}/ck")])
def test_a_run_that_resumes_its_own_checkpoint_goes_on_in_its_directory(flags, tiny, first):
    flags = [flag.format(here=Path.cwd().name) for flag in flags]
    assert claimed(config_of(tiny, "--save", "ck", *flags)) == first
    assert [record["step"] for record in read_metrics(first)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "flags",
    [
        ("--load", "ck"),  # and saves nothing
        ("--load", "ck", "--save", "another"),
        ("--save", "ck", "--auto-resume", "--run-dir", "named"),
        ("--save", "copy", "--auto-resume"),
        ("--save", "ck", "--auto-resume"),  # its run directory is gone
    ],
)
def test_any_other_start_has_a_directory_of_its_own(flags, tiny, first):
    shutil.copytree("ck", "copy")
    if flags == ("--save", "ck", "--auto-resume"):
        (first / "metrics.jsonl").unlink()
        assert claimed(config_of(tiny, *flags)) != first
        return
    assert claimed(config_of(tiny, *flags)) != first
    assert steps_in(first / "metrics.jsonl") == list(range(6))


def test_lines_of_steps_that_come_again_are_moved_away_before_anything_is_written(tiny, first):
    for name in ("samples.jsonl", "prompts.jsonl", "eval/metrics.jsonl"):
        written(first, name, [0, 2, 4, 4, 5])
    whole = (first / "samples.jsonl").read_bytes()
    config = config_of(tiny, "--save", "ck", "--auto-resume")
    for _ in range(2):  # a second start finds nothing to move
        claimed(config)
        for name, kept, moved in (
            ("metrics.jsonl", [0, 1, 2, 3], [4, 5]),
            ("samples.jsonl", [0, 2], [4, 4, 5]),
            ("prompts.jsonl", [0, 2], [4, 4, 5]),
            # version 4 is the checkpoint's
            ("eval/metrics.jsonl", [0, 2, 4, 4], [5]),
        ):
            assert steps_in(first / name) == kept
            assert steps_in(first / "superseded" / name) == moved
    both = [(first / at / "samples.jsonl").read_bytes() for at in ("", "superseded")]
    assert b"".join(both) == whole
    # with no checkpoint yet all steps come again
    shutil.rmtree("ck")
    claimed(config_of(tiny, "--save", "ck", "--auto-resume", "--run-dir", str(first)))
    assert not (first / "metrics.jsonl").read_text()


def test_a_group_that_is_played_again_has_one_fate(tiny, first):
    groups = [{"group_id": 7, "prompt_id": "p7", "attempt": 0, "places": []}]
    facts = {"next_step": 4, "next_group": 10, "groups": groups}
    write_samples(Path("ck/iter_0000004") / BUFFER_FILE, [], facts)
    told = [(3, 3), (6, 4), (7, 4), (9, 4), (10, 4), (11, 5)]  # group, step
    lines = [json.dumps({"group_id": g, "outcome": "trained", "step": s}) for g, s in told]
    (first / "outcomes.jsonl").write_text("".join(line + "\n" for line in lines))
    claimed(config_of(tiny, "--save", "ck", "--auto-resume"))
    left = [json.loads(line)["group_id"] for line in (first / "outcomes.jsonl").open()]
    assert left == [3, 6, 9], "6 and 9 were dropped before the save, and do not come again"
    both = [(first / at / "outcomes.jsonl").read_text() for at in ("", "superseded")]
    assert sorted("".join(both).splitlines()) == sorted(lines)
