"""Products on a CPU: the compiled loops of every format, how they are kept, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qdsl.generated import bf16, fp8_block, int_group, q4_0, q8_0, vptq
from qdsl.host import library
from qdsl.runtime import PackedWeight
from qdsl.runtime.cpu import kept, loops
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu.source import DECODE, FUNCTIONS, VECTORS
from qdsl.runtime.cpu.threads import functions as product_functions
from qdsl.runtime.torch import siblings
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.products import forget_products
from qdsl.runtime.weight.target import Candidate
from tests.support.covering import ALL, covering
from tests.support.cpu_products import check, in_order, plain, sample
from tests.support.formats import Case, cases, fixed_shape, same_bits, shapes, smallest

CASES, load = cases(), library.load
COVERING = covering(CASES, lambda case: [case.module.FORMAT.variant(case.choice).storages[case.storage].kernels.decode])
LIBRARY = ("order", "turn", "decode_steps", "decode_whole", "decode", "add_row", "add_steps", "row_alone", "joined",
           "steps_of_rows", "steps_of_row", "arrange", "run", "MANY", "EACH", "SUMS")          # own names of a source
PARTS = 2                                                        # formats are compiled in so many programs
WEIGHTS: dict[str, Callable[[], PackedWeight]] = {
    "q8_0": lambda: q8_0.quantize(sample(48, 256)),
    "q4_0": lambda: q4_0.quantize(sample(48, 256)),
    "fp8_block, a short block of rows": lambda: fp8_block.quantize(sample(160, 256), bn=128, bk=128),
    "gptq": lambda: int_group.quantize(sample(64, 256), "gptq_v2", bits=4, group=128),
    "awq": lambda: int_group.quantize(sample(256, 128), "awq", bits=4, group=64),
}


def are_compiled() -> bool:
    """Whether every weight that was multiplied has a loop, in one way or another."""
    ways: dict[Any, list[loops.Loop | None]] = {}
    for (*weight, _, _), loop in loops._loops.items():
        ways.setdefault(tuple(weight), []).append(loop)
    return bool(ways) and all(any(own) for own in ways.values())


def by_loop(x: Tensor, packed: PackedWeight) -> Tensor:
    """The product in float32 by a loop for few rows of x."""
    together = loops.TOGETHER if len(x) > 2 else 1
    assert loops.find_loop(packed, together) is not None
    return cpu.run(Candidate(cpu.PLAIN, {"ROWS": together}), x.float(), packed)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """Products are compiled in these tests, of small weights too, and read them as they are stored."""
    monkeypatch.setenv("QDSL_CACHE", str(cache_folder))
    monkeypatch.setattr(loops, "_loops", {})
    product_functions()
    cpu.compile_products()
    yield
    cpu.compile_products(False)


def build_at_once(sources: set[str], folder: Path) -> dict[str, Any]:
    """The functions of many sources, by source; those for vectors of one length are compiled as one, not optimized."""
    functions, common = {}, "\n".join(path.read_text(encoding="utf-8") for path in (VECTORS, FUNCTIONS))
    for width in ("16", "8", "4"):
        chosen = sorted(text for text in sources if text.startswith(f"#define LANES {width}\n"))
        if not chosen:
            continue
        bodies = [f"#define LANES {width}\n{common}"]
        for i, text in enumerate(chosen):
            settings, _, own = text.partition(common)
            bodies += [f"#undef {name}" for name in re.findall(r"#define (\w+)", settings + own)]
            bodies += [f"#undef {name}\n#define {name} {name}_{i}" for name in LIBRARY]
            bodies += [settings, own]
        path = folder / f"lanes{width}.so"
        options = library.machine_options(torch.backends.cpu.get_cpu_capability())
        library._compile((*library.compiler(), *library.OPTIONS, "-O0", *options), "\n".join(bodies), path)
        names = ctypes.CDLL(str(path))
        functions |= {text: SimpleNamespace(run=getattr(names, f"run_{i}"), arrange=getattr(names, f"arrange_{i}", None))
                      for i, text in enumerate(chosen)}
    return functions


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_compiled_decodes_make_the_same_bits_and_few_rows_meet_exact_weights(part: int, tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole shape, and where the format has one, a ragged shape.  Four rows of x share a pass over every fourth weight."""
    weights: list[tuple[Case, PackedWeight, int]] = []
    sources: set[str] = set()
    for number, case in list(enumerate(COVERING if ALL else COVERING[::6]))[part::PARTS]:
        rows = 4 if number // PARTS % 4 == 0 else 1
        whole = next(iter(shapes(case, (128,), (256,))), smallest(case, tiles=2))
        ragged = [smallest(case), *shapes(case, (7, 160), (33, 256))][-1]
        weights += [(case, in_order(case, shape), rows) for shape in dict.fromkeys([whole, ragged])]
        sources |= {loops.source_for(weights[-1][1], kind).text for kind in (DECODE, rows)}
    functions = build_at_once(sources, tmp_path)
    monkeypatch.setattr(library, "load", lambda text, options: functions[text])
    decoded = 0
    for case, packed, rows in weights:
        weight = plain(packed)
        if (decode := loops.row_decoder(packed)) is not None:
            out = torch.full(packed.shape, torch.nan)
            decode(out, 0)
            assert same_bits(out, weight), (case, packed.shape)
            decoded += 1
        x = sample(rows, packed.shape[1], seed=rows)
        check(case.module.linear(x, packed), x, weight, what=(case, packed.shape))
    assert decoded >= len(weights) * 0.8                         # a few ragged shapes have no loop


# How rows of a step come into memory: as they are decoded, from pairs of vectors, from a buffer, and turned, in tiles of 1 and 8.
@pytest.mark.parametrize("name", ["q4_k.gguf", "ocp_mxfp4.compressed_tensors",
                                  "int_group.pack_quantized-bits4-group128-scale_typef16",
                                  "int_group.gptq_v2-bits4-group128-scale_typef16", "int_group.awq-bits4-group128-scale_typef16",
                                  "fp6_llm.fp6_llm-scale_typef16", "fbgemm_4bit.fbgemm"])
def test_dequantize_by_a_loop_makes_the_bits_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if str(case) == name)
    packed = in_order(case, (192, 768))
    weight, wide = plain(packed), torch.zeros(192, 2, 768)
    assert loops.has_vectors(packed)
    monkeypatch.setattr(loops, "TILE", 1 << 16)                  # several tiles, the last one short
    monkeypatch.setattr(tiles, "decode_rows", None)              # torch's way would call it
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same_bits(case.module.dequantize(packed, dtype), weight.to(dtype))
    case.module.dequantize(packed, torch.float32, out=wide[:, 1])
    assert same_bits(wide[:, 1], weight) and not wide[:, 0].any()


def test_dequantize_goes_by_torch_where_a_loop_has_no_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where there is no compiler, or the setting does not want one: without a warning."""
    slow = next(in_order(case, (32, 128)) for case in CASES if str(case).startswith("hqq_axis0.hqq-bits4"))
    assert loops.row_decoder(slow) is not None and not loops.has_vectors(slow)
    calls: list[Any] = []
    decode = tiles.decode_rows
    monkeypatch.setattr(tiles, "decode_rows", lambda *arguments: (calls.append(arguments), decode(*arguments)))
    slow.format.dequantize(slow, torch.float32)
    packed = WEIGHTS["q8_0"]()
    monkeypatch.setattr(library, "compiler", lambda: (_ for _ in ()).throw(library.NoCompiler("no C compiler")))
    q8_0.dequantize(packed, torch.float32)
    assert len(calls) == 2


# Vectors of neighbouring columns; of 8 columns; columns in turn; and rows that are neighbours, one or eight of a word.
@pytest.mark.parametrize("name", ["q4_k.gguf", "iq2_xxs.gguf", "nf4.bitsandbytes-block64", "iq3_s.gguf",
                                  "int_group.gptq_v2-bits4-group128-scale_typef16", "int_group.awq-bits4-group128-scale_typef16"])
@pytest.mark.parametrize("capability", ["", "AVX2", "DEFAULT"])
def test_loops_leave_weights_exact(name: str, capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one number in x no sum has a second term: the product is the weight, bit for bit.  The last rows have no vectors."""
    own = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" and own not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(loops, "_capability", lambda: capability or own)
    case = next(case for case in CASES if str(case) == name)
    packed = in_order(case, fixed_shape(case, (24, 512)))
    sources = {loops.source_for(packed, rows).text for rows in (1, 4)}
    functions = build_at_once(sources, tmp_path)
    monkeypatch.setattr(library, "load", lambda text, options=(): functions.get(text) or load(text, options))
    weight = plain(packed)
    for start, count in ((0, 1), (130, 4), (508, 4)):
        assert torch.equal(by_loop(torch.eye(512)[start:start + count], packed).T, weight[:, start:start + count])
    x = sample(4, 512)
    check(by_loop(x, packed), x, weight)


@pytest.mark.parametrize("lanes", [8, 4])
def test_loops_for_other_machines_give_the_same(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2, and with plain C for vectors of 4; both run on this machine."""
    name = {8: "AVX2", 4: "DEFAULT"}[lanes]
    if lanes == 8 and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(loops, "_capability", lambda: name)
    packed = WEIGHTS["q4_0"]()
    weight, x = plain(packed), sample(3, 256)
    assert f"#define LANES {lanes}\n" in loops.source_for(packed, 1).text
    check(q4_0.linear(x, packed), x, weight)
    x = sample(9, 256)
    check(q4_0.linear(x, packed), x, weight)


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_all_dtypes_and_a_bias(name: str) -> None:
    packed = WEIGHTS[name]()
    weight = plain(packed)
    bias = sample(packed.shape[0], seed=9)
    for rows, dtype in ((1, torch.bfloat16), (3, torch.float32), (6, torch.float16)):
        x = sample(rows, packed.shape[1], seed=rows, dtype=dtype)
        product = packed.format.linear(x, packed, bias)
        check(product, x, weight, bias)
        assert same_bits(product, packed.format.linear(x, packed, bias))
    x = sample(9, packed.shape[1], dtype=torch.bfloat16)         # tiles, of weights rounded to x's dtype
    wanted = torch.nn.functional.linear(x.double(), weight.to(x.dtype).double())
    assert (packed.format.linear(x, packed).double() - wanted).abs().max() <= 2.0 ** -8 * wanted.abs().max()
    assert are_compiled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_that_rounds_to_the_type_of_a_tensor(dtype: torch.dtype) -> None:
    """Columns one at a time, each rounded twice."""
    numbers = {"cb": sample(1 << 16, 8, dtype=dtype), "a": sample(256, dtype=dtype), "b": sample(256, seed=1, dtype=dtype)}
    packed = vptq.pack({**numbers, "q": torch.randint(1 << 16, (8, 256), dtype=torch.int32)}, bits=16)
    weight, out = plain(packed), torch.empty(64, 256)
    decode = loops.row_decoder(packed)
    assert decode is not None
    decode(out, 0)
    assert same_bits(out, weight) and torch.equal(vptq.linear(torch.eye(256), packed).t(), weight)
    x = sample(3, 256, seed=2)
    check(vptq.linear(x, packed), x, weight)


@pytest.mark.parametrize("options", [(), ("-march=x86-64-v3",)])
def test_rounding_to_float16_is_that_of_torch(options: tuple[str, ...]) -> None:
    """All float16, the middles between neighbours, what lies beside these, and what is larger or smaller than all."""
    if options and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this machine has no F16C")
    halves = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    middles = (halves[:0x7C00] + halves[1:0x7C01]) / 2
    middles[-1] = 65520                                          # from here on numbers are infinite
    bits = middles.view(torch.int32)
    x = torch.cat([halves, middles, (bits - 1).view(torch.float32), (bits + 1).view(torch.float32), torch.tensor([1e9, 1e-40])])
    x = torch.cat([x, -x])
    source = f"#define LANES 4\n{VECTORS.read_text(encoding='utf-8')}\n" \
        "void run(float *x, long n) { for (long i = 0; i < n; i++) x[i] = round_to_half(x[i]); }"
    rounded = x.clone()
    library.load(source, options).run(ctypes.c_void_p(rounded.data_ptr()), ctypes.c_long(len(x)))
    wanted = x.half().float()
    assert torch.equal(rounded.isnan(), wanted.isnan()) and same_bits(rounded.nan_to_num(7), wanted.nan_to_num(7))


def test_one_library_serves_all_shapes() -> None:
    for n, k in ((48, 256), (7, 32), (64, 1024)):
        packed, x = q8_0.quantize(sample(n, k)), sample(1, k)
        check(q8_0.linear(x, packed), x, plain(packed))
    assert len(loops._loops) == 1


def test_rows_of_x_do_not_depend_on_their_neighbours() -> None:
    packed, x = WEIGHTS["q8_0"](), sample(8, 256)
    assert same_bits(q8_0.linear(x[:2], packed)[1:], q8_0.linear(x[1:2], packed))
    assert same_bits(q8_0.linear(x, packed)[4:7], q8_0.linear(x[4:7], packed))


def test_nan_codes_stay_nan() -> None:
    packed = fp8_block.quantize(sample(128, 128), bn=128, bk=128)
    packed.tensors["weight"].view(torch.uint8)[5, 7] = 127
    product = fp8_block.linear(torch.ones(1, 128), packed)
    assert product.isnan().nonzero().tolist() == [[0, 5]]


def test_act_order_and_columns_by_groups() -> None:
    """A group index as GPTQ stores it is read by the loop; in storage planar, x is put in the order of columns."""
    fields = {**int_group.unpack(WEIGHTS["gptq"]()), "g": torch.arange(256, dtype=torch.int32) % 4}
    fields |= {name: fields[name].repeat(1, 2) for name in ("z", "s")}
    permuted = int_group.pack(fields, "gptq_v2", bits=4, group=64)
    for packed in (permuted, int_group.planar(permuted)):
        x = sample(1, 256)
        check(int_group.linear(x, packed), x, plain(packed))
    assert packed.order is not None and are_compiled()


def test_loaders_make_copies_of_weights_in_act_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first product, which finds them: of columns as they are stored."""
    monkeypatch.setattr(kept, "_entries", {})
    index = torch.arange(256, dtype=torch.int32).flip(0) // 128
    tensors = {**WEIGHTS["gptq"]().apply(Tensor.clone).tensors, "g_idx": index}
    stored = int_group.wrap(tensors, (64, 256), "gptq_v2", bits=4, group=128)
    layer, x = int_group.Linear(int_group.planar(stored)), sample(1, 256)
    siblings.make_ready(nn.Sequential(layer), lambda name: True)
    copies = list(kept._entries)
    assert layer.packed.order is not None and len(copies) == 1
    check(layer(x), x, plain(stored))
    assert list(kept._entries) == copies


def test_tensors_at_odd_addresses_and_strided_ones() -> None:
    packed, x = WEIGHTS["q8_0"](), sample(1, 256)
    blocks = packed.tensors["blocks"]
    moved = torch.empty(blocks.numel() + 1, dtype=torch.uint8)[1:].view(blocks.shape).copy_(blocks)
    strided = torch.empty(*blocks.shape, 2, dtype=torch.uint8)[..., 0].copy_(blocks)
    assert same_bits(q8_0.linear(x, packed), q8_0.linear(x, q8_0.wrap({"blocks": moved})))
    check(q8_0.linear(x, q8_0.wrap({"blocks": strided})), x, plain(packed))


def test_plain_weights_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = sample(64, 128, dtype=torch.bfloat16), sample(3, 128, dtype=torch.bfloat16)
    packed = bf16.quantize(weight)
    monkeypatch.setattr(cpu, "decode_rows", None)                # would be called
    assert same_bits(bf16.linear(x, packed), torch.nn.functional.linear(x, weight))


# -- which products are compiled ---------------------------------------------------------------------------------------


def test_the_setting_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    library.choose("")
    small, large = WEIGHTS["q4_0"](), q4_0.quantize(sample(256, 256))
    for setting, counts in (("never", (0, 0)), ("auto", (0, 1)), ("always", (1, 1))):
        monkeypatch.setenv("QDSL_CPU_COMPILE", setting)
        for packed, count in zip((small, large), counts, strict=True):
            loops._loops.clear()
            forget_products()
            q4_0.linear(sample(1, 256), packed)
            assert len(loops._loops) == count, (setting, packed.shape)
    monkeypatch.delenv("QDSL_CPU_COMPILE")
    loops._loops.clear()
    forget_products()
    q4_0.linear(sample(1, 256), large)
    assert loops._loops                                          # the default is auto
    monkeypatch.setenv("QDSL_CPU_COMPILE", "1")
    forget_products()
    with pytest.raises(FormatError, match="QDSL_CPU_COMPILE is auto, always or never, not '1'"):
        q4_0.linear(sample(1, 256), large)


@pytest.mark.parametrize(("command", "message"), [("/nowhere/cc", "no C compiler"), ("false", "status 1")])
def test_without_a_compiler_tiles_do_it_with_one_warning(command: str, message: str, monkeypatch: pytest.MonkeyPatch,
                                                         tmp_path: Path) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", command)
    library.compiler.cache_clear()
    packed, x = WEIGHTS["q8_0"](), sample(1, 256)
    with pytest.warns(RuntimeWarning, match=f"not compiled: .*{message}"):
        product = q8_0.linear(x, packed)
    again = q8_0.linear(x, packed)                               # not tried again: a warning would be an error here
    library.compiler.cache_clear()
    cpu.compile_products(False)
    assert same_bits(product, q8_0.linear(x, packed)) and same_bits(again, product)


def test_sources_differ_where_their_loops_do() -> None:
    texts = {loops.source_for(packed, rows).text for packed in (WEIGHTS["q4_0"](), WEIGHTS["q8_0"]()) for rows in (DECODE, 1, 4)}
    assert len(texts) == 6
