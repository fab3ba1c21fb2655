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
        setup = setup_logging(run_dir, rank, in_parts={in_parts})
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


def test_a_log_that_is_full_leaves_nothing_to_fail_at_the_end_of_the_process(tmp_path):
    done = in_a_process(
        tmp_path,
        """
        from r3train.observe.logging_setup import setup_logging
        setup = setup_logging(run_dir, rank)
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
        setup = setup_logging(run_dir, rank)
        logging.getLogger("r3train.loop").info("%d", "no number")
        """,
    )
    assert "--- Logging error ---" in done.stderr and os.listdir(tmp_path / "logs")
