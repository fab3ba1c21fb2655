"""The scale model's arithmetic, against numbers worked by hand."""

from dataclasses import replace

import pytest

from benchmarks.scale_costs import MODELS, Cluster, Model, cost
from benchmarks.scale_model import GPU_COUNTS, PAGE, page, recorded
from benchmarks.scale_rates import Rates, measure_gloo

ONE = Rates(**{name: 1.0 for name in Rates.__dataclass_fields__})
SMALL = Model("small", 10, 10, 8, 128, 1e9, 1e9, 16, 128, 2, 2, 1)
CLUSTER = Cluster(samples=1000, tokens=1000, network=1.0)
QUICK = replace(CLUSTER, token_latency=1e-6)


def test_bytes_and_seconds_are_those_worked_by_hand():
    x = cost(SMALL, 64, ONE, CLUSTER)
    # 1e6 tokens x 10 layers x 8 slots: a byte each held, 4 bytes and base64's 4/3 on the wire
    assert x.route_bytes == 80e6 and x.wire_bytes == pytest.approx(80e6 * 16 / 3)
    assert x.data_ranks == 8  # 32 GPUs train, 4 hold a replica
    # 5 forwards of 2 x 1e9 for the weights, and of 10 layers x 16 heads x 128 x 1000 tokens
    assert x.train_s == pytest.approx(5 * (2e9 + 20.48e6) * 1e6 / (32 * 4e14))
    assert x.rank0["decode"] == pytest.approx(0.08)
    assert x.rank0["receive"] == pytest.approx((80e6 * 16 / 3 + 40e6) / 1e9)
    # streams of 49 bytes go to each of the 4 ranks of a replica; rank 0 keeps its own share
    assert x.rank0["send"] == pytest.approx((80e6 + 4 * 49e6) * 31 / 32 / 1e9)


def test_attention_over_long_samples_is_more_than_half_of_a_large_models_training():
    qwen, *_ = MODELS
    at_512 = cost(qwen, 512, ONE, Cluster())
    weights_alone = 5 * 2 * 22e9 * 1024 * 32768 / (256 * 4e14)
    assert weights_alone == pytest.approx(72, abs=0.5)
    # half of 32768 keys on average, 4 x 64 heads x 128 operations each, in 94 layers: 5.05e10 a token
    assert qwen.forward_flops(32768) == pytest.approx(4.4e10 + 32768 / 2 * 4 * 64 * 128 * 94)
    assert at_512.train_s == pytest.approx(155, abs=0.5)
    short = cost(qwen, 512, ONE, Cluster(tokens=1024))
    assert short.train_s * 32 == pytest.approx(weights_alone, rel=0.05)


def test_generation_is_tokens_times_a_tokens_latency_whatever_the_number_of_gpus():
    for gpus in GPU_COUNTS:
        assert cost(MODELS[0], gpus, ONE, Cluster()).generation_s == pytest.approx(327.68)
    twice = Cluster(tokens=2 * 32768, samples=8)
    assert cost(MODELS[0], 512, ONE, twice).generation_s == pytest.approx(655.36)


def test_leaders_share_the_route_path_and_rank_0_keeps_what_is_not_routes():
    few, many = cost(SMALL, 64, ONE, CLUSTER), cost(SMALL, 512, ONE, CLUSTER)
    for stage in ("receive", "parse", "decode", "cut"):
        assert few.rank0[stage] == many.rank0[stage]
        assert many.leader[stage] == pytest.approx(few.leader[stage] / 8)
    assert few.rank0_beside_leaders["parse"] == many.rank0_beside_leaders["parse"] > 0
    # the token streams go from rank 0 to every other leader once, and from it to the 3 others of 4 ranks
    assert many.data_ranks == 64
    assert many.rank0_beside_leaders["send"] == pytest.approx(49e6 * 63 / 64 / 1e9)
    assert many.leader["send"] == pytest.approx((80e6 + 4 * 49e6) / 64 * 3 / 4 / 1e9)
    assert many.leader["unpack"] == pytest.approx(49e6 / 64 / 1e9)


def test_ids_above_254_take_two_bytes_and_dense_layers_are_not_sent_on():
    dense = replace(SMALL, experts=256, moe_layers=5)
    one, two = cost(SMALL, 64, ONE, CLUSTER), cost(dense, 64, ONE, CLUSTER)
    assert two.route_bytes == 2 * one.route_bytes and two.wire_bytes == one.wire_bytes
    assert two.rank0["cut"] == pytest.approx(one.rank0["cut"])
    assert one.rank0["cut"] == pytest.approx((80e6 + 4 * 49e6) / 1e9)


def test_what_takes_longest_is_looked_for_among_all_parts():
    big = replace(SMALL, active_parameters=1e12)
    assert cost(big, 16, ONE, QUICK).longest() == "training"
    assert cost(SMALL, 4096, ONE, QUICK).longest() == "rank 0's routes"
    assert cost(SMALL, 4096, ONE, CLUSTER).longest() == "generation"
    assert cost(SMALL, 4096, ONE, CLUSTER).longest(but="generation") == "rank 0's routes"
    slow_network = replace(QUICK, nccl_broadcast=0.01)
    assert cost(SMALL, 4096, ONE, slow_network).longest() == "weight sync"


def test_a_step_is_the_longest_of_what_overlaps_and_the_sum_of_what_does_not():
    x = cost(SMALL, 4096, ONE, CLUSTER)
    routes = sum(x.rank0.values())
    before = sum(x.rank0[stage] for stage in ("cut", "message", "send"))
    assert x.generation_s == 10 and routes < 10
    # drain: the update waits for the rollout, and generation for the update
    assert x.step_s() == pytest.approx(10 + x.weights_s)
    # synchronous: everything after one another; spanning one update: two steps for the same
    chain = 10 + before + x.train_s + x.weights_s
    assert x.step_s(spanning=0) == pytest.approx(chain)
    assert x.step_s(spanning=1) == pytest.approx(chain / 2)
    assert x.step_s(spanning=99) == pytest.approx(routes), "rank 0's work is never undercut"
    quick = cost(SMALL, 4096, ONE, replace(QUICK, nccl_broadcast=1e6))
    assert quick.step_s() == pytest.approx(routes)
    assert quick.step_s(leaders=True) == pytest.approx(quick.parts(leaders=True)["rank 0's routes"])
    slow = cost(replace(SMALL, active_parameters=1e15), 64, ONE, CLUSTER)
    assert slow.step_s() == pytest.approx(before + slow.train_s + slow.weights_s, rel=0.01)


def test_rank_0_is_longest_from_as_many_samples_on_as_the_page_says():
    rates, *_ = recorded()
    text = page(rates, Cluster(), "2026-01-01", "a machine")
    for model in MODELS:
        (line,) = [x for x in text.splitlines() if x.startswith(f"- {model.name}: ")]
        said = line.partition("longest from ")[2].partition(" samples")[0]
        enough = int(said.replace(",", ""))
        for samples, longest in ((enough - 1, "generation"), (enough, "rank 0's routes")):
            x = cost(model, 4096, rates, Cluster(samples=samples))
            assert x.longest() == longest, (model.name, samples, x.parts())


def test_a_model_that_does_not_fit_says_so():
    assert not cost(MODELS[1], 64, ONE, Cluster()).fits
    assert "| 64 | | does not fit |" in page(ONE, Cluster(), "2026-01-01", "a machine")


def test_the_page_is_what_the_model_says_of_the_constants_that_it_records():
    rates, when, machine = recorded()
    assert PAGE.read_text() == page(rates, Cluster(), when, machine)


@pytest.mark.slow
def test_weights_are_measured_apart_from_a_plain_send():
    assert measure_gloo(1 << 20, weights=True) > 0
