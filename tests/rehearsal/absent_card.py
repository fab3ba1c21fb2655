"""A card that is not there: Triton compiles for it with its own ptxas, and launches nothing.

Triton's own code does the rest: it refuses a kernel that asks for more shared memory than the card has, and its
autotuner drops such candidates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, jit

from tests.rehearsal.gpu_servers import CARDS, believe_in

# bytes of shared memory that a block may have, of Hopper and of data-centre Blackwell
SHARED_BYTES = 232448
# candidates of a kernel that is tuned, evenly chosen
_MOST_CANDIDATES = 3


class AbsentCard:
    """Triton's driver of a card; ``builds``: shared memory in bytes of each kernel that was compiled, by name."""

    def __init__(self, card: str):
        major, minor = CARDS[card].capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        self.utils = self
        self.builds: dict[str, list[int]] = {}
        self.failures: dict[str, str] = {}
        self._is_tuning = False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_a, **_k: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Note the build; returns a module, a function, registers, spills and the most threads."""
        assert cubin[:4] == b"\x7fELF", name
        self.builds.setdefault(name, []).append(shared)
        return None, None, 0, 0, 1024

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what Triton's autotuner calls with each candidate."""

        def compile_it(call: Callable[[], Any], quantiles: Any) -> list[float]:
            self._is_tuning = True
            try:
                call()
            finally:
                self._is_tuning = False
            return [0.0, 0.0, 0.0]

        return compile_it

    def _tried(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Note a kernel that fails and go on: what calls it gets no value either way."""

        def tried(function: jit.JITFunction, *args: Any, **kwargs: Any) -> Any:
            try:
                return run(function, *args, **kwargs)
            except Exception as error:
                if self._is_tuning:
                    raise  # Triton's autotuner takes another candidate
                self.failures[function.__name__] = f"{type(error).__name__}: {error}"[:2000]

        return tried


def put_in(card: str) -> AbsentCard:
    """Make torch and Triton believe in a card of ``CARDS``; before packages of kernels are imported."""
    believe_in(CARDS[card])
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    absent = AbsentCard(card)
    driver.set_active(absent)
    jit.JITFunction.run = absent._tried(jit.JITFunction.run)
    prune = autotuner.Autotuner.prune_configs

    def fewer(tuner: Any, kwargs: Any) -> list[Any]:
        found = prune(tuner, kwargs)
        return found[:: -(-len(found) // _MOST_CANDIDATES)]

    autotuner.Autotuner.prune_configs = fewer
    return absent
