"""``r3train check-evidence``: the verdict on a run's R3 evidence for a person, a script, a PR."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

EXIT_CODES = {"passed": 0, "failed": 1, "no evidence": 3}
_SHOWN = 10
_CLAIM_WORDS = {
    "applied": "what Megatron dispatched is what the rollout chose",
    "covered": "every router call and every row is accounted for",
    "agreement": "the trainer's own choice stays near the rollout's",
}


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option(
    "--logs",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A log file with R3 lines; repeatable. Judged beside RUN_DIR, or alone without it.",
)
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
    help="Share of rows without a common expert that may be.  [default: the run's own, else 0.01]",
)
def check_evidence(
    run_dir: Path | None,
    logs: tuple[Path, ...],
    as_json: bool,
    markdown: Path | None,
    threshold: float | None,
) -> None:
    """Judge the R3 evidence of RUN_DIR again from its records.

    Exit code: 0 passed, 1 failed (what and where is said), 3 no evidence, 2 wrong usage.
    """
    from r3train.evidence.audit import Audit, audit_run
    from r3train.evidence.audit_logs import audit_logs

    if run_dir is None and not logs:
        raise click.UsageError("give a RUN_DIR, or log files with --logs")
    audits: list[Audit] = []
    try:
        if run_dir is not None:
            audits.append(audit_run(run_dir, threshold=threshold))
        if logs:
            limit = threshold
            if limit is None and audits:
                limit = audits[0].numbers.get("mismatch_threshold")
            ranks = audits[0].numbers.get("calling_ranks", ()) if audits else ()
            limit = 0.01 if limit is None else limit
            audits.append(audit_logs(logs, threshold=limit, ranks=ranks))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    verdict = overall([audit.verdict for audit in audits])
    if markdown is not None:
        with click.open_file(str(markdown), "w", encoding="utf-8") as file:
            file.write("\n".join(to_markdown(audit) for audit in audits))
    if as_json:
        out = {"verdict": verdict, "audits": [audit.to_json() for audit in audits]}
        click.echo(json.dumps(out, indent=2))
    elif str(markdown) != "-":
        for audit in audits:
            _show(audit)
    sys.exit(EXIT_CODES[verdict])


def overall(verdicts: list[str]) -> str:
    """The worst of several verdicts: a failure, then a lack of evidence, then a pass."""
    return max(verdicts, key=["passed", "no evidence", "failed"].index)


def headline(audit: Any) -> str:
    """The verdict in a sentence."""
    n = audit.numbers
    if audit.verdict == "no evidence":
        return f"no evidence: {audit.reason}"
    if audit.verdict == "failed":
        return f"failed: {audit.num_findings} finding{'s' * (audit.num_findings != 1)}"
    if "steps" in n:
        return f"passed: {_amount(n['steps'], 'step')}, {_amount(n['num_calls'], 'router call')}"
    return f"passed: {_amount(n['checks'], 'R3 check line')}"


def claim_facts(audit: Any) -> dict[str, str]:
    """What each claim rests on, in a line."""
    n, a = audit.numbers, audit.agreement
    facts = dict.fromkeys(_CLAIM_WORDS, "")
    if not n:
        return facts
    if "steps" not in n:
        facts["applied"] = "log lines hold no fingerprints"
        facts["covered"] = f"{n['num_calls']} replayed calls on {_amount(n['ranks'], 'rank')}"
        facts["agreement"] = f"{n['rows_mismatch']} of {n['rows_checked']} rows share no expert"
        return facts
    facts["applied"] = (
        f"{n['rows_replayed']} rows replayed, fingerprints re-added over "
        f"{_amount(n['ranks'], 'rank')}"
    )
    facts["covered"] = (
        f"{n['num_calls']} of {n['calls_expected']} calls; rows filled {n['rows_filled']}, padding "
        f"{n['rows_padding']}, native {n['rows_native']}, duplicate {n['duplicate_rows']}"
    )
    if a:
        chance = f" (chance {a['chance_equal']:.1%})" if "chance_equal" in a else ""
        facts["agreement"] = (
            f"same experts in {a['equal']:.2%} of rows{chance}, none shared in {a['mismatch']:.3%}"
        )
    return facts


def to_markdown(audit: Any) -> str:
    """A summary that can be posted on a pull request."""
    lines = [f"### R3 evidence: {headline(audit)}", "", f"`{audit.source}`", ""]
    lines += ["| claim | verdict | |", "|---|---|---|"]
    facts = claim_facts(audit)
    for claim, verdict in audit.claims.items():
        lines.append(f"| {claim}: {_CLAIM_WORDS[claim]} | {verdict} | {facts[claim]} |")
    if audit.findings:
        lines += ["", "| where | what | got | expected |", "|---|---|---|---|"]
        for f in audit.findings[:_SHOWN]:
            lines.append(f"| {f.where()} | {_cell(f.what)} | {f.got} | {f.expected} |")
        if audit.num_findings > _SHOWN:
            lines += ["", f"and {audit.num_findings - _SHOWN} more."]
    if audit.notes:
        lines += ["", *(f"- {note}" for note in audit.notes)]
    return "\n".join(lines) + "\n"


def _show(audit: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from r3train.evidence.step_line import verdict_style

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(Text(f"R3 evidence of {audit.source}"), style="bold")
    facts = claim_facts(audit)
    table = Table(box=None, pad_edge=False)
    for title in ("claim", "verdict", "what it rests on"):
        table.add_column(title, style=None, header_style="dim", overflow="fold")
    for claim, verdict in audit.claims.items():
        table.add_row(claim, Text(verdict, style=verdict_style(verdict)), facts[claim])
    console.print(table)
    for f in audit.findings[:_SHOWN]:
        console.print(Text.assemble(("  failed ", "red"), str(f)))
    if audit.num_findings > _SHOWN:
        console.print(f"  and {audit.num_findings - _SHOWN} more (--json lists up to 1000)")
    for note in audit.notes:
        console.print(Text.assemble(("  note ", "yellow"), note))
    console.print(Text(headline(audit), style=f"bold {verdict_style(audit.verdict)}"))


def _amount(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
