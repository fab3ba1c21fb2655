"""The live display of a run: phases, progress, one line per step, and the last message.

On a terminal the progress of rollout and training moves at the bottom and the lines scroll above
it.  Anywhere else (CI, a scheduler's log file) there are plain lines only, unwrapped and without
control codes.  Ranks other than 0 pass ``enabled=False`` and print nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from r3train.config.sources import printable
from r3train.observe.starts import StartParts
from r3train.observe.step_line import duration, step_text, verdict_style

logger = logging.getLogger(__name__)

# Where nobody watches, a word from a long wait is enough once a minute.
PLAIN_HEARTBEAT_S = 60.0
# The time left follows the pace of the last steps, not of the first, which compile and warm up.
PACE_STEPS = 20
# the progress lines, in the order in which they are added
_ROLLOUT, _TRAIN = TaskID(0), TaskID(1)


class RunDisplay:
    """Show one run to a person; a context manager.

    Calls may come from any thread.  num_rollout is the number of rollouts the run will make, one
    training step each; ``live`` forces the moving progress on or off and defaults to whether the
    console is a terminal.  ``parts`` learns of the phases, and is shown behind the first step.
    """

    def __init__(
        self,
        num_rollout: int,
        enabled: bool,
        *,
        live: bool | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        parts: StartParts | None = None,
    ) -> None:
        self._parts = parts
        self._num_rollout = num_rollout
        self._console = console or Console(highlight=False, file=UntilGone(sys.stdout))
        self._console.quiet = not enabled
        self._live = enabled and (_is_watched(self._console) if live is None else live)
        self._clock = clock
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._rollout_started = self._last_plain = clock()
        self._rollout_id: int | None = None
        self._num_groups = 0
        # of the last steps: how many were done, and when
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show that something slow is going on before the first step, and how long it took.

        ``name`` reads as an activity ("starting SGLang").  The block gets a Phase, whose
        ``detail(text)`` shows the latest line of whatever is being waited for.
        """
        phase = Phase(name, self._clock, self._heartbeat)
        if not self._live:
            self._line(f"{name} ...")
        moves = self._live and self._progress is None
        try:
            with self._console.status(phase) if moves else nullcontext():
                yield phase
        except BaseException:
            self._line(Text.assemble(("failed: ", "bold red"), f"{name}, after {phase.elapsed}"))
            raise
        self._line(Text.assemble(("done: ", "green"), f"{name}, {phase.elapsed}"))
        if self._parts is not None:
            self._parts.end(name, time.time())

    def rollout_begin(self, rollout_id: int, num_groups: int) -> None:
        """A batch of ``num_groups`` prompts goes to the engine."""
        with self._lock:
            self._rollout_started = self._clock()
            self._rollout_id, self._num_groups = rollout_id, num_groups
            self._show_progress()
            if self._progress is not None:
                # reset forgets every field that it is not given
                words = {"description": f"rollout {rollout_id}", "count": "", "note": ""}
                self._progress.reset(_ROLLOUT, total=num_groups, **words)
        self.rollout_update(0, 0)

    def rollout_update(self, groups_done: int, tokens: int) -> None:
        """So many groups of the batch are finished, and so many tokens generated for it so far."""
        seconds = self._clock() - self._rollout_started
        rate = f"{tokens / seconds:,.0f} tok/s" if tokens and seconds > 0 else ""
        count = f"{groups_done}/{self._num_groups} groups"
        if self._progress is not None:
            self._progress.update(_ROLLOUT, completed=groups_done, count=count, note=rate)
        self._heartbeat(f"rollout {self._rollout_id}: {count} {rate}")

    def train_update(self, activity: str) -> None:
        """Show the trainer's phase: "waiting for rollout", "training", "publishing weights"."""
        self._update_training(note=activity)

    def step_line(self, metrics: Mapping[str, Any]) -> None:
        """Print the line of a finished step, from its metrics (keys of metrics.py), and count it."""
        with self._lock:
            done = int(metrics["step"]) + 1
            self._ends.append((done, self._clock()))
            self._update_training(completed=done, count=f"{done}/{self._num_rollout} steps")
            width = self._console.width if self._live else None
            self._line(step_text(metrics, self._num_rollout, width))
            self._last_plain = self._clock()
        if self._parts is not None and "perf/step_s" in metrics:
            self.note(self._parts.end_first_step(metrics))
            self._parts = None

    def note(self, text: str, style: str = "") -> None:
        """Print one line that belongs to no step, such as where the run directory is."""
        self._line(Text(printable(text), style=style))
        logger.info(text)  # to the rank's file alone

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Print the last words of a run, and stop the progress.

        Known keys: reward_first, reward_last, steps, tokens, r3 (a verdict in a word), wall_s, steps_s
        (the part of it that the report shows), run_dir, plot, next (commands), all optional;
        ``metrics.summarise`` makes most of them.  ``stopped``, the name of a signal, makes the title.  Any other key whose value is a string or
        a number is shown as it is.
        """
        self._stop_progress()
        rest = dict(summary)
        stopped, verdict = rest.pop("stopped", None), str(summary.get("r3", ""))
        border = "yellow" if stopped else "green"
        border = "red" if verdict_style(verdict) == "bold red" else border
        title = f"run stopped by {stopped}" if stopped else "run finished"
        self._panel(title, _summary_rows(rest), border)

    def error(
        self,
        error: BaseException,
        log_dir: str | Path | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Print why a run ended early: the error, what caused it, and where the whole story is.

        facts: what explains the error, by name: shown last, as causes are.
        """
        self._stop_progress()
        self._panel("run failed", _error_rows(error, log_dir, facts or {}), "red")

    def _line(self, line: Text | str) -> None:
        text = Text(line) if isinstance(line, str) else line
        # outside a terminal a line stays one line, however long: someone will grep it
        self._console.print(text, soft_wrap=not self._live, highlight=False)

    def _heartbeat(self, line: str) -> None:
        if self._live:
            return
        with self._lock:
            if self._clock() - self._last_plain < PLAIN_HEARTBEAT_S:
                return
            self._last_plain = self._clock()
        self._line(line)

    def _panel(self, title: str, rows: list[tuple[str, Text]], border: str) -> None:
        if not self._live:
            self._line(f"--- {title} ---")
            for name, text in rows:
                self._line(Text.assemble(f"{name}: ", text))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(name, text)
        self._console.print(Panel(table, title=title, title_align="left", border_style=border))

    def _update_training(self, **fields: Any) -> None:
        with self._lock:
            self._show_progress()
            if self._progress is not None:
                self._progress.update(_TRAIN, **fields)

    def _show_progress(self) -> None:
        if not self._live or self._progress is not None:
            return
        progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            _TimeLeft(self._ends),
            TextColumn("[dim]{task.fields[note]}"),
            console=self._console,
            # the machine has better things to do than to redraw ten times per second
            refresh_per_second=4,
            transient=True,
            get_time=self._clock,
        )
        progress.add_task("rollout", total=None, count="", note="")
        count = f"0/{self._num_rollout} steps"
        progress.add_task("train", total=self._num_rollout, count=count, note="")
        progress.start()
        self._progress = progress

    def _stop_progress(self) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


class Phase:
    """One slow thing before the first step; renders itself anew at every refresh."""

    def __init__(
        self, name: str, clock: Callable[[], float], heartbeat: Callable[[str], None]
    ) -> None:
        self._name = name
        self._clock = clock
        self._heartbeat = heartbeat
        self._began = clock()
        self._detail = ""

    @property
    def elapsed(self) -> str:
        return duration(self._clock() - self._began)

    def detail(self, text: str) -> None:
        """Show ``text``, shortened to one line, next to the phase's name; "" shows none."""
        self._detail = printable(" ".join(text.split()))
        self._heartbeat(f"{self._name} ({self.elapsed})" + f": {self._detail}" * bool(self._detail))

    def __rich__(self) -> Text:
        text = Text(f"{self._name} ({self.elapsed}) ", no_wrap=True, overflow="ellipsis")
        return text.append(self._detail, style="dim")


class _TimeLeft(ProgressColumn):
    """The time left at the pace of the last steps, on the line of the training only.

    Empty before the second step is done: the first one also pays for warming up.
    """

    def __init__(self, ends: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self._ends = ends

    def render(self, task: Task) -> Text:
        if task.id != _TRAIN or len(self._ends) < 2:
            return Text("")
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        left = (task.total - last) * (ended - began) / (last - first)
        left -= task.get_time() - ended
        return Text(f"{duration(max(0.0, left))} left", style="cyan")


class UntilGone:
    """A stream that drops what it cannot write: its terminal or its reader is gone, its disk is full, or it is None.

    A run is told of a terminal's end (SIGHUP) and saves; no line of progress must keep it from that, or end it.
    A character that the stream's encoding lacks is spelled out.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")
        self._has_said = False
        if isinstance(self._stream, TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._unless_gone(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer, or drop it."""
        self._unless_gone(self._stream.flush)

    def _unless_gone(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full and error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # what is in the buffer would be an error again as the interpreter ends (exit code 120)
            number = self._stream.fileno()
            nowhere, there = os.open(os.devnull, os.O_WRONLY), os.dup(number)
            os.dup2(nowhere, number)
            self._stream.flush()
            if is_full:  # it may have room again
                os.dup2(there, number)
            os.close(nowhere), os.close(there)
            if is_full and logging.root.handlers and not self._has_said:
                self._has_said = True
                logger.warning("lines for %s are lost: %s", self._stream.name, error.strerror)


def _is_watched(console: Console) -> bool:
    # rich calls per file a terminal when FORCE_COLOR asks for colours: ask the file itself as well
    isatty = getattr(console.file, "isatty", None)
    return console.is_interactive and isatty is not None and isatty()


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    rest = dict(summary)
    named = ("failed_steps", "reward_first", "reward_last", "r3", "wall_s", "steps_s")
    failed, first, last, verdict, wall_s, steps_s = (rest.pop(k, None) for k in named)
    files = {"run directory": rest.pop("run_dir", None)}
    files |= {name: rest.pop(name, None) for name in ("plot", "next")}
    rows = []
    if first is not None and last is not None:
        change = (f"{first:.3f} -> {last:.3f}", "green" if last > first else "yellow")
        rows.append(("reward", Text.assemble(change, ("  first tenth -> last tenth", "dim"))))
    for key in ("steps", "tokens"):
        if (value := rest.pop(key, None)) is not None:
            rows.append((key, Text(f"{value:,}")))
    if verdict is not None:
        where = ""
        if failed:
            where = f" at step {', '.join(map(str, failed[:8]))}" + ", ..." * (len(failed) > 8)
        rows.append(("R3", Text(f"{verdict}{where}", style=verdict_style(str(verdict)))))
    if wall_s is not None:
        within = "" if steps_s is None else f", of which steps {duration(steps_s)}"
        rows.append(("wall time", Text(duration(wall_s) + within)))
    for key, value in rest.items():
        words = key if " " in key else key.replace("_", " ")  # a set's name stays as it is
        rows.append((words, Text(printable(str(value)))))
    rows += [(name, Text(str(value))) for name, value in files.items() if value is not None]
    return rows


def _error_rows(
    error: BaseException, log_dir: str | Path | None, facts: Mapping[str, str]
) -> list[tuple[str, Text]]:
    """Rows of which the last line is the cause: a text's first line is, and its others stand before."""
    rows = [] if log_dir is None else [("logs", Text(str(log_dir)))]
    rows.append(("error", _error_text(error, "bold red")))
    cause, shown = _cause(error), str(error)
    # an exception group in a loop of contexts must not keep the person waiting
    while cause is not None and len(rows) < 7:
        if str(cause) not in shown:
            rows.append(("caused by", _error_text(cause, "red")))
        shown, cause = shown + str(cause), _cause(cause)
    rows += [(name, Text(printable(text), style="bold red")) for name, text in facts.items()]
    name, text = rows.pop()
    first, *rest = text.split("\n")
    details = [("details", Text("\n").join(rest))] if rest else []
    return [*rows, *details, (name, first)]


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _error_text(error: BaseException, style: str) -> Text:
    text = printable(str(error).strip()) or "(no message)"
    return Text.assemble((type(error).__name__, style), ": ", text)
