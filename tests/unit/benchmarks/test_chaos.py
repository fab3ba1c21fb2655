"""The faults that a soak plans, does and looks for."""

from __future__ import annotations

import base64
import errno
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from benchmarks import soak
from benchmarks.chaos import DROP_ROWS, FULL_DISK, RETRACTED, Planned, obeying, read_plan, retract
from r3train.cpu.device import prepare_device
from r3train.engine.client import DirectTransport
from r3train.loop import prompt_log
from tests.unit.config.test_config import config

prepare_device()


def test_a_plan_is_read_and_what_is_none_is_named():
    plan = read_plan("kill_engine@4, drop_rows@8")
    assert plan == [Planned(4, "kill_engine"), Planned(8, "drop_rows")]
    for text, said in (
        ("kill@4", "'kill@4': expected FAULT@STEP with one of kill_engine"),
        ("retract", "'retract': expected FAULT@STEP"),
        ("retract@0", "'retract@0': expected FAULT@STEP"),
        ("retract@8,full_disk@8", "expected steps that rise"),
    ):
        with pytest.raises(ValueError, match=said):
            read_plan(text)


async def test_rows_are_dropped_of_one_answer_when_ordered_and_of_no_other(tmp_path):
    routes = base64.b64encode(bytes(16)).decode()

    orders, meta = tmp_path / "orders", {}
    orders.mkdir()

    async def call(*_, **__):
        return {"meta_info": {"routed_experts": routes, **meta}}

    asked = (SimpleNamespace(call=call), 0, {}, SimpleNamespace(sample_id=1), 1 << 20)
    with obeying(orders):
        got = []
        for order in (False, True, False):
            if order:
                (orders / DROP_ROWS).touch()
            answer = await DirectTransport().generate(*asked)
            got.append(len(base64.b64decode(answer["meta_info"]["routed_experts"])))
    assert got == [16, 12, 16] and not list(orders.iterdir())
    assert not (tmp_path / RETRACTED).exists()
    meta["num_retractions"] = 1
    with obeying(orders):
        await DirectTransport().generate(*asked)
    assert (tmp_path / RETRACTED).exists() and not list(orders.iterdir())


def test_a_retraction_is_refused_where_the_run_itself_pauses_its_servers(monkeypatch, capsys):
    flags = ("--config", str(soak.ROOT / "configs/tiny_cpu.toml"), "--hf-checkpoint", "m")
    flags += ("--prompt-data", "p.jsonl", "--pause-generation-mode", "abort")
    monkeypatch.setattr("sys.argv", ["soak.py", "--chaos", "retract@2", "--", *flags])
    with pytest.raises(SystemExit):
        soak.main()
    assert "retract needs --pause-generation-mode drain, got abort" in capsys.readouterr().err


def test_the_disk_is_full_at_one_save_when_ordered(tmp_path, monkeypatch):
    from r3train.trainer.megatron.checkpoint import Checkpointer

    written, orders = [], tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setattr(Checkpointer, "save", lambda self, number, facts, write: write(tmp_path))
    saver = object.__new__(Checkpointer)
    with obeying(orders):
        saver.save(1, {}, written.append)
        (orders / FULL_DISK).touch()
        with pytest.raises(OSError) as error:
            saver.save(2, {}, written.append)
        saver.save(3, {}, None)
    assert error.value.errno == errno.ENOSPC and len(written) == 2


@pytest.mark.parametrize("running, retracted", [(0, False), (3, True), (3, False)])
def test_a_server_with_requests_is_paused_and_goes_on_until_an_answer_was_retracted(
    running, retracted, tmp_path, monkeypatch
):
    monkeypatch.setattr("benchmarks.chaos._RETRACT_WITHIN_S", 1.0)
    asked, said = [], tmp_path / RETRACTED
    said.touch()  # of an earlier time

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((self.path, self.headers["Authorization"], body))
            if retracted and self.path == "/continue_generation":
                said.touch()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"loads": [{"num_running_reqs": running}]}).encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        assert retract(server.server_port, "key", said) == retracted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert {key for _, key, _ in asked} == {"Bearer key"}
    paths = [path for path, *_ in asked if "loads" not in path]
    turn = ["/pause_generation", "/continue_generation"]
    turns = 1 if retracted else len(paths) // 2
    assert paths == turn * turns and (turns > 0) == (running > 0)


def test_the_verdict_names_a_fault_that_did_not_happen_and_a_prompt_that_was_lost(tmp_path):
    plan = read_plan("drop_rows@1,retract@2,kill_rank@3")
    ran = soak.Soak(tmp_path, 2, plan, 2, ["--config", "mine.toml"])
    for directory in (ran.run_dir, ran.orders):
        directory.mkdir()
    (ran.run_dir / "config.toml").write_text(config(rollout_batch_size=1).to_toml())
    (ran.run_dir / "metrics.jsonl").write_text('{"step": 0, "rollout/retracted": 0}\n')
    line = {"step": 1, "group_ids": [1], "sample_ids": [[4]]}
    (ran.run_dir / prompt_log.FILE).write_text(json.dumps(line) + "\n")
    ran.injected = ["drop_rows", "retract"]
    (ran.orders / DROP_ROWS).touch()  # no answer came
    ran._audit()
    assert "missing_steps: [0]" in ran.problems
    assert "the groups trained are not 0, 1, 2, ... in order" in ran.problems
    assert "faults that did not happen: kill_rank, drop_rows, retract" in ran.problems
