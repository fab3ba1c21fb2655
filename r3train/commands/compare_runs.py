"""``r3train compare``: the first places in which two runs differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from r3train.config.options import usage_errors
from r3train.loop.replay_source import load_rollout
from r3train.observe.metrics import numbers, read_metrics
from r3train.audit.audit_run import audit_run
from r3train.report.report_data import read_settings

# what two starts of one run differ in, and says nothing about what they compute
_OF_THE_START = ("run", "checkpoint", "trackers", "faults")
_NOT_COMPARED = ("perf/", "faults/", "rollout/generation_s")
_SHOWN = 10
# of a metric in both runs together; fewer do not tell its noise
_LEAST_CHANGES = 4


@click.command()
@click.argument("run_dirs", nargs=2, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--noise",
    type=click.FloatRange(0),
    default=6.0,
    show_default=True,
    help="Difference of a metric that counts, in units of its own step-to-step change; 0: any.",
)
def compare(run_dirs: tuple[Path, Path], noise: float) -> None:
    """Say in which setting, metric, token and layer the two RUN_DIRS first differ.

    Exit code: 0 if every metric stays within the noise and no dumped token differs, 1 if not, 2 wrong
    usage.  A run and its resume, or two runs of one seed without staleness, may be asked for --noise 0.
    """
    with usage_errors():
        try:
            records = [read_metrics(path) for path in run_dirs]
            settings = [_settings(path) for path in run_dirs]
        except OSError as error:
            raise ValueError(
                f"{error.filename}: {error.strerror}: is it a run directory?"
            ) from None
        tokens = first_token(*run_dirs)
    one, other = settings
    unlike = [name for name in sorted(one | other) if one.get(name) != other.get(name)]
    for name in unlike[:_SHOWN]:
        click.echo(f"setting {name}: {one.get(name, 'unset')!r}, {other.get(name, 'unset')!r}")
    if len(unlike) > _SHOWN:
        click.echo(f"settings: {len(unlike) - _SHOWN} more")
    found = first_metric(*records, noise=noise)
    common = {r["step"] for r in records[0]} & {r["step"] for r in records[1]}
    if not common:
        raise click.UsageError("the two runs have no step in common")
    if not found and noise and len(common) < 1 + _LEAST_CHANGES // 2:
        click.echo(
            f"metrics: not compared, {len(common)} steps do not tell their noise (--noise 0)"
        )
    else:
        click.echo(found or f"metrics: within the noise in all {len(common)} steps of both")
    if tokens is None:
        click.echo("tokens: not compared, no rollout was dumped by both (--dump-rollouts)")
    else:
        click.echo(tokens or "tokens: equal in all dumped rollouts of both (--dump-rollouts)")
    layers = [audit_run(path).layer_agreement for path in run_dirs]
    for layer in sorted(layers[0].keys() & layers[1].keys()):
        a, b = layers[0][layer], layers[1][layer]
        click.echo(f"agreement of layer {layer}: {a:.4f}, {b:.4f} ({b - a:+.4f})")
    sys.exit(1 if found or tokens else 0)


def _settings(run_dir: Path) -> dict[str, Any]:
    found = read_settings(run_dir)
    return {k: v for k, v in found.items() if k.partition(".")[0] not in _OF_THE_START}


def first_metric(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], *, noise: float
) -> str:
    """The first step, and its metric furthest out, at which two runs differ by more than noise; or "".

    noise: in units of the metric's median change from one step to the next in both runs, or of its mean
    change where most steps change nothing.  Of a metric with fewer than four changes only a number next to
    none counts, unless noise is 0.  Times are not compared.
    """
    worst: tuple[int, float, str] | None = None
    for key in sorted({k for r in one for k in r} & {k for r in other for k in r}):
        if key in ("step", "time") or key.startswith(_NOT_COMPARED):
            continue
        a, b = (dict(zip(*numbers(records, key))) for records in (one, other))
        changes = [abs(np.diff(list(values.values()))) for values in (a, b)]
        changes = np.concatenate(changes)
        changes = changes[np.isfinite(changes)]
        unit = float(np.median(changes) or np.mean(changes)) if len(changes) else 0.0
        most = np.finfo(float).max if noise and len(changes) < _LEAST_CHANGES else noise * unit
        for step in sorted(a.keys() & b.keys()):
            gap = np.nan_to_num(abs(a[step] - b[step]), nan=np.inf, posinf=np.inf)
            same = a[step] == b[step] or (np.isnan(a[step]) and np.isnan(b[step]))
            if same or gap <= most:
                continue
            far = gap / unit if unit else np.inf
            if worst is None or (step, -far) < worst[:2]:
                text = f"metric {key}: {a[step]:.6g}, {b[step]:.6g} at step {step}"
                worst = (step, -far, text)
            break
    return "" if worst is None else worst[2]


def first_token(one: Path, other: Path) -> str | None:
    """The first sample of the first dumped rollout of both runs with another token, in words; or "".

    None where no rollout was dumped by both.
    """
    places = [path / "rollouts" for path in (one, other)]
    ids = [
        {int(file.stem.rpartition("_")[2]) for file in place.glob("rollout_*.safetensors")}
        for place in places
    ]
    if not ids[0] & ids[1]:
        return None
    for rollout_id in sorted(ids[0] & ids[1]):
        samples = [
            {s.sample_id: s for group in load_rollout(place, rollout_id) for s, _ in group}
            for place in places
        ]
        if samples[0].keys() != samples[1].keys():
            odd = min(samples[0].keys() ^ samples[1].keys())
            return f"tokens: of rollout {rollout_id} only one run has sample {odd}"
        for sample_id in sorted(samples[0]):
            a, b = (run_samples[sample_id] for run_samples in samples)
            length = min(a.num_tokens, b.num_tokens)
            unlike = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
            if len(unlike) or a.num_tokens != b.num_tokens:
                place = int(unlike[0]) if len(unlike) else length
                got = [int(s.token_ids[place]) if place < s.num_tokens else "none" for s in (a, b)]
                return (
                    f"tokens: rollout {rollout_id}, sample {sample_id} ({a.prompt.prompt_id}):"
                    f" token {place - a.prompt_len} of the response is {got[0]}, {got[1]}"
                )
    return ""
