"""Products on a CPU: the compiled loops of every format, how they are kept, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qdsl.generated import bf16, fp8_block, int_group, q4_0, q8_0, vptq
from qdsl.host import library
from qdsl.runtime import PackedWeight
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu import loops
from qdsl.runtime.cpu.source import DECODE, VECTORS
from qdsl.runtime.cpu.threads import functions as product_functions
from qdsl.runtime.cpu.trace import Unsupported
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.plan import Candidate, forget
from tests.support.covering import ALL, covering
from tests.support.cpu_products import check, in_order, plain, sample
from tests.support.formats import Case, cases, random_fields, same_bits, shapes, smallest

CASES, load = cases(), library.load
COVERING = covering(CASES, lambda case: [case.module.FORMAT.variant(case.choice).storages[case.storage].kernels.decode])
NAMES = ("order", "slots", "blocks", "factors", "sources", "arrange", "run")                   # of a source, in one of many
PARTS = 2                                                        # formats are compiled in so many programs
# A word's first bit depends on the data, in codes that cross words: a vector cannot be loaded under a condition on values.
PLAIN = {"learned_levels.levels", "learned_rows.rows", "ranges.runs", "ranges.words"}
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


def by_loop(x: Tensor, packed: PackedWeight, rounds_x: bool = False) -> Tensor | None:
    """The product in float32 by a loop for few rows of x; None where the weight has none."""
    together = loops.TOGETHER if len(x) > 2 else 1
    for way in (loops.ROUNDED,) if rounds_x else (loops.FACTORED, loops.PLAIN):
        if loops.find(packed, together, way) is not None:
            return cpu.run(Candidate(way, {"ROWS": together}), x.float(), packed)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of this file share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Products are compiled in these tests, of small weights too, and read them as they are stored."""
    monkeypatch.setenv("QDSL_CACHE", str(folder))
    monkeypatch.setattr(loops, "_loops", {})
    product_functions()
    cpu.compile_products()
    yield
    cpu.compile_products(False)


def build_at_once(sources: set[str], folder: Path) -> dict[str, Any]:
    """The functions of many sources, by source; those for vectors of one length are compiled as one, not optimized."""
    functions, vectors = {}, VECTORS.read_text(encoding="utf-8")
    for width in ("16", "8", "4"):
        chosen = sorted(text for text in sources if text.startswith(f"#define LANES {width}\n"))
        if not chosen:
            continue
        bodies = [f"#define LANES {width}\n{vectors}"]
        for i, text in enumerate(chosen):
            bodies += [f"#undef {name}\n#define {name} {name}_{i}" for name in NAMES]
            bodies += [f"#undef {name}" for name in ("COLUMNS", "PLACES", "ROUNDS_X", "SIDE_BY_SIDE")]
            bodies.append(text.partition(vectors)[2])
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
        if str(case) not in PLAIN:
            sources |= {loops.source_for(weights[-1][1], kind).text for kind in (DECODE, rows)}
            with suppress(Unsupported):
                sources.add(loops.source_for(weights[-1][1], rows, loops.FACTORED).text)
    functions = build_at_once(sources, tmp_path)
    monkeypatch.setattr(library, "load", lambda text, options: functions[text])
    decoded = 0
    for case, packed, rows in weights:
        weight = plain(packed)
        if (decode := loops.decode(packed)) is not None:
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
    slow = next(in_order(case, (32, 128)) for case in CASES if str(case).startswith("bnb_fp4_nested.bitsandbytes"))
    assert loops.decode(slow) is not None and not loops.has_vectors(slow)
    calls: list[Any] = []
    decode = tiles.decode_rows
    monkeypatch.setattr(tiles, "decode_rows", lambda *arguments: (calls.append(arguments), decode(*arguments)))
    slow.format.dequantize(slow, torch.float32)
    packed = WEIGHTS["q8_0"]()
    monkeypatch.setattr(library, "compiler", lambda: (_ for _ in ()).throw(library.NoCompiler("no C compiler")))
    q8_0.dequantize(packed, torch.float32)
    assert len(calls) == 2


def in_8_bits(x: Tensor) -> Tensor:
    """x rounded to 8 bits in blocks of 32 columns."""
    blocks = x.float().unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    return (torch.round(blocks * torch.where(most > 0, 127 / most, 0)) * (most / 127)).flatten(1)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "q2_k", "q5_k"])
def test_products_of_integers_have_the_error_of_x_in_8_bits_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the product with x so rounded; the error is that of ggml, which rounds x so, too."""
    case = next(case for case in CASES if str(case) == f"{name}.gguf")
    packed = in_order(case, (33, 512))
    weight = plain(packed)
    monkeypatch.setenv("QDSL_CPU_INT8", "1")
    for rows in (1, 3):
        x = sample(rows, 512, seed=rows)
        x[0, :64] = 0
        product = case.module.linear(x, packed)
        check(product, in_8_bits(x), weight, terms=4)
        exact = x.double() @ weight.double().t()
        assert 1e-4 < (product - exact).norm() / exact.norm() < 1.2e-2
    x[0, 100] = torch.nan
    assert case.module.linear(x, packed).isnan().any(1).tolist() == [True, False, False]
    monkeypatch.setenv("QDSL_CPU_INT8", "0")
    check(case.module.linear(x[1:], packed), x[1:], weight)


# Four columns in a word's bytes; codes over 127; bytes that are put together; and rows in a word, which are transposed.
@pytest.mark.parametrize(("name", "capability"), [("gptq_v2-bits4", ""), ("gptq_v1-bits2", "DEFAULT"), ("gptq_v2-bits8", ""),
                                                  ("gptq_p-bits5", ""), ("awq-bits4", ""), ("awq-bits4", "AVX2"),
                                                  ("awq-bits4", "DEFAULT")])
def test_products_of_integers_across_rows_are_those_of_whole_numbers(name: str, capability: str, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Where x are integers and scales powers of two nothing is rounded: steps of rows, the last rows, and three threads."""
    own = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" and own not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(loops, "_capability", lambda: capability or own)
    case = next(case for case in CASES if str(case) == f"int_group.{name}-group128-scale_typef16")
    fields = random_fields(case, (352, 256), 0)
    fields |= {"s": torch.exp2(torch.randint(-3, 3, fields["s"].shape)).half()}
    packed = case.module.pack({name: fields[name] for name in "qzs"}, storage=case.storage, **case.choice)
    counts = (1, 4) if name in ("gptq_v2-bits4", "awq-bits4") and not capability else (1,)
    functions = build_at_once({loops.source_for(packed, rows, loops.ROUNDED).text for rows in counts}, tmp_path)
    monkeypatch.setattr(library, "load", lambda text, options=(): functions.get(text) or load(text, options))
    x, weight = torch.randint(-127, 128, (6, 256), generator=torch.Generator().manual_seed(1)).float(), plain(packed)
    x[:, ::32] = 127                                             # the scale of every block is 1
    for rows, threads in ((6 if len(counts) > 1 else 2, 1), (1, 3)):
        monkeypatch.setattr(loops, "SHARE", 1 << 18 if threads == 1 else 1 << 8)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        product = by_loop(x[:rows], packed, True)
        assert product is not None and torch.equal(product.double(), x[:rows].double() @ weight.double().t())
    x = sample(1, 256)
    rounded = by_loop(x, packed, True)
    assert rounded is not None
    check(rounded, in_8_bits(x), weight, terms=4)


def test_without_a_loop_for_8_bits_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a group anywhere, codes across words, and a short block of x."""
    monkeypatch.setenv("QDSL_CPU_INT8", "1")
    fields = int_group.unpack(int_group.quantize(sample(64, 256), bits=4, group=64))
    permuted = int_group.pack(fields | {"g": torch.arange(256, dtype=torch.int32) % 4}, "gptq_v2", bits=4, group=64)
    for packed in (permuted, int_group.quantize(sample(64, 96), "gptq_v2", bits=3, group=32),
                   int_group.quantize(sample(64, 144), "gptq_v2", bits=4, group=-1)):
        assert by_loop(sample(1, packed.shape[1]), packed, True) is None
    x = sample(1, 256)
    check(int_group.linear(x, permuted), x, plain(permuted))


# Codes that are looked up, with offsets; signed ones of 6 bits; and of a table.
@pytest.mark.parametrize("name", ["q4_k.gguf", "q6_k.gguf", "iq4_xs.gguf"])
def test_scales_after_sums_of_codes_leave_weights_exact(name: str) -> None:
    """With one number in x no sum has a second term: the product is the weight, bit for bit."""
    case = next(case for case in CASES if str(case) == name)
    packed = in_order(case, (16, 1024))
    products = by_loop(torch.eye(1024)[:512:37], packed)
    loop = next(loop for (*_, way, _), loop in loops._loops.items() if way == loops.FACTORED)
    assert loop is not None and products is not None
    assert torch.equal(products.T, plain(packed)[:, :512:37])
    x = sample(4, 1024)
    product = by_loop(x, packed)
    assert product is not None
    check(product, x, plain(packed))


# Rows of four and signs as bits, in units of 8 columns; codes that are sums; rows of eight and of signs, at places across bytes.
@pytest.mark.parametrize(("name", "capability"), [("iq3_s", ""), ("iq1_m", ""), ("iq2_xxs", "AVX2"), ("iq2_xxs", "DEFAULT")])
def test_rows_of_tables_are_exact(name: str, capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one number in x the product is the weight, bit for bit; with x in 8 bits it is that of the rounded x."""
    own = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" and own not in ("AVX2", "AVX512"):
        pytest.skip("this machine has no AVX2")
    monkeypatch.setattr(loops, "_capability", lambda: capability or own)
    packed = in_order(next(case for case in CASES if str(case) == f"{name}.gguf"), (5, 512))
    ways = (loops.FACTORED, loops.ROUNDED) if name == "iq1_m" else (loops.FACTORED,)
    functions = build_at_once({loops.source_for(packed, 1, way).text for way in ways}, tmp_path)
    monkeypatch.setattr(library, "load", lambda text, options: functions[text])
    weight, x = plain(packed), sample(1, 512)
    for start in range(0, 512, 38):
        product = by_loop(torch.eye(512)[start:start + 2], packed)
        assert product is not None and torch.equal(product.T, weight[:, start:start + 2])
    if loops.ROUNDED in ways:
        rounded = by_loop(x, packed, True)
        assert rounded is not None
        check(rounded, in_8_bits(x), weight, terms=4)


@pytest.mark.parametrize("case", [case for case in COVERING if str(case) in PLAIN], ids=str)
def test_what_has_no_loop_goes_by_tiles(case: Case) -> None:
    packed = in_order(case, smallest(case))
    assert loops.decode(packed) is None
    x = sample(1, packed.shape[1])
    check(case.module.linear(x, packed), x, plain(packed))


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
    large = WEIGHTS["q8_0"]()                                    # codes of 8 bits: sums of two products have 17
    for integers in (packed, large):
        rounded = by_loop(x, integers, True)
        assert rounded is not None
        check(rounded, in_8_bits(x), plain(integers), terms=4)
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
    decode = loops.decode(packed)
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
    assert [key[-2] for key in loops._loops] == ["factored", "plain"]         # 32 columns are half a step of codes


def test_a_group_of_a_whole_row_is_a_number_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_new_loop", lambda *_: None)
    for k in (64, 128):
        assert by_loop(sample(1, k), int_group.quantize(sample(32, k), bits=4, group=-1)) is None
    assert len({key[:-3] for key in loops._loops}) == 2


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
            forget()
            q4_0.linear(sample(1, 256), packed)
            assert len(loops._loops) == count, (setting, packed.shape)
    monkeypatch.delenv("QDSL_CPU_COMPILE")
    loops._loops.clear()
    forget()
    q4_0.linear(sample(1, 256), large)
    assert loops._loops                                          # the default is auto
    monkeypatch.setenv("QDSL_CPU_COMPILE", "1")
    forget()
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
    assert len(texts) == 6 and all(len(re.findall(r"^void run\(", text, re.MULTILINE)) == 1 for text in texts)
