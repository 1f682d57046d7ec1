"""The packed layout: invertible for every format, and each code where the tensor core and the kernels look for it."""

import pytest
import torch

from lowbit.errors import BadInput, Unsupported
from lowbit.layout.fields import pieces, place
from lowbit.layout.fragments import UNIT_K, UNIT_ROWS, FragmentMap
from lowbit.layout.pack import PANEL_BLOCKS, Layout, PackedWeight, pack, stored_codes, tag_text, unpack
from lowbit.weights import QuantWeight, WeightSpec, spec

INTEGERS = [f"{kind}{bits}_g32" for kind in ("int", "uint") for bits in range(1, 9)]
ZEROS = ["int4z_g64", "uint4z_g128", "uint8z", "int3zf_g32", "uint7z_g16", "int8z_t"]
FLOATS = ["fp8_e4m3", "fp8_e5m2_g64", "fp6_e3m2_g32_e8m0", "fp6_e2m3_t", "fp5_e2m2", "fp3_e1m1_g16", "mxfp4", "nvfp4", "nf4", "mxfp8"]
SCALES = ["int4", "int4_g128", "int4_g128_e8m0", "int4_g96", "int4_g40_fp32", "int8_e8m0", "int8_fp16", "int4_t", "fp8_e4m3_b128x128",
          "fp8_e4m3_b32x32_e8m0", "int8_b5x24", "int4_g256_fp16", "mxint8"]
SHAPES = [(16, 128), (40, 104), (129, 264), (576, 576), (7, 13), (1, 1), (2112, 136), (144, 2880)]


def random_weight(name: str, n: int, k: int, experts: int | None = None, seed: int = 0) -> QuantWeight:
    """Every code, scale and zero point that the spec allows, at random."""
    random, s = torch.Generator().manual_seed(seed), spec(name)
    e, groups = experts or 1, (experts or 1, *s.scale_shape(n, k))
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
    return QuantWeight.from_values(s, codes, scales, zeros=zeros, scale2=scale2, experts=experts)


def assert_same(a: QuantWeight, b: QuantWeight) -> None:
    for name in ("codes", "scales", "zeros", "scale2"):
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
                "lowbit2:int4:04x4:a16", "lowbit2:cb(1,)_g32:4x32:a16", "lowbit2:int4_t:0x4:a16"):  # fmt: skip
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
    with pytest.raises(Unsupported, match="natural order"):
        Layout(WeightSpec.make("int4", k=32, act_order=True), 16, 64)
