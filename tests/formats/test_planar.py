"""The planar storage: exact there and back, no larger than promised, made a tile of rows at a time, for layers and models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qdsl
from qdsl.compiler.emit.triton.codebook import Codebook
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.derive_planar import PLANAR, why_no_planar
from qdsl.compiler.passes.pair_levels import pair_order
from qdsl.compiler.spec.schema import load
from qdsl.core import places
from qdsl.generated import fp8_channel, int_group, q4_0, q4_k, q8_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import stream_kernels, tiles
from tests.support.covering import ALL, by_turns, quarter_of
from tests.support.formats import (
    Case,
    assert_same,
    cases,
    is_held,
    random_fields,
    random_packed,
    same_bits,
    shapes,
    shuffled_fields,
)

CASES = [case for case in cases() if case.storage != PLANAR and PLANAR in case.module.FORMAT.variant(case.choice).storages]
# Those that can put columns into groups in any order.
ORDERED = [case for case in CASES if "index" in {
    stored.dtype for stored in case.module.FORMAT.variant(case.choice).storages[case.storage].tensors.values()}]
SHAPE = (128, 512)


def params(case: Case) -> Iterator[dict[str, int | str]]:
    format = case.module.FORMAT
    values = {size: format.params[size] for size in format.size_axes}
    for i in range(max(map(len, values.values()), default=1)):
        chosen = {**case.choice, **{size: choices[min(i, len(choices) - 1)] for size, choices in values.items()}}
        if is_held(case, chosen):
            yield chosen


def weight(case: Case, chosen: dict[str, int | str], seed: int = 0) -> PackedWeight:
    """Random, its columns in order."""
    longest = max((size for size in case.module.FORMAT.sizes(chosen, SHAPE).values()), default=1)
    shape = next(shapes(case, SHAPE[:1], (max(SHAPE[1], longest), 4096), chosen))
    packed = random_packed(case, shape, seed, chosen)
    index = [name for name, stored in packed.layout.tensors.items() if stored.dtype == "index" and name in packed.tensors]
    return case.module.FORMAT.checked(packed.derive({k: v for k, v in packed.tensors.items() if k not in index}))


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_there_and_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 40 * SHAPE[1])            # several tiles of rows, the last one short
    for chosen in params(case):
        packed = weight(case, chosen)
        planar = case.module.convert(packed, PLANAR)
        assert planar.storage == PLANAR and planar.shape == packed.shape and planar.params == packed.params
        back = case.module.convert(planar, case.storage)
        assert back.tensors.keys() == packed.tensors.keys()
        assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
        again = case.module.convert(back, PLANAR)
        assert all(same_bits(again.tensors[name], tensor) for name, tensor in planar.tensors.items())
        assert_same(case.module.dequantize(planar, torch.float32), case.module.dequantize(packed, torch.float32), planar)


# 2 bits for digits of which five fill a byte, codes of 8 bits in fewer of an entropy code, and codes of single weights for rows
# of a grid: planar() leaves these.
KEPT = ("tq1_0.gguf", "fp8_channel.fp8_lane",
        *(f"{name}.gguf" for name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")))


@pytest.mark.parametrize("case", [case for case in CASES if case.path.parent.name == "specs" and "tests" not in case.path.parts],
                         ids=str)
def test_no_larger_than_promised(case: Case) -> None:
    for chosen in params(case):
        packed, planar = (
            stream_kernels.with_typical_streams(case.module.FORMAT.empty((4096, 4096), storage, "meta", (), **chosen))
            for storage in (case.storage, PLANAR))
        bits = 8 * packed.nbytes / 4096 ** 2
        larger = planar.nbytes > packed.nbytes * (1.04 if bits >= 4 else 1.12)
        assert larger == (f"{case.path.stem}.{case.storage}" in KEPT), chosen
        assert larger == ("bytes would become" in (case.module.FORMAT.why_not_planar(packed) or "")), chosen


def test_repacking_needs_a_tile_beside_both_weights() -> None:
    """Of a format whose scales are cut in two, so that it goes through fields."""
    fields = random_fields(next(case for case in CASES if str(case) == "q4_k.gguf"), (2048, 4096))
    packed = q4_k.pack(fields)
    allowed = packed.nbytes // 2
    sizes: list[int] = []
    layout = q4_k.FORMAT.variants[()].storages[PLANAR]
    pack = layout.pack

    def watched(**fields: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes.append(sum(field.nbytes for field in fields.values()))
        return pack(**fields)

    object.__setattr__(layout, "pack", watched)
    try:
        planar = q4_k.convert(packed, PLANAR)
    finally:
        object.__setattr__(layout, "pack", pack)
    assert len(sizes) >= 8 and max(sizes) < allowed
    assert same_bits(q4_k.convert(planar, "gguf").tensors["blocks"], packed.tensors["blocks"])


def test_what_has_no_planar_form_stays() -> None:
    odd = q4_0.quantize(torch.randn(8, 4096 + 32))
    assert q4_0.planar(odd) is odd
    ordered = int_group.quantize(torch.randn(64, 256), group=64)
    assert int_group.planar(ordered).storage == PLANAR
    assert q4_0.planar(q4_0.planar(q4_0.quantize(torch.randn(8, 256)))).storage == PLANAR


def test_a_model_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32, bias=False))
    qdsl.quantize_(model, q8_0, skip=lambda layer, name: name != "0")
    x = torch.randn(3, 256)
    before = model(x)
    bias = model[0].bias
    report = qdsl.planar_(model)
    assert list(report.quantized) == ["0"] and report.skipped == {} and "matrix units" in str(report)
    assert model[0].packed.storage == PLANAR and model[0].bias is bias and torch.equal(model(x), before)
    assert set(dict(model[0].named_parameters())) == {"q", "d", "bias"}
    assert list(qdsl.planar_(model).skipped) == ["0"]
    with pytest.raises(FormatError, match="itself a linear layer"):
        qdsl.planar_(model[0])


# -- columns that are stored by groups, for act-order ------------------------------------------------------------------


def act_order(k: int = 256, group: int = 64, seed: int = 0) -> PackedWeight:
    """A GPTQ weight [64, K] whose columns lie in groups all over K, each as large as in order."""
    packed = int_group.quantize(torch.randn(64, k, generator=torch.Generator().manual_seed(seed)), "gptq_v2", group=group)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return int_group.wrap({**packed.tensors, "g_idx": packed.tensors["g_idx"][columns]}, storage="gptq_v2", group=group)


# 544: a last group that is short, and may lie anywhere
@pytest.mark.parametrize(("case", "k"), by_turns(ORDERED, (SHAPE[1], 544)), ids=str)
def test_act_order_there_and_back(case: Case, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every second choice of the parameters that choose no kernels, and all in `make test-all`."""
    monkeypatch.setattr(tiles, "TILE", 40 * k)
    for i, chosen in list(enumerate(params(case)))[::1 if ALL else 2]:
        fields = shuffled_fields(case, (SHAPE[0], k), i, chosen)
        packed = case.module.pack(fields, storage=case.storage, **chosen)
        planar = case.module.convert(packed, PLANAR)
        assert ("order" in planar.tensors) == (not packed.in_order)      # with one group there is no other order
        back = case.module.convert(planar, case.storage)
        index = set(packed.in_order)
        assert back.tensors.keys() == packed.tensors.keys() - index
        assert all(same_bits(tensor, packed.tensors[name]) for name, tensor in back.tensors.items())
        again = case.module.pack(case.module.unpack(planar), storage=PLANAR, **packed.params)
        assert again.tensors.keys() == planar.tensors.keys()
        assert all(same_bits(again.tensors[name], tensor) for name, tensor in planar.tensors.items())
        unpacked = case.module.unpack(planar)
        assert all(torch.equal(unpacked[name], field) for name, field in fields.items() if index == set() or name in unpacked)
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(case.module.dequantize(planar, dtype), case.module.dequantize(packed, dtype), planar)
        out = torch.empty(k, SHAPE[0]).t()                       # strides of any kind
        assert torch.equal(case.module.dequantize(planar, out=out), case.module.dequantize(packed, torch.float32))


def full(case: Case, storage: str, chosen: dict[str, int | str]) -> PackedWeight:
    """A weight without data that has every tensor of its storage."""
    tensors = case.module.FORMAT.variant(chosen).storages[storage].tensors
    present = [name for name, stored in tensors.items() if stored.optional]
    return case.module.FORMAT.empty((4096, 4096), storage, "meta", present, **chosen)


@pytest.mark.parametrize("case", [case for case in ORDERED if case.path.stem == "int_group"], ids=str)
def test_an_order_is_no_larger_than_an_index(case: Case) -> None:
    for chosen in params(case):
        packed, planar = (full(case, storage, chosen) for storage in (case.storage, PLANAR))
        [index] = [name for name, stored in packed.layout.tensors.items() if stored.dtype == "index"]
        assert planar.tensors["order"].nbytes == packed.tensors[index].nbytes
        assert planar.nbytes <= packed.nbytes * (1.04 if 8 * packed.nbytes / 4096 ** 2 >= 4 else 1.12), chosen


# A format with a field of that name, and one in which something else depends on where a column is.
NAMED = """
format: {name}
title: columns that an index puts into groups
weight: [N, K]
params:
  group: [32, 64]
dims:
  G: ceil(K / group)
fields:
  g: index(G)[k]
  order: u4[n, g]
  q: u4[n, k]
  s: f16[n, {block}]
decode: (q - order) * s
storage:
  rows:
    g: {{tensor: "i32[k<K]", record: "g[k]", optional: k // group}}
    q: {{tensor: "u8[n<N, t<K/2 word]", record: "i<2: q[n, 2*t + i]"}}
    order: {{tensor: "u8[n<N, j<G]", record: "order[n, j] pad:4"}}
    s: {{tensor: "f16[n<N, j<ceil(K/{step})]", record: "s[n, j]"}}
"""


@pytest.mark.parametrize(("name", "block", "step", "order"), [
    ("named_order", "g", "group", "order_"), ("placed_scales", "k // 32", "32", "")])
def test_which_formats_have_an_order(name: str, block: str, step: str, order: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.yaml").write_text(NAMED.format(name=name, block=block, step=step))
    module = qdsl.load(tmp_path / f"{name}.yaml")
    assert module.FORMAT.variants[()].storages[PLANAR].order == order
    case = Case(tmp_path / f"{name}.yaml", "rows", (("group", 64),))
    packed = module.pack(shuffled_fields(case, (16, 256)), "rows", group=64)
    planar = module.planar(packed)
    if not order:
        assert planar is packed and module.FORMAT.why_not_planar(packed) == "'g': columns are out of order"
        return
    assert planar.tensors.keys() == {"q", "s", "order", "order_"}
    assert same_bits(module.dequantize(planar, torch.float32), module.dequantize(packed, torch.float32))
    assert all(same_bits(tensor, packed.tensors[key]) for key, tensor in module.convert(planar, "rows").tensors.items())


def test_what_an_order_is() -> None:
    """Columns of group 0 first, ascending in each; the columns of every group are a run of places."""
    packed = act_order()
    planar = int_group.planar(packed)
    order, index = planar.tensors["order"].long(), packed.tensors["g_idx"]
    assert torch.equal(index[order], torch.arange(256, dtype=torch.int32) // 64)
    assert (order.view(4, 64).diff(dim=1) > 0).all()
    stored, own = int_group.unpack(planar.as_stored()), int_group.unpack(planar)
    assert int_group.wrap(planar.tensors, group=64).shape == (64, 256)   # an order says what K is, which the planes do not
    assert torch.equal(stored["q"], own["q"][:, order]) and torch.equal(stored["z"], own["z"]) and torch.equal(own["g"], index)


def test_columns_in_order_need_none() -> None:
    """Neither an index that adds nothing nor an order that does is passed on."""
    packed = int_group.quantize(torch.randn(64, 256), "gptq_v2", group=64)
    planar = int_group.planar(packed)
    assert "g_idx" in packed.tensors and "order" not in planar.tensors
    assert "g_idx" not in int_group.convert(planar, "gptq_v2").tensors
    written = int_group.wrap({**planar.tensors, "order": torch.arange(256, dtype=torch.int32)}, shape=(64, 256), group=64)
    assert written.in_order == {"order"} and written.order is None
    x = torch.randn(3, 256)
    assert torch.equal(int_group.linear(x, written), int_group.linear(x, planar))
    part = written.cut("K", 128, 256)
    assert int_group.FORMAT.checked(part).in_order == {"order"}
    assert torch.equal(int_group.dequantize(part), int_group.dequantize(planar)[:, 128:])


def test_groups_that_differ_in_size_stay() -> None:
    """An order says which columns a group has only where all have as many."""
    packed = act_order()
    uneven = packed.tensors["g_idx"].clone()
    uneven[uneven == 2] = 1
    other = int_group.wrap({**packed.tensors, "g_idx": uneven}, storage="gptq_v2", group=64)
    assert int_group.planar(other) is other
    message = "group 1 has 128 columns where columns in order would give it 64"
    with pytest.raises(FormatError, match=f"int_group.planar cannot hold 'g', because it stores columns by groups: {message}"):
        int_group.convert(other, PLANAR)
    with pytest.raises(FormatError, match="int_group: 'g' puts column 7 into group -1; there are groups 0 to 3"):
        int_group.pack({**int_group.unpack(packed), "g": uneven.index_fill(0, torch.tensor([7]), -1)}, PLANAR, group=64)
    with pytest.raises(FormatError, match=r"awq cannot hold 'g': it has its default there \(columns in order\)"):
        int_group.convert(int_group.planar(packed), "awq")
    model = torch.nn.Sequential(int_group.Linear(packed), torch.nn.ReLU(), int_group.Linear(other))
    report = qdsl.planar_(model)
    assert list(report.quantized) == ["0"] and report.skipped == {"2": f"gptq_v2 stays: 'g_idx': {message}"}
    meta = int_group.FORMAT.empty((64, 256), "gptq_v2", "meta", ("g_idx",), group=64)
    assert int_group.planar(meta) is meta


def test_a_model_with_act_order() -> None:
    model = torch.nn.Sequential(int_group.Linear(act_order(), torch.randn(64)))
    x = torch.randn(5, 256, dtype=torch.float64)
    before, weight = model(x), model[0].dequantize(torch.float32)
    assert list(qdsl.planar_(model).quantized) == ["0"]
    assert set(dict(model[0].named_parameters())) == {"q", "s", "z", "order", "bias"}
    assert same_bits(model[0].dequantize(torch.float32), weight)
    torch.testing.assert_close(model(x), before)
    model[0].batch_invariant = True
    assert torch.equal(model(x)[2:3], model(x[2:3]))
    lora = torch.randn(64, 256)
    assert torch.equal(model[0].dense(torch.float32).weight + lora, weight + lora)


def test_parts_of_a_weight_in_another_order() -> None:
    planar = int_group.planar(act_order())
    part = planar.cut("N", 16, 48)
    assert same_bits(int_group.dequantize(part), int_group.dequantize(planar)[16:48])
    with pytest.raises(FormatError, match=r"'order' puts columns into groups all over K \(act-order\); only rows can be cut"):
        planar.cut("K", 0, 128)


def spoiled(place: int, column: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda order: order.clone().index_fill_(0, torch.tensor([place]), column)


@pytest.mark.parametrize(("change", "message"), [
    (spoiled(5, -1), "'order' names column -1 at place 5; there are columns 0 to 255"),
    (spoiled(70, 256), "'order' names column 256 at place 70; there are columns 0 to 255"),
    (lambda order: torch.cat((order[:9], order[:1], order[10:])), r"'order' names column \d+ at place 0 and again at place 9"),
    (lambda order: order[[1, 0, *range(2, 256)]],
     r"'order' names column \d+ at place 1, after column \d+ of the same group; the columns of a group ascend"),
    (lambda order: order.long(), "tensor 'order' has dtype int64; the format needs int32"),
    (lambda order: order[:128].clone(), r"'order' \[128\]|tensor 'order' has shape"),
])
def test_an_order_that_is_none_is_refused(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    planar = int_group.planar(act_order())
    tensors = {**planar.tensors, "order": change(planar.tensors["order"])}
    with pytest.raises(FormatError, match=message):
        int_group.wrap(tensors, shape=(64, 256), storage=PLANAR, group=64)
    layer = int_group.Linear.empty((64, 256), PLANAR, optional=["order"], bits=4, group=64)
    with pytest.raises((FormatError, RuntimeError), match="order"):
        layer.load_state_dict(tensors, assign=True)


def test_codes_that_are_no_numbers_are_noted() -> None:
    """The kernels for matrix units take NaN codes for numbers, so weights with such codes are noted, wherever they come from."""
    packed = fp8_channel.quantize(torch.randn(16, 256))
    assert packed.finite and fp8_channel.convert(packed, PLANAR).finite
    codes = packed.tensors["weight"].view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    wrapped = fp8_channel.wrap({**packed.tensors, "weight": codes.view(torch.float8_e4m3fn)})
    assert not wrapped.finite and not fp8_channel.convert(wrapped, PLANAR).finite
    layer = fp8_channel.Linear(packed)
    assert layer.packed.finite
    layer.load_state_dict({**layer.state_dict(), "weight": wrapped.tensors["weight"]}, assign=True)
    assert not layer.packed.finite




# -- tables -----------------------------------------------------------------------------------------------------------


# Codes into a table, some of its parts chosen by a bit of each group; or into a table that is stored.
LOOKED_UP = """
format: looked_up
title: codes into a table
weight: [N, K]
{table}
fields:
  s: u6[n, k // 32]
  h: u1[n, k // {block}]
{field}  q: u2[n, k]
decode: (s - 32) * {decode}
storage:
  rows:
    q: {{tensor: "u8[n<N, t<K/4 word]", record: "i<4: q[n, 4*t + i]"}}
    s: {{tensor: "u8[n<N, j<K/32]", record: "s[n, j] pad:2"}}
    h: {{tensor: "u8[n<N, j<K/{block}]", record: "h[n, j] pad:7"}}
{tensor}"""
LEVELS = "tables: {levels: [-31, -13, 1, 17, -26, -8, 6, 22]}"
PARTS = {"field": "", "tensor": "", "block": 32, "decode": "levels[4 * h + q]"}
STORED = {"table": "", "block": 32, "decode": "(lut[n // 2, q] + 4 * h)", "field": "  lut: f32[n // 2, 4]\n",
          "tensor": '    lut: {tensor: "f32[g<ceil(N/2), i<4]", record: "lut[g, i]"}\n'}


def looked_up(folder: Path, **parts: object) -> tuple[Any, PackedWeight, str]:
    """A format, a random weight of it, and why it has no planar storage."""
    path = folder / "looked_up.yaml"
    path.write_text(LOOKED_UP.format(**parts))
    module = qdsl.load(path)
    return module, module.pack(random_fields(Case(path, "rows", ()), (24, 256)), "rows"), why_no_planar(compile_spec(load(path)))


def test_parts_of_a_table_that_differ_by_a_step(tmp_path: Path) -> None:
    """The bit of a group adds a step to numbers of one part, in which kernels look codes up; it lies in the byte of a scale."""
    module, packed, why = looked_up(tmp_path, **PARTS, table=LEVELS)
    planar = module.planar(packed)
    assert why == "" and planar.tensors.keys() == {"q", "s"} and planar.tensors["s"].shape == (24, 8)
    s, h = (module.unpack(packed)[name].int() for name in "sh")
    assert torch.equal(planar.tensors["s"].int(), s | h << 6)
    assert same_bits(module.dequantize(planar, torch.float32), module.dequantize(packed, torch.float32))
    back = module.convert(planar, "rows")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    text = inspect.getsource(module.FORMAT.variants[()].storages[PLANAR].kernels.matrix_unit.sums.scale.fn)
    assert "levels[q] + 5.0 * h" in text


@pytest.mark.parametrize(("changes", "why"), [
    ({"table": LEVELS.replace("22", "23")}, "decode is no sum of products"),
    ({"table": LEVELS, "decode": "levels[2 * h + q]"}, "decode is no sum of products"),
    ({"table": LEVELS, "decode": "levels[4 * h + (3 - q)]"}, "decode is no sum of products"),
    ({**STORED, "decode": "(lut[n // 2, 3 - q] + 4 * h)"}, "decode looks up 'lut', a table that is stored with the weight"),
    ({**STORED, "field": "  lut: e4m3[n // 2, 4]\n", "tensor": str(STORED["tensor"]).replace("f32", "e4m3")},
     "'lut' is no bf16, f16, f32"),
])
def test_tables_that_kernels_cannot_look_up(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    module, packed, reason = looked_up(tmp_path, **{**PARTS, **changes})
    assert why in reason and module.planar(packed) is packed


def test_levels_in_pairs() -> None:
    """A half of the table answers codes of the other half with the top bit of a byte, repeated; both halves give the level."""
    nf4 = load(places.specs() / "nf4.yaml").table("levels").values
    order = pair_order(nf4)
    assert order is not None and sorted(order) == [*range(16)]
    levels = torch.tensor(nf4)[list(order)]
    low, high = (np.array(words, np.int32).view(np.uint8) for words in Codebook(tuple(levels.tolist()), 2.0).floats("bf16"))
    for code, level in enumerate(levels.bfloat16().tolist()):
        bits = [table[code] ^ (255 if table[code ^ 8] & 128 else 0) for table in (low, high)]
        assert torch.tensor(bits, dtype=torch.uint8).view(torch.bfloat16).item() == level
    assert pair_order(load(places.specs() / "bnb_fp4.yaml").table("levels").values) is None
    assert Codebook(nf4, 2.0).paired is None


def test_stored_tables_of_blocks_of_rows(tmp_path: Path) -> None:
    module, packed, why = looked_up(tmp_path, **STORED)
    planar = module.planar(packed)
    assert why == "" and planar.tensors.keys() == {"q", "s", "lut"}
    assert same_bits(planar.tensors["lut"], packed.tensors["lut"])
    levels = planar.layout.kernels.matrix_unit.codes.stored_levels
    assert (levels.tensor, levels.rows) == ("lut", 2)
    assert same_bits(module.dequantize(planar, torch.float32), module.dequantize(packed, torch.float32))
    for dtype, rounds in ((torch.float16, True), (torch.float32, False)):
        assert planar.layout.kernels.rounds_tables(dtype, planar.tensors) is rounds
