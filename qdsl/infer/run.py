"""`qdsl infer`: a spec from a packed tensor, the weight's values, and the tensors of its numbers; built and verified."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import qdsl
from qdsl.compiler.spec.source import SpecError
from qdsl.infer.fit import fit
from qdsl.infer.labels import labelings
from qdsl.infer.numbers import Element, Field, Record
from qdsl.infer.fit import Blocks
from qdsl.infer.solve import Solution, solve
from qdsl.infer.text import spec_text
from qdsl.infer.tiles import Stored, match
from qdsl.runtime.weight.errors import FormatError

KINDS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16",
         torch.int32: "i32", torch.uint32: "u32", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
         torch.float8_e8m0fnu: "e8m0"}


class InferError(ValueError):
    """Tensors of which no spec follows; the message says what was tried."""


@dataclass(frozen=True)
class Inferred:
    """A spec's text, how many of the values it decodes exactly, of how many, and what does not fit."""

    text: str
    exact: int
    values: int
    problems: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every value is decoded, bit by bit, but for the sign of zero."""
        return self.exact == self.values


def infer(packed: str, tensors: Mapping[str, Tensor], values: Tensor, name: str = "inferred") -> Inferred:
    """A spec of a weight from its stored tensors and its values [N, K].

    packed: the tensor of the codes, by its name among `tensors`; the others may be scales and offsets.  Raises InferError.
    """
    elements = {key: element(key, tensor) for key, tensor in tensors.items()}
    weights = values.float().contiguous().numpy()
    if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all():
        raise InferError(f"values are {list(weights.shape)}: expected finite numbers [N, K]")
    solution = _solution(packed, elements, weights)
    text = spec_text(name, solution, elements, (weights.shape[0], weights.shape[1]))
    exact, problem = _verify(text, {key: tensors[key] for key in dict.fromkeys(one.tensor for one in solution.fields)}, values)
    return Inferred(text, exact, weights.size, (*solution.problems, *([problem] if problem else [])))


def element(name: str, tensor: Tensor) -> Element:
    """A tensor's bytes and what its elements are.  Raises InferError for a dtype that specs do not have."""
    if tensor.dtype not in KINDS:
        raise InferError(f"tensor '{name}' is {str(tensor.dtype)[6:]}, which specs do not have")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Element(KINDS[tensor.dtype], Stored(data, tuple(tensor.shape), tensor.element_size()))


def _solution(packed: str, elements: Mapping[str, Element], values: np.ndarray) -> Solution:
    shape = (values.shape[0], values.shape[1])
    stored = elements[packed].stored
    tried = ""
    for labels in labelings(values, 8 * len(stored.data) / values.size):
        layout = match([(stored, labels)])
        if layout is None:
            continue
        codes = layout.read(stored, shape)
        meaning = fit(codes, values, layout.bits)
        if meaning is not None:
            code = Field("q", meaning.kind, Blocks(1, 1), packed, layout)
            record = Record(packed, stored, layout, shape)
            others = {key: one for key, one in elements.items() if key != packed}
            return solve(code, meaning, codes, values, others, record)
        tried = f"; codes of {layout.bits} bits lie in tiles of {layout.tile.size} weights, but do not decode to the values"
    raise InferError(f"no codes of the values lie in '{packed}'{tried}")


def _verify(text: str, tensors: Mapping[str, Tensor], values: Tensor) -> tuple[int, str]:
    """How many values the spec decodes exactly, and what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "inferred.yaml")
        path.write_text(text)
        try:
            module = qdsl.load(path)
            packed = module.FORMAT.wrap(tensors, (values.shape[0], values.shape[1]))
        except (SpecError, FormatError) as error:
            return 0, str(error)
        decoded = module.dequantize(packed, torch.float32)
        return int((decoded == values.float()).sum()), ""
