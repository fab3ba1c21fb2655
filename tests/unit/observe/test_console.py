import io
import math
import re
import unicodedata

import pytest
from rich.console import Console

from r3train.observe.console import PLAIN_HEARTBEAT_S, RunDisplay
from r3train.observe.metric_table import METRICS
from r3train.observe.step_line import duration, step_text, verdict_style

SUSPICIONS = [m.key for rows in METRICS.values() for m in rows if m.key.endswith("/suspect")]
FULL = {
    "step": 11,
    "rollout/reward_mean": 0.4125,
    "train/loss": 0.0132,
    "train/grad_norm": 0.83,
    "train/log_prob_gap_mean": 1.2e-5,
    "r3/passed": True,
    "rollout/response_len_mean": 12.3,
    "perf/tokens_per_s": 1834.2,
    "perf/step_s": 3.4,
    "perf/rollout_wait_s": 1.1,
    "perf/train_s": 2.1,
    "perf/publish_s": 0.2,
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain_display(num_rollout=3, enabled=True, clock=None):
    console = Console(file=io.StringIO(), highlight=False)
    return RunDisplay(num_rollout, enabled, console=console, clock=clock or Clock()), console.file


def live_display(num_rollout=3, clock=None, width=100):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=25, _environ={"TERM": "xterm"}
    )
    clock = clock or Clock()
    return RunDisplay(num_rollout, True, live=True, console=console, clock=clock), console.file


def without_control_codes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_step_line_holds_every_number_a_person_asks_for():
    assert step_text(FULL, 200, None).plain == (
        "step  11 ( 12/200)  reward 0.412  loss +0.0132  grad    0.83  gap 1.2e-05  R3 ok  len  12"
        "  1,834 tok/s  wait  1.1 train  2.1 publish  0.2 s"
    )


def test_a_step_of_sft_shows_its_loss_at_80_columns_and_no_gap():
    metrics = {k: v for k, v in FULL.items() if k not in ("rollout/reward_mean", "r3/passed")}
    line = step_text({**metrics, "train/log_prob_gap_mean": 0.0}, 200, 80).plain
    assert "loss +0.0132" in line and "gap" not in line


def test_the_columns_of_a_run_do_not_move():
    steps = [{**FULL, "step": step, "perf/train_s": step / 2} for step in (0, 8, 9, 98, 199)]
    lines = [step_text(metrics, 200, None).plain for metrics in steps]
    assert len({line.index("reward") for line in lines}) == 1 == len({len(line) for line in lines})


def test_a_missing_metric_is_left_out_of_the_step_line():
    assert step_text({"step": 0}, 3, None).plain == "step 0 (1/3)  R3 unchecked"


@pytest.mark.parametrize(
    "metrics, verdict",
    [
        ({"r3/passed": True}, "R3 ok"),
        ({"r3/passed": 1}, "R3 ok"),
        *(({"r3/passed": True, key: 0.9}, "R3 ok") for key in SUSPICIONS),
        *(({"r3/passed": True, key: 1.0}, "R3 suspect") for key in SUSPICIONS),
        ({"r3/passed": False, "served/suspect": 2.0}, "R3 FAILED"),
        ({"r3/passed": False, "r3/rows_replayed": 10}, "R3 FAILED"),
        ({"r3/passed": 0}, "R3 FAILED"),
        ({"r3/passed": math.nan}, "R3 FAILED"),
        ({"r3/rows_replayed": 10}, "R3 unchecked"),
        ({}, "R3 unchecked"),
    ],
)
def test_the_r3_word_of_a_step_never_takes_silence_for_a_pass(metrics, verdict):
    assert step_text({"step": 0, **metrics}, 3, None).plain.endswith(verdict)


def test_numbers_that_are_not_finite_are_shown_and_stand_out():
    text = step_text({"step": 0, "train/loss": math.nan, "train/grad_norm": math.inf}, 3, None)
    assert "loss +nan" in text.plain and "inf" in text.plain
    assert sum(span.style == "bold red" for span in text.spans) == 2


@pytest.mark.parametrize("width", range(20, 140, 5))
def test_a_narrow_terminal_loses_the_least_important_fields_and_keeps_the_verdict(width):
    text = step_text(FULL, 200, width)
    assert text.plain.startswith("step  11 ( 12/200)  reward 0.412") and "R3 ok" in text.plain
    assert len(text) <= max(width, len("step  11 ( 12/200)  reward 0.412  R3 ok"))


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (187, "3 min 07 s"),
        (7500, "2 h 05 min"),
        (math.inf, "inf"),
    ],
)
def test_durations_read_well(seconds, words):
    assert duration(seconds) == words


def test_only_a_pass_is_green():
    assert verdict_style("passed") == "green"
    assert verdict_style("failed") == "bold red"
    assert verdict_style("no evidence") == verdict_style("incomplete") == "yellow"


def drive(display):
    with display:
        display.note("run directory runs/x")
        with display.phase("starting SGLang") as phase:
            phase.detail("loading")
        display.rollout_begin(0, 4)
        display.rollout_update(2, 100)
        display.train_update("waiting for rollout")
        for step in range(3):
            display.train_update("training")
            display.step_line(FULL | {"step": step})
        display.summary({"steps": 3, "r3": "passed"})


def test_away_from_a_terminal_there_are_plain_lines_alone():
    display, out = plain_display()
    drive(display)
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[:3] == [
        "run directory runs/x",
        "starting SGLang ...",
        "done: starting SGLang, 0.0 s",
    ]
    assert [line.split("  ")[0] for line in lines[3:6]] == [
        "step 0 (1/3)",
        "step 1 (2/3)",
        "step 2 (3/3)",
    ]
    assert lines[6:] == ["--- run finished ---", "steps: 3", "R3: passed"]


def test_plain_lines_are_never_wrapped():
    display, out = plain_display()
    display.note("x" * 500)
    display.summary({"run_dir": "y" * 500})
    display.error(ValueError("z" * 500))
    assert [len(line) for line in out.getvalue().splitlines()][::2] == [500, 500 + 15, 500 + 19]


def test_a_rank_that_is_not_the_first_prints_nothing():
    display, out = plain_display(enabled=False)
    drive(display)
    display.error(ValueError("no"))
    assert out.getvalue() == ""


def test_brackets_in_foreign_text_are_not_taken_for_markup():
    display, out = plain_display()
    with display.phase("reading [/bold] data[0]"):
        pass
    display.error(ValueError("key [red] is [/missing]"))
    assert "reading [/bold] data[0] ..." in out.getvalue()
    assert "key [red] is [/missing]" in out.getvalue()


def test_on_a_terminal_rollout_and_training_are_shown_at_once():
    clock = Clock()
    display, out = live_display(num_rollout=10, clock=clock)
    with display:
        display.train_update("waiting for rollout")
        for step in range(2):
            display.step_line({"step": step, "r3/passed": True})
            clock.now += 5.0
        display.rollout_begin(2, 16)
        clock.now += 2.0
        display.rollout_update(7, 3000)
        display.train_update("training")
        display._progress.refresh()
    shown = without_control_codes(out.getvalue())
    rollout, train = [line for line in shown.splitlines() if line.strip()][-2:]
    assert "rollout 2" in rollout and "7/16 groups" in rollout and "1,500 tok/s" in rollout
    # 8 steps are left at 5 s per step, 7 s of which have passed since the last one ended
    assert "2/10 steps" in train and "33 s left" in train and "training" in train
    assert "step  0 ( 1/10)" in shown and "R3 ok" in shown


def test_the_cursor_comes_back_when_a_run_dies():
    display, out = live_display()
    with pytest.raises(KeyboardInterrupt), display:
        display.train_update("training")
        raise KeyboardInterrupt
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_a_phase_on_a_terminal_shows_the_latest_line_of_what_it_waits_for():
    clock = Clock()
    display, out = live_display(clock=clock, width=60)
    with display.phase("starting SGLang") as phase:
        clock.now += 12.0
        phase.detail("loading\n  weights " + "x" * 100)
        assert phase.__rich__().plain.startswith("starting SGLang (12 s) loading weights xxx")
    assert "done: starting SGLang, 12 s" in without_control_codes(out.getvalue())


def test_a_phase_that_fails_says_so_and_lets_the_error_through():
    display, out = plain_display()
    with pytest.raises(OSError), display.phase("starting SGLang"):
        raise OSError("no port")
    assert "failed: starting SGLang, after 0.0 s" in out.getvalue()
    assert "done" not in out.getvalue()


def test_a_long_wait_gives_a_plain_line_now_and_then():
    clock = Clock()
    display, out = plain_display(clock=clock)
    display.rollout_begin(3, 16)
    for second in range(1, 131):
        clock.now = float(second)
        display.rollout_update(4, second * 10)
    assert PLAIN_HEARTBEAT_S == 60
    assert out.getvalue().splitlines() == ["rollout 3: 4/16 groups 10 tok/s"] * 2


def test_the_summary_names_reward_verdict_time_and_directory():
    display, out = plain_display()
    display.summary(
        {
            "reward_first": 0.25,
            "reward_last": 0.875,
            "steps": 1200,
            "tokens": 1234567,
            "r3": "failed",
            "failed_steps": [3, 4],
            "wall_s": 192.4,
            "steps_s": 65.0,
            "run_dir": "runs/x",
            "mean_staleness": 0.5,
            "evaluation of gsm8k_test": "0.5",
        }
    )
    assert out.getvalue().splitlines() == [
        "--- run finished ---",
        "reward: 0.250 -> 0.875  first tenth -> last tenth",
        "steps: 1,200",
        "tokens: 1,234,567",
        "R3: failed at step 3, 4",
        "wall time: 3 min 12 s, of which steps 1 min 05 s",
        "mean staleness: 0.5",
        "evaluation of gsm8k_test: 0.5",
        "run directory: runs/x",
    ]


def test_an_error_is_shown_with_its_causes_and_the_place_of_the_logs():
    display, out = plain_display()
    try:
        try:
            raise OSError("connection reset")
        except OSError as cause:
            raise RuntimeError("the SGLang server is gone") from cause
    except RuntimeError as error:
        display.error(error, "runs/x/logs")
    assert out.getvalue().splitlines() == [
        "--- run failed ---",
        "logs: runs/x/logs",
        "error: RuntimeError: the SGLang server is gone",
        "caused by: OSError: connection reset",
    ]


HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202eleft\ud800 right\r"


def commands_in(text):
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]


def test_what_a_model_or_a_server_wrote_gives_no_commands_to_the_terminal():
    display, out = plain_display()
    display.error(ValueError(f"sample 3: {HOSTILE}\nsecond line"))
    display.note(HOSTILE)
    with display.phase("starting SGLang") as phase:
        phase.detail(HOSTILE)
        assert not commands_in(str(phase.__rich__()))
    shown = out.getvalue()
    assert not commands_in(shown) and "left" in shown and "\\x1b[2J" in shown
    assert "second line\n" in shown  # lines stay lines


def test_an_error_that_hides_its_context_keeps_it_hidden():
    display, out = plain_display()
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer") from None
    except ValueError as error:
        display.error(error)
    assert "inner" not in out.getvalue()
