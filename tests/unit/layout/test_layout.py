"""Index maps: packing, the zigzag of context parallelism, sequence shares, bins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.layout.microbatch import (
    assign_microbatches,
    build_microbatch,
    current_versions,
    pack_bins,
    row_versions,
    slice_microbatch,
    Streams,
)
from r3train.layout.rows import cp_rows, pack_layout, sp_rows, take_routes, take_rows
from r3train.types import (
    Prompt,
    RankTopology,
    RolloutSample,
    RouteShape,
    RowClass,
    TrainSample,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=8)
SIZES = st.integers(1, 4)


def sample_of(sample_id: int, length: int, layers: int = 3, topk: int = 2) -> TrainSample:
    mask = np.arange(length) >= 2
    return TrainSample(
        RolloutSample(
            sample_id=sample_id,
            group_id=0,
            prompt=Prompt(f"prompt-{sample_id}", 0, "", np.zeros(0, np.int32), None),
            token_ids=np.arange(length, dtype=np.int32) + 100 * sample_id,
            prompt_len=2,
            loss_mask=mask,
            rollout_log_probs=-np.arange(length, dtype=np.float32),
            routed_experts=np.zeros((length - 1, layers, topk), np.uint8),
            weight_versions=np.zeros(length, np.int32),
            finish_reason="stop",
        ),
        reward=0.0,
        advantages=np.where(mask, 1.0, 0).astype(np.float32),
    )


def test_a_rank_takes_the_chunk_of_its_rank_and_its_mirror_image_of_every_sequence():
    rows = np.arange(16)
    cu_seqlens = np.array([0, 8, 16])
    assert cp_rows(rows, cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert cp_rows(rows, cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_a_sequence_that_does_not_divide_by_twice_the_context_size_is_refused():
    with pytest.raises(ValueError, match=r"\[6\] must divide by 2\*cp = 4"):
        cp_rows(np.arange(6), np.array([0, 6]), 2, 0)


@settings(max_examples=200)
@given(lengths=LENGTHS, cp=SIZES, tp=SIZES)
def test_every_token_is_in_exactly_one_share_and_shares_are_equal(lengths, cp, tp):
    layout = pack_layout(np.array(lengths), cp_size=cp, tp_size=tp)
    shares = [
        sp_rows(cp_rows(layout.rows, layout.cu_seqlens_padded, cp, c), tp, t)
        for c in range(cp)
        for t in range(tp)
    ]
    assert len({len(s) for s in shares}) == 1 and len(shares[0]) > 0
    together = np.concatenate(shares)
    assert sorted(together[together >= 0]) == list(range(sum(lengths)))
    assert len(together) == layout.num_rows


@settings(max_examples=100)
@given(lengths=LENGTHS, cp=SIZES, tp=SIZES)
def test_sequence_shares_in_rank_order_are_the_context_share(lengths, cp, tp):
    layout = pack_layout(np.array(lengths), cp_size=cp, tp_size=tp)
    for c in range(cp):
        rank_rows = cp_rows(layout.rows, layout.cu_seqlens_padded, cp, c)
        np.testing.assert_array_equal(
            np.concatenate([sp_rows(rank_rows, tp, t) for t in range(tp)]), rank_rows
        )


@given(lengths=LENGTHS, cp=SIZES, tp=SIZES)
def test_padding_follows_its_sample_and_never_splits_one(lengths, cp, tp):
    layout = pack_layout(np.array(lengths), cp_size=cp, tp_size=tp)
    start = 0
    for i, length in enumerate(lengths):
        first = int(layout.cu_seqlens_padded[i])
        assert layout.rows[first : first + length].tolist() == list(range(start, start + length))
        assert (layout.rows[first + length : layout.cu_seqlens_padded[i + 1]] == -1).all()
        start += length


@given(LENGTHS, SIZES, SIZES, st.sampled_from([(1, 2, 3, 4), (2, 3), (1, 3), ()]))
def test_rows_and_layers_are_the_ones_named_whether_copied_in_runs_or_one_by_one(
    lengths, cp_size, tp_size, numbers
):
    layout = pack_layout(np.array(lengths, np.int32), cp_size=cp_size, tp_size=tp_size)
    layers = np.array(numbers, dtype=np.int32)
    for dtype, topk in ((np.int64, 2), (np.uint8, 8), (np.uint16, 3)):
        stream = np.arange(sum(lengths) * 4 * topk).astype(dtype).reshape(-1, 4, topk)
        for rows in (layout.rows, layout.rows[::-1], np.repeat(layout.rows, 40)):
            wanted = np.full((len(rows), len(numbers), topk), 7, dtype)
            wanted[rows >= 0] = stream[rows[rows >= 0]][:, layers - 1]
            for parts in ([stream], np.split(stream, [1, 2, 2, len(stream) // 2 + 2])):
                rows_taken = take_routes(parts, layers, rows, fill=7)
                np.testing.assert_array_equal(rows_taken, wanted)
                assert all(rows_taken[:, i].flags.c_contiguous for i in range(len(numbers)))


def test_taking_rows_fills_padding_and_keeps_the_dtype():
    rows_taken = take_rows(np.array([[1, 2], [3, 4]], np.uint8), np.array([1, -1, 0]), fill=255)
    assert rows_taken.tolist() == [[3, 4], [255, 255], [1, 2]] and rows_taken.dtype == np.uint8
    assert take_rows(np.zeros((0, 2)), np.array([-1, -1]), fill=7).tolist() == [[7, 7]] * 2


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    budget=st.integers(50, 120),
    multiple=st.integers(1, 6),
)
def test_bins_hold_every_sample_once_within_the_budget(lengths, budget, multiple):
    bins = pack_bins(lengths, budget, num_bins_multiple=multiple)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for b in bins) and len(bins) % multiple == 0
    dealt = assign_microbatches(bins, lengths, multiple)
    assert len({len(rank) for rank in dealt}) == 1
    assert sorted(map(tuple, (b for rank in dealt for b in rank))) == sorted(map(tuple, bins))


def test_what_belongs_to_the_next_token_never_comes_from_the_next_sample():
    samples = [sample_of(1, 4), sample_of(2, 3)]
    batch = build_microbatch(0, samples, Streams(RouteShape(3, 2, 8)), cp_size=1, tp_size=1)
    assert batch.labels.tolist() == [101, 102, 103, 0, 201, 202, 0]
    assert batch.loss_mask.tolist() == [False, True, True, False, False, True, False]
    assert batch.rollout_log_probs.tolist() == [-1, -2, -3, 0, -1, -2, 0]
    routes = np.concatenate(batch.routes)
    assert (routes[[3, 6]] == 255).all() and (routes[[0, 1, 2, 4, 5]] == 0).all()


def test_a_teachers_log_probs_move_with_their_tokens_and_are_refused_where_they_lack():
    def taught(sample_id: int, length: int) -> TrainSample:
        s = sample_of(sample_id, length)
        log_probs = -np.arange(length, dtype=np.float32) / 10 * s.sample.loss_mask
        return replace(s, sample=replace(s.sample, teacher_log_probs=log_probs))

    how = {"cp_size": 2, "tp_size": 1}
    batch = build_microbatch(0, [taught(1, 4), taught(2, 3)], Streams(teacher=True), **how)
    assert batch.teacher_log_probs == pytest.approx([0, -0.2, -0.3, 0, 0, -0.2, 0])
    place = RankTopology(world_size=2, cp_rank=1, cp_size=2, moe_layer_numbers=((),))
    share = slice_microbatch(batch, place)
    # each sequence's middle: rows 1 and 2
    assert share.teacher_log_probs == pytest.approx([-0.2, -0.3, -0.2, 0])
    assert build_microbatch(0, [taught(1, 4)], Streams(), **how).teacher_log_probs is None
    with pytest.raises(ValueError, match=r"sample 2 \(prompt prompt-2\) has none of the teacher's"):
        build_microbatch(0, [taught(1, 4), sample_of(2, 3)], Streams(teacher=True), **how)


def test_a_row_is_of_the_version_of_the_next_token_that_weights_generated():
    """Prompt 0..1, an answer of two versions, an environment's token, an answer, a last word of its own."""
    sample = sample_of(0, 9).sample
    sample = replace(sample, weight_versions=np.array([-1, -1, 3, 3, 4, -1, 5, 5, -1], np.int32))
    assert row_versions(sample).tolist() == [3, 3, 3, 4, 5, 5, 5, -1, -1]
    # a prefix from a cache that updates leave alone may be of any version
    kept = row_versions(sample, fresh_prefixes=False)
    assert kept.tolist() == [-1, 3, 3, 4, -1, 5, 5, -1, -1]
    # what the actor compares: rows whose prefix is of their own version
    assert current_versions(sample).tolist() == [3, 3, 3, -1, -1, -1, -1, -1, -1]
    assert (current_versions(sample, fresh_prefixes=False) == -1).all()
    train = replace(sample_of(0, 9), sample=sample)
    streams = Streams(RouteShape(3, 2, 8))
    batch = build_microbatch(0, [train], streams, cp_size=1, tp_size=4, rollout_id=5)
    # only of tokens that weights drew
    assert batch.ages.tolist() == [0, 2, 2, 1, 0, 0, 0, 0, 0]
    share = slice_microbatch(batch, RankTopology(moe_layer_numbers=((2,),)))
    assert share.ages.tolist() == [0, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    place = RankTopology(
        tp_rank=1, tp_size=4, sequence_parallel=True, moe_layer_numbers=((1, 2, 3),)
    )
    assert slice_microbatch(batch, place).route_versions.tolist() == [-1, -1, -1]
    first = replace(place, tp_rank=0)
    assert slice_microbatch(batch, first).route_versions.tolist() == [3, 3, 3]
    last = replace(place, tp_rank=3)
    assert slice_microbatch(batch, last).route_versions.tolist() == [-1, -1, -1]


def kept_sample(sample_id: int, *rows: list[int]) -> TrainSample:
    """A sample of 2 prompt tokens and one token for each row of kept ids, the first of which was drawn."""
    train = sample_of(sample_id, 2 + len(rows))
    sample = replace(
        train.sample,
        prompt_len=2,
        token_ids=np.array([5, 6, *(row[0] for row in rows)], np.int32),
        loss_mask=np.arange(2 + len(rows)) >= 2,
        mask_counts=np.array([0, 0, *map(len, rows)], np.int32),
        mask_ids=np.array([i for row in rows for i in row], np.int32),
    )
    return replace(train, sample=sample)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_sampling_mask_stand_at_the_row_that_predicts_their_token_on_every_rank(cp_size, tp_size):
    random = np.random.default_rng(cp_size)
    samples, expected = [], {}
    for i, length in enumerate((1, 9, 4)):
        rows = [random.permutation(40)[: random.integers(1, 6)].tolist() for _ in range(length)]
        samples.append(kept_sample(i, *rows))
        expected |= {(i << 24) + 1 + t: row for t, row in enumerate(rows)}
    shape = RouteShape(3, 2, 8)
    batch = build_microbatch(
        0, samples, Streams(shape, sampling_mask=True), cp_size=cp_size, tp_size=tp_size
    )
    found = {}
    for cp_rank in range(cp_size):
        place = RankTopology(
            cp_rank=cp_rank, cp_size=cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1
        )
        share = slice_microbatch(batch, place)
        ends = np.cumsum(share.mask_counts)
        assert ends[-1] == len(share.mask_ids)
        for uid, end, count, label in zip(
            share.token_uids.tolist(), ends, share.mask_counts, share.labels
        ):
            if count:
                found[uid] = share.mask_ids[end - count : end].tolist()
                assert found[uid][0] == label
        assert (share.mask_counts[share.loss_mask] > 0).all()
        # an earlier stage computes no log-probs: it is sent none
        early = slice_microbatch(batch, replace(place, pp_size=2, pp_rank=0))
        assert early.mask_counts is None and early.mask_ids is None
    assert found == expected


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"mask_counts": None, "mask_ids": None},
            "came without a sampling mask: --rollout-top-k needs",
        ),
        ({"mask_counts": np.array([0, 0, 1, 0], np.int32)}, "1 in all, and 3 sampling masks"),
        (
            {"mask_counts": np.array([0, 0, 3, 0], np.int32)},
            "token 3 has no sampling mask",
        ),
        ({"mask_counts": np.array([0, 2, 1], np.int32)}, "has 3 counts .* expected 4 counts"),
    ],
)
def test_a_sample_in_the_loss_without_its_sampling_mask_is_refused_by_name(change, message):
    good = kept_sample(5, [7, 8], [9])
    bad = replace(good, sample=replace(good.sample, **change))
    place = {"cp_size": 1, "tp_size": 1}
    with pytest.raises(ValueError, match=rf"^sample 5 \(prompt prompt-5\).*{message}"):
        build_microbatch(0, [bad], Streams(sampling_mask=True), **place)
    with pytest.raises(ValueError, match="sample 5 .* was sampled within a sampling mask"):
        build_microbatch(0, [good], Streams(), **place)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    cp=SIZES,
    tp=SIZES,
    seed=st.integers(0, 99),
)
def test_a_row_keeps_its_class_on_whichever_rank_it_lies(lengths, cp, tp, seed):
    samples = [sample_of(i, n) for i, n in enumerate(lengths)]
    rng = np.random.default_rng(seed)
    classes = {i: rng.integers(0, 5, n).astype(np.uint8) for i, n in enumerate(lengths)}
    samples = [
        replace(s, sample=replace(s.sample, row_classes=classes[s.sample.sample_id]))
        for s in samples
    ]
    shape = RouteShape(num_layers=3, topk=2, num_experts=8)
    batch = build_microbatch(0, samples, Streams(shape), cp_size=cp, tp_size=tp)
    found = {}
    for rank in range(cp):
        place = RankTopology(
            tp_size=tp, cp_rank=rank, cp_size=cp, sequence_parallel=tp > 1, world_size=cp * tp
        )
        share = slice_microbatch(batch, place)
        real = share.token_uids >= 0
        found |= zip(share.token_uids[real].tolist(), share.row_classes[real].tolist())
        assert (share.row_classes[~real] == RowClass.FILLED).all()
    expected = {
        (i << 24) + t: int(row_class)
        for i, classes_of_sample in classes.items()
        for t, row_class in enumerate(classes_of_sample)
    }
    assert found == expected
    without = build_microbatch(0, samples, Streams(), cp_size=cp, tp_size=tp)
    assert without.row_classes is None and slice_microbatch(without, place).row_classes is None
