"""The packed layout: invertible for every format, and each code where the tensor core and the kernels look for it."""

import pytest
import torch

from lowbit.errors import BadInput, Unsupported
from lowbit.layout.fields import pieces, place
from lowbit.layout.fragments import UNIT_K, UNIT_ROWS, FragmentMap
from lowbit.layout.pack import PANEL_BLOCKS, Layout, PackedWeight, pack, stored_codes, tag_text, unpack
from lowbit.weights import QuantWeight, spec

INTEGERS = [f"{kind}{bits}_g32" for kind in ("int", "uint") for bits in range(1, 9)]
ZEROS = ["int4z_g64", "uint4z_g128", "uint8z", "int3zf_g32", "uint7z_g16", "int8z_t"]
FLOATS = ["fp8_e4m3", "fp8_e5m2_g64", "fp6_e3m2_g32_e8m0", "fp6_e2m3_t", "fp5_e2m2", "fp3_e1m1_g16", "mxfp4", "nvfp4", "nf4", "mxfp8"]
SCALES = ["int4", "int4_g128", "int4_g128_e8m0", "int4_g96", "int4_g40_fp32", "int8_e8m0", "int8_fp16", "int4_t", "fp8_e4m3_b128x128",
          "fp8_e4m3_b32x32_e8m0", "int8_b5x24", "int4_g256_fp16", "mxint8"]
SHAPES = [(16, 128), (40, 104), (129, 264), (576, 576), (7, 13), (1, 1), (2112, 136), (144, 2880)]


def random_weight(name: str, n: int, k: int, experts: int | None = None, seed: int = 0, g_idx: torch.Tensor | None = None,
                  num_groups: int = 0) -> QuantWeight:
    """Every code, scale and zero point that the spec allows, at random."""
    random, s = torch.Generator().manual_seed(seed), spec(name)
    shape = s.scale_shape(n, k)
    e, groups = experts or 1, (experts or 1, shape[0], num_groups or shape[1])
    codes = torch.randint(0, len(s.value.codebook) or 2**s.value.bits, (e, n, k), generator=random).to(torch.uint8)
    codes = torch.where(torch.isfinite(s.value.decode(codes)), codes, 1).to(torch.uint8)
    if s.scale.storage == torch.uint8:
        scales = torch.randint(0, 120, groups, generator=random).to(torch.uint8)
    else:
        scales = torch.randn(groups, generator=random).to(s.scale.storage)
    zeros = {"none": None, "float": torch.randn(groups, generator=random),
             "int": torch.randint(int(s.value.min), int(s.value.max) + 1, groups, generator=random).to(torch.int16)
             if s.value.is_int else None}[s.zero]
    scale2 = {"none": None, "tensor": torch.rand(e, generator=random), "channel": torch.rand(e, n, generator=random)}[s.scale2]
    return QuantWeight.from_values(s, codes, scales, zeros=zeros, scale2=scale2, g_idx=g_idx, experts=experts)


def assert_same(a: QuantWeight, b: QuantWeight) -> None:
    for name in ("codes", "scales", "zeros", "scale2", "g_idx"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name


@pytest.mark.parametrize("operand_bits", [16, 8])
@pytest.mark.parametrize("name", INTEGERS + ZEROS + FLOATS + SCALES)
def test_unpack_inverts_pack(name: str, operand_bits: int) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        weight = random_weight(name, n, k, seed=seed)
        assert_same(weight, unpack(pack(weight, operand_bits)))


@pytest.mark.parametrize("name", ["int4_g128", "int8", "nvfp4", "uint4z_g64"])
def test_experts_are_packed_one_by_one(name: str) -> None:
    weight = random_weight(name, 130, 200, experts=3)
    packed = pack(weight)
    assert_same(weight, unpack(packed))
    for expert in range(3):
        one = QuantWeight.from_values(weight.spec, weight.code_values(expert), weight.scales[expert],
                                      zeros=None if weight.zeros is None else weight.zeros[expert],
                                      scale2=None if weight.scale2 is None else weight.scale2[expert])
        assert torch.equal(pack(one).units[0], packed.units[expert])


@pytest.mark.parametrize("operand_bits", [16, 8])
def test_split_follows_the_mma_tables(operand_bits: int) -> None:
    """`place` is written from the PTX tables; `split` is what packing uses."""
    fragments = FragmentMap(operand_bits)
    index = torch.arange(UNIT_ROWS * UNIT_K).view(UNIT_ROWS, UNIT_K)
    view = fragments.split(index).reshape(8 * 4, fragments.slots, fragments.elements)
    for row in range(UNIT_ROWS):
        for k in range(UNIT_K):
            assert view[fragments.place(row, k)] == index[row, k]
    assert torch.equal(fragments.join(fragments.split(index)), index)


@pytest.mark.parametrize("operand_bits", [16, 8])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("is_float", [False, True])
def test_pieces_fill_every_bit_of_a_group_once(bits: int, is_float: bool, operand_bits: int) -> None:
    filled, codes = [], []
    for piece in pieces(bits, operand_bits, is_float):
        filled += [(piece.word, piece.at + i) for i in range(piece.width)]
        codes += [(piece.register, piece.low + i) for i in range(piece.width)]
    assert sorted(filled) == [(word, bit) for word in range(bits) for bit in range(operand_bits)]
    assert sorted(codes) == [(register, bit) for register in range(operand_bits) for bit in range(bits)]


# The halves of one word from bit 15 down to bit 0, as docs/FORMATS.md draws them: which register, a to p, has the bit.
DRAWN = {
    ("int1", 0): "ponmlkjihgfedcba", ("int2", 1): "ppoonnmmllkkjjii", ("int4", 1): "hhhhggggffffeeee", ("int8", 1): "ddddddddcccccccc",
    ("int3", 0): "eeedddpcccbbbaaa", ("int3", 2): "ooonnnpmmmlllkkk", ("int5", 0): "cccccpbbbbbaaaaa", ("int5", 4): "ooooopnnnnnmmmmm",
    ("int6", 0): "bbbbbbmmmmaaaaaa", ("int6", 4): "jjjjjjnnmmiiiiii", ("int6", 5): "llllllppookkkkkk",
    ("int7", 0): "bbbbbbbooaaaaaaa", ("int7", 5): "lllllllppkkkkkkk", ("int7", 6): "nnnnnnnpommmmmmm",
    ("fp4_e2m1", 0): "adddbdcaaabbbccc", ("fp4_e1m2", 1): "ehhhfhgeeefffggg", ("fp8_e4m3", 0): "abbbbaaaaaaabbbb",
    ("fp6_e3m2", 0): "ammmmbaaaaabbbbb", ("fp6_e2m3", 4): "innmmjiiiiijjjjj", ("fp3_e1m1", 1): "jjjiiiphhhgggfff", ("nf4", 0): "ddddccccbbbbaaaa",
}  # fmt: skip


@pytest.mark.parametrize(("name", "word"), DRAWN)
def test_words_are_as_drawn(name: str, word: int) -> None:
    half = ["?"] * 16
    for piece in Layout(spec(name), 16, 128).pieces:
        if piece.word == word:
            for bit in range(piece.at, piece.at + piece.width):
                half[15 - bit] = "abcdefghijklmnop"[piece.register]
    assert "".join(half) == DRAWN[name, word]


@pytest.mark.parametrize("name", [*INTEGERS, "mxfp4", "fp5_e2m2_g64", "mxfp6", "fp7_e3m3_t", "fp8_e4m3"])
def test_words_lie_where_kernels_load_them(name: str) -> None:
    """A group of four steps at a time; in it runs of four, two and one words, each with its 32 lanes side by side."""
    weight = random_weight(name, 16, 128)
    units, bits = pack(weight).units[0], weight.spec.value.bits
    codes = stored_codes(weight.spec, weight.code_values(0))
    for row, column in ((0, 0), (1, 63), (3, 90), (7, 31), (9, 17), (10, 59), (12, 50), (15, 127), (8, 127), (2, 121)):
        lane, slot, element = FragmentMap(16).place(row, column)
        group, register = divmod(slot, 16)
        code = 0
        for bit in range(bits):
            word, at = place(bits, 16, weight.spec.value.is_float, register, bit)
            fours, pairs = bits & 12, bits & 14
            if word < fours:
                start = word // 4 * 512 + lane * 16 + word % 4 * 4
            elif word < pairs:
                start = fours * 128 + lane * 8 + (word - fours) * 4
            else:
                start = pairs * 128 + lane * 4
            start += group * 128 * bits
            value = int.from_bytes(bytes(units[start:start + 4].tolist()), "little")
            code |= (value >> (at + 16 * element) & 1) << bit
        assert code == codes[row, column], (row, column)


@pytest.mark.parametrize("name", ["int4_g128", "int8", "nf4"])
def test_bytes_lie_where_kernels_read_them(name: str) -> None:
    """Address arithmetic of the kernels, spelled out: unit, 16-byte vector of a lane, field of a word."""
    n, k = 152, 300  # a whole panel and one of two row blocks; three k blocks
    weight = random_weight(name, n, k)
    layout, units = Layout(weight.spec, n, k), pack(weight).units[0]
    bits = weight.spec.value.bits
    codes = stored_codes(weight.spec, weight.code_values(0))
    for row, column in ((0, 0), (9, 17), (127, 299), (128, 5), (151, 130), (100, 255)):
        block, k_block = row // 16, column // 128
        panel, blocks = block // PANEL_BLOCKS, min(PANEL_BLOCKS, layout.row_blocks - block // PANEL_BLOCKS * PANEL_BLOCKS)
        unit = (panel * PANEL_BLOCKS * layout.k_blocks + k_block * blocks + block % PANEL_BLOCKS) * layout.unit_bytes
        lane, slot, element = FragmentMap(16).place(row % 16, column % 128)
        word, field = divmod(slot, 16 // bits)
        vector, within = divmod(word, 4)
        at = unit + vector * 512 + lane * 16 + within * 4
        value = int.from_bytes(bytes(units[at:at + 4].tolist()), "little")
        assert value >> (bits * field + 16 * element) & (2**bits - 1) == codes[row, column]
        if layout.grouped:
            size = weight.spec.scale.storage.itemsize
            at = unit + layout.code_bytes + ((row % 8 * layout.steps + column % 128 // layout.step) * 2 + row % 16 // 8) * size
            scale = units[at:at + size].clone().view(weight.spec.scale.storage)[0]
            assert scale == weight.scales[0, row, column // weight.spec.k]


@pytest.mark.parametrize("name", ["int4_g128", "uint4_g128", "fp8_e4m3", "nf4", "int8"])
def test_padding_is_codes_of_value_zero(name: str) -> None:
    weight = random_weight(name, 17, 130)
    layout, packed = Layout(spec(name), 17, 130), pack(weight)
    whole = PackedWeight(Layout(spec(name), 32, 256), None, packed.units, None if packed.channel is None else torch.ones(1, 32))
    assert layout.expert_bytes == whole.layout.expert_bytes
    values = weight.spec.value.decode(unpack(whole).code_values(0))
    assert not values[17:].any()
    assert not values[:, 130:].any()
    assert values[:17, :130].any()


def test_tag_names_everything_that_decides_the_bytes() -> None:
    a = Layout(spec("int4_g128"), 64, 256)
    others = [Layout(spec("int4_g64"), 64, 256), Layout(spec("int4_g128"), 80, 256), Layout(spec("int4_g128"), 64, 384),
              Layout(spec("int4_g128"), 64, 256, 8)]
    assert len({a.tag, *(other.tag for other in others)}) == 5


def test_tags_parse_and_nothing_else_does() -> None:
    for name in ("int4_g128", "nvfp4", "nf4", "third(-1.0,0.0,1.0)_g32"):
        for bits in (16, 8):
            layout = Layout(spec(name), 40, 264, bits)
            assert Layout.parse(layout.tag) == layout
    for tag in ("", "lowbit2", "lowbit2:int4:axb:a16", "lowbit2:int4:4x:a16", "lowbit2:int4:4x4x4:a16", "lowbit2:int4:4x4:a32",
                "lowbit1:int4:4x4:a16",
                "lowbit2:int4:04x4:a16", "lowbit2:cb(1,)_g32:4x32:a16", "lowbit2:int4_t:0x4:a16", "lowbit2:int4_g32:4x64:a16:k64s32",
                "lowbit2:int4_g32_ao:4x64:a16", "lowbit2:int4_g32_ao:4x64:a16:k64s24", "lowbit2:int4_g32_ao:4x64:a16:k32s32"):  # fmt: skip
        with pytest.raises(BadInput):
            Layout.parse(tag)
    assert tag_text(torch.tensor(list(b"abc"), dtype=torch.uint8)) == "abc"
    for no_tag in (None, "abc", torch.zeros(3), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8, device="meta")):
        assert tag_text(no_tag) is None


def test_refusals() -> None:
    packed = pack(random_weight("int4_g128", 32, 256))
    with pytest.raises(BadInput, match="packed units must be uint8"):
        PackedWeight(packed.layout, None, packed.units[:, 16:], None)
    with pytest.raises(BadInput, match="needs channel scales"):
        PackedWeight(Layout(spec("int8"), 32, 256), None, pack(random_weight("int8", 32, 256)).units, None)
    with pytest.raises(BadInput, match="operand_bits must be 8 or 16"):
        Layout(spec("int4"), 16, 16, 4)
    with pytest.raises(Unsupported, match="multiples of 8"):
        Layout(spec("int4_g12"), 16, 24)
    with pytest.raises(BadInput, match="packed in natural order; got 128 columns in steps of 64"):
        Layout(spec("int4_g64"), 16, 64, 16, 128, 64)
    for columns, step in ((64, 24), (56, 16), (72, 16), (64, 0)):
        with pytest.raises(BadInput, match=rf"hold all 64 columns; got {columns} columns in steps of {step}"):
            Layout(spec("int4_g32_ao"), 16, 64, 16, columns, step)


# ---- act-order ------------------------------------------------------------------------------------------------------------------


def orders(k: int, size: int) -> dict[str, tuple[torch.Tensor, int]]:
    """(g_idx (1, k), number of groups): full groups in natural and in random order; of a slice, as tensor parallelism cuts one."""
    random = torch.Generator().manual_seed(k)
    natural = torch.arange(k) // size
    shuffled = torch.cat([natural, natural + int(natural[-1]) + 1])[torch.randperm(2 * k, generator=random)]
    few = torch.where(torch.arange(k) % 7 == 0, 2, 4)  # most groups have no column at all
    return {"natural": (natural.int()[None], int(natural[-1]) + 1),
            "random": (natural[torch.randperm(k, generator=random)].int()[None], int(natural[-1]) + 1),
            "slice": (shuffled[:k].int()[None], int(shuffled.max()) + 1), "empty groups": (few.int()[None], 7)}


ACT_ORDER = ["int4_g128_ao", "int4_g32_ao", "uint4z_g64_ao", "int3zf_g16_ao", "int5_g40_ao", "fp4_e2m1_g16_e4m3_ao", "int8_g32_e8m0_ao",
             "fp6_e3m2_g96_fp16_ao", "nf4_g64_ao", "cb(-1.5,0.3)_g8_ao", "int1_g32_ao", "uint8z_g256_ao"]


@pytest.mark.parametrize("operand_bits", [16, 8])
@pytest.mark.parametrize("name", ACT_ORDER)
def test_unpack_inverts_pack_for_any_order_of_columns(name: str, operand_bits: int) -> None:
    for seed, (n, k) in enumerate([(16, 128), (129, 264), (7, 13), (1, 1), (40, 1025)]):
        for g_idx, num_groups in orders(k, spec(name).k).values():
            weight = random_weight(name, n, k, seed=seed, g_idx=g_idx, num_groups=num_groups)
            packed = pack(weight, operand_bits)
            assert packed.layout == Layout.of(weight, operand_bits) == Layout.parse(packed.layout.tag)
            assert_same(weight, unpack(packed))


@pytest.mark.parametrize("name", ["int4_g32_ao", "uint4z_g64_ao", "int5_g40_ao"])
def test_what_kernels_see_is_the_weight_with_sorted_and_padded_columns(name: str) -> None:
    for order, (g_idx, num_groups) in orders(264, spec(name).k).items():
        weight = random_weight(name, 40, 264, g_idx=g_idx, num_groups=num_groups)
        packed = pack(weight)
        seen = unpack(PackedWeight(packed.layout.natural, None, packed.units, packed.channel))
        assert packed.name == str(seen.spec)
        perm = packed.perm
        assert perm is not None
        there = perm < 264
        assert torch.equal(seen.dequantize()[:, there], weight.dequantize()[:, perm[there].long()]), order
        assert sorted(perm[there].tolist()) == list(range(264))


def test_full_groups_need_no_padding_and_others_the_fewest_bytes() -> None:
    for size, step in ((256, 128), (128, 128), (64, 64), (32, 32), (16, 16), (96, 32)):
        layout = Layout(spec(f"int4_g{size}_ao"), 64, 768)
        assert (layout.packed_k, layout.order_step) == (768, step)
        assert layout.expert_bytes == Layout(spec(f"int4_g{size}"), 64, 768).expert_bytes
        assert layout.tag == f"lowbit2:int4_g{size}_ao:64x768:a16:k768s{step}"
    layout = Layout(spec("int4_g40_ao"), 64, 4000)  # 48 columns for 40 cost less than 64
    assert (layout.packed_k, layout.order_step) == (4800, 16)
    layout = Layout(spec("int4_g96_ao"), 64, 192)  # though padding to 256 columns would take fewer bytes
    assert (layout.packed_k, layout.order_step) == (192, 32)
    g_idx = torch.cat([torch.full((count,), group) for group, count in enumerate((40, 88, 7, 121))]).int()[None]
    layout = Layout.of(random_weight("int4_g64_ao", 16, 256, g_idx=g_idx))
    assert layout.packed_k == sum(-(-count // layout.order_step) * layout.order_step for count in (40, 88, 7, 121))
    sizes = {step: Layout(layout.spec, 16, 256, 16, sum(-(-c // step) * step for c in (40, 88, 7, 121)), step).expert_bytes
             for step in (128, 64, 32, 16)}
    assert layout.expert_bytes == min(sizes.values()) < max(sizes.values())


def test_damaged_orders_and_experts_are_refused() -> None:
    g_idx, num_groups = orders(96, 32)["slice"]
    packed = pack(random_weight("int4_g32_ao", 16, 96, g_idx=g_idx, num_groups=num_groups))
    assert packed.perm is not None
    assert packed.groups is not None
    bad_perm, bad_groups = packed.perm.clone(), packed.groups.clone()
    bad_perm[bad_perm == 3] = 4
    bad_groups[-1] += 1
    parts = (packed.layout, None, packed.units, packed.channel)
    with pytest.raises(BadInput, match="perm must hold each of the 96 columns once"):
        unpack(PackedWeight(*parts, bad_perm, packed.groups))
    with pytest.raises(BadInput, match="groups must ascend"):
        unpack(PackedWeight(*parts, packed.perm, bad_groups.flip(0)))
    with pytest.raises(BadInput, match="needs perm"):
        PackedWeight(*parts)
    with pytest.raises(BadInput, match="perm must be int32"):
        PackedWeight(*parts, packed.perm.long(), packed.groups)
    plain = pack(random_weight("int4_g32", 16, 96))
    with pytest.raises(BadInput, match="has no perm"):
        PackedWeight(plain.layout, None, plain.units, plain.channel, packed.perm, None)
    with pytest.raises(Unsupported, match="this one has 2 experts: pack each alone"):
        pack(random_weight("int4_g32_ao", 16, 96, experts=2, g_idx=torch.zeros(2, 96, dtype=torch.int32)))
