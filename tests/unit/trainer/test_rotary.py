"""Rows of a pack are rotated as Megatron rotates them, to the bit, without a read of the device."""

from __future__ import annotations

import importlib

import pytest
import torch

from r3train.cpu.device import prepare_device

prepare_device()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from r3train.trainer.megatron import rotary  # noqa: E402


class _Group:
    """A context-parallel group of which only the size and this rank's place are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture()
def megatrons(monkeypatch):
    """Megatron's own function, whatever was installed before."""
    module = importlib.util.module_from_spec(rope_utils.__spec__)
    rope_utils.__spec__.loader.exec_module(module)
    return module._apply_rotary_pos_emb_thd


def _pack(generator, cp_size, sequences, least):
    lengths = torch.randint(least, 6, (sequences,), generator=generator) * 2 * cp_size
    lengths[0] = 2 * cp_size  # a pack has a token
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return cu, int(lengths.max())


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_row_is_rotated_as_megatron_does_to_the_bit(megatrons, cp_size, interleaved, latent):
    generator = torch.Generator().manual_seed(cp_size)
    for case in range(24):
        # an empty sequence, which no pack has, is an error in Megatron's interleaved rotation
        cu, longest = _pack(generator, cp_size, 1 + case % 6, least=int(interleaved))
        total = int(cu[-1])
        # of the longest sequence, of more positions than any has, and one for every token of the pack
        for positions in {longest, longest + 3, total}:
            freqs = torch.rand(positions, 1, 1, 8, generator=generator) * 7
            for rank in range(cp_size):
                t = torch.randn(total // cp_size, 3, 10, generator=generator, dtype=torch.bfloat16)
                given = t, cu, freqs, interleaved, latent, 1.3, _Group(rank, cp_size)
                mine, theirs = t.clone().requires_grad_(), t.clone().requires_grad_()
                out = rotary.rotate_packed(mine, *given[1:])
                expected = megatrons(theirs, *given[1:])
                assert torch.equal(out, expected)
                out.float().square().sum().backward()
                expected.float().square().sum().backward()
                assert torch.equal(mine.grad, theirs.grad)


def test_rows_beyond_the_pack_are_refused():
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises((IndexError, RuntimeError)):
        rotary.rotate_packed(torch.ones(9, 1, 4), cu, torch.ones(4, 1, 1, 4), cp_group=_Group(0, 1))


def test_frequencies_that_are_too_few_are_refused():
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises((IndexError, RuntimeError)):
        rotary.rotate_packed(torch.ones(8, 1, 4), cu, torch.ones(3, 1, 1, 4), cp_group=_Group(0, 1))


def test_without_a_group_it_refuses_as_megatron_does(megatrons):
    given = torch.ones(2, 1, 4), torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, 1, 1, 4)
    for function in (megatrons, rotary.rotate_packed):
        with pytest.raises(ValueError, match="cp_group must be provided"):
            function(*given)


def test_megatron_calls_it_once_installed(monkeypatch, megatrons):
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", megatrons)
    rotary.install()
    assert rope_utils._apply_rotary_pos_emb_thd is rotary.rotate_packed
    rotary.install()
    assert rope_utils._apply_rotary_pos_emb_thd is rotary.rotate_packed


def test_a_megatron_whose_function_takes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(
        rope_utils, "_apply_rotary_pos_emb_thd", lambda t, cu_seqlens, freqs, offset: t
    )
    with pytest.raises(
        RuntimeError, match=r"_thd is \(t, cu_seqlens, freqs, offset\), and r3train replaces"
    ):
        rotary.install()
