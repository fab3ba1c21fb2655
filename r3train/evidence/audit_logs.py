"""The two R3 line shapes in plain log files: did replay run, and how far did the choices differ?

Lines hold no fingerprints, so they can show that replay ran and that choices did not drift apart,
not that every expert was right; the audit says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from r3train.evidence.audit_result import FAILED, PASSED, Audit, Finding, ranges

_WRAPPER = re.compile(
    rb"R3 wrapper: (replay_\w+) branch taken \(rank (\d+), n_tokens=(\d+), topk=(\d+), "
    rb"replay_idx_sum=(-?\d+)\)"
)
_CHECK = re.compile(
    rb"R3 check \(rank (\d+), stage (replay_\w+)\): n_tokens=(\d+) mismatch=(\d+) \("
)
_ERROR = re.compile(rb"AssertionError: R3 mismatch tokens .*|R3 check failed at step .*")
_MAX_ERRORS = 20
_MAX_LINE = 1 << 20
# a number of more digits is damage
_MAX_DIGITS = 15


@dataclass
class _Lines:
    """Sums over the lines of one rank and stage."""

    wrappers: int = 0
    wrapped_tokens: int = 0
    checks: int = 0
    tokens: int = 0
    mismatch: int = 0
    worst: tuple[float, int, int] = (0.0, 0, 0)  # share beyond noise, mismatch, tokens


def audit_logs(
    files: Sequence[Path], *, threshold: float = 1e-2, ranks: Collection[int] = ()
) -> Audit:
    """Judge log files by their R3 lines, streaming.

    Every branch line needs its check line; the share of mismatching rows may not exceed
    ``threshold``, over a rank and stage and, but for counting noise, in one call.
    ranks: those that must have lines, as evidence of the same run knows them; empty is not known.
    Raises ValueError where a file cannot be read.
    """
    audit = Audit(", ".join(map(str, files)))
    seen: dict[tuple[int, str], _Lines] = {}
    errors: list[str] = []
    for path in files:
        try:
            with Path(path).open("rb") as file:
                while line := file.readline(_MAX_LINE):
                    if b"R3 " in line:
                        _take(line, seen, errors, threshold)
        except OSError as error:
            raise ValueError(f"{path}: cannot read: {error.strerror}") from None
    for (rank, stage), lines in sorted(seen.items()):
        _judge(audit, rank, stage, lines, threshold)
    for text in errors:
        claim = "agreement" if "mismatch" in text else "applied"
        audit.find(Finding(claim, f"the log says: {text}"))
    spoke = {rank for rank, _ in seen}
    for rank in sorted(set(ranks) - spoke) if spoke else ():
        text = "no R3 line in the log files, and calls in the run's evidence"
        audit.find(Finding("covered", text, ranks=(rank,)))
    checks = sum(s.checks for s in seen.values())
    audit.numbers = {
        "ranks": len(spoke),
        "num_calls": sum(s.wrappers for s in seen.values()),
        "checks": checks,
        "rows_mismatch": sum(s.mismatch for s in seen.values()),
        "rows_checked": sum(s.tokens for s in seen.values()),
        "mismatch_threshold": threshold,
    }
    if audit.num_findings:
        audit.verdict = FAILED
    elif not checks:
        audit.reason = "no R3 line in the log files"
    else:
        audit.verdict = PASSED
        audit.notes.append(
            "log lines show that replay ran and how far choices differ; only evidence/ shows that"
            " every expert was the rollout's"
        )
        if not ranks:
            shown = f"rank{'s' * (len(spoke) != 1)} {ranges(spoke)}"
            audit.notes.append(
                f"the lines are of {shown}; whether there were more ranks is known only beside a"
                " RUN_DIR with evidence"
            )
    for claim in ("covered", "agreement"):
        if checks and audit.claims[claim] != FAILED:
            audit.claims[claim] = PASSED
    return audit


def _take(
    line: bytes, seen: dict[tuple[int, str], _Lines], errors: list[str], threshold: float
) -> None:
    wrapper, check = _WRAPPER.search(line), _CHECK.search(line)
    for match in (wrapper, check):
        if match and max(map(len, re.findall(rb"\d+", match[0]))) > _MAX_DIGITS:
            if len(errors) < _MAX_ERRORS:
                errors.append(f"a damaged line: {match[0][:200].decode(errors='replace')}")
            return
    if match := wrapper:
        lines = seen.setdefault((int(match[2]), match[1].decode()), _Lines())
        lines.wrappers += 1
        lines.wrapped_tokens += int(match[3])
    if match := check:
        lines = seen.setdefault((int(match[1]), match[2].decode()), _Lines())
        tokens, mismatch = int(match[3]), int(match[4])
        lines.checks += 1
        lines.tokens += tokens
        lines.mismatch += mismatch
        allowed = threshold * tokens
        # a call of a few rows passes a share by chance: five standard deviations do not
        excess = mismatch - allowed - 5 * sqrt(allowed) - 2
        lines.worst = max(lines.worst, (excess, mismatch, tokens))
    if (match := _ERROR.search(line)) and len(errors) < _MAX_ERRORS:
        text = match[0].decode(errors="replace").strip()
        if text not in errors:
            errors.append(text)


def _judge(audit: Audit, rank: int, stage: str, lines: _Lines, threshold: float) -> None:
    def found(claim: str, what: str, got: object, expected: object) -> None:
        place = {"ranks": (rank,), "replay_pass": "any pass", "stage": stage}
        audit.find(Finding(claim, what, **place, got=str(got), expected=str(expected)))

    if lines.checks != lines.wrappers:
        found("covered", "R3 check lines", lines.checks, f"{lines.wrappers} (R3 wrapper lines)")
    elif lines.tokens != lines.wrapped_tokens:
        found("covered", "rows in R3 check lines", lines.tokens, lines.wrapped_tokens)
    if lines.mismatch > threshold * lines.tokens:
        got, most = f"{lines.mismatch} of {lines.tokens}", f"at most {threshold:g} of them"
        found("agreement", "mismatching rows", got, most)
    elif lines.worst[0] > 0:
        got, most = f"{lines.worst[1]} of {lines.worst[2]}", f"at most {threshold:g} of them"
        found("agreement", "mismatching rows in the worst call", got, most)
