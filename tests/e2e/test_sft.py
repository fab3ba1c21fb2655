"""Supervised fine-tuning in a whole job: conversations in, a checkpoint out, no server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from r3train.verify.tiny import task_prompts
from tests.e2e import jobs

pytestmark = pytest.mark.e2e

ONE_RANK = {"recipe": "configs/tiny_sft.toml", "ranks": 1}

# words that no prompt has stand for the two roles
TEMPLATE = (
    "{% for m in messages %}{{ 'the' if m.role == 'user' else 'and' }} {{ m.content }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}and {% endif %}"
)


@pytest.fixture(scope="module")
def talk(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint with a chat template, and conversations that answer its prompts."""
    directory = tmp_path_factory.mktemp("talk")
    (directory / "model").mkdir()
    for file in (tiny / "model").iterdir():
        (directory / "model" / file.name).symlink_to(file)
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    lines = []
    for i, prompt in enumerate(task_prompts()):
        answer = " ".join(prompt["label"][i % 5 : i % 5 + 4])
        says = [{"role": "user", "content": prompt["input"]}]
        says.append({"role": "assistant", "content": answer})
        lines.append(json.dumps({"messages": says}) + "\n")
    (directory / "talk.jsonl").write_text("".join(lines))
    return directory


def cross_entropy(model: Path, talk: Path) -> float:
    """Mean over the answers' tokens and their ends, by transformers, with masks made by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total = count = 0
    for line in (talk / "talk.jsonl").read_text().splitlines():
        user, assistant = (m["content"] for m in json.loads(line)["messages"])
        prompt = tokenizer.encode(f"the {user} <eos> and", add_special_tokens=False)
        answer = tokenizer.encode(f"{assistant} <eos>", add_special_tokens=False)
        with torch.no_grad():
            logits = network(torch.tensor([prompt + answer])).logits[0]
        log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total -= float(log_p.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    return total / count


@pytest.mark.gate
def test_a_short_job_has_transformers_loss_and_its_checkpoint_converts_to_its_export(
    talk, tmp_path
):
    """The oracle has later steps over ranks."""
    model, count = talk / "model", len(task_prompts())
    job = jobs.run(
        tmp_path / "run",
        *f"--hf-checkpoint {model} --prompt-data {talk / 'talk.jsonl'}".split(),
        *f"--rollout-batch-size {count} --num-rollout 2 --no-plot".split(),
        *f"--save {tmp_path / 'saved'} --save-hf {tmp_path / 'hf'}".split(),
        *"--expert-model-parallel-size 1".split(),
        **ONE_RANK,
    )
    assert job.code == 0, job.output
    assert not (job.run_dir / "logs" / "sglang").exists() and "SGLang" not in job.output
    first = job.metrics()[0]["train/loss"]
    assert first == pytest.approx(cross_entropy(model, talk), rel=1e-5)
    assert cross_entropy(tmp_path / "hf", talk) < first
    places = [str(tmp_path / "saved"), str(tmp_path / "converted")]
    command = [sys.executable, "-m", "r3train.cli", "convert", *places]
    converted = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True)
    assert converted.returncode == 0, converted.stderr
    assert "the weights after 2 rollouts are in " in converted.stdout
    for file in ("config.json", "model-00001-of-00001.safetensors"):
        same = [(tmp_path / where / file).read_bytes() for where in ("converted", "hf")]
        assert same[0] == same[1], file


@pytest.mark.slow
def test_a_model_learns_its_conversations_and_is_exported_as_ever(talk, tmp_path):
    """A rollout is an epoch, in four optimizer steps; the oracle has the same over ranks."""
    model, count = talk / "model", len(task_prompts())
    job = jobs.run(
        tmp_path / "run",
        *f"--hf-checkpoint {model} --prompt-data {talk / 'talk.jsonl'}".split(),
        *f"--save-hf {tmp_path / 'hf/{rollout_id}'} --save-interval 7".split(),
        *f"--rollout-batch-size {count} --save {tmp_path / 'saved'}".split(),
        *f"--global-batch-size {count // 4} --num-rollout 12 --no-plot".split(),
        *"--expert-model-parallel-size 1".split(),
        **ONE_RANK,
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert metrics[0]["train/num_loss_tokens"] == count * 5
    assert not any("reward" in key for key in metrics[0])
    words = " ".join(job.output.split())
    assert f"loss: {metrics[0]['train/loss']:.4f} -> {metrics[-1]['train/loss']:.4f}" in words
    # what the last steps saw is above what they left
    assert sorted(path.name for path in (tmp_path / "hf").glob("[!.]*")) == ["12", "7"]
    last = cross_entropy(tmp_path / "hf/12", talk)
    assert last <= metrics[-1]["train/loss"] < 1.6
    halfway = metrics[7]["train/loss"], metrics[6]["train/loss"]
    assert halfway[0] <= cross_entropy(tmp_path / "hf/7", talk) <= halfway[1]
    assert metrics[0]["train/loss"] > 3
    assert not (job.run_dir / "logs" / "sglang").exists() and "SGLang" not in job.output
