"""The topologies that replay is verified in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from r3train.families.hf_facts import HfModelFacts
from r3train.config.model_settings import ModelSection
from r3train.config.parallel_settings import ParallelSection
from r3train.routing.layers import recomputed_moe_layers


@dataclass(frozen=True)
class Topology:
    """A parallel layout, the checkpoint it runs and how it is run.

    ``parallel`` and ``model`` are fields of the configuration sections of those names.
    """

    name: str
    world_size: int
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    variant: str = "moe4"
    batch: str = "ragged"
    ci: bool = False

    def parallel_section(self) -> ParallelSection:
        """The configuration's section, without the distributed optimizer unless it is asked for."""
        return ParallelSection(**{"use_distributed_optimizer": False, **self.parallel})

    def recomputed_layers(self, hf: HfModelFacts) -> tuple[int, ...]:
        """Numbers of the layers whose routers run again in backward."""
        model = ModelSection(hf_checkpoint=".", **self.model)
        return recomputed_moe_layers(self.parallel_section(), model, hf)


# short names of the parallel section's fields
_FIELDS = dict(
    tp="tensor_model_parallel_size",
    pp="pipeline_model_parallel_size",
    vpp="virtual_pipeline_model_parallel_size",
    cp="context_parallel_size",
    ep="expert_model_parallel_size",
    etp="expert_tensor_parallel_size",
    first="decoder_first_pipeline_num_layers",
    last="decoder_last_pipeline_num_layers",
    layout="pipeline_model_parallel_layout",
    distopt="use_distributed_optimizer",
    overlap="overlap_grad_reduce",
    overlap_gather="overlap_param_gather",
)
FULL_UNIFORM = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
FULL_UNIFORM_2 = FULL_UNIFORM | dict(recompute_num_layers=2)
FULL_BLOCK_1 = FULL_UNIFORM | dict(recompute_method="block")
SELECTIVE_MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
SELECTIVE_ATTENTION = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
TOPOLOGIES: dict[str, Topology] = {}


def _add(
    name: str,
    world_size: int,
    model: dict[str, Any] | None = None,
    *,
    variant: str = "moe4",
    batch: str = "ragged",
    ci: bool = False,
    **sizes: Any,
) -> None:
    """Add a topology; ``sizes`` are fields of the parallel section by their short names."""
    assert name not in TOPOLOGIES, name
    parallel = {_FIELDS[short]: value for short, value in sizes.items()}
    # experts over several tensor ranks want sequence parallelism
    parallel["sequence_parallel"] = "tp" in sizes
    TOPOLOGIES[name] = Topology(name, world_size, parallel, model or {}, variant, batch, ci)


# one rank: also oracle (a), once a variant and batch
_add("one", 1)
_add("one_level", 1, batch="level")
_add("one_dense", 1, variant="dense6")
_add("one_dense_level", 1, variant="dense6", batch="level")
for _variant in ("moe8", "tied", "wide300", "pre_softmax", "sigmoid", "grouped", "glm"):
    _add(f"one_{_variant}", 1, variant=_variant)
_add("recompute_uniform", 1, FULL_UNIFORM, variant="dense6", ci=True)
_add("recompute_uniform2", 1, FULL_UNIFORM_2, variant="dense6")
_add("recompute_block", 1, FULL_BLOCK_1, variant="dense6")
_add("recompute_moe", 1, SELECTIVE_MOE, variant="dense6")
_add("recompute_core_attn", 1, SELECTIVE_ATTENTION)
# two ranks
_add("tp2", 2, tp=2, ci=True)
_add("tp2etp2", 2, tp=2, etp=2)
_add("tp2ep2", 2, tp=2, ep=2)
_add("ep2", 2, ep=2, ci=True)
_add("dp2", 2, ci=True)
_add("dp2_distopt", 2, distopt=True, ci=True)
_add("dp2_overlap", 2, distopt=True, overlap=True)
_add("dp2_overlap_gather", 2, distopt=True, overlap=True, overlap_gather=True)
_add("dp2_recompute_moe", 2, SELECTIVE_MOE, variant="dense6")
_add("pp2", 2, pp=2)
_add("pp2_tied", 2, pp=2, variant="tied", ci=True)
_UNEVEN = dict(pp=2, first=2, last=4, variant="dense6", ci=True)
_add("pp2_uneven", 2, FULL_UNIFORM, **_UNEVEN)
_add("pp2_uneven_level", 2, FULL_UNIFORM, batch="level", **_UNEVEN)
_add("pp2_block", 2, FULL_BLOCK_1, pp=2, variant="dense6")
_add("vpp2pp2", 2, FULL_UNIFORM, pp=2, vpp=2, ci=True)
_add("vpp2pp2_level", 2, FULL_UNIFORM, pp=2, vpp=2, batch="level", ci=True)
_add("vpp4pp2", 2, SELECTIVE_MOE, pp=2, vpp=4, variant="moe8")
_add("cp2", 2, cp=2, ci=True)
_add("tp2_glm", 2, tp=2, ep=2, variant="glm")
_add("pp2_glm", 2, FULL_UNIFORM, pp=2, variant="glm")
_add("cp2_glm", 2, cp=2, variant="glm", ci=True)
# layers of each virtual stage and rank, written out: the one way to split 61 layers over PP4*VPP2
_add("vpp2pp2_layout", 2, FULL_UNIFORM, pp=2, vpp=2, layout="Et|tt|t|ttL", variant="dense6")
_add("cp2_grouped", 2, cp=2, variant="grouped")
_add("tp2_pre_softmax", 2, tp=2, variant="pre_softmax")
_add("tp2_sigmoid", 2, tp=2, variant="sigmoid")
_add("ep2_wide300", 2, ep=2, variant="wide300")
# four ranks
_add("tp2ep2etp2", 4, tp=2, ep=2, etp=2, ci=True)
_add("tp4", 4, tp=4)
_add("tp2ep4", 4, tp=2, ep=4)
_add("ep2dp4", 4, ep=2, distopt=True)
_add("tp2pp2", 4, FULL_UNIFORM, tp=2, pp=2, variant="dense6")
_add("pp4", 4, FULL_UNIFORM, pp=4)
_add("pp2cp2", 4, FULL_BLOCK_1, pp=2, cp=2)
_add("cp4", 4, cp=4)
_add("cp2tp2", 4, cp=2, tp=2, variant="dense6")
_add("tp2pp2_tied", 4, tp=2, pp=2, vpp=2, variant="tied")
_add("vpp2pp2dp2", 4, pp=2, vpp=2, ep=2, distopt=True)
_add("pp4_uneven", 4, SELECTIVE_MOE, pp=4, first=1, last=1, variant="dense6")
# eight ranks
_add("cp2tp2ep2", 8, cp=2, tp=2, ep=2, ci=True)
_add("pp2cp2ep2", 8, FULL_UNIFORM, pp=2, cp=2, ep=2, ci=True)
_add("tp2pp2ep2", 8, FULL_UNIFORM, tp=2, pp=2, ep=2, variant="dense6")
_add("tp2ep2etp2pp2", 8, FULL_UNIFORM, tp=2, ep=2, etp=2, pp=2)
_add("tp2ep2etp2pp2vpp2", 8, FULL_UNIFORM, tp=2, ep=2, etp=2, pp=2, vpp=2)
_add("dp8", 8, distopt=True)


def baseline(topology: Topology) -> Topology:
    """The same checkpoint and batch at world size 1: oracle (a)."""
    wanted = (1, topology.variant, topology.batch, {})
    return next(
        t for t in TOPOLOGIES.values() if (t.world_size, t.variant, t.batch, t.model) == wanted
    )
