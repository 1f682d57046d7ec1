"""Small kernels with one mistake each, and the words the report must contain; and right ones that must pass.

Each is run with several seeds: a mistake must be reported whatever order a run took, a right kernel never.
"""

# ruff: noqa: E501 - a kernel a line, so that the list reads as a table
from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import pytest

import emulator

HEAD = """#include "hw/hw.h"
using namespace hw;
struct Params { u8* in; u8* out; };
"""
SEEDS = range(1, 7)


@dataclass(frozen=True)
class Kernel:
    """want: words of the report ("" = the kernel is right). Launched with 4096 bytes of shared memory."""

    risk: str
    want: str
    body: str
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    resident: int = 1
    dependent: bool = False
    every_seed: bool = True
    arch: str = "sm_90a"


def product(risk: str, want: str, *edits: tuple[str, str]) -> Kernel:
    """A wgmma with A from registers, with some of its lines changed."""
    body = """
        for (u32 i = t * 16; i < 2048; i += 2048) st_shared_v4(s + i, U4{0, 0, 0, 0});
        FENCE_ASYNC syncthreads();
        const u64 b = (u64)(s >> 4) | 8ull << 16 | 16ull << 32;
        Regs<u32, 4> a; Regs<float, 32> d;
        for (int i = 0; i < 4; ++i) a[i] = 0;
        WG_FENCE AFTER_FENCE
        PRODUCT
        wgmma_commit();
        IN_FLIGHT WAIT
        CHECK"""
    texts = {
        "FENCE_ASYNC": "fence_async();", "WG_FENCE": "wgmma_fence();", "AFTER_FENCE": "", "PRODUCT": "wgmma_bf16_rs(d, a, b, false);",
        "IN_FLIGHT": "", "WAIT": "wgmma_wait<0>();", "CHECK": 'if (d[5] != 0) emu::fault("wrong");',
    }  # fmt: skip
    texts |= dict(edits)
    for name, text in texts.items():
        body = re.sub(rf"\b{name}\b", text, body)
    return Kernel(risk, want, body, 128)


SETUP = "mbar_init(s, 1); fence_mbar_init();"


def refill(risk: str, want: str, *, between: str, threads: int = 32) -> Kernel:
    """Warp 0 reads 512 bytes that a bulk copy brought; `between` orders the next copy, `AGAIN;`, over the same bytes."""
    again = "{ mbar_arrive_expect_tx(s + 8, 512); bulk_load(s + 64, p.in + 512, 512, s + 8); }"
    body = f"""
        if (t == 0) {{ mbar_init(s, 1); mbar_init(s + 8, 1); mbar_init(s + 16, 32); mbar_init(s + 24, 1); fence_mbar_init(); }}
        syncthreads();
        if (t == 0) {{ mbar_arrive_expect_tx(s, 512); bulk_load(s + 64, p.in, 512, s); }}
        const auto read = [&] {{ mbar_wait(s, 0); ld_shared_v4(s + 64 + t * 16); }};
        {between.replace("AGAIN;", again)}
        mbar_wait(s + 8, 0);"""
    return Kernel(risk, want, body, threads)


UNFENCED = "executed no fence.proxy.async between its read and the barrier before this copy"
KERNELS = [
    Kernel("named barriers, right", "", "if (t < 32) { st_shared_u32(s + t * 4, 1); bar_arrive(2, 64); } else { bar_sync(2, 64); ld_shared_u32(s + (t - 32) * 4); }"),
    Kernel("named barrier, one warp missing", "barrier 3: 32 of 64", "if (t < 32) bar_sync(3, 64);"),
    Kernel("named barrier, different counts", "the first to arrive expected", "bar_sync(4, t < 32 ? 64 : 32);", every_seed=False),
    Kernel("barrier for more threads than the block has", "in a block of 64", "bar_sync(1, 96);"),
    Kernel("barrier in a branch", "barrier 0: 63 of 64", "if (t != 5) syncthreads();"),
    Kernel("exchange within a warp, right", "", "st_shared_u32(s + t * 4, t); syncwarp(); if (ld_shared_u32(s + (t ^ 1) * 4) != (t ^ 1)) emu::fault(\"wrong\");"),
    Kernel("exchange within a warp, no syncwarp", "reads shared", "st_shared_u32(s + t * 4, t); ld_shared_u32(s + (t ^ 1) * 4);"),
    Kernel("two threads store to one word", "race: st.shared", "st_shared_u32(s, 1);"),
    Kernel("two threads store to halves of a word, right", "", "st_shared_u16(s + t * 2, 1);"),
    Kernel("two threads store to bytes of a word, right", "", "st_shared_u8(s + t, 1); syncthreads(); ld_shared_u32(s);"),
    Kernel("overwritten while read", "may still be reading", "if (t < 16) st_shared_u32(s + t * 4, 1); syncthreads(); ld_shared_u32(s + t % 16 * 4); if (t == 63) st_shared_u32(s, 2);"),
    Kernel("read before written", "never written", "ld_shared_u32(s + 64);"),
    Kernel("shared atomics on one word, right", "", "if (t == 0) st_shared_u32(s, 0); syncthreads(); atom_shared_add_u32(s, 1); syncthreads(); if (ld_shared_u32(s) != 64) emu::fault(\"wrong\");"),
    Kernel("shared atomic against a plain read", "race", "if (t == 0) st_shared_u32(s, 0); syncthreads(); if (t) atom_shared_add_u32(s, 1); else ld_shared_u32(s);"),
    Kernel("shared atomic on nothing", "never written", "atom_shared_add_u32(s, 1);"),
    Kernel("shared memory out of bounds", "out of bounds", "if (t == 0) st_shared_u32(s + 4096, 0);"),
    Kernel("misaligned shared vector", "not 16-byte aligned", "if (t == 0) st_shared_v4(s + 8, U4{0, 0, 0, 0});"),
    Kernel("shuffle in a diverged warp", "other lanes of its warp", "if (lane_id() < 16) shfl_xor(1, 1);"),
    Kernel("lanes in different collectives", "diverged warp", "if (lane_id() < 16) shfl_xor(1, 1); else syncwarp();"),
    Kernel("ballot in a branch", "other lanes of its warp", "if (t & 1) vote_ballot(true);"),
    Kernel("ballot and shfl_up, right", "", "if (vote_ballot(t & 1) != 0xaaaaaaaa || shfl_up(t, 2) != (lane_id() < 2 ? t : t - 2) || warp_uniform(t) != t / 32 * 32) emu::fault(\"wrong\");"),
    Kernel("store of every lane, one elected, right", "", "if (elect_one()) st_shared_u32(s + t / 32 * 4, 1);"),
    Kernel("store of every lane, the elected one assumed to be 0", "never written", "if (elect_one()) st_shared_u32(s + t / 32 * 128 + lane_id() * 4, 1); syncwarp(); if (lane_id() == 0) ld_shared_u32(s + t / 32 * 128);"),
    Kernel("mbarrier not initialised", "no mbarrier", "mbar_arrive(s + 8);"),
    Kernel("mbarrier initialised, not ordered", "initialisation", "if (t == 0) mbar_init(s, 64); else mbar_arrive(s);", every_seed=False),
    Kernel("mbarrier initialised twice", "already an mbarrier", "if (t == 0) { mbar_init(s, 1); mbar_init(s, 1); }"),
    Kernel("mbarrier expects too many bytes", "more than 2^20-1", "if (t == 0) { mbar_init(s, 2); mbar_expect_tx(s, 1 << 20); }"),
    Kernel("store over an mbarrier", "is an mbarrier", "if (t == 0) { mbar_init(s, 1); st_shared_u32(s + 4, 0); }"),
    Kernel("bulk copy, right", "", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load_hint(s + 64, p.in, 64, s, l2_evict_first()); }} syncthreads(); mbar_wait(s, 0); ld_shared_v4(s + 64);"),
    Kernel("bulk copy with a policy from nowhere", "not made by createpolicy", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load_hint(s + 64, p.in, 64, s, 1); }}"),
    Kernel("bulk copy of 24 bytes", "multiple of 16", f"if (t == 0) {{ {SETUP} bulk_load(s + 16, p.in, 24, s); }}"),
    Kernel("bulk copy read before the wait", "not been waited for", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); ld_shared_u32(s + 64); }}"),
    Kernel("bulk copy, only one thread waits", "race", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); mbar_wait(s, 0); st_shared_u32(s + 256, 0); }} else if (t == 32) {{ for (int i = 0; i < 200; ++i) emu::yield(); ld_shared_u32(s + 64); }}", every_seed=False),
    Kernel("mbarrier expects more bytes than come", "deadlock", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 80); bulk_load(s + 64, p.in, 64, s); }} syncthreads(); mbar_wait(s, 0);"),
    Kernel("no fence after the mbarrier's initialisation", "no fence.mbarrier_init", "if (t == 0) { mbar_init(s, 1); mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); }"),
    Kernel("store to the target of a bulk copy", "target of an asynchronous copy", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); st_shared_u32(s + 64, 0); }}"),
    Kernel("generic store, then bulk copy over it without a fence", "fence.proxy.async", f"if (t == 0) {{ st_shared_u32(s + 64, 0); {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); }}"),
    refill("bulk copy over bytes read, syncwarp only", UNFENCED, between="read(); syncwarp(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read, fence and syncwarp, right", "", between="read(); fence_async(); syncwarp(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read by its own thread", UNFENCED, between="if (t == 0) { read(); AGAIN; }"),
    refill("bulk copy over bytes read by its own thread, fenced, right", "", between="if (t == 0) { read(); fence_async(); AGAIN; }"),
    refill("bulk copy over bytes read, fence before the reads", UNFENCED, between="fence_async(); read(); syncwarp(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read, only the copying lane fences", UNFENCED, between="read(); syncwarp(); if (t == 0) { fence_async(); AGAIN; }"),
    refill("bulk copy over bytes read, one lane does not fence", UNFENCED, between="read(); if (t != 9) fence_async(); syncwarp(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read, other lanes fence after the barrier", UNFENCED, between="read(); syncwarp(); if (t) fence_async(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read, ldmatrix and syncwarp", UNFENCED, between="mbar_wait(s, 0); u32 r[4]; ldmatrix_x4(r, s + 64 + t * 16); syncwarp(); if (t == 0) AGAIN;"),
    refill("bulk copy over bytes read, arrival that nobody waits for", UNFENCED, between="read(); syncwarp(); if (t == 0) { mbar_arrive(s + 24); AGAIN; }"),
    refill("bulk copy over bytes read, block barrier, right", "", between="if (t < 32) read(); syncthreads(); if (t == 0) AGAIN;", threads=64),
    refill("bulk copy over bytes read, every lane arrives, producer waits, right", "", between="if (t < 32) { read(); mbar_arrive(s + 16); } if (t == 32) { mbar_wait(s + 16, 0); AGAIN; }", threads=64),
    refill("bulk copy over bytes read, lane 0 arrives for its warp, producer waits, right", "", between="if (t < 32) { read(); syncwarp(); if (t == 0) mbar_arrive(s + 24); } if (t == 32) { mbar_wait(s + 24, 0); AGAIN; }", threads=64),
    refill("bulk copy over bytes read, arrival and wait in one warp, right", "", between="read(); mbar_arrive(s + 16); if (t == 0) { mbar_wait(s + 16, 0); AGAIN; }"),
    refill("bulk copy over bytes read, no order at all", "may still be reading", between="read(); if (t == 1) { for (int i = 0; i < 200; ++i) emu::yield(); AGAIN; }"),
    Kernel("bulk copy over the source of a bulk store, right", "", f"if (t == 0) {{ st_shared_v4(s + 64, U4{{1, 2, 3, 4}}); fence_async(); bulk_store(p.out, s + 64, 16); bulk_commit(); bulk_wait<0>(); {SETUP} mbar_arrive_expect_tx(s, 16); bulk_load(s + 64, p.in, 16, s); mbar_wait(s, 0); }}"),
    Kernel("bulk store of generic stores without a fence", "no fence.proxy.async lies between", "if (t == 0) { st_shared_v4(s, U4{1, 2, 3, 4}); bulk_store(p.out, s, 16); bulk_commit(); bulk_wait<0>(); }"),
    Kernel("bulk store, source overwritten before it was read", "race: cp.async.bulk (store, when it completes)", "if (t == 0) { st_shared_v4(s, U4{1, 2, 3, 4}); fence_async(); bulk_store(p.out, s, 16); bulk_commit(); st_shared_u32(s, 0); bulk_wait<0>(); }"),
    Kernel("bulk store never waited for", "bulk stores still reading", "if (t == 0) { st_shared_v4(s, U4{1, 2, 3, 4}); fence_async(); bulk_store(p.out, s, 16); bulk_commit(); }"),
    Kernel("cp.async read before the wait", "not been waited for", "cp_async_4(s + t * 4, p.in + t * 4, 4); cp_async_commit(); ld_shared_u32(s + t * 4);"),
    Kernel("cp.async of a neighbour without a barrier", "race", "cp_async_4(s + t * 4, p.in + t * 4, 4); cp_async_commit(); cp_async_wait<0>(); for (int i = 0; i < 200; ++i) emu::yield(); ld_shared_u32(s + (t ^ 1) * 4);"),
    Kernel("cp.async, one group short", "not been waited for", "cp_async_4(s + t * 4, p.in + t * 4, 4); cp_async_commit(); cp_async_wait<1>(); ld_shared_u32(s + t * 4);"),
    Kernel("setmaxnreg of 100", "setmaxnreg", "setmaxnreg_dec<100>();"),
    Kernel("plain access to global memory", "without an hw function", "if (t == 3) p.out[5] = 1;"),
    Kernel("plain access to nothing", "segmentation fault in the kernel", "if (t == 3) *(volatile u32*)(u64)(t + 13) = 1;"),
    Kernel("stack overflow", "stack overflow", "volatile u8 big[1 << 20]; big[t] = 1; if (big[t + 1]) st_shared_u32(s, 1);"),
    Kernel("previous kernel's data without griddepcontrol.wait", "griddepcontrol.wait", "if (t == 0) griddep_wait(); if (t < 32) syncwarp(); ld_global_u32(p.in);", dependent=True),
    Kernel("previous kernel's data after griddepcontrol.wait, right", "", "if (t == 0) griddep_wait(); syncthreads(); ld_global_u32(p.in);", dependent=True),
    Kernel("previous kernel's data copied before griddepcontrol.wait", "griddepcontrol.wait", f"if (t == 0) {{ {SETUP} mbar_arrive_expect_tx(s, 64); bulk_load(s + 64, p.in, 64, s); griddep_wait(); }}", dependent=True),
    product("wgmma, right", ""),
    product("wgmma, pinned fragments, right", "", ("AFTER_FENCE", "wgmma_pin(a);")),
    product("wgmma reads generic stores without a fence", "no fence.proxy.async lies between", ("FENCE_ASYNC", "")),
    product("wgmma without wgmma.fence", "no wgmma.fence", ("WG_FENCE", "")),
    product("register of A written after wgmma.fence", "after the last wgmma.fence", ("AFTER_FENCE", "a[0] = 1;")),
    product("one warp skips the wgmma", "was not issued by the whole warpgroup", ("PRODUCT", "if (t / 32 != 2) wgmma_bf16_rs(d, a, b, false);"), ("CHECK", "")),
    product("descriptors differ within the warpgroup", "differs between threads", ("PRODUCT", "wgmma_bf16_rs(d, a, b + t / 64, false);")),
    product("register of A written in flight", "in flight is accessed", ("IN_FLIGHT", "a[1] = 2;")),
    product("fragment pinned in flight", "in flight is accessed", ("IN_FLIGHT", "wgmma_pin(a);")),
    product("shared operand overwritten in flight", "race: wgmma (B) reads", ("IN_FLIGHT", "st_shared_u32(s + t * 4, 1);")),
    product("accumulator read before the wait", "in flight is accessed", ("WAIT", "")),
    product("accumulator goes out of scope in flight", "go out of scope", ("WAIT", ""), ("CHECK", "")),
    product("accumulates onto what was never set", "wrong", ("PRODUCT", "wgmma_bf16_rs(d, a, b, true);"), ("CHECK", 'if (!(d[5] == 0)) emu::fault("wrong");')),
    product("descriptor with base offset", "reserved or base-offset bits", ("PRODUCT", "wgmma_bf16_rs(d, a, b | 1ull << 49, false);")),
    Kernel("remote store to a CTA that has left", "has already exited", "if (cluster_ctarank() == 0) { for (int i = 0; i < 999; ++i) emu::yield(); st_cluster_u32(mapa(s, 1), 1); }", 32, 2, 2),
    Kernel("remote read, the CTA may leave before it", "cluster CTA", "if (cluster_ctarank() == 1) st_shared_u32(s + t * 4, t); cluster_arrive(); cluster_wait(); if (cluster_ctarank() == 0) ld_cluster_u32(mapa(s + t * 4, 1));", 32, 2, 2),
    Kernel("remote read, relaxed barrier before the exit, right", "", "st_shared_u32(s + t * 4, t); cluster_arrive(); cluster_wait(); ld_cluster_u32(mapa(s + t * 4, cluster_ctarank() ^ 1)); cluster_arrive_relaxed(); cluster_wait();", 32, 2, 2),
    Kernel("remote read after the last barrier arrived at", "cluster CTA", "st_shared_u32(s + t * 4, t); cluster_arrive(); cluster_wait(); cluster_arrive_relaxed(); ld_cluster_u32(mapa(s + t * 4, cluster_ctarank() ^ 1)); cluster_wait();", 32, 2, 2),
    Kernel("remote read told to its CTA by an mbarrier, right", "", "if (t == 0) { mbar_init(s, 32); fence_mbar_init(); } st_shared_u32(s + 64 + t * 4, t); cluster_arrive(); cluster_wait(); ld_cluster_u32(mapa(s + 64 + t * 4, cluster_ctarank() ^ 1)); mbar_arrive_cluster(mapa(s, cluster_ctarank() ^ 1)); mbar_wait_cluster(s, 0);", 32, 2, 2),
    Kernel("relaxed arrival publishes no store", "race: ld.shared::cluster reads", "st_shared_u32(s + t * 4, t); cluster_arrive_relaxed(); cluster_wait(); ld_cluster_u32(mapa(s + t * 4, cluster_ctarank() ^ 1)); cluster_arrive(); cluster_wait();", 32, 2, 2),
    Kernel("relaxed arrival takes what others publish, right", "", "if (cluster_ctarank() == 0) { st_shared_u32(s + t * 4, t); cluster_arrive(); } else cluster_arrive_relaxed(); cluster_wait(); if (cluster_ctarank() == 1) ld_cluster_u32(mapa(s + t * 4, 0)); cluster_arrive_relaxed(); cluster_wait();", 32, 2, 2),
    Kernel("relaxed arrival twice", "twice without a wait", "cluster_arrive_relaxed(); cluster_arrive_relaxed();", 32, 2, 2),
    Kernel("remote exchange without a cluster barrier", "race", "if (cluster_ctarank() == 0) st_cluster_u32(mapa(s, 1) + t * 4, 1); else st_shared_u32(s + t * 4, 2); cluster_arrive(); cluster_wait();", 32, 2, 2),
    Kernel("remote exchange, right", "", "st_cluster_v4(mapa(s + t * 16, cluster_ctarank() ^ 1), U4{t, 1, 2, 3}); cluster_arrive(); cluster_wait(); if (ld_shared_u32(s + t * 16) != t || ld_cluster_v4(mapa(s + t * 16, 0)).x != t) emu::fault(\"wrong\"); cluster_arrive(); cluster_wait();", 32, 2, 2),
    Kernel("cluster barrier, one thread stays behind", "cluster barrier", "if (t == 7 && cluster_ctarank() == 1) bar_sync(1, 32); else { cluster_arrive(); cluster_wait(); }", 32, 2, 2),
    Kernel("cluster barrier without the threads that left, right", "", "if (t >= 16) return; cluster_arrive(); cluster_wait();", 32, 2, 2),
    Kernel("cluster barrier arrived at twice", "twice without a wait", "cluster_arrive(); cluster_arrive();", 32, 2, 2),
    Kernel("cluster address in ld.shared", "cluster address", "ld_shared_u32(mapa(s, 0));", 32, 2, 2),
    Kernel("mapa of a rank the cluster lacks", "rank 2 in a cluster of 2", "mapa(s, 2);", 32, 2, 2),
    Kernel("blocks wait for each other, both resident, right", "", "if (ctaid_x() == 1) while (ld_global_acquire_u32(p.out) == 0) {} else if (t == 0) red_global_release_add_u32(p.out, 1);", 32, 2, 1, 2),
    Kernel("blocks wait for each other, one resident", "livelock", "if (ctaid_x() == 1) while (ld_global_acquire_u32(p.out) == 0) {} else if (t == 0) red_global_release_add_u32(p.out, 1);", 32, 2, every_seed=False),
]  # fmt: skip


def source(k: Kernel) -> emulator.KernelText:
    body = f"    const u32 s = smem_base(), t = tid_x();\n    {k.body}\n"
    return emulator.KernelText(
        f"{HEAD}HW_KERNEL(128) strict(const HW_GRID_CONST Params p) {{\n{body}}}\n", "strict", k.arch, k.risk
    )


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return emulator.build([source(k) for k in KERNELS])


@pytest.mark.parametrize("k", KERNELS, ids=lambda k: k.risk.replace(" ", "_"))
def test_report(k: Kernel, library: emulator.Library) -> None:
    reported = 0
    said = ["nothing"]
    for seed in SEEDS:
        with emulator.Memory() as memory:
            given = memory.alloc("in", bytes(4096), dependent=k.dependent)
            out = memory.alloc("out", bytes(4096))
            try:
                library.launch(
                    k.risk,
                    struct.pack("<QQ", given, out),
                    grid=k.grid,
                    block=k.threads,
                    smem=4096,
                    cluster=k.cluster,
                    resident=k.resident,
                    seed=seed,
                )
            except emulator.EmulatorFault as e:
                said.append(str(e))
                reported += not k.want or k.want in str(e)
    if not k.want:
        assert said == ["nothing"]
    elif k.every_seed:
        assert reported == len(SEEDS), said
    else:
        assert reported, said
