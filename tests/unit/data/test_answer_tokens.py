"""The tokens of a conversation that are trained: spaces, the end of an answer, and nothing after it."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from r3train.families.read_facts import read_hf_facts
from r3train.launch.job.read_data import read_conversations
from tests.unit.config.test_config import config

# as Qwen's: a turn ends with its own token, and then a newline
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# nothing follows the end
ENDING = QWEN.replace("<|im_end|>\n", "<|im_end|>")
# nothing ends an answer
ENDLESS = QWEN.replace("<|im_end|>\n", "")
CODE = [
    {"role": "user", "content": "y  y"},
    {"role": "assistant", "content": "x  =   1\n    y"},
    {"role": "user", "content": "y"},
    {"role": "assistant", "content": "  x"},
]


def tokenizer(template: str, *, trim_offsets: bool) -> PreTrainedTokenizerFast:
    """Byte-level, with spaces in pairs, as tokenizers of code have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)}
    words["ĠĠ"] = len(words)
    inner = Tokenizer(models.BPE(words, [("Ġ", "Ġ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = template
    return made


def answers(tiny, tmp_path, template, *, talk=CODE, stop=True, trim_offsets=False) -> list[str]:
    """The runs of trained tokens of one conversation, as the training command reads it."""
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    words = tokenizer(template, trim_offsets=trim_offsets)
    end = words.convert_tokens_to_ids("<|im_end|>")
    settings = config(
        loss_type="sft",
        prompt_data=str(path),
        input_key="messages",
        rollout_max_response_len=100,
        rollout_stop_token_ids=[end] if stop else [],
    )
    ((sample,),) = read_conversations(settings, read_hf_facts(tiny / "model"), words, print)
    shown = "".join(
        text if in_loss else "\0"
        for text, in_loss in zip(map(words.decode, sample.token_ids.tolist()), sample.loss_mask)
    )
    return [run for run in shown.split("\0") if run]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_spaces_of_an_answer_are_trained_whatever_the_tokenizer_says_of_their_place(
    trim_offsets, tiny, tmp_path
):
    """A token of spaces alone has an empty span where offsets are trimmed: indentation of code."""
    found = answers(tiny, tmp_path, QWEN, trim_offsets=trim_offsets)
    assert found == ["x  =   1\n    y<|im_end|>", "  x<|im_end|>"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_spaces_at_an_answers_edges_belong_to_it_and_those_before_it_do_not(
    trim_offsets, tiny, tmp_path
):
    """The template's own spaces end where the answer begins, and the answer's where it ends."""
    template = "{% for m in messages %}{{ m.role }}:  {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:  {% endif %}"
    talk = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "x  "}]
    talk += [{"role": "user", "content": "  y"}, {"role": "assistant", "content": "z"}]
    found = answers(tiny, tmp_path, template, talk=talk, trim_offsets=trim_offsets)
    assert found == ["x  ", "z"]


def test_the_end_of_an_answer_is_trained_where_nothing_follows_it(tiny, tmp_path):
    found = answers(tiny, tmp_path, ENDING)
    assert found == ["x  =   1\n    y<|im_end|>", "  x<|im_end|>"]


def test_what_the_template_writes_after_a_stop_token_is_not_trained(tiny, tmp_path):
    """Without a token that ends answers for the servers, all that the template writes is trained."""
    assert answers(tiny, tmp_path, QWEN)[0] == "x  =   1\n    y<|im_end|>"
    assert answers(tiny, tmp_path, QWEN, stop=False)[0] == "x  =   1\n    y<|im_end|>\n"
    assert answers(tiny, tmp_path, ENDLESS) == ["x  =   1\n    y", "  x"]
