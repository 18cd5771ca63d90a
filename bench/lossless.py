"""bfloat16 without loss, on one thread, in numpy; MB/s are 1e6 bytes of the bfloat16 weight per second.

The dfloat11 package needs a GPU to be imported; its compression of such a weight was measured elsewhere, 3.4 MB/s, and goals are
35 times that.  It decodes on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.figure import Figure, rates
from bench.timing import Side, WrongResult, calls
from bench.weights import BF16_BYTES, SHAPE, floats
from qdsl.compress import codecs
from qdsl.entropy.huffman_windows import THREADS

PACKAGE = 3.4                                                    # MB/s of dfloat11 0.5.0
GOALS = {"df11": (35 * PACKAGE, 35 * PACKAGE), "hlane": (150.0, None), "fix4": (150.0, None)}      # MB/s, encode and decode
BITS = {"df11": 10.80, "hlane": 10.79, "fix4": 12.02}            # of a weight whose numbers are normal


def figures(rounds: int) -> Iterator[Figure]:
    """Each format both ways, and its size."""
    for name, (encoding, decoding) in GOALS.items():
        note = "of bf16 weight" + (f"; the package {PACKAGE} MB/s, elsewhere" if name == "df11" else "")
        [there] = calls([Side(encode, {"name": name})], rounds)
        yield Figure(f"encode {name}", "MB/s", rates(BF16_BYTES / 1e6, there), encoding, note=note)
        [back] = calls([Side(decode, {"name": name})], rounds)
        yield Figure(f"decode {name}", "MB/s", rates(BF16_BYTES / 1e6, back), decoding, note="of bf16 weight")
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
