"""Formats drawn by hypothesis, codes of all widths in all kinds of layouts: storages, reference and kernels against arithmetic.

A format has up to three storages.  Weights go from each to each, `planar` too, and are cut and joined.  What fails is printed as
the shortest spec, and as fields that have one value but for a few elements.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import qdsl
from qdsl.compiler.spec.source import SpecError
from qdsl.core.numbers import number
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.weight.match import torch_dtype
from tests.support.formats import raw, same_bits
from tests.support.interpreter import INTERPRETED, guarded
from tests.support.quick import examples

EXAMPLES = 40                                                    # of each way to lay codes
DEVICE = "cpu" if INTERPRETED else "cuda"
ROWS, COLUMNS = (1, 2, 3, 8, 32, 65), (1, 5, 8, 12, 20, 64, 70, 128, 192)
ELEMENTS = {8: "u8", 16: "i16", 32: "i32"}
FLOATS = ("f16", "bf16", "f32")
WAYS = ("along k", "along n", "stream along k", "stream along n", "planes", "byte", "split", "digits")
SPECIAL = (0.0, 1.0, -1.0, 0.5, -3.0, 1e-7, 60000.0)             # scales, the simplest first
VALUES = {"s": FLOATS, "a": FLOATS, "z": ("u4", "i4", "u8", "i8", "i6", "f16", "u12", "i16", "u16")}


@dataclass(frozen=True)
class Drawn:
    """A spec's text, its fields (type, subscripts), its formula, and the number of its codes, 0 if they are all of their type."""

    text: str
    fields: dict[str, tuple[str, tuple[str, ...]]]
    decode: str
    codes: int


def drawn(draw: random.Random, way: str) -> Drawn:
    """A format whose first storage lays codes in a way."""
    bits = 2 if way == "digits" else draw.choice((4, 1, 2, 3, 5, 6, 7, 8))
    fields = {"q": (f"{draw.choice('ui') if bits > 1 and way != 'digits' else 'u'}{bits}", ("n", "k"))}
    for name in ("s", "z", "a")[:draw.choice((1, 2, 3))]:
        fields[name] = (draw.choice(VALUES[name]), subscripts(draw))
    code = draw.choice(("q", "(q - 8)", "(q - 3)"))
    code = f"({code} - z)" if "z" in fields else code
    decode = draw.choice((f"{code} * s", f"s * {code}"))
    if "a" in fields:
        decode = draw.choice((f"{decode} * a", f"a * {decode}", f"{decode} - a", f"{decode} + a * s", f"-{decode} / a"))
    params = "params: {group: [32, 7, -1]}\n" if any("group" in i for _, index in fields.values() for i in index) else ""
    shown = "".join(f"  {name}: {kind}[{', '.join(index)}]\n" for name, (kind, index) in fields.items())
    storages = "".join(storage(draw, name, fields, way if name == "p" else draw.choice(WAYS[:-1]))
                       for name in ("p", "r", "t")[:draw.choice((1, 2, 3))])
    return Drawn(f"format: drawn\nweight: [N, K]\n{params}fields:\n{shown}decode: {decode}\nstorage:\n{storages}", fields, decode,
                 3 if way == "digits" else 0)


def storage(draw: random.Random, name: str, fields: Mapping[str, tuple[str, tuple[str, ...]]], way: str) -> str:
    """A storage of fields with codes in a way."""
    tensors = digits(draw) if way == "digits" else codes(draw, int(fields["q"][0][1:]), way)
    tensors += "".join(values(draw, field, *fields[field]) for field in fields if field != "q")
    return joined(f"  {name}:\n{tensors}", draw)


def joined(text: str, draw: random.Random) -> str:
    """The storage with tensors of one element type as sections of rows, or regions, of one tensor, where there are several."""
    head, *tensors = re.split(r"(?m)^(?=    \w)", text)
    kinds = {chunk: chunk.partition("tensor: ")[2].partition("[")[0] for chunk in tensors}
    alike = [chunk for chunk in tensors if list(kinds.values()).count(kinds[chunk]) > 1 and "p<" not in chunk]
    alike = [chunk for chunk in alike if kinds[chunk] == kinds[alike[0]]]
    if not alike:
        return text
    rows = {chunk.partition("[")[2].partition(",")[0].partition("]")[0] for chunk in alike}
    by_rows = all(row.endswith("<N") and " " not in row for row in rows) and draw.random() < 0.7
    inside = "".join("    " + line for chunk in draw.sample(alike, len(alike)) for line in chunk.splitlines(keepends=True))
    others = "".join(chunk for chunk in tensors if chunk not in alike)
    return f"{head}    held:\n      {'sections' if by_rows else 'regions'}:\n{inside}{others}"


def subscripts(draw: random.Random) -> tuple[str, ...]:
    rows = draw.choice(("", "n", "n", "n", f"n // {draw.choice((2, 3, 16, 64))}"))
    columns = draw.choice(("", "k", f"k // {draw.choice((4, 5, 16, 32, 48, 64))}", "k // 32", "k // group"))
    return tuple(index for index in (rows, columns) if index)


def tensor(name: str, kind: str, axes: list[str], record: str) -> str:
    return f"    {name}:\n      tensor: {kind}[{', '.join(axes)}]\n      record: \"{record}\"\n"


def codes(draw: random.Random, bits: int, way: str = "") -> str:
    """Codes in a way, or in one that is drawn: words along K or N, streams, planes of bits, a code in a byte, split records."""
    width = draw.choice((8, 16, 32))
    kind, run = ELEMENTS[width], math.lcm(bits, width) // bits
    match way or draw.choice(WAYS[:-1]):
        case "along k":
            axes = [f"t<{draw.choice((f'K/{run}', f'ceil(K/{run})'))} word", "n<N"]
            return tensor("codes", kind, axes[::draw.choice((1, -1))], f"i<{run}: q[n, {run}*t + i]")
        case "along n":
            axes = [f"t<{draw.choice((f'N/{run}', f'ceil(N/{run})'))} word", "k<K"]
            return tensor("codes", kind, axes[::draw.choice((1, -1))], f"i<{run}: q[{run}*t + i, k]")
        case "stream along k":
            return tensor("codes", kind, ["n<N", "word"], "k<K: q[n, k]")
        case "stream along n":
            return tensor("codes", kind, ["word", "k<K"], "n<N: q[n, k]")
        case "byte":
            before = draw.randint(0, 8 - bits)
            return tensor("codes", "u8", ["n<N", "k<K"], padded("q[n, k]", before, 8 - bits - before))
        case "planes":
            extent = draw.choice(("K/8", "ceil(K/8)"))
            if bits > 1 and width > 8:                           # an axis that chooses the bit, ahead of rows or behind them
                axes = [f"p<{bits}", "n<N"][::-1 if width == 16 else 1]
                return tensor("planes", "u8", [*axes, f"j<{extent}"], f"i<8: q[n, 8*j + i].at({bits - 1} - p):1")
            part = ".at({}):1" if bits > 1 else ""
            return "".join(tensor(f"plane{b}", "u8", ["n<N", f"j<{extent}"], f"i<8: q[n, 8*j + i]{part.format(b)}")
                           for b in range(bits))
    high = draw.randint(1, max(1, bits - 1))
    if bits == 1:
        return tensor("codes", "u8", ["n<N", "t<K/64 word"], "l<64: q[n, 64*t + l]")
    lines = [f"{draw.choice(('l<32 j<2:', 'j<2 l<32:'))} q[n, 64*t + 32*j + l].{part}"
             for part in (f"lo:{bits - high}", f"hi:{high}")]
    draw.shuffle(lines)
    return "    codes:\n      tensor: u8[n<N, t<K/64 word]\n      record: |\n" + "".join(f"        {line}\n" for line in lines)


def digits(draw: random.Random) -> str:
    """Base-3 digits in bytes, in one range or in two whose bytes have unlike numbers of digits."""
    width, bytes_, count = draw.choice((8, 16, 32)), draw.choice((4, 8)), draw.randint(1, 5)
    tile = bytes_ * count
    place = draw.choice((f"{bytes_}*j + l", f"{count}*l + j"))
    lines = [f"l<{bytes_}: base3(j<{count}: q[n, {{tile}}*t + {place}])"]
    if draw.random() < 0.5:
        more = draw.randint(1, 5)
        lines.append(f"l<4: base3(j<{more}: q[n, {{tile}}*t + {tile} + 4*j + l])")
        tile += 4 * more
        draw.shuffle(lines)
    extent = draw.choice((f"K/{tile}", f"ceil(K/{tile})"))
    record = "".join(f"        {line.format(tile=tile)}\n" for line in lines)
    return f"    codes:\n      tensor: {ELEMENTS[width]}[n<N, t<{extent} word]\n      record: |\n{record}"


def padded(item: str, before: int, after: int) -> str:
    return f"{f'pad:{before} ' if before else ''}{item}{f' pad:{after}' if after else ''}"


def values(draw: random.Random, name: str, kind: str, index: tuple[str, ...]) -> str:
    """A tensor of one field, an element each."""
    axes = [f"{'xy'[i]}<{extent(axis)}" for i, axis in enumerate(index)]
    item = f"{name}[{', '.join('xy'[:len(index)])}]" if index else name
    form = number(kind)
    if form.is_float and draw.random() < 0.25:
        kind = draw.choice(("i16", "i32")) if form.bits == 16 else "i32"
        before = draw.choice((0, int(kind[1:]) - form.bits))
        item = padded(item, before, int(kind[1:]) - form.bits - before)
    elif not form.is_float:
        kind = draw.choice(("u8", "i8")) if form.bits <= 8 else "i16"
        room = int(kind[1:]) - form.bits
        before = draw.choice((0, room))
        item = padded(item, before, room - before)
    return tensor(f"t_{name}", kind, axes[::draw.choice((1, -1))], item)


def extent(index: str) -> str:
    dim = index[0].upper()
    return f"ceil({dim}/{index.split('// ')[1]})" if "//" in index else dim


def block(index: str, length: int, group: int | None) -> int:
    by = index.split("// ")[1] if "//" in index else "1"
    return (length if group == -1 else group or 1) if by == "group" else int(by)


def numbers(draw: random.Random, kind: str, shape: Sequence[int], count: int) -> Tensor:
    """A field: one number but for a few elements, or pseudo-random ones.  count: of codes, 0 for all of the type."""
    form = number(kind)
    low, high = int(form.low) if not form.is_float else 0, count - 1 if count else int(form.high) if not form.is_float else 0

    def one() -> float:
        return draw.choice(SPECIAL) if form.is_float else draw.choice((low, high, draw.randint(low, high)))

    if draw.choice((True, False)):
        generator = torch.Generator().manual_seed(draw.randint(0, 99))
        field = torch.randn(tuple(shape), generator=generator) if form.is_float else \
            torch.randint(low, high + 1, tuple(shape), generator=generator)
    else:
        field = torch.full(tuple(shape), one())
        for _ in range(draw.choice((0, 1, 2, 3)) if field.numel() else 0):
            field.view(-1)[draw.randint(0, field.numel() - 1)] = one()
    return field.to(torch_dtype(kind))


def filled(draw: random.Random, spec: Drawn, n: int, k: int, group: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Drawn fields, and each spread over the whole weight, floats in float32."""
    fields: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, (kind, index) in spec.fields.items():
        lengths = [n if subscript[0] == "n" else k for subscript in index]
        blocks = [block(subscript, length, group) for subscript, length in zip(index, lengths, strict=True)]
        fields[name] = numbers(draw, kind, [-(-length // by) for length, by in zip(lengths, blocks, strict=True)],
                               spec.codes if name == "q" else 0)
        spread = fields[name].float() if fields[name].is_floating_point() else fields[name].to(torch.int32)
        for axis, (length, by) in enumerate(zip(lengths, blocks, strict=True)):
            spread = spread.repeat_interleave(by, axis).narrow(axis, 0, length)
        whole[name] = (spread[:, None] if [subscript[0] for subscript in index] == ["n"] else spread).expand(n, k)
    return fields, whole


@pytest.mark.filterwarnings("ignore:(divide|invalid|overflow).*:RuntimeWarning")   # lanes that are masked divide 0 by 0
@pytest.mark.parametrize("way", WAYS)
def test_drawn_formats(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=examples(EXAMPLES), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def run(draw: random.Random) -> None:
        folder = tmp_path_factory.mktemp("drawn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QDSL_CACHE", str(folder / "cache"))
            spec = drawn(draw, way)
            note(spec.text)
            (folder / "drawn.yaml").write_text(spec.text)
            try:
                module = qdsl.load(folder / "drawn.yaml")
            except SpecError as error:
                # Blocks of group and of a constant; one digit of base 3 in each byte, in another order than the columns.
                is_known = "base3(j<1:" in spec.text and "do not fit containers of up to 8 bytes" in str(error)
                assert is_known or "need not nest" in str(error), spec.text
                return
            check_format(draw, spec, module)

    run()


def check_format(draw: random.Random, spec: Drawn, module: Any) -> None:
    """A weight in every storage that holds its shape, converted from each to each, cut, and multiplied."""
    n, k = draw.choice(ROWS), draw.choice(COLUMNS)
    group = draw.choice((32, 7, -1)) if "group" in module.SPEC.params else None
    params = {} if group is None else {"group": group}
    fields, whole = filled(draw, spec, n, k, group)
    note(f"N, K = {n}, {k}  {params}  {fields}")
    exact = eval(spec.decode, {}, whole)  # noqa: S307
    weights: list[PackedWeight] = []
    for storage in dict.fromkeys(name for variant in module.FORMAT.variants.values() for name in variant.storages):
        try:
            weights.append(module.pack(fields, storage, **params))
        except FormatError as error:
            assert "must be a multiple of" in str(error) or storage == "planar", storage
    for packed in weights:
        unpacked = module.unpack(packed)
        assert all(same_bits(unpacked[name], field) for name, field in fields.items()), packed.storage
        assert same_bits(module.dequantize(packed, torch.float32).nan_to_num(9), exact.nan_to_num(9)), packed.storage
        for other in weights:
            converted = module.convert(packed, other.storage)
            assert all(same_bits(raw(converted.tensors[name]), raw(tensor)) for name, tensor in other.tensors.items()), \
                (packed.storage, other.storage)
    if weights:
        packed = draw.choice(weights)
        check_pieces(draw, packed, exact)
        check_kernels(packed, exact, packed.storage)


def check_pieces(draw: random.Random, packed: PackedWeight, exact: Tensor) -> None:
    """Two pieces have the weight's numbers, and their join has all of them."""
    dim = draw.choice("NK")
    axis, size = "NK".index(dim), packed.shape["NK".index(dim)]
    border = draw.randint(0, size)
    try:
        pieces = [packed.shard(dim, 0, border), packed.shard(dim, border, size)]
    except FormatError as error:
        assert "cannot be cut" in str(error)
        return
    shown = [piece.dequantize(torch.float32).nan_to_num(9) for piece in pieces]
    assert same_bits(torch.cat(shown, axis), exact.nan_to_num(9)), (dim, border)
    if pieces[0].storage == pieces[1].storage and pieces[0].params == pieces[1].params and 0 < border < size:
        try:
            joined = PackedWeight.join(pieces, dim)
        except FormatError:                                      # blocks that all pieces share, or that end inside them
            return
        assert same_bits(joined.dequantize(torch.float32).nan_to_num(9), exact.nan_to_num(9)), (dim, border)


def check_kernels(packed: PackedWeight, exact: Tensor, what: object) -> None:
    packed = packed.to(DEVICE)
    out = torch.full(packed.shape, torch.nan, device=DEVICE)
    with guarded(packed, out):
        launch.dequantize(packed, out)
    assert same_bits(out.cpu().nan_to_num(9), exact.nan_to_num(9)), what
    x = torch.randn(2, packed.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    product = torch.full((2, packed.shape[0]), torch.nan, device=DEVICE)
    with guarded(packed, x, product):
        launch.linear(x, packed, None, product)
    wanted, most = x.cpu().double() @ exact.double().t(), x.cpu().double().abs() @ exact.double().abs().t()
    close = (product.cpu().double() - wanted).abs() <= (packed.shape[1] + 2) * 2.0 ** -24 * most + 1e-30
    assert bool((close | ~most.isfinite()).all()), what
