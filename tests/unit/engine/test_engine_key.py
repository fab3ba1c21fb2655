"""The key of the servers: from the environment to every request, shown in no command line and log."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from aiohttp import web
from click.testing import CliRunner
from tests.unit.config.test_config import config
from tests.fakes.server import Fake, client_of, one

from r3train.launch.job.model_checks import check_external_server
from r3train.commands.serve import serve
from r3train.engine import launch_server, server as sglang_server
from r3train.engine.backend import EngineError
from r3train.engine.key import ENGINE_KEY_VARIABLE, engine_api_key
from r3train.engine.refusals import SGLANG_RELEASE
from r3train.engine.flags import check_server_flags
from r3train.engine.server import SGLangServer

ROOT = Path(__file__).resolve().parents[3]
KEY = "of-these-tests-only"


@pytest.mark.parametrize("host", ["0.0.0.0", "node13", "10.0.0.7", "::"])
def test_a_host_beyond_loopback_is_refused_without_a_key(tmp_path, host):
    with pytest.raises(ValueError, match=f"server at {host} without a key.*{ENGINE_KEY_VARIABLE}"):
        SGLangServer("m", tmp_path / "log", device="cpu", host=host, port=3)


def test_a_key_travels_by_the_environment_and_not_by_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "another-key-of-the-owner")
    server = SGLangServer("m", tmp_path / "log", device="cpu", host="0.0.0.0", port=3, api_key=KEY)
    assert "r3train.engine.launch_server" in server.command()
    assert not [word for word in server.command() if KEY in word or "api-key" in word]
    assert server.environment()[ENGINE_KEY_VARIABLE] == KEY
    without = SGLangServer("m", tmp_path / "log", device="cpu")
    assert ENGINE_KEY_VARIABLE not in without.environment()


def test_the_process_of_a_server_adds_the_flag_and_hides_it_in_its_log(monkeypatch, caplog):
    started, methods = [], []
    # as in SGLang, which asks for spawn: without CUDA it gets forks
    monkeypatch.setattr(
        multiprocessing,
        "set_start_method",
        lambda method, force=False: methods.append((method, force)),
    )

    def run_module(name, run_name, alter_sys):
        multiprocessing.set_start_method("spawn", force=True)
        started.append((name, run_name, list(sys.argv)))
        logging.getLogger("sglang").warning("server_args={'api_key': '%s', 'port': %d}", KEY, 5)
        logging.getLogger("sglang").warning(f"and once more: {KEY}")

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--port", "5"])
    for name in ("megatron", "torch_memory_saver"):  # put back afterwards
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, KEY)
    # others that set up logging in this process may have silenced it
    logger = logging.getLogger("sglang")
    caplog.set_level(logging.WARNING, logger="sglang")
    for name, value in (("disabled", False), ("propagate", False), ("handlers", [caplog.handler])):
        monkeypatch.setattr(logger, name, value)
    before = logging.getLogRecordFactory()
    try:
        launch_server.main()
        assert ENGINE_KEY_VARIABLE not in os.environ, "workers would inherit it"
        assert gc.isenabled(), "workers would keep their garbage"
    finally:
        logging.setLogRecordFactory(before)
    words = ["launch_server", "--port", "5", "--api-key", KEY]
    assert started == [("sglang.launch_server", "__main__", words)]
    assert methods == [("spawn" if torch.cuda.is_available() else "fork", True)]
    assert [record.getMessage() for record in caplog.records] == [
        "server_args={'api_key': '***', 'port': 5}",
        "and once more: ***",
    ]


@pytest.mark.parametrize("key", ["", "short", "with a space in it here", "ümlaut-in-the-middle-x"])
def test_a_key_that_is_short_or_no_header_is_refused_and_not_shown(key):
    with pytest.raises(ValueError, match=f"{ENGINE_KEY_VARIABLE}: got {len(key)} ch") as refused:
        engine_api_key({ENGINE_KEY_VARIABLE: key})
    assert not key or key not in str(refused.value)
    assert engine_api_key({}) is None and engine_api_key({ENGINE_KEY_VARIABLE: KEY}) == KEY


@pytest.mark.parametrize("flag", ["api_key", "api-key", "admin-api-key", "api-k", "admin_api"])
def test_a_key_among_the_flags_is_refused_with_the_way_to_give_it(flag):
    with pytest.raises(ValueError, match=f"shown by ps.*{ENGINE_KEY_VARIABLE}"):
        check_server_flags({flag: "mine"})
    check_server_flags({"tp": 2, "attention-backend": "triton"})


def test_a_server_that_others_reach_talks_gloo_over_the_interface_of_its_address(
    tmp_path, monkeypatch
):
    def interface(host):
        server = SGLangServer("m", tmp_path / "log", device="cpu", host=host, port=3, api_key=KEY)
        return server.environment().get("GLOO_SOCKET_IFNAME")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(sglang_server, "interface_of", {"10.0.0.7": "eth7"}.get)
    assert interface("10.0.0.7") == "eth7"
    assert interface("127.0.0.1") is None and interface("0.0.0.0") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface("10.0.0.7") == "ib0"


async def asks_for_a_key(request, body):
    if request.headers.get("Authorization") == f"Bearer {KEY}" or request.path == "/health":
        return web.json_response({"version": SGLANG_RELEASE})
    return web.json_response({"error": "Unauthorized"}, status=401)


@pytest.mark.parametrize("key, held", [(None, "no"), ("another-key-than-its", "another")])
async def test_a_server_that_refuses_our_key_is_told_from_one_that_fails(key, held):
    async with client_of(Fake(asks_for_a_key), api_key=key) as client:
        with pytest.raises(EngineError, match=f"401.*{held} one is in {ENGINE_KEY_VARIABLE}") as e:
            await one(client)
    assert key is None or key not in str(e.value)


@pytest.mark.parametrize("key, finding", [(None, "no one is in"), ("x" * 20, "another one is in")])
async def test_preflight_finds_a_server_that_refuses_our_key(key, finding):
    made = config()
    async with Fake(asks_for_a_key).running() as addr:
        await asyncio.to_thread(check_external_server, made, None, addr, KEY)
        with pytest.raises(ValueError, match=f"does not answer.*{finding} {ENGINE_KEY_VARIABLE}"):
            await asyncio.to_thread(check_external_server, made, None, addr, key)


def test_a_server_of_another_node_is_refused_where_weights_go_through_memory():
    made = config(update_weight_transfer_mode="shared_memory")
    with pytest.raises(ValueError, match=r"203.0.113.1:3: this server is on another node"):
        check_external_server(made, None, "203.0.113.1:3", None)
    with pytest.raises(ValueError, match="does not answer"):
        check_external_server(made, None, "127.0.0.1:1", None)


def test_serve_beyond_loopback_is_refused_without_a_key_before_it_starts(tiny, monkeypatch):
    monkeypatch.setattr(SGLangServer, "start", lambda self: pytest.fail("it was started"))
    flags = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--prompt-data", "p.jsonl"]
    flags += ["--hf-checkpoint", str(tiny / "model")]
    for environment, more, message in (
        ({}, [], "server at 0.0.0.0 without a key"),
        ({ENGINE_KEY_VARIABLE: "short"}, [], "got 5 characters"),
        ({ENGINE_KEY_VARIABLE: KEY}, ["--sglang-api-key", "mine"], "a key among the flags"),
    ):
        done = CliRunner().invoke(serve, ["--host", "0.0.0.0", *flags, *more], env=environment)
        assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
