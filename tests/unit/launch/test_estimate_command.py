"""``r3train estimate``: from config.json only, and the topologies of so many GPUs that fit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags
from r3train.families.published import PUBLISHED
from r3train.launch.estimate import estimate_lines, topology_search
from r3train.launch.estimate.memory_use import Model
from r3train.config.recipes import recipe_path
from r3train.launch.estimate.topology_search import fullest_rank, search

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["estimate", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def of(name: str, model: str, **fields) -> tuple[RunConfig, Model]:
    config = RunConfig.from_toml(recipe_path(name), fields)
    return config, Model(read_hf_facts(PUBLISHED / model), config.lora)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A directory without models, prompts and recipes."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_recipe_is_named_as_other_commands_take_it():
    words = ("--gpus", 8, "--gpu-memory-gb", 80)
    assert run("--config", "olmoe_1b_7b_one_node", *words) == run("olmoe_1b_7b_one_node", *words)


def test_a_bare_name_and_two_numbers_are_enough():
    output = run("qwen3_30b_a3b", "--gpus", 8, "--gpu-memory-gb", 80)
    lines = output.splitlines()
    assert "models/Qwen3-30B-A3B: not here; Qwen3-30B-A3B's published config.json" in lines[0]
    assert "30.5 billion parameters, 29.0 of experts, 56.9 GiB of weights" in lines[1]
    (given,) = [line.split() for line in lines if line.startswith("recipe ")]
    assert given[1:5] == ["TP4", "EP8", "recompute", "0-7"]
    assert given[-3:] == ["68.2", "92%", "0.0"]
    fits = [line for line in lines if line.startswith("fits ")]
    assert 1 <= len(fits) <= 5 and not any(" TP4 EP8 recompute  " in line for line in fits)
    text = " ".join(output.split())
    for part in (
        "routes on the host of rank 0: 384 B",
        "evidence on disk",
        "each server, besides the GPUs that train, of 2 GPUs",
        "estimated within 15%",
    ):
        assert part in text
    assert max(map(len, lines)) <= 80


def test_seconds_of_a_step_stand_by_parts_and_for_every_topology_with_its_flags():
    words = ("qwen3_30b_a3b_colocated", "--gpus", 8, "--gpu-memory-gb", 80)
    lines = run(*words).splitlines()
    names = ("generation", "routes out", "training", "turns", "publish")
    for name in names:
        assert any(f"  {name}: " in line for line in lines), name
    rows = [re.split("  +", line)[1] for line in lines if line.startswith(("recipe  ", "fits  "))]
    timed = [line.split(": ")[0] for line in lines if line.endswith(" tokens/s/GPU")]
    assert timed == rows and len(rows) > 3
    output = "\n".join(lines).replace(" \\\n", " ")
    for name in timed[1:]:
        flags = output.partition(f"\n{name}: ")[2].splitlines()[1].split()
        given = ["--config", str(recipe_path(words[0])), *flags]
        config = parse_train_flags(given, prog_name="train")
        model, _ = estimate_lines.find_model(config)
        assert fullest_rank(config, model, 8).name == name


def test_the_page_has_the_step_as_it_is_estimated():
    """docs/run/gpus.md; where it is wrong, this test prints the right one."""
    output = run("qwen3_30b_a3b_colocated", "--gpus", 8, "--gpu-memory-gb", 80)
    start = output.index("seconds of a step on")
    block = output[start : output.index(" tokens/s/GPU", start)] + " tokens/s/GPU"
    assert block in (ROOT / "docs/run/gpus.md").read_text(encoding="utf-8"), block


@pytest.mark.parametrize(
    "words, best",
    [
        (["qwen3_30b_a3b", "--gpus", "8"], "TP8 EP8 recompute"),
        # recomputation and the optimizer's place are taken back
        (["qwen3_30b_a3b_two_nodes", "--gpus", "8", "--lora-rank", "32"], "TP4 EP2"),
        (["minimax_m2", "--gpus", "32"], "offload"),
    ],
)
def test_the_command_to_go_on_with_makes_the_topology_that_is_recommended(words, best):
    output = run(*words)
    assert max(map(len, output.splitlines())) <= 80
    name, _, command = output.partition("to go on with ")[2].partition(":\n")
    assert best in name
    start, *flags = shlex.split(command.replace("\\\n", " "))
    assert [start, flags.pop(0)] == ["r3train", "train"]
    pasted = parse_train_flags(flags, prog_name="train")
    given = ["--config", str(recipe_path(words[0])), *words[3:]]
    config = parse_train_flags(given, prog_name="estimate")
    assert pasted.run.dry_run and pasted.run.world_size
    model, _ = estimate_lines.find_model(pasted)
    again = fullest_rank(pasted, model, pasted.run.world_size)
    assert again.name == name
    most = 0.9 * 80e9
    (fit,) = search(config, model, pasted.run.world_size, most, 1)
    assert pasted.parallel == fit.config.parallel and again.fullest == fit.fullest


def test_the_recipes_own_topology_is_recommended_where_no_other_is_faster():
    words = ("olmoe_1b_7b_one_gpu", "--gpus", 1, "--gpu-memory-gb", 24)
    command = run(*words, "--lora-rank", 16).partition("to go on with ")[2]
    assert "--lora-rank 16" in command and "recompute-" not in command and "offload=" not in command
    # without recomputation a step is faster
    assert "--recompute-granularity none" in run(*words[:3], "--gpu-memory-gb", 80)
    assert "1 GPU of 24 GB: the smallest" in (output := run(*words, code=1))
    assert "adapters (--lora-rank 16)" in " ".join(output.split())


def test_a_topology_that_the_recipe_cannot_have_is_named_and_others_are_found():
    output = run("qwen3_30b_a3b", "--gpus", 4, "--gpu-memory-gb", 80, "--lora-rank", 32)
    assert "this recipe's topology: world size 4 is not a multiple of" in output
    assert "1.69 billion of adapters" in " ".join(output.split()) and "recipe  " not in output
    assert "fits  TP4 EP4 " in output


def test_where_nothing_fits_the_smallest_is_named():
    output = run("qwen3_30b_a3b", "--gpus", 8, "--gpu-memory-gb", 24, code=1)
    said = " ".join(output.split())
    assert "Error: nothing fits 8 GPUs of 24 GB: the smallest needs 22.9 GiB per rank" in said
    assert "(TP8 EP8 recompute offload)" in said and "\nfits " not in output
    assert "to go on with" not in output


def test_mistakes_are_wrong_usage(tmp_path):
    assert "Did you mean qwen3_30b_a3b?" in run("qwen3_30b_a3", "--gpus", 8, code=2)
    assert "--gpus is required: qwen3_30b_a3b" in run("qwen3_30b_a3b", code=2)
    other = ("--hf-checkpoint", "models/none")
    assert "models/none/config.json: no such file" in run(
        "qwen3_30b_a3b", "--gpus", 8, *other, code=2
    )
    config = json.loads((PUBLISHED / "Qwen3-30B-A3B/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "foo"}))
    output = run("qwen3_30b_a3b", "--gpus", 8, "--hf-checkpoint", tmp_path, code=2)
    assert "model_type 'foo' was not verified" in output
    # of no topology
    output = run("qwen3_30b_a3b", "--gpus", 8, "--global-batch-size", 100, code=2)
    assert "is not a multiple of global_batch_size 100" in output


def test_a_checkpoints_own_config_json_counts(tmp_path):
    own = json.loads((PUBLISHED / "Qwen3-30B-A3B/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | {"num_hidden_layers": 24}))
    output = run("qwen3_30b_a3b", "--gpus", 8, "--hf-checkpoint", tmp_path)
    assert "not here" not in output and "15.6 billion parameters" in output


def test_no_server_is_asked_and_torch_is_not_imported():
    code = """
import sys
from click.testing import CliRunner
from r3train.cli import main
result = CliRunner().invoke(main, ["estimate", "qwen3_30b_a3b", "--gpus", "8"])
assert result.exit_code == 0, result.output
print([name for name in ("torch", "transformers", "sglang", "aiohttp") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "recipe, model, gpus",
    [
        ("qwen3_30b_a3b", "Qwen3-30B-A3B", 8),
        ("gpt_oss_20b", "gpt-oss-20b", 8),
        ("mixtral_8x7b", "Mixtral-8x7B", 16),
        ("minimax_m2", "MiniMax-M2", 96),
        ("deepseek_v3", "DeepSeek-V3", 256),
    ],
)
def test_a_topology_that_is_found_fits_and_would_be_accepted(recipe, model, gpus):
    config, found = of(recipe, model)
    fits = search(config, found, gpus, 70e9, 5)
    assert len({fit.name for fit in fits}) == len(fits) == 5
    for fit in fits:
        again = fullest_rank(fit.config, found, gpus)  # raises for one that would be refused
        assert again.fullest.total == fit.fullest.total <= 70e9
        sizes = fit.config.parallel, fit.config.trainer
        longest = sizes[0].context_parallel_size * sizes[1].max_tokens_per_gpu
        assert longest >= config.trainer.max_tokens_per_gpu


def test_what_a_family_forbids_is_not_proposed():
    """gpt-oss' experts are not split; two key heads of attention are not cut over four tensor ranks."""
    config, model = of("gpt_oss_20b", "gpt-oss-20b")
    every = search(config, model, 64, 1e15, 10_000)
    assert {fit.config.parallel.expert_tensor_parallel_size for fit in every} == {1}
    assert max(fit.config.parallel.context_parallel_size for fit in every) > 1
    hybrid = Model(read_hf_facts(PUBLISHED / "Qwen3-Next-80B-A3B"))
    every = search(of("qwen3_30b_a3b", "Qwen3-30B-A3B")[0], hybrid, 64, 1e15, 10_000)
    assert {fit.config.parallel.tensor_model_parallel_size for fit in every} == {1, 2}
    assert {fit.config.parallel.context_parallel_size for fit in every} == {1, 2, 4, 8}


def test_slower_ways_come_after_faster_ones():
    config, model = of("qwen3_30b_a3b", "Qwen3-30B-A3B")
    every = [fit.name for fit in search(config, model, 8, 1e15, 10_000)]
    ways = [("recompute" in name, "offload" in name) for name in every]
    assert [way for i, way in enumerate(ways) if way not in ways[:i]] == list(topology_search.WAYS)
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    "layers, stages, ends",
    [(48, 4, (None, None)), (61, 8, (6, 7)), (46, 4, (11, 11)), (61, 2, (30, 31)), (24, 16, None)],
)
def test_stages_that_cannot_be_equal_have_smaller_ends_and_none_is_empty(layers, stages, ends):
    assert topology_search._ends(layers, stages) == ends
