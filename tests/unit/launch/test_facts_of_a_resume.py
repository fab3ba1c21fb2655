"""A resume with other settings of the data order names each of them, before any rank joins."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from tests.unit.launch.test_preflight import ROOT, saved, start, words
from tests.unit.loop.test_rollout_file import scored

from r3train.config import RunConfig
from r3train.config.options import parse_train_flags
from r3train.data.curriculum import PASS_RATES_FILE
from r3train.verify.tiny import TinyOptions, build
from r3train.launch.job.preflight import preflight
from r3train.launch.job.resume import resume_point, run_facts
from r3train.loop.rollout_file import BUFFER_FILE, write_samples

LINES = [{"input": "cat " * n, "label": "cat"} for n in (1, 2, 3, 12)]
# key of the facts -> flags of the run, other flags on resuming, what is said
CHANGED = {
    "num_prompts": (
        ("--rollout-max-prompt-len", "20"),
        ("--rollout-max-prompt-len", "10"),
        "num_prompts was 4, is 3",
    ),
    "rollout_batch_size": (
        ("--rollout-batch-size", "4"),
        ("--rollout-batch-size", "2"),
        "rollout_batch_size was 4, is 2",
    ),
    "n_samples_per_prompt": (
        ("--n-samples-per-prompt", "2"),
        ("--n-samples-per-prompt", "4"),
        "n_samples_per_prompt was 2, is 4",
    ),
    "rollout_seed": (
        ("--rollout-seed", "1"),
        ("--rollout-seed", "2"),
        "rollout_seed was 1, is 2",
    ),
    "rollout_shuffle": (
        ("--rollout-shuffle",),
        ("--no-rollout-shuffle",),
        "rollout_shuffle was True, is False",
    ),
    "input_key": (
        ("--input-key", "input"),
        ("--input-key", "label"),
        "input_key was 'input', is 'label'",
    ),
    "prompt_sampling": (
        (),
        ("--prompt-sampling", "difficulty"),
        "prompt_sampling was 'uniform', is 'difficulty'",
    ),
    "prompt_files": (
        ("--prompt-data", "{prompts}@[0:2]"),
        ("--prompt-data", "{prompts}@[1:3]"),
        "prompt_files was [['prompts.jsonl', 0, 2, None]], is [['prompts.jsonl', 1, 3, None]]",
    ),
}
# a run with the template "one" -> its resume
OF_TEMPLATES = {
    "apply_chat_template": ((), ("--apply-chat-template",)),
    "apply_chat_template_kwargs": (
        ("--apply-chat-template",),
        ("--apply-chat-template", "--apply-chat-template-kwargs", '{"end": "dog"}'),
    ),
    "tool_key": (
        ("--apply-chat-template", "--tool-key", "one"),
        ("--apply-chat-template", "--tool-key", "two"),
    ),
    "tokenizer": ((), ()),
}


def facts(model, prompts, flags):
    """The facts that a run with these flags saves."""
    recipe = ("--config", str(ROOT / "configs/tiny_cpu.toml"))
    data = ("--prompt-data", str(prompts), "--hf-checkpoint", str(model))
    job = preflight(parse_train_flags([*recipe, *data, *flags], prog_name="train_async.py"), 2)
    job.close()
    return run_facts(job)


def test_every_fact_is_compared(tiny, tmp_path):
    prompts = written(tmp_path)
    apart = {"lora", "model", "prompt_data_sha256", *OF_TEMPLATES}
    found = facts(tiny / "model", prompts, ())
    assert {*CHANGED, *apart} == {*found}
    heads = {"num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"}
    layers = {"model_type", "num_hidden_layers", "num_experts", "num_experts_per_tok"}
    assert found["model"].keys() == heads | layers


def test_a_resume_with_another_model_is_refused_before_anything_starts(tiny, tmp_path):
    build(tmp_path / "small", TinyOptions(num_layers=2))
    prompts = written(tmp_path)
    before = facts(tmp_path / "small/model", prompts, ())
    flags = ("--dry-run", "--prompt-data", str(prompts), "--load")
    saved(tmp_path / "other", run=before)
    result = start(tiny, *flags, str(tmp_path / "other"))
    assert result.exit_code == 2
    said = (
        f"holds a model of num_hidden_layers 2, and --hf-checkpoint {tiny / 'model'} has 4: a run"
    )
    assert said in words(result)
    del before["model"]  # a checkpoint of before this fact
    saved(tmp_path / "earlier", run=before)
    assert start(tiny, *flags, str(tmp_path / "earlier")).exit_code == 0


def written(directory):
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return prompts


@pytest.mark.parametrize("key", CHANGED)
def test_a_resume_with_another_data_order_names_the_setting(key, tiny, tmp_path):
    prompts = written(tmp_path)
    before, after, said = (
        [part.format(prompts=prompts) for part in value] if isinstance(value, tuple) else value
        for value in CHANGED[key]
    )
    saved(tmp_path / "saved", run=facts(tiny / "model", prompts, before))
    common = ("--dry-run", "--prompt-data", str(prompts), "--load", str(tmp_path / "saved"))
    same = start(tiny, *common, *before)
    assert same.exit_code == 0, same.output
    other = start(tiny, *common, *after)
    assert other.exit_code == 2
    assert (
        f"cannot resume with other settings of the prompts or their order: {said}. Start"
        in words(other)
    )


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_resume_reads_the_pass_rates_by_which_its_prompts_were_drawn(is_whole, tiny, tmp_path):
    prompts, by_difficulty = written(tmp_path), ("--prompt-sampling", "difficulty")
    checkpoint = saved(tmp_path / "saved", run=facts(tiny / "model", prompts, by_difficulty)).parent
    path = checkpoint / PASS_RATES_FILE
    resume = ("--dry-run", "--prompt-data", str(prompts), "--load", str(tmp_path / "saved"))
    if is_whole:
        path.touch()
        assert start(tiny, *resume, *by_difficulty).exit_code == 0
        path.write_text('{"step": 0, "group_id": 0, "draws": 4, "crc32": 1}\n')
    result = start(tiny, *resume, *by_difficulty)
    assert result.exit_code == 2
    assert (f"{path}:1:" if is_whole else str(checkpoint)) in words(result)


def with_template(model, directory, text):
    """A copy of the model with another chat template."""
    shutil.copytree(model, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
    return directory


@pytest.mark.parametrize("key", OF_TEMPLATES)
def test_a_resume_that_gives_the_model_other_tokens_names_the_setting(key, tiny, tmp_path):
    prompts, text = written(tmp_path), "cat {{ messages[0].content }} {{ end or 'cat' }}{{ tools }}"
    before, after = OF_TEMPLATES[key]
    model = with_template(tiny / "model", tmp_path / "model", text)
    saved(tmp_path / "saved", run=facts(model, prompts, before))
    if key == "tokenizer":
        model = with_template(tiny / "model", tmp_path / "other", text + "dog")
    load = ("--load", str(tmp_path / "saved"), "--hf-checkpoint", str(model))
    result = start(tiny, "--dry-run", "--prompt-data", str(prompts), *load, *after)
    assert result.exit_code == 2 and "other settings of the prompts or their" in words(result)
    assert f"order: {key} was " in words(result)


def test_a_resume_that_has_nothing_left_to_train_says_so_and_one_of_fewer_rollouts_is_refused(
    tiny, tmp_path
):
    prompts = written(tmp_path)
    saved(tmp_path / "saved", run=facts(tiny / "model", prompts, ()))
    flags = ("--dry-run", "--prompt-data", str(prompts), "--load", str(tmp_path / "saved"))
    same, fewer, more = (start(tiny, *flags, "--num-rollout", n) for n in "324")
    assert (same.exit_code, fewer.exit_code, more.exit_code) == (0, 2, 0)
    assert "3 of 3 rollouts were trained before: nothing is left to train" in words(same)
    assert "has trained 3 rollouts, and --num-rollout" in words(fewer)
    assert "trained before" not in words(more)


def test_a_resume_with_prompts_of_another_content_is_refused(tiny, tmp_path):
    prompts = written(tmp_path)
    saved(tmp_path / "saved", run=facts(tiny / "model", prompts, ()))
    prompts.write_text(prompts.read_text().replace("cat cat cat", "cat cat dog", 1))
    common = ("--dry-run", "--prompt-data", str(prompts), "--load", str(tmp_path / "saved"))
    other = start(tiny, *common)
    assert other.exit_code == 2 and "was trained on prompts of another content" in words(other)


def point(**settings):
    """The start of a job with these settings."""
    config = RunConfig.from_toml(str(ROOT / "configs/tiny_cpu.toml"), settings)
    return resume_point(SimpleNamespace(config=config, prompt_file=None))


def test_the_runs_own_checkpoints_go_before_those_that_it_began_with(tmp_path):
    own, first = tmp_path / "own", tmp_path / "first"
    saved(first, 7)
    flags = {"save": own, "auto_resume": True, "load": first}
    began = point(**flags)
    assert (began.checkpoint, began.start_rollout_id) == (first / "iter_0000007", 7)
    saved(own, 3)
    again = point(**flags)
    assert (again.checkpoint, again.start_rollout_id) == (own / "iter_0000003", 3)
    assert point(**flags | {"auto_resume": False}).checkpoint == first / "iter_0000007"
    assert point().checkpoint is None and point().start_rollout_id == 0


def test_a_start_from_the_weights_alone_takes_no_samples_and_begins_at_rollout_0(tmp_path):
    path = saved(tmp_path, 7, has_buffer=True).parent
    groups = [
        {"group_id": 0, "prompt_id": "p0", "attempt": 0, "places": [[i, 1] for i in range(4)]}
    ]
    facts = {"next_step": 7, "groups": groups}
    write_samples(path / BUFFER_FILE, scored(routes=False), facts)
    began = point(load=tmp_path, load_model_only=True)
    assert (began.start_rollout_id, began.model_only, began.buffer(99)) == (0, True, None)
    whole = point(load=tmp_path)
    assert whole.start_rollout_id == 7 and len(whole.buffer(99)[0]) == 4


def test_samples_of_another_environment_are_not_trained(tmp_path):
    path = saved(tmp_path, 7, has_buffer=True).parent
    for environment in ("calculator", None):
        facts = {"episodes": {"environment": environment, "agent": None}}
        write_samples(path / BUFFER_FILE, scored(routes=False), facts | {"groups": []})
        if environment is None:
            assert point(load=tmp_path).start_rollout_id == 7
            continue
        with pytest.raises(ValueError, match="environment was 'calculator', is None"):
            point(load=tmp_path)


@pytest.mark.parametrize("model_only", [False, True])
def test_a_start_from_weights_of_other_adapters_is_refused(model_only, tmp_path):
    saved(tmp_path, 7, run={"lora": {"lora_rank": 4}})
    with pytest.raises(ValueError, match="holds LoRA adapters, and --lora-rank is 0"):
        point(load=tmp_path, load_model_only=model_only)
