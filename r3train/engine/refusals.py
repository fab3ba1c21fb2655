"""Settings of SGLang that a run refuses: those that it decides itself, and those that spoil routes.

Names are fields of SGLang's ``ServerArgs``; ``/server_info`` reports them under the same names, so one
table judges a server of our own by its flags and somebody else's by what it says of itself.

Source: SGLang 0.5.23; docs/proof/r3.md says what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from r3train.config.files import load_json_object
from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts

_WEIGHTS = "the run sends the weights of --hf-checkpoint's model, as they are"
_SAMPLING = "every request carries --rollout-temperature, --rollout-top-p and --rollout-top-k"
_ONE_FILE = (
    "settings in a file of their own would pass unchecked: write them under [rollout.sglang]"
)

# facts of a model that tell it from another one: SGLang ends where it loads tensors of other shapes
_SIZES = ("model_type", "num_hidden_layers", "num_experts", "hidden_size", "vocab_size")
# field -> the flag of ours that decides it, or the reason why no flag may
DECIDED_BY_THE_RUN: dict[str, str] = {
    "model_path": "set --hf-checkpoint, from which the actor starts too",
    "tokenizer_path": "set --hf-checkpoint: servers get tokens and return tokens",
    "revision": "set --hf-checkpoint, a directory",
    "config": _ONE_FILE,
    "load_format": f"set --hf-checkpoint: {_WEIGHTS}",
    "model_loader_extra_config": f"set --hf-checkpoint: {_WEIGHTS}",
    "custom_weight_loader": f"{_WEIGHTS}; --update-weight-transfer-mode chooses the way",
    "json_model_override_args": "set --hf-checkpoint: its config.json is the actor's model too",
    "model_config_parser": "set --hf-checkpoint: its config.json is the actor's model too",
    "model_impl": f"SGLang's own models take new weights by their names; {_WEIGHTS}",
    "decrypted_config_file": "set --hf-checkpoint: its config.json is the actor's model too",
    "is_embedding": "a server of embeddings generates nothing",
    "weight_version": "the run numbers the weights itself, from 0, or from the rollout it resumes",
    "random_seed": "set --rollout-seed; each server adds its number to it",
    "quantization": f"{_WEIGHTS}; --bf16 chooses their dtype",
    "quantization_param_path": f"{_WEIGHTS}; --bf16 chooses their dtype",
    "modelopt_quant": f"{_WEIGHTS}; --bf16 chooses their dtype",
    "modelopt_checkpoint_restore_path": f"set --hf-checkpoint: {_WEIGHTS}",
    "quantize_and_serve": f"{_WEIGHTS}; --bf16 chooses their dtype",
    "rl_quant_profile": f"{_WEIGHTS}; --bf16 chooses their dtype",
    "enable_lora": f"set --lora-serving adapter, or leave it out: {_WEIGHTS}",
    "lora_paths": f"an adapter would change the model that is trained: {_WEIGHTS}",
    "max_lora_rank": "set --lora-rank, with --lora-serving adapter",
    "lora_target_modules": "set --target-modules, with --lora-serving adapter",
    "max_loras_per_batch": "it follows from --max-weight-staleness, with --lora-serving adapter",
    "max_loaded_loras": "the run unloads the versions that are too old",
    "preferred_sampling_params": _SAMPLING,
    "delete_ckpt_after_loading": "the actor, exports and restarted servers read --hf-checkpoint",
    "checkpoint_engine_wait_weights_before_ready": (
        "servers start from --hf-checkpoint, and are sent weights when they are ready"
    ),
}

Settings = Mapping[str, Any]
# field -> (is this value refused, why)
Refusals = Mapping[str, tuple[Callable[[Any, Settings], bool], str]]


def _number(value: Any) -> float:
    """Return a number as flags and JSON hold it; 0 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _is_on(value: Any, _: Settings) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "null", "false", "0")
    return bool(value)


def _is_off(value: Any, settings: Settings) -> bool:
    return not _is_on(value, settings)


def _is_above_one(value: Any, _: Settings) -> bool:
    return _number(value) > 1


def _is_no_size(value: Any, _: Settings) -> bool:
    return value is not None and _number(value) <= 0


def _verifies_without_room(value: Any, settings: Settings) -> bool:
    """Return True unless the prefill chunk is known to be larger than any batch of verify tokens."""
    if not _is_on(value, settings):
        return False
    chunk, running, drafts = (
        _number(settings.get(name))
        for name in ("chunked_prefill_size", "max_running_requests", "speculative_num_draft_tokens")
    )
    known = min(chunk, running, drafts) > 0
    return not known or chunk < running * (drafts + 1)


_HOST_TIER = (
    "SGLang keeps routes by device KV slot, so a prefix that comes back from a host tier or another"
    " store has the routes of the slot's last owner"
)

# Backends of experts that choose them inside the kernel: the routes of /generate are zeros then.
# Source: SGLang 0.5.23, TopK.bind_runner_backend; tests/rehearsal asks every backend.
UNRECORDED_BACKENDS = frozenset(
    ("triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4")
)


def _routes_in_its_kernel(value: Any, _: Settings) -> bool:
    return str(value).strip().lower() in UNRECORDED_BACKENDS


def _gathers_no_rows(value: Any, _: Settings) -> bool:
    """Return True for a backend that computes experts on a rank's own rows, whose routes are not gathered.

    Source: SGLang 0.5.23, ``_ffn_on_rank_rows`` and ``RoutedExpertsCapturer``.
    """
    return _is_on(value, _) and str(value).strip().lower() not in ("deepep", "deepep_v2")


def _has_prefill_graphs(settings: Settings) -> bool:
    """Return True unless prefills are known to run without a CUDA graph; by default they have one."""
    graphs = settings.get("cuda_graph_config")
    if isinstance(graphs, Mapping):  # as a server resolved it
        return (graphs.get("prefill") or {}).get("backend") != "disabled"
    off = ("disable_prefill_cuda_graph", "disable_cuda_graph")
    return settings.get("cuda_graph_backend_prefill") != "disabled" and not any(
        _is_on(settings.get(name), settings) for name in off
    )


def _reads_rows_of_other_ranks(value: Any, settings: Settings) -> bool:
    """Return True for data-parallel attention whose ranks look for their rows in the wrong place.

    Source: SGLang 0.5.23, ``RoutedExpertsCapturer._get_local_slice``: in a graph rank i's part begins at i times
    the requests of the last decoding graph, whatever the graph was.  With DeepEP every part begins at 0.
    """
    parts = str(settings.get("moe_a2a_backend")).lower() not in ("deepep", "deepep_v2")
    drafts = _is_on(settings.get("speculative_algorithm"), settings)
    return _is_above_one(value, settings) and parts and (drafts or _has_prefill_graphs(settings))


def _reads_them_by_the_old_name(value: Any, settings: Settings) -> bool:
    """Judge ``enable_dp_attention``, with which dp_size is the width; False where ``attn_dp_size`` is judged."""
    if not _is_on(value, settings) or _is_above_one(settings.get("attn_dp_size"), settings):
        return False
    return _reads_rows_of_other_ranks(settings.get("dp_size", 2), settings)


_OTHER_RANKS_ROWS = (
    "SGLang then reads a data-parallel rank's routes in the rows of another, in CUDA graphs of prefills and with"
    " drafts: give cuda_graph_backend_prefill disabled and no speculative_algorithm, or moe_a2a_backend deepep"
)

REPLAY_REFUSALS: Refusals = {
    "enable_return_routed_experts": (
        _is_off,
        "it needs the experts that SGLang chose (a server of the run's own is told so, another needs"
        " --enable-return-routed-experts)",
    ),
    "chunked_prefill_size": (
        _is_no_size,
        "SGLang then sizes its routed-experts buffer by max_running_requests, and a longer prefill"
        " kills the server",
    ),
    "enable_hierarchical_cache": (_is_on, _HOST_TIER),
    "hicache_storage_backend": (_is_on, _HOST_TIER),
    "enable_hisparse": (_is_on, _HOST_TIER),
    "enable_lmcache": (_is_on, _HOST_TIER),
    "enable_flexkv": (_is_on, _HOST_TIER),
    "enable_unified_cache_external_linker": (_is_on, _HOST_TIER),
    "radix_cache_backend": (_is_on, _HOST_TIER),
    "pp_size": (
        _is_above_one,
        "each pipeline stage of a server records its own layers, and nothing adds them up: the"
        " others' routes are zeros",
    ),
    "moe_runner_backend": (
        _routes_in_its_kernel,
        "this backend chooses experts inside its kernel and records no routes (they are zeros); triton"
        " records them",
    ),
    "moe_a2a_backend": (
        _gathers_no_rows,
        "SGLang gathers the routes of all ranks with deepep, deepep_v2 and none only: with another backend a rank's"
        " own rows are right, and the others are those of the forward before",
    ),
    "attn_dp_size": (_reads_rows_of_other_ranks, _OTHER_RANKS_ROWS),
    "enable_dp_attention": (_reads_them_by_the_old_name, _OTHER_RANKS_ROWS),
    "enable_two_batch_overlap": (
        _is_on,
        "the second half of a batch overwrites the routes of the first",
    ),
    "disaggregation_mode": (_is_on, "the decoding side has no routes of the prompt"),
    "speculative_algorithm": (
        _verifies_without_room,
        "SGLang's buffer of routes does not count verify tokens; give chunked_prefill_size of at"
        " least max_running_requests * (speculative_num_draft_tokens + 1), and all three",
    ),
}


def _splits_attention(value: Any, settings: Settings) -> bool:
    """Return True where ranks share the heads of a row's attention.

    Source: SGLang 0.5.23, ``IndexerTopkCapturer.__init__``.  ``dp_size`` is the old name's width of
    data-parallel attention.
    """
    width = _number(settings.get("attn_dp_size"))
    if width <= 1 and _is_on(settings.get("enable_dp_attention"), settings):
        width = _number(settings.get("dp_size"))
    return _number(value) > max(width, 1)


# of runs that replay what an indexer chose, next to those of all replay
INDEXER_REFUSALS: Refusals = {
    "enable_return_indexer_topk": (
        _is_off,
        "it needs the tokens that the model's indexers chose (a server of the run's own is told so, another"
        " needs --enable-return-indexer-topk)",
    ),
    "tp_size": (
        _splits_attention,
        "SGLang records what an indexer chose only where no ranks share a row's attention: give attn_dp_size"
        " of the same number",
    ),
    "speculative_algorithm": (
        _is_on,
        "a draft model's indexers are recorded in the place of the model's, and drafts without a model were"
        " not tried",
    ),
}


_ONE_DEVICE = (_is_above_one, "more than 1 was not tried")

ADAPTER_REFUSALS: Refusals = {
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size"), _ONE_DEVICE),
    "speculative_algorithm": (_is_on, "drafts are the base's"),
    "disable_shared_experts_fusion": (
        _is_off,
        "the adapter of a shared expert that is fused into the routed ones would be skipped",
    ),
}


# SGLang 0.5.23 (spec_sampling_mask.py): the only speculation with which it says what it kept
_DFLASH = ("DFLASH", "DSPARK")


def _sampling_mask_refusals(top_k: int) -> Refusals:
    return {
        "speculative_algorithm": (
            lambda value, _: _is_on(value, _) and str(value).upper() not in _DFLASH,
            f"SGLang says which tokens it kept only with {' and '.join(_DFLASH)}",
        ),
        "sampling_mask_max_tokens": (
            lambda value, _: value is not None and _number(value) < top_k,
            "SGLang refuses requests with a larger top-k",
        ),
    }


def refused(
    settings: Settings,
    *,
    replay: bool = False,
    indexer: bool = False,
    kept_top_k: int | None = None,
    adapters: bool = False,
) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, the flag that it cannot go with and why) for each setting that spoils a run.

    settings: fields of ``ServerArgs``; one that is missing has SGLang's default.  replay: routes must be
    right; indexer: it must say which tokens the model's indexers chose; kept_top_k: the server must say
    which tokens this top-k kept; adapters: it serves them.
    """
    tables: list[tuple[str, Refusals]] = []
    if replay:
        tables.append(("--use-rollout-routing-replay", REPLAY_REFUSALS))
    if indexer:
        tables.append(("--use-rollout-routing-replay", INDEXER_REFUSALS))
    if kept_top_k is not None:
        tables.append((f"--rollout-top-k {kept_top_k}", _sampling_mask_refusals(kept_top_k)))
    if adapters:
        tables.append(("--lora-serving adapter", ADAPTER_REFUSALS))
    for flag, table in tables:
        for field, (is_refused, reason) in table.items():
            if field in settings and is_refused(settings[field], settings):
                yield field, settings[field], f"cannot go with {flag}: {reason}"


# the release that was read, and against which answers, settings and checksums were held
SGLANG_RELEASE = "0.5.23"
_QUANTISES = ("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile")


def foreign(info: Settings, model: Settings, hf: HfModelFacts | None) -> Iterator[str]:
    """Yield what a server of somebody else's cannot be taken for: another release or model, or weights in another form.

    info, model: its answers to ``/server_info`` and ``/model_info``.  A checkpoint is read where it is here too.
    hf: of the run's model, None if it is not known.
    """
    version = info.get("version")
    if str(version).partition("+")[0].partition(".post")[0] != SGLANG_RELEASE:
        yield (
            f"runs SGLang {version}, expected {SGLANG_RELEASE}, whose routes, version labels and checksums are known:"
            f" start it from an environment with sglang=={SGLANG_RELEASE}"
        )
    why = "an update would bring bfloat16 numbers without their scales"
    for field in _QUANTISES:
        if _is_on(info.get(field), info):
            yield f"runs with {field} = {info[field]!r}, and {why}: start it without"
    path = Path(str(model.get("model_path"))) / "config.json"
    if path.is_file() and (found := load_json_object(path).get("quantization_config")):
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        yield (
            f"serves {path.parent}, which is quantised ({method}), and {why}: start it from --hf-checkpoint, or let the"
            " run start servers of fp8 (--rollout-weights fp8)"
        )
    if path.is_file() and hf is not None:
        held = read_hf_facts(path.parent)
        for name in _SIZES:
            if (value := getattr(held, name)) != getattr(hf, name):
                yield f"serves {path.parent}, whose {name} is {value}, and that of {hf.path} is {getattr(hf, name)}"


def settings_of_a_server(info: Any) -> Settings:
    """Return a running server's settings, from its answer to ``/server_info``."""
    info = info if isinstance(info, Mapping) else {}
    # unset, max_running_requests follows from the server's memory
    states = info.get("internal_states")
    running = [
        _number(state.get("effective_max_running_requests_per_dp"))
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, Mapping)
    ]
    needed = dict.fromkeys(("enable_return_routed_experts", "enable_return_indexer_topk"))
    settings = {**needed, **info}
    return settings | ({"max_running_requests": max(running)} if running else {})
