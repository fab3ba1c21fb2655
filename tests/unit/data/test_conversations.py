"""Conversations as samples: which tokens are the assistant's, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.conversations import load_conversations
from r3train.launch.job.read_data import check_longest_conversation
from tests.unit.config.test_config import config

# a turn is its role, its words and an end; the assistant's begins like the words that ask for it
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# leaves out the thoughts of every answer but the last
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}hm {% endif %}"
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<user>", "<assistant>", "<system>", "<end>", "hm", "cat", "dog", "cow", "?"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    made.chat_template = template
    return made


def load(tmp_path, *lines, template=TEMPLATE, longest=100, notes=None):
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    overlong = "error" if notes is None else "drop"
    data = DataSection(prompt_data=str(path), input_key="messages", overlong_prompts=overlong)
    limit, kept = (longest, "rollout_max_prompt_len"), [] if notes is None else notes
    options = {"max_response_len": longest, "note": lambda text, remedy: kept.append(text)}
    return load_conversations(PromptFile(path), data, tokenizer(template), limit, **options)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def trained(sample) -> list[str]:
    return [WORDS[i] for i in sample.token_ids[sample.loss_mask]]


def test_conversations_that_are_too_long_are_dropped_and_counted(tmp_path):
    short = [turn("user", "cat"), turn("assistant", "cat")]
    long, notes = [turn("user", "cat"), turn("assistant", "cat " * 9)], []
    (one,) = load(tmp_path, long, short, longest=5, notes=notes)
    assert one.prompt.prompt_id == "talk.jsonl:2"
    (text,) = notes
    assert "dropped 1 of 2 conversations" in text and "rollout_max_response_len" in text
    with pytest.raises(ValueError, match="drops all of 1 conversations, which are too long"):
        load(tmp_path, long, longest=5, notes=notes)
    with pytest.raises(ValueError, match="talk.jsonl.*rollout_max_response_len"):
        load(tmp_path, long, short, longest=5)


def test_the_assistants_words_and_ends_are_trained_wherever_they_stand(tmp_path):
    """Words that the user says too are told apart by their place."""
    (one,) = load(
        tmp_path,
        [
            turn("system", "dog"),
            turn("user", "cat dog"),
            turn("assistant", "cat cat"),
            turn("user", "<assistant> cow"),
            turn("assistant", "dog"),
            turn("user", "cat"),
        ],
    )
    assert trained(one) == ["cat", "cat", "<end>", "dog", "<end>"]
    assert [WORDS[i] for i in one.prompt.token_ids] == (
        "<system> dog <end> <user> cat dog <end> <assistant>".split()
    )
    assert one.prompt_len == len(one.prompt.token_ids) == int(np.flatnonzero(one.loss_mask)[0])
    assert one.prompt.prompt_id == "talk.jsonl:1" and one.text.startswith("cat cat <end>")
    assert not one.rollout_log_probs.any() and (one.weight_versions == -1).all()


@pytest.mark.parametrize(
    "message, line, template",
    [
        ("jsonl:1: no message of role assistant", [turn("user", "cat")], TEMPLATE),
        ("jsonl:1: key messages: got 'cat', expected a list of messages", "cat", TEMPLATE),
        ("no chat template", [turn("user", "cat"), turn("assistant", "dog")], None),
        (
            "jsonl:1: the chat template fails",
            [turn("user", "cat"), turn("assistant", "dog")],
            "{{ raise_exception('no') }}",
        ),
        (
            "jsonl:1: the chat template renders message 2 otherwise",
            [turn("user", "cat"), turn("assistant", "dog")] * 2,
            FORGETFUL,
        ),
    ],
)
def test_a_conversation_that_cannot_be_trained_names_its_line(message, line, template, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, line, template=template)


@pytest.mark.parametrize(
    "message, turns",
    [
        (r"the prompt has 6 tokens, at most 5 fit \(rollout_max_prompt_len\)", ("cat " * 3, "dog")),
        (r"has 6 tokens, at most 5 fit \(rollout_max_response_len\)", ("cat", "dog " * 5)),
    ],
)
def test_a_conversation_that_is_too_long_is_refused(message, turns, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, [turn("user", turns[0]), turn("assistant", turns[1])], longest=5)


def test_a_conversation_that_no_microbatch_holds_is_named(tmp_path):
    short, long = load(
        tmp_path,
        [turn("user", "cat"), turn("assistant", "dog")],
        [turn("user", "cat"), turn("assistant", "dog " * 5)],
    )
    made = config(loss_type="sft", max_tokens_per_gpu=5, context_parallel_size=2)
    check_longest_conversation(made, [short, long])
    made = config(loss_type="sft", max_tokens_per_gpu=9)
    with pytest.raises(ValueError, match="talk.jsonl:2: the conversation has 10 tokens, .* = 9$"):
        check_longest_conversation(made, [short, long])


def test_a_template_that_forgets_thoughts_trains_the_last_answer(tmp_path):
    (one,) = load(tmp_path, [turn("user", "cat"), turn("assistant", "dog")], template=FORGETFUL)
    assert trained(one) == ["hm", "dog", "<end>"]


def test_a_template_whose_opening_is_not_that_of_the_answer_is_refused(tmp_path):
    """The words that ask for an answer must begin the answer, or its place would not be known."""
    asks = TEMPLATE.replace("<assistant> {% endif %}", "<assistant> hm {% endif %}")
    talk = [turn("user", "cat"), turn("assistant", "dog")]
    with pytest.raises(ValueError, match="jsonl:1: the chat template renders message 2 otherwise"):
        load(tmp_path, talk, template=asks)
    (one,) = load(tmp_path, talk)
    assert one.prompt.text == "<user> cat <end> <assistant> " and one.text == "dog <end> "
