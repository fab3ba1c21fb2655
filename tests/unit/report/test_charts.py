"""The table of charts with the numbers of runs."""

from __future__ import annotations

from collections import Counter

import pytest

from r3train.report.charts import charts, CHARTS
from r3train.report.report_data import RunCurves


@pytest.mark.parametrize("count", [1, 2, 7, 8, 15])
def test_every_metric_of_every_run_is_drawn_however_many_there_are(count):
    rows = [row for row in CHARTS if "NAME" not in row.title]
    numbers = {key.replace("_N", "_4"): 1.0 for row in rows for key in row.keys}
    records = [{"step": step, **numbers} for step in range(3)]
    settings = {"replay.use_rollout_routing_replay": False}
    runs = [RunCurves(f"run {i}", records, [], settings) for i in range(count)]
    drawn = Counter(chart.row.title for chart in charts(runs) for _ in chart.lines)
    assert drawn == {row.title: len(row.keys) * count for row in rows}
