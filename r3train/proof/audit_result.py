"""What an audit of evidence says: a verdict, three claims, and findings with their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NO_EVIDENCE = "passed", "failed", "no evidence"
CLAIMS = ("applied", "covered", "agreement")
MAX_FINDINGS = 1000


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be, and where; None and empty mean everywhere."""

    claim: str
    what: str
    step: int | None = None
    ranks: tuple[int, ...] = ()
    replay_pass: str | None = None
    stage: str | None = None
    layer_number: int | None = None
    got: str = ""
    expected: str = ""
    attempt: str = ""  # of a step that a later start trained again

    def where(self) -> str:
        """The place in words: "step 3, rank 1, train/replay_forward, layer 2"."""
        parts = [f"start {self.attempt}"] if self.attempt else []
        parts += [] if self.step is None else [f"step {self.step}"]
        if self.ranks:
            shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
            parts.append(f"rank{'s' * (len(self.ranks) > 1)} {shown}")
        if self.replay_pass:
            parts.append(f"{self.replay_pass}/{self.stage}")
        if self.layer_number is not None:
            parts.append(f"layer {self.layer_number}")
        return ", ".join(parts) or "the run"

    def __str__(self) -> str:
        values = f" is {self.got}, expected {self.expected}" if self.got else ""
        return f"{self.where()}: {self.what}{values}"


@dataclass
class Audit:
    """The verdict on a run directory, or on log files, with what it rests on."""

    source: str
    verdict: str = NO_EVIDENCE
    reason: str = ""  # why there is no evidence
    claims: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CLAIMS, NO_EVIDENCE))
    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    layer_agreement: dict[int, float] = field(default_factory=dict)

    def find(self, finding: Finding, count: int = 1) -> None:
        """Add a finding; one that stands for several says how many."""
        self.num_findings += count
        self.claims[finding.claim] = FAILED
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def to_json(self) -> dict[str, Any]:
        """Plain values alone; findings carry their place in words too."""
        out = asdict(self)
        out["findings"] = [{**asdict(f), "where": f.where()} for f in self.findings]
        return out


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for a reader: "3", "3..7, 9"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in runs[:6]]
    return ", ".join(shown) + (", ..." if len(runs) > 6 else "")
