"""Agreement against its controls: a misalignment that agrees better fails, noise and chance do not."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.audit.audit_run import audit_run
from r3train.proof.controls import beaten_by, CONTROLS
from r3train.routing.agreement import chance_levels
from tests.unit import evidence_dirs
from tests.unit.evidence_dirs import with_choice, write_run


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(params=["old_log_prob", "train"])
def native(request, monkeypatch):
    """True of the calls of a rollout's first forwards: of the old pass, or of the train pass only."""
    if request.param == "train":
        monkeypatch.setattr(evidence_dirs, "PASSES", ("train",))
    return lambda r: r.replay_pass == request.param


@pytest.mark.parametrize("control", CONTROLS)
def test_routes_that_fit_a_misalignment_fail_with_step_pass_layer_and_control(
    tmp_path, native, control
):
    def shifted(r):
        here = native(r) and r.step == 1 and r.layer_number in (1, 3)
        return with_choice(r, 0, 1, **{control: 95}) if here else r

    run = write_run(tmp_path / "run", change=shifted)
    audit = audit_run(run)
    assert audit.claims["applied"] == audit.claims["covered"] == "passed"
    assert audit.claims["agreement"] == "failed"
    places = [(f.step, f.replay_pass, f.stage, f.layer_number) for f in audit.findings]
    first = evidence_dirs.PASSES[0]
    assert places == [(1, first, "replay_forward", layer) for layer in (1, 3)]
    assert all(control in f.what and f.got == "0 of 200" for f in audit.findings)
    result = CliRunner().invoke(main, ["check-evidence", str(run)])
    assert result.exit_code == 1 and control in result.output


def test_steps_too_short_to_tell_are_told_together(tmp_path, native):
    def shifted(r):
        if not native(r) or r.layer_number != 2:
            return r
        return with_choice(r, 50, 1, control_layer_plus=75)

    audit = audit_run(write_run(tmp_path / "few", range(2), change=shifted))
    assert audit.verdict == "passed"
    audit = audit_run(write_run(tmp_path / "run", range(10), change=shifted))
    (only,) = audit.findings
    assert only.layer_number == 2 and only.step is None and only.claim == "agreement"
    assert "over steps 0..9" in only.what and "control_layer_plus" in only.what


def test_a_run_that_begins_to_skip_the_old_pass_is_told_by_the_first_forwards_of_each_step(
    tmp_path, monkeypatch
):
    def unequal_in_train(r):
        return with_choice(r, 0, 1) if r.replay_pass == "train" else r

    run = write_run(tmp_path / "run", range(2), change=unequal_in_train)
    assert audit_run(run).layer_agreement == dict.fromkeys((1, 2, 3), 0.9)
    monkeypatch.setattr(evidence_dirs, "PASSES", ("train",))
    write_run(tmp_path / "later", range(2, 4), attempt="2026-01-02T00:00:00Z")
    for file in (tmp_path / "later").rglob("*.jsonl"):
        whole = run / file.relative_to(tmp_path / "later")
        whole.write_text(whole.read_text() + file.read_text())
    audit = audit_run(run)
    assert audit.verdict == "passed" and audit.layer_agreement == dict.fromkeys((1, 2, 3), 0.9)


def values(rows: int, equal: int, **controls: int) -> dict[str, int]:
    none = dict.fromkeys(CONTROLS, 0)
    return {"rows_replayed": rows, "rows_equal": equal, **none, **controls}


def test_a_difference_that_noise_or_few_rows_explain_does_not_fail():
    assert beaten_by(values(50, 0, control_token_plus=50)) is None  # of few rows, all of them
    assert beaten_by(values(101, 0, control_token_plus=101)) is not None
    # many rows: a difference that is sure and small
    assert beaten_by(values(10**8, 5 * 10**7, control_token_plus=59 * 10**6)) is None
    assert beaten_by(values(10**8, 5 * 10**7, control_token_plus=61 * 10**6)) is not None
    assert beaten_by(values(0, 0)) is None
    # experts that all tokens use alike: every control agrees as much as the routes do
    assert beaten_by(values(1000, 990, **dict.fromkeys(CONTROLS, 1000))) is None


@pytest.mark.parametrize("num_experts, topk", [(8, 2), (4, 2), (2, 1), (64, 8)])
def test_routes_that_no_router_chose_never_fail(num_experts, topk):
    """As in a verification: routes sampled at random, so agreement and controls are all at chance."""
    chance = chance_levels(num_experts, topk)["equal"]
    generator = np.random.default_rng(0)
    for rows in (8, 40, 200, 1000, 16000):
        counts = generator.binomial(rows, chance, size=(2000, 5))
        for equal, *controls in counts.tolist():
            assert beaten_by(values(rows, equal, **dict(zip(CONTROLS, controls)))) is None


def test_a_weak_agreement_in_rows_that_repeat_does_not_fail():
    """A prompt's rows stand there once a sample of its group: 16 times the same draw."""
    generator = np.random.default_rng(0)
    for rows in (8, 40, 200, 1000):
        for equal, *controls in generator.binomial(rows, [0.45, 0.3, 0.3, 0.1, 0.1], (2000, 5)):
            many = {name: 16 * int(count) for name, count in zip(CONTROLS, controls)}
            assert beaten_by(values(16 * rows, 16 * int(equal), **many)) is None


@pytest.mark.parametrize("control, told", [(4000, False), (4001, True)])
def test_a_control_must_be_ahead_in_more_than_a_tenth_of_the_rows(control, told):
    values = dict.fromkeys(CONTROLS, 0) | {"control_layer_plus": control}
    values |= {"rows_replayed": 10000, "rows_equal": 3000}
    beaten = beaten_by(values)
    assert (beaten is not None) == told
    if beaten:
        what, got, _ = beaten
        assert "control_layer_plus: 4001 agree with the routes of the layer after" in what
        assert got == "3000 of 10000"
