"""Weight versions as adapters on a real server: the trainer's numbers, side by side, nothing paused."""

from __future__ import annotations

import asyncio
import numpy as np
import pytest

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.families import FAMILIES
from r3train.engine.adapters import AdapterPublisher, Adapters, adapter_flags, adapter_name
from r3train.engine.backend import EngineError, SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.server import SGLangServer
from r3train.peft_files import write_adapter
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from r3train.types import Prompt
from tests import whole_samples
from tests.e2e.sglang_support import cached_tokens, probe_log_probs, wait_until_running
from tests.drawn_adapters import drawn, in_one_tensor, write_merged
from tests.hf_reference import HfReference

pytestmark = pytest.mark.e2e

LORA = LoraSection(lora_rank=4, lora_alpha=8.0)
STALENESS = 1


def prompt(hf, seed: int, length: int) -> Prompt:
    ids = np.random.default_rng(seed).integers(3, hf.vocab_size, length).astype(np.int32)
    return Prompt(f"p{seed}", seed, "", ids, None)


# a family may be served when this passes: Family.adapters_served; glm4_moe has dense layers and a shared
# expert next to routed ones, those behind it latent attention too
FAMILIES_SERVED = (
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "minimax_m2",
    "glm4_moe",
    "deepseek_v3",
    "kimi_k2",
    "kimi_k25",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen3_vl_moe",
    "glm4_moe_lite",
)


def test_every_family_whose_adapters_are_served_is_held_here():
    assert {name for name, f in FAMILIES.items() if f.adapters_served} == {*FAMILIES_SERVED}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_SERVED)
def test_versions_are_served_side_by_side_and_each_is_the_merged_model(family, tmp_path):
    # a width that SGLang does not pad on a CPU, where adapters would no longer fit
    width = {"moe_intermediate_size": 128} if in_one_tensor(family) else {}
    build(tmp_path / "tiny", TinyOptions(family=family, vocab_size=512, **width))
    model = tmp_path / "tiny" / "model"
    hf = read_hf_facts(model)
    adapters, references = [drawn(model, LORA, seed) for seed in range(3)], []
    for i, adapter in enumerate(adapters):
        write_merged(model, adapter, LORA, tmp_path / f"merged{i}")
        references.append(HfReference(tmp_path / f"merged{i}"))
    server = SGLangServer(
        model,
        tmp_path / "sglang.log",
        return_routed_experts=True,
        start_timeout_s=420,
        adapter_flags=adapter_flags(LORA, hf, STALENESS),
    )
    loaded = Adapters()

    def agree(sample, version: int) -> None:
        log_probs, chosen = references[version].answer(sample.token_ids)
        mask = sample.loss_mask
        assert (sample.weight_versions[mask] == version).all()
        np.testing.assert_allclose(sample.rollout_log_probs[mask], log_probs[mask], atol=3e-5)
        for layer, wanted in chosen.items():
            np.testing.assert_array_equal(
                np.sort(sample.routed_experts[:, layer], -1), np.sort(wanted, -1)
            )

    async def side_by_side(publish) -> None:
        client = SGLangClient([server.addr], routes=hf.route_shape, adapters=loaded)
        short, long = SamplingParams(12, ignore_eos=True), SamplingParams(300, ignore_eos=True)

        def ask(seed: int, version: int, sampling=short):
            one = prompt(hf, seed, 7 + 20 * seed)
            return whole_samples.generate(
                client, one, sampling, sample_id=seed, weight_version=version
            )

        try:
            await asyncio.to_thread(publish, 0)
            running = asyncio.create_task(ask(0, 0, long))
            await asyncio.to_thread(wait_until_running, server.addr, 1)
            await asyncio.to_thread(publish, 1)  # next to the running request
            # one batch of two versions; the second of a text finds nothing of the first in the cache
            mixed = await asyncio.gather(*(ask(seed, v) for seed in (1, 2) for v in (0, 1)))
            assert not running.done()
            for sample, version in zip(mixed, (0, 1) * 2):
                agree(sample, version)
            await asyncio.to_thread(publish, 2)  # 0 is too old now, and in use
            assert loaded.versions == [0, 1, 2] and not running.done()
            agree(await ask(1, 2), 2)
            agree(await running, 0)
            await asyncio.to_thread(publish, 3)  # the same adapter as 2
            assert loaded.versions == [2, 3]
            with pytest.raises(EngineError, match="weight version 1 is not loaded"):
                await ask(1, 1)
            with pytest.raises(EngineError, match="weight version None is not loaded"):
                await ask(1, None)
        finally:
            await client.aclose()

    with server, EngineControl([server.addr], adapters_alone=True) as engine:
        publisher = AdapterPublisher(
            engine,
            loaded,
            directory=tmp_path / "weights",
            settings=LORA,
            hf=hf,
            max_weight_staleness=STALENESS,
        )

        def publish(version: int) -> None:
            sent = publisher.publish(adapters[min(version, 2)].items(), version=version)
            assert sent.num_bytes == sum(t.nbytes for t in adapters[0].values())

        asyncio.run(side_by_side(publish))
        assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v000002", "v000003"]
        # what the trainer would compute is what a probe of the adapter gives; its base is elsewhere
        text = prompt(hf, 9, 32).token_ids
        probed = probe_log_probs(server.addr, text, adapter=adapter_name(3))
        np.testing.assert_allclose(probed[1:], references[2].answer(text)[0][1:], atol=3e-5)
        base, _ = HfReference(model).answer(text)
        assert np.abs(probed - base).max() > 0.1
        # and so does what --save-hf writes, one pair of factors an expert; it has no names of those in one tensor
        saved = tmp_path / "saved"
        if not in_one_tensor(family):
            write_adapter(adapters[2].items(), saved, LORA, hf)
        if family in ("mixtral", "minimax_m2"):
            with pytest.raises(EngineError, match="target modules are included"):  # it knows no w1
                engine.load_adapter("saved", str(saved))
        elif not in_one_tensor(family):
            engine.load_adapter("saved", str(saved))
            log_probs = probe_log_probs(server.addr, text, adapter="saved")
            np.testing.assert_array_equal(log_probs, probed)
        # a text is cached for its own adapter alone
        assert cached_tokens(server.addr, text, adapter=adapter_name(3)) > 0
        assert cached_tokens(server.addr, text, adapter=adapter_name(2)) == 0
        assert cached_tokens(server.addr, text, adapter=adapter_name(2)) > 0
        with pytest.raises(AssertionError, match="names no adapter"):
            engine.begin(engine.score_canary(text, "key", server=0, routes=None, halves=False))()
        with pytest.raises(AssertionError, match="the base of a server of adapters is updated"):
            engine.update_weights_from_disk(str(model), weight_version=1)
