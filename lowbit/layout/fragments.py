"""Where the tensor core wants each weight: the A-operand maps of the MMA shapes, as data that checks itself.

Knows rows, k and lanes inside one 16-row unit; it must not know formats, scales or files.

A unit is 16 rows x 128 k. In it, lane 4g+t holds rows g and g+8. For 16-bit operands (mma m16n8k16, wgmma m64k16) step s covers
k = 16s..16s+15 and register a (0..3), element e (0..1) is row g + 8(a&1), k = 16s + 8(a>>1) + 2t + e. For 8-bit operands
(m16n8k32, wgmma m64k32) step s covers k = 32s..32s+31 and register a, element e (0..3) is row g + 8(a&1), k = 32s + 16(a>>1) + 4t + e.
Slot j = 4s + a counts a lane's registers through the unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT_ROWS = 16
UNIT_K = 128


@dataclass(frozen=True)
class FragmentMap:
    """The A-operand map of one operand width."""

    operand_bits: int  # 16 or 8

    @property
    def elements(self) -> int:
        """Codes per 32-bit operand register."""
        return 32 // self.operand_bits

    @property
    def steps(self) -> int:
        """MMA k steps in a unit."""
        return UNIT_K // (8 * self.elements)

    @property
    def slots(self) -> int:
        """Operand registers of a lane in a unit."""
        return 4 * self.steps

    def split(self, codes: torch.Tensor) -> torch.Tensor:
        """(blocks*16, k_blocks*128) -> strided view (blocks, k_blocks, g 8, t 4, step, a>>1, a&1, element)."""
        rows, k = codes.shape
        view = codes.view(rows // UNIT_ROWS, 2, 8, k // UNIT_K, self.steps, 2, 4, self.elements)
        return view.permute(0, 3, 2, 6, 4, 5, 1, 7)

    def join(self, view: torch.Tensor) -> torch.Tensor:
        """Inverse of `split`: (blocks, k_blocks, 8, 4, steps, 2, 2, elements) -> (blocks*16, k_blocks*128)."""
        blocks, k_blocks = view.shape[:2]
        return view.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(blocks * UNIT_ROWS, k_blocks * UNIT_K)

    def place(self, row: int, k: int) -> tuple[int, int, int]:
        """(lane, slot, element) that hold (row, k) of a unit; written from the PTX tables, independent of `split`."""
        half = 4 * self.elements  # k values between register pairs
        step, within = divmod(k, 2 * half)
        upper, pos = divmod(within, half)
        t, element = divmod(pos, self.elements)
        return row % 8 * 4 + t, step * 4 + upper * 2 + row // 8, element
