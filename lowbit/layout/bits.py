"""Canonical codes as dense little-endian bits along K: bit 0 first, each row padded with zeros to whole 32-bit words.

Nothing here knows what a code means or how a kernel reads it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.errors import BadInput, BadType

# Eight codes always fill `bits` whole bytes. These widths have an integer of that size to convert them at once.
_EIGHT_CODES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def num_words(k: int, bits: int) -> int:
    """How many 32-bit words hold a row of `k` codes of `bits` bits."""
    return -(-k * bits // 32)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Uint8 codes (..., K), each below 2**bits -> int32 words (..., ceil(K * bits / 32)), on the same device.

    Raises BadType for another dtype, BadInput for a width outside 1..8 or a code that needs more bits.
    """
    _check(values, torch.uint8, bits)
    if values.numel() and int(values.max()) >> bits:
        raise BadInput(f"a {bits}-bit code must be below {1 << bits}; found {int(values.max())}")
    words = num_words(values.shape[-1], bits)
    packed = functional.pad(values, (0, -values.shape[-1] % 32)).contiguous()
    if bits < 8:
        # In each int64 of eight codes, close the gap between neighbours, then between pairs, then between fours.
        codes = packed.view(torch.int64)
        for half in (1, 2, 4):
            low, high, gap = _halves(half, bits)
            codes = (codes & low) | ((codes & high) >> gap)
        if bits in _EIGHT_CODES:
            packed = codes.to(_EIGHT_CODES[bits])
        else:
            packed = codes.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2).contiguous()
    return packed.view(torch.int32)[..., :words].contiguous()


def unpack_bits(words: Tensor, bits: int, k: int) -> Tensor:
    """Int32 words (..., ceil(k * bits / 32)) -> uint8 codes (..., k), on the same device; inverts `pack_bits`.

    Raises BadType for another dtype, BadInput for a width outside 1..8 or a wrong number of words.
    """
    _check(words, torch.int32, bits)
    if words.shape[-1] != num_words(k, bits):
        raise BadInput(f"{k} codes of {bits} bits fill {num_words(k, bits)} words a row; found {words.shape[-1]}")
    values = functional.pad(words, (0, -words.shape[-1] % bits)).contiguous()
    if bits < 8:
        if bits in _EIGHT_CODES:
            codes = values.view(_EIGHT_CODES[bits]).long()
        else:
            octets = values.view(torch.uint8).view(*values.shape[:-1], values.shape[-1] * 4 // bits, bits)
            codes = functional.pad(octets, (0, 8 - bits)).view(torch.int64).squeeze(-1)
        for half in (4, 2, 1):  # pack_bits backwards: open the gaps again
            low, high, gap = _halves(half, bits)
            codes = (codes & low) | ((codes << gap) & high)
        values = codes
    return values.view(torch.uint8)[..., :k].contiguous()


def _halves(half: int, bits: int) -> tuple[int, int, int]:
    """Masks of the lower and upper `half` codes of every 2 * half bytes, and how far the upper ones move when packed.

    half=2, bits=3, one int32 lane:  ........ ..hhhhhh ........ ..llllll  ->  ........ ........ ....hhhh hhllllll
    """
    lane = 16 * half
    low = sum(((1 << (half * bits)) - 1) << at for at in range(0, 64, lane))
    return low, low << (lane // 2), half * (8 - bits)


def _check(tensor: Tensor, expected: torch.dtype, bits: int) -> None:
    if tensor.dtype != expected:
        raise BadType(f"expected a tensor of {expected}, found {tensor.dtype}")
    if not 1 <= bits <= 8:
        raise BadInput(f"a code has 1 to 8 bits, not {bits}")
