"""The platform class; a module of its own because importing it imports SGLang."""

from __future__ import annotations

import sys

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


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

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)

    def get_rope_cpu(*arguments):  # noqa: ANN002 - SGLang's own call signature, the device last
        return factory.get_rope(*arguments[:8])

    factory.get_rope_cpu = get_rope_cpu


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

        from r3train.cpu.sglang_lora import serve_adapters
        from r3train.cpu.sglang_models import sinks_backend, torch_native_backend

        ALLOC_MEMORY_FUNCS["cpu"] = _alloc_host
        register_attention_backend("torch_native")(torch_native_backend)
        register_attention_backend("triton")(sinks_backend)
        _allow_latent_attention()
        # this is called in the middle of imports, and before SGLang's own settings can be asked for
        if "--enable-lora" in sys.argv:
            serve_adapters()
