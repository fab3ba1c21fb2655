"""Turn your own downloads of DAPO-Math-17k and MATH-500 into the prompts that most recipes read.

\b
    hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir downloads/dapo
    hf download HuggingFaceH4/MATH-500 --repo-type dataset --local-dir downloads/math500
    python examples/math/prepare.py --train downloads/dapo/data/dapo-math-17k.parquet \\
        --test downloads/math500/test.jsonl

Writes math_train.parquet and math500.parquet.  Nothing is fetched.

DAPO-Math-17k has the layout of verl's files: prompt, messages that ask for "Answer: ..." in the last line, and
reward_model.ground_truth.  Every prompt stands in it about a hundred times: one of each is kept, and none of
those that have several answers.  MATH-500 has problem, answer, unique_id, subject and level; the instruction
to box the answer is ours.
"""

# Layouts: recipe/dapo/prepare_dapo_data.sh and issue 3065 of github.com/verl-project/verl (the repeats);
# skyrl-train/examples/algorithms/dapo of github.com/NovaSky-AI/SkyRL (prompts of several answers);
# math_500 of github.com/huggingface/lighteval, and the page of the data set.

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pyarrow
from pyarrow import parquet

from r3train.config.data_settings import PromptFile
from r3train.data.prompts import Record, read_records, required

INSTRUCTION = r"Reason step by step, then put the final answer into \boxed{}."
_KEPT = ("unique_id", "subject", "level")


def train_prompts(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The prompts of DAPO-Math-17k, and a line about what was left out; raises ValueError naming the row."""
    answers: dict[tuple[tuple[str, str], ...], set[str]] = {}
    rows = 0
    for rows, record in enumerate(read_records(PromptFile(path)), 1):
        prompt, answer = required(record, "prompt"), text_of(record, "reward_model.ground_truth")
        try:
            messages = tuple((message["role"], message["content"]) for message in prompt)
        except (TypeError, KeyError):
            raise ValueError(
                f"{record.where}: key prompt: expected messages of role and content, got"
                f" {str(prompt)[:60]!r}"
            ) from None
        answers.setdefault(messages, set()).add(answer)
    prompts = [
        {
            "prompt": [{"role": role, "content": content} for role, content in messages],
            "label": next(iter(found)),
        }
        for messages, found in answers.items()
        if len(found) == 1
    ]
    unsure = len(answers) - len(prompts)
    left_out = f" and {unsure:,} prompts of several answers" if unsure else ""
    return prompts, f"left out: {rows - len(answers):,} repeats{left_out}"


def test_prompts(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The prompts of MATH-500, and the instruction that each got; raises ValueError naming the row."""
    prompts = []
    for record in read_records(PromptFile(path)):
        problem, answer = text_of(record, "problem"), text_of(record, "answer")
        prompts.append(
            {
                "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
                "label": answer,
                "metadata": {key: required(record, key) for key in _KEPT},
            }
        )
    return prompts, f"each ends in: {INSTRUCTION}"


def text_of(record: Record, key: str) -> str:
    """The text of a key; raises ValueError naming the row and the key."""
    text = required(record, key)
    if not isinstance(text, str):
        raise ValueError(f"{record.where}: key {key}: expected text, got {str(text)[:60]!r}")
    return text


@click.command(help=__doc__)
@click.option("--train", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--test", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), default="data", show_default=True)
def main(train: Path, test: Path, output: Path) -> None:
    """Write both files."""
    output.mkdir(parents=True, exist_ok=True)
    for name, prompts_of, source in (
        ("math_train", train_prompts, train),
        ("math500", test_prompts, test),
    ):
        click.echo(f"reading {source} ...", err=True)  # half a minute
        try:
            prompts, note = prompts_of(source)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        path = output / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(prompts), path)
        click.echo(f"{path}: {len(prompts):,} prompts; {note}")


if __name__ == "__main__":
    main()
