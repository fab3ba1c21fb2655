"""The platform class; a module of its own because importing it imports SGLang."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from r3train.cpu import memory_saver
from r3train.patches import note, patch
from r3train.families import FAMILIES
from r3train.families.gpt_oss import attention_with_sinks


def _alloc_host(
    dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None
):  # noqa: ANN001 - SGLang's own call signature
    return allocator.allocate(dims, dtype=dtype, device=device)


def _allow_latent_attention() -> None:
    """Serve multi-head latent attention (DeepSeek, Kimi, Moonlight, GLM-4.7-Flash) by torch_native.

    Prefill and decode both go through the absorbed form, one latent head in the cache: SGLang would
    give an unknown backend whole keys, and torch_native reads the cache.  Its positions on a CPU
    know DeepSeek's yarn only, so they come from the general factory.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    note(
        "SGLang's latent attention by torch_native", "it would get whole keys, and reads the cache"
    )
    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)

    def get_rope_cpu(*arguments):  # noqa: ANN002 - SGLang's own call signature, the device last
        return factory.get_rope(*arguments[:8])

    expects = (
        "(head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, dtype=None,"
        " partial_rotary_factor=1.0, device=None)"
    )
    why = "on a CPU it knows DeepSeek's yarn only"
    patch(factory, "get_rope_cpu", get_rope_cpu, expects=expects, why=why)


def _torch_native(runner: Any) -> Any:
    """Make SGLang's attention, after the model and before its first forward.

    It puts in the families' twins of what models compile: to import these earlier would run in a circle, as the
    platform is made while SGLang's runner is being imported.
    """
    # as the docstring says
    from r3train.cpu.batched_attention import BatchedAttention
    from r3train.cpu.sglang_sparse_attention import SparseAttention

    memory_saver.runner = runner
    serve_families()
    is_sparse = getattr(runner.model_config.hf_config, "index_topk", None) is not None
    return SparseAttention(runner) if is_sparse else BatchedAttention(runner)


def serve_families() -> None:
    """Put in every family's plain twins of what SGLang compiles: ``serve_on_cpu`` in its file, and sparse attention."""
    # it imports models of SGLang
    from r3train.cpu.sglang_sparse_attention import serve_sparse_attention

    serve_sparse_attention()
    for name in FAMILIES:
        family = import_module(f"r3train.families.{name}")
        if hasattr(family, "serve_on_cpu"):
            family.serve_on_cpu()


def _with_sinks(runner: Any) -> Any:
    """Make an attention with sinks in triton's name: SGLang serves gpt-oss by backends of a list only."""
    memory_saver.runner = runner
    return attention_with_sinks(runner)


class TorchCpuPlatform(CpuSRTPlatform):
    """A platform with torch's native attention; no compiled kernels, triton or graph capture."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Give the host buffer of routed experts plain memory, and attention a plain twin.

        SGLang looks the allocator up by device name; its default pins memory through CUDA.
        The attention's factory replaces what models compile, once they are imported.
        """
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        # they import layers of SGLang
        from r3train.cpu.sglang_fp8 import serve_fp8_blocks
        from r3train.cpu.sglang_lora import serve_adapters

        note("SGLang's memory for hosts", "its own pins memory through CUDA")
        ALLOC_MEMORY_FUNCS["cpu"] = _alloc_host
        for name, make in (("torch_native", _torch_native), ("triton", _with_sinks)):
            note(f"SGLang's attention {name}", "it loops over requests, or is a triton kernel")
            register_attention_backend(name)(make)
        _allow_latent_attention()
        serve_fp8_blocks()
        # this is called in the middle of imports, and before SGLang's own settings can be asked for
        if "--enable-lora" in sys.argv:
            serve_adapters()
