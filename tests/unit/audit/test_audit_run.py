"""Evidence that is not as its run wrote it, or not right, fails in its claim and at its place."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.audit.audit_run import audit_run
from r3train.cli import main
from r3train.proof.writer import rank_file
from r3train.types import ReplayEvidence
from tests.unit.audit.test_custody import two_sessions
from tests.unit.evidence_dirs import (
    audit_of_one_start,
    canaries,
    comparison,
    edit,
    rows_apart,
    with_choice,
    write_run,
)

STEPS, RECHECKED, METRICS = "evidence/steps.jsonl", "evidence/rechecked.jsonl", "metrics.jsonl"
PLACE = dict(replay_pass="train", stream="routes", stage="replay_forward", layer_number=2)
FAILURE = {"stream": "routes", **PLACE, "what": "num_calls", "got": 1, "expected": 2}


def here(line: dict) -> bool:
    """One call of step 1."""
    return (line["step"], line["replay_pass"], line["layer_number"]) == (1, "train", 2)


def of_call(**changes) -> Callable[[Path], None]:
    """Alter the call of rank 1 in its file."""
    return lambda run: edit(run, 1, lambda rs: [{**r, **changes} if here(r) else r for r in rs])


def of_step(file: str, step: int = 1, **changes) -> Callable[[Path], None]:
    """Alter a line of a step; a value may be a function of the one that it replaces."""

    def altered(line: dict) -> dict:
        if line["step"] != step:
            return line
        new = {k: v(line[k]) if callable(v) else v for k, v in changes.items()}
        return {**line, **new}

    return lambda run: edit(run, file, lambda lines: list(map(altered, lines)))


def without(*steps: int, files=(0, 1, STEPS)) -> Callable[[Path], None]:
    """Take steps out of files."""

    def change(run: Path) -> None:
        for file in files:
            edit(run, file, lambda lines: [x for x in lines if x["step"] not in steps])

    return change


def halved(file: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        content = (run / file).read_bytes()
        (run / file).write_bytes(content[: len(content) // 2])

    return change


def lines(file: int | str, change) -> Callable[[Path], None]:
    return lambda run: edit(run, file, change)


def text_of(file: str, line: str, number: int = 2) -> Callable[[Path], None]:
    """Put a text in the place of a line."""

    def change(run: Path) -> None:
        found = (run / file).read_text().splitlines()
        found[number - 1] = line
        (run / file).write_text("\n".join(found) + "\n")

    return change


RANK_1 = "evidence/rank_00001.jsonl"
AT = "step 1, train/replay_forward, layer 2: "
RUN_OF_2 = lambda rs: [{**r, "rank": 2} for r in rs if r["step"] == 1]  # noqa: E731
# name: (change, claim, the beginning of one finding)
FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # values of a call
    "an expert": (of_call(fingerprint="0x1"), "applied", f"{AT}fingerprint is 0x"),
    "a recomputation": (of_call(rows_recompute_differ=1), "applied", f"{AT}rows_recompute_differ"),
    "native rows": (of_call(rows_native=1), "covered", f"{AT}rows_native is 1, expected 0"),
    "duplicates": (of_call(duplicate_rows=2), "covered", f"{AT}duplicate_rows is 2"),
    "a map": (of_call(map_sum=219), "covered", f"{AT}map_deviation is 1"),
    "kinds of rows": (of_call(rows_padding=0), "covered", f"{AT}row_kinds_off is 6"),
    "compared rows": (of_call(rows_equal=80), "covered", f"{AT}rows_compared is 190, expected 200"),
    "current rows": (of_call(rows_current=29, rows_current_equal=29), "covered", f"{AT}rows_curre"),
    "sums of ids": (of_call(replay_idx_sum=109), "covered", f"{AT}replay_idx_sum_off is 1"),
    "ids above all": (of_call(replay_idx_sum=1431), "covered", f"{AT}replay_idx_sum_off is 1"),
    "top-k": (of_call(topk=3, map_sum=330), "covered", f"{AT}topk_off is 1"),
    "mismatch": (
        of_call(rows_mismatch=30, rows_equal=61, rows_current_equal=0, rows_current_mismatch=30),
        "agreement",
        f"{AT}rows_current_mismatch is 30, expected at most 1.2",
    ),
    "a misalignment agrees better": (
        lambda run: [edit(run, rank, lambda rs: [{**r, **SHIFTED} for r in rs]) for rank in (0, 1)],
        "agreement",
        "step 0, old_log_prob/replay_forward, layer 1: rows that agree with the replayed routes",
    ),
    # calls
    "a call is missing": (
        lines(0, lambda rs: [r for r in rs if not here(r)]),
        "covered",
        f"{AT}num_calls is 1, expected 2",
    ),
    "a call twice": (
        lines(0, lambda rs: [c for r in rs for c in [r] * (1 + here(r))]),
        "covered",
        f"{AT}num_calls is 3, expected 2",
    ),
    "a call nobody expected": (
        of_call(replay_pass="ref_log_prob"),
        "covered",
        "step 1, ref_log_prob/replay_forward, layer 2: num_calls is 1, expected 0",
    ),
    "a late record": (
        lines(1, lambda rs: [*rs, rs[0]]),
        "covered",
        "the run: rank_00001.jsonl: re",
    ),
    "a record of another rank": (
        of_call(rank=0),
        "covered",
        "the run: rank_00001.jsonl: a record of rank 0 of 2 at step 1",
    ),
    "a rank that the run had not": (
        lambda run: (run / "evidence/rank_00002.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in RUN_OF_2(records(run, 1)))
        ),
        "covered",
        "the run: rank_00002.jsonl: a record of rank 2 of 2 at step 1",
    ),
    # the run's own verdicts
    "a failure of no reason": (
        of_step(STEPS, passed=False),
        "applied",
        "step 1: passed of the run's own verdict is False, expected True",
    ),
    "a failure": (
        of_step(STEPS, passed=False, failures=[FAILURE] * 5),
        "covered",
        "step 1: failures of the run's own verdict is ['train/replay_forward layer 2: num_calls is",
    ),
    "a failure next to a pass": (of_step(STEPS, failures=[FAILURE]), "covered", "step 1: failures"),
    "a threshold's error": (
        of_step(STEPS, passed=False, threshold_error="R3 tokens"),
        "agreement",
        "step 1: threshold_error of the run's own verdict is R3 tokens, expected None",
    ),
    "a warning of staleness": (
        of_step(STEPS, stale_warning="R3 staleness: 5 of 6"),
        "agreement",
        "step 1: stale_warning of the run's own verdict is R3 staleness: 5 of 6, expected None",
    ),
    "a count": (
        of_step(STEPS, counts=lambda of: {**of, "rows_equal": 1}),
        "covered",
        "step 1: counts.rows_equal of the run's own verdict is 1, expected 1080, as its records",
    ),
    "a share": (
        of_step(STEPS, agreement=lambda of: {**of, "equal": 0.95}),
        "agreement",
        "step 1: agreement.equal of the run's own verdict is 0.95, expected 0.9",
    ),
    "a sum": (
        of_step(STEPS, statistics=lambda of: [{**of[0], "sum": 0.5}]),
        "agreement",
        "step 1: statistics of the run's own verdict is [Statistic(name='routes', server=0",
    ),
    "a statistic is gone": (of_step(STEPS, statistics=[]), "agreement", "step 1: statistics of"),
    "a suspect step": (
        of_step(STEPS, verdict="suspect"),
        "agreement",
        "step 1: verdict of the run's own verdict is suspect, expected passed",
    ),
    "what the run failed by its records": (
        of_step(STEPS, mismatch_threshold=0.001, passed=True),
        "agreement",
        "step 1: stale_warning of the run's own verdict is None, expected R3 staleness",
    ),
    "a second verdict": (
        lines(STEPS, lambda all_lines: [*all_lines, all_lines[0]]),
        "covered",
        "the run: steps.jsonl:4: a second verdict of step 0 by the same start",
    ),
    # samples that were rechecked
    "a comparison": (
        of_step(RECHECKED, decoded={"rows": 100, "differ": {"1": 0, "2": 90, "3": 0}}),
        "recheck",
        "step 1, rechecked/whole, layer 2: decoded rows with different experts in 100 rows, sample 8 on "
        "server 0 is 90, expected at most 80",
    ),
    "comparisons are gone": (
        lambda run: (run / RECHECKED).unlink(),
        "recheck",
        "step 0: recheck of the run's own verdict is Recheck(verdict='passed', parts=1",
    ),
    "comparisons nobody counted": (of_step(STEPS, recheck=None), "recheck", "step 1: recheck of"),
    "a failed comparison": (
        of_step(
            STEPS,
            passed=False,
            recheck={"verdict": "failed", "parts": 1, "missed": 0, "failures": [FAILURE]},
        ),
        "recheck",
        "step 1: recheck of the run's own verdict is Recheck(verdict='failed'",
    ),
    "a late comparison": (
        lines(RECHECKED, lambda all_lines: [*all_lines, all_lines[0]]),
        "covered",
        "the run: rechecked.jsonl: records of step 0 stand after those of a later one",
    ),
    # files and steps
    "a rank's file is missing": (
        lambda run: (run / RANK_1).unlink(),
        "covered",
        "the run: rank_00001.jsonl is missing",
    ),
    "a rank's file is empty": (
        lambda run: (run / RANK_1).write_text(""),
        "covered",
        "step 0, old_log_prob/replay_forward, layer 1: num_calls is 1, expected 2",
    ),
    "half of a rank's file": (halved(RANK_1), "covered", f"{AT}num_calls is 1, expected 2"),
    "half of the verdicts": (halved(STEPS), "covered", "step 1: steps.jsonl has no verdict for "),
    "a step is gone": (without(1), "covered", "step 1: no evidence of step 1, which was to be"),
    "the last step is gone": (without(2), "covered", "step 2: no evidence of step 2"),
    "the first step is gone": (without(0), "covered", "step 0: no evidence of steps 0..0"),
    "a verdict is gone": (
        without(1, files=[STEPS]),
        "covered",
        "step 1: steps.jsonl has no verdict",
    ),
    "two verdicts are gone": (
        without(1, 2, files=[STEPS, METRICS]),
        "covered",
        "step 1: steps.jsonl has no verdict for steps 1..2",
    ),
    "a step number out of the way": (
        lines(STEPS, lambda of: [{**x, "step": 1 << 39} if x["step"] == 2 else x for x in of]),
        "covered",
        "step 2: no evidence of step 2, which was to be checked",
    ),
    "the metrics say that it failed": (
        of_step(METRICS, **{"r3/passed": False}),
        "covered",
        "step 1: metrics.jsonl says that steps 1 failed, steps.jsonl does not",
    ),
    "metrics of no step": (
        text_of(METRICS, '{"loss": 1}'),
        "covered",
        "the run: metrics.jsonl:2: Object missing required field `step`",
    ),
    "a link": (
        lambda run: [(run / RANK_1).unlink(), (run / RANK_1).symlink_to("rank_00000.jsonl")],
        "covered",
        "the run: rank_00001.jsonl: cannot be read: is a link, expected a regular file",
    ),
}
SHIFTED = {"rows_equal": 0, "rows_overlap": 99, "rows_current_equal": 0, "control_token_plus": 95}


def records(run: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in rank_file(run, rank).read_text().splitlines()]


def sound(run: Path) -> Path:
    return write_run(run, rechecked=lambda step: [comparison(step)])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_own_claim_at_its_place(tmp_path, fault):
    change, claim, text = FAULTS[fault]
    run = sound(tmp_path / "run")
    assert audit_run(run).verdict == "passed"
    change(run)
    audit = audit_of_one_start(run)
    assert audit.verdict == "failed" and audit.claims[claim] == "failed"
    found = {str(f)[: len(text)]: f for f in audit.findings}
    assert text in found and found[text].claim == claim, list(found)
    if "line" in text or text.startswith("the run: rank_00001.jsonl:"):  # nothing after it is read
        assert "passed" not in audit.claims.values()


@pytest.mark.parametrize("run_saw_it", [True, False], ids=["in the run", "in the file"])
def test_one_wrong_expert_fails_nothing_but_its_claim_in_its_layer(tmp_path, run_saw_it):
    """In the run both passes replay the wrong expert; in the file only one record was altered."""

    def wrong(r):
        return replace(r, fingerprint=1) if (r.step, r.rank, r.layer_number) == (1, 1, 2) else r

    run = write_run(tmp_path / "run", change=wrong if run_saw_it else None)
    if not run_saw_it:
        of_call(fingerprint="0x1")(run)
    audit = audit_run(run)
    passes = ["old_log_prob", "train"][not run_saw_it :]
    assert [(f.what, f.step, f.replay_pass, f.layer_number) for f in audit.findings] == [
        ("fingerprint", 1, name, 2) for name in passes
    ]
    assert {c for c, verdict in audit.claims.items() if verdict == "failed"} == {"applied"}


def test_a_run_that_was_never_replayed_fails_and_claims_no_agreement(tmp_path):
    zero = dict.fromkeys(("rows_replayed", "rows_filled", "rows_current"), 0)

    def bypassed(r):
        r = with_choice(r, 0, **zero, rows_native=104, fingerprint=7)
        return replace(r, rows_overlap=0)

    audit = audit_run(write_run(tmp_path / "run", change=bypassed))
    claims = {"applied": "failed", "covered": "failed", "agreement": "no evidence"}
    assert audit.claims == claims | {"recheck": "no evidence"}


LEFT = {
    "a line that a kill cut": lambda run: [
        (run / file).open("a").write('{"attempt": "2026-')
        for file in (STEPS, METRICS, RECHECKED, RANK_1)
    ],
    "a verdict that is being written": lambda run: [
        (run / file).open("a").write(json.dumps({**json.loads(last(run, file)), "step": 3}))
        for file in (STEPS, RANK_1)
    ],
    "records of a step that was not finished": lambda run: rank_file(run, 0)
    .open("a")
    .write(json.dumps({**records(run, 0)[-1], "step": 3}) + "\n"),
    "settings of another shape": lambda run: (run / "config.toml").write_text("replay = 3\n"),
    "no metrics": lambda run: (run / METRICS).unlink(),
    "a rank without experts": lambda run: [
        (run / "evidence/rank_00002.jsonl").touch(),
        edit(run, STEPS, lambda all_lines: [{**x, "world_size": 3} for x in all_lines]),
    ],
}


def last(run: Path, file: str) -> str:
    return (run / file).read_text().splitlines()[-1]


@pytest.mark.parametrize("left", LEFT)
def test_what_a_run_may_leave_passes(tmp_path, left):
    run = sound(tmp_path / "run")
    LEFT[left](run)
    audit = audit_run(run)
    assert audit.verdict == "passed" and audit.numbers["steps"] == 3, audit.findings
    assert any("step 3 was not finished" in n for n in audit.notes) == ("not finished" in left)


@pytest.mark.parametrize("has_verdicts", [True, False])
def test_every_file_of_evidence_is_read_to_its_end(tmp_path, has_verdicts):
    def made(name: str) -> list[Path]:
        how = {"custody": two_sessions, "served": lambda step: [canaries(step)]}
        run = write_run(tmp_path / name, rechecked=lambda step: [comparison(step)], **how)
        if not has_verdicts:
            (run / STEPS).write_text("")
        return sorted(run.glob("evidence/*.jsonl"))

    names = [path.name for path in made("sound")]
    assert {"custody.jsonl", "rechecked.jsonl", "served.jsonl"} < set(names)
    for place, name in enumerate(names):
        path = made(name)[place]
        with path.open("a") as file:
            file.write('{"step": 9}\n')
        found = audit_run(path.parents[1]).findings
        assert any(f.claim == "covered" and f.what.startswith(name) for f in found), name


def mismatching_at_2(call: ReplayEvidence) -> ReplayEvidence:
    changes = {"rows_mismatch": 6, "rows_overlap": 4}
    changes |= {"rows_current_mismatch": 5, "rows_current_equal": call.rows_current - 5}
    return replace(call, **changes) if call.step == 2 else call


SUSPECT = {
    "agreement": {"change": mismatching_at_2},
    "recheck": {"rechecked": lambda step: [comparison(step, log_prob_off=1e-3 * (step == 2))]},
    "served": {"served": lambda step: [canaries(step, gap_mean=1e-3 if step == 2 else 4e-7)]},
}


@pytest.mark.parametrize("claim", SUSPECT)
def test_a_step_is_suspect_by_any_claim_and_fails_with_strict_alone(tmp_path, claim):
    run = write_run(tmp_path / "run", limit=5.0, **SUSPECT[claim])
    audit = audit_run(run)
    assert (audit.verdict, audit.claims[claim]) == ("suspect", "suspect"), audit.findings
    assert audit.numbers["suspect"] == 1
    for strict, code in ([], 0), (["--strict"], 1):
        arguments = ["check-evidence", str(run), *strict]
        assert CliRunner().invoke(main, arguments).exit_code == code


@pytest.mark.parametrize("part_bytes", [3000, 1 << 20])
def test_a_running_job_is_judged_by_the_steps_that_were_whole_at_the_beginning(
    tmp_path, monkeypatch, part_bytes
):
    """It writes on and makes parts of its files while they are read."""
    from r3train.audit import audit_run as module
    from r3train.data import rotated_files

    monkeypatch.setattr(rotated_files, "PART_BYTES", 3000)
    run = write_run(tmp_path / "run", range(2))  # in parts
    monkeypatch.setattr(rotated_files, "PART_BYTES", 1 << 20)
    whole = audit_run(write_run(run, range(2, 4)))
    judged = []

    def judge_and_train(*args, **how):
        judged.append(args[1].step)
        if len(judged) == 1:
            monkeypatch.setattr(rotated_files, "PART_BYTES", part_bytes)
            write_run(run, range(4, 9))
        return judge(*args, **how)

    judge = module.judge_step
    monkeypatch.setattr(module, "judge_step", judge_and_train)
    audit = audit_run(run)
    assert judged == [0, 1, 2, 3] and audit.verdict == "passed", audit.findings
    assert audit.numbers == whole.numbers
    assert audit_run(run).numbers["steps"] == 9
    assert len(list(run.glob("evidence/*.gz"))) == (14 if part_bytes == 3000 else 4)


def test_there_may_be_more_ranks_than_the_process_may_open_files(tmp_path):
    run = write_run(tmp_path / "run", range(1), ranks=40)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        assert audit_run(run).verdict == "passed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_numbers_are_those_of_all_steps_at_the_time_that_counts(tmp_path):
    def rechecked(step):
        again = comparison(step, decoded=rows_apart({1: 1, 2: 2}))
        return [again, replace(again, part="last"), replace(again, noise=None)]

    how = dict(microbatches=2, rechecked=rechecked, calibrating=8)
    run = write_run(tmp_path / "run", **how)
    write_run(run, range(1, 4), attempt="2026-01-02", **how)
    of_step(STEPS, recheck=lambda of: {**of, "missed": 3})(run)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    calls = 4 * 2 * 3 * 2 * 2  # steps x passes x layers x microbatches x ranks
    numbers = audit.numbers
    assert numbers["num_calls"] == numbers["num_calls_expected"] == calls
    assert numbers["rows_replayed"] == 100 * calls and numbers["rows_mismatch"] == calls
    assert (numbers["steps"], numbers["ranks"]) == (4, 2)
    assert numbers["rechecked"] == {
        "samples": 4,
        "parts": 8,
        "missed": 3,
        "rows": 8 * 360,
        "rows_differ": 8 * 3,
        "log_probs": 8 * 60,
        "log_prob_off": pytest.approx(8 * 60 * 3e-7),
    }


def test_the_threshold_is_judged_on_rows_of_the_actors_own_version(tmp_path):
    """As many mismatching rows pass with a note where older weights computed them."""

    def mismatching(own: int):
        def change(r):
            here = r.step == 1 and r.layer_number == 2 and r.replay_pass == "old_log_prob"
            return with_choice(r, 70, 30, rows_current_mismatch=own) if here else r

        return lambda r: replace(
            changed := change(r),
            rows_current_equal=changed.rows_current - changed.rows_current_mismatch,
        )

    stale = write_run(tmp_path / "stale", change=mismatching(1))  # of 50 own rows
    audit = audit_run(stale)
    assert audit.verdict == "passed", audit.findings
    assert any("steps 1 many rows of older weight versions" in note for note in audit.notes)
    line = json.loads((stale / STEPS).read_text().splitlines()[1])
    assert line["passed"] and "R3 staleness: 58 of 100 rows at step 1" in line["stale_warning"]
    shares = line["agreement"]
    assert shares["current_mismatch"] == 2 / 300 and shares["stale_mismatch"] == 62 / 300
    own = write_run(tmp_path / "own", change=mismatching(20))
    (found,) = audit_run(own).findings
    assert (found.claim, found.what, found.got) == ("agreement", "rows_current_mismatch", "40")
    assert "R3 mismatch tokens (40) > threshold (2) at step 1" in (own / STEPS).read_text()
    assert audit_run(own, threshold=0.04).verdict == "passed"
    # what else the run found still counts
    of_step(STEPS, 0, passed=False, failures=[FAILURE])(own)
    found = audit_run(own, threshold=0.5).findings
    assert [(f.claim, f.step) for f in found] == [("covered", 0)]
