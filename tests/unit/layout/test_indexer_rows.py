"""The choices of an indexer in microbatches and slices: each row has its own, on whichever rank it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from r3train.ids import split_uids
from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
from r3train.loop.distribute import pack_records, unpack_records
from r3train.routing.fingerprint import indexer_fingerprint, indexer_hashes, to_unsigned
from r3train.routing.indexer_topk import num_words, to_bits
from r3train.trainer.megatron.indexer_replay import flags_at, flags_of, words_of
from r3train.types import RankTopology, RouteShape, TrainSample
from tests.unit.layout.test_layout import sample_of

SHAPE = RouteShape(num_layers=4, topk=2, num_experts=4)
TOPK = 3
LENGTHS = [150, 3, 7, 4]


def chosen_by(length: int) -> np.ndarray:
    """Return tokens of every row that needs them, int[R, L, K]."""
    random = np.random.default_rng(length)
    ids = [
        [random.permutation(position + 1)[:TOPK] for _ in range(SHAPE.num_layers)]
        for position in range(TOPK, length - 1)
    ]
    return np.array(ids, int).reshape(-1, SHAPE.num_layers, TOPK)


def sample(sample_id: int, length: int) -> TrainSample:
    made = sample_of(sample_id, length, SHAPE.num_layers)
    bits = to_bits(chosen_by(length), num_words(length))
    return replace(made, sample=replace(made.sample, indexer_topk=bits))


def built(samples, **sizes):
    return build_microbatch(
        0, samples, Streams(SHAPE, index_topk=TOPK), **{"cp_size": 1, "tp_size": 1} | sizes
    )


@pytest.mark.parametrize("cp_size, tp_size", [(1, 1), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("layers", [((1, 2, 3, 4),), ((2,), (4,)), ((),)])
def test_a_row_has_the_tokens_that_its_own_layers_chose(cp_size, tp_size, layers):
    microbatch = built(
        [sample(i, n) for i, n in enumerate(LENGTHS)], cp_size=cp_size, tp_size=tp_size
    )
    seen, last = 0, LENGTHS[0]
    for cp_rank in range(cp_size):
        place = RankTopology(
            cp_rank=cp_rank,
            cp_size=cp_size,
            tp_size=tp_size,
            sequence_parallel=tp_size > 1,
            moe_layer_numbers=((1,),),
            indexer_layer_numbers=layers,
        )
        (rank_slice,) = unpack_records(pack_records([slice_microbatch(microbatch, place)]))
        numbers = sum(layers, ())
        assert rank_slice.indexer_layers.tolist() == list(numbers)
        assert rank_slice.indexer_topk.shape == (rank_slice.num_rows, len(numbers), num_words(last))
        # read layer by layer
        assert all(rank_slice.indexer_topk[:, i].flags.c_contiguous for i in range(len(numbers)))
        for row, uid in enumerate(rank_slice.token_uids):
            number, position = (int(x[0]) for x in split_uids(np.array([max(uid, 0)])))
            for i, layer in enumerate(numbers):
                octets = rank_slice.indexer_topk[row, i].view(np.uint8)
                tokens = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
                if uid < 0 or position < TOPK or position == LENGTHS[number] - 1:
                    assert tokens == []
                else:
                    expected = chosen_by(LENGTHS[number])[position - TOPK, layer - 1]
                    assert tokens == sorted(expected.tolist())
                    seen += 1
    assert seen == sum(max(0, n - 1 - TOPK) for n in LENGTHS) * len(sum(layers, ()))


def test_without_a_replayed_indexer_nothing_is_sent():
    microbatch = build_microbatch(0, [sample(0, 9)], Streams(SHAPE), cp_size=1, tp_size=1)
    rank_slice = slice_microbatch(microbatch, RankTopology(indexer_layer_numbers=((1,),)))
    assert rank_slice.indexer_topk is rank_slice.indexer_layers is rank_slice.token_versions is None


def test_a_sample_without_its_choices_is_refused_by_name():
    bare = sample_of(5, 9, SHAPE.num_layers)
    with pytest.raises(ValueError, match=r"sample 5 \(prompt prompt-5\) came without the choices"):
        built([bare])
    built([sample_of(5, TOPK + 1, SHAPE.num_layers)])  # it needs none
    short = replace(
        bare, sample=replace(bare.sample, indexer_topk=sample(5, 8).sample.indexer_topk)
    )
    with pytest.raises(ValueError, match=r"choices of its indexer \(4, 4\), expected \(5, 4\)"):
        built([short])


def test_the_fingerprints_of_both_sides_are_equal_and_words_without_bits_change_nothing():
    bits, numbers = sample(3, 150).sample.indexer_topk, [6, 7, 8, 9]
    ours = indexer_fingerprint(3, bits, np.array(numbers), TOPK)
    wider = np.pad(bits, ((0, 0), (0, 0), (0, 2)))
    assert (indexer_fingerprint(3, wider, np.array(numbers), TOPK) == ours).all()
    uids = torch.arange(TOPK, 149) + (3 << 24)
    for i, number in enumerate(numbers):
        words = torch.from_numpy(wider[:, i].copy().view(np.int64))
        assert to_unsigned(int(indexer_hashes(uids, words, number).sum())) == int(ours[i])
    parts = [(TOPK, bits[:50]), (TOPK + 50, bits[50:])]
    sums = sum(indexer_fingerprint(3, part, np.array(numbers), first) for first, part in parts)
    assert (sums == ours).all()
    for changed in (
        bits ^ (np.arange(bits.size).reshape(bits.shape) == 7).astype(np.uint64),
        np.roll(bits, 1, axis=0),
        np.roll(bits, 1, axis=1),
        np.roll(bits, 1, axis=2),
    ):
        assert (indexer_fingerprint(3, changed, np.array(numbers), TOPK) != ours).any()
    assert (indexer_fingerprint(4, bits, np.array(numbers), TOPK) != ours).all()


def test_flags_and_words_are_each_others_inverse():
    bits = torch.from_numpy(sample(0, 150).sample.indexer_topk[:, 0].copy().view(np.int64))
    flags = flags_of(bits)
    assert flags.shape == (len(bits), 192) and (flags.sum(1) == TOPK).all()
    assert (words_of(flags) == bits).all()
    assert (flags_at(flags.topk(TOPK, dim=1).indices, 3) == flags).all()
    outside = flags_at(torch.tensor([[-1, 64, 5], [63, 63, 200]]), 1)
    assert outside.sum(1).tolist() == [1, 1] and outside[0, 5] == outside[1, 63] == 1
