"""Memory of received buckets: one after another share it, and no tensor is written over that is still held."""

import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from r3train.cpu import received_bucket
from r3train.patches import undo

KIND = (["a", "b"], ["float32", "bfloat16"], [[2, 3], [4]], "cpu")


def received(value):
    bucket = FlattenedTensorBucket.empty(*KIND)
    assert bucket.get_flattened_tensor().nbytes == 32
    bucket.get_flattened_tensor().fill_(value)
    return bucket.reconstruct_tensors()


def addresses(tensors):
    return [tensor.data_ptr() for _, tensor in tensors]


def test_buckets_share_memory_one_after_another_and_a_tensor_that_is_held_is_never_written_over():
    received_bucket.keep()
    try:
        first = received(1)
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in first] == [
            ("a", torch.float32, (2, 3)),
            ("b", torch.bfloat16, (4,)),
        ]
        place = addresses(first)
        del first
        second = received(2)
        assert addresses(second) == place
        held = second[1][1]
        del second
        third = received(3)
        assert addresses(third) != place
        assert held.view(torch.uint8).tolist() == [2] * 8
    finally:
        undo(FlattenedTensorBucket, "empty")
