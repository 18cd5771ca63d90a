"""Lossless streams: df11 byte for byte what the dfloat11 package writes, hlane and fix4 for all patterns and shapes.

tests/data/README.md says where the files of tests/data/df11 are from.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench import codes
from qdsl.checkpoint.files.folder import Folder
from qdsl.codecs import bits, native
from qdsl.codecs.huffman import END, PrefixCode, canonical_code, df11_code
from qdsl.codecs.huffman_windows import reference as huffman_windows
from qdsl.codecs.lookup import code_of_tables, df11_tables
from qdsl.core.codecs import CODECS, StreamError, implementation
from qdsl.host import library
from qdsl.jobs.compress import df11
from qdsl.jobs.compress.exponent_forms import FIX3, FIX4, HLANE
from qdsl.runtime import FormatError
from qdsl.runtime.weight import bfloat16
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data"
CASES = {case["name"]: case for case in json.loads((DATA / "df11" / "manifest.json").read_text())}
TABLES = json.loads((DATA / "df11" / "code_tables.json").read_text())
FORMS = {"hlane": HLANE, "fix4": FIX4, "fix3": FIX3}
NUMPY, COMPILED = LOOPS = ("never", "always")                    # with and without a compiler


def golden(name: str) -> dict[str, NDArray[Any]]:
    with np.load(DATA / "df11" / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def same(tensors: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> None:
    for name in df11.NAMES:
        assert tensors[name].dtype == wanted[name].dtype and np.array_equal(tensors[name], wanted[name]), name


@contextmanager
def loops(choice: str) -> Iterator[None]:
    """Codecs by compiled loops, or by numpy alone."""
    library.choose(choice)
    try:
        yield
    finally:
        library.choose("")


def normal(n: int, k: int, seed: int = 0) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# Codes

@pytest.mark.parametrize("place", range(len(TABLES)))
def test_codes_are_those_of_the_package(place: int) -> None:
    """40 tables, some of which meet the limit of 32 bits: codes, their order, and the rows that are made of them."""
    case = TABLES[place]
    counts = np.zeros(256, np.int64)
    for symbol, count in case["counts"]:
        counts[symbol] = count
    code = df11_code(counts)
    assert [[END if symbol is None else symbol, bits, value] for symbol, bits, value in case["codes"]] == \
        [[symbol, *word] for symbol, word in code.words.items()]
    tables = df11_tables(code)
    assert hashlib.sha256(tables.tobytes()).hexdigest() == case["luts_sha256"]
    assert dict(code_of_tables(tables).words) == dict(code.words)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=40), st.integers(6, 12))
def test_canonical_codes_are_whole_and_the_shortest_of_their_length(counts: list[int], longest: int) -> None:
    padded = np.array([*counts, *[0] * (256 - len(counts))], np.int64)
    code = canonical_code(padded, longest)
    assert sum(2.0 ** -bits for bits, _ in code.words.values()) == 1 and code.longest <= longest
    free = canonical_code(padded, 40)
    assert padded @ code.lengths >= padded @ free.lengths
    # Huffman's own code, END counted in, is at most a bit of one symbol and END's away from the best one
    assert padded @ free.lengths <= padded @ df11_code(padded).lengths


# df11

@pytest.mark.parametrize("choice", LOOPS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["status"] == "ok"])
def test_groups_are_those_of_the_package(name: str, choice: str) -> None:
    case, tensors = CASES[name], golden(name)
    with loops(choice):
        patterns = df11.decode(tensors)
        assert np.array_equal(df11.decode(tensors, every=True), patterns)
        same(df11.encode(np.split(patterns, np.cumsum(case["parts"])[:-1]), case["threads_per_block"]), tensors)
    assert hashlib.sha256(patterns.astype("<u2").tobytes()).hexdigest() == case["sha256_bf16_le"]
    assert df11.validated_stream(tensors, case["threads_per_block"]).shared_memory == case["max_shared_mem"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["status"] == "package_raises"])
def test_groups_that_the_package_cannot_write(name: str) -> None:
    """There a table begins with entries that no code reaches; ours repeat the code after, and the kernel of the package ends."""
    patterns = golden(name)["weight_bits"].reshape(-1)
    threads = CASES[name]["threads_per_block"]
    tensors = df11.encode([patterns], threads)
    assert np.array_equal(df11.decode(tensors, threads), patterns)
    assert tensors["luts"][-1][tensors["luts"][:-1]].all()


@pytest.mark.parametrize(("name", "message"), [("BAD_every_pattern_incl_inf_nan", "exponent 255"),
                                               ("BAD_more_than_16_subtables", "rows")])
def test_groups_that_df11_cannot_hold(name: str, message: str) -> None:
    patterns = golden(name)["weight_bits"].reshape(1, -1)
    with pytest.raises(StreamError, match=rf"{message}.*hlane or fix4"):
        df11.encode([patterns.reshape(-1)])
    for form in FORMS.values():
        assert np.array_equal(form.decode(form.encode(patterns), patterns.shape), patterns)


def test_a_folder_of_the_package() -> None:
    """Every group of a model that compress_model wrote, decoded, is the model, and encoded again the file."""
    place = DATA / "df11" / "compress_model_dir"
    original = np.load(place / "original_bits.npz")
    with Folder(place / "model.safetensors") as folder:
        layers = folder.layers()
        groups = {name: leaves for name, leaves in layers.items() if "luts" in leaves}
        assert groups
        bits = sorted(original[name].reshape(-1).tobytes() for name in original.files)
        for leaves in groups.values():
            tensors = {leaf: folder.tensor(full).numpy() for leaf, full in leaves.items() if leaf in df11.NAMES}
            patterns = df11.decode(tensors)
            splits = tensors["split_positions"]
            same(df11.encode(np.split(patterns, splits)), tensors)
            assert all(part.tobytes() in bits for part in np.split(patterns, splits))


@settings(max_examples=150)
@given(st.integers(1, 3000), st.sampled_from([8, 16, 32, 64, 128, 256, 512]), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_any_group_round_trips(count: int, threads: int, kinds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    of = random.choice(240, kinds, replace=False)
    skew = random.choice(of, count, p=(weights := 0.6 ** np.arange(kinds)) / weights.sum())
    patterns = (skew << 7 | random.integers(0, 128, count) | random.integers(0, 2, count) << 15).astype(np.uint16)
    cut = int(random.integers(0, count + 1))
    tensors = df11.encode([patterns[:cut], patterns[cut:]], threads)
    for choice in LOOPS:
        with loops(choice):
            same(df11.encode([patterns[:cut], patterns[cut:]], threads), tensors)
            assert np.array_equal(df11.decode(tensors, threads), patterns), choice
    assert tensors["split_positions"].tolist() == [cut]


@pytest.mark.parametrize("count", [0, 9, 1 << 31])
def test_a_byte_does_not_hold_so_many_symbols(count: int) -> None:
    tensors = {name: np.zeros((1, 256) if name == "tables" else 1, np.uint8) for name in huffman_windows.NAMES}
    with pytest.raises(StreamError, match=f"^{count} symbols in a stream of 1 bytes"):
        huffman_windows.validated_stream(tensors, count)


def test_a_gap_is_wrong_where_no_lane_begins() -> None:
    """It is noticed where all windows are begun at, and there alone."""
    symbols = np.random.default_rng(0).choice(8, 2000).astype(np.uint8)
    tensors = huffman_windows.encode(symbols, np.bincount(symbols, minlength=256), 8)
    stream = huffman_windows.validated_stream(tensors, len(symbols), 8)
    gaps = stream.gaps.copy()
    gaps[1] += 1
    wrong = replace(stream, gaps=gaps)
    for choice in LOOPS:
        with loops(choice):
            assert np.array_equal(wrong.decode(), symbols) and np.array_equal(stream.decode(every=True), symbols)
            with pytest.raises(StreamError):
                wrong.decode(every=True)


@pytest.mark.parametrize("more", [1, 2, 20, 40])
def test_blocks_of_few_codes(more: int) -> None:
    """After those that are written together come some that reach no window, one, or two."""
    patterns = normal(1, bits.BLOCK + more)[0]
    assert np.array_equal(df11.decode(df11.encode([patterns]), every=True), patterns)


# hlane and fix4

@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_weight_round_trips(form: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 200))
    seed = data.draw(st.integers(0, 2**32 - 1))
    draw = {"any": lambda: np.random.default_rng(seed).integers(0, 65536, (n, k)).astype(np.uint16),
            "constant": lambda: np.full((n, k), seed % 65536, np.uint16), "normal": lambda: normal(n, k, seed)}
    round_trips(form, draw[data.draw(st.sampled_from(sorted(draw)))]())


def round_trips(form: str, patterns: NDArray[np.uint16]) -> None:
    """Numpy and compiled loops make the same tensors, and both make the weight of them."""
    tensors = {}
    for choice in LOOPS:
        with loops(choice):
            tensors[choice] = FORMS[form].encode(patterns)
            assert np.array_equal(FORMS[form].decode(tensors[NUMPY], patterns.shape), patterns), choice
    for name, tensor in tensors[NUMPY].items():
        assert tensors[COMPILED][name].dtype == tensor.dtype and np.array_equal(tensors[COMPILED][name], tensor), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(16, 4096), (3, 8200), (64, 2048), (65536, 1), (1, 270400)])
def test_every_pattern_in_long_rows(form: str, shape: tuple[int, int]) -> None:
    round_trips(form, (np.arange(shape[0] * shape[1]) * 40503 % 65536).astype(np.uint16).reshape(shape))


def test_a_compiler_is_used_unless_it_is_forbidden() -> None:
    with loops(NUMPY):
        assert native.functions() is None
    library.compiler()                                           # raises where this machine has none
    with loops(COMPILED):
        assert native.functions() is not None


@pytest.mark.parametrize("choice", LOOPS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_weight(form: str, choice: str) -> None:
    shape, rows = (70, 4104), np.array([0, 3, 17, 69])
    patterns = normal(*shape)
    tensors = FORMS[form].encode(patterns)
    coding = implementation({"hlane": "huffman_lanes", "fix4": "window", "fix3": "row_window"}[form])
    stream = {own: tensors[name] for name, own in zip(FORMS[form].names, FORMS[form].own, strict=True)}
    with loops(choice):
        assert np.array_equal(coding.decode_rows(stream, shape, rows), (patterns >> 7).astype(np.uint8)[rows])


def test_bits_per_weight() -> None:
    """The sizes that the formats promise, for normal weights and for those of a model."""
    weights = {"gauss": normal(2048, 4096)}
    with Folder(DATA / "weights" / "minilm_layer0_bf16.safetensors") as folder:
        for name in folder.names():
            tensor = folder.tensor(name)
            if tensor.dim() == 2:
                weights[name.split(".")[-2 if "self" in name else -3]] = tensor.view(torch.int16).numpy().view(np.uint16)
    wanted = {"gauss": (10.80, 10.79, 12.02, 11.30), "query": (10.914, 10.905, 12.016, 11.435),
              "intermediate": (10.877, 11.034, 12.016, 11.443),
              "output": (10.869, 10.902, 12.015, 11.432)}
    assert set(weights) == set(wanted)
    for name, patterns in weights.items():
        sizes = [8 * sum(tensor.nbytes for tensor in tensors.values()) / patterns.size
                 for tensors in (df11.encode([patterns.reshape(-1)]), *(form.encode(patterns) for form in FORMS.values()))]
        assert sizes == pytest.approx(wanted[name], rel=0.003), name
    for coding, size in (("huffman_windows", wanted["gauss"][0]), ("huffman_lanes", wanted["gauss"][1]),
                         ("row_window", wanted["gauss"][3])):
        assert 8 + CODECS[coding].normal == pytest.approx(size, rel=0.003)


# Damage

def bounded(tensors: dict[str, NDArray[Any]], name: str, random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """One tensor of several, its bytes changed or its end cut off."""
    bad = dict(tensors)
    flat = tensors[name].copy().reshape(-1)
    if not flat.size:
        return bad
    if random.integers(4) == 0:
        bad[name] = flat[:random.integers(len(flat))].reshape((-1, *tensors[name].shape[1:]) if tensors[name].ndim == 1 else -1)
    else:
        places = random.integers(0, flat.nbytes, random.integers(1, 9))
        flat.view(np.uint8)[places] = random.integers(0, 256, len(places))
        bad[name] = flat.reshape(tensors[name].shape)
    return bad


@pytest.mark.parametrize(("form", "choice"), [(form, choice) for form in ["df11", *FORMS] for choice in LOOPS])
def test_damaged_tensors_are_refused_or_decoded_within_bounds(form: str, choice: str) -> None:
    """Each tensor damaged in 150 ways: an answer of the right size or StreamError, never another error, never a hang."""
    with loops(choice):
        damaged_tensors(form)


def damaged_tensors(form: str) -> None:
    patterns = normal(24, 200)
    patterns[3, 7:9] = 0x7F80, 0xFFC1
    patterns = patterns if form != "df11" else normal(24, 200)
    random = np.random.default_rng(1)
    tensors = df11.encode([patterns.reshape(-1)], 64) if form == "df11" else FORMS[form].encode(patterns)
    refused = 0
    for name in tensors:
        for _ in range(150):
            try:
                damaged = bounded(tensors, name, random)
                if form == "df11":
                    decoded = df11.decode(damaged, 64).reshape(patterns.shape)
                else:
                    decoded = FORMS[form].decode(damaged, patterns.shape)
                assert decoded.shape == patterns.shape
            except StreamError:
                refused += 1
    assert refused > 100


def test_starts_that_would_take_all_memory() -> None:
    """Groups are decoded side by side, each in as much room as the longest: one has all the words of the others."""
    tensors = HLANE.encode(normal(4096, 64))
    tensors["starts"][0, 1:] = tensors["starts"][0, -1]
    with pytest.raises(StreamError, match="more words than codes of its lanes can have"):
        HLANE.decode(tensors, (4096, 64))


def test_tables_that_would_never_end() -> None:
    """What dfloat11's kernel follows for ever, or out of its rows: each refused with its place."""
    good = golden("gauss_s0.02")["luts"]
    rows = len(good) - 1
    pointer = int(np.flatnonzero((good[0] >= 240) & (good[-1][good[0]] == 0))[0])
    symbol = int(good[0, 0])
    for row, place, value, message in ((0, pointer, 256 - rows - 3, "leads to row"), (0, 255, symbol, "lies elsewhere"),
                                       (rows, symbol, 0, "no code for the end"), (rows, symbol, 60, "has 60 bits"),
                                       (rows, 250, 9, "has a length and no code")):
        bad = good.copy()
        bad[row, place] = value
        with pytest.raises(StreamError, match=message):
            code_of_tables(bad)
    with pytest.raises(StreamError, match="no entry before row"):
        code_of_tables(np.concatenate([good[:1], np.zeros((1, 256), np.uint8), good[1:]]))


def test_the_first_code_stands_where_the_end_is_zero() -> None:
    code = PrefixCode({END: (1, 0), 120: (1, 1)})
    tables = df11_tables(code)
    assert (tables[0] == 120).all() and dict(code_of_tables(tables).words) == dict(code.words)


# In the language

def test_the_codes_of_the_language_are_those_that_run() -> None:
    for name, coding in CODECS.items():
        coded = implementation(name).encode(np.zeros((2, 16), np.uint8), np.bincount([0] * 32, minlength=256))
        kinds = {"i32": np.int32, "i16": np.int16, "u8": np.uint8}
        for role, (kind, axes) in coding.tensors.items():
            assert coded[role].dtype == kinds[kind] and coded[role].ndim == len(axes), (name, role)


@pytest.mark.parametrize("form", FORMS)
def test_generated_modules_write_what_whole_formats_are_written_with(form: str) -> None:
    """Workers that compress checkpoints have no torch, and their own way to the same bytes."""
    module = importlib.import_module(f"qdsl.generated.{form}")
    for shape in ((40, 328), (3, 4100)):
        patterns = normal(*shape)
        patterns[1, 5:7] = 0x7F80, 0
        packed = module.pack({"v": torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)})
        coded = FORMS[form].encode(patterns)
        assert packed.tensors.keys() == coded.keys()
        assert all(np.array_equal(packed.tensors[name].numpy(), tensor) for name, tensor in coded.items())


def test_a_group_of_the_package_is_a_weight() -> None:
    tensors = {name: torch.from_numpy(tensor) for name, tensor in golden("gauss_s0.02").items() if name in df11.NAMES}
    module = importlib.import_module("qdsl.generated.df11")
    count = len(tensors["sign_mantissa"])
    packed = module.wrap(tensors, shape=(1, count))
    assert packed.notes == ("tensor 'split_positions' is not part of df11.df11",)
    patterns = module.dequantize(packed).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(patterns[0], golden("gauss_s0.02")["weight_bits"].reshape(-1))
    again = module.quantize(module.dequantize(packed))
    assert all(torch.equal(again.tensors[name], packed.tensors[name]) for name in packed.tensors)
    tensors["output_positions"][0] = 1
    with pytest.raises(FormatError, match="the stream of 'exponents' is damaged: positions do not rise from 0"):
        module.dequantize(module.wrap(tensors, shape=(1, count)))


@pytest.mark.parametrize("form", ["df11", *FORMS])
def test_weights_are_made_in_one_pass_as_unpack_and_pack_make_them(form: str) -> None:
    """Compiled and by numpy, whole and in tiles; the functions of the generated module are the reference."""
    module = importlib.import_module(f"qdsl.generated.{form}")
    for shape in ((40, 328), (5, 4100), (3, 1)):
        weight = torch.from_numpy(normal(*shape).view(np.int16)).view(torch.bfloat16)
        layout = module.FORMAT.variants[()].storages[form]
        for choice in LOOPS:
            with loops(choice):
                packed = module.quantize(weight)
                plain = packed.decode_streams()
                stored = [plain.tensors[name] for name in plain.layout.coded]
                assert torch.equal(layout.unpack(*stored, **{key: plain.extents[key] for key in layout.reads})["v"], weight)
                assert all(torch.equal(plain.tensors[name], tensor) for name, tensor in layout.pack(v=weight).items())
                assert torch.equal(module.unpack(packed)["v"], weight)
                assert torch.equal(module.dequantize(packed, torch.bfloat16), weight)
                assert torch.equal(module.dequantize(packed, torch.float32), weight.float())
                strided = torch.empty(shape[1], shape[0], dtype=torch.bfloat16).t()
                assert torch.equal(module.dequantize(packed, out=strided), weight)


def test_other_arrangements_are_left_to_unpack() -> None:
    """Bits that move elsewhere are not what the codecs make, be it a single one."""
    for name, arrangement in (("fix4", "quads"), ("hlane", "quads"), ("df11", "flat")):
        layout = importlib.import_module(f"qdsl.generated.{name}").FORMAT.variants[()].storages[name]
        assert bfloat16._arrangement(layout) == arrangement
        uncoded = layout.tensors["sign_mantissa"]
        for change in ({"adds": 1}, {"flips": 1}, {"slices": uncoded.slices[:1]}):
            other = copy(uncoded)
            for key, value in change.items():
                object.__setattr__(other, key, value)
            assert not bfloat16._arrangement(replace(layout, tensors={**layout.tensors, "sign_mantissa": other}))


def test_a_large_weight_changes_its_stream_as_a_whole() -> None:
    bf16, form, other = (importlib.import_module(f"qdsl.generated.{name}") for name in ("bf16", "hlane", "fix4"))
    patterns = normal(160, 4096)                                 # more than a tile
    weight = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    packed = form.convert(bf16.pack({"v": weight}), "hlane")
    assert np.array_equal(packed.tensors["words"].numpy(), HLANE.encode(patterns)["words"])
    assert torch.equal(other.dequantize(other.convert(packed, "fix4")), weight)


def test_codes_of_the_study_take_as_many_bits_as_they_can() -> None:
    """None less than the entropy; longer codes and more states not more; a shipped format what its tensors take."""
    patterns = normal(256, 2048)
    bits_of = dict(codes.rows(patterns))
    entropy = bits_of["entropy of exponents"]
    for better, worse in itertools.pairwise(["entropy of exponents", "Huffman, at most 32 bits", "Huffman, at most 12 bits",
                                             "Huffman, at most 8 bits", "Huffman, streams of 2048, tight", "hlane"]):
        assert bits_of[better] <= bits_of[worse], (better, worse)
    assert entropy < bits_of["tANS, 1024 states"] < entropy + 0.03 and bits_of["tANS, 1024 states"] < bits_of["tANS, 256 states"]
    assert bits_of["fix4"] == 8 * sum(tensor.nbytes for tensor in FIX4.encode(patterns).values()) / patterns.size
