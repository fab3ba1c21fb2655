"""Special tokens of a prompt: the tokenizer adds them to plain text, and a chat template writes its own."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.prompts import load_prompts

WORDS = ["<s>", "user", "cat", "dog", "?"]
TEMPLATE = "{{ bos_token }} {% for m in messages %}user {{ m.content }} {% endfor %}"


def tokenizer():
    """Begins every text with <s>, as Llama's and DeepSeek's do."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", bos_token="<s>")
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize(
    "chat, expected", [(False, ["<s>", "cat", "dog"]), (True, ["<s>", "user", "cat", "dog"])]
)
def test_a_prompt_begins_with_one_token_of_the_beginning(chat, expected, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"input": "cat dog", "label": 1}) + "\n")
    data = DataSection(prompt_data=str(path), apply_chat_template=chat)
    [prompt] = load_prompts(PromptFile(path), data, tokenizer(), (10, "limit"))
    assert [WORDS[i] for i in prompt.token_ids] == expected


@pytest.mark.parametrize("chat", [False, True])
def test_half_of_a_surrogate_pair_is_refused_with_its_line(chat, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "cat \\ud800", "label": 1}\n')
    data = DataSection(prompt_data=str(path), apply_chat_template=chat)
    with pytest.raises(ValueError, match="jsonl:1: character .* half of a surrogate pair"):
        load_prompts(PromptFile(path), data, tokenizer(), (10, "limit"))
