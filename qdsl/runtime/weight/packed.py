"""A quantized weight: the tensors of a storage, validated together, that move as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor

from qdsl.core.borders import UNITS
from qdsl.core.numbers import find_number
from qdsl.core.shapes import compiled_step, slicing_step
from qdsl.core.slices import FieldPiece, PlacedPiece
from qdsl.core.stored import PLANAR, Description, Stored
from qdsl.core.text import byte_text, html_table, shortened
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import on_device, runs_kernels
from qdsl.runtime.weight import order, streams
from qdsl.runtime.weight.branch_tensors import branch_step
from qdsl.runtime.weight.device_dtypes import dtype_on, move_tensor
from qdsl.runtime.weight.errors import FormatError as FormatError
from qdsl.runtime.weight.errors import UnrepresentableValue as UnrepresentableValue
from qdsl.runtime.weight.errors import stream_errors
from qdsl.runtime.weight.layout import Storage, Variant
from qdsl.runtime.weight.match import stored_dtype
from qdsl.runtime.weight.no_tensor import NoTensor
from qdsl.runtime.weight.pickling import MODULES, picklable, unpickled, wrapped
from qdsl.runtime.weight.picture import picture_of
from qdsl.runtime.weight.products import ProductPlan
from qdsl.runtime.weight.routing import Offsets
from qdsl.runtime.weight.spec import Spec


@dataclass(frozen=True, slots=True)
class Dense:
    """A copy of the weight without gaps, and the versions of the tensors that it was copied from (runtime/gpu/strides.py)."""

    packed: PackedWeight
    states: list[tuple[int, int]]


class WeightFormat(Protocol):
    """The format of a packed weight, as modules below runtime/format.py know it; Format has the documentation."""

    name: str
    path: str
    key: str
    spec: Spec
    description: Description
    params: Mapping[str, tuple[int | str, ...]]
    by: tuple[str, ...]
    size_axes: Mapping[str, str]
    storages: tuple[str, ...]
    variants: dict[tuple[int | str, ...], Variant]

    def __hash__(self) -> int: ...
    @property
    def Linear(self) -> type[Any]: ...
    def variant(self, params: Mapping[str, int | str]) -> Variant: ...
    def complete(self, params: Mapping[str, int | str]) -> dict[str, int | str]: ...
    def sizes(self, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, int]: ...
    def storage(self, name: str | None, params: Mapping[str, int | str]) -> tuple[str, Storage]: ...
    def wrap(self, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None, storage: str | None = None, *,
             verify: bool = False, **params: int | str) -> PackedWeight: ...
    def checked(self, packed: PackedWeight) -> PackedWeight: ...
    def empty(self, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              optional: Sequence[str] | None = None, **params: int | str) -> PackedWeight: ...
    def stored(self, packed: PackedWeight) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]: ...
    def unpack(self, packed: PackedWeight) -> dict[str, Tensor]: ...
    def pack(self, fields: Mapping[str, Tensor], storage: str | None = None, **params: int | str) -> PackedWeight: ...
    def rows(self, packed: PackedWeight, index: Tensor | Sequence[int]) -> PackedWeight: ...
    def cut(self, packed: PackedWeight, dim: str, start: int, stop: int) -> PackedWeight: ...
    def shard(self, packed: PackedWeight, dim: str, start: int, stop: int) -> PackedWeight: ...
    def join(self, parts: Sequence[PackedWeight], dim: str) -> PackedWeight: ...
    def decode_streams(self, packed: PackedWeight) -> tuple[PackedWeight, list[Call]]: ...
    def quantize(self, weight: Tensor, storage: str | None = None, importance: Tensor | None = None,
                 **options: Any) -> PackedWeight: ...
    def chosen(self, options: Mapping[str, Any]) -> tuple[dict[str, int | str], dict[str, Any], str]: ...
    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor: ...
    def dequantize_rows(self, packed: PackedWeight, index: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor: ...
    def convert(self, packed: PackedWeight, storage: str, **params: int | str) -> PackedWeight: ...
    def planar(self, packed: PackedWeight, larger: bool = False) -> PackedWeight: ...
    def why_not_planar(self, packed: PackedWeight, larger: bool = False) -> str: ...
    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, quantize_x: bool = False,
               batch_invariant: bool = False, input_scale: float | None = None, match_dense: bool = False) -> Tensor: ...
    def grouped_linear(self, x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None = None,
                       partial: bool = False, rows: Tensor | None = None, match_dense: bool = False) -> Tensor: ...


class PackedWeight(NoTensor):
    """A weight [N, K] of a format in one of its storages.

    tensors: the storage's tensors by name, in storage order, without missing optional ones.  shape: (N, K).  params: every
    parameter of the format.  known_finite: whether no code is NaN or infinite; None until `finite` is read.  stream_info: the
    result of streams.validated_stream_info for its streams; '' before.  names: the checkpoint's names, if different.  Only the
    format's own functions make one, which validate shapes, dtypes and indices.
    """

    def __init__(self, format: WeightFormat, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int],
                 params: Mapping[str, int | str], *, in_order: frozenset[str] = frozenset(), known_finite: bool | None = None,
                 notes: Sequence[str] = (), names: Mapping[str, str] | None = None, is_decoded: bool = False,
                 stream_info: str = "", shape_text: str = "") -> None:
        self.format = format
        self.storage = storage
        self.tensors = dict(tensors)
        self.shape = shape
        self.params = dict(params)
        self.params_text = " ".join([f"{name}={value}" for name, value in params.items()])  # torch.compile cannot do it later
        self.shape_text = shape_text or f"{shape[0]}x{shape[1]}"  # from sizes that it takes for dynamic
        self.in_order = in_order
        self.known_finite = known_finite
        self.notes = tuple(notes)
        self.names = dict(names or {})
        self.variant: Variant = format.variant(params)
        self.is_decoded = is_decoded
        self.stream_info = stream_info
        self.layout: Storage = self.variant.storages[storage].decoded if is_decoded else self.variant.storages[storage]
        plus = self.variant.plus
        self.branch_names = tuple([name for branch in plus for name in branch.names if name in self.tensors]) if plus else ()
        self.has_branch = bool(self.branch_names)
        self.sizes = format.sizes(params, shape)                 # with -1, the whole axis, resolved
        self.extents = {**self.sizes, "N": shape[0], "K": shape[1]}
        self._steps: dict[str, tuple[int, str]] = {}
        self._base: PackedWeight | None = None
        self.plan: ProductPlan | None = None                     # products keep these two for the next product with `base`; they
        self.dense: Dense | None = None                          # are neither pickled nor derived
        self.stored_plan: ProductPlan | None = None              # of the weight that as_stored() returns
        self.keeps_copy = False                                  # whether a CPU may keep an interleaved copy of it

    def __reduce__(self) -> tuple[Any, ...]:
        """The arguments of `pickling.wrapped`; of a part of a module, or a decoded weight, those of the constructor."""
        module = self.format.__module__
        if self.tensors and not self.is_decoded and MODULES.fullmatch(module):
            return wrapped, (module, self.storage, picklable(self.tensors), self.shape, self.params, self.notes, self.names)
        return _rebuilt, (self.format, self.storage, picklable(self.tensors), self.shape, self.params, self.in_order,
                          self.known_finite, self.notes, self.names, self.is_decoded, self.stream_info)

    def __copy__(self) -> PackedWeight:
        return self.derive(self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return self.derive(copy.deepcopy(self.tensors, memo))

    def __repr__(self) -> str:
        rows = self._tensor_rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        params = [f"  {self.params_text}"] if self.params else []
        return "\n".join([f"PackedWeight({self._title})", *params, *shortened(lines)])

    def _repr_html_(self) -> str:
        """A table of its tensors, and where their bits lie if the spec is here, as notebooks show it."""
        title = " ".join(["PackedWeight", self._title, *([f"({self.params_text})"] if self.params else [])])
        return html_table(title, ("tensor", "dtype", "shape"), self._tensor_rows) + picture_of(
            self.format.name, self.format.key, self.format.path, self.storage, self.params)

    @property
    def _title(self) -> str:
        """Format, shape and size in a line."""
        bits = 8 * self.nbytes / max(1, self.numel())
        where = [f"{byte_text(self.nbytes)} on {self.device}"] if self.tensors else []
        return ", ".join([f"{self.format.name}.{self.storage} {list(self.shape)}", 
                          *([f"{bits:.4g} bits per weight"] if self.numel() else []), *where])

    @property
    def _tensor_rows(self) -> list[tuple[str, str, str]]:
        return [(name, str(tensor.dtype)[6:], str(list(tensor.shape))) for name, tensor in self.tensors.items()]

    # -- as a tensor -------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `dequantize()`, bfloat16; those of the stored tensors are in `dtypes`."""
        return torch.bfloat16

    @property
    def ndim(self) -> int:
        return 2

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        """The number of weights, N * K."""
        return self.shape[0] * self.shape[1]

    def size(self, dim: int | None = None) -> torch.Size | int:
        """(N, K), or the length of one axis."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K]: exact by the formula in float32, rounded to nearest even once for other dtypes."""
        return self.format.dequantize(self, dtype)

    def cpu(self) -> PackedWeight:
        """The weight in the CPU's memory."""
        return self.to("cpu")

    def cuda(self, device: torch.device | int | str | None = None, non_blocking: bool = False) -> PackedWeight:
        """The weight on a GPU, by default the current one."""
        return self.apply(lambda tensor: tensor.cuda(device, non_blocking=non_blocking))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def finite(self) -> bool:
        """Whether no code is NaN or infinite.  For formats with such codes, the first call reads every code.

        Their bits are the upper ones below the sign, so the largest code of each sign is enough, without a mask per code.
        """
        if self.known_finite is None and self.device.type != "meta":        # there codes are not filled yet
            name, bits = self.layout.special or ("", 0)
            codes = [tensor.detach().contiguous() for key, tensor in self.tensors.items() if key == name and tensor.numel()]
            self.known_finite = all(int(stored.view(torch.int8).amax()) < bits
                                    and int(stored.view(torch.uint8).amax()) < bits + 128 for stored in codes)
        return self.known_finite is not False

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def order(self) -> Tensor | None:
        """int32 [K], the column of the weight that is stored at each place; None if columns are stored in order."""
        name = self.layout.order
        tensor = self.tensors.get(name) if name and name not in self.in_order else None
        return None if tensor is None else order.columns(tensor)

    @property
    def base(self) -> PackedWeight:
        """The weight without its branches; itself if it has none."""
        if not self.has_branch:
            return self
        if self._base is None:
            self._base = self.derive({name: tensor for name, tensor in self.tensors.items() if name not in self.branch_names})
            self._base.plan, self._base.dense = self.plan, self.dense
        return self._base

    @property
    def described(self) -> Mapping[str, Stored]:
        """Descriptions of its tensors: those of the storage, and those of branches."""
        return {**self.format.description.layout(self.storage, self.params), **self.layout.tensors}

    def as_stored(self) -> PackedWeight:
        """The weight with columns in stored order: the same tensors without their order."""
        columns, unordered = self.order, self.layout.unordered
        return self.derive({name: tensor if columns is None or name not in unordered else tensor.index_select(0, columns)
                            for name, tensor in self.tensors.items() if name != self.layout.order})

    def apply(self, function: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The weight with a function applied to every tensor, which must keep dtypes and shapes."""
        return self.derive({name: function(tensor) for name, tensor in self.tensors.items()})

    def derive(self, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None,
               in_order: frozenset[str] | None = None) -> PackedWeight:
        """A weight with the same parameters and other tensors, not validated; a shape tensor gets the new shape."""
        name = self.layout.shape
        if shape not in (None, self.shape) and name in tensors:
            tensors = {**tensors, name: shape_tensor(shape, tensors[name].device)}
        derived = PackedWeight(self.format, self.storage, tensors, shape or self.shape, self.params,
                            in_order=self.in_order if in_order is None else in_order, known_finite=self.known_finite,
                            notes=self.notes, names=self.names, is_decoded=self.is_decoded, stream_info=self.stream_info,
                            shape_text="" if shape else self.shape_text)
        derived.keeps_copy = self.keeps_copy
        return derived

    def decode_streams(self) -> PackedWeight:
        """The weight with its entropy-coded tensors decoded, so that it can be sliced; itself if it has no streams.

        On meta the tensors have only dtypes and shapes.  Raises FormatError for a damaged stream.
        """
        if not self.layout.streams:
            return self
        if self.device.type != "meta" and not runs_kernels(self.device):
            with stream_errors(self.format.name):
                return self.with_plain(streams.decode(self.layout, self.tensors, self.shape))
        decoded, calls = self.format.decode_streams(self)
        with on_device(self.device):
            for call in calls if self.device.type != "meta" else ():
                call.run()
        return decoded

    def decode_rows(self, rows: Tensor) -> PackedWeight | None:
        """The decoded weight of these rows, ascending int64 [M]; None if a stream, or another tensor, has no separate rows.

        Runs on a CPU.  Other rows are decoded only if they share lanes with these.  Raises FormatError for a damaged stream.
        """
        if not streams.has_plain_rows(self.layout, self.tensors, self.sizes):
            return None
        with stream_errors(self.format.name):
            plain = streams.decode_rows(self.layout, self.tensors, self.shape, rows)
        return None if plain is None else self.with_plain(plain, rows)

    def with_plain(self, plain: Mapping[str, Tensor], rows: Tensor | None = None) -> PackedWeight:
        """The weight with these decoded tensors instead of its streams.

        rows: int64 [M], the rows that the tensors have, if not all; see streams.has_plain_rows.
        """
        if rows is not None:
            tensors = dict(self.tensors)
            for name, axes in streams.plain_axes(self.layout, self.tensors).items():
                for place, axis in enumerate(axes):
                    tensors[name] = tensors[name].index_select(place, rows) if axis.dim == "N" else tensors[name]
            return self.derive(tensors, (len(rows), self.shape[1])).with_plain(plain)
        decoded = PackedWeight(self.format, self.storage, {}, self.shape, self.params, is_decoded=True)
        available = {**self.tensors, **plain}                    # without tensors that operations omit, such as the shape
        decoded.tensors = {name: available[name] for name in decoded.layout.tensors if name in available}
        return decoded

    def to(self, *args: Any, **kwargs: Any) -> PackedWeight:
        """The weight on another device; raises for another dtype, because stored dtypes belong to the format."""
        dtypes = self.dtypes
        return self.derive({name: _same_dtype(tensor, dtypes[name],
                                              move_tensor(tensor, dtypes[name], lambda part: part.to(*args, **kwargs)))
                            for name, tensor in self.tensors.items()})

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the storage's tensors; on a device that lacks 8-bit floats, tensors are bytes instead."""
        return {name: stored_dtype(str(self.params.get(tensor.dtype, tensor.dtype))) for name, tensor in self.described.items()}

    # -- rows, pieces and joins -------------------------------------------------------------------------------------------

    @property
    def has_separate_rows(self) -> bool:
        """Whether every row is stored separately, so that `rows` gathers rows of tensors and decodes nothing."""
        if self.has_branch:
            return self.base.has_separate_rows and branch_step(self.variant.plus, self.tensors, "N") == 1
        return self._cut_step("N")[0] == 1 and not self.layout.whole and not self.layout.streams and not self._is_flat

    def rows(self, index: Tensor | Sequence[int]) -> PackedWeight:
        """The weight of these rows, index int64 or int32 [M] in any order, with repeats; gathered, not decoded, if possible.

        If rows are not stored separately, fields are gathered and packed again (entropy codes are encoded again).  The result may
        have shorter blocks or storage `planar`; see its `params` and `storage`.  Raises FormatError if rows share a block that no
        parameter makes shorter, IndexError for rows that do not exist.
        """
        return self.format.rows(self, index)

    def step(self, dim: str) -> int:
        """The smallest step of rows (dim 'N') or columns ('K') at whose multiples `cut` works; all of them if it never does."""
        if dim not in ("N", "K"):
            raise FormatError(f"a weight has rows ('N') and columns ('K'), not {dim!r}")
        whole = max(1, self.shape[dim == "K"])
        if self.has_branch:
            return min(whole, lcm(self.base.step(dim), branch_step(self.variant.plus, self.tensors, dim)))
        step, _ = self._cut_step(dim)
        return next((size for size in range(step, whole, step)
                     if not self._why_not(dim, size) and not self._why_not(dim, whole % size or size)), whole)

    def cut(self, dim: str, start: int, stop: int) -> PackedWeight:
        """Rows (dim 'N') or columns ('K') [start, stop) as a weight, without copying.

        Raises FormatError with the nearest legal borders if a border is inside a block or a word.  See `shard`.
        """
        return self.format.cut(self, dim, start, stop)

    def shard(self, dim: str, start: int, stop: int) -> PackedWeight:
        """Rows (dim 'N') or columns ('K') [start, stop) as a weight of the same numbers: a view if possible, else packed again.

        Entropy-coded rows keep their codes if the borders are those of its groups of rows.  Other slices that `cut` refuses are
        unpacked and packed in the same storage (entropy codes are encoded again).  If the borders are inside blocks, the result
        has a smaller block size of the format and repeats the values of long blocks; else storage `planar`.  See its `storage`
        and `params`.  Act-order columns keep their groups.  On meta the result has exact shapes, but tensors whose size depends
        on the numbers have no elements.  Raises FormatError with the reason and the nearest borders.
        """
        return self.format.shard(self, dim, start, stop)

    @classmethod
    def join(cls, parts: Sequence[PackedWeight], dim: str = "N") -> PackedWeight:
        """The weight with the rows (dim 'N') or columns ('K') of all parts, in order: one copy per tensor.

        Parts have the same format, storage, parameters and other extent.  Tensors that all rows, or columns, share must be equal.
        Parts that end inside blocks or words, and entropy codes, are unpacked and packed together, as in `shard`.  Raises
        FormatError with the difference.
        """
        if not parts or dim not in UNITS:
            raise FormatError(f"join takes one weight or more and 'N' (rows) or 'K' (columns), not {len(parts)} along {dim!r}")
        return parts[0].format.join(parts, dim)

    def why_not_cut(self, dim: str, start: int, stop: int) -> str:
        """Why tensors cannot be sliced at these borders; '' if they can.  Raises FormatError for borders past the weight."""
        whole = self.shape[0 if dim == "N" else 1]
        if not 0 <= start <= stop <= whole or dim not in ("N", "K"):
            raise FormatError(f"rows ('N') or columns ('K') from {start} to {stop} of {dim} = {whole} are no part of the weight")
        if (start, stop) == (0, whole):
            return ""
        step, why = self._steps.get(dim) or self._steps.setdefault(dim, self._cut_step(dim))
        if self.layout.streams or any(border % step and border != whole for border in (start, stop)):
            return why
        return self._why_not(dim, stop - start) if stop > start else ""

    def _cut_step(self, dim: str) -> tuple[int, str]:
        """The step of rows or columns at whose multiples tensors can be sliced, all if none, and why not elsewhere."""
        whole = max(1, self.shape[dim == "K"])
        if self.layout.streams:
            return whole, "an entropy code holds all of it"
        if self.layout.whole:
            return whole, "its tensors mix all rows and columns"
        if dim == "K" and self._is_flat:
            return whole, "it stores rows one after the other, so only rows can be cut"
        for name in self.indices if dim == "K" else ():
            if name not in self.in_order and not self.tensors[name].is_meta:     # on meta columns count as in order
                groups = self.variant.index_groups
                into = " into groups all over K (act-order)" if groups is None or groups.text != "K" else " all over K"
                return whole, f"'{name}' puts columns{into}; only rows can be cut"
        axes = [axis for name in self.tensors for axis in self.layout.tensors[name].axes]
        if dim == "K" and any(axis.sections for axis in axes):
            return whole, "its rows have sections, so only rows can be cut"
        fields = [axis for field in self.variant.fields.values() for axis in field.axes]
        step = slicing_step([*axes, *fields], dim, self.sizes, self.shape[1])
        return step, f"its blocks and words have {step} {UNITS[dim]}"

    def _why_not(self, dim: str, size: int) -> str:
        """Why the storage has no weight of so many rows or columns; '' if it has."""
        shape = (size, self.shape[1]) if dim == "N" else (self.shape[0], size)
        is_limited = self.layout.least or self.layout.fixed
        return self.layout.why_unsupported_shape(shape, self.format.sizes(self.params, shape)) if is_limited else ""

    @cached_property
    def has_kernels(self) -> bool:
        """Whether compiled kernels support the lengths of its blocks; torch decodes others."""
        of_weights = [field for field in self.variant.fields.values() if [axis.text for axis in field.axes] == ["N", "K"]]
        kinds = [] if self.storage == PLANAR else [find_number(field.type) for field in of_weights]
        codes = [kind.bits for kind in kinds if kind is not None]
        return all(size % compiled_step(self.format.params[name], codes) == 0 or size >= self.extents[self.format.size_axes[name]]
                   for name, size in self.sizes.items())

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels decode and multiply it on its device."""
        return runs_kernels(self.device) and self.has_kernels

    @property
    def _is_flat(self) -> bool:
        return any(axis.dim == "N*K" for name in self.tensors for axis in self.layout.tensors[name].axes)

    @property
    def indices(self) -> list[str]:
        """The tensors with the groups of columns, or their order."""
        return [name for name, stored in self.layout.tensors.items()
                if name in self.tensors and (name == self.layout.order or stored.dtype == "index")]

    def placed(self, name: str, piece: FieldPiece) -> PlacedPiece | None:
        """A piece of a field in a tensor as strides of bits; None if it is not at such strides."""
        tensor = self.tensors[name]
        return self.layout.tensors[name].placed(piece, tensor.shape, 8 * tensor.element_size(),
                                                self.variant.fields[piece.field].axes, self.shape, self.sizes)

    @property
    def moved_indices(self) -> list[str]:
        """The tensors with the groups of columns, if columns of a group lie anywhere along K (act-order)."""
        return [name for name in self.indices if name != self.layout.order and name not in self.in_order]


def check_weight(packed: object, format: WeightFormat | None = None) -> None:
    """Raises FormatError unless it is a packed weight, and one of the format if that is given; the message says what to do."""
    if not isinstance(packed, PackedWeight):
        shown = f"{str(packed.dtype)[6:]} {list(packed.shape)}" if isinstance(packed, Tensor) else type(packed).__name__
        raise FormatError(f"expected a PackedWeight, not {shown}: `quantize` makes one of floats [N, K], `wrap` of a "
                          "checkpoint's tensors")
    if format is None or packed.format is format:
        return
    name = packed.format.name
    which = f"another spec called {name}" if name == format.name else name
    raise FormatError(f"this is a weight of {which}, not of {format.name}; `packed.format` has the functions for it")


def shape_tensor(shape: tuple[int, int], device: torch.device) -> Tensor:
    """The int64 [2] tensor that stores the shape (N, K) of a weight."""
    return torch.tensor(shape, dtype=torch.int64, device=device)


def _rebuilt(format: WeightFormat, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int],
             params: Mapping[str, int | str], in_order: frozenset[str], known_finite: bool | None, notes: Sequence[str],
             names: Mapping[str, str], is_decoded: bool, stream_info: str) -> PackedWeight:
    return PackedWeight(format, storage, unpickled(tensors), shape, params, in_order=in_order, known_finite=known_finite,
                        notes=notes, names=names, is_decoded=is_decoded, stream_info=stream_info)


def _same_dtype(before: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    if after.dtype != dtype_on(after.device, dtype):
        raise FormatError(f"a packed weight keeps its stored dtypes: {before.dtype} cannot become {after.dtype}; "
                          f"`dequantize({after.dtype})` decodes it")
    return after
