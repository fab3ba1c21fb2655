"""Mistakes of a first week: each is one line and exit code 2, said once, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.launch.test_preflight import ROOT, saved, start, with_prompts

RECIPE = ROOT / "configs/tiny_cpu.toml"
CAT = {"input": "cat", "label": ["cat"]}
TOOL = "tests.e2e.tool_calculator:ToolCalculator"
GUEST, EXITS = "tests.unit.faulty_user_code:", "tests.unit.exits_at_import"
PLUGS = ("--custom-rm-path", "--environment", "--advantage-estimator", "--policy-loss")
# given the demo's files and a directory -> flags
Make = Callable[[Path, Path], list[str]]


def flags(*words: str) -> Make:
    return lambda tiny, directory: list(words)


def rows(*records: dict, more: tuple[str, ...] = ()) -> Make:
    return lambda tiny, directory: [*with_prompts(tiny, directory, *records), *more]


def text(name: str, content: str, *words: str) -> Make:
    """A file of this content; its path takes the place of FILE in the flags."""

    def make(tiny: Path, directory: Path) -> list[str]:
        path = directory / name
        path.write_text(content)
        return [word.replace("FILE", str(path)) for word in words]

    return make


def recipe(old: str, new: str) -> Make:
    """The demo's recipe with a mistake in it."""
    content = RECIPE.read_text()
    assert old in content
    return text("mistaken.toml", content.replace(old, new), "--config", "FILE")


def model(change: Callable[[Path], None]) -> Make:
    """A copy of the checkpoint that was changed."""

    def make(tiny: Path, directory: Path) -> list[str]:
        copy = Path(shutil.copytree(tiny / "model", directory / "model"))
        change(copy)
        return ["--hf-checkpoint", str(copy)]

    return make


def keys(name: str, **changed: object) -> Make:
    """A copy of the checkpoint whose JSON file has other values."""

    def change(copy: Path) -> None:
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(content | changed))

    return model(change)


def cut(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def earlier_run(tiny: Path, directory: Path) -> list[str]:
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')
    return ["--run-dir", str(directory)]


def damaged_checkpoint(tiny: Path, directory: Path) -> list[str]:
    saved(directory, num_rollouts=-5)
    return ["--load", str(directory)]


def twice(tiny: Path, directory: Path) -> list[str]:
    return ["--prompt-data", str(tiny / "prompts.jsonl"), str(tiny / "prompts.jsonl@[0:3]")]


def over_the_model(tiny: Path, directory: Path) -> list[str]:
    return ["--save-hf", str(tiny / "model")]


# name -> (how it is made, a part of the line that says so)
MISTAKES: dict[str, tuple[Make, str]] = {
    # settings and their files
    "a misspelt flag": (flags("--num-rollouts", "3"), "--num-rollout"),
    "a flag of another trainer": (flags("--use-kl-loss"), "Here it is kl_loss_coef above 0"),
    "turns, and a rollout ahead": (flags("--colocate"), "needs --max-weight-staleness 0 (it is 1)"),
    "a number that is none": (flags("--num-rollout", "many"), "num-rollout"),
    "a number out of range": (flags("--num-rollout", "0"), "num-rollout"),
    "NaN": (flags("--eps-clip", "nan"), "--eps-clip"),
    "a misspelt key": (recipe("num_rollout = 60", "num_rolout = 60"), "num_rolout"),
    "a key in another section": (recipe("[data]", "[data]\nlr = 1.0"), "lr"),
    "a file that is no TOML": (text("a.toml", "[model", "--config", "FILE"), "a.toml"),
    "a recipe that is not there": (flags("--config", "nowhere.toml"), "nowhere.toml"),
    "no reward": (recipe('rm_type = "accepted_words"', ""), "--rm-type is required"),
    "ranks that torchrun did not start": (flags("--world-size", "4"), "has started 2 ranks"),
    "memory of no device": (flags("--record-memory-history"), "none is visible here"),
    # parallel layouts
    "EP above the ranks": (flags("--expert-model-parallel-size", "4"), "world size 2"),
    "CP above the ranks": (flags("--context-parallel-size", "4"), "world size 2"),
    "sequence parallel only": (
        flags("--sequence-parallel"),
        "--tensor-model-parallel-size above 1",
    ),
    # the batch
    "a batch that does not divide": (flags("--global-batch-size", "7"), "global_batch_size 7"),
    "room for no sample": (flags("--max-tokens-per-gpu", "9"), "max_tokens_per_gpu 9"),
    "a context beyond the model's": (
        flags("--rollout-max-context-len", "100000"),
        "exceeds the model's max_position_embeddings",
    ),
    # what Megatron must not be told
    "another loss": (
        flags("--transformer-override", "calculate_per_token_loss=false"),
        "the actor's loss is a sum",
    ),
    "dropout": (flags("--transformer-override", "hidden_dropout=0.1"), "hidden_dropout"),
    "other layers": (flags("--transformer-override", "num_layers=2"), "set --hf-checkpoint"),
    "a misspelt override": (
        flags("--transformer-override", "moe_router_topkk=1"),
        "no field of the installed Megatron",
    ),
    # what SGLang must not be told
    "a misspelt server flag": (flags("--sglang-foo", "3"), "--sglang-foo"),
    "another model for the server": (flags("--sglang-model-path", "x"), "model_path"),
    "weights that are not loaded": (flags("--sglang-load-format", "dummy"), "load_format"),
    "quantized routes": (flags("--sglang-quantization", "fp8"), "quantization"),
    "a server without routes": (
        flags("--sglang-enable-return-routed-experts", "false"),
        "enable_return_routed_experts",
    ),
    "a cache that loses routes": (flags("--sglang-enable-hicache", "true"), "hierarchical_cache"),
    # sampling
    "top-p without its tokens": (flags("--rollout-top-p", "0.9"), "needs --rollout-top-k"),
    "top-k 0": (flags("--rollout-top-k", "0"), "expected -1 (no limit) or a number"),
    "greedy by temperature": (flags("--rollout-temperature", "1e-7"), "greedy decoding"),
    "greedy at another temperature": (
        flags("--rollout-top-k", "1", "--rollout-temperature", "0.7"),
        "needs --rollout-temperature 1 (it is 0.7)",
    ),
    "a stop text that is no token": (
        flags("--rollout-stop", "cat dog"),
        "--rollout-stop 'cat dog'",
    ),
    "an update that retracts": (
        flags("--pause-generation-mode", "retract"),
        "use in_place or abort",
    ),
    # the checkpoint
    "no checkpoint": (flags("--hf-checkpoint", "nowhere"), "nowhere"),
    "an unknown family": (keys("config.json", model_type="jamba"), "jamba"),
    "layers for all memory": (keys("config.json", num_hidden_layers=10**9), "num_hidden_layers"),
    "weights that were cut off": (model(cut), "model.safetensors"),
    "no weights": (model(lambda m: (m / "model.safetensors").unlink()), "safetensors"),
    "no tokenizer": (model(lambda m: (m / "tokenizer.json").unlink()), "tokenizer"),
    "an end token that is none": (keys("generation_config.json", eos_token_id=64), "not in 0..63"),
    "no reference": (
        flags("--kl-loss-coef", "0.1", "--ref-load", "nowhere"),
        "--ref-load: nowhere: no such checkpoint directory\n",
    ),
    # prompts
    "no prompts": (flags("--prompt-data", "missing.jsonl"), "missing.jsonl: no such prompt file"),
    "a line that is no JSON": (
        text("p.jsonl", "{no", "--prompt-data", "FILE"),
        "p.jsonl:1:2: not JSON",
    ),
    "a key that is not there": (flags("--input-key", "prompt.text"), "key prompt.text is missing"),
    "an empty prompt": (rows({"input": "", "label": "x"}), "the prompt is empty"),
    "messages without a template": (
        rows({"input": [{"role": "user", "content": "cat"}], "label": ["cat"]}),
        "chat messages need --apply-chat-template",
    ),
    "a template that is not there": (flags("--apply-chat-template"), "chat template"),
    "words of another tokenizer": (rows({"input": "zzz", "label": ["a"]}), "unknown token"),
    "prompts that are too long": (
        rows({"input": "cat " * 600, "label": ["cat"]}, more=("--overlong-prompts", "error")),
        "jsonl:1: the prompt has 600 tokens",
    ),
    "a prompt that is read twice": (twice, "is read twice"),
    # rewards and environments
    "an unknown reward": (flags("--rm-type", "no_such_reward"), "no_such_reward"),
    "a label of another kind": (rows(CAT, CAT | {"label": 3}), "accepted_words needs a label"),
    "a reward of other arguments": (
        flags("--rm-type", "tests.unit.launch.test_preflight:of_two_arguments"),
        "found a function (prompt, response_text)",
    ),
    "a reward without its server": (flags("--rm-type", "remote_rm"), "--rm-url"),
    "tools that no prompt shows": (
        rows({"input": "cat", "label": 3}, more=("--environment", TOOL)),
        "with --apply-chat-template only",
    ),
    "a reward that Python does not find": (
        flags("--custom-rm-path", "not_to_be_found:share"),
        "cannot import not_to_be_found: its directory must be the working directory or in PYTHONPATH",
    ),
    "a reward by the name of its file": (
        flags("--custom-rm-path", "rewards.py:share"),
        "--custom-rm-path rewards.py:share: a file is named without .py, rewards:share",
    ),
    "a label's key that no row has": (
        flags("--custom-rm-path", "tests.unit.reward_functions:half", "--label-key", "anwser"),
        "no row has the key anwser (--label-key)",
    ),
    # code of the user
    **{
        f"a module that exits, {flag}": (
            flags(flag, f"{EXITS}:f"),
            f"{flag} {EXITS}:f: cannot import {EXITS}: raised SystemExit: 0",
        )
        for flag in PLUGS
    },
    "a loss that exits": (
        flags("--policy-loss", f"{GUEST}loss_exits"),
        f"--policy-loss {GUEST}loss_exits: on rows of a meta device: raised SystemExit: 0",
    ),
    "a reward's check that exits": (
        flags("--custom-rm-path", f"{GUEST}one"),
        f"reward {GUEST}one: raised SystemExit: 0",
    ),
    "an environment that fails": (
        flags("--environment", f"{GUEST}Fails"),
        f"prompts.jsonl:1: --environment {GUEST}Fails: raised KeyError: 'gold'",
    ),
    "an environment whose error has no text": (
        flags("--environment", f"{GUEST}FailsMutely"),
        f"--environment {GUEST}FailsMutely: raised _Mute: a _Mute without a str (RuntimeError)",
    ),
    "an environment that exits": (
        flags("--environment", f"{GUEST}Exits"),
        f"--environment {GUEST}Exits: raised SystemExit: 0",
    ),
    "an environment of odd tools": (
        flags("--environment", f"{GUEST}OddTools"),
        "OddTools.tools: raised TypeError: 'int' object is not iterable",
    ),
    # directories
    "a directory that holds a run": (earlier_run, "holds a run already"),
    "a directory that cannot be made": (flags("--save", "/proc/nothing"), "cannot be made"),
    "an export over the model": (over_the_model, "would replace --hf-checkpoint"),
    "a damaged checkpoint": (damaged_checkpoint, "num_rollouts is -5"),
    "saves without a place": (flags("--save-interval", "2"), "--save-interval 2 needs --save"),
}


class Ended(Exception):
    """torchrun ends the rank."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_said_once_before_anything_starts(
    name, tiny, tmp_path, monkeypatch, capfd
):
    def not_now(*_a, **_k):
        raise AssertionError("something was started")

    monkeypatch.setattr("r3train.trainer.megatron.topology.init_distributed", not_now)
    monkeypatch.setattr("r3train.engine.server.SGLangServer.start", not_now)
    (tmp_path / "made").mkdir()
    make, said = MISTAKES[name]
    given = make(tiny, tmp_path / "made")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = start(tiny, *given, environment={"LOCAL_RANK": "0"})
    assert result.exit_code == 2, result.output
    *_, line = result.output.partition("Error: ")
    assert said in line and len(line.strip().splitlines()) == 1, result.output
    assert "Traceback" not in result.output + "".join(capfd.readouterr())
    assert not list((tmp_path / "here").iterdir()), "nothing was made"

    def ended(_seconds):
        raise Ended

    # the node's other rank finds the same and is ended before it speaks, or leaves it to rank 0
    monkeypatch.setattr("r3train.config.options.time.sleep", ended)
    other = start(tiny, *given, "--dry-run", environment={"RANK": "1", "LOCAL_RANK": "1"})
    assert isinstance(other.exception, Ended) or other.exit_code == 0, other.output
    assert "Error: " not in other.output


def test_the_same_command_without_a_mistake_is_taken(tiny):
    assert start(tiny, "--dry-run").exit_code == 0
    assert len(MISTAKES) >= 55
