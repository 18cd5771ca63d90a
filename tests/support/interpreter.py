"""Triton's interpreter for tests: every address checked against the tensors of a launch, and bf16 mended.

The interpreter (3.6 to 3.7) cuts float32 to bf16 where hardware rounds to nearest even, loses subnormal numbers on the way
from bf16 to float32, and multiplies the bits of bf16 as integers; the mend is here, never in a kernel.
On a GPU nothing is patched, and the guard checks nothing: compute-sanitizer does that there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qdsl.runtime import PackedWeight
from qdsl.runtime.libraries.call import Call
from tests.support.covering import ALL

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class OutOfBounds(AssertionError):
    """A lane of a load or store that was not masked lies outside every tensor of the launch."""


class Trace:
    """What launches may touch, and the addresses of what they touched, a load or store after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.spans = [(t.data_ptr(), t.data_ptr() + (1 + sum((extent - 1) * step for extent, step in zip(
            t.shape, t.stride(), strict=True))) * t.element_size()) for t in tensors if t.numel()]
        self.loads: list[np.ndarray] = []
        self.stores: list[np.ndarray] = []

    def check(self, pointers: Any, mask: Any, what: str) -> np.ndarray:
        """The addresses of active lanes, all of them inside a tensor."""
        active = pointers.data[mask.data.astype(bool)] if mask is not None else pointers.data.ravel()
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        at: np.ndarray = active.astype(np.int64).ravel()
        inside = np.zeros(at.shape, dtype=bool)
        for low, high in self.spans:
            inside |= (at >= low) & (at + size <= high)
        if not inside.all():
            raise OutOfBounds(f"{what}: {int((~inside).sum())} of {inside.size} lanes out of bounds")
        return at


def times(addresses: list[np.ndarray], tensor: torch.Tensor) -> np.ndarray:
    """How often each element of a tensor was touched."""
    at = np.concatenate([np.empty(0, np.int64), *addresses])
    at = at[(at >= tensor.data_ptr()) & (at < tensor.data_ptr() + tensor.numel() * tensor.element_size())]
    return np.bincount((at - tensor.data_ptr()) // tensor.element_size(), minlength=tensor.numel())


_trace: Trace | None = None


def _read(packed: PackedWeight) -> list[torch.Tensor]:
    return [*packed.tensors.values(), *(table.on(packed.device) for table in packed.layout.kernels.every_table)]


@contextmanager
def guarded(*allowed: torch.Tensor | PackedWeight | None) -> Iterator[Trace]:
    """Launches inside may touch these tensors, and what weights are made of, alone."""
    global _trace
    tensors = [tensor for stored in allowed for tensor in (_read(stored) if isinstance(stored, PackedWeight) else [stored])]
    _trace = trace = Trace([tensor for tensor in tensors if tensor is not None])
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # infinities are values here
            yield trace
    finally:
        _trace = None


def _round_to_bf16(value: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), (bits >> 16 | 0x40).astype(np.uint16), rounded)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _byte_perm(first: np.ndarray, second: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Byte i of the result is the byte of the two words, of eight, that bits 4 * i to 4 * i + 2 of a selector name."""
    words = first.astype(np.int32).view(np.uint32).astype(np.uint64) | \
        second.astype(np.int32).view(np.uint32).astype(np.uint64) << np.uint64(32)
    picked = np.zeros(np.broadcast(first, second, selectors).shape, np.uint64)
    for i in range(4):
        place = (selectors.astype(np.int32).view(np.uint32) >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        picked |= (words >> place & np.uint64(255)) << np.uint64(8 * i)
    return picked.astype(np.uint32).view(np.int32)


def _patch() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    from qdsl.runtime.gpu.kernels import codebook, eight_bit, lanes

    builder = interpreter.InterpreterBuilder
    load, store, cast = builder.create_masked_load, builder.create_masked_store, builder.cast_impl
    dot, binary = builder.create_dot, builder.binary_op

    def masked_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        if _trace is not None:
            _trace.loads.append(_trace.check(pointers, mask, "load"))
        return load(self, pointers, mask, *args)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        if _trace is not None:
            _trace.stores.append(_trace.check(pointers, mask, "store"))
        return store(self, pointers, value, mask, *args)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bf16(source.data), tl.bfloat16)
        if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.float32:
            return interpreter.TensorHandle(_from_bf16(source.data), tl.float32)
        if source.dtype.scalar.is_int() and kind.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bf16(source.data), tl.bfloat16)
        return cast(self, source, kind)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16 and b.dtype.scalar == tl.bfloat16:
            product = np.matmul(_from_bf16(a.data), _from_bf16(b.data), dtype=np.float32)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
        return dot(self, a, b, d, *args)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16 and operation in (np.add, np.subtract, np.multiply):
            exact = operation(_from_bf16(left.data), _from_bf16(right.data))
            return interpreter.TensorHandle(_round_to_bf16(exact), left.dtype.scalar)
        return binary(self, left, right, operation)

    def byte_perm(*words: Any) -> Any:
        picked = _byte_perm(*(np.asarray(word.handle.data if isinstance(word, tl.tensor) else int(word)) for word in words))
        return tl.tensor(interpreter.TensorHandle(picked, tl.int32), tl.block_type(tl.int32, list(picked.shape)))

    # The interpreter knows no functions of libdevice, and no assembly.
    codebook.libdevice = SimpleNamespace(byte_perm=byte_perm)
    codebook.permute, codebook.bits_at, lanes.scaled = codebook.plain_permute, codebook.plain_bits_at, lanes.plain_scaled
    eight_bit.to_e4m3 = eight_bit.plain_e4m3
    builder.create_masked_load, builder.create_masked_store, builder.cast_impl = masked_load, masked_store, cast_impl
    def get_bf16(self: Any, value: float) -> Any:
        return interpreter.TensorHandle(_round_to_bf16(np.array([value], np.float32)), tl.bfloat16)

    builder.create_dot, builder.binary_op, builder.get_bf16 = create_dot, binary_op, get_bf16


def _hasten() -> None:
    """What the interpreter makes anew for every operation is kept: shapes of tensors, types of blocks, and numpy's types.

    For a function that a kernel calls it patches the language again, and every sum and product of integers it computes twice,
    the second time in 64 bits to find those that overflow: that is left to `make test-all`.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    np_dtype, patch_lang, block_type = interpreter._get_np_dtype, interpreter._patch_lang, tl.block_type.__init__
    dtypes: dict[str, np.dtype[Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def kept_dtype(kind: Any) -> np.dtype[Any]:
        word = kind.scalar.name
        if word not in dtypes:
            dtypes[word] = np_dtype(kind)
        return dtypes[word]

    def kept_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple([extent if isinstance(extent, int) else extent.value for extent in shape])
        if key not in blocks:
            block_type(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    @cache
    def shape_of(extents: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(extent) for extent in extents]), tl.constexpr(prod(extents))

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of(tuple(kind.shape) if kind.is_block() else ())

    @cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patched_once(function: Any) -> Any:
        fresh = any(tl.core.is_builtin(language.load) for language in languages(function))
        return patch_lang(function) if fresh else interpreter._LangPatchScope()

    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def same_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    check = interpreter.TritonSemantic.binary_op_type_checking_impl
    constants: dict[tuple[Any, ...], Any] = {}

    def kept_check(self: Any, left: Any, right: Any, *flags: bool) -> tuple[Any, Any]:
        if not isinstance(left, tl.tensor) or left.dtype.is_ptr():
            return check(self, left, right, *flags)
        if isinstance(right, tl.tensor):
            is_one_type = left.dtype.name == right.dtype.name and left.shape is right.shape and True not in flags[2:]
            return (left, right) if is_one_type else check(self, left, right, *flags)
        key = type(right), str(right), left.dtype.name, id(left.shape), flags
        if key not in constants:
            checked, constant = check(self, left, right, *flags)
            if checked is not left:
                return checked, constant
            constants[key] = constant
        return left, constants[key]

    interpreter.TritonSemantic.broadcast_impl_value = same_shape
    interpreter.TritonSemantic.binary_op_type_checking_impl = kept_check
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=ALL)
    interpreter._get_np_dtype, interpreter._patch_lang = kept_dtype, patched_once
    tl.block_type.__init__, tl.tensor.__init__ = kept_block, tensor


def run_program(call: Call, *place: int) -> None:
    """Run one program of a launch, the last one by default, on the tensors themselves; a product that overflows is an error.

    Sums are not checked: some wrap by intent, as those of packed words.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    grid = (*call.grid, 1, 1)[:3]
    place = (*(place or [count - 1 for count in call.grid]), 0, 0)[:3]

    def check(condition: Any, message: str) -> None:
        if message.endswith("mul") and not condition:
            raise OverflowError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_assert", check)
        patch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True, sanitize_overflow=True))
        patch.setattr(builder, "set_grid_dim", lambda *_: type(builder).set_grid_dim(builder, *grid))
        patch.setattr(builder, "set_grid_idx", lambda *_: type(builder).set_grid_idx(builder, *place))
        patch.setattr(executor, "_init_args_hst", lambda self, arguments, options: (arguments, options))     # copies would fill
        patch.setattr(executor, "_restore_args_dev", lambda *_: None)                                         # sparse memory
        replace(call, grid=(1,)).run()


if INTERPRETED:
    _patch()
    _hasten()
