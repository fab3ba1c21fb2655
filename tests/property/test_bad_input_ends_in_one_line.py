"""Damaged input of every kind ends in success or in one line and exit code 2, never in a traceback.

The cases are drawn from seeds, so that every run has the same ones: 42 of the dry run of the training
command and 300 answers of a server; 1,000 and 5,000 in the slow tests.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

import train_async
from r3train.config import RunConfig
from r3train.config.sources import places
from r3train.engine.answer import Sent, read_answer
from r3train.engine.backend import EngineError, SamplingParams
from r3train.generation import stitch
from r3train.verify.tiny import TinyOptions, build
from r3train.trainer.megatron.saved_state import LATEST, STATE
from tests.contract.test_payloads import ANSWERS, PROMPT, ROUTES

RECIPE = Path(__file__).resolve().parents[2] / "configs/tiny_cpu.toml"
GIGABYTE = 1 << 20  # in the units of getrusage
NUMBERS = (0, -1, 1, 3, 10**9, 10**19, 10**400, -(10**30), 0.0, -0.5, 1e308, 1e-320)
NUMBERS += (float("nan"), float("inf"))
TEXTS = (
    "",
    "x",
    "\ud800",
    "\x1b[2J",
    "\x00",
    "none",
    "a" * 5000,
    "../..",
    "nan",
    "🦀",
    "%s",
    "{% for",
)
ODD = (
    None,
    True,
    False,
    *NUMBERS,
    *TEXTS,
    [],
    [1],
    [[[]]],
    ["x", None],
    {},
    {"a": 1},
    {"": {"": []}},
)
INSERTS = (b"\xff\xfe", b"\x00", b"[", b"{", b'"', b"9" * 5000, b"[" * 3000 + b"]" * 3000)
INSERTS += (b"\\ud800", b"NaN", b"-", b"\xed\xa0\x80", b"\n\n", b"1e999")
FIELDS = list(places(RunConfig).values())


def damaged_bytes(draw: random.Random, content: bytes) -> bytes:
    """Cut a part out, put bytes in, or leave the end out, up to three times."""
    for _ in range(draw.choice((1, 1, 3))):
        at, kind = draw.randrange(len(content) + 1), draw.randrange(3)
        more = (b"", draw.choice(INSERTS), b"")[kind]
        rest = (content[at + draw.randrange(1, 40) :], content[at:], b"")[kind]
        content = content[:at] + more + rest
    return content


def damaged(draw: random.Random, value: Any) -> Any:
    """Replace a value anywhere in tables and lists by an odd one, or take it out."""
    value = copy.deepcopy(value)
    inside, key = None, None
    node = value
    while isinstance(node, (dict, list)) and node and (inside is None or draw.random() < 0.8):
        inside, key = node, draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = inside[key]
    if inside is None:
        return draw.choice(ODD)
    if draw.random() < 0.2:
        del inside[key]
    else:
        inside[key] = draw.choice(ODD)
    return value


def damaged_json(draw: random.Random, file: Path) -> None:
    if draw.random() < 0.3:
        file.write_bytes(damaged_bytes(draw, file.read_bytes()))
    else:
        file.write_text(json.dumps(damaged(draw, json.loads(file.read_text()))))


# each kind damages the files of a directory, and returns flags and variables besides the usual ones
Extra = tuple[list[str], dict[str, str]]


def a_flag(draw: random.Random, directory: Path) -> Extra:
    value = draw.choice(ODD)
    text = value if isinstance(value, str) else json.dumps(value)
    return [draw.choice(FIELDS).flag, text.replace("\x00", "")], {}


def a_recipe(draw: random.Random, directory: Path) -> Extra:
    file = directory / "recipe.toml"
    content = tomllib.loads(RECIPE.read_text())
    place, value = draw.choice(FIELDS), draw.choice(ODD)
    if value is None or value == ["x", None]:  # TOML has no null
        value = [{}]
    content.setdefault(place.section, {})[place.name] = value
    text = tomli_w.dumps(content).encode("utf-8", "surrogatepass")
    file.write_bytes(text if draw.random() < 0.6 else damaged_bytes(draw, RECIPE.read_bytes()))
    return ["--config", str(file)], {}


def a_model_file(draw: random.Random, directory: Path) -> Extra:
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    damaged_json(draw, directory / "model" / draw.choice(names))
    return [], {}


def weights(draw: random.Random, directory: Path) -> Extra:
    file = directory / "model/model.safetensors"
    if draw.random() < 0.3:
        index = {"metadata": {}, "weight_map": {"model.norm.weight": file.name}}
        file = file.with_name("model.safetensors.index.json")
        file.write_text(json.dumps(index))
        damaged_json(draw, file)
        return [], {}
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(damaged(draw, json.loads(content[8:end]))).encode()
    if draw.random() < 0.5:
        file.write_bytes(damaged_bytes(draw, content[:end]) + content[end:])
    else:
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return [], {}


def prompts(draw: random.Random, directory: Path) -> Extra:
    file = directory / "prompts.jsonl"
    row = damaged(draw, {"input": "cat", "label": "fruits", "metadata": {"rm_type": "math"}})
    content = file.read_bytes()
    first = json.dumps(row).encode() + b"\n"
    file.write_bytes(first + content if draw.random() < 0.7 else damaged_bytes(draw, content))
    kinds = ("math", "code", "f1", "gpqa", "dapo", "boxed_math", "gsm8k", "accepted_words")
    return ["--rm-type", draw.choice(kinds)], {}


def a_saved_state(draw: random.Random, directory: Path) -> Extra:
    saved = directory / "saved/iter_0000003"
    saved.mkdir(parents=True)
    (saved.parent / LATEST).write_text("3\n")
    state = {"num_rollouts": 3, "weight_version": 3, "topology": {"world_size": 2}}
    state |= {"run": {"lora": None, "prompt_files": None}, "has_buffer": False}
    (saved / STATE).write_text(json.dumps(state))
    if draw.random() < 0.3:
        (saved.parent / LATEST).write_bytes(damaged_bytes(draw, b"0000003\n"))
    else:
        damaged_json(draw, saved / STATE)
    return ["--load", str(saved.parent)], {}


def the_environment(draw: random.Random, directory: Path) -> Extra:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "R3TRAIN_ENGINE_API_KEY")
    texts = ("two", "", "-1", "1e9", "nan", "\x1b", "é" * 20, "9" * 5000, "3", "0", "\u0663")
    name = draw.choice((*names, "R3_MISMATCH_THRESHOLD", "R3TRAIN_JUDGE_API_KEY"))
    return [], {name: draw.choice(texts)}


KINDS: tuple[Callable[[random.Random, Path], Extra], ...] = (
    a_flag,
    a_recipe,
    a_model_file,
    weights,
    prompts,
    a_saved_state,
    the_environment,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Other ranks than a node's first say nothing for a while."""
    monkeypatch.setattr("r3train.config.options.time.sleep", lambda _: None)


def run_case(seed: int, made: Path, directory: Path) -> None:
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    shutil.copytree(made, directory)
    flags, environment = kind(draw, directory)
    command = [] if "--config" in flags else ["--config", str(RECIPE)]
    command += ["--hf-checkpoint", str(directory / "model")]
    command += ["--prompt-data", str(directory / "prompts.jsonl"), "--use-rollout-routing-replay"]
    command += ["--run-dir", str(directory / "run"), *flags, "--dry-run"]
    environment = {"RANK": "0", "WORLD_SIZE": "2"} | environment
    result = CliRunner().invoke(train_async.main, command, env=environment)
    what = f"seed {seed}, {kind.__name__}, {flags}, {environment}:\n{result.output[-2000:]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), what
    assert result.exit_code in (0, 2) and "Traceback" not in result.output, what
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == (result.exit_code == 2), what
    shutil.rmtree(directory)


def peak() -> int:
    """The most memory that this process has held so far, in KiB; a fork begins anew."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_cases(seeds: range, made: Path, directory: Path, limit: int = GIGABYTE) -> None:
    """Run cases in a fork, in which none may take more than ``limit`` KiB."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            before = peak()
            for seed in seeds:
                run_case(seed, made, directory)
                assert peak() - before < limit, f"seed {seed} took {peak() - before} KiB"
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode(errors="replace"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, errors="replace") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0 and not said, said


def test_damaged_settings_and_files_end_in_one_line(made, tmp_path):
    run_cases(range(42), made, tmp_path / "case")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_1000_damaged_settings_and_files_end_in_one_line_and_take_no_gigabyte(
    first, made, tmp_path
):
    run_cases(range(first, first + 250), made, tmp_path / "case")


def test_a_case_that_takes_memory_or_ends_in_a_traceback_is_named(made, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=r"seed 3 took \d+ KiB"):
        run_cases(range(3, 4), made, tmp_path / "case", limit=0)
    monkeypatch.setattr("r3train.launch.job.dry_run.preflight", lambda *_, **__: {}["gold"])
    with pytest.raises(AssertionError, match="seed 2, a_model_file"):
        run_cases(range(2, 3), made, tmp_path / "other")


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_damaged_answer_of_a_server_is_refused_by_name_or_read(count):
    names = [name for name in sorted(ANSWERS) if "mask" not in name and ANSWERS[name]["output_ids"]]

    def read(answer: Any, name: str) -> None:
        sound = ANSWERS[name]
        ends_by_length = sound["meta_info"]["finish_reason"]["type"] == "length"
        tokens = len(sound["output_ids"]) if ends_by_length else 400
        before = stitch.begin(PROMPT, sample_id=1, group_id=0)
        stops = dict(stop_token_ids=tuple(range(3, 250))) if name == "stop" else {}
        how = SamplingParams(tokens, ignore_eos=name != "stop", **stops)
        request = stitch.next_request(before, how)
        sent = Sent("r.", vocab_size=512, may_abort=True)
        read_answer(answer, request, sent, routes=ROUTES if name != "no_routes" else None)

    def with_id(name: str) -> Any:
        meta = {**ANSWERS[name]["meta_info"], "id": "r."}
        return {**copy.deepcopy(ANSWERS[name]), "meta_info": meta}

    for name in names:
        read(
            with_id(name), name
        )  # a sound one is read: what is refused below is refused for its damage
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        name = draw.choice(names)
        try:
            read(damaged(draw, with_id(name)), name)
        except (EngineError, ValueError) as error:
            assert "sample 1" in str(error), f"seed {seed}: {error}"
            refused += 1
    assert 0.3 * count < refused < 0.95 * count, refused
