"""The doctor on kernels: a mixture of two cuDNNs, attention without a fused kernel, kernels that are compiled late."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.doctor import diagnosis, kernels
from r3train.launch.job.finding import FACT, OK, PROBLEM, WARNING
from tests.published import RECIPES, write_config
from tests.unit.doctor_setups import config_of

PIP = "/usr/lib/python3/site-packages/nvidia/cudnn/lib"
APT = "/usr/lib/x86_64-linux-gnu"


@dataclass
class AttentionParams:
    """As far as asked: names and defaults of transformer_engine 2.12.0."""

    qkv_type: Any = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    is_training: bool = True
    softmax_type: str = "vanilla"


@pytest.fixture
def engine(monkeypatch):
    """A stand-in for Transformer Engine: the version of its cuDNN, what it was asked, its choice."""
    package = "transformer_engine.pytorch.attention.dot_product_attention.utils"
    for name in [package.rsplit(".", i)[0] for i in range(5)]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = sys.modules[package]
    sys.modules[package.rsplit(".", 1)[0]].utils = utils
    utils.AttentionParams = AttentionParams
    utils.asked, utils.chosen, utils.available = [], "fused", (True, True, True)

    def get_attention_backend(params):
        utils.asked.append(params)
        flash, fused, unfused = (utils.chosen == name for name in ("flash", "fused", "unfused"))
        return flash, None, fused, 1 if fused else None, unfused, list(utils.available)

    utils.get_attention_backend = get_attention_backend
    sys.modules["transformer_engine.pytorch"].get_cudnn_version = lambda: (9, 24, 0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    return utils


def mapped(tmp_path: Path, *folders: str, names=("libcudnn.so.9", "libcudnn_graph.so.9.24.0")):
    """A /proc/PID/maps in which files of cuDNN are mapped from these folders, next to others."""
    lines = [
        "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ",
        "7f00-7f01 r-xp 0 08:01 7 /usr/x.so",
    ]
    lines.append("7f02-7f03 r--p 0 08:01 9     /elsewhere/libcudnnx.so.9")
    for folder in folders:
        lines += [f"7f10-7f11 r-xp 00000000 08:01 42     {folder}/{name}" for name in names]
    file = tmp_path / "maps"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_one_cudnn_is_fine_and_named_with_its_place(engine, tmp_path):
    (found,) = kernels.check_cudnn(1, mapped(tmp_path, PIP))
    assert found.level == OK
    assert found.text == f"9.24.0 in torch, 9.24.0 in Transformer Engine, from {PIP}"


def test_parts_of_two_cudnns_in_a_process_are_a_problem(engine, tmp_path):
    (found,) = kernels.check_cudnn(1, mapped(tmp_path, PIP, APT))
    assert found.level == PROBLEM and f"loaded from {PIP}, {APT}: a mixture" in found.text
    assert "apt-get purge 'libcudnn9*'" in found.remedy and "CUDNN_HOME" in found.remedy


@pytest.mark.parametrize("of_engine, of_torch", [((9, 10, 2), 92400), ((9, 24, 0), None)])
def test_two_versions_of_cudnn_are_a_problem(engine, of_engine, of_torch, tmp_path, monkeypatch):
    sys.modules["transformer_engine.pytorch"].get_cudnn_version = lambda: of_engine
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: of_torch)
    (found,) = kernels.check_cudnn(1, mapped(tmp_path, PIP))
    assert found.level == PROBLEM and "a mixture" in found.text
    assert ".".join(map(str, of_engine)) in found.text and ("none" in found.text) == (not of_torch)


@pytest.mark.parametrize(
    "version, number, level",
    [((9, 18, 0), 91800, OK), ((9, 24, 1), 92401, OK), ((9, 17, 1), 91701, PROBLEM)],
)
def test_a_cudnn_before_fused_attention_of_packs_is_a_problem(
    engine, version, number, level, tmp_path, monkeypatch
):
    sys.modules["transformer_engine.pytorch"].get_cudnn_version = lambda: version
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    (found,) = kernels.check_cudnn(1, mapped(tmp_path, PIP))
    assert found.level == level and bool(found.remedy) == (level == PROBLEM)


def test_without_gpus_or_the_package_nothing_is_said_of_cudnn(engine, tmp_path, monkeypatch):
    assert not list(kernels.check_cudnn(0, mapped(tmp_path, PIP, APT)))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert not list(kernels.check_cudnn(1, mapped(tmp_path, PIP, APT)))


def recipe(tmp_path: Path, file: str, **fields) -> tuple[RunConfig, Any]:
    (found,) = [recipe for recipe in RECIPES if recipe.file == file]
    write_config(tmp_path / "model", found.model)
    config = RunConfig.from_toml(found.path, {"hf_checkpoint": str(tmp_path / "model"), **fields})
    return config, read_hf_facts(tmp_path / "model")


PACKED = AttentionParams(
    qkv_layout="thd_thd_thd",
    attn_mask_type="padding_causal",
    window_size=(-1, 0),
    bottom_right_diagonal=False,
)


def test_heads_of_a_rank_are_asked_for(engine, tmp_path):
    config, hf = recipe(tmp_path, "qwen3_30b_a3b")
    (found,) = kernels.check_attention(config, hf, 8)
    shape = dict(num_heads=8, num_gqa_groups=1, head_dim_qk=128, head_dim_v=128)
    longest = dict(max_seqlen_q=20480, max_seqlen_kv=20480)
    assert engine.asked == [replace(PACKED, **shape, **longest)]
    assert found.level == OK and found.text.endswith("the fused kernel")
    assert "num_heads 8, num_gqa_groups 1, head_dim_qk 128" in found.text
    # of fewer key heads than tensor ranks every rank has one
    config, _ = recipe(tmp_path / "wide", "qwen3_30b_a3b", tensor_model_parallel_size=8)
    list(kernels.check_attention(config, hf, 8))
    assert (engine.asked[-1].num_heads, engine.asked[-1].num_gqa_groups) == (4, 1)


def test_latent_attention_has_keys_for_every_head_and_values_of_another_size(engine, tmp_path):
    config, hf = recipe(tmp_path, "moonlight_16b_a3b", max_tokens_per_gpu=4096)
    engine.chosen = "flash"
    (found,) = kernels.check_attention(config, hf, 8)
    tp = config.parallel.tensor_model_parallel_size
    shape = dict(num_heads=16 // tp, num_gqa_groups=16 // tp, head_dim_qk=192, head_dim_v=192)
    cp = config.parallel.context_parallel_size
    longest = dict(max_seqlen_q=4096 * cp, max_seqlen_kv=4096 * cp)
    assert engine.asked == [replace(PACKED, **shape, **longest, context_parallel=cp > 1)]
    assert found.level == OK and found.text.endswith("the flash kernel")
    # whatever config.json says of key heads
    list(kernels.check_attention(config, replace(hf, num_key_value_heads=1), 8))
    assert engine.asked[-1] == engine.asked[0]


@pytest.mark.parametrize("way", ["a2a", 24 * ["a2a"]], ids=["all", "each"])
def test_both_kinds_of_a_model_with_sinks_are_asked_for(engine, tmp_path, way):
    fields = {"context_parallel_size": 2, "transformer_overrides": {"cp_comm_type": way}}
    config, hf = recipe(tmp_path, "gpt_oss_20b", tensor_model_parallel_size=4, **fields)
    found = list(kernels.check_attention(config, hf, 8))
    assert [f.text.partition(":")[0] for f in found] == ["full attention", "sliding attention"]
    assert [p.window_size for p in engine.asked] == [(-1, 0), (127, 0)]
    longest = 2 * config.trainer.max_tokens_per_gpu
    for asked in engine.asked:
        assert (asked.softmax_type, asked.context_parallel, asked.cp_comm_type) == (
            "learnable",
            True,
            "a2a",
        )
        assert asked.max_seqlen_q == asked.max_seqlen_kv == longest and asked.num_heads == 16


@pytest.mark.parametrize(
    "backend, chosen, available, level, words",
    [
        ("te", "unfused", (False, False, True), PROBLEM, "the unfused kernel, whose scores"),
        ("unfused", "fused", (True, True, True), WARNING, "the unfused kernel, whose scores"),
        ("te", None, (False, False, False), PROBLEM, "has no kernel"),
        ("flash", "fused", (False, True, True), PROBLEM, "no kernel by --attention-backend flash"),
        ("fused", "flash", (True, True, True), OK, "the fused kernel"),
    ],
)
def test_attention_without_a_fused_kernel_is_a_problem_unless_it_is_asked_for(
    engine, tmp_path, backend, chosen, available, level, words
):
    config, hf = recipe(tmp_path, "qwen3_30b_a3b", attention_backend=backend)
    engine.chosen, engine.available = chosen, available
    (found,) = kernels.check_attention(config, hf, 8)
    assert found.level == level and words in found.text
    assert bool(found.remedy) == (level != OK)


def test_float32_is_asked_for_as_it_is_trained(engine, tmp_path):
    config, hf = recipe(tmp_path, "qwen3_30b_a3b", bf16=False)
    list(kernels.check_attention(config, hf, 8))
    assert [asked.qkv_dtype for asked in engine.asked] == [torch.float32]


def test_another_version_of_the_engine_is_a_warning(engine, tmp_path):
    engine.AttentionParams = lambda qkv_layout: None
    config, hf = recipe(tmp_path, "qwen3_30b_a3b")
    (found,) = kernels.check_attention(config, hf, 8)
    assert found.level == WARNING and "cannot be asked" in found.text and found.remedy


def test_without_gpus_the_package_or_its_layers_nothing_is_asked(engine, tmp_path, monkeypatch):
    config, hf = recipe(tmp_path, "qwen3_30b_a3b")
    assert not list(kernels.check_attention(config, hf, 0))
    local = config.model.model_copy(update={"attention_backend": "local"})
    assert not list(kernels.check_attention(config.model_copy(update={"model": local}), hf, 8))
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.attention.dot_product_attention", None
    )
    assert not list(kernels.check_attention(config, hf, 8)) and not engine.asked


def test_kernels_that_the_first_server_compiles_are_named():
    def said(nodes=1, installed=(), **environ):
        version = {name: "0.7.2" for name in installed}.get
        return list(kernels.check_warm_up(8, nodes, version, {"HOME": "/home/a", **environ}))

    (alone,) = said()
    assert alone.level == FACT and "into /home/a/.cache/flashinfer" in alone.text
    (shared,) = said(nodes=2)
    assert shared.level == WARNING and "compile into it at once" in shared.text
    assert "FLASHINFER_WORKSPACE_BASE, TRITON_CACHE_DIR" in shared.remedy
    (own,) = said(nodes=2, FLASHINFER_WORKSPACE_BASE="/scratch")
    assert own.level == FACT and "into /scratch/.cache/flashinfer" in own.text
    assert not said(installed=("flashinfer-cubin",)) and not said(
        installed=("flashinfer-jit-cache",)
    )
    assert not list(kernels.check_warm_up(0, 2, {}.get, {}))


def test_the_doctor_says_all_of_it_on_a_machine_with_gpus(engine, tiny, monkeypatch):
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (2, 80 * 10**9))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv(kernels.CACHE_BASE, raising=False)
    found = {f.subject: f for f in diagnosis.diagnose(config_of(tiny), 4)}
    assert found["cuDNN"].level in (OK, PROBLEM) and "9.24.0 in torch" in found["cuDNN"].text
    assert found["attention"].level == OK and found["flashinfer"].level == WARNING
