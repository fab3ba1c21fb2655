"""Models next to the actor: a KL reference, and teachers, held by the ranks or served."""

from __future__ import annotations

import asyncio
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.files import path_hint
from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.data.tokenizer import load_tokenizer
from r3train.engine.backend import EngineError
from r3train.engine.key import engine_api_key
from r3train.engine.teacher import ServedTeacher, TEACHER_KEY
from r3train.families.checks.family_checks import check_family
from r3train.hf_checkpoint import check_tensors, read_transformers_config, TensorKind

# keys of config.json, or patterns of them, that change no log-prob of the actor; all others must be equal
_WITHOUT_EFFECT = """
    _* architectures auto_map transformers_version dtype torch_dtype *_token_id use_cache return_dict
    output_attentions output_hidden_states output_router_logits id2label label2id problem_type
    initializer_range attention_dropout router_aux_loss_coef max_position_embeddings max_window_layers
    num_nextn_predict_layers *mtp_*""".split()


def check_other_model(flag: str, path: Path, actor: HfModelFacts) -> None:
    """Raise ValueError unless ``path`` is a checkpoint of the actor's model (--ref-load, a teacher)."""
    if not path.is_dir():
        raise ValueError(f"{flag}: {path}: no such checkpoint directory{path_hint(path)}")
    try:
        hf = read_hf_facts(path)
        check_trainable(hf)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    if hf.model_type != actor.model_type:
        text = f"model_type is {hf.model_type}, the actor has {actor.model_type}"
        raise ValueError(f"{flag} {path}: {text}")
    # the ranks build it from the actor's config.json
    mine, other = _computed(actor.path), _computed(path)
    for key in sorted(mine.keys() | other):
        if mine.get(key) != other.get(key):
            raise ValueError(
                f"{flag} {path}: {key} is {other.get(key)!r} in config.json, the actor has"
                f" {mine.get(key)!r}: it would be computed as the actor, and its log-probs be others"
            )


def check_trainable(hf: HfModelFacts) -> dict[str, TensorKind]:
    """Return the tensors of a checkpoint by name.

    Raises ValueError for a family that nobody verified, and for a tensor too many or too few.
    """
    check_family(hf)
    return check_tensors(hf)


def _computed(path: Path) -> dict[str, Any]:
    """Return the keys of a checkpoint's config.json that decide log-probs, with transformers' defaults."""
    declare_torchvision_ops()
    try:
        content = read_transformers_config(path).get_text_config().to_dict()
    except Exception as error:  # transformers raises many kinds for a bad file
        raise ValueError(f"{path}/config.json: transformers cannot read it: {error}") from error
    return {
        key: value
        for key, value in content.items()
        if not any(fnmatchcase(key, pattern) for pattern in _WITHOUT_EFFECT)
    }


def check_teacher(path: Path, actor: HfModelFacts, tokenizer: Any) -> None:
    """Raise ValueError unless ``path`` is a checkpoint of the actor's model with its vocabulary.

    tokenizer: the actor's, or None if it has none.
    """
    check_other_model("--opd-teacher-load", path, actor)
    if tokenizer is None:
        return
    try:
        theirs = load_tokenizer(path).get_vocab()
    except ValueError as error:
        raise ValueError(f"--opd-teacher-load: {error}") from None
    ours = tokenizer.get_vocab()
    other = sorted(token for token in ours.keys() | theirs if ours.get(token) != theirs.get(token))
    if other:
        raise ValueError(
            f"--opd-teacher-load {path}: its tokenizer is another one: {other[0]!r} is token"
            f" {theirs.get(other[0])}, the actor has {ours.get(other[0])} ({len(other)} differ)"
        )


def served_teacher(config: RunConfig) -> ServedTeacher:
    """Make the client of --opd-teacher-url; raises ValueError for a URL or a key that HTTP cannot take."""
    rollout = config.rollout
    assert rollout.opd_teacher_url is not None
    return ServedTeacher(
        rollout.opd_teacher_url,
        api_key=engine_api_key(os.environ, TEACHER_KEY),
        request_timeout_s=rollout.rollout_request_timeout_s,
        max_concurrency=rollout.max_concurrency,
        max_tries=config.faults.max_bad_answers,
    )


def check_served_teacher(config: RunConfig, tokenizer: Any) -> None:
    """Raise ValueError for a teacher that does not answer, or whose tokenizer is not the actor's."""
    vocabulary = sorted(tokenizer.get_vocab().values())

    async def ask() -> None:
        teacher = served_teacher(config)
        try:
            await teacher.check_vocabulary(tokenizer.decode, vocabulary)
        finally:
            await teacher.aclose()

    try:
        asyncio.run(ask())
    except EngineError as error:
        raise ValueError(f"--opd-teacher-url: does not answer as it should: {error}") from None
