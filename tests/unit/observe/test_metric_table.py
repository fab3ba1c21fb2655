"""The table of metrics: what the code can write has a row, and the row is the right one."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest

from r3train.algo.losses.policy_losses import POLICY_LOSSES, get_policy_loss
from r3train.algo.policy_loss import metric_names
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.step_metrics import train_metrics
from r3train.observe import metric_table
from r3train.observe.metric_table import METRICS, row_of

PACKAGE = Path(metric_table.__file__).parents[1]
WRITERS = ("loop", "launch", "commands", "trainer", "route_stores", "observe")
KEY = re.compile(r"(rollout|train|perf|r3|recheck|faults)/[a-z0-9_]+")


def keys_in_code() -> set[str]:
    found = set()
    for room in WRITERS:
        for file in (PACKAGE / room).rglob("*.py"):
            if file.name == "metric_table.py":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if KEY.fullmatch(node.value) and not node.value.endswith("_"):
                        found.add(node.value)
    return found


def test_the_examples_are_true():
    outcome = doctest.testmod(metric_table)
    assert outcome.attempted == 2 and outcome.failed == 0


def test_every_key_in_the_code_has_a_row():
    keys = keys_in_code()
    assert len(keys) > 60
    # the first words of keys for which a file is searched
    assert {key for key in keys if row_of(key) is None} <= {"rollout/generation_s"}


ALGORITHMS = [
    {},
    {"kl_loss_coef": 0.1},
    {"use_opd": True, "opd_kl_coef": 1.0},
    {"rollout_is": "token"},
    {"rollout_rs": ("token_k1",), "rollout_rs_threshold": ("0.5_2",)},
    {"opsm_delta": 0.1},
]


@pytest.mark.parametrize("settings", ALGORITHMS, ids=lambda s: next(iter(s), "defaults"))
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_number_of_a_loss_has_a_row(name, settings):
    algorithm = AlgorithmSection.model_construct(**AlgorithmSection().__dict__ | settings)
    sums, maxima = metric_names(get_policy_loss(name), algorithm, num_ages=2, replayed=True)
    helpers = {"num_tokens", "sequences", "seq_chi2", "seq_ppl_actor", "seq_ppl_rollout"}
    helpers |= {"is_ratio", "is_ratio_square"}
    report = {n: 1.0 for n in (*sums, *maxima) if n not in helpers}
    keys = train_metrics([report | {f"{n}_age_{age}": 1.0 for n in helpers for age in (0, 1)}])
    assert {key for key in keys if row_of(key) is None} == set()


@pytest.mark.parametrize(
    "key, row",
    [
        ("rollout/reward_mean", "rollout/reward_mean"),
        ("rollout/reward_mean_format", "rollout/reward_mean_KEY"),
        ("rollout/staleness_3", "rollout/staleness_N"),
        ("rollout/staleness_max", "rollout/staleness_max"),
        ("train/log_prob_gap_k1_age_0", "train/NAME_age_N"),
        ("train/log_prob_gap_k1_rows_prefilled_again", "train/NAME_rows_CLASS"),
        ("rows/prefilled_again", "rows/prefilled_again"),
        ("r3/drift_gate_mass_layer_2", "r3/drift_NAME_layer_N"),
        ("r3/drift_left", "r3/drift_NAME"),
        ("eval/gsm8k/pass_at_4", "eval/NAME/pass_at_N"),
        ("rollout/staleness_", None),
        ("rollout/rewards", None),
        ("train/loss_of_mine", None),
    ],
)
def test_the_most_exact_row_is_found(key, row):
    found = row_of(key)
    assert (found.key if found else None) == row


def test_no_key_has_two_rows():
    keys = [metric.key for section in METRICS.values() for metric in section]
    assert len(keys) == len(set(keys))
