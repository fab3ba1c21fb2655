"""``r3train check-evidence``: the verdict on a run's R3 evidence for a person, a script, a PR."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r3train.config.sources import plain
from r3train.audit.findings import CUSTODY, RECHECK, SERVED

if TYPE_CHECKING:
    from r3train.audit.findings import Audit

EXIT_CODES = {"passed": 0, "suspect": 0, "failed": 1, "no evidence": 3}
_SHOWN = 10
# what Markdown would read as its own: a damaged record may say anything
_MARKDOWN = re.compile(r"[\\|`*<\[]")
_COLORS = {"passed": "green", "failed": "red"}
_CLAIM_WORDS = {
    "applied": "what Megatron dispatched is what the rollout chose",
    "covered": "every router call and every row is accounted for",
    "agreement": "the trainer's own choice stays near the rollout's",
    RECHECK: "the rollout's experts are those that its servers chose",
    CUSTODY: "an agent's tokens are trained exactly once, and no others",
    SERVED: "after an update servers compute what the actor computes",
}


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Also write a summary for a pull request to this file (- prints it).",
)
@click.option(
    "--r3-mismatch-threshold",
    "threshold",
    type=click.FloatRange(0, 1),
    help="Largest share of the rows of the actor's own weight version that may have no expert in common; it "
    "replaces the run's own threshold and the run's verdict on it."
    "  [default: the run's own]",
)
@click.option(
    "--min-steps",
    type=click.IntRange(1),
    help="Fail where RUN_DIR has evidence of fewer steps.",
)
@click.option(
    "--accept-superseded-failures",
    is_flag=True,
    help="A failure at a step that a later start trained again is a note, and does not fail.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 where a step was suspect.")
def check_evidence(
    run_dir: Path,
    as_json: bool,
    markdown: Path | None,
    threshold: float | None,
    min_steps: int | None,
    accept_superseded_failures: bool,
    strict: bool,
) -> None:
    """Judge the R3 evidence of RUN_DIR again from its records.

    Exit code: 0 passed or suspect, 1 failed (what and where is said), 3 no evidence, 2 wrong usage.
    """
    from r3train.audit.audit_run import audit_run  # numpy, which --help does without

    if threshold is not None and math.isnan(threshold):  # click's range lets it through
        raise click.BadParameter("nan is no share", param_hint="--r3-mismatch-threshold")
    try:
        audit = audit_run(
            run_dir,
            threshold=threshold,
            min_steps=min_steps or 0,
            accept_superseded=accept_superseded_failures,
        )
    except ValueError as error:
        raise click.UsageError(plain(str(error))) from None
    to_stdout = str(markdown) == "-"
    printed = []
    if as_json:
        out = {"verdict": audit.verdict, "audits": [audit.to_json()]}
        printed.append(json.dumps(out, indent=2))
    summary = markdown_of(audit)
    if to_stdout:
        printed.append(summary.removesuffix("\n"))
    # a failure to write must not cost the verdict, nor be taken for one
    try:
        where = "standard output"
        click.echo("\n".join(printed or [text_of(audit)]))
        if markdown is not None and not to_stdout:
            where = str(markdown)
            markdown.write_text(summary, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{plain(where)}: cannot write: {error.strerror}") from None
    sys.exit(1 if strict and audit.verdict == "suspect" else EXIT_CODES[audit.verdict])


def headline(audit: Audit) -> str:
    """The verdict in a sentence."""
    n = audit.numbers
    if audit.verdict == "no evidence":
        return f"no evidence: {audit.reason}"
    if audit.verdict == "failed":
        return f"failed: {_amount(audit.num_findings, 'finding')}"
    steps = f"{_amount(n['steps'], 'step')}, {_amount(n['num_calls'], 'router call')}"
    suspect = f", suspect at {_amount(n['suspect'], 'step')}" if audit.verdict == "suspect" else ""
    return f"{audit.verdict}: {steps}{suspect}"


def claim_facts(audit: Audit) -> dict[str, str]:
    """The facts that each claim rests on, in a line; empty where there are none."""
    n, a = audit.numbers, audit.agreement
    if not n:
        return dict.fromkeys(audit.claims, "")
    replayed = f"{n['rows_replayed']:,} rows replayed, fingerprints re-added over "
    facts = {
        "applied": replayed
        + _amount(n["ranks"], "rank")
        + (
            f"; {n['rows_of_sampling_mask']:,} rows of sampling masks"
            if n["rows_of_sampling_mask"]
            else ""
        )
        + (f"; {n['rows_of_indexer']:,} rows of indexers' choices" if n["rows_of_indexer"] else ""),
        "covered": f"{n['num_calls']:,} of {n['num_calls_expected']:,} calls; rows filled {n['rows_filled']:,}, "
        f"padding {n['rows_padding']:,}, native {n['rows_native']:,}, duplicate {n['duplicate_rows']:,}",
        "agreement": "",
        RECHECK: "no sample was rechecked by its server",
    }
    if by_class := {label: rows for label, rows in n.get("rows_by_class", {}).items() if rows}:
        named = ", ".join(f"{rows:,} {label.replace('_', ' ')}" for label, rows in by_class.items())
        facts["covered"] += f"; rows of the rollouts: {named}"
    if CUSTODY in audit.claims:
        sessions = n["custody"]
        facts[CUSTODY] = (
            f"{_amount(sessions['sessions'], 'session')}: {sessions['tokens']} tokens sampled and delivered, in"
            f" {_amount(sessions['samples'], 'sample')}"
        )
    if SERVED in audit.claims:
        facts[SERVED] = _served_facts(n)
    again = n["rechecked"]
    if again["parts"]:
        facts[RECHECK] = (
            f"{_amount(again['samples'], 'sample')} rechecked: other experts in "
            f"{again['rows_differ']:,} of {again['rows']:,} rows, log-probs "
            f"{again['log_prob_off'] / max(again['log_probs'], 1):.2g} nats apart on average"
        )
    if a:
        facts["agreement"] = (
            f"same experts in {a['equal']:.2%} of rows (chance {a['chance_equal']:.1%}), "
            f"no expert in common in {a['mismatch']:.3%}"
        )
        if "stale_mismatch" in a:
            current = f"{a['current_mismatch']:.3%}" if "current_mismatch" in a else "no rows"
            older = f"{a['stale_mismatch']:.3%}"
            facts[
                "agreement"
            ] += f" (rows of the current weights: {current}, of older ones: {older})"
    return facts


def _served_facts(numbers: dict[str, Any]) -> str:
    facts, checksums = [], numbers["checksums"]
    if served := numbers.get("served"):
        use, scored = served["coverage"], _amount(served["readings"], "score")
        repeats = "bit by bit" if served["exact"] else f"to {served['repeat_off']:.2g} nats"
        facts.append(
            f"{_amount(served['updates'], 'update')}, {scored} of all canaries, which use"
            f" {use['experts_used'] / use['experts']:.0%} of the (layer, expert) pairs and"
            f" {use['tokens_used'] / use['vocabulary']:.0%} of the vocabulary: at most {served['gap_mean']:.2g} nats from the"
            f" actor on average, other experts in {served['rows_left']:,} of {served['rows']:,} rows, {served['inconclusive']}"
            f" inconclusive; servers repeat themselves {repeats}"
        )
    if checksums["readings"]:
        facts.append(
            f"servers' checksums of all tensors after {_amount(checksums['updates'], 'update')}"
        )
    return "; ".join(facts)


def text_of(audit: Audit) -> str:
    """The audit for a terminal; colors are taken out where there is none."""
    lines = [click.style(f"R3 evidence of {plain(audit.source)}", bold=True)]
    for claim, fact in claim_facts(audit).items():
        verdict = audit.claims[claim]
        lines.append(f"{claim:<10} {_colored(f'{verdict:<12}', verdict)} {_wrapped(fact, 24)}")
    for finding in audit.findings[:_SHOWN]:
        lines.append(f"  {_colored('failed', 'failed')} {plain(str(finding))}")
    if audit.num_findings > _SHOWN:
        lines.append(f"  and {audit.num_findings - _SHOWN} more (--json lists up to 1000)")
    lines += [f"  {_colored('note', 'note')} {plain(note)}" for note in audit.notes]
    return "\n".join([*lines, _colored(plain(headline(audit)), audit.verdict)])


def _wrapped(text: str, column: int) -> str:
    """Break a text that begins at a column between words on a terminal; nothing else is changed."""
    if not sys.stdout.isatty():
        return text
    width, indent = shutil.get_terminal_size().columns, " " * column
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent).strip()


def markdown_of(audit: Audit) -> str:
    """A summary that can be posted on a pull request."""
    source = plain(audit.source).replace("`", "'")
    lines = [f"### R3 evidence: {_cell(headline(audit))}", "", f"`{source}`", ""]
    lines += ["| claim | verdict | |", "|---|---|---|"]
    for claim, fact in claim_facts(audit).items():
        lines.append(f"| {claim}: {_CLAIM_WORDS[claim]} | {audit.claims[claim]} | {fact} |")
    if audit.findings:
        lines += ["", "| where | what | got | expected |", "|---|---|---|---|"]
    for f in audit.findings[:_SHOWN]:
        lines.append(f"| {' | '.join(map(_cell, (f.where(), f.what, f.got, f.expected)))} |")
    if audit.num_findings > _SHOWN:
        lines += ["", f"and {audit.num_findings - _SHOWN} more."]
    if audit.notes:
        lines += ["", *(f"- {_cell(note)}" for note in audit.notes)]
    return "\n".join(lines) + "\n"


def _colored(text: str, verdict: str) -> str:
    return click.style(text, fg=_COLORS.get(verdict, "yellow"))


def _amount(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _cell(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", plain(text))
