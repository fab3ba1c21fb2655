"""SGLang's memory saver for a CPU: released weights and KV cache go back to the system (--colocate).

torch_memory_saver, which SGLang uses, is for CUDA: it unmaps physical memory and leaves the addresses.
``launch_server`` gives SGLang this module in its place, which does the same by madvise, page by page.  What
is resumed holds NaNs, as undefined as a GPU's memory: whoever generates before the weights are published
sees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Iterator
from typing import Any

import psutil
import torch

logger = logging.getLogger(__name__)

# SGLang's model runner of this process, from the attention backend that it asks for
runner: Any = None

_DONTNEED = 4  # <sys/mman.h>


class CpuMemorySaver:
    """Answer SGLang's adapter in torch_memory_saver's place; tags are SGLang's, ``weights`` and ``kv_cache``."""

    enabled = True

    def region(self, **_: object) -> contextlib.AbstractContextManager[None]:
        """Note nothing: ``runner`` knows what there is."""
        return contextlib.nullcontext()

    cuda_graph = disable = region

    def pause(self, tag: str) -> None:
        """Give the tag's memory back to the system; its addresses stay."""
        before = _resident()
        for storage in _storages(tag):
            _release(storage)
        _log("released", tag, before)

    def resume(self, tag: str) -> None:
        """Take memory for the tag again, full of NaNs (0xff in every byte)."""
        before = _resident()
        for storage in _storages(tag):
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        _log("resumed", tag, before)


torch_memory_saver = CpuMemorySaver()
configure_subprocess = contextlib.nullcontext


def _log(done: str, tag: str, before: int) -> None:
    now = _resident()
    logger.info(f"memory saver: {done} {tag}, {before} to {now} bytes resident")


def _resident() -> int:
    return psutil.Process().memory_info().rss


def _storages(tag: str) -> list[torch.UntypedStorage]:
    """The storages of a tag, each once."""
    if tag == "weights":
        tensors = [*runner.model.parameters(), *runner.model.buffers()]
    elif tag == "kv_cache":
        tensors = list(_tensors_in(runner.token_to_kv_pool))
    else:  # graphs, which a CPU does not have
        tensors = []
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return list(found.values())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a KV pool, of the pools that it is made of, and of their lists."""
    if isinstance(value, torch.Tensor):
        # others are addresses and places, which SGLang does not release
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
    elif type(value).__name__.endswith(("Pool", "Cache")) and hasattr(value, "__dict__"):
        yield from _tensors_in(list(vars(value).values()))


def _release(storage: torch.UntypedStorage) -> None:
    """Give the whole pages inside a storage back; the rest of it is overwritten."""
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise failed")
