"""The result of an audit: a verdict, the claims that the run can be held to, findings with their places, and one record per step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from r3train.proof.step_verdict import place_name
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED, SUSPECT
from r3train.types import ROUTES

RECHECK = "recheck"
CLAIMS = ("applied", "covered", "agreement", RECHECK)
CUSTODY = "custody"  # a claim of runs with agents only
SERVED = "served"  # of runs with canaries
MAX_FINDINGS = 1000


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be, and where; None and empty mean everywhere."""

    claim: str
    what: str
    step: int | None = None
    replay_pass: str | None = None
    stream: str | None = None
    stage: str | None = None
    layer_number: int | None = None
    got: str = ""
    expected: str = ""
    attempt: str = ""  # of a step that a later start trained again

    def where(self) -> str:
        """The place in words: "step 3, train/replay_forward, layer 2"."""
        parts = [f"start {self.attempt}"] if self.attempt else []
        parts += [] if self.step is None else [f"step {self.step}"]
        if self.replay_pass:
            parts.append(place_name(self.replay_pass, self.stream or ROUTES, self.stage))
        if self.layer_number:
            parts.append(f"layer {self.layer_number}")
        return ", ".join(parts) or "the run"

    def __str__(self) -> str:
        values = f" is {self.got}, expected {self.expected}" if self.got else ""
        return f"{self.where()}: {self.what}{values}"


@dataclass(frozen=True)
class AuditedStep:
    """One step that was trained and judged, as its records show it.

    verdict: failed where a finding names the step, at any time that it was trained, or the run's own verdict failed.
    """

    rollout_id: int
    verdict: str


@dataclass
class Audit:
    """The verdict on a run directory, with the facts that it rests on.

    findings: the first 1000 of ``num_findings``.  steps: in their order; empty where the caller did
    not ask for them.
    """

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
    steps: list[AuditedStep] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)  # claims of which a step was suspect

    def find(self, finding: Finding) -> None:
        """Add a finding: its claim fails."""
        self.num_findings += 1
        self.claims[finding.claim] = FAILED
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def conclude(self, reason: str, *, shown: Collection[str]) -> None:
        """Set the verdict and the claims that did not fail.

        reason: the lack of evidence in words; empty where there is enough.  shown: claims that
        the evidence can show.
        """
        if self.num_findings:
            self.verdict = FAILED
        elif reason:
            self.reason = reason
        else:
            self.verdict = SUSPECT if self.suspects else PASSED
        for claim in shown:
            if self.claims[claim] != FAILED:
                self.claims[claim] = SUSPECT if claim in self.suspects else PASSED

    def to_json(self) -> dict[str, Any]:
        """Plain values only; findings carry their place in words too."""
        out = asdict(self)
        del out["steps"], out["suspects"]
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
