"""The platform class; a module of its own because importing it imports SGLang."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


def _alloc_host(
    dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None
):  # noqa: ANN001 - SGLang's own call signature
    return allocator.allocate(dims, dtype=dtype, device=device)


class TorchCpuPlatform(CpuSRTPlatform):
    """A platform with torch's native attention; no compiled kernels, triton or graph capture."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Give the host buffer of routed experts plain memory.

        SGLang looks the allocator up by device name; its default pins memory through CUDA.
        """
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = _alloc_host
