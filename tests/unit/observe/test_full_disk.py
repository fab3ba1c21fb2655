"""A disk that is full: the first line that it does not take whole is an error that names the file.

The limit on a file's size does what a full disk does: a write takes what still fits, and the next one fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from r3train.observe.logging_setup import log_path
from r3train.observe.metrics import METRICS_FILE, read_metrics

HEADER = """
import json, logging, os, resource, sys
from pathlib import Path
run_dir, rank = Path(sys.argv[1]), int(sys.argv[2])

def full_at(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""


def in_a_process(run_dir, body, rank=0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEADER + textwrap.dedent(body), str(run_dir), str(rank)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_step_whose_line_does_not_fit_is_an_error_and_none_of_it_is_in_the_file(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        from r3train.observe.metrics import MetricsWriter
        with MetricsWriter(run_dir, tensorboard=False) as writer:
            writer.write(0, {"a": 1.0})
            full_at(writer.path.stat().st_size + 10)
            try:
                writer.write(1, {"a": 2.0})
            except OSError as error:
                print(error.filename, error.strerror, sep="|")
            full_at(1 << 20)
            writer.write(1, {"a": 2.0})
        """,
    )
    assert done.stdout.strip() == f"{tmp_path / METRICS_FILE}|File too large", done
    text = (tmp_path / METRICS_FILE).read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1]
    assert [record["a"] for record in read_metrics(tmp_path)] == [1.0, 2.0]


def test_evidence_that_does_not_fit_names_its_file(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        from r3train.proof.writer import EvidenceWriter
        writer = EvidenceWriter(run_dir, 0, "now")
        full_at(100)
        try:
            writer.write_step({"step": 0, "text": "x" * 1000})
        except OSError as error:
            print(error.filename, error.strerror, sep="|")
        writer.close()
        """,
    )
    assert done.stdout.strip() == f"{tmp_path / 'evidence/steps.jsonl'}|File too large", done
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_that_is_full_is_said_once_and_the_error_of_the_run_is_the_last_line(
    tmp_path, rank, in_parts
):
    done = in_a_process(
        tmp_path,
        f"""
        from r3train.observe.logging_setup import setup_logging
        setup = setup_logging(run_dir, rank, 'INFO', in_parts={in_parts})
        logger = logging.getLogger("r3train.loop")
        logger.info("a first line")
        full_at(2000)
        for number in range(100):
            logger.info("line %d", number)
        error = OSError(28, "No space left on device", "FILE")
        setup.record_error(error)
        if rank == 0:  # its display shows it
            print(f"OSError: {{error}}", file=sys.stderr)
        else:
            setup.show_error(error)
        os._exit(1)
        """,
        rank,
    )
    path = log_path(tmp_path, rank)
    first, last = done.stderr.splitlines()
    assert first == f"{path}: lines of the log are lost: File too large"
    shown = "OSError: [Errno 28] No space left on device: 'FILE'"
    assert last == (shown if rank == 0 else f"rank 1 failed: {shown} (see {path})")
    assert "a first line" in path.read_text()


PROGRAM = """
import sys
from r3train.launch.start.train import as_rank

def program():
    from r3train.observe.console import RunDisplay
    from r3train.observe.logging_setup import setup_logging
    run_dir, rank = sys.argv[1], int(sys.argv[2])
    with RunDisplay(1, rank == 0, live=False) as display:
        display.note("before there is a log")
        setup = setup_logging(run_dir, rank, 'INFO', in_parts=False)
        for number in range(3):
            display.note(f"a token of the display: \u0120{number}")
            print("a token of the user's: \u0120")
            print("a word of the user's", file=sys.stderr)
        setup.close()
    print("it went on", file=open(run_dir + "/end", "w"))

as_rank(program)
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "streams, lost",
    [
        ("> /dev/full", 1),
        ("> /dev/full 2>&1", 2),
        (">&-", 0),
        ("2>&-", 0),
        (">&- 2>&-", 0),
    ],
)
def test_a_run_goes_on_whose_output_cannot_be_written(streams, lost, rank, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = f"{sys.executable} {program} {tmp_path} {rank} {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    assert (tmp_path / "end").read_text() == "it went on\n" and "Traceback" not in done.stderr
    # of another rank than 0 all goes to its log
    assert log_path(tmp_path, rank).read_text().count("No space left") == (lost if rank == 0 else 0)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_the_terminal_lacks_is_spelled_out(encoding, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "0"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done
    assert "a token of the display: \\u01202" in done.stdout
    assert "a token of the user's: \\u0120" in done.stdout


def test_every_command_spells_out_the_characters_that_the_terminal_lacks():
    done = subprocess.run(
        [sys.executable, "-c", "from r3train.cli import main; main()", "docs", "first_run"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        encoding="latin-1",
        timeout=120,
    )
    assert done.returncode == 0 and "\\u256d\\u2500 run finished" in done.stdout, done


def test_a_log_that_is_full_leaves_nothing_to_fail_at_the_end_of_the_process(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        from r3train.observe.logging_setup import setup_logging
        setup = setup_logging(run_dir, rank, 'INFO', in_parts=False)
        full_at(200)
        for number in range(100):
            logging.getLogger("r3train.loop").info("line %d", number)
        """,
    )
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_mistake_in_a_call_of_logging_is_still_shown(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        from r3train.observe.logging_setup import setup_logging
        setup = setup_logging(run_dir, rank, 'INFO', in_parts=False)
        logging.getLogger("r3train.loop").info("%d", "no number")
        """,
    )
    assert "--- Logging error ---" in done.stderr and os.listdir(tmp_path / "logs")
