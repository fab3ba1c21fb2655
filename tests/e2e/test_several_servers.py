"""Two real servers: both serve, every update reaches both, one that missed it is left out."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from tests import whole_samples
from tests.e2e import jobs
from tests.e2e.sglang_support import NUM_EXPERTS, NUM_LAYERS, TOPK, VOCAB, Reference, make_model

from r3train.engine.backend import SamplingParams
from r3train.engine.control import EngineControl
from r3train.types import RouteShape
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.types import Prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROUTES = RouteShape(num_layers=NUM_LAYERS, topk=TOPK, num_experts=NUM_EXPERTS)


def prompt_of(seed: int) -> Prompt:
    ids = np.random.default_rng(seed).integers(3, VOCAB, 24).astype(np.int32)
    return Prompt(prompt_id=f"p{seed}", index=seed, text="", token_ids=ids, label=None)


def test_a_server_that_missed_an_update_never_serves_before_it_has_it(tmp_path):
    models = [make_model(tmp_path / name, seed) for seed, name in enumerate("ab")]
    references = [Reference(path) for path in models]
    servers = [
        SGLangServer(
            models[0],
            tmp_path / f"sglang_{i}.log",
            return_routed_experts=True,
            seed=i,
            start_timeout_s=250,
        )  # fmt: skip
        for i in range(2)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        addrs = [server.addr for server in servers]
        with EngineControl(addrs) as both, EngineControl(addrs[:1]) as first:
            both.update_weights_from_disk(str(models[0]), weight_version=0)
            assert both.members.all() == [0, 0]

            def generate(version: int) -> list[list]:
                """The samples that each server made."""

                async def run():
                    client = SGLangClient(both.members, routes=ROUTES)
                    served: list[list] = [[], []]

                    async def one(i):
                        sample = await whole_samples.generate(
                            client, prompt_of(i // 2), SamplingParams(24, ignore_eos=True), sample_id=i,
                            group_id=i // 2, weight_version=version,
                        )  # fmt: skip
                        served[client._server_of_group[i // 2]].append(sample)

                    await asyncio.gather(*[one(i) for i in range(16)])
                    await client.aclose()
                    return served

                return asyncio.run(run())

            assert [len(samples) for samples in generate(0)] == [8, 8]
            # the second server misses version 1
            first.update_weights_from_disk(str(models[1]), weight_version=1)
            both.confirm_version(1)
            assert both.members.all() == [1, None]
            served = generate(1)
            assert [len(samples) for samples in served] == [16, 0]
            for sample in served[0]:
                log_probs, routes = references[1](sample.token_ids)
                np.testing.assert_array_equal(
                    np.sort(sample.routed_experts, -1), np.sort(routes, -1)
                )
            # the next update reaches it, and it serves again
            both.update_weights_from_disk(str(models[0]), weight_version=2)
            served = generate(2)
            assert [len(samples) for samples in served] == [8, 8]
            for sample in served[1]:
                log_probs, _ = references[0](sample.token_ids)
                np.testing.assert_allclose(
                    sample.rollout_log_probs[sample.loss_mask],
                    log_probs[sample.loss_mask],
                    atol=1e-4,
                )
    finally:
        for server in servers:
            server.stop()


@pytest.mark.timeout(600)
def test_a_job_with_two_servers_of_its_own_keeps_both_at_its_weights(tmp_path, tiny_flags):
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 3 --rollout-num-engines 2 --check-weight-update-equal".split(),
        *"--pause-generation-mode in_place --sglang-log-level-http info".split(),
        timeout=500,
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == 3 and all(m["r3/passed"] is True for m in metrics)
    assert all(m["served/gap_max"] <= 1e-4 for m in metrics), "the larger gap of the two"
    for i in range(2):
        log = (job.run_dir / "logs" / f"sglang_{i}.log").read_text()
        assert len(re.findall(r"POST /generate", log)) > 3 + 1, "more than the probes and warm-up"
