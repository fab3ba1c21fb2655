"""The pages of the benchmarks from a recorded small run, and that every script says what it does."""

import argparse
import copy
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import agreement, learning_rules, match_target, replay_learning
from benchmarks.measure import in_turns, ratios, spread
from benchmarks.page import (
    EFFECT_SECTIONS,
    figure,
    gradient_section,
    learning_section,
    number,
    performance_page,
    replay_learning_section,
    replay_weights_section,
    results_page,
    with_section,
)
from benchmarks.run_all import BENCHMARKS, run_script, with_earlier

DTYPES = ("float32", "bfloat16")
ROOT = Path(__file__).resolve().parents[3]
RECORDED = json.loads(Path(__file__).with_name("recorded_benchmarks.json").read_text())


def tables(page: str) -> list[list[str]]:
    """Runs of lines that begin with a bar."""
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [lines for lines in found if lines]


@pytest.mark.parametrize("page", [performance_page(RECORDED), results_page(RECORDED["agreement"])])
def test_every_table_has_as_many_cells_in_each_row_as_in_its_head(page):
    assert tables(page)
    for lines in tables(page):
        assert len(lines) > 2, lines
        assert len({line.count("|") for line in lines}) == 1, lines
        assert set(lines[1]) == {"|", "-"}
        assert not re.search(r"\bnan\b|\binf\b|None|[{}]", "".join(lines)), lines


def test_every_benchmark_has_its_section_with_its_ratio():
    page = performance_page(RECORDED)
    none = performance_page({"machine": RECORDED["machine"]})
    sections = page.count("\n## ") - 1  # one tells of the aims
    assert sections == none.count("Not measured") == len(set(BENCHMARKS) - {"agreement"})
    assert "Not measured" not in page and "Failed" not in page
    for shown in (
        RECORDED["rollout_rate"]["over_no_routes"]["recorded and returned"],
        RECORDED["replay_overhead"]["check_over_replay"],
        RECORDED["replay_overhead"]["check_over_native"],
        RECORDED["replay_overhead"]["torchs_over_skipped"],
        RECORDED["weight_sync"]["over_copy"]["broadcast"],
        *RECORDED["against_trl"]["shapes"]["demo"]["over_trl"].values(),
    ):
        assert figure(shown) in page


def test_what_was_measured_alone_later_is_said_and_the_whole_run_kept(tmp_path):
    path = tmp_path / "machine.json"
    whole = RECORDED["machine"]
    assert with_earlier(whole, path, None) == whole
    later = with_earlier(whole | {"date": "2027-01-01", "minutes": 1.0}, path, ["growth"])
    earlier = whole.get("alone", {})
    assert later == whole | {"alone": earlier | {"growth": "2027-01-01"}}
    page = performance_page(RECORDED | {"machine": later})
    minutes = f"{whole['minutes']:.0f}"
    assert (
        f"took {minutes} minutes. Measured alone since: " in page and "growth (2027-01-01)." in page
    )


def test_a_busy_machine_is_said():
    for load, said in ((8.0, True), (0.1, False)):
        machine = RECORDED["machine"] | {"load_before": load}
        page = performance_page(RECORDED | {"machine": machine})
        assert ("The machine was busy" in page) is said


def test_a_benchmark_that_fails_leaves_its_reason_and_no_result(tmp_path):
    found = run_script("trl_worker", ["--steps", "no number"], tmp_path)
    assert list(found) == ["error"] and "exit code 2" in found["error"], found


def test_a_benchmark_that_failed_or_never_ran_is_named_and_not_left_out():
    results = copy.deepcopy(RECORDED)
    del results["weight_sync"]
    results["rollout_rate"] = {"error": "exit code 1: EngineDied"}
    page = performance_page(results)
    assert "## Weight sync\n\nNot measured in this run." in page
    assert "**Failed**: `exit code 1: EngineDied`" in page


def test_the_page_says_so_when_ours_is_slower_and_when_it_is_faster():
    results = copy.deepcopy(RECORDED)
    (shape,) = [results["against_trl"]["shapes"]["demo"]]
    results["against_trl"]["shapes"] = {"demo": shape}
    for median, said in ((0.25, "slower"), (3.0, "faster")):
        shape["over_trl"]["r3train"]["median"] = median
        page = performance_page(results)
        assert f"**{median:g} times** the samples per second of TRL, so it is {said}" in page


def test_agreement_ratios_are_of_the_same_seed_and_extreme_tokens_are_not_divided_by_nothing():
    result = copy.deepcopy(RECORDED["agreement"])
    first = result["runs"][0]
    second = copy.deepcopy(first) | {"seed": 1}
    result["runs"] = [first, second]
    for run, off, on in ((first, 1e-2, 1e-3), (second, 1e-1, 5e-2)):
        run["float32"]["off"]["k3"], run["float32"]["on"]["k3"] = off, on
        run["float32"]["off"]["far_share"] = run["float32"]["on"]["far_share"] = 0.0
    page = results_page(result)
    # medians of 0.1 and 0.5, not the ratio of medians
    assert "| k3 KL | 0.3 (0.1 to 0.5) | 0.055 (0.01 to 0.1) | 0.0255 (0.001 to 0.05) |" in page
    assert "gap above ln 2 | none without R3 in 2 of 2 seeds |" in page


def learned(rewards: list[float], flags: tuple[str, ...] = ()) -> dict:
    """A finished job of benchmarks/learning_rules.py with this curve."""
    curves = {key: [0.0] * len(rewards) for key in learning_rules.KEPT}
    curves |= {"rollout/reward_mean": rewards, "r3/rows_replayed": [40.0] * len(rewards)}
    ends = {"reward_first": rewards[0], "reward_last": rewards[-1]}
    return ends | {"steps": len(rewards), "r3": "passed", "curves": curves, "flags": list(flags)}


def test_the_section_of_the_rules_has_a_row_for_each_and_takes_its_own_place(tmp_path):
    slow, quick = learned([0.1, 0.2, 0.3, 0.4]), learned([0.2, 0.8, 0.9, 1.0], ("--eps-clip", "1"))
    starts = [{learning_rules.ALONE: learned([0.0] * 4), learning_rules.TAUGHT: quick}]
    result = {"machine": RECORDED["machine"], "warm_start": starts}
    section = learning_section(
        result | {"rules": {"grpo": [slow, quick], "gspo": [], "b": [quick]}}
    )
    (rules, start) = tables(section)
    assert [line.split("|")[1].strip() for line in rules[2:]] == ["`grpo`", "`b`"]
    assert "| 2 | 0.15 (0.1 to 0.2) | 0.7 (0.4 to 1) | never, 4 |" in rules[2]
    assert (
        "| `--eps-clip 1` | 1 |" in rules[3] and "480 rows were replayed. In 0 of them" in section
    )
    assert len(start) == 4 and "| 0 (0 to 0) | 0 (0 to 0) |" in start[2]
    for page in ("# A\n\ntext\n", "# A\n\ntext\n\n## B\n\nmore\n"):
        once = with_section(page, section)
        assert with_section(once, section) == once and once.startswith("# A\n\ntext\n\n")
        assert once.count("## What the demo learns") == 1
    behind = f"# A\n\n{section}\n## B\n\nmore\n"
    assert with_section(behind, section) == behind
    # the picture has a panel a rule that was measured, and one of the other task
    drawn = learning_rules.draw(result | {"rules": {"grpo": [slow, quick], "gspo": []}})
    assert [len(axes.lines) for axes in drawn.axes] == [2, 2, 0]


def of_gradients(cosine: float) -> dict:
    """A finding of benchmarks/replay_arms.py of a seed, every arm alike."""
    parts = {"all": [cosine, 1.0, 0.5], "router": [cosine, 1.0, 0.25]}
    at = parts | {"layers": [parts["all"]] * 2, "routers": [parts["router"]] * 2}
    arm = at | {"k3": 1e-3, "ess": 0.5, "chi2_seq": 1.0, "dropped": 0.0}
    names = ("live router", "R3", "R3, sequence weights")
    actors = {dtype: {name: arm for name in names} for dtype in DTYPES}
    shape = {"layers": 2, "experts": 8, "topk": 2, "hidden": 16, "samples": 4}
    return {"actors": actors, "halves": at, **shape}


def test_the_gradients_have_a_row_an_arm_with_the_interval_of_their_seeds():
    places = [{"initializer_range": w, "server_dtype": "bfloat16"} for w in (0.1, 0.2)]
    runs = [{"seed": s, **p, **of_gradients(c)} for s, c in ((0, 0.9), (1, 0.92)) for p in places]
    section = gradient_section(
        {"machine": RECORDED["machine"], "command": "c", "answer": 8, "runs": runs}
    )
    (small, large, layers) = tables(section)
    assert len(small) == len(large) == 2 + 3 * len(DTYPES) and len(layers) == 5
    # the t of one degree of freedom: 12.706 * 0.01414 / sqrt(2)
    assert "| float32 | live router | 0.001 ± 0 |  | 0.9100 ± 0.1271 |" in small[2]
    assert "| 0.5 ± 0 |" in next(line for line in small if "sequence" in line)
    assert "| 0.910 0.910 |" in layers[2]


# of benchmarks/replay_learning.py
SETTINGS = dict(rollouts=12, prompts=2, group=2, tilt=0.3, layers=2, initializer_range=0.2, lr=1e-4)
SETTINGS |= dict(steps_per_rollout=1, server_dtype="bfloat16")


def of_policy(server: float, actor: float) -> dict:
    curve = {"train/server_kl": server, "train/actor_kl": actor, "train/log_prob_gap_k3": 0.1}
    return {"served_kl": server, "curves": {key: [1.0] * 2 + [v] * 10 for key, v in curve.items()}}


# of benchmarks/replay_weights.py
WEIGHTS = dict(rollouts=2, prompts=2, group=2, answer=4, layers=2, initializer_range=0.2, lr=1e-4)


def of_ess(*shares: float) -> list[dict]:
    """Jobs of two rollouts, a share of the samples each."""
    keys = ("train/ess", "train/chi2_seq", "train/log_prob_gap_k3")
    return [{"curves": {key: [share, share - 0.1] for key in keys}} for share in shares]


def test_the_shares_of_the_samples_are_compared_seed_by_seed():
    arms = {"R3": of_ess(0.8, 0.7, 0.8), "live router": of_ess(0.3, 0.2, 0.3)}
    section = replay_weights_section(
        {"machine": RECORDED["machine"], "command": "c", "settings": WEIGHTS, "arms": arms}
    )
    (table,) = tables(section)
    assert table[2].startswith("| R3 | 0.717 ± 0.143 |")
    assert table[4].startswith("| live router less R3 | -0.5 ± ")
    assert "0.60 with R3 and 0.10 with the live router" in section


def test_the_policies_are_compared_seed_by_seed_and_both_sections_outlive_a_new_page():
    jobs = {
        "R3": [of_policy(0.1, 0.1), of_policy(0.3, 0.3)],
        "live router": [of_policy(0.2, 0.1), of_policy(0.4, 0.3)],
    }
    section = replay_learning_section(
        {"machine": RECORDED["machine"], "command": "c", "settings": SETTINGS, "arms": jobs}
    )
    (table,) = tables(section)
    assert table[2].startswith("| R3 | 0.2 ± 1.27 | 0.2 ± 1.27 |")
    assert table[4].startswith("| live router less R3 | 0.1 ± ") and len(table) == 5
    runs = [{"seed": 0, "initializer_range": 0.1, "server_dtype": "bfloat16", **of_gradients(0.9)}]
    of_arms = {"machine": RECORDED["machine"], "command": "c", "answer": 8, "runs": runs}
    page = results_page(RECORDED["agreement"])
    of_weights = {"machine": RECORDED["machine"], "command": "c", "settings": WEIGHTS}
    of_weights |= {"arms": {"R3": of_ess(0.75, 0.25), "live router": of_ess(0.5, 0.5)}}
    for own in (gradient_section(of_arms), section, replay_weights_section(of_weights)):
        page = with_section(page, own)
    assert all(page.count(heading) == 1 for heading in EFFECT_SECTIONS)
    assert results_page(RECORDED["agreement"], page) == page


def test_a_job_of_other_settings_is_measured_again(tmp_path):
    arguments = argparse.Namespace(**SETTINGS, seeds=1, arms=["R3"])
    path = replay_learning.place_of(tmp_path, 1, "R3")
    path.write_text(json.dumps({"settings": SETTINGS}))
    assert replay_learning.kept(tmp_path, 1, "R3", arguments) is not None
    arguments.lr = 1.0
    assert replay_learning.kept(tmp_path, 1, "R3", arguments) is None


def test_at_the_target_no_answer_has_an_advantage():
    """And the gradient elsewhere is that of KL(policy || target)."""
    import torch

    from r3train.algo.loss_rows import LossRows

    target = torch.tensor([0.5, 0.3, 0.2]).log()

    def gradient(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.requires_grad_()
        log_probs = logits.log_softmax(0)
        rows = LossRows(
            *(log_probs, log_probs.detach(), log_probs.detach(), target),
            *(torch.ones(3, dtype=torch.bool), torch.zeros(3), torch.arange(3), torch.ones(3)),
        )
        loss = match_target.towards_target(rows, None).loss
        # of all answers, each as often as the policy gives it
        score = torch.autograd.grad((loss * log_probs.detach().exp()).sum(), logits)[0]
        policy = logits.log_softmax(0)
        return score, torch.autograd.grad(policy.exp() @ (policy - target), logits)[0]

    at_target, _ = gradient(target.clone())
    assert at_target.abs().max() < 1e-6
    score, exact = gradient(torch.tensor([1.0, -1.0, 0.5]))
    torch.testing.assert_close(score, exact)


def test_a_rule_that_was_measured_is_not_measured_again_unless_it_ran_for_another_time(tmp_path):
    assert learning_rules.kept(tmp_path, "grpo-1", 4) is None
    learning_rules.keep(tmp_path, "grpo-1", learned([0.1] * 4))
    assert learning_rules.kept(tmp_path, "grpo-1", 4)["steps"] == 4
    assert learning_rules.kept(tmp_path, "grpo-1", 5) is None
    found = learning_rules.found(tmp_path, ["grpo", "rloo"], 2)
    assert {rule: len(jobs) for rule, jobs in found["rules"].items()} == {"grpo": 1, "rloo": 0}


@pytest.mark.parametrize("flags", [["--config", "a.toml"], ["--config=a.toml"], []])
def test_agreement_measures_the_model_of_the_config_that_it_records(flags, monkeypatch, tmp_path):
    """Once a seed with a configuration, however it is spelled; else the tiny model's settings."""
    measured = []

    def one_seed(seed, setting, arguments, flags, scratch):
        measured.append((setting, flags))
        return {actor: {way: {"k3": 1.0} for way in ("off", "on")} for actor in DTYPES}

    monkeypatch.setattr(agreement, "one_seed", one_seed)
    output = tmp_path / "found.json"
    words = ["--seeds", "1", *flags, "--rollout-batch-size", "4", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["agreement", *words])
    agreement.main()
    given = ["--config", "a.toml"] if flags else []
    assert measured == [
        (setting, [*given, "--rollout-batch-size", "4"])
        for setting in ([None] if flags else [0.1, 0.2])
    ]
    assert json.loads(output.read_text())["command"].endswith(" ".join(measured[0][1]))


def test_agreement_takes_no_training_flag_for_the_beginning_of_its_own(monkeypatch):
    monkeypatch.setattr(agreement, "one_seed", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["agreement", "--seeds", "0", "--seed", "7"])
    found = []
    monkeypatch.setattr(agreement, "write_result", lambda _, result: found.append(result))
    agreement.main()
    assert found[0]["command"].endswith("--ranks 1 --seed 7")


def test_a_spread_is_of_neighbours():
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == spread([2.0, 3.0, 4.0])
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}
    with pytest.raises(ValueError, match="at least one"):
        spread([])
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_another_arm_begins_each_round_and_the_warm_up_is_left_out():
    began = []
    arms = {name: lambda name=name: began.append(name) for name in "abc"}
    ticks = iter(range(100))
    seconds = in_turns(arms, 2, warm_up=2, clock=lambda: next(ticks))
    assert "".join(began) == "abc" + "bca" + "cab" + "abc"
    assert seconds == {"a": [1, 1], "b": [1, 1], "c": [1, 1]}


def test_numbers_keep_three_digits():
    assert [number(x) for x in (0, 1.5e-5, 0.01234, 9.876, 123456.7)] == [
        "0",
        "1.5e-05",
        "0.0123",
        "9.88",
        "123,457",
    ]


SCRIPTS = [
    path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_answers_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # some add the root to it
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert not end.value.code and "usage:" in capsys.readouterr().out.lower()


def test_scripts_are_found():
    assert {"agreement", "run_all", "trl_worker", "route_path"} <= set(SCRIPTS)
