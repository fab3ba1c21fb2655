"""Reward functions of a user, good and bad, for tests that name them by their import path."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np

PATH = f"{__name__}:"
_TOGETHER = threading.Barrier(512)
calls: Counter[str] = Counter()


def half(prompt, text, ids):
    return 0.5


def five_and_more(prompt, text, ids):
    return 5 + len(ids)


def even_and_small(prompt, text, ids):
    """The share of even tokens, and how small the first token is; a third number is not asked for."""
    even = float(np.mean([token % 2 == 0 for token in ids]))
    return {"even": even, "small": -ids[0] / 10, "unused": 1e6}


def number(prompt, text, ids):
    return len(ids)


def numpy_number(prompt, text, ids):
    return np.float32(0.25)


def length_of_text(sample):
    return len(sample.text)


async def later(prompt, text, ids):
    await asyncio.sleep(0.01)
    return 1.0


async def later_of_sample(sample):
    await asyncio.sleep(0.01)
    return sample.response_len


def by_prompt(prompt, text, ids):
    time.sleep(0.001)
    return prompt.index / 2


def one_second(prompt, text, ids):
    time.sleep(1)
    return 1.0


def with_511_others(prompt, text, ids):
    _TOGETHER.wait()
    return 1.0


def counts_calls(prompt, text, ids):
    calls["all"] += 1
    return calls["all"]


def ranks(samples):
    """The rank of each sample's length in its group."""
    lengths = [len(sample.text) for sample in samples]
    return [sorted(lengths).index(length) for length in lengths]


async def ranks_later(samples):
    await asyncio.sleep(0.01)
    return np.array(ranks(samples))


def tables(prompt, text, ids):
    return {"score": 0.5, "length": len(text), "why": "half of it"}


def tables_of_group(samples):
    return [{"score": place} for place, _ in enumerate(samples)]


def one_too_few(samples):
    return [0.0] * (len(samples) - 1)


def nan(prompt, text, ids):
    return float("nan")


def nothing(prompt, text, ids):
    return None


# by the answer for which it is given
NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "null": None, "text": "1.0"}


def spoilt(prompt, text, ids):
    return NO_NUMBERS.get(text, 1.0)


def spoilt_table(prompt, text, ids):
    return {"sound": 1.0, "spoilt": NO_NUMBERS.get(text, 1.0)}


def spoilt_group(samples):
    return [1.0, NO_NUMBERS.get(samples[1].text, 1.0)]


def spoilt_group_of_tables(samples):
    return [spoilt_table(None, sample.text, ()) for sample in samples]


def text(prompt, text, ids):
    return "1.0"


def fails(prompt, text, ids):
    raise KeyError("gold")


def floods(prompt, text, ids):
    sys.stdout.write("x" * 1_000_000)
    raise ValueError("y" * 10_000_000)


def returns_much(prompt, text, ids):
    return ["z" * 10_000_000]


def cancels(prompt, text, ids):
    raise asyncio.CancelledError


def exits(prompt, text, ids):
    sys.exit(0)


async def exits_later(prompt, text, ids):
    sys.exit(0)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def fails_mutely(prompt, text, ids):
    raise Mute


def ends_its_process(prompt, text, ids):
    os._exit(3)


def crashes(prompt, text, ids):
    os.abort()


def hangs(prompt, text, ids):
    if prompt.index == 1:
        threading.Event().wait()
    return 1.0


def hangs_with_child(prompt, text, ids):
    child = subprocess.Popen(["sleep", "600"])
    prompt.metadata["pids"].write_text(f"{os.getpid()} {child.pid}")
    child.wait()


async def hangs_async(prompt, text, ids):
    time.sleep(600)  # blocks its own event loop


def holds_the_interpreter(prompt, text, ids):
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))  # years, without letting go


def short(text):
    return 1.0


def two(prompt, text):
    return 1.0


value = 3


def late(function):
    """A function that misbehaves while a job runs: the trial before it scores samples 0 alone."""

    def after_the_trial(sample):
        response = sample.token_ids[sample.prompt_len :]
        return 1.0 if sample.sample_id == 0 else function(sample.prompt, sample.text, response)

    return after_the_trial


late_fails, late_exits, late_floods = late(fails), late(exits), late(floods)
late_hangs_async, late_ends_its_process = late(hangs_async), late(ends_its_process)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float((data_source, solution_str, ground_truth) == ("p.jsonl", "four", "x")) + len(
        extra_info
    )


def of_verl_gsm8k(solution_str, ground_truth, method="strict"):
    return 2.0 * (solution_str == "four" and ground_truth == "x")


def of_verl_with_more(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(extra_info["n"]) + len(kwargs)


async def of_trl(completions, label, n, **kwargs):
    assert sorted(kwargs) == ["completion_ids", "prompts"]
    return [len(text) + (of == "x") + more for text, of, more in zip(completions, label, n)]


def of_trl_chat(prompts, completions):
    return [len(completion[0]["content"]) for completion in completions]


def of_trl_too_many(completions):
    return [1.0, 2.0]


def of_verl_source(data_source, solution_str, ground_truth):
    return float(data_source == "openai/gsm8k")


def of_trl_prompts(prompts, completions, level, **kwargs):
    return [
        prompt[-1]["content"] + completion[-1]["content"] == "cat" + "dog"
        for prompt, completion in zip(prompts, completions)
    ]


def of_verifiers(prompt, completion, answer, info):
    return float((prompt, completion, answer) == ("text", "four", "x")) + info["n"]


def of_verifiers_chat(completion, answer):
    return float(completion[-1]["content"] == answer)


def of_verifiers_state(completion, answer, state):
    return 1.0


def of_areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    same = (prompt, completions, answer) == ("text", "four", "x")
    return float(same) + len(prompt_ids) + len(completion_ids) + kwargs["n"]


def of_openrlhf(queries, prompts, labels):
    return [1.0]


def of_response_label(prompt, response, label):
    return 1.0


def of_correct_answer(question, text, correct_answer):
    return 1.0


class OfSwift:
    def __call__(self, completions, label, **kwargs):
        return [float(text == of) for text, of in zip(completions, label)]


of_swift = OfSwift()


async def of_slime(args, sample, **kwargs):
    return 1.0


def of_verl_wanting_more(solution_str, ground_truth, tokenizer):
    return 1.0


def of_text(prompt, text, ids):
    return len(text)


def wants_a_box(prompt, text, ids):
    return float(f"\\boxed{{{prompt.label}}}" in text)


def first_word(prompt, text, ids):
    return float(bool(text.split()))


def picky(prompt, response_text, response_ids):
    return 0.0


def _yes_alone(prompts):
    for prompt in prompts:
        if prompt.label != "yes":
            raise ValueError(f"no label {prompt.label!r}")


picky.check = _yes_alone


def of_two_arguments(prompt, response_text):
    return 0.0
