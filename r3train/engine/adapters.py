"""Weight versions as adapters, side by side on servers whose base never changes (--lora-serving adapter).

A request names the adapter of its version and ends on it, whatever is loaded meanwhile.  SGLang samples
the base, silently, for a request without a name, and loads an unloaded adapter again for one that comes
late: ``SGLangHTTP`` sends none of the first kind, and ``Adapters`` lets none of the second be sent.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from r3train.families.hf_facts import HfModelFacts
from r3train.config.lora_settings import LoraSection, linear_of
from r3train.families import tensor_names
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.publish import Published, WeightPublisher
from r3train.hf_checkpoint import NamedTensors, read_header
from r3train.peft_files import TENSORS, packed_name, write_adapter


def adapter_name(version: int) -> str:
    """The name of a weight version's adapter, on servers and in the directory of versions."""
    return f"v{version:06d}"


def adapter_flags(
    settings: LoraSection, hf: HfModelFacts, max_weight_staleness: int
) -> dict[str, object]:
    """Return SGLang's flags for a server of our own that gets adapters of these settings.

    A batch may mix all versions that may still be in use, the newest, and the base, which ``/health``
    samples.
    """
    targets = settings.targets(tensor_names(hf))
    return {
        "enable_lora": True,
        "max_lora_rank": settings.lora_rank,
        "lora_target_modules": sorted({packed_name(linear_of(name)) for name in targets}),
        "max_loras_per_batch": max_weight_staleness + 2,
        # an adapter of a shared expert that is fused into the routed ones would be skipped
        "disable_shared_experts_fusion": True,
    }


class Adapters:
    """The versions that the servers hold, and the requests that use each; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[int, int] = {}  # version -> requests, of the versions that are loaded

    def loaded(self, version: int) -> None:
        """Note that every server holds the adapter of a version."""
        with self._lock:
            self._uses.setdefault(version, 0)

    @property
    def versions(self) -> list[int]:
        """The loaded versions, the oldest first."""
        with self._lock:
            return sorted(self._uses)

    @property
    def newest(self) -> int:
        """The newest loaded version."""
        return self.versions[-1]

    @contextmanager
    def using(self, version: int | None) -> Iterator[None]:
        """Keep a version loaded inside the context; raises EngineError if it is not, or is None."""
        with self._lock:
            if version not in self._uses:
                raise EngineError(
                    f"weight version {version} is not loaded: {sorted(self._uses)} are"
                )
            self._uses[version] += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses[version] -= 1

    def retire(self, oldest: int) -> list[int]:
        """Take out the versions before ``oldest`` that no request uses, for good; returns them."""
        with self._lock:
            retired = [v for v, uses in self._uses.items() if v < oldest and not uses]
            for version in retired:
                del self._uses[version]
        return retired


class AdapterPublisher(WeightPublisher):
    """Write ``directory/v<version>`` and load it on every server, while they go on generating.

    A version that is more than ``max_weight_staleness`` older than the newest is unloaded at the first
    update that finds no request on it, and its directory deleted.  After a restart of the servers the
    next update loads all versions that were in use.  The directory must be one that all servers see; the
    loaded versions stay there after the end of the run.
    """

    def __init__(
        self,
        engine: EngineControl,
        adapters: Adapters,
        *,
        directory: str | Path,
        settings: LoraSection,
        hf: HfModelFacts,
        max_weight_staleness: int,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._directory = Path(directory).resolve()
        self._settings = settings
        self._hf = hf
        self._staleness = max_weight_staleness
        self._restarted = False
        shutil.rmtree(self._directory, ignore_errors=True)  # of an earlier start of this run
        self._directory.mkdir(parents=True)

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Write, load and announce one version; named_tensors are factors as ``write_adapter`` takes them.

        Raises EngineError from the engine.
        """
        began = time.monotonic()
        final = self._directory / adapter_name(version)
        write_adapter(named_tensors, final, self._settings, self._hf, packed=True)
        if self._restarted:
            for older in self._adapters.versions:
                if older != version:
                    self._load(older)
            self._restarted = False
        self._load(version)
        self._adapters.loaded(version)
        self._engine.members.record(version)
        for old in self._adapters.retire(version - self._staleness):
            self._engine.unload_adapter(adapter_name(old))
        loaded_names = {adapter_name(loaded) for loaded in self._adapters.versions}
        for path in self._directory.iterdir():
            if path.name not in loaded_names:  # or a server was lost before it had unloaded it
                shutil.rmtree(path, ignore_errors=True)
        sent = read_header(final / TENSORS)
        num_bytes = sum(kind.num_bytes for kind in sent.values())
        return Published(version, sent, num_bytes, 1, time.monotonic() - began)

    def _load(self, version: int) -> None:
        name = adapter_name(version)
        self._engine.load_adapter(name, str(self._directory / name))

    def reconnect(self) -> None:
        """Note that the servers were started again, without an adapter."""
        self._restarted = True
