"""Kernels of the trainer's and the servers' libraries: cuDNN, attention, experts, and what is compiled late."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.config.model_settings import TE_KERNELS
from r3train.launch.job.finding import Findings, fact, ok, problem, warning
from r3train.engine.flags import server_fields
from r3train.families import FAMILIES, weights_of
from r3train.families.family import transformer_fields

# sinks of packed sequences, and gradients of packs over context-parallel ranks without NaNs
_LEAST_CUDNN = (9, 18, 0)
_ONE_CUDNN = (
    "leave one: apt-get purge 'libcudnn9*', and export CUDNN_HOME=.../site-packages/nvidia/cudnn"
    " (r3train docs installation)"
)
# with these flashinfer finds its kernels compiled
_COMPILED = ("flashinfer-cubin", "flashinfer-jit-cache")
CACHE_BASE = "FLASHINFER_WORKSPACE_BASE"
# --gpu -> its name as torch has it
CARDS = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200", "B200": "NVIDIA B200"}
_TUNED = "SGLANG_MOE_CONFIG_DIR"
# whose shared expert SGLang makes one of the routed ones, where it is one and CUDA's
_FUSED_SHARED = frozenset(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next"))


def check_cudnn(num_gpus: int, maps: Path = Path("/proc/self/maps")) -> Findings:
    """The cuDNN that torch and Transformer Engine have loaded into this process: one, and new enough.

    Transformer Engine takes that of CUDNN_HOME, of the CUDA toolkit and of the system before pip's, which torch
    takes.  Of two the loader mixes parts: SUBLIBRARY_VERSION_MISMATCH, or attention without a fused kernel.
    Silent without GPUs, and where Transformer Engine does not import, which is another finding.
    """
    if not num_gpus:
        return
    import torch

    try:
        from transformer_engine.pytorch import get_cudnn_version
    except Exception:  # a broken build raises whatever its loader does
        return
    number = torch.backends.cudnn.version()
    torch_cudnn = None if number is None else (number // 10000, number // 100 % 100, number % 100)
    found = {"torch": torch_cudnn, "Transformer Engine": tuple(get_cudnn_version())}
    named = ", ".join(f"{_dotted(version)} in {who}" for who, version in found.items())
    folders = sorted(_folders_of_cudnn(maps.read_text(encoding="utf-8").splitlines()))
    where = ", ".join(folders) or "no file that /proc/self/maps names"
    if len(set(found.values())) > 1 or len(folders) > 1:
        yield problem("cuDNN", f"{named}; loaded from {where}: a mixture", _ONE_CUDNN)
    elif torch_cudnn < _LEAST_CUDNN:
        text = f"{named}, from {where}: fused attention of packed sequences needs {_dotted(_LEAST_CUDNN)}"
        yield problem("cuDNN", text, "pip install -c requirements/gpu.txt nvidia-cudnn-cu13")
    else:
        yield ok("cuDNN", f"{named}, from {where}")


def _dotted(version: tuple[int, ...] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))


def _folders_of_cudnn(maps: Iterable[str]) -> set[str]:
    """Directories of the libcudnn files that a process has mapped; maps: lines of /proc/PID/maps."""
    files = (line.split(maxsplit=5)[5:] for line in maps)
    paths = (Path(file[0]) for file in files if file)
    return {str(path.parent) for path in paths if re.match(r"libcudnn[._]", path.name)}


def check_attention(config: RunConfig, hf: HfModelFacts, num_gpus: int) -> Findings:
    """Transformer Engine's choice of a kernel for each kind of attention of this recipe on this GPU.

    The unfused one keeps scores, which grow with the square of a pack's tokens and are in no estimate.
    Silent without GPUs, and where Transformer Engine does not import.
    """
    backend = config.model.attention_backend
    if (
        not num_gpus or backend == "local" or hf.model_type not in FAMILIES
    ):  # which preflight refuses
        return
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import utils
    except Exception:  # as above
        return
    for what, shape in attention_shapes(config, hf):
        try:
            chosen = _kernel(utils, shape, backend, bf16=config.model.bf16)
        except Exception as error:  # another version has other parameters
            text = (
                f"Transformer Engine cannot be asked about {what}: {type(error).__name__}: {error}"
            )
            yield warning("attention", text, "look at the log with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2")
            continue
        remedy = (
            "run train_async.py with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2: the log says why each kernel is out;"
            " a newer cuDNN, --bf16, or another --attention-backend"
        )
        named = f"{what}: {', '.join(f'{k} {v}' for k, v in shape.items() if k in _SHOWN)}"
        if chosen is None:
            forced = f" by --attention-backend {backend}" if backend in TE_KERNELS else ""
            yield problem("attention", f"{named}: Transformer Engine has no kernel{forced}", remedy)
        elif chosen == "unfused":
            text = f"{named}: the unfused kernel, whose scores grow with the square of a pack"
            kind = warning if backend == "unfused" else problem
            yield kind("attention", text, remedy)
        else:
            yield ok("attention", f"{named}: the {chosen} kernel")


_SHOWN = ("num_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v", "window_size", "softmax_type")


def attention_shapes(
    config: RunConfig, hf: HfModelFacts
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each kind of attention of a rank: its name, and Transformer Engine's ``AttentionParams`` for it.

    Source of the names: transformer_engine 2.12.0, ``AttentionParams``; of the values: megatron-core 0.19.2,
    ``TEDotProductAttention``, and this actor's packs.
    """
    content = hf.content
    fields = transformer_fields(FAMILIES[hf.model_type], hf)
    tp = config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    size = content.get("head_dim") or hf.hidden_size // heads
    if content.get("kv_lora_rank") is not None:  # latent attention: every head has its own keys
        groups = heads
        # Megatron pads the values of packed sequences to this size
        size = content["qk_nope_head_dim"] + content["qk_rope_head_dim"]
    longest = config.trainer.max_tokens_per_gpu * cp
    shape = dict(
        qkv_layout="thd_thd_thd",
        num_heads=heads // tp,
        num_gqa_groups=max(1, groups // tp),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        head_dim_qk=size,
        head_dim_v=size,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        bottom_right_diagonal=False,
        context_parallel=cp > 1,
        cp_comm_type=_way_of_context_ranks(config),
        softmax_type=fields.get("softmax_type", "vanilla"),
        is_training=True,
    )
    if "window_size" not in fields:
        yield "attention", shape
        return
    has_window = fields["window_attn_skip_freq"]  # of every layer, 1 or 0
    if 0 in has_window:
        yield "full attention", shape
    if 1 in has_window:
        yield "sliding attention", shape | {"window_size": fields["window_size"]}


def _way_of_context_ranks(config: RunConfig) -> Any:
    given = config.model.transformer_overrides.get("cp_comm_type", "p2p")
    return given[0] if isinstance(given, list) and given else given  # one for each layer


def _kernel(utils: Any, shape: Mapping[str, Any], backend: str, *, bf16: bool) -> str | None:
    """Return the kernel that Transformer Engine chooses, or None; backend: ours, which may name one."""
    import torch

    dtype = torch.bfloat16 if bf16 else torch.float32
    params = utils.AttentionParams(qkv_dtype=dtype, **shape)
    flash, _, fused, _, unfused, available = utils.get_attention_backend(params)
    if backend in TE_KERNELS:
        return backend if available[TE_KERNELS.index(backend)] else None
    chosen = {"flash": flash, "fused": fused, "unfused": unfused}
    return next((name for name, is_chosen in chosen.items() if is_chosen), None)


def check_warm_up(
    num_gpus: int,
    num_nodes: int,
    version_of: Callable[[str], str | None],
    environ: Mapping[str, str],
) -> Findings:
    """Kernels that the first server compiles, into a folder of the user that several nodes may share."""
    if not num_gpus or any(version_of(name) for name in _COMPILED):
        return
    base = environ.get(CACHE_BASE) or environ.get("HOME", "~")
    text = (
        f"flashinfer has no compiled kernels here ({' or '.join(_COMPILED)}): the first server compiles them"
        f" for minutes, into {base}/.cache/flashinfer"
    )
    if num_nodes == 1 or CACHE_BASE in environ:
        yield fact("flashinfer", text)
        return
    yield warning(
        "flashinfer",
        f"{text}. Nodes that share that folder compile into it at once: locks of a network file system fail, or a"
        " kernel is read half-written",
        f"export {CACHE_BASE}, TRITON_CACHE_DIR and SGLANG_CACHE_DIR as folders of the node's own disk, as /tmp/$USER",
    )


def check_tuned_experts(
    config: RunConfig, hf: HfModelFacts, card: str | None, environ: Mapping[str, str]
) -> Findings:
    """Blocks of SGLang's Triton kernel that were tuned for a server's experts on ``card``, of any Triton version.

    Without them SGLang takes blocks of a rule of thumb, and its log alone says so.  Silent where no card is known, for
    servers elsewhere whose size the configuration does not tell, and for other kernels.
    """
    experts = None if card is None else server_experts(config, hf)
    sglang = find_spec("sglang")
    if experts is None or sglang is None:
        return
    name = "E={},N={},device_name={}.json".format(*experts, card.replace(" ", "_"))
    tables = Path(sglang.origin).parent / "srt/layers/moe/moe_runner/triton_utils"
    files = sorted(Path(environ.get(_TUNED, tables)).glob(f"configs/triton_*/{name}"))
    if files:
        yield ok("tuned experts", f"{name}, {', '.join(file.parent.name for file in files)}")
        return
    text = f"SGLang has no {name}: its kernel of experts runs in blocks that nobody tuned for them"
    remedy = f"tune them once, and export {_TUNED} (r3train docs gpus: Tuned MoE kernels)"
    yield warning("tuned experts", text, remedy)


def server_experts(config: RunConfig, hf: HfModelFacts) -> tuple[int, int] | None:
    """Return the experts that a server's GPU holds, and their columns there; None if not told, or not Triton's.

    Source: SGLang 0.5.23, ``try_get_optimal_moe_config``, ``shared_experts_fusion_disable_reason``.
    """
    fields = server_fields(config.rollout.sglang)
    default = "triton" if config.replay.use_rollout_routing_replay else "auto"
    is_other_kernel = (
        fields.get("moe_runner_backend", default) != "triton" or "moe_a2a_backend" in fields
    )
    is_elsewhere = config.rollout.has_external_servers and "tp_size" not in fields
    is_served = config.has_engines and hf.is_moe and hf.model_type in FAMILIES
    if not is_served or is_elsewhere or is_other_kernel:
        return None
    tp, ep = (max(1, int(fields.get(name, 1))) for name in ("tp_size", "ep_size"))
    shared = hf.content.get("n_shared_experts", 1)
    is_fused = hf.model_type in _FUSED_SHARED and shared == ep == 1
    fused = int(is_fused and not fields.get("disable_shared_experts_fusion"))
    return hf.num_experts // ep + fused, weights_of(hf).sizes["expert"] * ep // tp
