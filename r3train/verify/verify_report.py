"""Show a verification: tables in the terminal, or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from r3train.verify.verifier import TopologyResult, Verification
from r3train.verify.compare_outcomes import PHASE_NAMES

_COLOURS = {"failed": "red", "survived": "red", "not run": "yellow"}


PHASES = range(len(PHASE_NAMES))
TOPOLOGY_HEADER = ["topology", "ranks", "verdict", *PHASE_NAMES, "routes sent"]
MUTATION_HEADER = ["planted bug", "topology", "verdict", "must fail", "factor", "caught by"]


def topology_rows(v: Verification) -> list[list[str]]:
    """The cells of each topology: the largest error of every phase, the largest share of routes."""
    rows = []
    for t in v.topologies:
        share = f"{t.route_bytes / t.all_route_bytes:.0%}" if t.all_route_bytes else ""
        phases = [_phase_cell(v, t, phase) for phase in PHASES]
        rows.append([t.name, str(t.world_size), t.status, *phases, share])
    return rows


def _phase_cell(v: Verification, t: TopologyResult, phase: int) -> str:
    worst = t.worst(phase)
    if worst is None:
        return ""
    threshold = v.thresholds.get(phase, 0.0)
    if threshold == 0:
        return "exact" if worst.error == 0 else f"{worst.error:.0f} wrong"
    margin = threshold / worst.error if worst.error else math.inf
    return f"{worst.error:.0e} ({margin:.{0 if margin >= 10 else 1}f}x)"


def mutation_rows(v: Verification) -> list[list[str]]:
    """The cells of each planted bug."""
    rows = []
    for m in v.mutations:
        must_fail, factor, caught_by = "nothing", "", " ".join(map(str, m.caught_by))
        if m.phase is not None:
            must_fail = f"{m.phase} {PHASE_NAMES[m.phase]}"
            factor = "exact" if math.isinf(m.factor) else f"{m.factor:.1g}x"
        if m.detail.startswith("refused"):
            caught_by = "an error"
        rows.append([m.name, m.topology, m.status, must_fail, factor, caught_by])
    return rows


def threshold_line(v: Verification) -> str:
    """The thresholds and the noise they come from, in words."""
    parts = []
    for phase, threshold in sorted(v.thresholds.items()):
        if threshold == 0:
            parts.append(f"{PHASE_NAMES[phase]} exact")
        else:
            noise = f" (noise {v.noise[phase]:.1e})" if phase in v.noise else ""
            parts.append(f"{PHASE_NAMES[phase]} {threshold:.1e}{noise}")
    return f"{v.dtype} on {v.device}; thresholds: " + ", ".join(parts)


def print_report(v: Verification, console: Console) -> None:
    """Both tables, what failed and why, and the verdict."""
    title = "topology x phase: largest error (margin)"
    console.print(_rich_table(title, TOPOLOGY_HEADER, topology_rows(v)))
    if v.mutations:
        console.print(_rich_table("planted bugs", MUTATION_HEADER, mutation_rows(v)))
    console.print(threshold_line(v))
    reasons = [(t.name, t.status, t.reason) for t in v.topologies if t.reason]
    reasons += [(m.name, m.status, m.detail) for m in v.mutations if not m.ok]
    for reason in reasons:
        console.print(": ".join(reason), markup=False)
    console.print(verdict(v), style="bold green" if v.ok else "bold red")


def verdict(v: Verification) -> str:
    """One line that says what passed, failed and did not run."""

    def count(results: list, *statuses: str) -> int:
        return sum(r.status in statuses for r in results)

    line = f"topologies: {count(v.topologies, 'passed')} passed"
    line += f", {count(v.topologies, 'failed')} failed, {count(v.topologies, 'not run')} not run"
    if v.mutations:
        caught = count(v.mutations, "caught")
        line += f"; planted bugs: {caught} caught, {count(v.mutations, 'survived', 'failed')} not"
        line += f"; null mutations: {count(v.mutations, 'passed')} passed"
    if count([*v.topologies, *v.mutations], "not run") == len(v.topologies) + len(v.mutations):
        line += ": nothing was compared"
    return line


def _rich_table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for cells in rows:
        table.add_row(*cells, style=_COLOURS.get(cells[header.index("verdict")]))
    return table


def to_json(v: Verification) -> str:
    """Everything, with phases by name and infinities as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {PHASE_NAMES[k] if isinstance(k, int) else k: plain(x) for k, x in value.items()}
        return [plain(x) for x in value] if isinstance(value, list) else value

    return json.dumps(plain({"ok": v.ok, **asdict(v)}), indent=1) + "\n"
