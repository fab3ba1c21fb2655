"""A resume into another topology: weights and moments are the same, whole; settings the configuration's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.config.checkpoint_settings import CheckpointSection
from r3train.families.read_facts import read_hf_facts
from r3train.families import float32_tensors
from r3train.verify.model_zoo import ModelVariant, write_checkpoint
from r3train.verify.tiny import TinyOptions, build
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.unit.launch.test_preflight import start, words

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

# the first of two pipeline stages has no experts
MODEL = ModelVariant("small", num_layers=2, num_experts=4, dense_layers=(0,))
NUM_WEIGHTS = 3 + MODEL.num_layers * 8 + 3 + 1 + 3 * MODEL.num_experts
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
SHARDED = dict(use_distributed_optimizer=True)
# by world size (one rank under bf16 too); EP 1 with an expert TP other than TP makes Megatron build two
# optimizers
TOPOLOGIES = {
    1: {"one": {}, "one_sharded": SHARDED},
    "bf16": {"bf16": dict(bf16=True), "bf16_sharded": SHARDED | dict(bf16=True)},
    2: {
        "dp2_sharded": SHARDED,
        "tp2_etp2": TP2 | dict(expert_tensor_parallel_size=2),
        "tp2_etp1_sharded": TP2 | SHARDED | dict(expert_tensor_parallel_size=1),
        "tp2_ep2": TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        "dp2_etp2": dict(expert_tensor_parallel_size=2),
        "ep2": dict(expert_model_parallel_size=2),
        "pp2_sharded": SHARDED | dict(pipeline_model_parallel_size=2),
    },
    4: {
        "tp2_pp2_etp1": TP2 | dict(pipeline_model_parallel_size=2, expert_tensor_parallel_size=1),
        "dp2_tp2_ep2_sharded": TP2 | SHARDED | dict(expert_model_parallel_size=2),
        "pp2_ep2": dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
        "tp2_cp2_etp1": TP2 | dict(context_parallel_size=2, expert_tensor_parallel_size=1),
    },
}
# those of CI: all the same in the slow tests
QUICK = ("one", "one_sharded", "bf16_sharded", "tp2_etp1_sharded", "tp2_ep2", "pp2_sharded")
# also saved as checkpoints were once: with Megatron's own nesting of one or two optimizers
AS_BEFORE = ("one", "one_sharded", "dp2_etp2", "tp2_etp1_sharded", "bf16", "bf16_sharded")


def save_as_before(actor: Any, directory: Path) -> None:
    """Write a checkpoint with the optimizers' own nested state, and a file of what is no tensor (megatron-core 0.16)."""
    from megatron.core import dist_checkpointing

    from r3train.trainer.megatron import checkpoint, rng
    from r3train.trainer.megatron.optimizer_state import METADATA

    rank = torch.distributed.get_rank()
    if rank == 0:
        directory.mkdir(parents=True)
        checkpoint.write_state(directory, 2, actor, {})
    torch.distributed.barrier()
    rng.save(directory, rank)
    state = checkpoint.model_state(actor)
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, metadata=dict(METADATA))
    state["scheduler"] = actor.scheduler.state_dict()
    dist_checkpointing.save(state, str(directory))
    if rank == 0:
        common = dist_checkpointing.load_common_state_dict(str(directory))
        torch.save(common, directory / "common.pt")
    torch.distributed.barrier()


def whole(actor: Any) -> dict[str, torch.Tensor]:
    """The weights and the moments, whole, by Hugging Face name; on rank 0."""
    from r3train.trainer.megatron.export import export_hf_weights

    found = {f"weight.{name}": t.float().clone() for name, t in actor.hf_weights()}
    for key in ("exp_avg", "exp_avg_sq"):
        parameters = [p for chunk in actor.model.chunks for p in chunk.parameters()]
        gathered = {p: moment(actor.optimizer, p, key) for p in parameters}
        moments = export_hf_weights(
            actor.model.weights, actor.model.chunks, lambda p: gathered.get(p, p)
        )
        found |= {f"{key}.{name}": tensor.float().clone() for name, tensor in moments}
    return found


def moment(optimizer: Any, p: torch.Tensor, key: str) -> torch.Tensor:
    """This rank's shard of a parameter's moment, gathered over data-parallel ranks; a collective."""
    for part in optimizer.chained_optimizers:
        if not hasattr(part, "gbuf_ranges"):
            main = getattr(p, "main_param", p)
            if main in part.optimizer.state:
                return part.optimizer.state[main][key]
            continue
        if not any(p in buffer.param_index_map for buffer in part.buffers):
            continue
        out = torch.zeros(p.numel())
        if p in part.model_param_gbuf_map:
            own = part._get_model_param_range_map(p)["param"]
            out[own.start : own.end] = part._get_main_param_and_optimizer_states(p)[key]
        torch.distributed.all_reduce(out, group=part.data_parallel_group)
        return out.view_as(p)
    raise AssertionError("no optimizer holds the parameter")


def topologies_of(group: int | str, every: bool) -> dict[str, dict[str, Any]]:
    """The topologies of a size; not every one of them: those of CI."""
    return {name: of for name, of in TOPOLOGIES[group].items() if every or name in QUICK}


def save(
    model: Path, directory: Path, group: int | str, every: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Two steps and a checkpoint in every topology of this size; the moments of each."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    hf, saved = read_hf_facts(model), {}
    for name, fields in topologies_of(group, every).items():
        config = configuration(model, **fields)
        with actor_of(config) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12), (6, 7)]))
            for _ in range(2):
                actor.train_step(slices, actor.compute_log_probs(slices, None), None)
            Checkpointer(actor, CheckpointSection(save=directory / name)).save(2, {})
            saved[name] = whole(actor)
            if name in AS_BEFORE:
                save_as_before(actor, directory / f"{name}_before" / "iter_0000002")
                saved[f"{name}_before"] = saved[name]
    return saved


def sources_of(name: str, saved: list[str], pairs: bool) -> list[str]:
    """The checkpoints from which a topology is resumed: all, or "one" and its own.

    A checkpoint has one form whatever wrote it.  So "one" reads all, and all read that of "one".
    """
    return [s for s in saved if pairs or name == "one" or s in ("one", name, f"{name}_before")]


def load(
    model: Path, directory: Path, group: int | str, saved: list[str], every: bool, pairs: bool
) -> dict[str, Any]:
    """The moments and steps of every topology of this size, resumed from each of its sources.

    Next to them, by pair, how far a step of no learning rate moves a weight.
    """
    loaded, moved, hf = {}, {}, read_hf_facts(model)
    for name, fields in topologies_of(group, every).items():
        for source in sources_of(name, saved, pairs):
            config = configuration(model, **fields, **UNMOVED)
            with actor_of(config, directory / source / "iter_0000002") as actor:
                steps = {
                    int(state["step"])
                    for part in actor.optimizer.chained_optimizers
                    for state in part.optimizer.state.values()
                }
                assert steps == {2} and actor.scheduler.num_steps == 2
                loaded[f"{source} -> {name}"] = whole(actor)
                moved[f"{source} -> {name}"] = moved_by_a_step(actor, config, hf)
    return {"loaded": loaded, "moved": moved}


# Megatron has no step of lr 0 alone: this one is below the last bit of every weight that is not tiny
UNMOVED = dict(lr=1e-12)


def moved_by_a_step(actor: Any, config: Any, hf: Any) -> float:
    """Return the largest move of a weight in a step, on rank 0: an optimizer writes its own weights then."""
    before = {name: tensor.float().clone() for name, tensor in actor.hf_weights()}
    slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12), (6, 7)]))
    actor.train_step(slices, actor.compute_log_probs(slices, None), None)
    after = {name: tensor.float().clone() for name, tensor in actor.hf_weights()}
    return max((float((after[n] - t).abs().max()) for n, t in before.items()), default=0.0)


@pytest.mark.parametrize(
    "groups, every, pairs",
    [
        pytest.param((1, "bf16", 2), False, False, id="by way of one rank"),
        pytest.param((1, "bf16"), True, True, id="one rank", marks=pytest.mark.slow),
        pytest.param((1, 2), True, True, id="two ranks too", marks=pytest.mark.slow),
        pytest.param((1, 4), True, True, id="four", marks=pytest.mark.slow),
    ],
)
def test_full_state_goes_from_every_topology_to_every_other(groups, every, pairs, tmp_path):
    model = write_checkpoint(MODEL, tmp_path / "model")
    saved, loaded, moved = {}, {}, {}
    for group in groups:
        size, scratch = 1 if group == "bf16" else group, tmp_path / f"save {group}"
        saved |= in_ranks(size, scratch, save, model, tmp_path, group, every)[0]
    for group in groups:
        size, scratch = 1 if group == "bf16" else group, tmp_path / f"load {group}"
        given = (model, tmp_path, group, list(saved), every, pairs)
        found = in_ranks(size, scratch, load, *given)[0]
        loaded |= found["loaded"]
        moved |= found["moved"]
    names = [name for group in groups for name in topologies_of(group, every)]
    assert len(loaded) == sum(len(sources_of(name, list(saved), pairs)) for name in names)
    assert moved.keys() == loaded.keys() and max(moved.values()) <= 1e-9, moved
    for pair, moments in loaded.items():
        expected = saved[pair.split(" -> ")[0]]
        assert moments.keys() == expected.keys() and len(moments) == 3 * NUM_WEIGHTS, pair
        if "bf16" in pair:
            expected = {n: t.bfloat16() if "weight." in n[:7] else t for n, t in expected.items()}
        wrong = [
            n for n, t in moments.items() if not torch.equal(t.to(expected[n].dtype), expected[n])
        ]
        assert not wrong, (pair, wrong)
        assert all(t.abs().max() > 0 for n, t in expected.items() if ".experts." not in n)


NEW = dict(
    lr=2e-3,
    min_lr=1e-4,
    weight_decay=0.3,
    lr_decay_style="linear",
    num_rollout=20,
    adam_beta2=0.9,
    adam_eps=1e-6,
)


def resumed_settings(model: Path, directory: Path) -> dict[str, Any]:
    """The parameter groups of a run that began with other settings, after a resume and a step."""
    out: dict[str, Any] = {}
    for source, fields in (("one", {}), ("one_sharded", SHARDED)):
        config, hf = configuration(model, **NEW, **fields), read_hf_facts(model)
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("r3train").addHandler(handler)
        with actor_of(config, directory / source / "iter_0000002") as actor:
            groups = [
                {k: v for k, v in g.items() if k != "params"} for g in actor.optimizer.param_groups
            ]
            slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9)]))
            lr = actor.train_step(slices, actor.compute_log_probs(slices, None), None)["lr"]
            out[source] = [groups, lr, actor.optimizer.param_groups[0]["lr"], messages]
        logging.getLogger("r3train").removeHandler(handler)
    return out


def test_a_resume_takes_its_settings_from_the_configuration_and_says_what_changed(tmp_path):
    """The decay runs from 2e-3 at step 0 to 1e-4 at step 20; the resume is at step 2."""
    model = write_checkpoint(MODEL, tmp_path / "model")
    in_ranks(1, tmp_path / "save", save, model, tmp_path, 1, False)
    out = in_ranks(1, tmp_path / "load", resumed_settings, model, tmp_path)[0]
    for source, (groups, used, following, messages) in out.items():
        rate = [2e-3 - step / 20 * (2e-3 - 1e-4) for step in (2, 3)]
        assert (used, following) == pytest.approx(tuple(rate)), source
        assert {g["wd_mult"] for g in groups} == {0.0, 1.0}
        for group in groups:
            assert group["lr"] == pytest.approx(rate[0])
            assert (group["max_lr"], group["min_lr"]) == (2e-3, 1e-4)
            assert group["weight_decay"] == 0.3 * group["wd_mult"]
            assert tuple(group["betas"]) == (0.9, 0.9) and group["eps"] == 1e-6
        [text] = [m for m in messages if "other settings" in m]
        for change in (
            "lr was 0.001, is 0.002",
            "min_lr was 0.0, is 0.0001",
            "weight_decay was 0.0, is 0.3",
            "lr_decay_style was constant, is linear",
            "adam_beta1, adam_beta2 was (0.9, 0.98), is (0.9, 0.9)",
            "adam_eps was 1e-08, is 1e-06",
        ):
            assert change in text


def continued(model: Path, directory: Path) -> dict[str, Any]:
    """A step after a save, with and without a resume between them: are the weights the same?"""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    hf, out = read_hf_facts(model), {}
    for name, fields, steps in (
        ("sgd", dict(optimizer="sgd"), 1),
        ("sgd bf16", dict(optimizer="sgd", bf16=True), 1),
        ("adam", {}, 0),
        ("adam sharded", SHARDED, 0),
    ):
        config, ends = configuration(model, **fields), []
        for resumed in (None, directory / name / f"iter_{steps:07d}"):
            with actor_of(config, resumed) as actor:
                slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
                for step in range(steps if resumed else 0, steps + 1):
                    if step == steps and resumed is None:
                        Checkpointer(actor, CheckpointSection(save=directory / name)).save(
                            steps, {}
                        )
                    actor.train_step(slices, actor.compute_log_probs(slices, None), None)
                ends.append({n: t.clone() for n, t in actor.hf_weights()})
        out[name] = all(torch.equal(t, ends[1][n]) for n, t in ends[0].items())
    try:
        with actor_of(configuration(model), directory / "sgd" / "iter_0000001"):
            out["refusal"] = "none"
    except ValueError as error:
        out["refusal"] = str(error)
    return out


def test_sgd_and_a_save_before_the_first_step_resume_bit_for_bit_and_sgd_as_adam_is_refused(
    tmp_path,
):
    model = write_checkpoint(MODEL, tmp_path / "model")
    out = in_ranks(1, tmp_path / "ranks", continued, model, tmp_path)[0]
    assert "saved with another optimizer" in out.pop("refusal")
    assert out == {"sgd": True, "sgd bf16": True, "adam": True, "adam sharded": True}


def model_alone(model: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """A checkpoint after two steps, its model loaded only: how far it is then, and after a step of no rate."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    hf, out = read_hf_facts(model), {}
    for name, fields in (("float32", {}), *TOPOLOGIES["bf16"].items()):
        config = configuration(model, **fields)
        with actor_of(config) as actor:
            begun = {n: t.float().clone() for n, t in actor.hf_weights()}
            slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12), (6, 7)]))
            for _ in range(2):
                actor.train_step(slices, actor.compute_log_probs(slices, None), None)
            Checkpointer(actor, CheckpointSection(save=directory / name)).save(2, {})
            trained = {n: t.float().clone() for n, t in actor.hf_weights()}
        config = configuration(model, **fields, **UNMOVED)
        with actor_of(config, directory / name / "iter_0000002", model_only=True) as actor:
            held = {n: t.float().clone() for n, t in actor.hf_weights()}
            out[name] = {
                "trained": max(float((trained[n] - t).abs().max()) for n, t in begun.items()),
                "loaded": all(torch.equal(held[n], t) for n, t in trained.items()),
                "moved": moved_by_a_step(actor, config, hf),
            }
    return out


def test_a_model_that_was_loaded_alone_stays_what_it_is_in_a_step_of_no_rate(tmp_path):
    """Under bf16 the optimizer has weights of its own: they must be those of the checkpoint."""
    model = write_checkpoint(MODEL, tmp_path / "model")
    out = in_ranks(1, tmp_path / "ranks", model_alone, model, tmp_path)[0]
    assert out.keys() == {"float32", "bf16", "bf16_sharded"}
    for name, of in out.items():
        assert of["loaded"] and of["trained"] > 1e-3 and of["moved"] <= 1e-9, (name, of)


# stored in float32 in a bfloat16 checkpoint: what SGLang keeps so, and (the last) what it rounds
WIDE = {
    "qwen3_5_moe": ("linear_attn.A_log", "linear_attn.dt_bias"),
    "nemotron_h": ("mixer.A_log", "mixer.e_score_correction_bias", "mixer.D"),
    "minimax_m2": ("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.weight"),
}


def widened(directory: Path, family: str) -> Path:
    """A tiny bfloat16 checkpoint in which these tensors have the digits of float32."""
    build(directory, TinyOptions(family=family, dtype="bfloat16"))
    [file] = (directory / "model").glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(WIDE[family]):
            tensors[name] = tensors[name].float() + 1e-3 * torch.rand(tensors[name].shape)
    save_file(tensors, file, {"format": "pt"})
    return directory / "model"


def exports(model: Path, directory: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The actor's weights at first, after two steps, and after a resume from there."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    config, hf = configuration(model, bf16=True, **fields), read_hf_facts(model)
    with actor_of(config) as actor:
        first = {name: t.clone() for name, t in actor.hf_weights()}
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
        for _ in range(2):
            actor.train_step(slices, actor.compute_log_probs(slices, None), None)
        trained = {name: t.clone() for name, t in actor.hf_weights()}
        Checkpointer(actor, CheckpointSection(save=directory)).save(2, {})
    with actor_of(config, directory / "iter_0000002") as actor:
        return {"first": first, "trained": trained, "resumed": dict(actor.hf_weights())}


@pytest.mark.parametrize("fields", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("family", WIDE)
def test_what_sglang_keeps_in_float32_stays_so_in_actor_steps_checkpoint_and_export(
    family, fields, tmp_path
):
    model = widened(tmp_path, family)
    [file] = model.glob("*.safetensors")
    disk = load_file(file)
    kept = float32_tensors(read_hf_facts(model))
    assert {name for name in disk if name.endswith(WIDE[family][:-1])} <= kept
    [found] = in_ranks(1, tmp_path / "ranks", exports, model, tmp_path / "ck", fields)
    for name, tensor in ((name, disk[name]) for name in found["first"]):
        wide = name in kept
        assert found["first"][name].dtype is (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(found["first"][name], tensor.to(found["first"][name].dtype)), name
        assert torch.equal(found["resumed"][name], found["trained"][name]), name
        if wide and "bias" not in name:
            trained = found["trained"][name]
            assert not torch.equal(trained, disk[name]), name
            assert not torch.equal(trained, trained.bfloat16().float()), name
    told = start(tmp_path, "--dry-run", "--bf16")
    assert told.exit_code == 0, told.output
    assert f".layers.*.{WIDE[family][-1]}: in float32 on disk, and --bf16 rounds" in words(told)
