"""Prompts of 200 tokens and toys of other attention, for the jobs of the first day on GPUs.

    python -m benchmarks.gpu_toys DIRECTORY [--size gpu]

DIRECTORY holds a tiny model.  Writes DIRECTORY/long.jsonl, its prompts with words before them, and a model of each family
of ``FAMILIES`` in DIRECTORY/FAMILY: latent attention, delta nets, sinks and windows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from r3train.families.tiny_options import SIZES, TinyOptions
from r3train.verify.tiny import FILLERS, build

FAMILIES = ("moonlight", "qwen3_5_moe", "gpt_oss")
PROMPT_TOKENS = 200


def lengthened(line: str, num_tokens: int = PROMPT_TOKENS) -> str:
    """A line of prompts.jsonl whose input has so many words, each a token, the question last."""
    record = json.loads(line)
    before = num_tokens - len(record["input"].split())
    record["input"] = " ".join([*islice(cycle(FILLERS), before), record["input"]])
    return json.dumps(record)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="gpu")
    given = parser.parse_args(arguments)
    lines = (given.directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = "".join(f"{lengthened(line)}\n" for line in lines)
    (given.directory / "long.jsonl").write_text(text, encoding="utf-8")
    for family in FAMILIES:
        options = replace(TinyOptions(), **SIZES[given.size], family=family)
        build(given.directory / family, options, force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
