"""Every rank writes its whole log to a file; the terminal hears from rank 0, and little."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from logging.handlers import BaseRotatingHandler
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import click

from r3train.config.sources import printable
from r3train.data import rotated_files
from r3train.patches import patch, undo

LOG_DIR = "logs"
OUR_LOGGER = "r3train"

_FILE_FORMAT = "%(asctime)s rank %(rank)d %(levelname)s %(name)s: %(message)s"
_COLOURS = {logging.WARNING: "yellow"}  # as of other warnings on the terminal
_TEXT = {"encoding": "utf-8", "errors": "backslashreplace"}

# messages of which whoever reaches a port can cause any number
_OF_STRANGERS = ("Error handling request", "socket.accept()", "the chat endpoint refuses")

logger = logging.getLogger(__name__)


def log_path(run_dir: str | Path, rank: int) -> Path:
    """Path of the rank's log: ``run_dir/logs/rank_NNNNN.log``."""
    return Path(run_dir) / LOG_DIR / f"rank_{rank:05d}.log"


def setup_logging(
    run_dir: str | Path, rank: int, level: int | str, *, in_parts: bool
) -> LoggingSetup:
    """Send this process's logging, warnings and uncaught errors to its rank's file.

    Rank 0 also puts our own warnings and anybody's errors on the terminal.  On the other ranks
    stdout and stderr themselves go to the file, prints of C++ code included; an uncaught error
    there still leaves one line on the terminal that names the rank and the file.
    in_parts: what was written becomes compressed parts next to the file, as ``data.rotated_files`` makes them.
    Call it once per process, after the imports of megatron and transformers (their loggers lose
    their own terminal handlers then), and close the result in tests.
    Raises ValueError for a level that logging does not know.
    """
    number = logging.getLevelNamesMapping().get(level) if isinstance(level, str) else level
    if number is None:
        known = ", ".join(sorted(logging.getLevelNamesMapping()))
        raise ValueError(f"log_level is {level!r}, expected one of {known}")
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    return LoggingSetup(path, rank, number, in_parts)


def redirect_library_loggers() -> None:
    """Take the terminal handlers off other libraries' loggers, so that their words go to the file.

    Libraries such as transformers hang a handler of their own on their logger at import and stop it
    from passing records on.  Safe to call again, after further imports.
    """
    for name, foreign in list(logging.root.manager.loggerDict.items()):
        if not isinstance(foreign, logging.Logger) or name.split(".")[0] == OUR_LOGGER:
            continue
        for handler in list(foreign.handlers):
            if type(handler) is logging.StreamHandler:
                foreign.removeHandler(handler)
                foreign.propagate = True


class LoggingSetup:
    """Changes that ``setup_logging`` made in the process, and their undoing."""

    def __init__(self, path: Path, rank: int, level: int, in_parts: bool = False) -> None:
        self.path = path
        self._rank = rank
        root = logging.getLogger()
        self._old_level, self._old_handlers = root.level, list(root.handlers)
        in_file = (
            _PartsHandler(path, self._point_output) if in_parts else _FullDiskHandler(path, **_TEXT)
        )
        in_file.setFormatter(logging.Formatter(_FILE_FORMAT, defaults={"rank": rank}))
        self._handlers = [in_file, _TerminalHandler()] if rank == 0 else [in_file]
        for handler in self._handlers:
            handler.addFilter(_seldom())
        root.handlers = list(self._handlers)
        root.setLevel(level)
        logging.captureWarnings(True)
        redirect_library_loggers()
        self._terminal = _Redirected(path) if rank != 0 else None
        in_file.say = self._say
        why = "what nobody catches is in the log file, and one line on the terminal"
        patch(sys, "excepthook", self._log_uncaught, expects=None, why=why)
        patch(threading, "excepthook", self._log_uncaught_in_thread, expects=None, why=why)

    def record_error(self, error: BaseException) -> None:
        """Write an error's traceback to the file."""
        exc_info = type(error), error, error.__traceback__
        self._to_file(f"the run failed: {type(error).__name__}", exc_info)

    def show_error(self, error: BaseException) -> None:
        """Show an error that nobody else shows, as one line on the terminal that names the rank and the file."""
        self._say(self._error_line(error))

    def _error_line(self, error: BaseException) -> str:
        first = str(error).strip().split("\n")[0]
        return f"rank {self._rank} failed: {type(error).__name__}: {printable(first)} (see {self.path})"

    def _say(self, line: str) -> None:
        """Show a line on the terminal, from any rank."""
        if self._terminal is not None:
            self._terminal.say(line)
        else:
            sys.stderr.write(f"{line}\n")

    def close(self) -> None:
        """Put handlers, hooks and output back as they were."""
        undo(sys, "excepthook")
        undo(threading, "excepthook")
        logging.captureWarnings(False)
        root = logging.getLogger()
        root.handlers = self._old_handlers
        root.setLevel(self._old_level)
        for handler in self._handlers:
            handler.close()
        if self._terminal is not None:
            self._terminal.restore()

    def _point_output(self) -> None:
        """Point stdout and stderr at the file again, after another took its name."""
        if self._terminal is not None:
            self._terminal.point_at(self.path)

    def _log_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            logger.info("interrupted")
        else:
            # it is shown below on rank 0's terminal: to the file alone here
            self._to_file(f"uncaught {kind.__name__}", (kind, error, trace))
            if self._terminal is not None:
                self._terminal.say(self._error_line(error))
                return
        _show(kind, error, trace)

    def _log_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "a thread"
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        self._to_file(f"uncaught {args.exc_type.__name__} in {name}", exc_info)
        if self._terminal is None:
            _show(*exc_info)

    def _to_file(self, message: str, exc_info: Any) -> None:
        record = logger.makeRecord(
            logger.name, logging.CRITICAL, __file__, 0, message, (), exc_info
        )
        self._handlers[0].handle(record)


def _show(*exc_info: Any) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(*exc_info))))


class _TerminalHandler(logging.StreamHandler):
    """Shows our own warnings and anybody's errors, with control characters spelled out.

    It writes to whatever sys.stderr is at that moment: live progress replaces it to keep order.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        least = logging.WARNING if _is_ours(record) else logging.ERROR
        return record.levelno >= least and super().filter(record)

    def format(self, record: logging.LogRecord) -> str:
        whose = "" if _is_ours(record) else f" of {record.name}"
        text = printable(f"{record.levelname.lower()}{whose}: {super().format(record)}")
        if not self.stream.isatty() or os.environ.get("NO_COLOR"):
            return text
        return click.style(text, fg=_COLOURS.get(record.levelno, "red"))


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.split(".")[0] == OUR_LOGGER


def _seldom() -> Callable[[logging.LogRecord], bool]:
    """Make a filter that lets through, once a minute for each error, what any stranger's connection can cause."""
    shown: dict[object, float] = {}

    def passes(record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(_OF_STRANGERS):
            return True
        kind = record.name, record.exc_info and record.exc_info[0]
        if is_due := record.created > shown.get(kind, 0.0) + 60:
            shown[kind] = record.created
        return is_due

    return passes


class _Redirected:
    """stdout and stderr of this process, pointed at a file, with a way back to the terminal."""

    def __init__(self, path: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = os.dup(1), os.dup(2)
        self.point_at(path)

    def point_at(self, path: Path) -> None:
        target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def say(self, line: str) -> None:
        os.write(self._saved[1], f"{line}\n".encode())

    def restore(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for place, saved in zip((1, 2), self._saved):
            os.dup2(saved, place)
            os.close(saved)


class _FullDiskHandler(logging.FileHandler):
    """Says once on the terminal that its file takes no more lines (a full disk), without tracebacks."""

    say: Callable[[str], None] = staticmethod(lambda line: None)
    _has_said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a mistake in the call: the library's own words
            super().handleError(record)
            return
        if not self._has_said:
            self._has_said = True
            self.say(f"{self.baseFilename}: lines of the log are lost: {error.strerror}")


class _PartsHandler(_FullDiskHandler, BaseRotatingHandler):
    """Writes a file, and makes a part of it where it is full; then all that writes to it begins a new one."""

    def __init__(self, path: Path, on_new_file: Callable[[], None]) -> None:
        super().__init__(str(path), "a", **_TEXT)
        rotated_files.finish_parts(path)
        self._path, self._on_new_file = path, on_new_file
        self._has_warned = False  # that the file cannot become a part
        self._is_within = False  # a call, whose second line is to come

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        # the two lines of a call stay in one file, also where another thread logs between them
        text = record.getMessage()
        is_second = text.startswith("R3 check (")
        is_within = self._is_within or is_second
        self._is_within = not is_second and (is_within or text.startswith("R3 wrapper: "))
        return not is_within and self.stream.tell() >= rotated_files.PART_BYTES

    def doRollover(self) -> None:
        def begin_anew() -> None:
            self.stream = self._open()
            self._on_new_file()

        self.stream.close()
        try:
            rotated_files.close_part(self._path, begin_anew=begin_anew)
        except OSError as error:  # it goes on in the same file, and the next record tries again
            if not self._has_warned:
                self._has_warned = True
                sys.stderr.write(f"{self._path} stays one file: {error.strerror}\n")
        finally:
            if self.stream.closed:
                self.stream = self._open()
