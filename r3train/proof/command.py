"""``r3train check-evidence``: the verdict on a run's R3 evidence for a person, a script, a PR."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, TYPE_CHECKING

import click

if TYPE_CHECKING:
    from r3train.proof.findings import Audit

EXIT_CODES = {"passed": 0, "failed": 1, "no evidence": 3}
_SHOWN = 10
# what Markdown would read as its own: a damaged record may say anything
_MARKDOWN = re.compile(r"[\\|`*<\[]")
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
    help="Share of rows without a common expert that may be, in the place of the run's own threshold "
    "and of its verdict by it.  [default: the run's own, else 0.01]",
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
def check_evidence(
    run_dir: Path | None,
    logs: tuple[Path, ...],
    as_json: bool,
    markdown: Path | None,
    threshold: float | None,
    min_steps: int | None,
    accept_superseded_failures: bool,
) -> None:
    """Judge the R3 evidence of RUN_DIR again from its records.

    Exit code: 0 passed, 1 failed (what and where is said), 3 no evidence, 2 wrong usage.
    """
    from r3train.proof.audit import audit_run
    from r3train.proof.log_lines import audit_logs

    if run_dir is None and not logs:
        raise click.UsageError("give a RUN_DIR, or log files with --logs")
    if run_dir is None and (min_steps or accept_superseded_failures):
        raise click.UsageError("--min-steps and --accept-superseded-failures judge a RUN_DIR")
    audits: list[Audit] = []
    try:
        if run_dir is not None:
            audits.append(
                audit_run(
                    run_dir,
                    threshold=threshold,
                    min_steps=min_steps or 0,
                    accept_superseded=accept_superseded_failures,
                )
            )
        if logs:
            run = audits[0].numbers if audits else {}
            limit = run.get("mismatch_threshold") if threshold is None else threshold
            audits.append(
                audit_logs(
                    logs,
                    threshold=0.01 if limit is None else limit,
                    run=run,
                    threshold_replaced=threshold is not None,
                    accepted_steps=(
                        run.get("superseded_failures", ()) if accept_superseded_failures else ()
                    ),
                )
            )
    except ValueError as error:
        raise click.UsageError(plain(str(error))) from None
    verdict = overall([audit.verdict for audit in audits])
    # a failure to write must not cost the verdict, nor be taken for one
    _written("standard output", lambda: _print(audits, verdict, as_json, str(markdown) == "-"))
    if markdown is not None and str(markdown) != "-":
        text = _markdown_of(audits)
        _written(str(markdown), lambda: markdown.write_text(text, encoding="utf-8"))
    sys.exit(EXIT_CODES[verdict])


def _written(where: str, write: Callable[[], Any]) -> None:
    try:
        write()
    except OSError as error:
        raise click.UsageError(f"{plain(where)}: cannot write: {error.strerror}") from None


def _print(audits: list[Audit], verdict: str, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        out = {"verdict": verdict, "audits": [audit.to_json() for audit in audits]}
        click.echo(json.dumps(out, indent=2))
    if as_markdown:
        click.echo(_markdown_of(audits), nl=False)
    if not as_json and not as_markdown:
        for audit in audits:
            _show(audit)


def _markdown_of(audits: list[Audit]) -> str:
    return "\n".join(map(to_markdown, audits))


def overall(verdicts: list[str]) -> str:
    """The worst of several verdicts: a failure, then a lack of evidence, then a pass."""
    return max(verdicts, key=["passed", "no evidence", "failed"].index)


def headline(audit: Audit) -> str:
    """The verdict in a sentence."""
    n = audit.numbers
    if audit.verdict == "no evidence":
        return f"no evidence: {audit.reason}"
    if audit.verdict == "failed":
        return f"failed: {audit.num_findings} finding{'s' * (audit.num_findings != 1)}"
    if "steps" in n:
        return f"passed: {_amount(n['steps'], 'step')}, {_amount(n['num_calls'], 'router call')}"
    return f"passed: {_amount(n['checks'], 'R3 check line')}"


def claim_facts(audit: Audit) -> dict[str, str]:
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


def to_markdown(audit: Audit) -> str:
    """A summary that can be posted on a pull request."""
    source = plain(audit.source).replace("`", "'")
    lines = [f"### R3 evidence: {_cell(headline(audit))}", "", f"`{source}`", ""]
    lines += ["| claim | verdict | |", "|---|---|---|"]
    facts = claim_facts(audit)
    for claim, verdict in audit.claims.items():
        lines.append(f"| {claim}: {_CLAIM_WORDS[claim]} | {verdict} | {facts[claim]} |")
    if audit.findings:
        lines += ["", "| where | what | got | expected |", "|---|---|---|---|"]
        for f in audit.findings[:_SHOWN]:
            cells = map(_cell, (f.where(), f.what, f.got, f.expected))
            lines.append(f"| {' | '.join(cells)} |")
        if audit.num_findings > _SHOWN:
            lines += ["", f"and {audit.num_findings - _SHOWN} more."]
    if audit.notes:
        lines += ["", *(f"- {_cell(note)}" for note in audit.notes)]
    return "\n".join(lines) + "\n"


def _show(audit: Audit) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from r3train.observe.step_line import verdict_style

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.begin_capture()  # rich would end the process itself where it cannot write
    console.print(Text(f"R3 evidence of {plain(audit.source)}"), style="bold")
    facts = claim_facts(audit)
    table = Table(box=None, pad_edge=False)
    for title in ("claim", "verdict", "what it rests on"):
        table.add_column(title, style=None, header_style="dim", overflow="fold")
    for claim, verdict in audit.claims.items():
        table.add_row(claim, Text(verdict, style=verdict_style(verdict)), facts[claim])
    console.print(table)
    for f in audit.findings[:_SHOWN]:
        console.print(Text.assemble(("  failed ", "red"), plain(str(f))))
    if audit.num_findings > _SHOWN:
        console.print(f"  and {audit.num_findings - _SHOWN} more (--json lists up to 1000)")
    for note in audit.notes:
        console.print(Text.assemble(("  note ", "yellow"), plain(note)))
    console.print(Text(plain(headline(audit)), style=f"bold {verdict_style(audit.verdict)}"))
    click.echo(console.end_capture(), nl=False)


def _amount(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def plain(text: str) -> str:
    """Text on one line in which a terminal finds no command: what does not print is escaped."""
    return "".join(c if _prints(c) else c.encode("unicode_escape").decode() for c in text)


def _prints(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _cell(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", plain(text))
