"""A name of the Hugging Face hub where a path is expected: the refusal says how to download it."""

from __future__ import annotations

import pytest
from tests.unit.launch.test_preflight import start, words

QWEN = "hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B"
GSM8K = "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k"


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            ["--hf-checkpoint", "Qwen/Qwen3-30B-A3B"],
            f"no such checkpoint directory (hf_checkpoint); r3train downloads nothing: {QWEN}",
        ),
        (
            ["--ref-load", "Qwen/Qwen3-30B-A3B", "--kl-loss-coef", "0.1"],
            f"--ref-load: Qwen/Qwen3-30B-A3B: no such checkpoint directory; r3train downloads nothing: {QWEN}",
        ),
        (
            ["--prompt-data", "openai/gsm8k@[0:10]"],
            f"openai/gsm8k: no such prompt file (prompt_data); r3train downloads nothing: {GSM8K}",
        ),
        (
            ["--eval-prompt-data", "test", "openai/gsm8k", "--eval-interval", "1"],
            f"evaluation set test: openai/gsm8k: no such prompt file (prompt_data); r3train downloads"
            f" nothing: {GSM8K}",
        ),
        # not names of the hub
        (
            ["--hf-checkpoint", "models/Qwen3"],
            "models/Qwen3: no such checkpoint directory (hf_checkpoint)",
        ),
        (
            ["--hf-checkpoint", "tests/Qwen3"],
            "tests/Qwen3: no such checkpoint directory (hf_checkpoint)",
        ),
        (["--prompt-data", "mine/a.jsonl"], "mine/a.jsonl: no such prompt file (prompt_data)"),
        (["--prompt-data", "a/b/c"], "a/b/c: no such prompt file (prompt_data)"),
    ],
)
def test_a_name_of_the_hub_is_answered_with_the_download(tiny, flags, line):
    assert words(start(tiny, *flags)).rstrip().endswith(line)
