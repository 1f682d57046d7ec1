"""The facts of every chip lowbit generates code for, one row each.

Holds capabilities, limits and rates only; it must not know number formats, kernels or the CUDA driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowbit.errors import BadInput

KB = 1024


@dataclass(frozen=True)
class Arch:
    """One chip (or family of chips that run the same code).

    Limits come from the compute-capability tables of the CUDA C++ Programming Guide; rates of sm_90a were measured on
    one H200 (docs/notes/2026-12-01-h200.md), the others are data-sheet figures of the largest chip: they rank plans and
    bound what is possible, no more.
    """

    name: str  # "sm_90a": what compilers call it too, unless it has a `target`
    level: int  # compute capability x 10, what `__CUDA_ARCH__ / 10` would be; instructions are gated on it
    smem_per_block: int  # bytes a block may use
    smem_per_sm: int  # bytes
    threads_per_sm: int
    sms: int  # of the chip named in `chip`; a launch asks the device
    read_gbs: float  # sustained read bandwidth, GB/s
    mma_tflops: float  # dense fp16 mma.sync rate, TFLOP/s
    chip: str
    clusters: bool = False  # thread-block clusters with distributed shared memory
    peak_tflops: float = 0.0  # dense 16-bit rate of the fastest instruction, TFLOP/s; 0: that is mma.sync
    rates: str = "data-sheet rates"  # where read_gbs and the tensor rates come from
    target: str = ""  # of a chip that is not NVIDIA's: the chip whose code its maker's own compiler is asked for
    devices: str = ""  # and how the names of such devices begin

    @property
    def wgmma(self) -> bool:
        """Warpgroup products (Hopper's sm_90a alone)."""
        return self.name == "sm_90a"

    @property
    def bf16(self) -> bool:
        """bf16 tensor-core products and packed bf16 arithmetic exist."""
        return self.level >= 80

    @property
    def cp_async(self) -> bool:
        return self.level >= 80

    @property
    def bulk(self) -> bool:
        """1-D bulk copies, mbarriers with transaction counts and programmatic dependent launch exist."""
        return self.level >= 90

    @property
    def roof(self) -> str:
        """For people: the rates that `floor_us` divides by, and where they come from."""
        peak = self.peak_tflops or self.mma_tflops
        return f"{self.read_gbs:,.0f} GB/s and {peak:,.0f} TFLOP/s, {self.rates}"

    def floor_us(self, moved_bytes: int, flops: int) -> float:
        """Microseconds that no kernel can be under: the longer of moving the bytes and of the 16-bit operations."""
        return max(moved_bytes / (self.read_gbs * 1e3), flops / ((self.peak_tflops or self.mma_tflops) * 1e6))


_ROWS = (
    Arch("sm_75", 75, 64 * KB, 64 * KB, 1024, 72, 620.0, 130.0, "Quadro RTX 6000"),
    Arch("sm_80", 80, 163 * KB, 164 * KB, 2048, 108, 1750.0, 312.0, "A100"),
    Arch("sm_86", 86, 99 * KB, 100 * KB, 1536, 84, 860.0, 155.0, "A40, RTX 3090"),
    Arch("sm_87", 87, 163 * KB, 164 * KB, 1536, 16, 180.0, 42.0, "Jetson AGX Orin"),
    Arch("sm_89", 89, 99 * KB, 100 * KB, 1536, 128, 920.0, 330.0, "RTX 4090, L40S"),
    Arch("sm_90a", 90, 227 * KB, 228 * KB, 2048, 132, 4570.0, 580.0, "H100, H200", True, 790.0, "measured on one H200"),
    Arch("sm_100a", 100, 227 * KB, 228 * KB, 2048, 148, 7000.0, 580.0, "B200", True, 2250.0),
    Arch("sm_103a", 103, 227 * KB, 228 * KB, 2048, 148, 7000.0, 580.0, "B300", True, 2250.0),
    Arch("sm_110a", 110, 227 * KB, 228 * KB, 2048, 20, 250.0, 60.0, "Jetson Thor", True, 258.0),
    Arch("sm_120a", 120, 99 * KB, 100 * KB, 1536, 170, 1600.0, 400.0, "RTX 5090"),
    Arch("sm_121a", 121, 99 * KB, 100 * KB, 1536, 48, 250.0, 100.0, "GB10"),
)
# CUDA-compatible accelerators of other makers. Zhenwu 810E (T-Head PPU): 96 GB of HBM2e, PCIe 5.0 x16, 700 GB/s to other chips and the
# instruction set of level 80 are published; 72 SMs and the device name are what its users report. The rest is assumed: of the limits
# the least that any chip of level 8x has, so that no kernel asks for too much; of the rates an A100's, which only rank plans.
_OTHERS = (
    Arch("zhenwu_810e", 80, 99 * KB, 100 * KB, 1536, 72, 1750.0, 208.0, "T-Head Zhenwu 810E", target="sm_80", devices="PPU-ZW810"),
)
ARCHS: dict[str, Arch] = {row.name: row for row in (*_ROWS, *_OTHERS)}


def arch(name: str) -> Arch:
    """The row called `name` ("sm_90a"; "sm_90" finds it too). Raises BadInput listing the known rows."""
    found = ARCHS.get(name) or ARCHS.get(name + "a")
    if found is None:
        raise BadInput(f"arch must be one of {', '.join(ARCHS)}; got {name!r}")
    return found


def arch_of_device(name: str, major: int, minor: int, sms: int) -> Arch:
    """The row for the device that its driver calls `name`: of another maker's chip, else by its compute capability."""
    found = next((row for row in _OTHERS if name.startswith(row.devices)), None)
    return replace(found, sms=sms) if found else arch_of_capability(major, minor, sms)


def arch_of_capability(major: int, minor: int, sms: int = 0) -> Arch:
    """The row for an NVIDIA device of compute capability `major.minor`, with the device's own number of SMs.

    A chip without a row of its own uses the newest row of its generation that is not newer than it, without the
    instructions special to that row's chip; a chip older than Turing is refused with BadInput.
    """
    level = 10 * major + minor
    exact = next((row for row in _ROWS if row.level == level), None)
    if exact is None:
        older = [row for row in _ROWS if row.level < level]
        if not older:
            raise BadInput(f"the GPU must be Turing (compute capability 7.5) or newer; got {major}.{minor}")
        # Only the plain instruction set is upward compatible: no 'a' suffix, no clusters, the smallest shared memory.
        exact = replace(
            older[-1],
            name=f"sm_{level}",
            level=level,
            clusters=False,
            smem_per_block=99 * KB,
            smem_per_sm=100 * KB,
            chip=f"unknown chip of compute capability {major}.{minor}",
            rates=f"the rates of the {older[-1].chip}: those of this chip are not known",
        )
    return replace(exact, sms=sms) if sms else exact
