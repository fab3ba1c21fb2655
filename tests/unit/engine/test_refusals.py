"""Each value that is refused, as a flag or JSON spells it, and its nearest value that is not."""

from __future__ import annotations

import pytest

from r3train.engine.flags import check_server_flags
from r3train.engine.refusals import DECIDED_BY_THE_RUN, refused, settings_of_a_server


def fields(settings: dict, **run_settings) -> list[str]:
    """The fields that are refused, with their values."""
    found = list(refused(settings, **{"replay": True, **run_settings}))
    assert all(settings[field] == value for field, value, _ in found)
    return [field for field, _, _ in found]


# a field that is left out of the table would silently be the user's
DECIDED = (
    "model_path tokenizer_path revision config load_format model_loader_extra_config custom_weight_loader"
    " json_model_override_args model_config_parser model_impl decrypted_config_file is_embedding weight_version"
    " random_seed quantization quantization_param_path modelopt_quant modelopt_checkpoint_restore_path"
    " quantize_and_serve rl_quant_profile enable_lora lora_paths max_lora_rank lora_target_modules"
    " max_loras_per_batch max_loaded_loras preferred_sampling_params delete_ckpt_after_loading"
    " checkpoint_engine_wait_weights_before_ready"
)


def test_every_setting_that_the_run_decides_is_refused_with_its_reason():
    assert DECIDED_BY_THE_RUN.keys() == set(DECIDED.split())
    for field, reason in DECIDED_BY_THE_RUN.items():
        with pytest.raises(ValueError) as error:
            check_server_flags({field: "x"})
        assert str(error.value) == f"sglang.{field}: {reason}"


@pytest.mark.parametrize(
    "value, is_on",
    [
        *((value, False) for value in (False, None, 0, "", " ", "none", "NULL", "False", " 0 ")),
        *((value, True) for value in (True, 1, "true", "yes", "mooncake", "00")),
    ],
)
def test_a_switch_is_read_as_flags_and_json_spell_it(value, is_on):
    assert fields({"enable_hisparse": value}) == ["enable_hisparse"] * is_on
    assert fields({"enable_return_routed_experts": value}) == (
        [] if is_on else ["enable_return_routed_experts"]
    )


@pytest.mark.parametrize(
    "value, is_refused",
    [(1, False), ("1", False), (None, False), (1.5, True), (2, True), ("2", True), ("two", False)],
)
def test_a_number_is_read_as_flags_and_json_spell_it(value, is_refused):
    assert fields({"pp_size": value}) == ["pp_size"] * is_refused


@pytest.mark.parametrize("value, ok", [(None, True), (1, True), (0, False), ("-1", False)])
def test_a_prefill_without_a_size_is_refused_and_one_that_is_not_given_passes(value, ok):
    assert fields({"chunked_prefill_size": value}) == ([] if ok else ["chunked_prefill_size"])


@pytest.mark.parametrize(
    "chunk, running, drafts, ok",
    [
        (128, 16, 7, True),
        (127, 16, 7, False),
        (128, 16, 8, False),
        (128, 17, 7, False),
        (None, 16, 7, False),
        (128, None, 7, False),
        (128, 16, None, False),
        (128, 0, 7, False),
        ("128", "16", "7", True),
    ],
)
def test_verify_tokens_must_be_known_to_fit_the_prefill_chunk(chunk, running, drafts, ok):
    given = {"max_running_requests": running, "speculative_num_draft_tokens": drafts}
    settings = {"speculative_algorithm": "NGRAM", **given, "chunked_prefill_size": chunk}
    assert fields(settings) == ([] if ok else ["speculative_algorithm"])
    assert fields(settings | {"speculative_algorithm": None}) == []


@pytest.mark.parametrize("value", ["triton_kernel", " Flashinfer_TRTLLM ", "flashinfer_mxfp4"])
def test_a_backend_that_records_no_routes_is_refused_however_it_is_spelled(value):
    assert fields({"moe_runner_backend": value}) == ["moe_runner_backend"]
    assert fields({"moe_runner_backend": value}, replay=False) == []
    for recording in ("triton", "auto", "flashinfer_trtllm_routed", None):
        assert fields({"moe_runner_backend": recording}) == []


def test_a_backend_that_moves_rows_without_their_routes_is_refused():
    for backend in (
        "mooncake",
        "nixl",
        "mori",
        "flashinfer",
        "pplx",
        "megamoe",
        "one of next year",
    ):
        assert fields({"moe_a2a_backend": backend}) == ["moe_a2a_backend"]
        assert fields({"moe_a2a_backend": backend}, replay=False) == []
    for backend in ("none", None, "deepep", "DeepEP_v2"):
        assert fields({"moe_a2a_backend": backend}) == []


@pytest.mark.parametrize(
    "graphs, ok",
    [
        ({"prefill": {"backend": "disabled"}}, True),
        ({"prefill": {"backend": "breakable"}}, False),
        ({"prefill": None}, False),
        ({}, False),
    ],
)
def test_data_parallel_attention_is_judged_by_the_graphs_that_a_server_resolved(graphs, ok):
    settings = {"attn_dp_size": 2, "cuda_graph_config": graphs, "disable_cuda_graph": not ok}
    assert fields(settings) == ([] if ok else ["attn_dp_size"])
    room = {"max_running_requests": 1, "speculative_num_draft_tokens": 1, "chunked_prefill_size": 9}
    drafts = {"speculative_algorithm": "NGRAM"} | room
    assert fields(settings | drafts) == ["attn_dp_size"]
    for gathered in ("deepep", "deepep_v2"):
        assert fields(settings | drafts | {"moe_a2a_backend": gathered}) == []


def test_data_parallel_attention_by_its_old_name_alone_is_refused_and_named_once():
    assert fields({"enable_dp_attention": True}) == ["enable_dp_attention"]
    assert fields({"enable_dp_attention": True, "dp_size": 1}) == []
    assert fields({"enable_dp_attention": True, "dp_size": 4, "moe_a2a_backend": "DEEPEP"}) == []
    both = {"enable_dp_attention": True, "attn_dp_size": 2, "dp_size": 2}
    assert fields(both) == ["attn_dp_size"]


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"speculative_algorithm": "ngram"}, ["speculative_algorithm"]),
        ({"speculative_algorithm": "dflash"}, []),
        ({"speculative_algorithm": "DSPARK"}, []),
        ({"speculative_algorithm": None}, []),
        ({"speculative_algorithm": "none"}, []),
        ({"sampling_mask_max_tokens": 19}, ["sampling_mask_max_tokens"]),
        ({"sampling_mask_max_tokens": 20}, []),
        ({"sampling_mask_max_tokens": None}, []),
    ],
)
def test_a_server_must_say_which_tokens_it_kept(settings, found):
    assert fields(settings, replay=False, kept_top_k=20) == found
    assert fields(settings, replay=False) == []
    (reason,) = [reason for *_, reason in refused(settings, kept_top_k=20)] or [None]
    assert reason is None or reason.startswith("cannot go with --rollout-top-k 20: ")


@pytest.mark.parametrize("field", ["tp_size", "dp_size", "pp_size", "ep_size"])
def test_a_server_of_adapters_has_one_device(field):
    assert fields({field: 2}, replay=False, adapters=True) == [field]
    assert fields({field: 1}, replay=False, adapters=True) == []


@pytest.mark.parametrize(
    "settings, ok",
    [
        ({"tp_size": 1}, True),
        ({"tp_size": 2}, False),
        ({"tp_size": "8", "attn_dp_size": 4}, False),
        ({"tp_size": "8", "attn_dp_size": 8}, True),
        ({"tp_size": 8, "attn_dp_size": 1, "enable_dp_attention": True, "dp_size": 8}, True),
        ({"tp_size": 8, "enable_dp_attention": True, "dp_size": 4}, False),
        ({"tp_size": 8, "enable_dp_attention": False, "dp_size": 8}, False),
        # as a running server says it
        ({"tp_size": 8, "attn_dp_size": 8, "enable_dp_attention": True, "dp_size": 1}, True),
        ({"tp_size": None}, True),
    ],
)
def test_the_choices_of_an_indexer_need_rows_whose_attention_is_one_ranks(settings, ok):
    assert fields(settings, replay=False, indexer=True) == ([] if ok else ["tp_size"])
    assert fields(settings, replay=False) == []


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"enable_return_indexer_topk": False},
            "it needs the tokens that the model's indexers chose (a server of the run's own is told so,"
            " another needs --enable-return-indexer-topk)",
        ),
        ({"speculative_algorithm": "EAGLE"}, "a draft model's indexers are recorded"),
    ],
)
def test_a_server_must_say_what_its_indexers_chose(settings, words):
    ((field, value, reason),) = refused(settings, indexer=True)
    assert {field: value} == settings
    assert reason.startswith(f"cannot go with --use-rollout-routing-replay: {words}")
    with pytest.raises(ValueError, match=f"sglang.{field} = .* cannot go with"):
        check_server_flags(settings, indexer=True)
    check_server_flags(settings)
    assert fields({"enable_return_indexer_topk": True}, replay=True, indexer=True) == []


def test_a_servers_settings_are_its_own_words_and_the_requests_that_its_memory_allows():
    running = "effective_max_running_requests_per_dp"
    info = {"internal_states": [{running: 7}, {running: 9}, "odd"], "max_running_requests": None}
    assert settings_of_a_server(info)["max_running_requests"] == 9
    assert settings_of_a_server({"max_running_requests": 5})["max_running_requests"] == 5
    assert settings_of_a_server({"internal_states": None}).get("max_running_requests") is None
    for nothing in ({}, None, "text", []):
        unsaid = ["enable_return_routed_experts", "enable_return_indexer_topk"]
        assert settings_of_a_server(nothing) == dict.fromkeys(unsaid)
        assert fields(dict(settings_of_a_server(nothing))) == unsaid[:1]
        assert fields(dict(settings_of_a_server(nothing)), indexer=True) == unsaid
    said = settings_of_a_server({"enable_return_routed_experts": True})
    assert fields(dict(said)) == []
