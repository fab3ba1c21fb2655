"""One tiny checkpoint and one SGLang server for all jobs that do not test the server's own life."""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3train.engine.server import SGLangServer
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import jobs
from tests.e2e.live_jobs import output, running, wait_for
from tests.e2e.sglang_support import make_model
from tests.unit.observe.test_prometheus import scraped


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint and task."""
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture(scope="session")
def tiny_flags(tiny: Path) -> list[str]:
    """Flags that give a job the tiny model and its prompts, and keep it short."""
    return [
        *f"--hf-checkpoint {tiny / 'model'} --prompt-data {tiny / 'prompts.jsonl'}".split(),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --no-plot".split(),
        *jobs.FEW_ROWS,
        "--no-tensorboard",
    ]


@pytest.fixture(scope="session")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with routed experts; jobs bring it to their own weights first."""
    log = tmp_path_factory.mktemp("engine") / "sglang.log"
    with SGLangServer(tiny / "model", log, return_routed_experts=True) as server:
        server.wait_ready()
        yield server.addr


@pytest.fixture(scope="session")
def served_flags(tiny_flags, engine) -> list[str]:
    """Flags of the tiny model's jobs that share that server."""
    return [*tiny_flags, "--rollout-external-engine-addrs", engine]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints, a and b, of one shape and other weights."""
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / name, seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="session")
def model_server(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """A server of the first of ``models``; tests bring it to their own weights first."""
    log = tmp_path_factory.mktemp("model_server") / "sglang.log"
    with SGLangServer(models[0], log, return_routed_experts=True, start_timeout_s=200) as server:
        yield server


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, tiny_flags, served_flags) -> jobs.Job:
    """Four asynchronous steps with everything on, their rollouts dumped and the last weights exported."""
    directory = tmp_path_factory.mktemp("recorded")
    run_dir, toy = directory / "run", directory / "toy.jsonl"
    toy.write_text("".join(Path(tiny_flags[3]).read_text().splitlines(keepends=True)[:5]))
    flags = (
        *served_flags,
        *jobs.RECORDED_FLAGS,
        *"--check-weight-update-equal --r3-recheck-share 1 --dump-rollouts".split(),
        *f"--save-hf {directory / 'hf'} --metrics-port 0 --peak-tflops 0.5".split(),
        *f"--eval-prompt-data toy {toy} --eval-interval {jobs.RECORDED}".split(),
    )
    seen: dict[int, dict[str, float]] = {}

    def is_over() -> bool:
        """Read the port; the run is over where nobody answers any more."""
        if not (found := re.search(r"metrics: (\S+/metrics)", output(run_dir))):
            return False
        try:
            numbers = scraped(found[1])
        except (urllib.error.URLError, ConnectionError):
            return bool(seen)
        if (step := int(numbers.get("r3train:step", -1))) >= 0:
            seen[step] = numbers
        return step == jobs.RECORDED - 1

    with running(run_dir, *flags) as job:
        wait_for(is_over, job, run_dir)
        code = job.wait(timeout=400)
    return jobs.Job(code, output(run_dir), run_dir, seen)


@pytest.fixture(scope="session")
def replay_flags(tiny_flags, recorded) -> list[str]:
    """Flags that train the recorded rollouts without a server, as they were trained."""
    where = str(recorded.run_dir / "rollouts")
    return [*tiny_flags, *jobs.RECORDED_FLAGS, "--replay-rollouts", where]


@pytest.fixture(scope="session")
def replayed(tmp_path_factory, replay_flags) -> jobs.Job:
    """The recorded rollouts trained without a server, with an asynchronous save after each."""
    directory = tmp_path_factory.mktemp("replayed")
    return jobs.run(
        directory / "run",
        *replay_flags,
        "--save",
        str(directory / "ck"),
        *"--save-interval 1".split(),
        *f"--async-save --save-keep-last 2 --save-hf {directory / 'hf'}".split(),
    )
