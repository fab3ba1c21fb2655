"""The topologies that replay is verified in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from r3train.config.parallel import ParallelSection


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
        return ParallelSection(**{"use_distributed_optimizer": False, **self.parallel})

    @property
    def recompute(self) -> str:
        """Which layers' routers run again in backward: none, all, or the first N of a chunk."""
        granularity = self.model.get("recompute_granularity")
        if granularity == "full":
            if self.model["recompute_method"] == "uniform":
                return "all"
            return f"first {self.model['recompute_num_layers']}"
        if granularity == "selective" and "moe" in self.model.get("recompute_modules", ()):
            return "all"
        return "none"


def _parallel(
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    first: int | None = None,
    last: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    fields: dict[str, Any] = dict(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
        **more,
    )
    if vpp:
        fields["virtual_pipeline_model_parallel_size"] = vpp
    if first:
        fields["decoder_first_pipeline_num_layers"] = first
    if last:
        fields["decoder_last_pipeline_num_layers"] = last
    return fields


FULL_UNIFORM = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
FULL_UNIFORM_2 = FULL_UNIFORM | dict(recompute_num_layers=2)
FULL_BLOCK_1 = FULL_UNIFORM | dict(recompute_method="block")
SELECTIVE_MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
SELECTIVE_ATTENTION = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
# layers of each virtual stage and rank, written out: the one way to split 61 layers over PP4*VPP2
LAYOUT_1212 = dict(pipeline_model_parallel_layout="Et|tt|t|ttL")
DISTRIBUTED_OPTIMIZER = dict(use_distributed_optimizer=True)
OVERLAP = DISTRIBUTED_OPTIMIZER | dict(overlap_grad_reduce=True)

_ALL = [
    # one rank: also oracle (a), once a variant and batch
    Topology("one", 1),
    Topology("one_level", 1, batch="level"),
    Topology("one_dense", 1, variant="dense6"),
    Topology("one_dense_level", 1, variant="dense6", batch="level"),
    Topology("one_moe8", 1, variant="moe8"),
    Topology("one_tied", 1, variant="tied"),
    Topology("one_wide300", 1, variant="wide300"),
    Topology("one_pre_softmax", 1, variant="pre_softmax"),
    Topology("one_sigmoid", 1, variant="sigmoid"),
    Topology("one_grouped", 1, variant="grouped"),
    Topology("one_glm", 1, variant="glm"),
    Topology("recompute_uniform", 1, model=FULL_UNIFORM, variant="dense6", ci=True),
    Topology("recompute_uniform2", 1, model=FULL_UNIFORM_2, variant="dense6"),
    Topology("recompute_block", 1, model=FULL_BLOCK_1, variant="dense6"),
    Topology("recompute_moe", 1, model=SELECTIVE_MOE, variant="dense6"),
    Topology("recompute_core_attn", 1, model=SELECTIVE_ATTENTION),
    # two ranks
    Topology("tp2", 2, _parallel(tp=2), ci=True),
    Topology("tp2etp2", 2, _parallel(tp=2, etp=2)),
    Topology("tp2ep2", 2, _parallel(tp=2, ep=2)),
    Topology("ep2", 2, _parallel(ep=2), ci=True),
    Topology("dp2", 2, ci=True),
    Topology("dp2_distopt", 2, DISTRIBUTED_OPTIMIZER, ci=True),
    Topology("dp2_overlap", 2, OVERLAP),
    Topology("dp2_overlap_gather", 2, OVERLAP | dict(overlap_param_gather=True)),
    Topology("dp2_recompute_moe", 2, model=SELECTIVE_MOE, variant="dense6"),
    Topology("pp2", 2, _parallel(pp=2)),
    Topology("pp2_tied", 2, _parallel(pp=2), variant="tied", ci=True),
    Topology(
        "pp2_uneven",
        2,
        _parallel(pp=2, first=2, last=4),
        model=FULL_UNIFORM,
        variant="dense6",
        ci=True,
    ),
    Topology(
        "pp2_uneven_level",
        2,
        _parallel(pp=2, first=2, last=4),
        model=FULL_UNIFORM,
        variant="dense6",
        batch="level",
        ci=True,
    ),
    Topology("pp2_block", 2, _parallel(pp=2), model=FULL_BLOCK_1, variant="dense6"),
    Topology("vpp2pp2", 2, _parallel(pp=2, vpp=2), model=FULL_UNIFORM, ci=True),
    Topology(
        "vpp2pp2_level", 2, _parallel(pp=2, vpp=2), model=FULL_UNIFORM, batch="level", ci=True
    ),
    Topology("vpp4pp2", 2, _parallel(pp=2, vpp=4), model=SELECTIVE_MOE, variant="moe8"),
    Topology("cp2", 2, _parallel(cp=2), ci=True),
    Topology("tp2_glm", 2, _parallel(tp=2, ep=2), variant="glm"),
    Topology("pp2_glm", 2, _parallel(pp=2), variant="glm", model=FULL_UNIFORM),
    Topology("cp2_glm", 2, _parallel(cp=2), variant="glm", ci=True),
    Topology(
        "vpp2pp2_layout",
        2,
        _parallel(pp=2, vpp=2, **LAYOUT_1212),
        model=FULL_UNIFORM,
        variant="dense6",
    ),
    Topology("cp2_grouped", 2, _parallel(cp=2), variant="grouped"),
    Topology("tp2_pre_softmax", 2, _parallel(tp=2), variant="pre_softmax"),
    Topology("tp2_sigmoid", 2, _parallel(tp=2), variant="sigmoid"),
    Topology("ep2_wide300", 2, _parallel(ep=2), variant="wide300"),
    # four ranks
    Topology("tp2ep2etp2", 4, _parallel(tp=2, ep=2, etp=2), ci=True),
    Topology("tp4", 4, _parallel(tp=4)),
    Topology("tp2ep4", 4, _parallel(tp=2, ep=4)),
    Topology("ep2dp4", 4, _parallel(ep=2) | DISTRIBUTED_OPTIMIZER),
    Topology("tp2pp2", 4, _parallel(tp=2, pp=2), model=FULL_UNIFORM, variant="dense6"),
    Topology("pp4", 4, _parallel(pp=4), model=FULL_UNIFORM),
    Topology("pp2cp2", 4, _parallel(pp=2, cp=2), model=FULL_BLOCK_1),
    Topology("cp4", 4, _parallel(cp=4)),
    Topology("cp2tp2", 4, _parallel(cp=2, tp=2), variant="dense6"),
    Topology("tp2pp2_tied", 4, _parallel(tp=2, pp=2, vpp=2), variant="tied"),
    Topology("vpp2pp2dp2", 4, _parallel(pp=2, vpp=2, ep=2) | DISTRIBUTED_OPTIMIZER),
    Topology(
        "pp4_uneven", 4, _parallel(pp=4, first=1, last=1), variant="dense6", model=SELECTIVE_MOE
    ),
    # eight ranks
    Topology("cp2tp2ep2", 8, _parallel(cp=2, tp=2, ep=2), ci=True),
    Topology("pp2cp2ep2", 8, _parallel(pp=2, cp=2, ep=2), model=FULL_UNIFORM, ci=True),
    Topology("tp2pp2ep2", 8, _parallel(tp=2, pp=2, ep=2), variant="dense6", model=FULL_UNIFORM),
    Topology("tp2ep2etp2pp2", 8, _parallel(tp=2, ep=2, etp=2, pp=2), model=FULL_UNIFORM),
    Topology("tp2ep2etp2pp2vpp2", 8, _parallel(tp=2, ep=2, etp=2, pp=2, vpp=2), model=FULL_UNIFORM),
    Topology("dp8", 8, DISTRIBUTED_OPTIMIZER),
]
TOPOLOGIES = {t.name: t for t in _ALL}
assert len(TOPOLOGIES) == len(_ALL)


def baseline(topology: Topology) -> Topology:
    """The same checkpoint and batch at world size 1: oracle (a)."""
    wanted = (1, topology.variant, topology.batch, {})
    return next(t for t in _ALL if (t.world_size, t.variant, t.batch, t.model) == wanted)


for _topology in _ALL:
    baseline(_topology)
