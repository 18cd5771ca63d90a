"""Times lossless bfloat16 compression on one thread; MB/s are 1e6 bytes of the bfloat16 weight per second.

df11's encoder is timed next to that of the dfloat11 package, which makes the same bytes, if that is installed (`pip install
--no-deps dfloat11==0.5.0 dahuffman==0.4.2`).  Goals are 35 times a rate of it that was measured elsewhere; it decodes only on
GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.timing import Side, WrongResult, calls
from bench.weights import BF16_BYTES, SHAPE, floats, format_of
from qdsl.codecs.huffman_windows.reference import THREADS
from qdsl.jobs.compress import codecs

PACKAGE = 3.4                                                    # MB/s of dfloat11 0.5.0, elsewhere
TIMES = 35.0
GOALS = {"df11": (TIMES * PACKAGE, TIMES * PACKAGE), "hlane": (150.0, None), "fix4": (150.0, None),
         "fix3": (150.0, None)}    # MB/s, encode and decode
DECODED = {"df11": None, "hlane": 400.0, "fix4": 1500.0, "fix3": 1200.0}          # MB/s, by `dequantize`
BITS = {"df11": 10.80, "hlane": 10.79, "fix4": 12.02, "fix3": 11.30}             # of a weight whose numbers are normal
FEW = 3                                                          # rounds of the package, which takes seconds


def figures(rounds: int) -> Iterator[Figure]:
    """Each format both ways, and its size."""
    if _utilities() is not None:
        theirs, mine = calls([Side(package), Side(encode, {"name": "df11"})], min(rounds, FEW))
        yield Figure("encode df11 to dfloat11", "x", ratios(theirs, mine), TIMES, note="same bytes")
    for name, goal in DECODED.items():
        for what, side, least in (("quantize", quantize, None), ("dequantize", dequantize, goal), ("linear", product, None)):
            [seconds] = calls([Side(side, {"name": name})], rounds)
            note = "of bf16 weight" + (", one row of x" if side is product else "")
            yield Figure(f"{what} {name}", "MB/s", rates(BF16_BYTES / 1e6, seconds), least, note=note)
    for name, (encoding, decoding) in GOALS.items():
        note = "of bf16 weight" + (f"; dfloat11 {PACKAGE} MB/s, elsewhere" if name == "df11" else "")
        [encode_seconds] = calls([Side(encode, {"name": name})], rounds)
        yield Figure(f"encode {name}", "MB/s", rates(BF16_BYTES / 1e6, encode_seconds), encoding, note=note)
        [back] = calls([Side(decode, {"name": name})], rounds)
        yield Figure(f"decode {name}", "MB/s", rates(BF16_BYTES / 1e6, back), decoding, note=note)
        size = sum(tensor.nbytes for tensor in encode(name)().values())
        yield Figure(f"normal weights as {name}", "bits", [8 * size / (SHAPE[0] * SHAPE[1])], BITS[name], more=False,
                     note="per weight")


def weight() -> NDArray[np.uint16]:
    """The bits of a weight whose numbers are normal."""
    return floats(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def encode(name: str) -> Callable[[], dict[str, NDArray[Any]]]:
    """The tensors of the weight, which must stand for it."""
    bits = weight()
    if not np.array_equal(codecs.decode(name, codecs.encode(name, [bits], THREADS), [bits.shape], THREADS)[0], bits.reshape(-1)):
        raise WrongResult(f"{name} decodes to another weight")
    return lambda: codecs.encode(name, [bits], THREADS)


def decode(name: str) -> Callable[[], NDArray[np.uint16]]:
    """The weight of the tensors."""
    bits = weight()
    tensors = codecs.encode(name, [bits], THREADS)
    return lambda: codecs.decode(name, tensors, [bits.shape], THREADS)[0]


def quantize(name: str) -> Callable[[], Mapping[str, Tensor]]:
    """The packed weight's tensors of the numbers, by the format's module."""
    weight, form = floats(torch.bfloat16), format_of(name)
    return lambda: form.quantize(weight).tensors


def dequantize(name: str) -> Callable[[], Tensor]:
    """The numbers of the packed weight, which must be the weight's."""
    weight, form = floats(torch.bfloat16), format_of(name)
    packed_weight = form.quantize(weight)
    if not torch.equal(form.dequantize(packed_weight, torch.bfloat16), weight):
        raise WrongResult(f"{name} decodes to another weight")
    return lambda: form.dequantize(packed_weight, torch.bfloat16)


def product(name: str) -> Callable[[], Tensor]:
    """A row of x times the packed weight's transpose."""
    form = format_of(name)
    packed_weight, x = form.quantize(floats(torch.bfloat16)), torch.ones(1, SHAPE[1], dtype=torch.bfloat16)
    return lambda: form.linear(x, packed_weight)


def package() -> Callable[[], dict[str, Any]]:
    """The package's tensors of the weight."""
    utilities = _utilities()
    assert utilities is not None
    flat = floats(torch.bfloat16).flatten()

    def encoded() -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _, counts = utilities.get_codec(flat)
            codec, _, table = utilities.get_32bit_codec(counts)
            data, sign_mantissa, positions, gaps, splits = utilities.encode_weights([flat], codec, 8, THREADS)
            return {"luts": utilities.get_luts(table), "encoded_exponent": data, "sign_mantissa": sign_mantissa,
                    "output_positions": positions, "gaps": gaps, "split_positions": splits}

    return encoded


def _utilities() -> ModuleType | None:
    """The package's module that encodes, which needs no GPU; the package itself does when it is imported."""
    package_spec = importlib.util.find_spec("dfloat11")
    if package_spec is None or package_spec.origin is None or importlib.util.find_spec("dahuffman") is None:
        return None
    spec = importlib.util.spec_from_file_location("dfloat11_utils", Path(package_spec.origin).parent / "dfloat11_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
