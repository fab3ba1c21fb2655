import gzip
import io
import logging
import re
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

from r3train.data.rotated_files import parts_of
from r3train.observe.logging_setup import log_path, setup_logging


@pytest.fixture
def rank0(tmp_path):
    logging.captureWarnings(False)  # a job that a test ran in this process left it on
    setup = setup_logging(tmp_path, 0, "INFO", in_parts=False)
    yield setup
    setup.close()


def in_a_process(tmp_path, body, rank):
    script = textwrap.dedent(body)
    header = (
        "import logging, os, sys, warnings\n"
        "from r3train.observe.logging_setup import setup_logging\n"
        f"setup = setup_logging({str(tmp_path)!r}, {rank}, 'INFO', in_parts=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", header + script], capture_output=True, text=True, timeout=60
    )
    return done, log_path(tmp_path, rank).read_text()


def test_the_file_gets_everything_and_the_terminal_our_warnings_and_any_error(rank0, capsys):
    logging.getLogger("r3train.loop").info("our info")
    logging.getLogger("r3train.loop").warning("our warning")
    logging.getLogger("megatron.core").warning("their warning")
    logging.getLogger("megatron.core").error("their error")
    logging.getLogger("r3train.loop").debug("our debug")
    warnings.warn("a python warning")
    log = rank0.path.read_text()
    for words in ("our info", "our warning", "their warning", "their error", "a python warning"):
        assert words in log
    assert "our debug" not in log
    assert "rank 0 INFO r3train.loop: our info" in log
    assert capsys.readouterr().err.splitlines() == [
        "warning: our warning",
        "error of megatron.core: their error",
    ]


def test_a_warning_on_a_terminal_is_yellow_and_an_error_red(rank0, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    logging.getLogger("r3train.loop").warning("ours \x1b[2J")
    logging.getLogger("megatron.core").error("theirs")
    monkeypatch.setenv("NO_COLOR", "1")
    logging.getLogger("r3train.loop").error("plain")
    assert terminal.getvalue().splitlines() == [
        "\x1b[33mwarning: ours \\x1b[2J\x1b[0m",
        "\x1b[31merror of megatron.core: theirs\x1b[0m",
        "error: plain",
    ]


def test_a_library_that_prints_its_own_warnings_is_led_to_the_file(tmp_path, capsys):
    library = logging.getLogger("some_library")
    library.addHandler(logging.StreamHandler(sys.stderr))
    library.propagate = False
    setup = setup_logging(tmp_path, 0, "INFO", in_parts=False)
    try:
        logging.getLogger("some_library.part").warning("chatter")
    finally:
        setup.close()
    assert "chatter" in setup.path.read_text()
    assert capsys.readouterr().err == ""


def test_an_error_that_the_caller_shows_goes_to_the_file_alone(rank0, capsys):
    try:
        raise OSError("lost the server")
    except OSError as error:
        rank0.record_error(error)
    assert "Traceback" in rank0.path.read_text() and "lost the server" in rank0.path.read_text()
    assert capsys.readouterr().err == ""


def test_ranks_have_files_of_their_own(tmp_path):
    assert log_path(tmp_path, 3) == tmp_path / "logs" / "rank_00003.log"


def test_an_unknown_level_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="log_level is 'LOUD', expected one of .*INFO"):
        setup_logging(tmp_path, 0, "LOUD", in_parts=False)


def test_closing_puts_handlers_and_hooks_back(tmp_path):
    before = (list(logging.root.handlers), logging.root.level, sys.excepthook, threading.excepthook)
    setup_logging(tmp_path, 0, "DEBUG", in_parts=False).close()
    after = (list(logging.root.handlers), logging.root.level, sys.excepthook, threading.excepthook)
    assert before == after


def test_another_rank_is_quiet_on_the_terminal_and_complete_in_its_file(tmp_path):
    done, log = in_a_process(
        tmp_path,
        """
        logging.getLogger("r3train.x").error("an error")
        print("a print")
        os.write(2, b"words of C++ code\\n")
        """,
        rank=1,
    )
    assert done.returncode == 0
    assert done.stdout == "" and done.stderr == ""
    assert "rank 1 ERROR r3train.x: an error" in log
    assert "a print" in log and "words of C++ code" in log


def test_a_rank_that_dies_leaves_one_line_on_the_terminal_and_the_traceback_in_its_file(tmp_path):
    done, log = in_a_process(tmp_path, "raise ValueError('got 3\\nexpected 4')", rank=1)
    assert done.returncode == 1
    assert done.stderr == f"rank 1 failed: ValueError: got 3 (see {log_path(tmp_path, 1)})\n"
    assert "Traceback" in log and "expected 4" in log


def test_rank_0_shows_its_traceback_once_and_keeps_it_in_its_file(tmp_path):
    body = "logging.error('an answer: \\x1b[2J\\ud800')\nraise ValueError('broken \\x1b[2J')"
    done, log = in_a_process(tmp_path, body, rank=0)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert log.count("Traceback") == 1 and "ValueError: broken" in log
    assert "\x1b" not in done.stderr and done.stderr.count(r"\x1b[2J") == 2
    assert r"an answer: \x1b[2J\ud800" in done.stderr


def test_an_error_in_a_thread_reaches_the_file(tmp_path):
    done, log = in_a_process(
        tmp_path,
        """
        import threading
        def die():
            raise OSError("lost the server")
        thread = threading.Thread(target=die, name="producer")
        thread.start()
        thread.join()
        """,
        rank=1,
    )
    assert done.stderr == ""
    assert "uncaught OSError in producer" in log and "lost the server" in log


def test_a_log_that_cannot_be_parted_goes_on_in_its_file(tmp_path, monkeypatch, capsys):
    def refused(*args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("r3train.data.rotated_files.PART_BYTES", 100)
    monkeypatch.setattr("r3train.data.rotated_files.close_part", refused)
    setup = setup_logging(tmp_path, 0, "INFO", in_parts=True)
    try:
        for i in range(20):
            logging.getLogger("r3train.x").info("line %d.", i)
    finally:
        setup.close()
    log = setup.path.read_text()
    assert all(f"line {i}." in log for i in range(20))
    assert capsys.readouterr().err.count("stays one file: No space left") == 1


def test_a_log_in_parts_loses_no_line_and_no_print_and_parts_no_call(tmp_path):
    body = """
        from r3train.data import rotated_files
        rotated_files.PART_BYTES = 3000
        setup.close()
        setup = setup_logging(sys.argv[-1], 1, 'INFO', in_parts=True)
        for i in range(60):
            logging.getLogger("r3train.x").info("R3 wrapper: %d", i)
            os.write(1, f"print {i}\\n".encode())
            logging.getLogger("other").info("of another thread")
            logging.getLogger("r3train.x").info("R3 check (rank %d", i)
    """
    script = textwrap.dedent(body).replace("sys.argv[-1]", repr(str(tmp_path)))
    _, latest = in_a_process(tmp_path, script, 1)
    *full, last = parts_of(log_path(tmp_path, 1))
    assert last == log_path(tmp_path, 1) and len(full) > 1
    assert all(path.name.endswith(".log.gz") for path in full)
    texts = [gzip.decompress(path.read_bytes()).decode() for path in full] + [latest]
    for words in ("R3 wrapper: ", "print ", r"R3 check \(rank "):
        assert [int(n) for n in re.findall(words + r"(\d+)", "".join(texts))] == list(range(60))
    for text in texts:
        assert text.count("R3 wrapper") == text.count("R3 check")


def test_strangers_at_a_port_do_not_fill_the_log(tmp_path):
    done, log = in_a_process(
        tmp_path,
        """
        import asyncio, resource
        from r3train.agents.http import ChatEndpoint
        async def main():
            endpoint = ChatEndpoint()
            access = await endpoint.open(None)
            address = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            for _ in range(100):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"GET / HTTP/9\\r\\n\\r\\n")
                assert (await reader.read()).startswith(b"HTTP/1.0 400")
                writer.close()
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (60, most))
            files = []
            while True:  # none is left to accept with
                try:
                    files.append(await asyncio.open_connection(*address))
                except OSError:
                    break
            await asyncio.sleep(2.5)
        asyncio.run(main())
        """,
        0,
    )
    assert done.returncode == 0, done
    kinds = [log.count(words) for words in ("Error handling request", "socket.accept()")]
    assert kinds == [1, 1] and len(done.stderr.splitlines()) < 50, log
    [line] = [line for line in log.splitlines() if "Error handling request" in line]
    assert "HTTP/9" in line, log
    assert "web_protocol.py" not in log and "http_parser" not in log, log


def test_another_error_of_the_same_logger_is_shown_each_time(rank0):
    for number in range(3):
        logging.getLogger("aiohttp.server").error("Unhandled exception %d", number)
    assert rank0.path.read_text().count("Unhandled exception") == 3
