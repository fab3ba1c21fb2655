"""Checks of the model, its kernels here and its servers, against the settings: each raises what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import replayed_index_topk
from r3train.families.hf_facts import HfModelFacts
from r3train.config.files import load_json_object
from r3train.config.sources import ConfigError, raise_all
from r3train.cuda_environment import visible_gpus
from r3train.engine.addresses import host_of, interface_of
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.flags import server_fields
from r3train.engine.refusals import foreign, refused
from r3train.engine.sglang_http import HTTPSettings
from r3train.families import (
    FAMILIES,
    has_linear_attention,
    has_sinks,
    is_of_text_and_images,
    TINY_MODELS,
)
from r3train.families.checks.family_checks import untrained_parts
from r3train.hf_checkpoint import check_export_directory, rounded_tensors, TensorKind
from r3train.launch.job.finding import Findings, warning
from r3train.launch.job.run_dir import check_can_be_made
from r3train.peft_files import not_in_peft

# a server that others use too may take a while
_ANSWER_S = 30.0


def model_warnings(
    config: RunConfig, hf: HfModelFacts, kinds: Mapping[str, TensorKind]
) -> Findings:
    """Warn of what a run of this model leaves out or widens; kinds: its checkpoint's tensors by name."""
    narrow = sum(kind.dtype == "bfloat16" for kind in kinds.values())
    if narrow > len(kinds) / 2 and not config.model.bf16:
        text = "the checkpoint is in bfloat16 and will train in float32, with twice the memory"
        yield warning("model", text, "add --bf16")
    if hf.is_moe and not (config.replay.use_rollout_routing_replay or config.learns_conversations):
        text = "mixture of experts without R3: rollout and trainer will choose different experts"
        yield warning("model", text, "add --use-rollout-routing-replay")
    lora, form = config.lora, config.lora.lora_save_hf
    known = hf.model_type in FAMILIES  # or it is refused
    if config.checkpoint.save_hf is not None and lora.enabled and form != "merged" and known:
        reason = not_in_peft(lora, hf)
        if reason is not None:
            text = f"--save-hf will be the merged checkpoint only: {reason}"
            yield warning(
                "configuration", text, "r3train docs lora says which targets PEFT reads whole"
            )
    parts = untrained_parts(hf)
    if parts is None and any(name.startswith("mtp.") for name in kinds):
        parts = (
            "layers of multi-token prediction (mtp.*) are neither served nor trained nor exported"
        )
    if parts is not None:
        yield warning("checkpoint", parts, "an export lacks them too: decode without them")
    if is_of_text_and_images(hf.model_type):
        text = f"{hf.model_type}: text alone is trained and served, its vision tower does not move"
        yield warning("checkpoint", text, "an export has the tower as it was")
    rounded = rounded_tensors(hf) if config.model.bf16 and kinds else []
    if rounded:
        text = f"{', '.join(rounded)}: in float32 on disk, and --bf16 rounds them"
        yield warning("checkpoint", text, "the servers get them so, and an export")
    rollout = config.rollout
    if not (hf.eos_token_ids or rollout.rollout_stop_token_ids or rollout.rollout_stop):
        text = "no eos_token_id in config.json or generation_config.json"
        yield warning("checkpoint", text, "set it, or --rollout-stop-token-ids")


def check_external_server(
    config: RunConfig, hf: HfModelFacts | None, address: str, api_key: str | None
) -> None:
    """Raise ValueError for a server that does not answer, or that the run refuses; hf: None if not known."""
    in_memory = config.trainer.update_weight_transfer_mode == "shared_memory"
    if in_memory and interface_of(host_of(address)) is None:
        raise ValueError(
            f"{address}: this server is on another node, and --update-weight-transfer-mode shared_memory is"
            " for servers on rank 0's: use distributed or disk"
        )
    try:
        settings = HTTPSettings(api_key=api_key, request_timeout_s=_ANSWER_S)
        with EngineControl([address], settings) as control:
            model, info = control.model_info()[0], control.server_info()[0]
            raise_all([f"engine {address} {text}" for text in foreign(info, model, hf)])
            control.require_settings(
                replay=config.replay.use_rollout_routing_replay,
                indexer=hf is not None and replayed_index_topk(config, hf) is not None,
                kept_top_k=config.rollout.kept_top_k,
                exact_boundaries=config.rollout.exact_boundaries,
            )
    except EngineError as error:
        remedy = "r3train serve starts a server; --dry-run --estimate needs none"
        raise ValueError(f"{address}: does not answer as it should: {error}; {remedy}") from None


def check_class(hf: HfModelFacts) -> None:
    """Raise ValueError where config.json does not name the class by which our servers find the model."""
    tiny, file = TINY_MODELS.get(hf.model_type), hf.path / "config.json"
    if tiny is None:  # the family's check refuses it
        return
    name = f"{tiny.kind}For{'ConditionalGeneration' if tiny.vision else 'CausalLM'}"
    name = name.replace("Kimi_", "Kimi")  # SGLang's name is without transformers' underscore
    found = load_json_object(file).get("architectures")
    if found != [name]:
        raise ValueError(
            f"{file}: architectures is {json.dumps(found)}, and servers find the model by it: write"
            f' "architectures": ["{name}"]'
        )


def check_server_split(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ValueError for servers of our own that cannot split the model's attention heads."""
    size: Any = 1
    with suppress(ConfigError):  # of a flag that the settings' checks have refused
        size = server_fields(config.rollout.sglang).get("tp_size", 1)
    if type(size) is int and size > 0 and hf.num_attention_heads % size:
        raise ValueError(
            f"--sglang-tp-size {size}: the {hf.num_attention_heads} attention heads of {hf.path} do not"
            " divide by it"
        )


def check_indexer_flags(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ConfigError for servers of our own that could not say what the model's indexers chose."""
    if replayed_index_topk(config, hf) is None:
        return
    fields: dict[str, Any] = {}
    with suppress(ConfigError):  # of a flag that the settings' checks have refused
        fields = server_fields(config.rollout.sglang)
    found = refused(fields, indexer=True)
    raise_all(f"sglang.{field} = {value!r} {reason}" for field, value, reason in found)


def check_export_directories(config: RunConfig) -> None:
    """Raise ValueError for the first export whose directory cannot be made, or holds something else."""
    for directory in config.checkpoint.hf_directories(config.rollout.num_rollout):
        check_export_directory(directory, config.model.hf_checkpoint)
        # an export is written next to its place and renamed
        check_can_be_made(directory, "save_hf", parents_only=True)


def check_layers_here(config: RunConfig) -> None:
    """Raise ValueError where a visible CUDA device lacks what the actor's layers need there."""
    if not visible_gpus():  # a login node without a device is no reason to refuse
        return
    from r3train.cpu.device import uses_transformer_engine  # it imports torch

    uses_transformer_engine(config.model.attention_backend, on_cuda=True)
    if config.parallel.context_parallel_size > 1 and not config.model.bf16:
        raise ValueError(
            "--context-parallel-size above 1 on a CUDA device needs --bf16: Transformer Engine has no attention"
            " of cut sequences in float32"
        )


def check_kernels(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ValueError where what is installed has no kernels for the model's attention on the visible CUDA devices."""
    name = hf.model_type
    if visible_gpus() and has_sinks(name):
        with suppress(PackageNotFoundError):  # which check_layers_here has said
            check_sinks(name, version("transformer_engine"), config)
    if visible_gpus() and has_linear_attention(name):
        check_linear_kernels(name)


def check_sinks(model_type: str, transformer_engine: str, config: RunConfig) -> None:
    """Raise ValueError where this Transformer Engine has no attention with the model's sinks.

    Source: ``get_attention_backend`` of 2.11 and 2.12: with sinks and packed sequences 2.11 leaves none, and
    2.12 over context-parallel ranks the fused one only, with all-to-all.
    """
    if tuple(int(part) for part in transformer_engine.split(".")[:2]) < (2, 12):
        raise ValueError(
            f"{model_type}: Transformer Engine {transformer_engine} has no attention with sinks for packed"
            " sequences; expected 2.12.0, as in requirements/gpu.txt"
        )
    exchange = config.model.transformer_overrides.get("cp_comm_type", "p2p")
    if config.parallel.context_parallel_size > 1 and exchange != "a2a":
        raise ValueError(
            f"{model_type}: --context-parallel-size above 1 with cp_comm_type {exchange!r}: Transformer Engine has"
            " attention with sinks over ranks for --transformer-override cp_comm_type=a2a only"
        )


def check_linear_kernels(model_type: str) -> None:
    """Raise ValueError where the kernels of linear attention are not installed, or are older than those compared.

    Before 0.5 those of flash-linear-attention are silently wrong on Hopper with Triton 3.4 and later: the gradients of
    decays and betas.  Source: issue 640 of flash-linear-attention, and its ``chunk_bwd_dqkwg`` of 0.4.2 and 0.5.2.
    Those of Mamba mixers know packed sequences from the versions here on.  Source: Megatron's ``mamba_mixer``.
    """
    for package, least, expected in _LINEAR_KERNELS[FAMILIES[model_type].layers]:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = ""
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < least:
            raise ValueError(
                f"{model_type} on a CUDA device: {package} {found or 'is not installed'}; expected {expected}"
            )


_LINEAR_KERNELS = {
    "gated_delta_net": (("fla-core", (0, 5), "0.5.2, as in requirements/gpu.txt"),),
    "mamba": (("mamba-ssm", (2, 0), "2.0 or later"), ("causal-conv1d", (1, 4), "1.4 or later")),
}


def check_memory_history(config: RunConfig) -> None:
    """Raise ValueError for --record-memory-history where no CUDA device is visible."""
    if config.run.record_memory_history and not visible_gpus():
        raise ValueError(
            "--record-memory-history records the memory of CUDA devices, and none is visible here"
        )
