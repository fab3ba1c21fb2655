"""``r3train init``: a first recipe for a model and a file of prompts, each guess with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w

from r3train.config import RunConfig
from r3train.config.data_settings import PromptFile
from r3train.config.files import write_atomically
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.config.options import usage_errors
from r3train.config.sources import ConfigError, plain
from r3train.data.prompts import are_messages, find_value, load_prompts, read_records
from r3train.data.tokenizer import load_tokenizer
from r3train.families.checks import check_family
from r3train.launch.estimate import GIGA, Model, amount
from r3train.launch.estimate_command import nothing_fits
from r3train.launch.preflight import PreflightError, preflight
from r3train.launch.topologies import MARGIN, search
from r3train.types import Prompt

# keys of known data sets, the likeliest first
_PROMPTS = ("input", "prompt", "messages", "question", "problem", "instruction", "query", "text")
_LABELS = ("label", "answer", "ground_truth", "reward_model.ground_truth", "solution", "target")
_LONGEST_ANSWER = 4096
_EPOCHS = 3
# a reward that nothing is known of
_TO_WRITE = "my_reward:score"
SCHEMA = Path(__file__).resolve().parents[1] / "r3train.schema.json"


@dataclass(frozen=True)
class Line:
    """A setting of the recipe with its reason."""

    section: str
    name: str
    value: Any
    why: str


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    required=True,
    help="Checkpoint, as of --hf-checkpoint.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Prompts: .jsonl or .parquet."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="run.toml",
    show_default=True,
    help="The recipe.",
)
@click.option(
    "--gpus", type=click.IntRange(1), help="GPUs that train; others generate.  Unset: a CPU trains."
)
@click.option(
    "--gpu-memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=80,
    show_default=True,
    help="With --gpus: memory of each in 10^9 bytes.",
)
def init(model: Path, data: Path, output: Path, gpus: int | None, gpu_memory_gb: float) -> None:
    """Write a first recipe for a model and a file of prompts; comments give the reason of each guess.

    What it wrote is checked as a dry run checks it.  Exit code: 0 if a run may start, 2 if not.
    """
    with usage_errors():
        if output.exists():
            raise ConfigError(f"{output}: is there already; name another with --output")
        hf = read_hf_facts(model)
        check_family(hf)
        lines = [
            Line("model", "hf_checkpoint", str(model), "the checkpoint that training begins with")
        ]
        lines += _data_lines(model, data, hf)
        lines += _learning_lines(hf)
        if gpus is not None:
            lines += _topology_lines(lines, Model(hf), gpus, gpu_memory_gb)
        write_atomically(output, _text(lines, output))
        config = RunConfig.from_toml(output)
        try:
            preflight(config, config.run.world_size or 1, for_all_ranks=True, starts=False).close()
        except PreflightError as error:
            raise ConfigError(
                f"{output} is written, and a run of it is refused:\n{error}"
            ) from None
    click.echo(f"{output} is written and passes a dry run.  Next: r3train train --config {output}")


def _data_lines(model: Path, data: Path, hf: HfModelFacts) -> Iterator[Line]:
    """Yield what the prompts say: their keys, the template, the lengths and the reward."""
    tokenizer = load_tokenizer(model)
    first = next(read_records(PromptFile(data)), None)
    if first is None:
        raise ConfigError(f"{data}: holds no prompts")
    row = first.content
    prompt_key = _key(row, _PROMPTS, lambda value: isinstance(value, str) or are_messages(value))
    if prompt_key is None:
        raise ConfigError(
            f"{first.where}: no key holds text or chat messages; keys there: {', '.join(row) or 'none'}"
        )
    rest = {key: value for key, value in row.items() if key != prompt_key}
    label_key = next((key for key in _LABELS if find_value(rest, key) is not None), None)
    is_chat = are_messages(find_value(row, prompt_key))
    has_template = tokenizer.chat_template is not None
    yield Line("data", "prompt_data", str(data), "prompts")
    yield Line("data", "input_key", prompt_key, f"keys of the first row: {', '.join(row)}")
    if label_key is not None:
        yield Line("data", "label_key", label_key, "the answer that the reward compares with")
    if is_chat or has_template:
        why = "the prompts are chat messages" if is_chat else "the tokenizer has a chat template"
        yield Line("data", "apply_chat_template", True, why)
    settings = {
        "prompt_data": (str(data),),
        "input_key": prompt_key,
        "label_key": label_key or "label",
    }
    section = RunConfig.model_fields["data"].annotation(
        **settings, apply_chat_template=is_chat or has_template
    )
    most = hf.max_position_embeddings - 1
    prompts = load_prompts(
        PromptFile(data), section, tokenizer, (most, f"max_position_embeddings {most + 1} - 1")
    )
    yield _reward(prompts, label_key)
    yield from _length_lines(prompts, hf)


def _key(row: Mapping[str, Any], names: Sequence[str], fits: Any) -> str | None:
    found = [name for name in (*names, *row) if fits(find_value(row, name))]
    return found[0] if found else None


def _reward(prompts: Sequence[Prompt], label_key: str | None) -> Line:
    """Return the reward that the labels look like."""
    labels = [prompt.label for prompt in prompts]
    if all(prompt.metadata.get("rm_type") for prompt in prompts):
        return Line("data", "rm_type", "exact_match", "unused: metadata.rm_type of each row wins")
    if label_key is None or None in labels:
        why = f"no key like {', '.join(_LABELS)} in every row: write score(sample) in my_reward.py (r3train docs data)"
        return Line("data", "custom_rm_path", _TO_WRITE, why)
    if all(isinstance(label, list) for label in labels):
        return Line("data", "rm_type", "accepted_words", "labels are lists of words")
    texts = list(map(str, labels))
    if all("####" in text for text in texts):
        return Line("data", "rm_type", "gsm8k", "labels end in #### number")
    if all(re.fullmatch(r"\(?[A-J]\)?", text) for text in texts):
        return Line("data", "rm_type", "gpqa", "labels are letters of choices")
    if all(re.search(r"[\d\\]", text) for text in texts):
        return Line("data", "rm_type", "math", "labels hold numbers or LaTeX")
    return Line("data", "rm_type", "exact_match", "labels are words; f1 compares long ones better")


def _length_lines(prompts: Sequence[Prompt], hf: HfModelFacts) -> Iterator[Line]:
    """Yield sizes that follow from the prompts' number and tokens."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = hf.max_position_embeddings - longest
    answer = min(_LONGEST_ANSWER, 1 << (room.bit_length() - 1))
    batch = min(32, len(prompts))
    rollouts = max(1, _EPOCHS * len(prompts) // batch)
    yield Line(
        "rollout", "num_rollout", rollouts, f"about {_EPOCHS} epochs of {len(prompts):,} prompts"
    )
    yield Line("rollout", "rollout_batch_size", batch, "prompts in a rollout")
    yield Line("rollout", "n_samples_per_prompt", 8, "answers to each, compared with one another")
    why = f"the longest prompt has {longest:,} tokens, the context {hf.max_position_embeddings:,}"
    yield Line("rollout", "rollout_max_response_len", answer, why)
    tokens = max(4096, longest + answer)
    yield Line(
        "trainer", "max_tokens_per_gpu", tokens, "holds the longest prompt with the longest answer"
    )


def _learning_lines(hf: HfModelFacts) -> Iterator[Line]:
    yield Line("trainer", "lr", 1e-6, "usual for all weights; with lora_rank 1e-5 to 1e-4")
    if hf.is_moe:
        yield Line(
            "replay", "use_rollout_routing_replay", True, f"{hf.num_experts} experts a layer (R3)"
        )
        yield Line(
            "replay", "enable_r3_correctness_check", True, "proves at every step that R3 holds"
        )


def _topology_lines(
    lines: Sequence[Line], model: Model, gpus: int, memory_gb: float
) -> Iterator[Line]:
    """Yield the smallest split of the model that fits, as r3train estimate finds it."""
    given = {line.name: line.value for line in lines} | {"bf16": True}
    config = RunConfig.from_sources(flags=given)
    most = (1 - MARGIN) * memory_gb * GIGA
    (best, *_) = search(config, model, gpus, most, 1)
    if best.fullest.total > most:
        raise ConfigError(nothing_fits(gpus, memory_gb * GIGA, best))
    yield Line("run", "world_size", gpus, "GPUs that train; servers take others (r3train docs gpu)")
    yield Line("model", "bf16", True, "half the memory of float32")
    size = amount(best.fullest.total)
    why = f"{best.name}: an estimated {size} per rank (r3train estimate)"
    for section in ("model", "parallel", "trainer"):
        before, after = getattr(config, section), getattr(best.config, section)
        for name in type(after).model_fields:
            value = getattr(after, name)
            if value != getattr(before, name):
                yield Line(section, name, value, why)


def _text(lines: Sequence[Line], output: Path) -> str:
    """Return the recipe: a line for each setting, its reason after it."""
    parts = [
        f"#:schema {SCHEMA}",
        "# Written by r3train init: each value is a guess, with its reason.",
        f"#   r3train train --config {output}",
        "# All settings: r3train train --help-all; one of them: r3train explain NAME",
    ]
    names = {name: number for number, name in enumerate(RunConfig.model_fields)}
    known = {}
    for line in lines:  # a later one wins
        known[line.section, line.name] = line
    section = why = None
    for line in sorted(known.values(), key=lambda line: names[line.section]):
        if line.section != section:
            section, why = line.section, None
            parts += ["", f"[{section}]"]
        reason = "" if line.why == why else f"  # {plain(line.why)}"
        why = line.why
        if isinstance(line.value, dict):
            parts += [reason.strip(), *_entries(line)]
        else:
            parts.append(f"{tomli_w.dumps({line.name: line.value}).strip()}{reason}")
    return "\n".join(parts) + "\n"


def _entries(line: Line) -> Iterator[str]:
    for key, value in line.value.items():
        yield f"{line.name}.{tomli_w.dumps({key: value}).strip()}"
