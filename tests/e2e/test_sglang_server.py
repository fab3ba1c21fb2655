"""The real server: what it returns equals HF, weights arrive by both transports, labels move."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from tests import whole_samples
from tests.e2e.sglang_support import checkpoint_tensors, EOS, NUM_EXPERTS, NUM_LAYERS, prompt_of
from tests.e2e.sglang_support import (
    probe_log_probs,
    Reference,
    ROUTES,
    shared_memory_of,
    TOPK,
    VOCAB,
)

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import EngineError, SamplingParams
from r3train.engine.control import EngineControl
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.generation.scheduler import GroupScorer
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.engine.teacher import ServedTeacher
from r3train.engine.publish import DistributedPublisher
from r3train.engine.publish_disk import DiskPublisher
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.engine.sglang_http import HTTPSettings
from r3train.hf_checkpoint import kind_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def references(models):
    return [Reference(path) for path in models]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    progress: list[tuple[float, str]] = []
    server = SGLangServer(
        models[0],
        tmp_path_factory.mktemp("log") / "sglang.log",
        return_routed_experts=True,
        exact_boundaries=False,  # as where updates drain: SGLang's overlap is on
        start_timeout_s=200,
        on_progress=lambda elapsed, line: progress.append((elapsed, line)),
    )
    with server:
        assert progress and progress[-1][0] > 0 and any(line for _, line in progress)
        yield server


@pytest.fixture(scope="module")
def engine(server):
    with EngineControl([server.addr], HTTPSettings(check_alive=server.check_alive)) as engine:
        yield engine


@pytest.fixture
def at_version_zero(engine, models):
    """Every test starts from model a, version 0."""
    engine.update_weights_from_disk(str(models[0]), weight_version=0)


def generate(server, prompts, sampling, **options):
    async def run():
        client = SGLangClient(
            [server.addr], HTTPSettings(check_alive=server.check_alive), routes=ROUTES
        )
        try:
            calls = [
                whole_samples.generate(
                    client, prompt, sampling, sample_id=i, group_id=i // 4, **options
                )
                for i, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*calls)
        finally:
            await client.aclose()

    return asyncio.run(run())


def test_log_probs_and_routes_equal_hf_in_float32(server, references, at_version_zero):
    prompts = [prompt_of(i // 2, 5 + 30 * (i // 2)) for i in range(8)]
    for sample in generate(
        server, prompts, SamplingParams(20, stop_token_ids=(EOS,)), weight_version=0
    ):
        log_probs, routes = references[0](sample.token_ids)
        assert sample.routed_experts.dtype == np.uint8
        assert sample.routed_experts.shape == (sample.num_tokens - 1, NUM_LAYERS, TOPK)
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(routes, -1))
        assert not sample.rollout_log_probs[: sample.prompt_len].any()
        np.testing.assert_allclose(
            sample.rollout_log_probs[sample.loss_mask], log_probs[sample.loss_mask], atol=1e-4
        )
        assert (sample.weight_versions[: sample.prompt_len] == -1).all()
        assert (sample.weight_versions[sample.prompt_len :] == 0).all()


def test_a_teachers_log_probs_equal_hf_with_and_without_a_cached_prompt(
    server, references, at_version_zero
):
    prompt, long = prompt_of(3, 60), SamplingParams(20, ignore_eos=True)
    sampled = generate(server, [prompt] * 3, long)
    # an environment's words between two answers
    sampled[0] = replace(sampled[0], loss_mask=sampled[0].loss_mask & (np.arange(80) % 7 > 1))

    async def scored():
        teacher = ServedTeacher(
            f"http://{server.addr}",
            api_key=None,
            request_timeout_s=300.0,
            max_concurrency=1,
            max_tries=3,
        )
        try:
            return [await teacher(sample) for sample in sampled]
        finally:
            await teacher.aclose()

    for sample in asyncio.run(scored()):
        own, (log_probs, _) = sample.loss_mask, references[0](sample.token_ids)
        np.testing.assert_allclose(sample.teacher_log_probs[own], log_probs[own], atol=1e-4)
        assert not sample.teacher_log_probs[~own].any()
        # those of the token behind would be far off
        off = np.abs(sample.teacher_log_probs[own] - np.roll(log_probs, -1)[own])
        assert off.mean() > 0.1


def test_a_text_goes_on_as_a_greedy_request_does_and_reads_the_same_again(
    server, engine, at_version_zero
):
    prompt = prompt_of(4, 40)
    greedy = SamplingParams(8, temperature=0.0, ignore_eos=True)
    (sample,) = generate(server, [prompt], greedy)

    def scores(text, new_tokens):
        options = dict(server=0, routes=ROUTES, halves=True, new_tokens=new_tokens)
        return engine.begin(engine.score_canary(text, f"key-{len(text)}", **options))()

    drawn = scores(prompt.token_ids, 8)
    assert drawn.whole.sampled.tolist() == sample.token_ids[40:].tolist()
    assert (drawn.early.log_probs.shape, drawn.early.sampled.shape) == ((20,), (0,))
    assert (drawn.early.cached_tokens, drawn.whole.cached_tokens) == (0, 0)
    assert drawn.warm.cached_tokens and drawn.whole.weight_version == "0"
    np.testing.assert_allclose(drawn.whole.log_probs[40:], sample.rollout_log_probs[40:], atol=1e-5)
    np.testing.assert_array_equal(drawn.whole.rows, sample.routed_experts)
    again = scores(sample.token_ids, 0).whole
    np.testing.assert_allclose(again.log_probs, drawn.whole.log_probs, atol=1e-4)
    np.testing.assert_array_equal(np.sort(again.rows, -1), np.sort(drawn.whole.rows, -1))


def test_a_response_ends_at_eos_at_a_stop_token_or_at_its_length(server, at_version_zero):
    long = SamplingParams(300, stop_token_ids=(EOS, *range(100, 200)))
    samples = generate(server, [prompt_of(1)] * 16, long)
    assert all(sample.finish_reason == "stop" for sample in samples)
    assert all(s.token_ids[-1] == EOS or 100 <= s.token_ids[-1] < 200 for s in samples)
    short = generate(server, [prompt_of(1)], SamplingParams(7, ignore_eos=True))[0]
    assert (short.finish_reason, short.response_len) == ("length", 7)
    bounded = SamplingParams(50, ignore_eos=True, max_context_len=30)
    assert generate(server, [prompt_of(1)], bounded)[0].num_tokens == 30


def test_eos_of_the_checkpoint_stops_a_response_without_a_tokenizer(server, at_version_zero):
    samples = generate(server, [prompt_of(2)] * 24, SamplingParams(700, may_stop_at=(EOS,)))
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert stopped and all(sample.token_ids[-1] == EOS for sample in stopped)
    for sample in samples:
        assert EOS not in sample.token_ids[sample.prompt_len : -1]


def test_a_text_that_would_fill_the_context_ends_where_the_server_says(server, at_version_zero):
    """1024 tokens of context: SGLang gives a text 1022, and says ``length`` of that."""
    with EngineControl([server.addr]) as control:
        ((bound,),) = control.text_ends().values()
    assert bound == 1022

    async def asked(tokens: int, **options):
        client = SGLangClient([server.addr], routes=ROUTES, vocab_size=VOCAB, **options)
        try:
            sampling = SamplingParams(tokens, ignore_eos=True)
            return await whole_samples.generate(
                client, prompt_of(1, 1000), sampling, exact_version=False
            )
        finally:
            await client.aclose()

    for tokens, num_tokens in ((21, 1021), (22, 1022), (23, 1022), (24, 1022)):
        sample = asyncio.run(asked(tokens, ends_at=lambda _: range(bound, bound + 1)))
        assert (sample.num_tokens, sample.finish_reason) == (num_tokens, "length")
    with pytest.raises(ValueError, match="'length' after 22 tokens, 24 were asked for"):
        asyncio.run(asked(24))


def test_the_servers_own_refusal_reaches_the_caller_with_the_sample(server):
    with pytest.raises(EngineError, match=r"sample 0: .* answered 400: .*maximum context length"):
        generate(server, [prompt_of(0)], SamplingParams(100000))


def test_a_wrong_version_label_is_noticed(server, at_version_zero):
    with pytest.raises(ValueError, match=r"sample 0 .*weight versions \[0\], expected 3 only"):
        generate(server, [prompt_of(0)], SamplingParams(4, stop_token_ids=(EOS,)), weight_version=3)


@pytest.fixture
def trainer_group(tmp_path):
    """The default process group that a trainer has."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def publishers(kind, engine, models, tmp_path):
    if kind == "distributed":
        return DistributedPublisher(engine, bucket_bytes=50_000)
    made = {"disk": DiskPublisher, "shared_memory": SharedMemoryPublisher}[kind]
    return made(
        engine, directory=tmp_path / "weights", hf_checkpoint=models[0], bucket_bytes=200_000
    )


@pytest.mark.parametrize("kind", ["distributed", "disk", "shared_memory"])
def test_an_update_changes_every_weight_and_its_label(
    kind, server, engine, models, references, at_version_zero, tmp_path, monkeypatch, trainer_group
):
    # As under torchrun, whose agent a rendezvous would wait for.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    probe = prompt_of(9, 64).token_ids
    probe[5] = VOCAB - 1  # which the server calls 0 when it scores a text
    before = probe_log_probs(server.addr, probe)
    np.testing.assert_allclose(before, references[0](probe)[0], atol=1e-4)
    publisher = publishers(kind, engine, models, tmp_path)
    for version, model in ((1, 1), (2, 0), (3, 1)):
        tensors = checkpoint_tensors(models[model])
        done = publisher.publish(tensors.items(), version=version)
        assert done.num_tensors == len(tensors) and done.num_buckets > 3
        assert done.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        log_probs, _ = references[model](probe)
        np.testing.assert_allclose(probe_log_probs(server.addr, probe), log_probs, atol=1e-4)
        assert engine.weight_versions() == {0: str(version)}
        sample = generate(
            server, [prompt_of(9)], SamplingParams(8, stop_token_ids=(EOS,)), weight_version=version
        )[0]
        log_probs, routes = references[model](sample.token_ids)
        np.testing.assert_allclose(
            sample.rollout_log_probs[sample.loss_mask], log_probs[sample.loss_mask], atol=1e-4
        )
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(routes, -1))
    publisher.close()
    assert abs(before - references[1](probe)[0]).max() > 0.1, "the two models must differ"
    if kind == "disk":
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000003"]
    if kind == "shared_memory":
        assert not list((tmp_path / "weights").glob("*.safetensors"))


def test_what_a_server_has_loaded_stays_when_the_memory_is_written_again(
    server, engine, models, references, at_version_zero, tmp_path
):
    publisher = publishers("shared_memory", engine, models, tmp_path)
    publisher.publish(checkpoint_tensors(models[1]).items(), version=1)
    publisher._engine = SimpleNamespace(update_weights_from_disk=lambda *_, **__: None)
    publisher.publish(checkpoint_tensors(models[0]).items(), version=2)
    probe = prompt_of(9, 64).token_ids
    found = probe_log_probs(server.addr, probe)
    np.testing.assert_allclose(found, references[1](probe)[0], atol=1e-4)
    publisher.close()


def test_one_missing_tensor_shows_in_the_probe(server, engine, models, references, at_version_zero):
    """The probe is a check that can fail: one expert of one layer left behind is seen."""
    tensors = checkpoint_tensors(models[1])
    left_out = f"model.layers.1.mlp.experts.{int(NUM_EXPERTS / 2)}.down_proj.weight"
    publisher = DistributedPublisher(engine, bucket_bytes=1 << 20)
    publisher.publish([(n, t) for n, t in tensors.items() if n != left_out], version=1)
    publisher.close()
    probe = prompt_of(9, 64).token_ids
    assert abs(probe_log_probs(server.addr, probe) - references[1](probe)[0]).max() > 1e-3


def test_fused_expert_names_are_refused_before_they_are_ignored(engine, at_version_zero):
    publisher = DistributedPublisher(engine, bucket_bytes=1 << 20)
    fused = [("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(8, 64, 64))]
    with pytest.raises(ValueError, match="fused expert tensor"):
        publisher.publish(fused, version=1)
    with pytest.raises(EngineError, match="no weight-update session is open"):
        engine.end_weight_update()  # it was closed behind the failure
    publisher.close()


def test_a_server_that_refuses_a_bucket_ends_the_broadcast_at_once(engine, at_version_zero):
    """No session is open, so the server answers 400 and never receives."""
    publisher = DistributedPublisher(engine, bucket_bytes=1 << 20)
    publisher.connect()
    with pytest.raises(EngineError, match="must run between"):
        norm = torch.ones(64)
        kinds = {"model.norm.weight": kind_of(norm)}
        publisher._arrive(publisher._send(kinds, norm.view(torch.uint8), 1))
    publisher.close()


def test_a_failed_disk_update_carries_the_servers_message(engine, tmp_path):
    with pytest.raises(EngineError, match="update_weights_from_disk: .* answered 400"):
        engine.update_weights_from_disk(str(tmp_path / "nowhere"), weight_version=1)


def test_group_sizes_and_server_facts(server, engine):
    assert engine.present() == [0]
    assert engine.update_group_sizes() == [1]
    engine.require_settings(replay=True)
    info = engine.server_info()[0]
    assert not info["disable_overlap_schedule"] and info["enable_return_routed_experts"]


def test_the_producer_runs_steps_around_weight_updates(
    server, engine, models, references, at_version_zero
):
    publisher = DistributedPublisher(engine, bucket_bytes=1 << 20)

    async def length(sample):
        return float(sample.response_len)

    producer = Producer(
        RolloutSection(
            rollout_batch_size=2,
            n_samples_per_prompt=3,
            num_rollout=4,
            rollout_max_response_len=12,
            rollout_max_concurrency=5,
        ),
        lambda: SGLangClient(
            [server.addr], HTTPSettings(check_alive=server.check_alive), routes=ROUTES
        ),
        prompt_of,
        RequestSettings(SamplingParams(12, stop_token_ids=(EOS,))),
        check_alive=server.check_alive,
        scorer=GroupScorer(score=length),
    )
    with producer:
        for step in range(4):
            groups = producer.next_batch(step)
            assert [[s.sample_id for s, _ in group] for group in groups] == [
                [6 * step + 3 * g + i for i in range(3)] for g in range(2)
            ]
            for sample, reward in (pair for group in groups for pair in group):
                assert reward == sample.response_len
                versions = set(sample.weight_versions[sample.loss_mask].tolist())
                assert len(versions) == 1 and step - 1 <= versions.pop() <= step
                version = int(sample.weight_versions[-1])
                log_probs, _ = references[version % 2](sample.token_ids)
                np.testing.assert_allclose(
                    sample.rollout_log_probs[sample.loss_mask],
                    log_probs[sample.loss_mask],
                    atol=1e-4,
                )
            with producer.quiesced():
                assert producer.stats()["in_flight"] == 0
                tensors = checkpoint_tensors(models[(step + 1) % 2])
                publisher.publish(tensors.items(), version=step + 1)
                producer.set_version(step + 1)
    publisher.close()


def test_stop_leaves_no_process_and_no_file_and_may_be_called_again(server):
    """The last test of this module: it ends the server that the others share."""
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(tree) >= 4, "guard, launcher, scheduler, detokenizer"
    shared = shared_memory_of(tree)
    assert shared, "SGLang keeps its load snapshot in shared memory"
    began = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began < 10
    assert not [process for process in tree if process.is_running()]
    assert not [path for path in shared if os.path.exists(path)]
    server.check_alive()  # it was asked to end: nobody died
