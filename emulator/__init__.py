"""A strict CPU emulator for the kernels of lowbit/cuda: for tests and for trying things out without a GPU.

It is no part of the wheel. Rules, design and limits are in README.md. How to run a kernel:

    import struct
    import numpy as np
    import emulator

    source = emulator.KernelText(           # a lowbit.jit.source.Source works as well
        text='''
    #include "hw/hw.h"
    using namespace hw;
    struct Params { const u8* x; u8* y; u32 n; };
    HW_KERNEL(64) double_it(const HW_GRID_CONST Params p) {
        const u32 i = ctaid_x() * 64 + tid_x();
        if (i < p.n) st_global_u32(p.y + u64(i) * 4, ld_global_u32(p.x + u64(i) * 4) * 2);
    }
    ''',
        entry="double_it", arch="sm_80", label="double")
    library = emulator.build([source])      # many sources give ONE library: pass them all at once
    with emulator.Memory() as memory:
        x = memory.alloc("x", np.arange(100, dtype=np.uint32), read_only=True)
        y = memory.alloc("y", 400, output=True)
        library.launch(source, struct.pack("<QQI4x", x, y, 100), grid=2, block=64, smem=0, seed=1)
        print(memory.array(y, (100,), np.uint32))

A broken rule raises EmulatorFault with block, thread, file:line and the other party. `launch` takes grid (int or up to
three), block, smem, cluster, seed, arch (default: the source's), resident (clusters that run at the same time; raise it
for kernels whose blocks wait for each other). `mutate(sources, "stream.cuh", old, new)` gives sources with a planted
fault.
"""

from emulator.build import KernelText, build_engine, default_directory, mutate
from emulator.run import EmulatorFault, Library, Memory, arch_number, build, profile, tensor_map

__all__ = [
    "EmulatorFault",
    "KernelText",
    "Library",
    "Memory",
    "arch_number",
    "build",
    "build_engine",
    "default_directory",
    "mutate",
    "profile",
    "tensor_map",
]
