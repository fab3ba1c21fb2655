"""Recorded answers of the real SGLang, and the parts of it that r3train leans on."""

import json
from importlib.metadata import entry_points, version
from pathlib import Path

import numpy as np
import pytest
import torch

from r3train.cpu import platform as cpu_platform
from r3train.engine.answer import Sent, read_answer
from r3train.engine.backend import SamplingParams
from r3train.engine.publish import flatten
from r3train.generation import stitch
from r3train.types import Prompt, RouteShape

RECORD = json.loads((Path(__file__).parent / "payloads" / "generate.json").read_text())
ANSWERS = RECORD["answers"]
ROUTES = RouteShape(RECORD["num_layers"], RECORD["topk"], RECORD["num_experts"])
PROMPT = Prompt("p", 0, "", np.array(RECORD["prompt"], dtype=np.int32), None)


def read(name, routes=ROUTES, **sampling):
    """The sample of an answer to the request of ``record_payloads``."""
    answer = ANSWERS[name] | {"meta_info": {"id": "r."} | ANSWERS[name]["meta_info"]}
    if name == "stop":
        sampling["stop_token_ids"] = tuple(range(3, 250))
    asked = len(answer["output_ids"]) if read_end(name) == "length" else 400
    before = stitch.begin(PROMPT, sample_id=1, group_id=0)
    how = SamplingParams(asked, ignore_eos=name != "stop", **sampling)
    request = stitch.next_request(before, how)
    sent = Sent("r.", vocab_size=512, may_abort=read_end(name) == "abort")
    return stitch.finished(stitch.extend(before, read_answer(answer, request, sent, routes=routes)))


def read_end(name):
    return ANSWERS[name]["meta_info"]["finish_reason"]["type"]


def test_the_record_is_of_the_installed_sglang():
    """After an upgrade of SGLang: run record_payloads.py and read the difference."""
    assert RECORD["sglang"] == version("sglang")


@pytest.mark.parametrize("name", ["length", "cached_prefix", "stop", "abort", "two_versions"])
def test_recorded_answers_decode(name):
    sample = read(name)
    assert sample.finish_reason == (name if name in ("stop", "abort") else "length")
    assert sample.token_ids[sample.prompt_len :].tolist() == ANSWERS[name]["output_ids"]
    assert sample.routed_experts.shape == (sample.num_tokens - 1, ROUTES.num_layers, ROUTES.topk)
    assert sample.routed_experts.max() < ROUTES.num_experts
    assert (np.diff(np.sort(sample.routed_experts, -1)) > 0).all(), "an expert twice in a row"
    assert (sample.rollout_log_probs[sample.loss_mask] < 0).all()


@pytest.mark.parametrize("name", ["sampling_mask", "sampling_mask_abort"])
def test_the_server_says_which_tokens_it_kept_and_the_log_probs_among_them(name):
    sample, whole = read(name, mask_vocab=512), read(name)
    assert sample.mask_counts.tolist() == [0] * sample.prompt_len + [
        len(row) for row in ANSWERS[name]["meta_info"]["output_token_sampling_mask"]
    ]
    assert 1 < sample.mask_counts.max() <= 20
    # fewer tokens share the probability of all
    gap = (sample.rollout_log_probs - whole.rollout_log_probs)[sample.loss_mask]
    assert (gap > 0.3).all()
    assert whole.mask_counts is None


def test_a_cached_prefix_brings_the_rows_that_were_computed_first():
    assert ANSWERS["cached_prefix"]["meta_info"]["cached_tokens"] > 0
    prompt_rows = len(PROMPT.token_ids) - 1
    np.testing.assert_array_equal(
        read("cached_prefix").routed_experts[:prompt_rows],
        read("length").routed_experts[:prompt_rows],
    )


def test_tokens_on_both_sides_of_an_update_carry_their_own_version():
    sample = read("two_versions")
    versions = sample.weight_versions[sample.prompt_len :]
    assert versions[0] == 0 and versions[-1] == 1
    assert (np.diff(versions) >= 0).all()


def test_an_answer_that_was_not_asked_for_routes_has_none():
    assert read("no_routes", routes=None).routed_experts is None
    with pytest.raises(ValueError, match="carries no routed_experts"):
        read("no_routes")


def test_a_recorded_answer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="bytes, expected"):
        read("length", RouteShape(RECORD["num_layers"] + 1, RECORD["topk"], 8))
    with pytest.raises(ValueError, match="expected 0 to 2"):
        read("length", RouteShape(RECORD["num_layers"], RECORD["topk"], 3))


def test_a_flattened_bucket_is_what_sglang_reconstructs():
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = [("a", torch.randn(3, 5).t()), ("b", torch.randn(7)), ("c", torch.tensor(2.0))]
    empty = FlattenedTensorBucket.empty(
        [name for name, _ in bucket],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        [list(tensor.shape) for _, tensor in bucket],
        "cpu",
    )
    flatten(bucket, empty.get_flattened_tensor())
    for (name, tensor), (got_name, got) in zip(bucket, empty.reconstruct_tensors(), strict=True):
        assert name == got_name and torch.equal(tensor, got)


def test_the_platform_stands_aside_where_cuda_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_platform.activate() is None


def test_sglang_takes_the_platform_that_is_registered_where_no_cuda_is():
    """SGLang is asked: it loads the class amid its own imports, which lean on the platform."""
    (found,) = entry_points(group="sglang.srt.platforms", name="r3train_cpu")
    assert found.load() is cpu_platform.activate
    from sglang.srt.platforms import current_platform

    kind = type(current_platform)
    is_cpu_platform = f"{kind.__module__}.{kind.__qualname__}" == cpu_platform.activate()
    assert is_cpu_platform != torch.cuda.is_available()
    if is_cpu_platform:
        assert current_platform.get_default_attention_backend() == "torch_native"
        assert current_platform.is_out_of_tree()
