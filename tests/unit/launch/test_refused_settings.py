"""Settings that the run decides or that spoil routes are refused by the dry run, wherever they stand."""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from r3train.cli import main
from r3train.config import RunConfig
from r3train.config.sources import ConfigError
from r3train.engine.flags import check_server_flags, known_flags
from r3train.engine.refusals import ADAPTER_REFUSALS, DECIDED_BY_THE_RUN, REPLAY_REFUSALS
from r3train.launch.job.model_checks import check_external_server, check_indexer_flags
from r3train.trainer.megatron import overrides
from tests.fakes.server import Fake
from tests.unit.hf_model import facts
from tests.unit.launch.test_preflight import ROOT, start

SERVER_INFO = json.loads((ROOT / "tests/contract/payloads/server_info.json").read_text())
SPECULATION = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 7,
    "max_running_requests": 16,
    "chunked_prefill_size": 127,
}
PARALLEL = {"attn_dp_size": 2}
KEPT = "sampling_mask_max_tokens"
# field -> (settings that are refused, the same setting at its harmless value)
ROWS: dict[str, tuple[dict, dict]] = {
    "enable_return_routed_experts": (
        {"enable_return_routed_experts": False},
        {"enable_return_routed_experts": True},
    ),
    "chunked_prefill_size": ({"chunked_prefill_size": -1}, {"chunked_prefill_size": 2048}),
    "moe_a2a_backend": ({"moe_a2a_backend": "mooncake"}, {"moe_a2a_backend": "deepep"}),
    "enable_hierarchical_cache": ({"enable_hicache": True}, {"enable_hicache": False}),
    "hicache_storage_backend": (
        {"hicache_storage_backend": "mooncake"},
        {"hicache_storage_backend": "none"},
    ),
    "enable_hisparse": ({"enable_hisparse": True}, {"enable_hisparse": False}),
    "enable_lmcache": ({"enable_lmcache": True}, {"enable_lmcache": False}),
    "enable_flexkv": ({"enable_flexkv": True}, {"enable_flexkv": False}),
    "enable_unified_cache_external_linker": (
        {"enable_unified_cache_external_linker": True},
        {"enable_unified_cache_external_linker": False},
    ),
    "radix_cache_backend": ({"radix_cache_backend": "flexkv"}, {"disable_radix_cache": True}),
    "pp_size": ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 1}),
    "moe_runner_backend": (
        {"moe_runner_backend": "triton_kernel"},
        {"moe_runner_backend": "flashinfer_trtllm_routed"},
    ),
    "attn_dp_size": (PARALLEL, PARALLEL | {"attn_dp_size": 1}),
    "enable_dp_attention": (
        {"enable_dp_attention": True, "dp_size": 2},
        {"enable_dp_attention": False, "dp_size": 2},
    ),
    "enable_two_batch_overlap": (
        {"enable_two_batch_overlap": True},
        {"enable_two_batch_overlap": False},
    ),
    "disaggregation_mode": ({"disaggregation_mode": "decode"}, {"disaggregation_mode": "null"}),
    "speculative_algorithm": (SPECULATION, SPECULATION | {"chunked_prefill_size": 128}),
}


def words(output: str) -> str:
    return " ".join(output.split())


def test_every_row_of_the_table_is_tried():
    assert ROWS.keys() == REPLAY_REFUSALS.keys()


@pytest.mark.parametrize("field", ROWS)
def test_a_server_of_our_own_whose_routes_would_be_wrong_is_refused_by_its_flags(field):
    refused, harmless = ROWS[field]
    with pytest.raises(ConfigError, match=rf"sglang.{field} = .* cannot go with --use-rollout-rou"):
        check_server_flags(refused, replay=True)
    check_server_flags(harmless, replay=True)
    check_server_flags(refused)


async def test_a_backend_of_experts_that_records_no_routes_is_refused_in_one_line(tiny):
    """The dry run: servers of our own by their flags, others by what they resolved, whatever was asked of them."""
    flags = ("--dry-run", "--sglang-moe-runner-backend", "flashinfer_trtllm")
    info = SERVER_INFO | {"moe_runner_backend": "flashinfer_trtllm"}
    own = await asyncio.to_thread(start, tiny, *flags)
    other = await ask_external(tiny, info)
    for result, subject in ((own, "sglang."), (other, "runs with ")):
        assert result.exit_code == 2, result.output
        text = words(result.output)
        assert text.count(f"{subject}moe_runner_backend = 'flashinfer_trtllm'") == 1
        assert text.count("records no routes (they are zeros); triton records them") == 1
    off = "--no-use-rollout-routing-replay"
    assert (await asyncio.to_thread(start, tiny, *flags, off)).exit_code == 0
    assert (await ask_external(tiny, info, off)).exit_code == 0


@pytest.mark.parametrize(
    "settings, refused",
    [
        ({}, True),
        ({"cuda_graph_backend_prefill": "disabled"}, False),
        ({"cuda_graph_backend_prefill": "breakable"}, True),
        ({"disable_prefill_cuda_graph": True}, False),
        ({"disable_cuda_graph": True}, False),
        ({"disable_cuda_graph": False}, True),
        ({"disable_cuda_graph": True, **SPECULATION, "chunked_prefill_size": 128}, True),
        ({"moe_a2a_backend": "deepep"}, False),
        ({"moe_a2a_backend": "deepep_v2"}, False),
        ({"moe_a2a_backend": "deepep", **SPECULATION, "chunked_prefill_size": 128}, False),
    ],
)
@pytest.mark.parametrize("old_name", [False, True])
def test_data_parallel_attention_is_refused_where_a_rank_reads_the_rows_of_another(
    old_name, settings, refused
):
    flags = {"enable_dp_attention": True, "dp_size": 2} if old_name else PARALLEL
    ending = nullcontext()
    if refused:
        ending = pytest.raises(ValueError, match="in the rows of another")
    with ending:
        check_server_flags({**flags, **settings}, replay=True)
    check_server_flags({**flags, **settings})
    alone = {"enable_dp_attention": True, "dp_size": 1} if old_name else {"attn_dp_size": 1}
    check_server_flags({**alone, **settings}, replay=True)


@pytest.mark.parametrize("backend, code", [("breakable", 2), ("full", 2), ("disabled", 0)])
async def test_data_parallel_attention_of_another_server_is_judged_by_its_resolved_graphs(
    backend, code, tiny
):
    graphs = {"prefill": {"backend": backend}, "decode": {"backend": "full"}}
    info = {"enable_dp_attention": True, "attn_dp_size": 2, "cuda_graph_config": graphs}
    result = await ask_external(tiny, SERVER_INFO | info)
    assert result.exit_code == code, result.output
    assert words(result.output).count("in the rows of another") == (code == 2)  # not once a name


@pytest.mark.parametrize(
    "field, settings",
    [
        *(("tp_size", {name: 2}) for name in ("tp_size", "tensor_parallel_size", "tp")),
        ("dp_size", {"data_parallel_size": 2}),
        ("pp_size", {"pipeline_parallel_size": 2}),
        ("ep_size", {"ep": 2}),
        ("speculative_algorithm", {"speculative_algorithm": "NGRAM"}),
        ("disable_shared_experts_fusion", {"disable_shared_experts_fusion": False}),
    ],
)
def test_a_server_setting_that_does_not_go_with_adapters_is_refused(field, settings):
    with pytest.raises(
        ValueError, match=f"sglang.{field} = .* cannot go with --lora-serving adapter"
    ):
        check_server_flags(settings, adapters=True)
    check_server_flags(settings)


def test_server_settings_that_go_with_adapters_pass():
    check_server_flags({"tp": 1, "disable_shared_experts_fusion": True}, adapters=True)


async def ask_external(tiny: Path, info: dict, *flags: str, **model: str):
    """The dry run with a server that says ``info`` of itself, and ``model`` of its model."""

    async def answer(request, _body):
        model_info = {"weight_version": "0", **model}
        return web.json_response(info if request.path == "/server_info" else model_info)

    async with Fake(answer).running() as addr:
        address = ["--rollout-external-engine-addrs", addr]
        return await asyncio.to_thread(start, tiny, "--dry-run", *address, *flags)


async def judge_external(config: RunConfig, info: dict, hf=None) -> None:
    """Check a server that says ``info`` of itself."""

    async def answer(request, _body):
        model_info = {"weight_version": "0"}
        return web.json_response(info if request.path == "/server_info" else model_info)

    async with Fake(answer).running() as addr:
        await asyncio.to_thread(check_external_server, config, hf, addr, None)


@pytest.mark.parametrize("field", ROWS)
async def test_an_external_server_is_judged_by_the_same_table(field):
    """The answer is a real server's, with the settings of one row altered."""
    names = {"enable_hicache": "enable_hierarchical_cache", "pipeline_parallel_size": "pp_size"}
    refused, harmless = (
        SERVER_INFO | {names.get(name, name): value for name, value in row.items()}
        for row in ROWS[field]
    )
    # unset, as a server reports it: what its memory allows counts
    refused["max_running_requests"] = harmless["max_running_requests"] = None
    for info in (refused, harmless):
        info["internal_states"] = [{"effective_max_running_requests_per_dp": 16}]
        info["cuda_graph_config"] = {"prefill": {"backend": "breakable"}}  # as on a GPU
    replaying = sparse_run()
    with pytest.raises(ConfigError, match=f"runs with {field} = "):
        await judge_external(replaying, refused)
    off = replaying.replay.model_copy(update={"use_rollout_routing_replay": False})
    await judge_external(replaying.model_copy(update={"replay": off}), refused)
    await judge_external(replaying, harmless)


async def test_a_server_that_cannot_say_which_tokens_it_kept_is_refused(tiny):
    top_k, off = ["--rollout-top-k", "20"], "--no-use-rollout-routing-replay"
    for limit, more, code in ((19, top_k, 2), (20, top_k, 0), (19, (), 0)):
        result = await ask_external(tiny, SERVER_INFO | {KEPT: limit}, *more, off)
        assert result.exit_code == code, result.output
        said = f"runs with {KEPT} = 19, which cannot go with --rollout-top-k 20"
        assert (said in words(result.output)) == (code == 2), result.output


@pytest.mark.parametrize(
    "told, refused",
    [
        ({"version": "0.5.22"}, "runs SGLang 0.5.22, expected 0.5.23"),
        ({"version": "0.6.0rc1"}, "runs SGLang 0.6.0rc1, expected 0.5.23"),
        ({"version": "0.5.230"}, "runs SGLang 0.5.230, expected 0.5.23"),
        ({"version": None}, "runs SGLang None, expected 0.5.23"),
        ({"version": "0.5.23.post2"}, None),
        ({"version": "0.5.23+cu130"}, None),
        ({"quantization": "fp8"}, "runs with quantization = 'fp8'"),
        ({"modelopt_quant": "nvfp4"}, "runs with modelopt_quant = 'nvfp4'"),
        ({"quantization": None, "modelopt_quant": ""}, None),
    ],
)
async def test_an_external_server_of_another_release_or_form_of_weights_is_refused(
    told, refused, tiny
):
    result = await ask_external(tiny, SERVER_INFO | told)
    assert result.exit_code == (0 if refused is None else 2), result.output
    assert refused is None or refused in words(result.output)


async def test_an_external_server_on_a_checkpoint_that_is_quantised_is_refused(tiny, tmp_path):
    config = json.loads((tiny / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = await ask_external(tiny, SERVER_INFO, model_path=str(tmp_path))
    assert result.exit_code == 0, result.output
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = await ask_external(tiny, SERVER_INFO, model_path=str(tmp_path))
    assert result.exit_code == 2 and "which is quantised (fp8)" in words(result.output)


async def test_a_server_that_says_nothing_of_its_routes_is_refused(tiny):
    info = {k: v for k, v in SERVER_INFO.items() if k != "enable_return_routed_experts"}
    result = await ask_external(tiny, info)
    assert result.exit_code == 2 and "enable_return_routed_experts" in result.output


def sparse_run(**sglang) -> RunConfig:
    recipe = RunConfig.from_toml(ROOT / "configs/tiny_cpu.toml")
    replay = recipe.replay.model_copy(update={"use_rollout_routing_replay": True})
    rollout = recipe.rollout.model_copy(update={"sglang": sglang})
    return recipe.model_copy(update={"replay": replay, "rollout": rollout})


def test_a_server_of_our_own_that_could_not_say_what_indexers_chose_is_refused():
    replayed, implied = facts(index_topk=64), facts(index_topk=1024)
    config = sparse_run(tp=2)
    with pytest.raises(ConfigError, match=r"^sglang.tp_size = 2 cannot go with --use-rollout-rout"):
        check_indexer_flags(config, replayed)
    check_indexer_flags(config, implied)
    check_indexer_flags(sparse_run(tp=2, attn_dp_size=2), replayed)
    check_indexer_flags(sparse_run(no_such_flag=2), replayed)  # others say so


async def test_a_server_of_others_that_could_not_say_what_indexers_chose_is_refused():
    info = SERVER_INFO | {"disable_overlap_schedule": True}
    words = "runs with enable_return_indexer_topk = None, which cannot go with"
    with pytest.raises(ConfigError, match=words):
        await judge_external(sparse_run(), info, facts(index_topk=64))
    for hf in (None, facts(), facts(index_topk=1024)):
        await judge_external(sparse_run(), info, hf)
    await judge_external(
        sparse_run(), info | {"enable_return_indexer_topk": True}, facts(index_topk=64)
    )


def test_the_doctor_gives_the_same_answers(tiny):
    flags = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--world-size", "2"]
    flags += ["--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")]
    flags += ["--use-rollout-routing-replay", "--transformer-override", "hidden_dropout=0.1"]
    flags += ["--sglang-pp-size", "2", "--sglang-quantization", "fp8"]
    result = CliRunner().invoke(main, ["doctor", *flags])
    assert result.exit_code == 1
    for text in ("sglang.pp_size = 2", "sglang.quantization: ", "hidden_dropout cannot be set"):
        assert text in result.output


def test_the_owned_fields_are_fields_of_megatron_whose_source_tells_them():
    from r3train.cpu.device import prepare_device

    prepare_device()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    for owned, declared, megatrons in (
        (overrides.OWNED, overrides.TRANSFORMER, TransformerConfig),
        (overrides.OWNED_OPTIMIZER, overrides.OPTIMIZER, OptimizerConfig),
    ):
        known = overrides.fields_of(tuple(declared.items()))
        assert known == {field.name for field in dataclasses.fields(megatrons)}
        patterns = " ".join(owned.values()).split()
        assert not [p for p in patterns if not fnmatch.filter(known, p)]


def test_the_tables_name_what_sglang_has():
    fields = set(known_flags().values())
    assert not {*DECIDED_BY_THE_RUN, *REPLAY_REFUSALS, *ADAPTER_REFUSALS} - fields
