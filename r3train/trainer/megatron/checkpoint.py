"""Checkpoints of the actor in Megatron's torch_dist format.

A checkpoint is written to ``DIR/iter_NNNNNNN.tmp`` and renamed when every rank is done.  Then
``DIR/latest_checkpointed_iteration.txt`` is set to it.  A crash or a full disk leaves the previous
checkpoint whole.  A checkpoint of the same name, from an earlier run, is ``iter_NNNNNNN.old``
meanwhile, and is found there.  N is the id of the next rollout to train.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from r3train.checksums import checksums
from r3train.config.checkpoint_settings import CheckpointSection
from r3train.config.files import free_bytes_if_full, require_regular
from r3train.host_group import host_barrier, rank_zero_alone
from r3train.patches import patch
from r3train.trainer.megatron import lora, rng
from r3train.trainer.megatron.actor import MegatronActor
from r3train.trainer.megatron.checked_files import check_together
from r3train.trainer.megatron.optimizer_state import METADATA, OptimizerState, changed_settings
from r3train.trainer.megatron.saved_state import (
    BUFFER,
    CHECKSUMS,
    LATEST,
    SAVE_DIR,
    STATE,
    checkpoints,
    name_aside,
    read_checksums,
    read_state,
)
from r3train.trainer.megatron.write_results import WriteResults

logger = logging.getLogger(__name__)

_TENSORS = "optimizer_tensors"
_ADAPTERS = "adapters"
# torch's own switch; it wins over the caller's weights_only
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

# all that torch writes into .metadata, next to dtypes
_PLANS = {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
_DESCRIPTIONS = {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"}
_DESCRIPTIONS |= {
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": _DESCRIPTIONS,
    "torch.distributed.checkpoint.planner": _PLANS,
}

# writes further files into the checkpoint's directory, on rank 0
WriteExtra = Callable[[Path], None]


# torch's CheckpointException is not an Exception
_FAILURES = (Exception, CheckpointException)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the previous one is intact."""


def model_state(actor: MegatronActor) -> dict[str, Any]:
    """The model's sharded state; with LoRA that of the adapters only, for the base never changes."""
    if actor.lora.enabled:
        return {_ADAPTERS: lora.sharded_state(actor.model.chunks)}
    chunks = actor.model.unwrapped
    return {
        _model_key(i, len(chunks)): {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=dict(METADATA)).items()
            if not _is_extra(name)
        }
        for i, chunk in enumerate(chunks)
    }


def _is_extra(name: str) -> bool:
    """Return whether it is a layer's extra state.  It is empty without FP8, and on a CPU other layers have one."""
    return "_extra_state" in name


def whole_state(actor: MegatronActor) -> dict[str, Any]:
    """State of model, optimizer and schedule, by the names of a checkpoint."""
    state = model_state(actor)
    optimizer = OptimizerState(actor.optimizer, state, is_loading=False)
    return state | {
        _TENSORS: optimizer.tensors,
        "optimizer": optimizer.facts(),
        "scheduler": actor.scheduler.state_dict(),
    }


def _model_key(i: int, count: int) -> str:
    return "model" if count == 1 else f"model{i}"


class Checkpointer:
    """Writer of one actor's checkpoints; every method is a collective.

    With async_save, ``save`` returns once a forked process has a copy of the state.  The files become
    a checkpoint at a later ``poll`` or ``finish``.  save_keep_last removes older checkpoints; those
    with more rollouts belong to another run and stay.
    resumed_at: the first rollout of this run, if the directory holds the checkpoint it began with.
    """

    def __init__(
        self,
        actor: MegatronActor,
        settings: CheckpointSection,
        *,
        resumed_at: int | None = None,
    ):
        assert settings.save is not None
        self._actor = actor
        self._settings = settings
        self._directory = settings.save
        results = WriteResults()
        why = "it starts a process at every rank's first save, which outlives a killed rank"
        patch(
            filesystem_async,
            "get_write_results_queue",
            lambda mp_mode="spawn": results,
            expects="(mp_mode='spawn')",
            why=why,
        )
        # the persistent caller hung with gloo (megatron-core 0.16.1); the forking one does not
        self._queue = AsyncCallsQueue(persistent=False)
        self._writing: Path | None = None
        self._last = resumed_at

    def save(
        self, next_rollout_id: int, facts: dict[str, Any], write_extra: WriteExtra | None = None
    ) -> None:
        """Save model, optimizer, scheduler and RNG of every rank before ``next_rollout_id``.

        facts: JSON values for ``read_state``.  If this checkpoint exists already, only its extra files
        are written again: more rollouts have been generated since.  Raises CheckpointError with the
        cause when it cannot be written.
        """
        self.finish()
        final = self._directory / f"iter_{next_rollout_id:07d}"
        if self._last == next_rollout_id:
            # it may read the routes of samples from the other ranks' stores
            with rank_zero_alone():
                if dist.get_rank() == 0 and write_extra is not None:
                    self._renew(final, write_extra)
            return
        temporary = final.with_suffix(".tmp")
        self._writing = temporary
        try:
            with rank_zero_alone():
                if dist.get_rank() == 0:
                    remove_checkpoint(temporary)
                    temporary.mkdir(parents=True)
                    write_state(temporary, next_rollout_id, self._actor, facts)
                    if write_extra is not None:
                        write_extra(temporary)
            rng.save(temporary, dist.get_rank())
            self._actor.gather_parameters()
            request = dist_checkpointing.save(
                whole_state(self._actor),
                str(temporary),
                async_sharded_save=self._settings.async_save,
                async_strategy="mcore",  # the other one is of a package for CUDA
            )
            if request is None:
                _sum_local(temporary, dist.get_rank())
        except _FAILURES as error:
            raise self._failure(error) from error
        self._last = next_rollout_id
        if request is None:
            try:
                self._switch(final)
            except OSError as error:
                raise self._failure(error) from error
        else:
            # read back by the process that has written them: training goes on meanwhile
            write = partial(_write_and_sum, request.async_fn, temporary, dist.get_rank())
            request = request._replace(async_fn=write)
            request.add_finalize_fn(lambda: self._switch(final))
            self._queue.schedule_async_request(request)

    def _renew(self, final: Path, write_extra: WriteExtra) -> None:
        """Write the extra files of a whole checkpoint again; each is replaced in one step."""
        try:
            write_extra(final)
        except OSError as error:
            raise CheckpointError(
                f"{final}: cannot write its samples again: {_cause(error)}; {self._what_is_left()},"
                " without the samples completed since it was saved"
            ) from error

    def poll(self) -> None:
        """Finish the checkpoint whose files are complete by now, if any."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        self._finalize(blocking=True)

    def _finalize(self, *, blocking: bool) -> None:
        if self._writing is None:
            return
        try:
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        except _FAILURES as error:
            raise self._failure(error) from error

    def _switch(self, final: Path) -> None:
        """End a save: rename the checkpoint, set the pointer, remove old ones."""
        host_barrier()
        if dist.get_rank() == 0:
            assert self._writing is not None
            write_checksums(self._writing)
            _sync_tree(self._writing)
            _put_in_place(self._writing, final)
            keep_last = self._settings.save_keep_last
            if keep_last is not None:
                upto = [p for p in checkpoints(self._directory) if p.name <= final.name]
                for old in upto[:-keep_last]:
                    remove_checkpoint(old)
        self._writing = None
        host_barrier()

    def _failure(self, error: BaseException) -> CheckpointError:
        """Remove the failed checkpoint; returns the error, which names the one that is left."""
        failed, self._writing = self._writing, None
        is_full = free_bytes_if_full(self._directory) is not None  # before the failed one goes
        cause = f"no space left on {self._directory}: " if is_full else ""
        if dist.get_rank() == 0 and failed is not None:
            remove_checkpoint(failed)
        left = self._what_is_left()
        return CheckpointError(
            f"{failed}: cannot write the checkpoint: {cause}{_cause(error)}; {left}"
        )

    def _what_is_left(self) -> str:
        pointer = self._directory / LATEST
        if not pointer.is_file():
            return "there is no earlier checkpoint"
        rollouts = pointer.read_text(encoding="utf-8").strip()
        return f"the checkpoint after {rollouts} rollouts is intact"


def _cause(error: BaseException) -> str:
    """Describe a failure; torch wraps those of all ranks' writers in one exception."""
    if isinstance(error, CheckpointException):
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
        return "; ".join(failures) or "another rank failed"
    return f"{type(error).__name__}: {error}"


def write_state(
    directory: Path, next_rollout_id: int, actor: MegatronActor, facts: dict[str, Any]
) -> None:
    """Write the facts of a checkpoint that its reader needs before any tensor."""
    state = {
        **facts,
        "num_rollouts": next_rollout_id,
        "weight_version": next_rollout_id,
        "topology": _sizes(actor),
        SAVE_DIR: str(directory.parent.resolve()),
    }
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _sizes(actor: MegatronActor) -> dict[str, int]:
    t = actor.topology
    return {
        "world_size": t.world_size,
        "tensor_model_parallel_size": t.tp_size,
        "pipeline_model_parallel_size": t.pp_size,
        "virtual_pipeline_model_parallel_size": t.vpp_size,
        "context_parallel_size": t.cp_size,
        "expert_model_parallel_size": t.ep_size,
        "expert_tensor_parallel_size": t.etp_size,
    }


def _write_and_sum(
    write: Callable[..., None] | None, directory: Path, rank: int, *arguments: Any, **named: Any
) -> None:
    """Write a rank's tensors, and then their checksums; in the forked process."""
    if write is not None:
        write(*arguments, **named)  # reports an error of its own by the queue of results
    with suppress(OSError):  # rank 0 sums what has no checksum, and says what it cannot read
        _sum_local(directory, rank)


def _part_file(directory: Path, rank: int) -> Path:
    return directory / f"checksums_{rank:05d}.part"


def _sum_local(directory: Path, rank: int) -> None:
    """Write the checksums of the files that this rank has written."""
    names = [p.name for p in directory.glob(f"__{rank}_*.distcp")]
    names += [p.name for p in [rng.path_of(directory, rank)] if p.exists()]
    _part_file(directory, rank).write_bytes(json.dumps(checksums(directory, names)).encode())


def write_checksums(directory: Path) -> None:
    """Write the checksums of a whole checkpoint, those of each rank's files as it has made them."""
    files: dict[str, dict[str, int]] = {}
    for part in directory.glob(_part_file(directory, 0).name.replace("00000", "*")):
        files |= json.loads(part.read_bytes())
        part.unlink()
    names = {path.name for path in directory.iterdir() if path.is_file()}
    # samples are replaced later, and their file has a checksum of its own
    files |= checksums(directory, names - files.keys() - {BUFFER})
    text = json.dumps({"files": dict(sorted(files.items()))}, indent=1) + "\n"
    (directory / CHECKSUMS).write_text(text, encoding="utf-8")


def check_files(checkpoint: Path) -> None:
    """Raise ValueError naming a file of a checkpoint that is not what was saved; a collective.

    Each rank reads its share.  A checkpoint without checksums, of before there were any, passes with a note.
    """
    for path in checkpoint.iterdir():
        try:
            if not path.is_dir():
                require_regular(path, follow=True)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
    sums = read_checksums(checkpoint)
    if sums is not None:
        check_together(checkpoint, sums, checkpoint / CHECKSUMS)
    elif dist.get_rank() == 0:
        logger.warning(
            "%s: has no %s, so a damaged file of it may not be noticed", checkpoint, CHECKSUMS
        )


def _put_in_place(written: Path, final: Path) -> None:
    """Give a whole checkpoint its name and set the pointer; a run can resume at any moment."""
    aside = name_aside(final)
    if final.exists():
        remove_checkpoint(aside)
        final.rename(aside)
    written.rename(final)
    _sync_directory(final.parent)  # a power cut must not leave the pointer without the checkpoint
    _write_pointer(final.parent, final)
    remove_checkpoint(aside)


def _write_pointer(directory: Path, final: Path) -> None:
    pointer = directory / f"{LATEST}.tmp"
    with pointer.open("w", encoding="utf-8") as file:
        file.write(f"{int(final.name.removeprefix('iter_'))}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer, directory / LATEST)
    _sync_directory(directory)


def _sync_tree(path: Path) -> None:
    """Flush the files to disk, before the pointer is."""
    for child in [path, *path.rglob("*")]:
        handle = os.open(child, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_checkpoint(path: Path) -> None:
    """Delete a directory that an interrupted, failed or repeated save left behind."""
    shutil.rmtree(path, ignore_errors=not path.exists())


class _MetadataReader(pickle.Unpickler):
    """Refuses every name that torch does not write there: a pickle can call what it names."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_metadata(checkpoint: Path) -> None:
    """Raise ValueError if torch would run anything but its own descriptions to read ``.metadata``, or for a hole.

    That file is a pickle, which torch opens without limits.  Of a tensor whose chunks do not cover it torch would
    leave the rest as it is.
    """
    path = checkpoint / ".metadata"
    try:
        with path.open("rb") as file:
            tensors = _MetadataReader(file).load().state_dict_metadata
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{path}: refused: {_cause(error)}") from None
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorStorageMetadata):
            there = sum({c.offsets: c.sizes.numel() for c in tensor.chunks}.values())
            if there != tensor.size.numel():
                raise ValueError(
                    f"{path}: of {name} {there} numbers are there, expected {tensor.size.numel()}"
                )


@contextmanager
def no_code_from_files() -> Iterator[None]:
    """Have every torch.load take tensors and plain values only, whatever its caller asks for.

    Values of a checkpoint that are no tensors are pickles in its ``.distcp`` files, and torch's planner
    opens them with ``weights_only=False``.
    """
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


def load_checkpoint(actor: MegatronActor, checkpoint: Path, *, model_only: bool = False) -> None:
    """Load a checkpoint into the actor; a collective.

    model_only: leave optimizer, schedule and RNG as they are; the topology may differ.
    Learning rate, weight decay and their schedule are the configuration's, at the checkpoint's step;
    a warning names those that differ from the checkpoint's.
    Raises ValueError if another optimizer saved it, if a file is not what was saved, and if one could run
    code.
    """
    check_files(checkpoint)
    check_metadata(checkpoint)
    topology = read_state(checkpoint)["topology"]
    wanted, optimizer = model_state(actor), None
    if not model_only:
        optimizer = OptimizerState(actor.optimizer, wanted, is_loading=True)
        optimizer.match(checkpoint)
        wanted[_TENSORS] = optimizer.tensors
    try:
        with no_code_from_files():
            state = dist_checkpointing.load(wanted, str(checkpoint))
    except CheckpointException as error:
        cause = _cause(error).split("WeightsUnpickler error: ")[-1].partition("\n")[0]
        raise ValueError(f"{checkpoint}: cannot be loaded: {cause}") from error
    chunks = actor.model.unwrapped
    if actor.lora.enabled:
        lora.load_state(chunks, state[_ADAPTERS])
    else:
        for i, chunk in enumerate(chunks):
            other = chunk.load_state_dict(state[_model_key(i, len(chunks))], strict=False)
            missing = [name for name in other.missing_keys if not _is_extra(name)]
            assert not missing and not other.unexpected_keys, (checkpoint, missing, other)
    if optimizer is None:
        actor.optimizer.reload_model_params()
        return
    changed = changed_settings(actor.scheduler, state)
    if changed and dist.get_rank() == 0:
        logger.warning("%s: resumed with other settings: %s", checkpoint, "; ".join(changed))
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizer.restore(state.get(_TENSORS, {}), state["optimizer"], parameters)
    actor.scheduler.load_state_dict(state["scheduler"])
    fits = topology == _sizes(actor)
    if not (fits and rng.load(checkpoint, dist.get_rank())) and dist.get_rank() == 0:
        logger.warning(
            "%s: saved %s: the random state of its ranks fits none of these, and begins from the seed",
            checkpoint,
            "on another kind of device" if fits else "in another topology",
        )
    host_barrier()
