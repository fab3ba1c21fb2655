"""Turn your own download of GSM8K into prompts: messages, the number as label, the solution next to it.

Reads the data set's files as published, .parquet or .jsonl with keys question and answer, and writes
train.parquet and test.parquet.  Nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pyarrow
from pyarrow import parquet

from r3train.config.data_settings import PromptFile
from r3train.data.prompts import Record, read_records

MARK = "####"
INSTRUCTION = f"Reason step by step, then give the final number after {MARK}."


def prompt_of(record: Record) -> dict[str, Any]:
    """One row of prompts; raises ValueError naming the row."""
    question, answer = record.content.get("question"), record.content.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or MARK not in answer:
        raise ValueError(
            f"{record.where}: expected question and an answer that ends in {MARK} and a number"
        )
    return {
        "input": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "label": answer.rpartition(MARK)[2].strip(),
        "metadata": {"solution": answer},
    }


@click.command(help=__doc__)
@click.option("--train", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--test", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(train: Path, test: Path, output: Path) -> None:
    """Write both files."""
    output.mkdir(parents=True, exist_ok=True)
    for name, source in (("train", train), ("test", test)):
        try:
            prompts = [prompt_of(record) for record in read_records(PromptFile(source))]
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        path = output / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(prompts), path)
        click.echo(f"{path}: {len(prompts):,} prompts")


if __name__ == "__main__":
    main()
