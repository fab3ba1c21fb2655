"""Every command of the README and of docs/ is run; what cannot be is listed with what covers it.

The commands of a page run in their order, in a directory that has the checkout's files and ``runs/``
of its own.  A command that several pages show runs once.  Those that take up to half an hour run each
by itself, in a copy, for they write pages: ``make test-long``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser as torchrun_parser

import train_async
from r3train.cli import SUBCOMMANDS, main
from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.engine.server import SGLangServer, free_port
from r3train.launch.start.start_ranks import train_command
from tests.e2e import checkouts, docs_commands, jobs
from tests.e2e.docs_commands import PAGES, Kind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KEY = f"{ENGINE_KEY_VARIABLE}={'k' * 32}"
SHORT = ["--num-rollout", "2", "--no-tensorboard"]


@pytest.fixture(scope="module")
def checkout(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to run the pages' commands in, after ``make demo`` has made runs/tiny."""
    directory = checkouts.linked(tmp_path_factory.mktemp("checkout"))
    shutil.copytree(tiny, directory / "runs" / "tiny")
    checkouts.add_qwen3_30b_a3b(directory, tiny)
    return directory


@pytest.fixture(scope="module")
def elsewhere(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose checkpoint is not on this machine, so that no run can hold its sizes against its own."""
    directory = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(tiny / "model", directory / "model")
    log = directory / "sglang.log"
    with SGLangServer(directory / "model", log, return_routed_experts=True) as server:
        server.wait_ready()
        shutil.rmtree(directory / "model")
        yield server.addr


@pytest.fixture(scope="module")
def once() -> set[str]:
    """The commands that have been run."""
    return set()


def environment() -> dict[str, str]:
    return {
        **jobs.environment(),
        "PATH": f"{checkouts.BIN}{os.pathsep}{os.environ['PATH']}",
        # torchrun meets at 29500 unless told otherwise, and other jobs of this machine do too
        "PET_MASTER_PORT": str(free_port("127.0.0.1")),
    }


def run(command: str, checkout: Path, timeout: float = 240) -> str:
    """Run a command as a shell would; its output.  Fails where its exit code is not 0."""
    other = lambda flag: f"{flag[1]} {free_port('127.0.0.1')}"
    command = re.sub(r"(--(?:master-)?port) \d+", other, command)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def dry_run(command: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of ``r3train train ... --dry-run`` or of torchrun's rank 0, which runs in this process.

    Ranks of torchrun would import for ten seconds; other tests start them.
    """
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word in ("r3train", "torchrun"))
    variables = dict(word.split("=", 1) for word in words[:at])
    program, flags = train_command, words[at + 2 :]
    environment = {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None}
    if words[at] == "torchrun":
        args = torchrun_parser().parse_args(words[at + 1 :])
        assert args.training_script == "train_async.py" and args.nnodes == "1:1"
        program, flags = train_async.main, args.training_script_args
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": args.nproc_per_node}
    with monkeypatch.context() as patch:
        patch.chdir(checkout)
        if "PYTHONPATH" in variables:
            patch.syspath_prepend(checkout / variables["PYTHONPATH"])
        done = CliRunner().invoke(program, [*flags, "--dry-run"], env={**variables, **environment})
    assert done.exit_code == 0, f"{command}\n{done.output}"
    return done.output


def serve(command: str, checkout: Path) -> None:
    """Run a server until it answers, and end it."""
    file = checkout / "address"
    command = re.sub(r"--port \d+", "", command) + f" --address-file {file} --log {checkout}/log"
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=checkout, env=environment())
    try:
        deadline = time.monotonic() + 240
        while not file.exists():
            assert server.poll() is None and time.monotonic() < deadline, command
            time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(60)
    assert not file.exists()


def _name(page: Path) -> str:
    return str(page.relative_to(jobs.ROOT))


def commands_of(kinds: set[Kind]) -> Callable:
    """A parameter a page that has a command of these kinds."""
    pages = []
    for page in PAGES:
        of_page = docs_commands.commands(page.read_text(encoding="utf-8"))
        if any(_kind(command) in kinds for command in of_page):
            pages.append(page)
    return pytest.mark.parametrize("page", pages, ids=_name)


def once_each(kind: Kind) -> list[str]:
    """Every command of a kind, once."""
    of_pages = (docs_commands.commands(page.read_text(encoding="utf-8")) for page in PAGES)
    found = (command for commands in of_pages for command in commands)
    return list(dict.fromkeys(command for command in found if _kind(command) is kind))


def _kind(command: str) -> Kind | None:
    try:
        return docs_commands.rule_of(command).kind
    except ValueError:
        return None  # a test of its own says so


@pytest.mark.slow
@pytest.mark.ci
@commands_of({Kind.RUN, Kind.JOB, Kind.DRY, Kind.PLAN})
def test_the_commands_of_a_page_run(page, checkout, once, engine, elsewhere, monkeypatch):
    for command in docs_commands.commands(page.read_text(encoding="utf-8")):
        kind = docs_commands.rule_of(command).kind
        if command in once:
            continue
        once.add(command)
        if kind is Kind.RUN:
            run(command, checkout)
        elif kind is Kind.JOB:
            run(f"{command} {' '.join(SHORT)} --rollout-external-engine-addrs {engine}", checkout)
        elif kind in (Kind.DRY, Kind.PLAN):
            trains = "r3train train" in command or "train_async" in command
            if kind is Kind.PLAN and trains:  # the recipe's servers are elsewhere, or the command's
                if file := re.search(r" --rollout-engines-file (\S+)", command):
                    (checkout / file[1]).write_text(f"{elsewhere}\n")
                else:
                    command = re.sub(r" --rollout-external-engine-addrs \S+", "", command)
                    command += f" --rollout-external-engine-addrs {elsewhere}"
            # a page that binds a server beyond loopback says to export its key
            if trains:
                assert "[model]" in dry_run(f"{KEY} {command}", checkout, monkeypatch)
            else:
                assert "[model]" in run(f"export {KEY}; {command} --dry-run", checkout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@commands_of({Kind.DRY, Kind.NODES, Kind.SERVE})
def test_the_commands_of_a_page_that_train_or_serve_do_so(page, checkout, once, elsewhere):
    for command in docs_commands.commands(page.read_text(encoding="utf-8")):
        kind = docs_commands.rule_of(command).kind
        if f"really {command}" in once:
            continue
        once.add(f"really {command}")
        if kind is Kind.DRY:
            run(f"{command} {' '.join(SHORT)}", checkout)
        elif kind is Kind.NODES:
            here = f"--rdzv-endpoint 127.0.0.1:{free_port('127.0.0.1')}"
            node = re.sub(r"--rdzv-endpoint \S+", here, command) + " --dry-run"
            node = re.sub(r"(--rollout-external-engine-addrs) \S+", rf"\1 {elsewhere}", node)
            others = f"{node} & " * (int(re.findall(r"--nnodes (\d+)", command)[0]) - 1)
            assert "[model]" in run(f"{others}{node} && wait", checkout, timeout=600)
        elif kind is Kind.SERVE:
            serve(command, checkout)
        elif kind is Kind.RUN and "make-tiny-model" in command:
            run(command, checkout)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", once_each(Kind.LONG))
def test_a_command_that_takes_long_runs_as_it_stands_on_its_page(command, tmp_path):
    checkouts.need_make()
    copy = checkouts.copied(tmp_path / "checkout")
    run(f"export PYTHONPATH={copy}; {command}", copy, timeout=7200)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", once_each(Kind.RESOLVED))
def test_what_a_page_installs_for_gpus_goes_together(command, tmp_path):
    """Transformer Engine's PyTorch part has no wheel: without a CUDA toolkit pip cannot even ask it."""
    copy = checkouts.copied(tmp_path / "checkout")
    pins = [pin.replace(",pytorch]", "]") for pin in gpu_pins()]
    asked = command.replace("'.[gpu]'", shlex.join([".", *pins]))
    install = f"{sys.executable} -m pip install --dry-run --ignore-installed --quiet --report -"
    output = run(asked.replace("pip install", install, 1) + " 2>/dev/null", copy, timeout=1800)
    found = {i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(output)["install"]}
    assert f"torch=={found['torch']}" in gpu_pins()
    assert "sglang" in found or "[gpu]" not in command


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_rule_says_what_to_do_with_every_command(page):
    for command in docs_commands.commands(page.read_text(encoding="utf-8")):
        rule = docs_commands.rule_of(command)
        if rule.kind is Kind.ELSEWHERE:
            assert rule.why and docs_commands.is_a_test(rule.covered_by), rule


def test_commands_are_found_and_one_without_a_rule_is_refused():
    page = (
        "text\n\n    r3train frob \\\n        --hard  # really\n\n```\nmake tea\nno command\n```\n"
    )
    page += "```sh\nX=1 anything --at all\n```\n```toml\nmake = 1\n```\n"
    found = docs_commands.commands(page)
    assert found == ["r3train frob --hard", "make tea", "X=1 anything --at all"]
    for command in (found[0], found[2]):
        with pytest.raises(ValueError, match="no rule"):
            docs_commands.rule_of(command)


def test_a_command_that_fails_fails_the_test(checkout):
    with pytest.raises(AssertionError, match="nowhere"):
        run("r3train check-evidence runs/nowhere", checkout)


def test_ci_runs_the_test_command():
    script = (jobs.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = re.findall(r"^make --no-print-directory (test.*)$", script, re.M)
    assert made == ["test", 'test-all ALSO="or ci"']


def gpu_pins() -> list[str]:
    project = tomllib.loads((jobs.ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]["gpu"]


def test_the_gpu_extra_is_there():
    named = re.findall(r"torch==[\d.]+", (jobs.ROOT / "README.md").read_text())
    assert set(named) <= set(gpu_pins())


def test_benchmarks_that_are_named_are_there():
    for page in PAGES:
        for name in re.findall(r"(?<!/)benchmarks[./](\w+)", page.read_text(encoding="utf-8")):
            assert (jobs.ROOT / "benchmarks" / f"{name}.py").is_file(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", [*PAGES, jobs.ROOT / "AGENTS.md"], ids=_name)
def test_what_the_text_names_is_there(page):
    targets = re.findall(r"^([a-z-]+):", (jobs.ROOT / "Makefile").read_text(), re.M)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
    for span in docs_commands.spans(page.read_text(encoding="utf-8")):
        words = span.split()
        if words[0] == "make" and len(words) > 1:
            assert words[1] in targets, span
        if words[0] == "r3train" and len(words) > 1:
            assert words[1] in SUBCOMMANDS, span
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*[a-z0-9](?![-\w])", span):
            assert _is_known(flag), f"{page.name}: {span}"


# flags of other programs that the pages name
_THEIRS = {
    *"--nproc-per-node --nnodes --rdzv-endpoint --max-restarts --standalone --rdzv-backend".split(),
    *"--node-rank --master-addr --master-port --signal --shm-size --exclude-editable".split(),
    *"--no-deps --exclusive --mem --export --batch --gpus --gpus-per-node --gpus-per-task".split(),
    *"--rm --ipc --ulimit --network --device --cap-add --ignore-requires-python --flag".split(),
    *"--requeue --enable-memory-saver --disable-overlap-schedule --moe-runner-backend".split(),
    *"--skip-tokenizer-init --json-model-override-args --enable-return-routed-experts".split(),
    *"--enable-return-indexer-topk --extra-index-url --no-build-isolation".split(),
    "--signals-to-handle",  # torchrun's
}


def _is_known(flag: str) -> bool:
    if flag in _THEIRS or flag.startswith("--sglang-") or flag in _our_flags():
        return True
    scripts = (jobs.ROOT / "benchmarks").glob("*.py")
    return any(f'"{flag}"' in script.read_text(encoding="utf-8") for script in scripts)


@functools.cache
def _our_flags() -> set[str]:
    flags = {"--help", "--help-all", "--version"}
    commands = [train_async.main, *(main.get_command(None, name) for name in SUBCOMMANDS)]
    for command in commands:
        for parameter in command.params:
            flags |= {*parameter.opts, *parameter.secondary_opts}
    return flags
