"""Weight versions as adapters: named by every request, kept while used, the base never touched."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from tests.fakes.server import answer_to, client_of, Fake, SAMPLING

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.engine.adapters import AdapterPublisher, Adapters, adapter_flags
from r3train.engine.backend import BadAnswer, EngineDied, EngineError, Request
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.hf_checkpoint import read_headers
from r3train.peft_files import TENSORS
from r3train.types import RouteShape
from r3train.families.tiny_options import TinyOptions
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.tiny import build

LORA = LoraSection(lora_rank=4)
REQUEST = Request(0, 0, "p", np.array([5, 6, 7], np.int32), 4, SAMPLING, weight_version=3)


def holding(*versions: int) -> Adapters:
    adapters = Adapters()
    for version in versions:
        adapters.loaded(version)
    return adapters


@pytest.mark.asyncio
async def test_a_request_names_its_versions_adapter_and_its_tokens_are_of_that_version():
    """The server's own label stays the base's for every adapter."""
    fake = Fake()
    async with client_of(fake, adapters=holding(2, 3)) as client:
        segment = await client.generate(REQUEST)
    assert fake.bodies[-1]["lora_path"] == "v000003"
    assert segment.weight_versions.tolist() == [3]


@pytest.mark.asyncio
async def test_the_same_text_computed_again_and_the_noise_name_the_adapter_too():
    fake = Fake()
    routes = RouteShape(num_layers=1, topk=1, num_experts=2)
    async with client_of(fake, adapters=holding(3), routes=routes) as client:
        for call in (client.recheck(REQUEST, "whole", 0), client.score_twice(REQUEST, 0)):
            with pytest.raises(ValueError):  # the fake's answers have no routes
                await call
    asked = [body for body in fake.bodies if "input_ids" in body]
    assert [body["lora_path"] for body in asked] == ["v000003"] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("version", [None, 1])
async def test_a_request_without_a_loaded_adapter_is_never_sent(version):
    """SGLang would sample the base for the one, and load the other again from its old path."""
    fake = Fake()
    request = replace(REQUEST, weight_version=version)
    async with client_of(fake, adapters=holding(2, 3)) as client:
        for call in (client.generate(request), client.score_twice(request, 0)):
            with pytest.raises(
                EngineError, match=rf"version {version} is not loaded: \[2, 3\] are"
            ):
                await call
    assert not fake.bodies


@pytest.mark.asyncio
async def test_an_answer_of_a_server_whose_base_was_updated_is_bad():
    async def updated(_, body):
        answer = answer_to(body)
        answer["meta_info"]["weight_versions"][0]["version"] = "3"
        return web.json_response(answer)

    async with client_of(Fake(updated), adapters=holding(3)) as client:
        with pytest.raises(BadAnswer, match="base has weight version 3, expected 0"):
            await client.generate(REQUEST)


@pytest.mark.asyncio
async def test_a_version_in_use_is_not_retired_and_a_retired_one_is_never_used_again():
    adapters, go_on = holding(1, 2, 3), asyncio.Event()

    async def slow(_, body):
        await go_on.wait()
        return web.json_response(answer_to(body))

    async with client_of(Fake(slow), adapters=adapters) as client:
        running = asyncio.create_task(client.generate(replace(REQUEST, weight_version=1)))
        await asyncio.sleep(0.05)
        assert adapters.retire(3) == [2] and adapters.versions == [1, 3]
        go_on.set()
        await running
        assert adapters.retire(3) == [1] and adapters.retire(3) == []
        with pytest.raises(EngineError, match=r"version 1 is not loaded: \[3\] are"):
            await client.generate(replace(REQUEST, weight_version=1))


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.begin_weight_update(),
        lambda c: c.update_weights_from_disk("model", weight_version=1),
        lambda c: c.update_weights_from_distributed(weight_version=1).result(),
        lambda c: c.update_weight_version(1),
        lambda c: c.begin(
            c.score_canary(REQUEST.token_ids, "key", server=0, routes=None, halves=False)
        )(),
    ],
)
def test_the_base_of_a_server_of_adapters_is_neither_updated_nor_sampled(call):
    with EngineControl(["127.0.0.1:9"], adapters_alone=True) as control:
        with pytest.raises(AssertionError, match="base"):
            call(control)


class Recorded:
    """An engine that records what it is told."""

    def __init__(self):
        self.members, self.calls = Members(["h:1"]), []

    def load_adapter(self, name, path):
        self.calls.append(f"load {name}")
        assert load_file(f"{path}/{TENSORS}") and path.endswith(name)

    def unload_adapter(self, name):
        self.calls.append(f"unload {name}")


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return read_hf_facts(write_checkpoint(VARIANTS["glm"], tmp_path_factory.mktemp("glm")))


def factors(hf):
    kinds = read_headers(hf.path)
    for name in sorted(LORA.targets(kinds)):
        (rows, columns), path = kinds[name].shape, name.removesuffix(".weight")
        yield f"{path}.lora_A", torch.randn(4, columns)
        yield f"{path}.lora_B", torch.randn(rows, 4)


def test_versions_are_loaded_unloaded_when_too_old_and_loaded_again_after_a_restart(glm, tmp_path):
    (tmp_path / "weights" / "v000007").mkdir(parents=True)  # of an earlier start
    engine, adapters = Recorded(), Adapters()
    publisher = AdapterPublisher(
        engine,
        adapters,
        directory=tmp_path / "weights",
        settings=LORA,
        hf=glm,
        max_weight_staleness=1,
    )

    def publish(version: int) -> list[str]:
        engine.calls.clear()
        published = publisher.publish(factors(glm), version=version)
        assert engine.members.all() == [version]
        assert published.num_bytes == sum(t.nbytes for _, t in factors(glm))
        return list(engine.calls)

    assert publish(0) == ["load v000000"]
    assert publish(1) == ["load v000001"]
    with adapters.using(0):
        assert publish(2) == ["load v000002"]
    assert publish(3) == ["load v000003", "unload v000000", "unload v000001"]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v000002", "v000003"]
    publisher.reconnect()  # the same version again, as after the loss of a server while waiting
    assert publish(3) == ["load v000002", "load v000003"]
    assert publish(4) == ["load v000004", "unload v000002"]
    assert adapters.versions == [3, 4]


def test_a_version_whose_server_was_lost_before_unloading_it_leaves_the_disk_too(glm, tmp_path):
    class Lost(Recorded):
        def unload_adapter(self, name):
            raise EngineDied("connection broke")

    engine, weights = Lost(), tmp_path / "weights"
    publisher = AdapterPublisher(
        engine, Adapters(), directory=weights, settings=LORA, hf=glm, max_weight_staleness=0
    )
    publisher.publish(factors(glm), version=0)
    with pytest.raises(EngineDied):
        publisher.publish(factors(glm), version=1)
    publisher.reconnect()
    publisher.publish(factors(glm), version=1)
    assert engine.calls[-1] == "load v000001"
    assert [p.name for p in weights.iterdir()] == ["v000001"]


def test_a_server_is_told_rank_targets_and_slots_for_every_version_in_use(glm):
    flags = adapter_flags(LORA, glm, max_weight_staleness=3)
    assert flags["enable_lora"] is True and flags["max_lora_rank"] == 4
    assert flags["max_loras_per_batch"] == 5
    linears = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert flags["lora_target_modules"] == linears


def test_a_server_is_told_of_experts_in_one_tensor_by_that_tensors_name(tmp_path):
    build(tmp_path, TinyOptions(family="qwen3_vl_moe"))
    flags = adapter_flags(LORA, read_hf_facts(tmp_path / "model"), max_weight_staleness=0)
    linears = ["down_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert flags["lora_target_modules"] == linears


@pytest.mark.asyncio
async def test_a_request_of_a_lost_server_keeps_its_version_which_stays_loaded_until_a_new_one_has_it():
    async def gone(request, _body):
        request.transport.abort()

    adapters, fakes, how = holding(3), (Fake(gone), Fake()), dict(versions=[3, None], changes=True)
    async with client_of(*fakes, adapters=adapters, **how) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        async with asyncio.timeout(20):
            while client.members.present() != [1]:
                await asyncio.sleep(0.01)
        adapters.loaded(4)
        assert adapters.retire(4) == [], "a request waits for it"
        client.members.record(4)
        assert (await asyncio.wait_for(call, 20)).weight_versions.tolist() == [3]
