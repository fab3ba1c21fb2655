"""The scale model's arithmetic, against numbers worked by hand."""

from dataclasses import replace

import pytest

from benchmarks.scale_model import MODELS, Cluster, Model, Rates, cost, page

ONE = Rates(**{name: 1.0 for name in Rates.__dataclass_fields__})
SMALL = Model("small", 10, 10, 8, 128, 1e9, 1e9, 2, 2, 1)
CLUSTER = Cluster(samples=1000, tokens=1000, network=1.0)


def test_bytes_and_seconds_are_those_worked_by_hand():
    x = cost(SMALL, 64, ONE, CLUSTER)
    # 1e6 tokens x 10 layers x 8 slots: a byte each held, 4 bytes and base64's 4/3 on the wire
    assert x.route_bytes == 80e6 and x.wire_bytes == pytest.approx(80e6 * 16 / 3)
    assert x.data_ranks == 8  # 32 GPUs train, 4 hold a replica
    # 10 = 2 x 5 forwards
    assert x.train_s == pytest.approx(10 * 1e9 * 1e6 / (32 * 4e14))
    assert x.rank0["decode"] == pytest.approx(0.08)
    assert x.rank0["receive"] == pytest.approx((80e6 * 16 / 3 + 40e6) / 1e9)
    # streams of 49 bytes go to each of the 4 ranks of a replica; rank 0 keeps its own share
    assert x.rank0["send"] == pytest.approx((80e6 + 4 * 49e6) * 31 / 32 / 1e9)


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


def test_what_is_first_changes_from_training_to_rank_0_as_gpus_are_added():
    slow = cost(SMALL, 16, ONE, CLUSTER)
    assert slow.first == "training" and cost(SMALL, 4096, ONE, CLUSTER).first == "rank 0's routes"


def test_a_model_that_does_not_fit_says_so():
    assert not cost(MODELS[1], 64, ONE, Cluster()).fits
    assert "| 64 | | does not fit |" in page(ONE, Cluster(), "2026-01-01", "a machine")
