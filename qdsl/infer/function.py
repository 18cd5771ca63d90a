"""`qdsl infer --function`: finds the layout of a packing function by calling it with chosen codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdsl.infer.fit import Blocks
from qdsl.infer.numbers import Field
from qdsl.infer.run import InferError, Inferred, stored_element, with_spec
from qdsl.infer.solve import Solution
from qdsl.infer.text import spec_text
from qdsl.infer.tiles import Codes, Labels, match_layout

DRAWS = 8                                                        # random weights that are used to match bits
MOST_BITS = 8                                                    # bits of a code


def infer_function(pack: Callable[[Tensor], Tensor], shape: tuple[int, int], bits: int, name: str = "inferred") -> Inferred:
    """A spec of the tensor that `pack` returns for int32 codes [N, K] of `bits` bits; the spec packs as the function does.

    Both are compared on codes in which one bit is set wherever one bit of the code's position is set; together these move every
    bit alone.  The spec's decode returns the code itself.  Raises InferError if the function does more than place bits.
    """
    if not 1 <= bits <= MOST_BITS or min(shape) < 1:
        raise InferError(f"codes of {bits} bits [{shape[0]}, {shape[1]}]: expected 1 to {MOST_BITS} bits, and a row and a column")
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        codes = random.integers(0, 1 << bits, shape).astype(np.int16)
        draws.append((stored_element("packed", _call_pack(pack, codes)), Labels(codes, bits)))
    first, labels = draws[0]
    layout = match_layout([(one.stored, labels) for one, labels in draws])
    if layout is None:
        raise InferError(f"the function's {len(first.stored.data)} bytes are not the bits of {bits}-bit codes, in tiles that "
                         "repeat")
    flipped = int((layout.read_codes(first.stored, shape) ^ labels.codes)[0, 0])
    stored = {0: "", 1 << bits - 1: f"      stored: {{q: q - {1 << bits - 1}}}\n"}
    if flipped not in stored:
        raise InferError(f"the function flips the bits {flipped:#b} of codes, which no spec says")
    solution = Solution((Field("q", f"u{bits}", Blocks(1, 1), "packed", layout),), "q")
    text = spec_text(name, solution, {"packed": first}, shape) + stored[flipped]

    def compared(module: Any) -> tuple[int, int]:
        """How many bytes the spec packs as the function does, and all bytes."""
        exact = count = 0
        for codes in probe_codes(shape, bits):
            wanted = stored_element("packed", _call_pack(pack, codes)).stored.data
            packed = module.pack({"q": torch.from_numpy(codes.astype(np.uint8))})
            got = stored_element("packed", packed.tensors["packed"]).stored.data
            count += len(wanted)
            exact += int((wanted == got).sum()) if len(wanted) == len(got) else 0
        return exact, count

    (exact, count), problem = with_spec(text, compared, (0, 1))
    if not problem and exact < count:
        problem = "the function packs some codes otherwise"
    return Inferred(text, exact, count, ("packed",), (problem,) if problem else ())


def _call_pack(pack: Callable[[Tensor], Tensor], codes: Codes) -> Tensor:
    try:
        packed = pack(torch.from_numpy(codes.astype(np.int32)))
    except Exception as error:                                   # any exception: the function is the caller's
        raise InferError(f"the function fails for codes int32 {list(codes.shape)}: {type(error).__name__}: {error}") from error
    if not isinstance(packed, Tensor):
        raise InferError(f"the function returned a {type(packed).__name__}: expected a torch tensor")
    return packed.detach().cpu()


def probe_codes(shape: tuple[int, int], bits: int) -> Iterator[Codes]:
    """Yields codes [N, K] with one bit set where one bit of the position is set, for all pairs of bits; then random ones."""
    position = np.arange(shape[0] * shape[1]).reshape(shape)
    for bit in range(bits):
        for at in range(int(position[-1, -1]).bit_length()):
            yield ((position >> at & 1) << bit).astype(np.int16)
        yield np.full(shape, 1 << bit, np.int16)
    yield np.random.default_rng(1).integers(0, 1 << bits, shape).astype(np.int16)
