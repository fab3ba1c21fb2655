"""Facts of a Hugging Face checkpoint, read from its JSON files only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3train.config.files import load_json_object, path_hint
from r3train.families import FAMILIES
from r3train.families.family import Family
from r3train.families.hf_facts import EXPERT_KEYS, HfModelFacts
from r3train.types import MOST_EXPERTS, MOST_LAYERS

# names of layers and experts are listed: a damaged number must not take all memory
_MOST_EXPERTS = 1_000_000
_MOST = {"num_hidden_layers": MOST_LAYERS} | dict.fromkeys(EXPERT_KEYS, MOST_EXPERTS)

# files of a directory of --save, and of one checkpoint in it
_OF_SAVE = ("latest_checkpointed_iteration.txt", "trainer_state.json")


def read_hf_facts(path: Path | str) -> HfModelFacts:
    """Read the facts of the checkpoint directory ``path``.

    Raises ValueError naming the file and the key if the directory, its config.json or a key is
    missing or wrong, and for a model of text and images whose language model was not verified.
    """
    directory = Path(path)
    if not directory.is_dir():
        hint = "; it is a file: name its directory" if directory.exists() else path_hint(directory)
        raise ValueError(f"{directory}: no such checkpoint directory (hf_checkpoint){hint}")
    file = directory / "config.json"
    if not file.exists() and (below := sorted(directory.glob("*/config.json"))):
        raise ValueError(f"{file}: there is none; did you mean {below[0].parent}? (hf_checkpoint)")
    content = _load_model_config(directory)
    family = _family(content)
    reader = _Reader(file, content, family.attribute_map if family is not None else {})
    if "text_config" in reader.content and "num_hidden_layers" not in reader.content:
        raise ValueError(
            f"{file}: model_type {reader.text('model_type')!r} is a model of text and images, with its sizes"
            " in text_config, and was not verified; r3train docs models names those that were"
        )
    layers = reader.integer("num_hidden_layers", 1)
    heads = reader.integer("num_attention_heads", 1)
    _mixers(reader, layers)  # also of a model without experts
    expert_key = next((key for key in EXPERT_KEYS if reader.content.get(key)), None)
    experts = reader.integer(expert_key, 1) if expert_key else 0
    if layers * experts > _MOST_EXPERTS:
        raise ValueError(
            f"{file}: {layers} layers of {experts} experts, expected at most {_MOST_EXPERTS} experts in all"
        )
    return HfModelFacts(
        path=directory,
        model_type=reader.text("model_type"),
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=reader.integer("num_experts_per_tok", 1) if experts else 0,
        vocab_size=reader.integer("vocab_size", 1),
        hidden_size=reader.integer("hidden_size", 1),
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", 1, default=heads),
        max_position_embeddings=reader.integer("max_position_embeddings", 1),
        moe_layer_numbers=_moe_layer_numbers(reader, layers) if experts else (),
        eos_token_ids=_eos_token_ids(reader, directory / "generation_config.json"),
        tie_word_embeddings=reader.content.get("tie_word_embeddings") is True,
        index_topk=reader.integer("index_topk", 1) if "index_topk" in reader.content else None,
        content=content,
    )


class _Reader:
    """Typed access to a JSON object; errors name its file, and a key as the file has it by ``names``."""

    def __init__(
        self, file: Path, content: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> None:
        self.file = file
        self.content = content
        self._names = names or {}

    def integer(self, key: str, least: int, default: int | None = None) -> int:
        value = self.content.get(key)
        if value is None:
            value = default
        name = self._names.get(key, key)
        if value is None:
            raise ValueError(f"{self.file}: key {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"{self.file}: key {name} must be an integer of at least {least}, got {value!r}"
            )
        most = _MOST.get(key)
        if most is not None and value > most:
            raise ValueError(f"{self.file}: key {name} is {value}, expected at most {most}")
        return value

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self.file}: key {key} must be a string, got {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return null, an integer or a list of integers as a tuple."""
        value = self.content.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(item, int) or isinstance(item, bool) for item in values):
            raise ValueError(f"{self.file}: key {key} must hold integers, got {value!r}")
        return tuple(values)


def _moe_layer_numbers(reader: _Reader, layers: int) -> tuple[int, ...]:
    """Return the 1-based numbers of the layers with experts.

    Qwen has decoder_sparse_step and mlp_only_layers.  DeepSeek and GLM have first_k_dense_replace
    and moe_layer_freq (a period, or a list with 0 or 1 for each layer).  transformers writes
    mlp_layer_types in place of these.  Nemotron-H has hybrid_override_pattern, a letter for each layer.
    In other models, such as Mixtral, every layer has experts.
    """
    if mixers := _mixers(reader, layers):
        return tuple(i for i, letter in enumerate(mixers, start=1) if letter == "E")
    kinds = reader.content.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(
                f"{reader.file}: key mlp_layer_types must hold {layers} entries, one per layer,"
                f" got {kinds!r}"
            )
        return tuple(i for i, kind in enumerate(kinds, start=1) if kind == "sparse")
    step = reader.integer("decoder_sparse_step", 1, default=1)
    dense = set(reader.integers("mlp_only_layers"))
    first = reader.integer("first_k_dense_replace", 0, default=0)
    period = reader.integers("moe_layer_freq") or (1,)
    if isinstance(reader.content.get("moe_layer_freq"), list):
        if len(period) != layers:
            raise ValueError(
                f"{reader.file}: key moe_layer_freq must hold {layers} entries, one per layer,"
                f" got {len(period)}"
            )
        on_period = [bool(flag) for flag in period]
    else:
        every = max(period[0], 1)
        on_period = [layer_id % every == 0 for layer_id in range(layers)]
    return tuple(
        layer_id + 1
        for layer_id in range(layers)
        if layer_id >= first
        and on_period[layer_id]
        and layer_id not in dense
        and (layer_id + 1) % step == 0
    )


def _mixers(reader: _Reader, layers: int) -> str:
    """Return the letters of a model whose layers have one mixer each; "" of any other."""
    mixers = reader.content.get("hybrid_override_pattern")
    if mixers is None:
        return ""
    if not isinstance(mixers, str) or len(mixers) != layers or not set(mixers) <= set("M*E-"):
        raise ValueError(
            f"{reader.file}: key hybrid_override_pattern must hold {layers} letters of M, *, E and -,"
            f" one per layer, got {mixers!r}"
        )
    return mixers


def _eos_token_ids(reader: _Reader, generation_file: Path) -> tuple[int, ...]:
    """Return the end tokens of config.json and generation_config.json; SGLang reads both too."""
    ids = list(reader.integers("eos_token_id"))
    if generation_file.is_file():
        ids += _Reader(generation_file, load_json_object(generation_file)).integers("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _load_model_config(directory: Path) -> Mapping[str, Any]:
    """Read the config.json of a checkpoint, its language model's keys on top; raises ValueError.

    Of a family of text and images the keys of text_config win, but for model_type and tie_word_embeddings,
    which SGLang and transformers take from the top.  Keys of which a family has names of its own
    (``Family.attribute_map``) are there under both.
    """
    file = directory / "config.json"
    if not file.exists() and any((directory / name).exists() for name in _OF_SAVE):
        raise ValueError(
            f"{directory}: a checkpoint of --save, expected a Hugging Face one: r3train convert makes it"
        )
    content = load_json_object(file)
    family = _family(content)
    if family is None:
        return content
    if family.is_multimodal:
        text = content.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"{file}: key text_config must hold a JSON object, got {text!r}")
        kept = {"tie_word_embeddings": False} | content
        content = content | text | {k: kept[k] for k in ("model_type", "tie_word_embeddings")}
    attribute_names = family.attribute_map.items()
    return content | {key: content[name] for key, name in attribute_names if name in content}


def _family(content: Mapping[str, Any]) -> Family | None:
    """Return the ``Family`` of a config.json, None for one that nobody verified."""
    model_type = content.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None
