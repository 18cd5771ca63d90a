"""`qdsl infer`: writes a spec from packed codes, the tensors of other numbers and the weight's values; builds and verifies it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import qdsl
from qdsl.compiler.spec.source import SpecError
from qdsl.core.numbers import TORCH_FLOATS
from qdsl.core.stored import INTEGERS
from qdsl.infer.elements import Element
from qdsl.infer.search import search
from qdsl.infer.text import spec_text, stored_name
from qdsl.infer.tiles import StoredBytes
from qdsl.runtime.weight.errors import FormatError

KINDS = {name: kind for kind, name in (*TORCH_FLOATS.items(), *INTEGERS.items()) if kind not in ("index", "shape")}
Result = TypeVar("Result")


class InferError(ValueError):
    """No spec can be inferred from the tensors; the message lists the attempts."""


@dataclass(frozen=True)
class Inferred:
    """A spec's text, the number of values it decodes exactly, and the faults that remain.

    names: the stored tensors that the spec takes.
    """

    text: str
    exact: int
    values: int
    names: tuple[str, ...]
    problems: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every value is decoded bit by bit, except for the sign of zero."""
        return self.exact == self.values


def infer(packed: str, tensors: Mapping[str, Tensor], values: Tensor, name: str = "inferred") -> Inferred:
    """Infers a spec from a weight's stored tensors and its values, float32 [N, K]; builds it and decodes the tensors with it.

    packed: the name in `tensors` of the tensor of codes; the others may hold scales and zero points.  name: of the format.
    Raises InferError if no codes are found in the packed tensor.
    """
    if values.dtype != torch.float32 or values.dim() != 2 or not values.numel() or not bool(values.isfinite().all()):
        raise InferError(f"values are {str(values.dtype)[6:]} {list(values.shape)}: expected finite float32 [N, K]; values that "
                         "were rounded to 16 bits are not those that the tensors decode to")
    elements = {key: stored_element(key, tensor) for key, tensor in tensors.items()}
    shape = (values.shape[0], values.shape[1])
    solution = search(packed, elements, values.contiguous().numpy())
    if solution is None:
        raise InferError(f"no codes of the values lie in '{packed}': {len(elements[packed].stored.data)} bytes for "
                         f"{values.numel()} values")
    text = spec_text(name, solution, elements, shape)
    names = tuple(dict.fromkeys(one.tensor for one in solution.fields))

    def count_exact(module: Any) -> int:
        packed = module.FORMAT.wrap({stored_name(key): tensors[key] for key in names}, shape)
        return int((module.dequantize(packed, torch.float32) == values).sum())

    exact, problem = with_spec(text, count_exact, 0)
    return Inferred(text, exact, values.numel(), names, (*solution.problems, *([problem] if problem else [])))


def stored_element(name: str, tensor: Tensor) -> Element:
    """A tensor's bytes and the type of its elements.  Raises InferError for a dtype that specs do not have."""
    kind = KINDS.get(str(tensor.dtype).removeprefix("torch."))
    if kind is None:
        raise InferError(f"tensor '{name}' is {str(tensor.dtype)[6:]}: expected one of {', '.join(KINDS)}")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Element(kind, StoredBytes(data, tuple(tensor.shape), tensor.element_size()))


def with_spec(text: str, use: Callable[[Any], Result], failed: Result) -> tuple[Result, str]:
    """What a function returns for a spec's module, and ''; or `failed`, and the spec's fault."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "inferred.yaml")
        path.write_text(text)
        try:
            return use(qdsl.load(path)), ""
        except SpecError as error:
            return failed, "; ".join(problem.message for problem in error.problems)
        except FormatError as error:
            return failed, str(error)
