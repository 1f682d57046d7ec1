"""Where every bit of a packed code lies: the words of a lane, cut into pieces that packing moves one by one.

Knows code widths and operand registers; it must not know lanes, rows or what a code means beyond "float". Kernels hold the same
formulas (`Codes::place` in cuda/dequant.cuh); docs/FORMATS.md draws them and says why they are cheap to read.

Codes of `bits` bits for `operand_bits` consecutive registers are a *group* and fill `bits` words. A word is cut into parts of operand_bits
bits, one for every element of a register and all alike; what follows is about the bits of one part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Floats of these widths for 16-bit operands: (lowest magnitude bit, sign bit) of each field of a word, where e2m1, e3m2 and e4m3 need the
# fewest masks and shifts to become bf16.
_FLOATS = {4: ((6, 15), (3, 11), (0, 9), (12, 10)), 6: ((5, 15), (0, 10)), 8: ((4, 15), (0, 11))}


@dataclass(frozen=True)
class Piece:
    """Bits low .. low + width - 1 of a register's code, at bits at .. at + width - 1 of a word's parts."""

    register: int
    low: int
    width: int
    word: int
    at: int


@functools.cache
def pieces(bits: int, operand_bits: int, is_float: bool) -> tuple[Piece, ...]:
    """The pieces of a group, as long as possible; together they fill every bit of its words once."""
    found: list[Piece] = []
    for register in range(operand_bits):
        for bit in range(bits):
            word, at = place(bits, operand_bits, is_float, register, bit)
            last = found[-1] if bit else None
            if last is not None and (word, at) == (last.word, last.at + last.width):
                found[-1] = Piece(register, last.low, last.width + 1, word, last.at)
            else:
                found.append(Piece(register, bit, 1, word, at))
    return tuple(found)


def place(bits: int, operand_bits: int, is_float: bool, register: int, bit: int) -> tuple[int, int]:
    """(word, bit of its parts) where one bit of one register's code lies."""
    fields = operand_bits // bits  # whole ones in a word; between them `left` bits, from `middle` on, are a gap
    left, middle = operand_bits - bits * fields, bits * ((fields + 1) // 2)
    spread = _FLOATS.get(bits) if is_float and operand_bits == 16 else None
    if spread is not None and left:
        middle = spread[0][1] - left
    word, field = divmod(register, fields)
    if word < bits and spread is not None:
        magnitude, sign = spread[field]
        above = 8 if bits == 8 and field == 1 and bit >= 4 else 0  # its upper magnitude bits are at 12..14
        return word, sign if bit == bits - 1 else magnitude + bit + above
    if word < bits:
        return word, field * bits + bit + (left if field * bits >= middle else 0)
    # The last registers: `main` bits of each fill whole gaps, then come the rests, which are the lowest bits in every other register.
    i = register - bits * fields
    main = bits - bits % left
    bit = (bit + i % 2 * main) % bits
    number = i * main + bit if bit < main else left * main + i * (bits - main) + bit - main
    return number // left, middle + number % left
