"""The seconds of a Qwen3-30B-A3B step on 8 and on 16 H100s, part by part, from stated assumptions.

    python -m benchmarks.step_estimate [--write-docs]

Nothing of it was measured on a GPU.  ``--write-docs`` puts the table into docs/run/gpus.md, between its two marks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scale_costs import Model

PAGE = Path(__file__).resolve().parents[1] / "docs/run/gpus.md"
MARKS = (
    "<!-- this table is written by: python -m benchmarks.step_estimate --write-docs; do not edit -->",
    "<!-- end of the estimated step -->",
)
# decoding with overlapped scheduling against without (SGLang #23854: this model, TP 4, H200, with routes)
_OVERLAPPED = 1.155


@dataclass(frozen=True)
class Assumed:
    """The assumptions of the table: rates in bytes and operations a second."""

    samples: int = 256
    mean_tokens: int = 4096  # answers are uniform in length, up to twice the mean
    bandwidth: float = 3.35e12 * 0.8  # of a GPU's memory while it decodes
    reduce_s: float = 20e-6  # an all-reduce of two GPUs, one token each
    train_flops: float = 120e12  # of a GPU: 12% of the peak, whole layers recomputed, TP 4, EP 8
    host_copy: float = 20e9  # a rank's memory to the host and back
    publish_rate: float = 3.2e9  # shared memory, one core (measured on a CPU)
    sent_share: float = 1.0  # of the weights' bytes
    overlapped: float = _OVERLAPPED
    adam_params: float = 0.19e9  # of fused AdamW, a thread and second (measured on a CPU)
    adam_threads: int = 1
    answer_stall_s: float = (
        0.022  # of the server's event loop for the routes of one answer, base64 of int32
    )


@dataclass(frozen=True)
class Setup:
    """The GPUs of a recipe; ``publish_rate`` in bytes per second where it is not shared memory's."""

    name: str
    gpus: int
    training_gpus: int
    servers: int
    colocated: bool
    adam_on_host: bool
    publish_rate: float | None = None


COLOCATED = Setup("8, colocated", 8, 8, 4, True, False)
TWO_NODES = Setup("16: 8 train, 8 serve", 16, 8, 4, False, True, publish_rate=40e9)
MODEL = Model("Qwen3-30B-A3B", 48, 48, 8, 128, 30.53e9, 3.34e9, 32, 256, 4, 1, 1)
_EXPERT_PARAMETERS = 29.0e9
_KEY_VALUE_BYTES = 2 * 4 * 128 * 2  # of a token and layer: 4 heads of 128, bfloat16
_PASSES = 5  # old log-probs 1, forward 1, backward 2, recomputation 1

# what was changed, and what is planned: the assumptions as they were before it
CHANGES = {
    "before": {"publish_rate": 0.9e9, "overlapped": 1.0},
    "weights by shared memory": {"overlapped": 1.0},
    "overlapped scheduling": {},
    "Adam on 8 threads": {"adam_threads": 8},
    "*routes as uint8*": {"adam_threads": 8, "answer_stall_s": 0.022 / 5.3},
    "*only what changed is sent*": {
        "adam_threads": 8,
        "answer_stall_s": 0.022 / 5.3,
        "sent_share": 0.01,
    },
}


def decode_s(setup: Setup, a: Assumed) -> float:
    """Seconds until the longest answer ends: each token reads the weights that are used, and keys and values."""
    at_start, longest = a.samples / setup.servers, 2 * a.mean_tokens
    seconds = 0.0
    for token in range(longest):
        active = at_start * (1 - token / longest)
        used = 1 - (1 - MODEL.topk / MODEL.experts) ** active
        weights = 2 * (_EXPERT_PARAMETERS * used + MODEL.parameters - _EXPERT_PARAMETERS)
        cache = active * token * MODEL.layers * _KEY_VALUE_BYTES
        seconds += (weights + cache) / 2 / a.bandwidth + 2 * MODEL.layers * a.reduce_s
    return seconds * _OVERLAPPED / a.overlapped


def parts(setup: Setup, a: Assumed) -> dict[str, float]:
    """Seconds of each part of a step."""
    tokens = a.samples * a.mean_tokens
    forward = tokens * MODEL.forward_flops(a.mean_tokens)
    rate = setup.publish_rate or a.publish_rate
    per_rank = MODEL.parameters / setup.training_gpus
    adam = 2 * per_rank / (a.adam_params * a.adam_threads) if setup.adam_on_host else 0.0
    return {
        "generation": decode_s(setup, a),
        "routes leave the servers": a.answer_stall_s * a.samples / setup.servers,
        "old pass, training": _PASSES * forward / (setup.training_gpus * a.train_flops),
        "Adam on the host": adam,
        "memory to the host and back": 2 * 31e9 / a.host_copy if setup.colocated else 0.0,
        "publish": 2 * MODEL.parameters * a.sent_share / rate,
    }


def step_s(found: dict[str, float], setup: Setup) -> float:
    """Parts one after the other; where others serve, the longer of serving and training, and the publish."""
    if setup.colocated:
        return sum(found.values())
    serving = found["generation"] + found["routes leave the servers"]
    training = sum(found.values()) - serving - found["publish"]
    return max(serving, training) + found["publish"]


def table() -> list[str]:
    """Markdown: a row for each part, then one for each change with the whole step."""
    setups = (COLOCATED, TWO_NODES)
    now = Assumed(adam_threads=8)
    found = [parts(setup, now) for setup in setups]
    lines = ["| seconds of a step, today | " + " | ".join(f"{s.name}" for s in setups) + " |"]
    lines.append("|---|" + "---|" * len(setups))
    for name in found[0]:
        lines.append(f"| {name} | " + " | ".join(f"{f[name]:.1f}" for f in found) + " |")
    lines += [
        "",
        "| with, one after the other (*not built*) | 8: step, tokens/s/GPU | 16: the same |",
    ]
    lines.append("|---|---|---|")
    for name, changed in CHANGES.items():
        cells = []
        for setup in setups:
            a = replace(Assumed(), **changed)
            seconds = step_s(parts(setup, a), setup)
            rate = a.samples * a.mean_tokens / seconds / setup.gpus
            cells.append(f"{seconds:.0f} s, {rate:,.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def written(page: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(MARKS[0])
    return "\n".join([before + MARKS[0], "", *table(), "", MARKS[1]]) + rest.split(MARKS[1])[1]


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help="write docs/run/gpus.md")
    if parser.parse_args().write_docs:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
