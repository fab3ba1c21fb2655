"""Recipes of published models: their dry run, and their memory, on checkpoints without weights."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags
from r3train.families import tensor_shapes
from r3train.launch.job.finding import OK
from r3train.doctor.machine import Node
from r3train.doctor.memory import check_gpus
from r3train.hf_checkpoint import read_headers
from r3train.families.published import PUBLISHED
from r3train.launch.estimate.memory_use import (
    estimate_server,
    gpus_in_words,
    longest_sample,
    Model,
    ServerEstimate,
    stages,
)
from r3train.launch.estimate.estimate_lines import find_model
from r3train.launch.gpus import server_size
from r3train.launch.job.preflight import PreflightError, preflight
from r3train.launch.estimate.step_time import step_time, StepTime
from r3train.launch.estimate.topology_search import fullest_rank, MARGIN
from r3train.verify.tiny import TinyOptions, build
from tests.published import CONFIGS, RECIPES, Recipe, write_checkpoint

PAGE = Path(__file__).parents[2] / "docs/guide/models.md"
CHOOSING = Path(__file__).parents[2] / "docs/start/choosing.md"
README = Path(__file__).parents[2] / "README.md"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is false %} the{% endif %}"
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Path:
    """A directory with the data and the models that the recipes name; the tokenizer is a tiny one."""
    directory = tmp_path_factory.mktemp("machine")
    build(directory / "tiny", TinyOptions(), force=True)
    prompts = [[{"role": "user", "content": "name fruits"}]] * 128
    for recipe in RECIPES:
        config = RunConfig.from_toml(recipe.path)
        rows = {config.data.input_key: prompts, config.data.label_key: ["1"] * 128}
        for path in (*config.data.prompt_data, *(held_out.path for held_out in config.eval_sets)):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.table(rows), directory / path)
        model = directory / config.model.hf_checkpoint
        if model.exists():
            continue
        write_checkpoint(model, recipe.model)
        for file in (directory / "tiny/model").glob("tokenizer*"):
            shutil.copy(file, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@each_recipe
def test_the_shapes_by_a_published_config_json_are_those_of_transformers(recipe, machine):
    model = machine / RunConfig.from_toml(recipe.path).model.hf_checkpoint
    found = {name: kind.shape for name, kind in read_headers(model).items()}
    assert tensor_shapes(read_hf_facts(model)) == found


def test_every_recipe_of_a_published_model_is_rehearsed():
    named = {path.stem for path in CONFIGS.glob("*.toml") if not path.stem.startswith("tiny")}
    assert {recipe.file for recipe in RECIPES} == named


@each_recipe
def test_a_recipe_passes_the_checks_of_its_dry_run(recipe, machine, monkeypatch):
    monkeypatch.chdir(machine)
    config = RunConfig.from_toml(recipe.path)
    job = preflight(config, recipe.num_gpus)
    job.close()
    # a dense model has nothing to replay: that its servers follow is compared tensor by tensor
    assert config.replay.use_rollout_routing_replay is job.hf.is_moe is config.sums_evidence
    assert config.trainer.check_weight_update_equal is not job.hf.is_moe
    # in turns with its servers a rank would send by gloo over loopback: minutes
    way = "shared_memory" if config.rollout.colocate else "distributed"
    assert config.model.bf16 and config.trainer.update_weight_transfer_mode == way
    overrides = config.trainer.optimizer_overrides
    assert overrides.get("overlap_cpu_optimizer_d2h_h2d", False) == overrides.get(
        "optimizer_cpu_offload", False
    )
    assert len(job.prompts) == 128
    other_parallel = config.parallel.model_copy(update={"expert_model_parallel_size": 7})
    refused = "expert(s do not divide by expert_model|_model_parallel_size must be 1, got 7)"
    with pytest.raises(PreflightError, match=refused):
        preflight(config.model_copy(update={"parallel": other_parallel}), 7 * recipe.num_gpus)


@each_recipe
def test_a_recipe_leaves_room_on_the_gpus_of_its_head(recipe):
    head = recipe.path.read_text().split("[model]")[0]
    assert re.search(rf"\b{recipe.num_gpus} GPUs?\b", head) and f"{recipe.gpu_gb} GB" in head
    config, _, fullest = figures(recipe)
    node = Node(8, recipe.gpu_gb * 10**9, recipe.num_gpus, min(recipe.num_gpus, 8))
    found = list(check_gpus(config, node, fullest))
    assert [finding.level for finding in found] == [OK] * len(found), found
    elsewhere = bool(config.rollout.rollout_external_engine_addrs)
    # of one machine all GPUs are taken
    colocated = ", ".join(map(str, range(recipe.num_gpus)))
    taken = f"{colocated}, colocated" if config.rollout.colocate else "4, 5, 6, 7, no rank"
    assert len(found) == 1 if elsewhere else found[0].text.startswith(f"SGLang takes GPU {taken}")


def timed(recipe: Recipe) -> tuple[StepTime, ServerEstimate]:
    """A step of the recipe on the GPUs of its head, and one of its servers."""
    config, model, fullest = figures(recipe)
    gpu_bytes = recipe.gpu_gb * 10**9
    server = estimate_server(config, model, gpu_bytes)
    return step_time(config, model, fullest.held, server, recipe.num_gpus, gpu_bytes), server


@each_recipe
def test_a_recipes_head_says_what_a_step_of_it_is_estimated_to_take(recipe):
    """A head that is wrong fails with the right line."""
    (config, _, fullest), (time, server) = figures(recipe), timed(recipe)
    rollout = config.rollout
    servers = len(rollout.rollout_external_engine_addrs) or rollout.rollout_num_engines
    line = (
        f"# A step, estimated with {servers} x {gpus_in_words(server.gpus)} to serve: {time.seconds:.0f} s,"
        f" {time.rate:,.0f} tokens/s/GPU; a rank's peak is {fullest.total / 2**30:.0f} GiB."
    )
    head = recipe.path.read_text().split("[model]")[0].splitlines()
    assert head[0] == "#:schema ../r3train.schema.json" and line in head, line


def test_the_page_on_choosing_has_the_steps_as_they_are_estimated():
    row = r"^\| `(\w+)` \| [^|]+ \| (\d+) s \| ([\d,]+) \| (\d+) s\b[^|]* \| (\d+) s\b"
    rows = re.findall(row, CHOOSING.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 5
    for name, *said in rows:
        (recipe,) = (recipe for recipe in RECIPES if recipe.file == name)
        time, _ = timed(recipe)
        parts = {part: seconds for part, seconds, _ in time.parts}
        training = parts["training"] + parts["Adam on the host"]
        right = [time.seconds, time.rate, parts["generation"], training]
        assert said == [f"{number:,.0f}" for number in right], name


@cache
def figures(recipe: Recipe):
    """The recipe's configuration, its model and the fullest rank estimated."""
    config = RunConfig.from_toml(recipe.path)
    model = Model(read_hf_facts(PUBLISHED / recipe.model))
    fullest = max(stages(config, model, recipe.num_gpus), key=lambda stage: stage.total)
    return config, model, fullest


def test_the_page_names_the_gpus_and_the_topology_of_every_recipe():
    """The table of docs/guide/models.md; where it is wrong, this test prints the right one."""
    rows = []
    for recipe in RECIPES:
        p = RunConfig.from_toml(recipe.path).parallel
        sizes = {"TP": p.tensor_model_parallel_size, "PP": p.pipeline_model_parallel_size}
        sizes["EP"] = p.expert_model_parallel_size
        ways = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        rows.append(
            f"| [{recipe.file}](../../configs/{recipe.file}.toml) | {recipe.model}"
            f" | {recipe.num_gpus} x {recipe.gpu_gb} GB | {ways} |"
        )
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), "\n".join(rows)


def test_the_readmes_rows_of_one_machine_fit_it():
    """Hardware -> recipe -> command: what each command would train fits the GPUs that its row names."""
    rows = re.findall(
        r"^\| (\d) x (\d+) GB.*\| `r3train train (--config [^`]*)` \|$", README.read_text(), re.M
    )
    assert {(int(gpus), int(gb)) for gpus, gb, _ in rows} == {(1, 24), (1, 80), (8, 80)}
    for gpus, gb, flags in rows:
        config = parse_train_flags(flags.split(), prog_name="train")
        model, _ = find_model(config)
        alone = config.rollout.colocate
        fit = fullest_rank(config, model, int(gpus) if alone else int(gpus) // 2)
        assert fit.fullest.total < (1 - MARGIN) * int(gb) * 1e9, flags
        server = estimate_server(config, model, int(gb) * 1e9)
        longest = longest_sample(config, model.hf)
        assert server.pool_tokens > 8 * longest and config.trainer.max_tokens_per_gpu >= longest
        assert server.gpus * config.rollout.rollout_num_engines == int(gpus) // (1 if alone else 2)


def test_the_recipe_of_two_nodes_is_what_its_head_says_with_room_to_spare():
    """Its figures: those of peers for 80 GB, and NeMo-RL's layout by the flags that the head names."""
    (recipe,) = [recipe for recipe in RECIPES if recipe.file == "qwen3_30b_a3b_two_nodes"]
    config, model, fullest = figures(recipe)
    parallel, trainer = config.parallel, config.trainer
    assert (parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size) == (4, 8)
    assert trainer.max_tokens_per_gpu == 20480 and fullest.held.offloaded > 56 << 30
    assert fullest.total < 0.4 * recipe.gpu_gb * 10**9
    assert 8 * fullest.held.offloaded < 600e9  # what the head says of the host
    addresses = config.rollout.rollout_external_engine_addrs
    assert len(addresses) * server_size(config.rollout.sglang) == 8
    head = recipe.path.read_text().split("[model]")[0]
    flags = re.search(r"(--tensor-model-parallel-size 1 \S+)\)", head)[1].split()
    changed_config = parse_train_flags(
        ["--config", str(recipe.path), *flags], prog_name="train_async.py"
    )
    assert not changed_config.parallel.sequence_parallel
    (stage,) = stages(changed_config, model, recipe.num_gpus)
    assert f"{stage.total / 2**30:.0f} GiB at the peak" in head
