"""Bytes, memory and seconds of one step at a size of cluster: scale_model's arithmetic, pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale_rates import GIGA, Rates

# what rank 0 or a leader does on threads beside training; for the rest of the path a step waits
_BESIDE_TRAINING = frozenset({"receive", "parse", "decode"})
ROUTES = "rank 0's routes"


@dataclass(frozen=True)
class Model:
    """The sizes of a model that decide the bytes of its routes and weights, and its arithmetic."""

    name: str
    layers: int  # decoder layers: SGLang sends a row of each
    moe_layers: int
    topk: int
    experts: int
    parameters: float
    active_parameters: float
    heads: int
    head_dims: int  # of a query (or key) and a value together
    tp: int
    pp: int
    cp: int

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 255 else 2

    @property
    def model_ranks(self) -> int:
        """GPUs that hold one replica of the dense weights: one data-parallel rank."""
        return self.tp * self.pp * self.cp

    def forward_flops(self, tokens: int) -> float:
        """A token's arithmetic in a sequence of so many: weights, and causal attention.

        A token sees half of the sequence on average, and 2 operations for each dimension of its keys
        and of its values.
        """
        attention = self.layers * self.heads * self.head_dims * tokens
        return 2 * self.active_parameters + attention


MODELS = (
    Model("Qwen3-235B-A22B", 94, 94, 8, 128, 235e9, 22e9, 64, 256, 4, 4, 1),
    Model("DeepSeek-V3", 61, 58, 8, 256, 671e9, 37e9, 128, 320, 4, 8, 1),
    Model("60 layers, top 8 of 128", 60, 60, 8, 128, 120e9, 12e9, 64, 256, 4, 2, 1),
)


@dataclass(frozen=True)
class Cluster:
    """The numbers that are not measured; benchmarks/pages/scale.md.j2 has their units."""

    # the work
    samples: int = 1024
    tokens: int = 32768
    staleness: int = 1
    # counted from our formats
    # a token of a microbatch, and of a slice: tokens, labels, positions, uids, rows 8 each; log-probs
    # and advantages 4 each; a mask
    stream_bytes: float = 49.0
    log_prob_json: float = 40.0
    forwards_a_step: float = 5.0
    optimizer_bytes: float = 18.0  # bf16 weight, fp32 main, gradient and moments
    # assumed
    trainer_share: float = 0.5
    token_latency: float = 0.01
    gpu_flops: float = 4e14
    gpu_memory: float = 141.0
    network: float = 40.0
    nccl_broadcast: float = 40.0


@dataclass(frozen=True)
class Cost:
    """One configuration's step."""

    gpus: int
    data_ranks: int
    fits: bool
    generation_s: float
    train_s: float
    route_bytes: float
    wire_bytes: float
    rank0_memory: float
    rank0: dict[str, float]  # seconds by stage when rank 0 does it all
    leader: dict[str, float]  # seconds by stage when each data-parallel leader does its own
    rank0_beside_leaders: dict[str, float]  # what is then left to rank 0
    weights_s: float
    stage_weights_s: float  # all pipeline stages sending their own at once

    def parts(self, *, leaders: bool = False) -> dict[str, float]:
        """Seconds of each part of a step, by itself."""
        return {
            "generation": self.generation_s,
            "training": self.train_s,
            ROUTES: sum(self._path(leaders).values()),
            "weight sync": self.weights_s,
        }

    def longest(self, *, but: str = "", leaders: bool = False) -> str:
        """The part that takes longest, ``but`` left out."""
        seconds = {name: s for name, s in self.parts(leaders=leaders).items() if name != but}
        return max(seconds, key=seconds.__getitem__)

    def step_s(self, *, leaders: bool = False, spanning: int | None = None) -> float:
        """Seconds that a step takes at least when generation overlaps with training.

        A rollout is generated while the one before it trains, and the update waits for it (drain).
        ``spanning``: the staleness over which rollouts go on through updates (in_place, abort); from
        its first token to the update that it is trained into a rollout then has that many steps more.
        """
        path = self._path(leaders)
        before = sum(s for stage, s in path.items() if stage not in _BESIDE_TRAINING)
        training = before + self.train_s + self.weights_s
        generation = self.generation_s + self.weights_s
        if spanning is not None:
            generation = (self.generation_s + training) / (spanning + 1)
        return max(generation, training, sum(path.values()))

    def _path(self, leaders: bool) -> dict[str, float]:
        """Seconds that rank 0 spends on the route path, by stage; with leaders it is one of them."""
        if not leaders:
            return self.rank0
        beside = self.rank0_beside_leaders
        return {s: self.leader.get(s, 0) + beside.get(s, 0) for s in self.leader | beside}


def cost(model: Model, gpus: int, rates: Rates, c: Cluster) -> Cost:
    """Bytes and seconds of one step."""
    trainers = int(gpus * c.trainer_share)
    data_ranks = max(1, trainers // model.model_ranks)
    tokens = c.samples * c.tokens
    routes = tokens * model.layers * model.topk * model.id_bytes
    wire = tokens * model.layers * model.topk * 4 * 4 / 3
    answers = wire + tokens * c.log_prob_json
    kept = routes * model.moe_layers / model.layers  # sequence parallelism: every row to one rank
    # every tensor and pipeline rank of a replica gets the token streams: from rank 0, or with leaders
    # from its own, which got them from rank 0
    streams = tokens * c.stream_bytes
    copies = streams * model.tp * model.pp
    flops = c.forwards_a_step * model.forward_flops(c.tokens) * tokens
    memory = model.parameters * c.optimizer_bytes / trainers
    others = (trainers - 1) / trainers
    share = 1 / data_ranks

    def sending(num_bytes: float) -> dict[str, float]:
        return {
            "message": num_bytes / rates.message / GIGA,
            "send": num_bytes / rates.gloo_send / GIGA,
        }

    def seconds(of_all: float, others: float) -> dict[str, float]:
        """A rank that does ``of_all`` of the route path, and sends ``others`` of what it cuts."""
        cut = (kept + copies) * of_all
        return {
            "receive": answers * of_all / min(c.network, rates.http_read) / GIGA,
            "parse": answers * of_all / rates.parse / GIGA,
            "decode": routes * of_all / rates.decode / GIGA,
            "cut": cut / rates.pack_and_cut / GIGA,
            **sending(cut * others),
        }

    leader = seconds(share, (model.model_ranks - 1) / model.model_ranks)
    # a leader's microbatches hold samples of all stores: nearly all of its rows come from others,
    # over HTTP, and as many bytes go out
    leader["exchange"] = routes * share * (1 - share) * 2 / min(c.network, rates.http_read) / GIGA
    leader["unpack"] = streams * share / rates.unpack / GIGA
    weights = model.parameters * 2
    return Cost(
        gpus=gpus,
        data_ranks=data_ranks,
        fits=memory <= 0.8 * c.gpu_memory * GIGA and trainers >= model.model_ranks,
        generation_s=c.tokens * c.token_latency,
        train_s=flops / (trainers * c.gpu_flops),
        route_bytes=routes,
        wire_bytes=wire,
        rank0_memory=routes * (c.staleness + 2),
        rank0=seconds(1.0, others),
        leader=leader,
        rank0_beside_leaders={
            "parse": tokens * c.log_prob_json / rates.log_prob_parse / GIGA,
            "pack": streams / rates.pack_and_cut / GIGA,
            **sending(streams * (1 - share)),
        },
        weights_s=weights / c.nccl_broadcast / GIGA,
        stage_weights_s=weights / model.pp / c.nccl_broadcast / GIGA,
    )
