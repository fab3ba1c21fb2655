"""Write docs/reference/metrics.md from r3train/observe/metrics.toml; --check fails where it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from r3train.observe.metric_table import METRICS

PAGE = Path(__file__).parent / "reference/metrics.md"
HEAD = """# Metrics

<!-- Written by docs/write_metrics.py (`make docs`) from r3train/observe/metrics.toml. Do not edit. -->

Each step is one JSON object in `RUN/metrics.jsonl`, with `step`, `time` (seconds since 1970) and these keys.
The same numbers go to TensorBoard (`RUN/tensorboard`), W&B and MLflow. `r3train report RUN` draws them.

A capital word in a key stands for a part that varies. GB is 10^9 bytes. A metric whose setting is off is absent.
A loss of your own adds its metrics as `train/NAME`. A number that is not finite is the text "nan", "inf" or
"-inf". An evaluation has a weight version and no step: its lines are in `RUN/eval/metrics.jsonl`, where `step`
is the version.

To add a metric, add it in the code and a row in that table; a test holds the two together.
"""


def page() -> str:
    """Return the whole page as text."""
    parts = [HEAD]
    for title, rows in METRICS.items():
        parts += [f"## {title}", "", "| key | unit | meaning |", "|---|---|---|"]
        parts += [
            f"| `{r.key}` | {r.unit} | {r.meaning.replace('|', chr(92) + '|')} |" for r in rows
        ]
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Write the page, or check it."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif page() != PAGE.read_text(encoding="utf-8"):
        sys.exit(f"{PAGE} is not what the metrics' table says: make docs")


if __name__ == "__main__":
    main()
