"""The disk transport: a checkpoint of each version, which every server loads by itself.

It needs a directory that the trainer and all servers see under the same path.  So does the check of
any transport against it.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from r3train.families import has_fused_experts
from r3train.engine.control import EngineControl
from r3train.engine.publish import Published, WeightPublisher
from r3train.hf_checkpoint import (
    NamedTensors,
    copy_all_but_weights,
    read_headers,
    replaced_directory,
    write_shards,
)

_VERSION_DIR = re.compile(r"v\d{6,}")


class DiskPublisher(WeightPublisher):
    """Write ``directory/v<version>`` atomically and let every server load it.

    Configuration and tokenizer files come from ``hf_checkpoint``.  Only the newest version stays,
    in ``newest``, also after the end of the run.
    """

    def __init__(
        self,
        engine: EngineControl,
        *,
        directory: str | Path,
        hf_checkpoint: str | Path,
        bucket_bytes: int,
        flush_cache: bool = True,
    ) -> None:
        self._engine = engine
        self._directory = Path(directory).resolve()
        self._hf_checkpoint = Path(hf_checkpoint)
        self._bucket_bytes = bucket_bytes
        self._flush_cache = flush_cache
        self.newest: Path | None = None
        self._version: int | None = None  # of it, once servers hold it
        self._given: list[Path] = []  # which servers that join load now

    def give(self, server: int) -> int | None:
        """Let a server that joins load the newest version; an update may come meanwhile, and leaves it there."""
        version, directory = self._version, self.newest
        if version is not None:
            self._given.append(directory)
            try:
                self._engine.update_weights_from_disk(
                    str(directory), weight_version=version, server=server
                )
            finally:
                self._given.remove(directory)
        return version

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Write one version, let every server load it, and remove the older ones.

        Raises EngineError from the engine and ValueError for a fused expert name or no tensor.
        """
        began = time.monotonic()
        self._version = None
        final = self.newest = self._directory / f"v{version:06d}"
        with replaced_directory(final) as partial:  # a reader sees a whole checkpoint or none
            copy_all_but_weights(self._hf_checkpoint, partial)
            _, num_bytes, num_shards = write_shards(
                named_tensors,
                partial,
                shard_bytes=self._bucket_bytes,
                fused_experts=has_fused_experts(self._hf_checkpoint),
            )
        self._engine.update_weights_from_disk(
            str(final), weight_version=version, flush_cache=self._flush_cache
        )
        self._version = version
        for path in self._directory.iterdir():
            if path not in (final, *self._given) and _VERSION_DIR.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        seconds = time.monotonic() - began
        return Published(version, read_headers(final), num_bytes, num_shards, seconds)


@dataclass(frozen=True)
class Comparison:
    """Servers' tensors against a checkpoint.

    checkpoint: its directory; sent: its tensors.  held: tensors of each server, by its number; unlike: those of them that
    were others.
    """

    checkpoint: Path
    sent: int
    held: dict[int, int]
    unlike: dict[int, list[str]]

    def require_equal(self, version: int) -> None:
        """Raise AssertionError naming a server and its tensors."""
        for server, wrong in self.unlike.items():
            if wrong:
                more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
                raise AssertionError(
                    f"weight update {version}: {len(wrong)} of {self.held[server]} tensors of engine "
                    f"{server} are not the actor's: {', '.join(wrong[:4])}{more}"
                )


def compare_on_servers(
    engine: EngineControl, reference: DiskPublisher, named_tensors: NamedTensors, *, version: int
) -> Comparison:
    """Hold every server's tensors against those that it loads from a checkpoint of these tensors, or of some.

    A server keeps names and layouts of its own (q, k and v in one tensor, experts in one, a share a
    rank, perhaps shuffled for a kernel), so it is compared with itself: checksums of what it holds
    after ``version`` was published, and after it has read the same version from disk with the loader
    that starts it.  It holds the right ones by then.
    """
    published = engine.weight_checksums()
    sent = reference.publish(named_tensors, version=version).num_tensors
    loaded = engine.weight_checksums()
    held = {server: len(expected) for server, expected in loaded.items()}
    unlike = {
        server: [
            name for name, checksum in expected.items() if published[server].get(name) != checksum
        ]
        for server, expected in loaded.items()
    }
    return Comparison(reference.newest, sent, held, unlike)
