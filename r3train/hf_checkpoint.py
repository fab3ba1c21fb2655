"""Hugging Face checkpoints: what their headers say, and shards, index and exports as we write them.

Tensors have the names of a checkpoint on disk, one tensor per expert.  SGLang accepts transformers'
fused in-memory expert names, answers "Succeeded" and leaves the experts as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from r3train.checksums import Sums, check, checksums, parsed
from r3train.families.hf_facts import HfModelFacts
from r3train.config.files import load_json_object
from r3train.config.lora_settings import LoraSection
from r3train.families import (
    FAMILIES,
    float32_tensors,
    FP8_BLOCK,
    FP8_SCALE,
    has_fused_experts,
    is_of_text_and_images,
    model_type_of,
    quantised_tensors,
    tensor_shapes,
)

if TYPE_CHECKING:  # a dry run reads headers, and torch takes seconds to import
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]

SHARD_BYTES = 5 * 1024**3
MARKER = "r3train_export.json"
# files of an export that no program reads and people edit: they have no checksum
_FOR_PEOPLE = re.compile(r"(?i)(readme|license|notice|\.git).*|.*\.(md|png|jpe?g|gif|svg)")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.|$)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def check_name(name: str, fused_experts: bool = False) -> str:
    """Return ``name``; raises ValueError for a fused expert tensor, which SGLang would ignore.

    fused_experts: the checkpoint's own tensors are fused, and SGLang knows (gpt-oss, Qwen3.5).
    """
    if not fused_experts and _FUSED_EXPERTS.search(name):
        raise ValueError(
            f"weight {name!r} is a fused expert tensor: SGLang answers success and does not load "
            "it; send per-expert names such as mlp.experts.0.gate_proj.weight"
        )
    return name


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape of a tensor, and its dtype as torch names it: ``"float32"``, ``"bfloat16"``, ..."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        import torch

        return self.num_elements * getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Return the kind of a tensor."""
    return TensorKind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


# names of dtypes in safetensors headers; others do not occur among weights that are trained
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TRAINED_DTYPES = tuple(_DTYPES.values())
_DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8", "I8": "int8"}
_DTYPES |= {"I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index where there is one, by name.

    Raises ValueError for a directory without one, a damaged index or a file that is missing.
    """
    index = directory / "model.safetensors.index.json"
    there = {file.name for file in directory.glob("*.safetensors")}
    if not os.path.lexists(index):  # a link to nowhere is there: an incomplete download
        if not there:
            raise ValueError(f"{directory}: no *.safetensors file")
        return [directory / name for name in sorted(there)]
    try:
        wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = sorted(wanted - there)
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{index}: not an index of weights: {type(error).__name__}: {error}"
        raise ValueError(text) from None
    if missing:
        raise ValueError(f"{directory}: {missing[0]} is missing ({len(missing)} of {len(wanted)})")
    return [directory / name for name in sorted(wanted)]


def read_header(file: Path) -> dict[str, TensorKind]:
    """The tensors of one safetensors file by name; no weight is read.

    Raises ValueError naming a file that is cut or cannot be read.
    """
    try:
        with file.open("rb"), safe_open(file, "numpy") as shard:  # open() words its errors
            slices = {name: shard.get_slice(name) for name in shard.keys()}
            return {
                name: TensorKind(
                    tuple(s.get_shape()), _DTYPES.get(s.get_dtype(), s.get_dtype().lower())
                )
                for name, s in slices.items()
            }
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        with open(file, "rb") as stream:
            is_pointer = stream.read(23) == b"version https://git-lfs"
        reason = "a pointer of git-lfs: git lfs pull" if is_pointer else f"cut? {error}"
        raise ValueError(f"{file}: not a whole safetensors file, {reason}") from None


def read_headers(directory: Path) -> dict[str, TensorKind]:
    """All tensors of a checkpoint by name; raises ValueError as ``weight_files`` and ``read_header``."""
    return {
        name: kind for file in weight_files(directory) for name, kind in read_header(file).items()
    }


@cache
def identity(directory: Path) -> str:
    """Return a digest of a checkpoint's config.json and its tensors: names, kinds, first rows.

    It does not depend on the shards.  Training moves all rows of a matrix, so another model of the same
    shape has another digest, and a large checkpoint need not be read whole.
    """
    import torch

    digest = hashlib.sha256((directory / "config.json").read_bytes())
    rows: dict[str, bytes] = {}
    for file in weight_files(directory):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():
                part = shard.get_slice(name)
                kind = f"{part.get_dtype()} {part.get_shape()} "
                row = part[:1].contiguous().view(torch.uint8).numpy().tobytes()
                rows[name] = kind.encode() + row
    for name in sorted(rows):
        digest.update(name.encode() + b" " + rows[name])
    return digest.hexdigest()


def check_tensors(hf: HfModelFacts) -> dict[str, TensorKind]:
    """Return a checkpoint's tensors by name, those that ``is_trained`` leaves out too.

    Raises ValueError for a tensor that the actor would not train, for one that is missing, and for one
    of another shape than config.json has it, or without a fraction.  No weight is read.
    """
    kinds = read_headers(hf.path)
    trained = {name for name in kinds if is_trained(name, hf)}
    shapes = tensor_shapes(hf)
    for wrong, words in (
        (
            trained - shapes.keys(),
            "would be neither loaded nor exported, so the actor is another model",
        ),
        (shapes.keys() - trained, f"missing, and {hf.model_type} with this config.json needs it"),
    ):
        if wrong:
            first = sorted(wrong)[:4]
            more = f" and {len(wrong) - len(first)} more" if len(wrong) > len(first) else ""
            raise ValueError(f"{hf.path}: {', '.join(first)}{more}: {words}")
    unlike = sorted(name for name, shape in shapes.items() if kinds[name].shape != shape)
    if unlike:
        name, more = unlike[0], f" ({len(unlike)} such tensors)" if len(unlike) > 1 else ""
        raise ValueError(
            f"{hf.path}: {name} has the shape {list(kinds[name].shape)}, expected {list(shapes[name])} by"
            f" config.json{more}"
        )
    strange = sorted(name for name in shapes if kinds[name].dtype not in _TRAINED_DTYPES)
    if strange:
        name = strange[0]
        raise ValueError(
            f"{hf.path}: {name} is {kinds[name].dtype}, expected one of {', '.join(_TRAINED_DTYPES)}:"
            " convert the checkpoint first (r3train docs models tells how)"
        )
    return kinds


class WeightIndex:
    """The tensors that every weight update must bring: those of a checkpoint's headers.

    Left out are layers beyond the model's own (multi-token prediction, which no server loads as part
    of the model), a vision tower, a tied output layer and rotary frequencies.  An update may be in the run's
    ``dtype`` or in float32, in which Megatron keeps expert biases; never in a narrower one, but those in
    ``quantised`` come in blocks of fp8.  With LoRA an update after the first brings the adapted tensors only.
    """

    def __init__(
        self,
        hf: HfModelFacts,
        dtype: str,
        lora: LoraSection = LoraSection(),
        quantised: Set[str] = frozenset(),
    ) -> None:
        self._path = hf.path
        self._dtypes = {dtype, "float32"}
        self._kinds = trained_tensors(hf)
        targets = lora.targets(self._kinds) if lora.enabled else frozenset()
        self._quantised = {n: TensorKind(self._kinds[n].shape, "float8_e4m3fn") for n in quantised}
        for name, kind in self._quantised.items():
            blocks = tuple(-(-size // FP8_BLOCK) for size in kind.shape)
            self._kinds |= {name: kind, name + FP8_SCALE: TensorKind(blocks, "float32")}
        self._targets = targets | {name + FP8_SCALE for name in targets & quantised}

    def require(
        self,
        sent: Mapping[str, TensorKind],
        num_bytes: int,
        *,
        version: int,
        targets_alone: bool = False,
    ) -> None:
        """Raise ValueError unless an update had these names, shapes and dtypes, and so many bytes.

        targets_alone: the names must be those of tensors with an adapter.
        """
        update = f"weight update {version} does not fit {self._path}:"
        wanted = {n: k for n, k in self._kinds.items() if not targets_alone or n in self._targets}
        unknown = "has no adapter and was sent" if targets_alone else "was sent and is not in it"
        for what, names in (
            ("was not sent", wanted.keys() - sent.keys()),
            (unknown, sent.keys() - wanted.keys()),
        ):
            if names:
                first = sorted(names)[:4]
                more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
                raise ValueError(f"{update} {', '.join(first)}{more} {what}")
        for name, kind in wanted.items():
            got = sent[name]
            dtypes = {kind.dtype} if name in self._quantised else self._dtypes
            if got.shape != kind.shape or got.dtype not in dtypes:
                wanted_dtypes = " or ".join(sorted(dtypes))
                raise ValueError(
                    f"{update} {name} was sent as {got}, expected {wanted_dtypes} {list(kind.shape)}"
                )
        expected = sum(kind.num_bytes for kind in sent.values())
        if num_bytes != expected:
            raise ValueError(f"{update} {num_bytes} bytes were sent, its tensors have {expected}")


# the vision tower of a model of text and images, and what is between the two
_VISION = ("model.visual.", "vision_tower.", "mm_projector.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def is_trained(name: str, hf: HfModelFacts) -> bool:
    """Return False for what every checkpoint may hold and no actor trains (see ``WeightIndex``)."""
    layer = _LAYER.search(name)
    return not (
        (layer is not None and int(layer[1]) >= hf.num_hidden_layers)
        or (name == "lm_head.weight" and hf.tie_word_embeddings)
        or name.endswith("rotary_emb.inv_freq")
        or name.startswith(("mtp.", "model.mtp_"))  # layers of multi-token prediction
        or name.startswith(_VISION)
    )


def trained_tensors(hf: HfModelFacts) -> dict[str, TensorKind]:
    """The checkpoint's tensors that an actor trains, by name; raises ValueError as ``read_headers``."""
    return {name: kind for name, kind in read_headers(hf.path).items() if is_trained(name, hf)}


def rounded_tensors(hf: HfModelFacts) -> list[str]:
    """Return what a bfloat16 checkpoint holds in more digits than an actor of bfloat16: names, "*" for any number."""
    kinds, kept = trained_tensors(hf), float32_tensors(hf)
    if "bfloat16" not in {kind.dtype for kind in kinds.values()}:
        return []
    wide = (n for n, kind in kinds.items() if kind.dtype in ("float32", "float64"))
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in wide if name not in kept})


def write_shards(
    named_tensors: NamedTensors, directory: Path, *, shard_bytes: int, fused_experts: bool = False
) -> tuple[int, int, int]:
    """Write tensors as safetensors shards of about ``shard_bytes`` with their index.

    Returns (tensors, bytes, shards).  Raises ValueError for a fused expert name, a name that comes
    twice, or no tensor.
    """
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    shard_by_name: dict[str, int] = {}
    size = total = num_shards = 0

    def flush() -> None:
        nonlocal shard, size, num_shards
        save_file(shard, directory / f"shard-{num_shards:05d}.safetensors", {"format": "pt"})
        shard, size, num_shards = {}, 0, num_shards + 1

    for name, tensor in named_tensors:
        if check_name(name, fused_experts) in shard_by_name:
            raise ValueError(f"weight {name!r} came twice")
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
        # A copy: tensors may be views of one storage, which safetensors refuses.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        shard_by_name[name] = num_shards
        size += tensor.nbytes
        total += tensor.nbytes
    if not shard_by_name:
        raise ValueError("there was no weight to publish")
    flush()
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for i, file in enumerate(files):
        os.replace(directory / f"shard-{i:05d}.safetensors", directory / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: files[i] for name, i in shard_by_name.items()},
    }
    with open(directory / "model.safetensors.index.json", "w", encoding="utf-8") as stream:
        json.dump(index, stream, indent=1)
    return len(shard_by_name), total, num_shards


def read_transformers_config(hf_checkpoint: Path) -> Any:
    """Return transformers' configuration of a checkpoint, also of a model_type that it does not know.

    Call ``declare_torchvision_ops`` first.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    content = dict(load_json_object(hf_checkpoint / "config.json"))
    family = FAMILIES.get(content.get("model_type", ""))
    if family is None or family.read_as is None:
        return AutoConfig.from_pretrained(hf_checkpoint, local_files_only=True)
    return CONFIG_MAPPING[family.read_as].from_dict(content | {"model_type": family.read_as})


def copy_all_but_weights(hf_checkpoint: Path, directory: Path) -> None:
    """Copy the configuration and tokenizer files of a checkpoint, with its directories (further chat templates)."""
    for source in sorted(hf_checkpoint.rglob("*")):
        name = source.relative_to(hf_checkpoint)
        is_hidden = any(part.startswith(".") for part in name.parts[:-1])  # .git, a hub's .cache
        if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES) and not is_hidden:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / name)


def write_fp8_checkpoint(hf: HfModelFacts, directory: Path) -> None:
    """Write a checkpoint with its linears in blocks of fp8; an earlier one is replaced once the new one is whole.

    Raises ValueError naming the directory where it cannot be written.
    """
    from r3train.fp8_blocks import as_servers_store  # it imports torch

    names = quantised_tensors(hf)
    whole = (name.removesuffix(".weight") for name in trained_tensors(hf) if "kv_b_proj" in name)
    try:
        with replaced_directory(directory) as partial:
            copy_all_but_weights(hf.path, partial)
            write_shards(
                as_servers_store(_tensors(hf.path), names), partial, shard_bytes=SHARD_BYTES
            )
            config = dict(load_json_object(partial / "config.json"))
            config["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": sorted(whole),
            }
            (partial / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{directory}: the servers' checkpoint cannot be written: {error}"
        ) from None


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(checkpoint):
        with safe_open(file, "pt") as shard:
            yield from ((name, shard.get_tensor(name)) for name in shard.keys())


def check_export_directory(directory: Path, hf_checkpoint: Path) -> None:
    """Raise ValueError for a directory whose content an export must not replace."""
    if directory.resolve() == hf_checkpoint.resolve():
        raise ValueError(f"--save-hf {directory} would replace --hf-checkpoint: name another place")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"--save-hf {directory}: got a file, expected a directory")
    if any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ValueError(
            f"--save-hf {directory} holds something that is no earlier export (no {MARKER} in it),"
            " and an export replaces all: name another place, or empty it"
        )


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Give a directory to fill, which takes the place of ``directory`` once it is whole.

    After an error in the block ``directory`` is as it was.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(directory, earlier)
        os.replace(partial, directory)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _left_alone(hf_checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that nobody trains and every export needs: those of a vision tower."""
    if not is_of_text_and_images(model_type_of(hf_checkpoint)):
        return
    yield from (
        (name, tensor) for name, tensor in _tensors(hf_checkpoint) if name.startswith(_VISION)
    )


def write_marker(directory: Path, facts: Mapping[str, Any]) -> None:
    """Mark a whole export: facts of it, and checksums of its files but those for people to read and edit."""
    names = {
        p.name for p in directory.iterdir() if p.is_file() and not _FOR_PEOPLE.fullmatch(p.name)
    }
    files = checksums(directory, names - {MARKER})
    text = json.dumps({**facts, "files": files}) + "\n"
    (directory / MARKER).write_text(text, encoding="utf-8")


def export_checksums(directory: Path) -> Sums | None:
    """Return the checksums of an export of ours; None for another directory, and for an export without.

    Raises ValueError naming the marker if it is damaged.
    """
    source = directory / MARKER
    if not source.is_file():
        return None
    files = load_json_object(source).get("files")
    return None if files is None else parsed(files, source)


def check_export(directory: Path, *, weights: bool) -> None:
    """Raise ValueError naming a file of an export of ours that is not what was written.

    weights: check the safetensors files too, each of which is read whole.  Another directory passes.
    """
    sums = export_checksums(directory) or {}
    names = [name for name in sums if weights or not name.endswith(".safetensors")]
    check(directory, sums, names, directory / MARKER)


def export_checkpoint(
    named_tensors: NamedTensors, directory: Path, *, hf_checkpoint: Path
) -> tuple[int, int]:
    """Write ``directory`` with the weights, and configuration and tokenizer of ``hf_checkpoint``.

    transformers and SGLang load it.  An earlier export is replaced once the new one is whole.  A vision
    tower comes along as it was.  Returns (tensors, bytes).  Raises OSError (a full disk), which leaves
    the earlier export intact, and ValueError as ``write_shards`` and ``check_export_directory`` do.
    """
    check_export_directory(directory, hf_checkpoint)
    with replaced_directory(directory) as partial:
        num_tensors, num_bytes, _ = write_shards(
            chain(named_tensors, _left_alone(hf_checkpoint)),
            partial,
            shard_bytes=SHARD_BYTES,
            fused_experts=has_fused_experts(hf_checkpoint),
        )
        copy_all_but_weights(hf_checkpoint, partial)
        write_marker(partial, {"num_tensors": num_tensors, "num_bytes": num_bytes})
    return num_tensors, num_bytes
