"""Write questions in the form of GSM8K's published files: sums in words, made here.

They stand in for the data set where it was not downloaded: on a laptop, and in the tests.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import click

NAMES = "Ann Ben Cleo Dan Eva Finn".split()
THINGS = "apples pens books eggs coins shells".split()


def row(numbers: random.Random) -> dict[str, str]:
    """One question, and its answer in the published notation."""
    name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
    has, gets = numbers.randint(1, 9), numbers.randint(1, 9)
    total = has + gets
    held = thing if has > 1 else thing.removesuffix("s")
    return {
        "question": f"{name} has {has} {held} and gets {gets} more. How many {thing} are there?",
        "answer": f"{has} + {gets} = <<{has}+{gets}={total}>>{total} {thing}.\n#### {total}",
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A directory.")
@click.option("--train", default=200, show_default=True, help="Rows of train.jsonl.")
@click.option("--test", default=20, show_default=True, help="Rows of test.jsonl.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, train: int, test: int, seed: int) -> None:
    """Write both files."""
    output.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed)
    for name, count in (("train", train), ("test", test)):
        lines = [json.dumps(row(numbers)) + "\n" for _ in range(count)]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        click.echo(f"{output / name}.jsonl: {count:,} rows")


if __name__ == "__main__":
    main()
