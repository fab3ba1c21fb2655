"""Prompts with many unknown tokens: a warning, and an error where there is nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from r3train.data.prompts import unknown_tokens
from r3train.types import Prompt

UNKNOWN = 7


def prompts(*texts):
    return [
        Prompt(f"p{n}", n, "", np.array(ids, np.int32), None, {}) for n, ids in enumerate(texts)
    ]


def test_one_prompt_of_unknown_tokens_among_others_is_a_warning():
    note = unknown_tokens(prompts([1, 2], [7, 7], [7, 1]), UNKNOWN)
    assert note == "2 of 3 prompts have more than 10% unknown tokens (first p1: 100%)"


def test_prompts_of_unknown_tokens_alone_are_refused():
    with pytest.raises(ValueError, match="every token of all 2 prompts is the tokenizer's unknown"):
        unknown_tokens(prompts([7], [7, 7]), UNKNOWN)


def test_few_unknown_tokens_are_nothing_to_tell():
    assert unknown_tokens(prompts([7, *range(10, 19)]), UNKNOWN) is None
    assert unknown_tokens(prompts([7, *range(10, 18)]), UNKNOWN) is not None
    assert unknown_tokens(prompts([7, 7]), None) is None
