"""The live display of a run: phases, progress, one line a step, and the last message.

On a terminal the progress of rollout and training moves at the bottom and the lines scroll above
it.  Anywhere else (CI, a scheduler's log file) there are plain lines alone, unwrapped and without
control codes.  Ranks other than 0 pass ``enabled=False`` and print nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from r3train.config.sources import printable
from r3train.observe.step_line import duration, step_text, verdict_style

# Where nobody watches, a word from a long wait is enough once a minute.
PLAIN_HEARTBEAT_S = 60.0
# The time left follows the pace of the last steps, not of the first, which compile and warm up.
PACE_STEPS = 20


class RunDisplay:
    """Show one run to a person; a context manager.

    Calls may come from any thread.  num_rollout is the number of rollouts the run will make, one
    training step each; ``live`` forces the moving progress on or off and defaults to whether the
    console is a terminal.
    """

    def __init__(
        self,
        num_rollout: int,
        enabled: bool,
        *,
        live: bool | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_rollout = num_rollout
        self._enabled = enabled
        self._console = console or Console(highlight=False)
        self._live = enabled and (_is_watched(self._console) if live is None else live)
        self._clock = clock
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._rollout_task: Any = None
        self._train_task: Any = None
        self._rollout_started = self._last_plain = clock()
        self._rollout_id: int | None = None
        self._num_groups = 0
        self._pace = _Pace(num_rollout, clock)

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        status = self._console.status(phase) if self._live and self._progress is None else None
        try:
            if status is not None:
                status.start()
            yield phase
        except BaseException:
            if status is not None:
                status.stop()
            self._line(Text.assemble(("failed: ", "bold red"), f"{name}, after {phase.elapsed}"))
            raise
        if status is not None:
            status.stop()
        self._line(Text.assemble(("done: ", "green"), f"{name}, {phase.elapsed}"))

    def rollout_begin(self, rollout_id: int, num_groups: int) -> None:
        """A batch of ``num_groups`` prompts goes to the engine."""
        with self._lock:
            self._rollout_started = self._clock()
            self._rollout_id, self._num_groups = rollout_id, num_groups
            self._show_progress()
            if self._progress is not None:
                # reset forgets every field that it is not given
                self._progress.reset(
                    self._rollout_task,
                    total=num_groups,
                    **_fields(f"rollout {rollout_id}", f"0/{num_groups} groups"),
                )
        self.rollout_update(0, 0)

    def rollout_update(self, groups_done: int, tokens: int) -> None:
        """So many groups of the batch are finished, and so many tokens generated for it so far."""
        if not self._enabled:
            return
        seconds = self._clock() - self._rollout_started
        rate = f"{tokens / seconds:,.0f} tok/s" if tokens and seconds > 0 else ""
        if self._progress is not None:
            self._progress.update(
                self._rollout_task,
                completed=groups_done,
                count=f"{groups_done}/{self._num_groups} groups",
                note=rate,
            )
        elif not self._live:
            self._heartbeat(
                f"rollout {self._rollout_id}: {groups_done}/{self._num_groups} groups {rate}"
            )

    def train_update(self, activity: str) -> None:
        """Show the trainer's phase: "waiting for rollout", "training", "publishing weights"."""
        if not self._enabled:
            return
        with self._lock:
            self._show_progress()
            if self._progress is not None:
                self._progress.update(self._train_task, note=activity)

    def step_line(self, metrics: Mapping[str, Any]) -> None:
        """Print the line of a finished step, from its metrics (keys of metrics.py), and count it."""
        if not self._enabled:
            return
        with self._lock:
            done = int(metrics["step"]) + 1
            self._pace.step(done)
            self._show_progress()
            if self._progress is not None:
                self._progress.update(
                    self._train_task, completed=done, count=f"{done}/{self._num_rollout} steps"
                )
            width = self._console.width if self._live else None
            self._line(step_text(metrics, self._num_rollout, width))
            self._last_plain = self._clock()

    def note(self, text: str, style: str = "") -> None:
        """Print one line that belongs to no step, such as where the run directory is."""
        self._line(Text(printable(text), style=style))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Print the last words of a run, and stop the progress.

        Known keys: reward_first, reward_last, steps, tokens, r3 (a verdict in a word), wall_s, steps_s
        (the part of it that the report shows), run_dir, all optional; ``metrics.summarise`` makes most of
        them.  Any other key whose value is a string or a number is shown as it is.
        """
        self._stop_progress()
        verdict = str(summary.get("r3", ""))
        border = "red" if verdict_style(verdict) == "bold red" else "green"
        self._panel("run finished", _summary_rows(summary), border)

    def error(self, error: BaseException, log_dir: str | Path | None = None) -> None:
        """Print why a run ended early: the error, what caused it, and where the whole story is."""
        self._stop_progress()
        self._panel("run failed", _error_rows(error, log_dir), "red")

    def _line(self, line: Text | str) -> None:
        if not self._enabled:
            return
        text = Text(line) if isinstance(line, str) else line
        # outside a terminal a line stays one line, however long: someone will grep it
        self._console.print(text, soft_wrap=not self._live, highlight=False)

    def _heartbeat(self, line: str) -> None:
        if not self._enabled or self._live:
            return
        with self._lock:
            if self._clock() - self._last_plain < PLAIN_HEARTBEAT_S:
                return
            self._last_plain = self._clock()
        self._line(line)

    def _panel(self, title: str, rows: list[tuple[str, Text]], border: str) -> None:
        if not self._enabled:
            return
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

    def _show_progress(self) -> None:
        if not self._live or self._progress is not None:
            return
        progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            _TimeLeft(self._pace),
            TextColumn("[dim]{task.fields[note]}"),
            console=self._console,
            # the machine has better things to do than to redraw ten times a second
            refresh_per_second=4,
            transient=True,
        )
        self._rollout_task = progress.add_task("", total=None, **_fields("rollout", ""))
        self._train_task = progress.add_task(
            "",
            total=self._num_rollout,
            **_fields("train", f"0/{self._num_rollout} steps", is_train=True),
        )
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
        """Show ``text``, shortened to one line, beside the phase's name."""
        self._detail = printable(" ".join(text.split()))
        self._heartbeat(f"{self._name} ({self.elapsed}): {self._detail}")

    def __rich__(self) -> Text:
        text = Text(f"{self._name} ({self.elapsed}) ", no_wrap=True, overflow="ellipsis")
        return text.append(self._detail, style="dim")


class _Pace:
    """The time that the remaining steps take at the pace of the last ones."""

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def step(self, done: int) -> None:
        self._ends.append((done, self._clock()))

    def seconds_left(self) -> float | None:
        """None before the second step is done: the first one also pays for warming up."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        left = (self._total - last) * (ended - began) / (last - first)
        return max(0.0, left - (self._clock() - ended))


class _TimeLeft(ProgressColumn):
    """The time left, on the line of the training; empty on the line of the rollout."""

    def __init__(self, pace: _Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.seconds_left() if task.fields["is_train"] else None
        return Text("" if left is None else f"{duration(left)} left", style="cyan")


def _fields(label: str, count: str, *, is_train: bool = False) -> dict[str, Any]:
    return {"label": label, "count": count, "note": "", "is_train": is_train}


def _is_watched(console: Console) -> bool:
    # rich calls a file a terminal when FORCE_COLOR asks for colours: ask the file itself as well
    isatty = getattr(console.file, "isatty", None)
    return console.is_interactive and isatty is not None and isatty()


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    rest = dict(summary)
    failed = rest.pop("failed_steps", None) or []
    first, last = rest.pop("reward_first", None), rest.pop("reward_last", None)
    verdict, wall_s = rest.pop("r3", None), rest.pop("wall_s", None)
    steps_s = rest.pop("steps_s", None)
    run_dir = rest.pop("run_dir", None)
    rows = []
    if first is not None and last is not None:
        change = (f"{first:.3f} -> {last:.3f}", "green" if last > first else "yellow")
        rows.append(("reward", Text.assemble(change, ("  first tenth -> last tenth", "dim"))))
    for key in ("steps", "tokens"):
        if (value := rest.pop(key, None)) is not None:
            rows.append((key, Text(f"{value:,}")))
    if verdict is not None:
        named = ", ".join(map(str, failed[:8])) + (", ..." if len(failed) > 8 else "")
        where = f" at step {named}" if failed else ""
        rows.append(("R3", Text(f"{verdict}{where}", style=verdict_style(str(verdict)))))
    if wall_s is not None:
        within = "" if steps_s is None else f", of which steps {duration(steps_s)}"
        rows.append(("wall time", Text(duration(wall_s) + within)))
    for key, value in rest.items():
        words = key if " " in key else key.replace("_", " ")  # a set's name stays as it is
        rows.append((words, Text(printable(str(value)))))
    if run_dir is not None:
        rows.append(("run directory", Text(str(run_dir))))
    return rows


def _error_rows(error: BaseException, log_dir: str | Path | None) -> list[tuple[str, Text]]:
    rows = [("error", _error_text(error, "bold red"))]
    cause = _cause(error)
    # an exception group in a loop of contexts must not keep the person waiting
    while cause is not None and len(rows) < 6:
        rows.append(("caused by", _error_text(cause, "red")))
        cause = _cause(cause)
    if log_dir is not None:
        rows.append(("logs", Text(str(log_dir))))
    return rows


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _error_text(error: BaseException, style: str) -> Text:
    text = printable(str(error).strip()) or "(no message)"
    return Text.assemble((type(error).__name__, style), ": ", text)
