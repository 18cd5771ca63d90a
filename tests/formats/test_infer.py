"""`qdsl infer`: storages that ship, layouts of other packages, and storages drawn at random are found from tensors alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files import safetensors
from qdsl.cli import app
from qdsl.core.numbers import number
from qdsl.generated import ik_iq2_k
from qdsl.infer import fit
from qdsl.infer.function import infer_function
from qdsl.infer.numbers import locate_numbers
from qdsl.infer.run import InferError, Inferred, infer, stored_element
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight.match import torch_dtype
from tests.formats.test_random_specs import codes, joined
from tests.support.covering import ALL
from tests.support.formats import SHIPPED, Case, cases, fixed_shape, random_fields

SHAPE = (320, 1024)                                              # whole tiles and groups of every storage
EVERY = 14                                                       # of how many storages `make test` tries one
# Storages of 2 to 8 bits that are not found, and why.  The list may only shrink, but for what specs could not say before.
NOT_FOUND = {
    "ik_iq4_kss.ik_llama": "bits of a word that four columns share",
    "hqq_axis0.hqq_3bit": "tenths of a group of 64, the last one short",
    "flute.flute": "tiles of words of two columns, each with rows that are 32 apart",
    "nunchaku_int4.nunchaku": "a factor of every column",
    "spqr.spqr": "scales and zeros in steps of a tile's numbers, which lie in the words of its rows",
}
# of storages whose tiles have 128 rows, or that take more weights to tell
SHAPES = {"flute.flute": (384, 1024), "nunchaku_int4.nunchaku": (384, 1024), "ik_iq5_k.ik_llama": (1024, 2048)}
SHARE = 0.95                                                     # that is found


def name_of(case: Case) -> str:
    return f"{case.path.stem}.{case.storage}"


def is_plain(case: Case) -> bool:
    """Whether a file may have the storage, with codes of 2 to 8 bits and without an entropy code."""
    layout = case.module.FORMAT.variant(case.choice).storages[case.storage]
    return case.path in SHIPPED and case.storage != "planar" and not layout.streams and 2 <= bits_per_code(case) <= 8


def bits_per_code(case: Case) -> float:
    bits = next((int(value) for name, value in case.params if name == "bits"), 0)
    widths = {"q1_0": 1, "tq1_0": 1.6, "iq1_s": 1.6, "iq1_m": 1.8, "f16": 16, "bf16": 16, "f32": 32, "df11": 16, "fix4": 16,
              "fix3": 16,
              "hlane": 16}
    return bits or widths.get(case.path.stem, 4)


STORAGES = [case for case in cases() if is_plain(case)]


def stored(case: Case) -> PackedWeight:
    """A random weight in a storage, as its quantizer writes it where it has one."""
    params = {name: 64 if name in ("group", "block") and 64 in case.module.FORMAT.params[name] else value
              for name, value in case.params}
    shape = fixed_shape(case, SHAPES.get(name_of(case), SHAPE))
    try:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
        return case.module.quantize(weight, storage=case.storage, **params)  # type: ignore[no-any-return]
    except FormatError:
        fields = random_fields(case, shape, params=params)       # scales are not negative, as those of a quantizer
        positive = {name: field.abs() if field.dtype in (torch.float16, torch.float32) else field
                    for name, field in fields.items()}
        return case.module.pack(positive, storage=case.storage, **params)  # type: ignore[no-any-return]


def of_packed(packed: PackedWeight) -> Inferred:
    tensors = {name: tensor for name, tensor in packed.tensors.items() if tensor.dtype != torch.int64}
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    return infer(name, tensors, packed.format.dequantize(packed, torch.float32))


@pytest.mark.parametrize("case", [case for case in STORAGES if name_of(case) not in NOT_FOUND][::1 if ALL else EVERY], ids=str)
def test_a_storage_is_found_from_its_tensors(case: Case) -> None:
    inferred = of_packed(stored(case))
    assert inferred.is_exact and not inferred.problems, (inferred.text, inferred.problems)


@pytest.mark.parametrize("case", [case for case in STORAGES if name_of(case) in NOT_FOUND][::1 if ALL else EVERY], ids=str)
def test_what_is_not_found_is_not_claimed(case: Case) -> None:
    try:
        assert not of_packed(stored(case)).is_exact, f"take {name_of(case)} off NOT_FOUND"
    except InferError as error:
        assert "no codes of the values lie in" in str(error)


def test_most_storages_are_found() -> None:
    names = {name_of(case) for case in STORAGES}
    assert set(NOT_FOUND) < names and len(names) >= 95 and len(names - set(NOT_FOUND)) >= SHARE * len(names)


# Layouts of other packages, from what their documentation and file formats say.

def nibbles(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight codes along the last axis; nibble i holds code order[i]."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int32)
    for place, code in enumerate(order):
        words |= codes[..., code::8] << 4 * place
    return words


def gptq(codes: Tensor) -> Tensor:
    return nibbles(codes).t().contiguous()


def awq(codes: Tensor) -> Tensor:
    return nibbles(codes.t().contiguous(), (0, 2, 4, 6, 1, 3, 5, 7))


def pack_quantized(codes: Tensor) -> Tensor:
    return nibbles(codes)


def marlin(codes: Tensor) -> Tensor:
    """Tiles of 16 columns by 64 rows; lane l of a warp has columns 2 (l % 4) and rows l // 4 of four blocks of 16 by 16."""
    n, k = codes.shape
    tiles = codes.reshape(n // 64, 4, 2, 8, k // 16, 2, 4, 2)     # u, block, y, c; t, d, b, a
    words = tiles.permute(4, 0, 3, 6, 1, 2, 7, 5).reshape(k // 16, -1, 4, 8)    # t, u c, b, then x in fours
    return nibbles(words.reshape(k // 16, -1, 8), (0, 4, 2, 6, 1, 5, 3, 7)).reshape(k // 16, -1)


def tensorrt_llm_int4(codes: Tensor) -> Tensor:
    """Columns permuted in 32s, four rows interleaved by tiles of 64 columns, and nibbles 0 2 4 6 1 3 5 7."""
    n, k = codes.shape
    permuted = codes.reshape(n, k // 32, 4, 4, 2).transpose(2, 3).reshape(n, k)
    interleaved = permuted.reshape(n // 4, 4, k // 64, 64).transpose(1, 2).reshape(n // 4, 4 * k)
    return nibbles((interleaved + 8) & 15, (0, 2, 4, 6, 1, 3, 5, 7)).view(torch.int8)


def qserve(codes: Tensor) -> Tensor:
    n, k = codes.shape
    lanes = codes.reshape(n // 32, 2, 2, 8, k // 32, 2, 4, 4).permute(0, 4, 3, 6, 1, 5, 2, 7)
    halves = lanes.permute(0, 1, 2, 3, 5, 6, 7, 4).reshape(n, k // 2, 2)
    return (halves[..., 1] << 4 | halves[..., 0]).to(torch.int8)


def nunchaku(codes: Tensor) -> Tensor:
    n, k = codes.shape
    tiles = codes.reshape(n // 128, 8, 2, 8, 1, k // 64, 1, 2, 4, 8)
    return nibbles(tiles.permute(0, 5, 6, 1, 3, 8, 2, 7, 4, 9).reshape(n, k))


PACKINGS = [gptq, awq, pack_quantized, marlin, tensorrt_llm_int4, qserve, nunchaku]


@pytest.mark.parametrize("pack", PACKINGS, ids=lambda pack: pack.__name__)
def test_a_packing_function_is_found(pack: Callable[[Tensor], Tensor]) -> None:
    inferred = infer_function(pack, (256, 256), 4)
    assert inferred.is_exact, (inferred.text, inferred.problems)


@pytest.mark.parametrize("pack", PACKINGS if ALL else PACKINGS[5:6], ids=lambda pack: pack.__name__)
def test_a_packing_is_found_from_values(pack: Callable[[Tensor], Tensor]) -> None:
    """With a scale for each group of 64 columns, and codes around 8."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (512, 1024), generator=generator, dtype=torch.int32)
    scales = torch.rand(512, 16, generator=generator).half() + 0.1
    weights = (q - 8).float() * scales.float().repeat_interleave(64, 1)
    inferred = infer("codes", {"codes": pack(q), "scales": scales}, weights)
    assert inferred.is_exact, (inferred.text, inferred.problems)


def test_numbers_in_as_many_tiles_along_rows_as_along_columns_are_placed() -> None:
    """64 x 64 tiles of 64 scales, stored along K first: tiles of the diagonal are the same in both orders."""
    scales = torch.rand(4096, 64, generator=torch.Generator().manual_seed(0)).half()
    stored = scales.t().reshape(64, 64, 8, 8).transpose(2, 3).contiguous()
    layout = locate_numbers(stored_element("scales", stored), "f16", scales.double().numpy())
    assert layout is not None and layout.tile.across and layout.tile.rows == 64


@pytest.mark.parametrize(("pack", "why"), [
    (lambda q: (q * 3 & 15).to(torch.uint8), "are not the bits of 4-bit codes"),
    (lambda q: (q ^ 1).to(torch.uint8), "flips the bits 0b1 of codes"), (lambda q: [1], "returned a list")])
def test_other_functions_are_refused(pack: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(InferError, match=why):
        infer_function(pack, (32, 32), 4)


# Storages drawn from the language

ROWS, COLUMNS = 192, 768                                         # which every drawn layout divides
FLOATS = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class Drawn:
    """A spec's text, the types of its codes and of its numbers, and how many rows and columns share a number."""

    text: str
    kind: str
    numbers: dict[str, str]
    rows: int
    columns: int


def drawn(seed: int) -> Drawn:
    """Codes of 2 to 8 bits in words, streams, planes or parts of records, with scales, and offsets or zero points or neither;
    tensors of one type may be sections of rows, or regions, of one tensor.
    """
    draw = random.Random(seed)
    bits = draw.choice((2, 3, 4, 4, 5, 6, 8))
    columns = draw.choice((16, 32, 64, 128) if bits < 6 else (64, 128))     # that use enough of their codes
    rows, kind, scale = draw.choice((1, 1, 1, 2, 32)), f"{draw.choice('ui')}{bits}", draw.choice(FLOATS)
    decode, zero = draw.choice(((f"(q - {1 << bits - 1}) * s" if kind[0] == "u" else "q * s", ""),
                                ("q * s + z", scale), ("q * s - z", scale), ("(q - z) * s", draw.choice(("u4", "u8", "i8")))))
    numbers = {"s": scale, **({"z": zero} if zero else {})}
    fields = "".join(f"  {name}: {form}[n // {rows}, k // {columns}]\n" for name, form in numbers.items())
    tensors = codes(draw, bits)
    for name, form in numbers.items():
        axes = ", ".join(draw.sample([f"x<N/{rows}", f"y<K/{columns}"], 2))
        element, item = ("u8", f"{name}[x, y] pad:4") if form == "u4" else (form, f"{name}[x, y]")
        tensors += f"    t_{name}:\n      tensor: {element}[{axes}]\n      record: {item}\n"
    text = f"format: drawn\nweight: [N, K]\nfields:\n  q: {kind}[n, k]\n{fields}decode: {decode}\nstorage:\n  p:\n{tensors}"
    return Drawn(joined(text, draw) if draw.random() < 0.5 else text, kind, numbers, rows, columns)


def drawn_fields(spec: Drawn, seed: int) -> dict[str, Tensor]:
    """Random fields.  Where there are offsets scales are positive: which of two codes is the larger nothing else says."""
    generator = torch.Generator().manual_seed(seed)
    fields = {}
    for name, kind in {"q": spec.kind, **spec.numbers}.items():
        form = number(kind)
        shape = (ROWS, COLUMNS) if name == "q" else (ROWS // spec.rows, COLUMNS // spec.columns)
        values = torch.randn(shape, generator=generator) if form.is_float else \
            torch.randint(int(form.low), int(form.high) + 1, shape, generator=generator)
        fields[name] = (values.abs() if name == "s" and "z" in spec.numbers else values).to(torch_dtype(kind))
    return fields


@pytest.mark.parametrize("seed", range(60) if ALL else (3, 8, 12, 29, 54))
def test_a_drawn_storage_is_found(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    spec = drawn(seed)
    (tmp_path / "drawn.yaml").write_text(spec.text)
    module = qdsl.load(tmp_path / "drawn.yaml")
    packed = module.pack(drawn_fields(spec, seed))
    largest = max(packed.tensors, key=lambda name: packed.tensors[name].nbytes)
    inferred = infer(largest, packed.tensors, module.dequantize(packed, torch.float32))
    assert inferred.is_exact and not inferred.problems, (spec.text, inferred.text, inferred.problems)


@pytest.mark.parametrize("by_rows", [True, False])
def test_bytes_that_decode_does_not_read_are_kept(by_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the codes of each row, or of all of them: the spec has a field of them, and packs them again as they were."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    with safetensors.TensorFile(written(tmp_path)) as file:
        codes, scales, values = (file.tensor(name) for name in ("a.w", "a.s", "expected"))
    noise = torch.randint(0, 256, (64, 4), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    packed = torch.cat([codes, noise], 1) if by_rows else torch.cat([codes.flatten(), noise.flatten()])
    inferred = infer("w", {"w": packed, "s": scales}, values)
    assert inferred.is_exact and not inferred.problems
    (tmp_path / "kept.yaml").write_text(inferred.text)
    module = qdsl.load(tmp_path / "kept.yaml")
    fields = module.unpack(module.wrap({"stored_w": packed, "s": scales}))
    assert torch.equal(fields["unread"], noise if by_rows else noise.flatten())
    assert torch.equal(module.pack(fields).tensors["stored_w"].flatten(), packed.flatten())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_tables_that_blocks_choose(is_reversed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes by the weights of a block that are equal, and a bit of each block that says which table it has.

    is_reversed: the values show the table of 1 first, as they may.
    """
    def reversed_tables(codes: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor] | None:
        tables = two_tables(codes, values, bits)
        return tables and (tables[0][::-1], tables[1], 1 - tables[2])

    two_tables = fit._fit_two_tables
    if is_reversed:
        monkeypatch.setattr(fit, "_fit_two_tables", reversed_tables)
    packed = ik_iq2_k.quantize(torch.randn(160, 512, generator=torch.Generator().manual_seed(1)))
    inferred = of_packed(packed)
    assert inferred.is_exact and not inferred.problems
    assert "levels[4 * table + q]" in inferred.text and "table: u1[n, k // 16]" in inferred.text
    assert "levels: [-31, -13, 1, 17, -26, -8, 6, 22]" in inferred.text


# The commands

def written(folder: Path) -> Path:
    """A file with a weight of the tutorial's first format, and its values."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (64, 256), generator=generator, dtype=torch.uint8)
    scales = torch.rand(64, 8, generator=generator).half() + 0.1
    weights = (q.float() - 8) * scales.float().repeat_interleave(32, 1)
    safetensors.write(folder / "a.safetensors", {"a.w": q[:, ::2] | q[:, 1::2] << 4, "a.s": scales, "expected": weights})
    return folder / "a.safetensors"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def run_with(answers: str, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), input=answers)
    return result.exit_code, result.output


def test_inspect_offers_the_command_for_layers_that_it_does_not_know(tmp_path: Path) -> None:
    """And for matrices of integers that may be packed, but not for positions or floats."""
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    for name, tensors, offered in (("odd", {"a.strange": codes, "a.factors": torch.zeros(16, 2)}, "a.strange"),
                                   ("plain", {"a.weight": torch.zeros(16, 64), "ids": torch.zeros(1, 64).int()}, "")):
        safetensors.write(tmp_path / f"{name}.safetensors", tensors)
        code, printed = run("inspect", str(tmp_path / f"{name}.safetensors"))
        wanted = f"`qdsl infer FILE --packed {offered}` finds"
        assert code == 0 and (wanted in printed if offered else "qdsl infer" not in printed)


def test_the_command_prints_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    path = str(written(tmp_path))
    words = ("infer", path, "--packed", "a.w", "--scales", "a.s")
    code, printed = run(*words, "--name", "mine", "--out", str(tmp_path / "mine.yaml"))
    assert code == 0 and "exact: all 16384 values" in printed
    assert run("check", str(tmp_path / "mine.yaml"))[0] == 0
    assert "    stored_w:" in (tmp_path / "mine.yaml").read_text()    # `w` is a word of generated code
    code, printed = run("infer", path, "--packed", "a.w")
    assert code == 1 and "the closest: " in printed and "no tensor has the scales of 1 x 32 weights; --scales" in printed
    code, printed = run("infer", path, "--packed", "a.v")
    assert code == 1 and f"error: {path}: no tensor 'a.v'; it has " in printed and "'a.w'" in printed
    code, printed = run("infer", path)
    assert code == 2 and "name the tensor that holds the codes with --packed" in printed and "'a.s'" in printed
    report = json.loads(run(*words, "--json")[1])
    assert report["ok"] and report["exact"] == report["values"] == 16384 and "decode: (q - 8) * scale" in report["spec"]


def test_the_command_takes_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text("def pack(q):\n    return (q[:, ::2] | q[:, 1::2] << 4).byte()\n")
    code, printed = run("infer", "--function", "halves:pack", "--shape", "32,64")
    assert code == 0 and 'record: "a<2: q[t, 2*u + a]"' in printed
    code, printed = run("infer", "--function", "halves:pack", "--shape", "32,63")
    assert code == 1 and "error: the function fails for codes int32 [32, 63]: RuntimeError: " in printed
    for words, why in ((["--function", "halves:none", "--shape", "2,4"], "no attribute"), (["--function", "halves:pack"], "N,K"),
                       (["--function", "nowhere:f", "--shape", "2,4"], "nowhere"), ([], "give a file")):
        code, printed = run("infer", *words)
        assert code == 2 and why in printed


@pytest.mark.parametrize(("data", "why"), [(b"", "0 bytes"), (b"\xff" * 64, "header length"),
                                           (b"\x02" + bytes(7) + b"{}", "no tensor '")])
def test_wrong_files_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    code, printed = run("infer", str(tmp_path / "a.safetensors"), "--packed", "w")
    assert code == 1 and why in printed
    (tmp_path / "a.npz").write_bytes(data)
    assert run("infer", str(tmp_path / "a.npz"), "--packed", "w")[0] == 1


@pytest.mark.parametrize("values", [torch.zeros(4, 4).half(), torch.zeros(4), torch.full((4, 4), torch.nan), torch.zeros(0, 4)])
def test_other_values_are_refused(values: Tensor) -> None:
    with pytest.raises(InferError, match="expected finite float32"):
        infer("w", {"w": torch.zeros(4, 4, dtype=torch.uint8)}, values)


def test_tensors_without_a_code_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    random_bytes = torch.randint(0, 256, (64, 64), generator=generator, dtype=torch.uint8)
    with pytest.raises(InferError, match="no codes of the values lie in 'w'"):
        infer("w", {"w": random_bytes}, torch.randn(64, 128, generator=generator))
    with pytest.raises(InferError, match="tensor 'w' is bool"):
        infer("w", {"w": torch.zeros(64, 64, dtype=torch.bool)}, torch.randn(64, 64, generator=generator))


def test_new_writes_a_spec_and_a_golden_file_and_tests_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qdsl.analyze.check.check_kernels.check_kernels", lambda spec: iter(()))    # tests/jobs has them
    code, printed = run("new", "mine", "--from-infer", str(written(tmp_path)), "--packed", "a.w", "--scales", "a.s")
    assert code == 0 and "16384 weights are those of mine.safetensors" in printed and " 0 failed" in printed
    assert run("new", "mine")[0] == 2                            # it is there already
    for code, printed in (run("new", "q4_0"), run_with("q4_0\n", "new")):
        assert code == 2 and "'q4_0' is a format that ships with qdsl" in printed and not (tmp_path / "q4_0.yaml").exists()
    code, printed = run_with("mine2\na.safetensors\n\n\n\n", "new")    # what it asks for, with the defaults that it offers
    assert code == 0 and "16384 weights are those of mine2.safetensors" in printed and "a.w: uint8 [64, 128]" in printed
    assert (tmp_path / "mine2.yaml").read_text() == (tmp_path / "mine.yaml").read_text().replace("mine", "mine2")
    code, printed = run_with("mine3\n\n9\n\n", "new")
    assert code == 2 and "expected 2 to 8 bits" in printed and not (tmp_path / "mine3.yaml").exists()
    code, printed = run("new", "other", "--bits", "3", "--group", "64")
    assert code == 0 and " 0 failed" in printed and not (tmp_path / "other.safetensors").exists()
