"""A server that was prepared: it imports, waits without a log, and goes on in the log that it is given."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from r3train.engine.backend import EngineDied
from r3train.engine.server import SGLangServer

SERVER = """
from r3train.engine import launch_server

def imports():
    print("an import says this", flush=True)
    {imported}

launch_server.import_sglang = imports
launch_server.runpy.run_module = lambda *_, **__: print("it serves", flush=True)
launch_server.main()
"""


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepares a server whose imports do this."""
    servers = []

    def prepare(imported: str = "") -> SGLangServer:
        command = [sys.executable, "-c", SERVER.format(imported=imported)]
        monkeypatch.setattr(SGLangServer, "command", lambda self: command)
        servers.append(SGLangServer(tmp_path, tmp_path / "nowhere", device="cpu").prepare())
        return servers[-1]

    yield prepare
    for server in servers:
        server.stop()


def ended(server: SGLangServer) -> int:
    return psutil.Process(server.pid).wait(timeout=60)


def test_it_waits_for_its_start_and_writes_in_its_log_what_imports_have_said(prepared, tmp_path):
    server, log = prepared("pass"), tmp_path / "log"
    log.write_text("of an earlier start\n")
    time.sleep(2.0)  # it has nothing to go on by, however long it waits
    server.check_alive()
    assert log.read_text() == "of an earlier start\n" and not (tmp_path / "nowhere").exists()
    server.start(log)
    assert ended(server) == 0
    assert log.read_text() == "of an earlier start\nan import says this\nit serves\n"


def test_an_import_that_fails_is_told_in_the_log_of_the_start(prepared, tmp_path):
    server = prepared("import no_such_module")
    server.start(tmp_path / "log")
    assert ended(server) == 1
    with pytest.raises(EngineDied, match="No module named 'no_such_module'"):
        server.check_alive()


def test_a_run_that_is_refused_ends_it_before_it_has_done_anything(prepared, tmp_path):
    server = prepared()
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server.stop()
    assert not any(process.is_running() for process in tree)
    assert list(tmp_path.iterdir()) == []
