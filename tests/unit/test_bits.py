"""Canonical bit order: against a hand-drawn vector and against Python's own big integers."""

from __future__ import annotations

import pytest
import torch

from lowbit.errors import BadInput, BadType
from lowbit.layout.bits import num_words, pack_bits, unpack_bits

WIDTHS = range(1, 9)


def random_codes(shape: tuple[int, ...], bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))


def test_hand_drawn_3_bit_row() -> None:
    # Code 10 has its low two bits at the top of word 0 and its high bit at the bottom of word 1.
    codes = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0b110, 0b101], dtype=torch.uint8)
    words = pack_bits(codes, 3)
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0b10 << 30 | 1, 0b101 << 1 | 0b1]
    assert torch.equal(unpack_bits(words, 3, 12), codes)


def test_first_code_is_in_the_low_bits() -> None:
    assert pack_bits(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8), 4).tolist() == [0x87654321 - 2**32]
    assert pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 8).tolist() == [0x030201]
    assert pack_bits(torch.tensor([1, 1, 0, 1], dtype=torch.uint8), 1).tolist() == [0b1011]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("k", [1, 7, 8, 9, 31, 32, 33, 64, 100, 257])
def test_bits_match_a_big_integer(bits: int, k: int) -> None:
    codes = random_codes((3, k), bits)
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (3, num_words(k, bits)) == (3, (k * bits + 31) // 32)
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        number = sum(code << (i * bits) for i, code in enumerate(row))
        assert sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(packed)) == number  # padding is zero
    assert torch.equal(unpack_bits(words, bits, k), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_any_shape_and_stride(bits: int) -> None:
    codes = random_codes((4, 6, 40), bits)
    strided = codes[::2, 1::2, 3:36].transpose(0, 1)
    words = pack_bits(strided, bits)
    assert torch.equal(unpack_bits(words, bits, 33), strided)
    wide = torch.zeros((3, 2, words.shape[-1], 2), dtype=torch.int32)
    wide[..., 1] = words
    assert torch.equal(unpack_bits(wide[..., 1], bits, 33), strided)
    column = random_codes((5, 1), bits).T.contiguous().T  # a last dimension of size 1 with a stride that is not 1
    assert torch.equal(unpack_bits(pack_bits(column, bits).T.contiguous().T, bits, 1), column)
    assert pack_bits(codes[:0], bits).shape == (0, 6, num_words(40, bits))
    assert unpack_bits(pack_bits(codes[:0], bits), bits, 40).shape == (0, 6, 40)


@pytest.mark.parametrize("bits", WIDTHS)
def test_arguments_are_left_alone(bits: int) -> None:
    codes = random_codes((2, 64), bits)
    before, words = codes.clone(), pack_bits(codes, bits)
    packed = words.clone()
    unpack_bits(words, bits, 64)
    assert torch.equal(codes, before)
    assert torch.equal(words, packed)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BadInput, match="3-bit code must be below 8; found 8"):
        pack_bits(torch.tensor([0, 8], dtype=torch.uint8), 3)
    with pytest.raises(BadType, match=r"torch.uint8, found torch.int64"):
        pack_bits(torch.tensor([1]), 3)
    with pytest.raises(BadType, match=r"torch.int32, found torch.int64"):
        unpack_bits(torch.tensor([1]), 3, 1)
    with pytest.raises(BadInput, match="11 codes of 3 bits fill 2 words a row; found 1"):
        unpack_bits(torch.zeros(1, dtype=torch.int32), 3, 11)
    for bits in (0, 9):
        with pytest.raises(BadInput, match=f"1 to 8 bits, not {bits}"):
            pack_bits(torch.zeros(4, dtype=torch.uint8), bits)
