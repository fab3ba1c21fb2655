"""A tiny random mixture-of-experts checkpoint, and a task that it can learn by reinforcement.

The task: name words of the category in the prompt.  By chance, a fifth of a random model's words
are right.  Every right word counts, so the reward can grow from the first step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from r3train.config.data_settings import PromptFile
from r3train.data.prompts import read_records
from r3train.environments.calculator import calculator_prompts, calculator_words
from r3train.families import DENSE_NAMES, TINY_MODELS, tiny_model_of
from r3train.families.tiny_options import SIZES, TinyModel, TinyOptions, shared
from r3train.cpu.torchvision_stub import declare_torchvision_ops

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CATEGORIES = {
    "animals": "cat dog horse cow sheep goat lion tiger bear wolf mouse rabbit",
    "fruits": "apple pear plum cherry peach grape lemon mango banana melon fig kiwi",
    "tools": "hammer saw drill wrench chisel file plane axe shovel rake knife pliers",
    "colours": "red green blue yellow black white brown grey pink purple silver gold",
}
VERBS = ("name", "list", "give", "write")
OPENINGS = ("", "please")
QUANTITIES = ("", "some")
# in no prompt: they bring the vocabulary to 64 entries
FILLERS = ("the", "and", "of")
WORDS_ASKED = 8
TRAINED_VOCAB_SIZE = 1024
RECORD = "tiny.json"


def task_words() -> list[str]:
    """Return every word of the task in the order of the vocabulary, without special tokens."""
    answers = [word for words in CATEGORIES.values() for word in words.split()]
    asking = [*VERBS, *filter(None, OPENINGS), *filter(None, QUANTITIES), *CATEGORIES, *FILLERS]
    return answers + asking


def task_prompts() -> list[dict[str, Any]]:
    """Return the lines of prompts.jsonl: every phrasing of every category."""
    lines = []
    for opening, verb, quantity, (category, words) in product(
        OPENINGS, VERBS, QUANTITIES, CATEGORIES.items()
    ):
        text = " ".join(filter(None, (opening, verb, quantity, category)))
        metadata = {"category": category, "num_words": WORDS_ASKED}
        lines.append({"input": text, "label": words.split(), "metadata": metadata})
    return lines


TASKS = {"words": (task_words, task_prompts), "calculator": (calculator_words, calculator_prompts)}


@dataclass(frozen=True)
class TrainedTokenizer:
    """A byte-level tokenizer, trained from every text in a .jsonl or .parquet file."""

    source: Path
    chat_template: bool = False

    def record(self) -> dict[str, Any]:
        """Return the digest of the file, and whether there is a chat template."""
        digest = hashlib.sha256(self.source.read_bytes()).hexdigest()
        return {"tokenizer_from": digest, "chat_template": self.chat_template}


def build(
    output: Path,
    options: TinyOptions,
    *,
    force: bool = False,
    tokenizer: TrainedTokenizer | None = None,
) -> bool:
    """Write ``output``/model, prompts.jsonl and a record of the options.

    tokenizer: in the place of one with a token for each word of the task.
    Returns False if ``output`` already holds the same model.  An interrupted build leaves nothing
    there.  Raises ValueError if ``output`` holds anything else; ``force`` replaces a tiny model made
    with other options.
    """
    _check(options, tokenizer)
    version = tiny_model_of(options).recipe_version
    record = {"recipe_version": version, **asdict(options)} | _OF_WORDS
    if tokenizer is not None:
        record |= tokenizer.record()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        found = _read_record(output)
        if found == record:
            return False
        if found is None:
            raise ValueError(f"{output} exists and holds no tiny model: choose another directory")
        if not force:
            raise ValueError(
                f"{output} holds a tiny model of other options ({_difference(found, record)}):"
                " choose another directory, or replace it with --force"
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        (staging / "model").mkdir()
        _save_model(staging / "model", options)
        words, prompts = TASKS[options.task]
        if tokenizer is None:
            _save_tokenizer(staging / "model", options.vocab_size, words())
        else:
            _train_tokenizer(staging / "model", options.vocab_size, tokenizer)
        lines = [json.dumps(line) + "\n" for line in prompts()]
        (staging / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        # mkdtemp and safetensors make files private; a server may run as another user
        staging.chmod(0o755)
        (staging / "model" / "model.safetensors").chmod(0o644)
        if output.exists() and _read_record(output) is not None:
            shutil.rmtree(output)
        os.rename(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


_OF_WORDS = {"tokenizer_from": None, "chat_template": False}


def _check(options: TinyOptions, tokenizer: TrainedTokenizer | None) -> None:
    if options.task not in TASKS:
        raise ValueError(f"unknown task {options.task!r}, there are {', '.join(TASKS)}")
    least, unit = len(SPECIAL_TOKENS) + len(TASKS[options.task][0]()), "the task's {} words"
    if tokenizer is not None:
        least, unit = len(SPECIAL_TOKENS) + 256, "the {} of bytes and special tokens"
    if options.vocab_size < least:
        raise ValueError(f"vocab_size {options.vocab_size} is below {unit.format(least)}")
    if options.family not in TINY_MODELS:
        raise ValueError(f"unknown family {options.family!r}, there are {', '.join(TINY_MODELS)}")
    if options.family not in ("qwen3_moe", *DENSE_NAMES) and not options.num_experts:
        raise ValueError(
            f"num_experts 0: {options.family} has experts, a dense model is of qwen3_moe"
        )
    if options.num_experts and not 1 <= options.topk <= options.num_experts:
        raise ValueError(f"topk {options.topk} is not in 1..{options.num_experts} (num_experts)")
    if options.num_heads % options.num_kv_heads:
        raise ValueError(
            f"num_heads {options.num_heads} does not divide by num_kv_heads {options.num_kv_heads}"
        )


def _read_record(output: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # early records have none of these
    early = {"task": "words", "family": "qwen3_moe"} | _OF_WORDS
    return early | record if isinstance(record, dict) else None


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [key for key in wanted if found.get(key) != wanted[key]]
    return ", ".join(f"{key} {found.get(key)} instead of {wanted[key]}" for key in keys)


def _save_model(directory: Path, options: TinyOptions) -> None:
    """Random weights under the names of published checkpoints, the same for the same seed."""
    import torch

    save(random_model(options).to(getattr(torch, options.dtype)), directory, options)


def save(model: Any, directory: Path, options: TinyOptions) -> None:
    """Save a model with the names and configuration keys that the family's published checkpoints have."""
    family = tiny_model_of(options)
    save_weights(model, directory, family)
    file = directory / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if family.vision is None:
        content |= family.published | family.option_keys(options)
    else:
        content["text_config"] |= family.published
        keys = family.vision(options)
        content |= {key: value for key, value in keys.items() if key != "vision_config"}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_weights(model: Any, directory: Path, family: TinyModel) -> None:
    """Save a model of transformers, its tensors as in the family's published files."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(directory, save_original_format=family.experts != "together")
    if family.experts == "turned" or family.names:
        file = directory / "model.safetensors"
        save_file(as_published(load_file(file), family), file, {"format": "pt"})


def as_published(tensors: Mapping[str, Any], family: TinyModel) -> dict[str, Any]:
    """Return tensors that transformers saved, turned and renamed to what published files hold."""
    found = {}
    for name, tensor in tensors.items():
        if family.experts == "turned" and ".mlp.experts." in name:
            tensor = tensor.transpose(1, 2).contiguous()
        start = next((start for start in family.names if name.startswith(start)), "")
        found[family.names.get(start, "") + name.removeprefix(start)] = tensor
    return found


def random_model(options: TinyOptions, **changes: Any) -> Any:
    """transformers' model of the options, float32; ``changes`` are keys of its configuration."""
    declare_torchvision_ops()
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokens = {
        "bos_token_id": None,
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
    }
    family = tiny_model_of(options)
    keys, suffix = shared(options) | tokens | family.sizes(options) | changes, "ForCausalLM"
    if family.vision is not None:
        keys = {"text_config": keys} | family.vision(options)
        suffix = "ForConditionalGeneration"
    config = getattr(transformers, f"{family.kind}Config")(**keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = getattr(transformers, f"{family.kind}{suffix}")(config)
        # transformers sets the padding row to 0, and a random policy does write <pad>.  The gradient
        # of an RMSNorm at 0 is 1 / sqrt(eps), a thousand times that of other rows.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=options.initializer_range)
        if options.family != "qwen3_moe":  # the demo's model stays as it always was
            _make_all_random(model)
    return model


def _make_all_random(model: Any) -> None:
    """Add noise to what transformers sets to zeros or ones: norms, and biases of all kinds.

    One that is left out somewhere must show.
    """
    import torch

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            fixed = tensor.dim() == 1 or name.endswith("bias") or not tensor.any()
            if fixed and "inv_freq" not in name:
                noise = 0.1 * torch.randn_like(tensor)
                # transformers takes an expert of a group that was not chosen before one whose score
                # is negative with its bias; the engines do not, and published biases are positive
                tensor.add_(noise.abs() if name.endswith("e_score_correction_bias") else noise)
            if name.endswith("sinks"):  # published in bfloat16, and SGLang rounds others
                tensor.copy_(tensor.bfloat16())
            if name.endswith("A_log"):
                # a delta net's state lasts for some tokens.  transformers' own start forgets it within
                # one: nothing wrong with it would show, and the norm after it divides by almost 0
                tensor.sub_(5)


def _save_tokenizer(directory: Path, vocab_size: int, task: list[str]) -> None:
    """Write a tokenizer with one token a word; words after those of the task are unused."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *task]
    words += [f"unused{index}" for index in range(len(words), vocab_size)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


# the tools, then of each message a role's name, the content and <eos>, which also ends an answer
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}<eos>{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _train_tokenizer(directory: Path, vocab_size: int, tokenizer: TrainedTokenizer) -> None:
    """Write a byte-level tokenizer of at most ``vocab_size`` tokens: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    records = read_records(PromptFile(tokenizer.source))
    trained.train_from_iterator((text for r in records for text in _texts(r.content)), trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    if tokenizer.chat_template:
        saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(directory)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a row's values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _option(field: dataclasses.Field) -> click.Option:
    """Return the flag of a field of TinyOptions."""
    settings: dict[str, Any] = {"default": field.default, "show_default": True}
    if field.name in _CHOICES:
        settings["type"] = click.Choice(_CHOICES[field.name])
    if field.name == "vocab_size":  # the default follows from another flag
        settings = {"type": int}
    flag = f"--{field.name.replace('_', '-')}"
    return click.Option([flag], help=_HELP.get(field.name), **settings)


_CHOICES = {"family": TINY_MODELS, "dtype": ("float32", "bfloat16"), "task": TASKS}
_HELP = {
    "family": "Architecture of the model.",
    "num_experts": "Experts per layer, of families that have them; 0 makes a dense Qwen3 of qwen3_moe.",
    "topk": "Experts per token.",
    "vocab_size": f"[default: {TinyOptions().vocab_size}, {TRAINED_VOCAB_SIZE} with --tokenizer-from]",
}


@click.command(params=[_option(field) for field in dataclasses.fields(TinyOptions)])
@click.option(
    "--size",
    type=click.Choice(SIZES),
    default="tiny",
    show_default=True,
    help="Defaults of the other flags; gpu: shapes that kernels are made for (r3train docs gpus).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory to write: model/, prompts.jsonl, tiny.json.",
)
@click.option(
    "--tokenizer-from",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A .jsonl or .parquet file: train the tokenizer from all its texts.",
)
@click.option(
    "--chat-template", is_flag=True, help="Give that tokenizer a chat template, for messages."
)
@click.option("--force", is_flag=True, help="Replace a tiny model made with other options.")
def make_tiny_model(
    size: str,
    output: Path,
    force: bool,
    vocab_size: int | None,
    tokenizer_from: Path | None,
    chat_template: bool,
    **shape: Any,
) -> None:
    """Write a tiny random mixture-of-experts checkpoint and a task that it can learn."""
    context = click.get_current_context()
    if chat_template and tokenizer_from is None:
        raise click.UsageError("--chat-template needs --tokenizer-from")
    tokenizer = None if tokenizer_from is None else TrainedTokenizer(tokenizer_from, chat_template)
    is_given = context.get_parameter_source("num_experts") is not ParameterSource.DEFAULT
    if is_given and shape["num_experts"] and shape["family"] in DENSE_NAMES:
        raise click.UsageError(f"--num-experts {shape['num_experts']}: {shape['family']} has none")
    for name, value in SIZES[size].items():
        if name != "vocab_size" and context.get_parameter_source(name) is ParameterSource.DEFAULT:
            shape[name] = value
    if vocab_size is None:
        word_vocab_size = SIZES[size].get("vocab_size", TinyOptions().vocab_size)
        vocab_size = word_vocab_size if tokenizer is None else TRAINED_VOCAB_SIZE
    try:
        options = TinyOptions(vocab_size=vocab_size, **shape)
        built = build(output, options, force=force, tokenizer=tokenizer)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"{output}: {'written' if built else 'already there'}")
