"""Finds the storages, parameters and shapes that fit given tensors, from their dtypes and shapes; or why none fits.

`wrap` asks for tensors in memory, a reader of checkpoints for those in headers, so this module does not import torch.  Dtypes
have torch's names: 'float8_e4m3fn'.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from qdsl.core.numbers import TORCH_FLOATS, find_number
from qdsl.core.shapes import Axis, axis, extents, own_value, shape_in_files
from qdsl.core.slices import FieldPiece, PlacedPiece, called, fill, place_piece

PLANAR = "planar"                                                # the storage that the compiler derives
NO_SHAPE = "; give shape=(N, K)"                                 # ending of messages if tensors do not determine N and K
INTEGERS = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32", "i64": "int64",
            "index": "int32", "shape": "int64"}
SHORTER = {"int8": 4, "int16": 2}                                # integers that may be parts of a word -> how many
EXPONENTS = "float8_e8m0fnu"                                     # torch's dtype of powers of two, which files also have as bytes
INPUT_SCALE = "input_scale"                                      # the tensor next to a weight by which x is quantized
OF_QUANTIZED_X = (INPUT_SCALE, "input_zero_point", "input_global_scale")     # all tensors by which x is quantized
# Tensors that x is multiplied by before the weight, so that the weight alone is not equivalent.
OF_X = ("pre_quant_scale", "act_pre_scale", "_weight_act_pre_scale", "prequant_scaling_factor")


def field_dtype(kind: str) -> str:
    """The dtype of a field: uint8 for codes up to 8 bits and floats that torch lacks, int32 for wider codes and indices."""
    number_type = find_number(kind)
    if kind in TORCH_FLOATS or number_type is None or number_type.bits > 8:
        return TORCH_FLOATS.get(kind, "int32")
    return "int8" if number_type.kind == "signed" else "uint8"


def element_dtype(kind: str) -> str:
    """The dtype of a stored tensor's elements."""
    return INTEGERS.get(kind) or field_dtype(kind)


def resolve_default(values: Sequence[int | str], default: int | str) -> int | str:
    """The value of a parameter among those that fit: the default, else -1, the whole axis, which includes the others."""
    return values[0] if len(values) == 1 else -1 if -1 in values and default not in values else default


@dataclass(frozen=True, slots=True, init=False)
class Stored:
    """A stored tensor: element type and axes.

    The type is 'u8', 'i32', 'e4m3', a parameter, 'index' for a field of that type, or 'shape' for N and K.  optional: the field
    that has its default if the tensor is missing; '' for a required tensor.  slices: the positions of all its fields' bits, as
    core/slices.py takes them, or `field`, the one that the tensor is.  row_codes: the same for a code per weight that stands for
    other fields.  words: (axis, count), if records hold so many elements along an axis that are no neighbours; positions are then
    those in a tensor whose last axis has a record's words.  adds, flips: what is added to an element with these bits in files,
    and the bits that are flipped.  padding: unused bits of an element, for readers of checkpoints.  seen: the axes in files, if
    different.  within: the integer type in files that holds several elements, low ones first.  shorter: the axis along which
    files may have shorter integers, several of which are an element, low ones first; None if they may not.
    """

    dtype: str
    axes: tuple[Axis, ...]
    aliases: tuple[str, ...]
    optional: str
    slices: tuple[FieldPiece, ...]
    row_codes: tuple[FieldPiece, ...]
    words: tuple[int, ...]
    adds: int
    flips: int
    padding: int
    seen: tuple[Axis, ...]
    within: str
    shorter: int | None

    def __init__(self, dtype: str, *axes: str, aliases: Sequence[str] = (), optional: str = "", field: str = "",
                 slices: Sequence[Any] = (), row_codes: Sequence[Any] = (), words: Sequence[int] = (), adds: int = 0,
                 flips: int = 0, padding: int = 0, seen: Sequence[str] = (), within: str = "") -> None:
        pieces, codes = (tuple(called(FieldPiece, piece) for piece in pieces)
                         for pieces in (((field, 0, range(len(axes))),) if field else slices, row_codes))
        fill(self, dtype=dtype, axes=tuple(map(axis, axes)), aliases=tuple(aliases), optional=optional, slices=pieces,
             row_codes=codes, words=tuple(words), adds=adds, flips=flips, padding=padding, seen=tuple(map(axis, seen)),
             within=within, shorter=None)

    def elements_of(self, tensor: TensorInfo) -> TensorInfo:
        """A tensor of a file with its elements unpacked from integers that hold several, or joined; exponents as bytes."""
        if several := self.several(tensor):
            shape = [extent // several if axis == self.shorter else extent for axis, extent in enumerate(tensor.shape)]
            return TensorInfo(element_dtype(self.dtype), tuple(shape))
        if self.dtype == "u8" and tensor.dtype == EXPONENTS:
            return TensorInfo("uint8", tensor.shape, tensor.values)
        if not self.within or not tensor.shape or tensor.dtype != INTEGERS[self.within]:
            return tensor
        several = int(self.within[1:]) // int(self.dtype[1:])
        return TensorInfo(element_dtype(self.dtype), (*tensor.shape[:-1], tensor.shape[-1] * several))

    def several(self, tensor: TensorInfo) -> int:
        """How many shorter integers of a file are an element; 0 for elements as they are."""
        count = SHORTER.get(tensor.dtype, 0)
        is_alike = count and self.shorter is not None and not self.words and len(tensor.shape) == len(self.axes)
        return count if is_alike and self.shorter is not None and tensor.shape[self.shorter] % count == 0 else 0

    def of_file(self, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The dtype and shape in files: a list of integers, if they hold several elements."""
        several = int(self.within[1:]) // int(self.dtype[1:]) if self.within else 1
        return (dtype, shape) if several == 1 or prod(shape) % several else (INTEGERS[self.within], (prod(shape) // several,))

    @property
    def is_column(self) -> bool:
        """Whether it is [N, 1], one number per row."""
        return [axis.text for axis in self.axes] == ["N", "1"]

    def with_aliases(self, aliases: Sequence[str], shorter: int | None = None) -> Stored:
        """The same tensor with further aliases, or with shorter integers along an axis."""
        tensor = copy(self)
        object.__setattr__(tensor, "aliases", (*self.aliases, *aliases))
        object.__setattr__(tensor, "shorter", shorter)
        return tensor

    @property
    def fields(self) -> set[str]:
        """The fields whose bits `slices` places."""
        return {piece.field for piece in self.slices}

    def placed(self, piece: FieldPiece, shape: Sequence[int], bits: int, axes: Sequence[Axis], weight: tuple[int, int],
               sizes: Mapping[str, int]) -> PlacedPiece | None:
        """A piece in a tensor of this shape and bits per element, as strides of bits; None if it is not at such strides.

        axes: of its field.  weight: N and K.
        """
        strides, start, section = [bits * prod(shape[axis + 1:]) for axis in range(len(shape))], 0, piece.further.get("section")
        if self.words or self.flips:
            return None
        if section is not None:
            shapes = [extents(own, *weight, sizes) or () for own in self.axes[-1].sections]
            start = bits * sum(map(prod, shapes[:section]))
            strides[-1:] = [bits * prod(shapes[section][axis + 1:]) for axis in range(len(shapes[section]))]
        return place_piece(piece, start, strides, bits * prod(shape), [axis.rounded(*weight, sizes) for axis in axes])

    @property
    def text(self) -> str:
        """The axes as a text: 'N, 18*K/32'."""
        return ", ".join(axis.text for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Description:
    """A format for readers of tensors: values of parameters, the default first, and the tensors of its storages.

    sizes: parameters that are block lengths, and the axis that each divides.  variants: the tensors by storage, for each choice
    of the parameters in `by`.  detect: the rules of the spec and of producers for checkpoints.  tables: numbers that small
    tensors repeat, according to these rules.  fields: axes by the same choices, for variants whose blocks are runs of weights.
    planar: the choices with a storage `planar`.  fixed: N or K, if all weights have the same.  transient: storages that no file
    has, made when a checkpoint is loaded.  quantizers: the values of each option of the encode scheme, for the choices that have
    one; () means any positive number.
    """

    name: str
    params: Mapping[str, tuple[int | str, ...]]
    sizes: Mapping[str, str]
    by: tuple[str, ...]
    variants: Mapping[tuple[int | str, ...], Mapping[str, Mapping[str, Stored]]]
    detect: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fields: Mapping[tuple[int | str, ...], Mapping[str, tuple[Axis, ...]]] = field(default_factory=dict)
    planar: frozenset[tuple[int | str, ...]] = frozenset()
    fixed: Mapping[str, int] = field(default_factory=dict)
    transient: tuple[str, ...] = ()
    quantizers: Mapping[tuple[int | str, ...], Mapping[str, tuple[str | bool, ...]]] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, tuple[str | bool, ...]]:
        """The values of each option of the encode scheme."""
        return self.quantizers.get(next(iter(self.variants)), {})

    @property
    def layouts(self) -> list[Mapping[str, Stored]]:
        """The tensors of every storage, for every choice of parameters."""
        return [layout for storages in self.variants.values() for layout in storages.values()]

    @property
    def tensors(self) -> list[tuple[str, Stored]]:
        """All of these tensors with their names."""
        return [tensor for layout in self.layouts for tensor in layout.items()]

    @property
    def storages(self) -> list[str]:
        return list(dict.fromkeys(name for storages in self.variants.values() for name in storages))

    @property
    def singles(self) -> list[str]:
        """The tensors of one number."""
        return list(dict.fromkeys(name for name, stored in self.tensors if not stored.axes))

    @property
    def spared(self) -> set[str]:
        """The fields that have a default if no tensor stores them."""
        return {stored.optional for _, stored in self.tensors} - {""}

    @property
    def indices(self) -> set[str]:
        """The optional fields that assign columns to groups or places."""
        return {stored.optional for _, stored in self.tensors if stored.dtype == "index"}

    @property
    def columns(self) -> set[str]:
        """The names and aliases of tensors [N, 1], of one number per row."""
        return {key for name, stored in self.tensors if stored.is_column for key in (name, *stored.aliases)}

    @property
    def in_bytes(self) -> set[str]:
        """The names and aliases of tensors of bytes."""
        return {key for name, stored in self.tensors if stored.dtype == "u8" for key in (name, *stored.aliases)}

    @property
    def claimed(self) -> tuple[str, ...]:
        """The storages that only a header or settings tell from others with the same names and shapes."""
        return tuple(self.detect.get("claimed", ()))

    def layout(self, storage: str, params: Mapping[str, int | str]) -> Mapping[str, Stored]:
        """The tensors of a storage for these parameters."""
        return self.variants[self.key(params)][storage]

    def missing_scales(self, storage: str, params: Mapping[str, int | str], names: Container[str]) -> list[str]:
        """Optional tensors of a parameter's type that are not among `names`: without them a weight is taken for a plain cast."""
        return [name for name, stored in self.layout(storage, params).items()
                if stored.optional and stored.dtype in self.params and name not in names]

    def key(self, params: Mapping[str, int | str]) -> tuple[int | str, ...]:
        """The choice of the parameters named in `by`."""
        return tuple(params[name] for name in self.by)

    def sizes_for(self, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, int]:
        """Size parameters as numbers; -1 becomes the length of the axis that the parameter divides."""
        whole = {"N": shape[0], "K": shape[1]}
        values = {name: int(params.get(name, self.params[name][0])) for name in self.sizes}
        return {name: value if value > 0 else max(1, whole[self.sizes[name]]) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and shape of a tensor that need not be loaded.  values: N and K, for a tensor that states them."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorUse:
    """The role of a given tensor in a storage: its name there, and the dtype and shape to view it in."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageFit:
    """One interpretation of the tensors: the given tensor for each of the storage's.

    as_stored: no tensor has all axes flattened, as some packages do.  exact: all shapes are equal; else axes of length 1 differ,
    experts have their own axis, or records have other shapes.
    """

    storage: str
    params: Mapping[str, int | str]
    shape: tuple[int, int]
    tensors: Mapping[str, TensorUse]
    as_stored: bool
    exact: bool


class LayoutMismatch(ValueError):
    """Tensors do not have the dtypes and shapes of a format.  reached: how many checks the nearest layout passed."""

    def __init__(self, reached: int, message: str) -> None:
        super().__init__(message)
        self.reached = reached


def storage_fits(format: Description, tensors: Mapping[str, TensorInfo], shape: tuple[int, int] | None = None,
                 storage: str | None = None, params: Mapping[str, int | str] | None = None) -> list[StorageFit]:
    """All interpretations of the tensors that agree with the given (N, K), storage and parameters.

    Raises LayoutMismatch with the reason of the nearest miss if there is none.
    """
    matches: list[StorageFit] = []
    misses = [(-1, 0, LayoutMismatch(-1, f"{format.name} has no storage '{storage}' here"))]       # and how many names match
    requested = dict(params or {})
    for choice, name, layout in _candidates(format, storage, requested):
        label = f"{format.name}.{name}" + "".join(f" {key}={value}" for key, value in choice.items())
        try:
            matches += _fits(format, layout, name, label, tensors, shape, {**requested, **choice})
        except LayoutMismatch as miss:
            misses.append((miss.reached, len(match_names(layout, tensors)), miss))
    if not matches:
        raise max(misses, key=lambda own: own[:2])[2]
    matches = [fit for fit in matches if fit.as_stored] or matches
    return [fit for fit in matches if not any(_leaves_out(fit, other) for other in matches)]


def _leaves_out(fit: StorageFit, other: StorageFit) -> bool:
    """Whether another storage of the same weight uses all tensors of this one and more, such as zero points."""
    taken, more = ({use.name for use in one.tensors.values()} for one in (fit, other))
    return taken < more and (fit.params, fit.shape) == (other.params, other.shape)


def _candidates(format: Description, storage: str | None, requested: Mapping[str, int | str],
                ) -> Iterator[tuple[dict[str, int | str], str, Mapping[str, Stored]]]:
    for key, storages in format.variants.items():
        choice = dict(zip(format.by, key, strict=True))
        if all(requested.get(name, value) == value for name, value in choice.items()):
            for name, layout in storages.items():
                if storage in (None, name):
                    yield choice, name, layout


def _fits(format: Description, layout: Mapping[str, Stored], storage: str, label: str, tensors: Mapping[str, TensorInfo],
          shape: tuple[int, int] | None, params: Mapping[str, int | str]) -> list[StorageFit]:
    keys = match_names(layout, tensors)
    missing = [name for name, stored in layout.items() if not stored.optional and name not in keys]
    if missing:
        names = missing[0], *layout[missing[0]].aliases          # in the spelling of the others: `_scales` beside `_blocks`
        spelling = next(((name, *layout[name].aliases).index(key) for name, key in keys.items()), 0)
        needed, leaves = (names[spelling:] or names)[0], ", ".join(tensors) or "none"
        raise LayoutMismatch(0, f"{label} needs tensor '{needed}'; given are {leaves}")
    own = {keys.get(name, name): stored for name, stored in layout.items()}              # by the names that messages have
    present = _rows_of_experts(own, {key: own[key].elements_of(tensors[key]) for key in keys.values()})
    chosen, dtypes = _params_from_dtypes(format, own, label, present, params)
    declared = _declared_shape(own, label, present, shape) or shape
    solved = declared or _solve_shape(own, label, present, _known_block_lengths(format, chosen), format.fixed)
    for dim, extent in zip("NK", solved, strict=True):
        if format.fixed.get(dim, extent) != extent:
            raise LayoutMismatch(2, f"{label} is for weights with {dim} = {format.fixed[dim]}, not {list(solved)}")
    matches: list[StorageFit] = []
    nearest = LayoutMismatch(0, "")
    for sizes in _open_params(format, chosen):
        try:
            shapes = _shapes_of(own, label, present, solved, format.sizes_for({**chosen, **sizes}, solved), declared is not None)
        except LayoutMismatch as miss:
            nearest = max(nearest, miss, key=lambda mismatch: mismatch.reached)
            continue
        values = {**chosen, **sizes}
        complete = {name: own_value(every, values.get(name, every[0])) for name, every in format.params.items()}
        uses = {name: TensorUse(key, dtypes[key], shapes[key]) for name, key in keys.items()}
        alike = all(_squeezed(shapes[key]) == _squeezed(tensor.shape) for key, tensor in present.items())
        exact = all(shapes[key] == tensors[key].shape for key in present)
        matches.append(StorageFit(storage, complete, solved, uses, alike, exact))
    if not matches:
        raise nearest
    return matches


def _known_block_lengths(format: Description, params: Mapping[str, int | str]) -> dict[str, int]:
    """The block lengths that are given, or that have only one value."""
    values = {name: params.get(name, format.params[name][0]) for name in format.sizes
              if name in params or len(format.params[name]) == 1}
    return {name: value for name, value in values.items() if isinstance(value, int) and value > 0}


def match_names(layout: Mapping[str, Stored], tensors: Mapping[str, object]) -> dict[str, str]:
    """The given names of a storage's tensors, by their own names or by aliases."""
    keys: dict[str, str] = {}
    for name, stored in layout.items():
        key = next((key for key in (name, *stored.aliases) if key in tensors), None)
        if key is not None:
            keys[name] = key
    return keys


def _rows_of_experts(layout: Mapping[str, Stored], tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors of experts [E, N, ...] as those of one weight of E * N rows, if all have that first axis."""
    more = {tensor.shape[0] if len(tensor.shape) == 1 + len(layout[name].axes) > 1 and layout[name].axes[0].dim == "N" else 0
            for name, tensor in tensors.items()}
    if len(more) > 1 or 0 in more:
        return dict(tensors)
    return {name: TensorInfo(tensor.dtype, (tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
            for name, tensor in tensors.items()}


def _params_from_dtypes(format: Description, layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo],
                        params: Mapping[str, int | str]) -> tuple[dict[str, int | str], dict[str, str]]:
    """Parameters from dtypes, and the storage's dtypes; 8-bit floats may be given as raw bytes."""
    chosen = dict(params)
    dtypes: dict[str, str] = {}
    for name, tensor in tensors.items():
        kind = layout[name].dtype
        kinds = [str(chosen[kind])] if kind in chosen else [str(v) for v in format.params.get(kind, (kind,))]
        fit = [k for k in kinds if tensor.dtype == element_dtype(k)] or \
            [k for k in kinds if tensor.dtype == "uint8" and k in TORCH_FLOATS and "float8" in TORCH_FLOATS[k]]
        if not fit:
            wanted = " or ".join(element_dtype(k) for k in kinds)
            raise LayoutMismatch(1, f"{label}: tensor '{name}' has dtype {tensor.dtype}; the format needs {wanted}")
        if kind in format.params:
            chosen[kind] = fit[0]
        dtypes[name] = element_dtype(fit[0])
    return chosen, dtypes


def _declared_shape(layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo], shape: tuple[int, int] | None,
          ) -> tuple[int, int] | None:
    """N and K from the tensor that states them."""
    for name, tensor in tensors.items():
        if layout[name].dtype == "shape" and tensor.values:
            if len(tensor.values) != 2 or min(tensor.values) < 0 or shape not in (None, tensor.values):
                raise LayoutMismatch(2, f"{label}: '{name}' says {list(tensor.values)}{f', not {list(shape)}' if shape else ''}")
            return tensor.values[0], tensor.values[1]
    return None


def _solve_shape(layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo], sizes: Mapping[str, int],
                 fixed: Mapping[str, int]) -> tuple[int, int]:
    """N and K from the axes that determine them, else from a tensor's number of elements.  sizes: known block lengths.

    fixed: N or K if no axis determines it.
    """
    dims: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        shown = layout[name].seen if len(layout[name].seen) == len(tensor.shape) else layout[name].axes
        for own, extent in zip(shown, tensor.shape, strict=False) if len(shown) == len(tensor.shape) else ():
            value = own.solve(extent, sizes)
            dim = own.solved_dim
            if value is None or dim not in ("N", "K"):
                continue
            expected, by = dims.setdefault(dim, (value, name))
            if expected != value:
                raise LayoutMismatch(2, f"{label}: '{by}' {list(tensors[by].shape)} says {dim} = {expected}, but '{name}' "
                                f"{list(tensor.shape)} is [{', '.join(axis.text for axis in shown)}], so {dim} = {value}")
    solved = {**fixed, **{dim: value for dim, (value, _) in dims.items()}}
    for name, tensor in tensors.items():
        solved |= _solve_by_count(layout[name].axes, prod(tensor.shape), solved, sizes) if len(solved) == 1 else {}
    if missing := [dim for dim in ("N", "K") if dim not in solved]:
        shown_all = ", ".join(f"'{name}' {list(tensor.shape)} is [{layout[name].text}]" for name, tensor in tensors.items())
        raise LayoutMismatch(1, f"{label}: the tensors do not say what {' and '.join(missing)} are ({shown_all}){NO_SHAPE}")
    return solved["N"], solved["K"]


def _solve_by_count(axes: Sequence[Axis], count: int, dims: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The one of N and K that is missing in `dims`, from a tensor's number of elements; empty if that does not determine it."""
    missing = "K" if "N" in dims else "N"
    elements, step, missing_axes = 1, 1, 0
    for own in axes:
        if own.sections or (by := own.solve(own.words, sizes)) is None:
            return {}
        elements, step = elements * own.words, step * by
        for dim in own.dim.split("*"):
            elements, missing_axes = elements * dims.get(dim, 1), missing_axes + (dim == missing)
    return {missing: count * step // elements} if missing_axes == 1 and elements and count * step % elements == 0 else {}


def _open_params(format: Description, chosen: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    """All values of parameters that dtypes and names leave open: block sizes, and types of codes in bytes."""
    names = [name for name in format.params if name not in chosen]
    for values in product(*(format.params[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _shapes_of(layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo], shape: tuple[int, int],
               sizes: Mapping[str, int], is_declared: bool) -> dict[str, tuple[int, ...]]:
    """The storage's exact shapes.  Records with the last axis to themselves may have any shape.

    is_declared: N and K come from the caller or a tensor, not from these shapes; then axes may be flattened.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for reached, (name, tensor) in enumerate(tensors.items()):
        stored = layout[name]
        if len(tensor.shape) != len(stored.axes) and any(axis.dim == "?" for axis in stored.axes):
            raise LayoutMismatch(2, f"{label}: tensor '{name}' has shape {list(tensor.shape)}; the format needs [{stored.text}]")
        wanted = extents(stored.axes, *shape, sizes, tensor.shape)
        if wanted is None:
            bad = next(a for a in stored.axes if a.extent(*shape, sizes) is None)
            raise LayoutMismatch(2, f"{label}: {bad.wrong(*shape, sizes)}")
        records = stored.axes and stored.axes[-1].dim == "1" and wanted[-1] > 1 and prod(tensor.shape) == prod(wanted)
        shown_as = shape_in_files(stored.seen, *shape, sizes, prod(wanted)) if stored.seen else None
        flat = [(prod(wanted),)] + [(prod(wanted), 1)] * (len(_squeezed(wanted)) > 1)    # [2, 1] for [1, 2] is transposed
        is_flat = is_declared and tensor.shape in flat
        if not records and not is_flat and not any(_is_shape(tensor.shape, own) for own in (wanted, shown_as) if own is not None):
            shown = "".join(f", {key} = {value}" for key, value in sizes.items())
            raise LayoutMismatch(3 + reached, f"{label}: tensor '{name}' has shape {list(tensor.shape)}; the format needs "
                                      f"[{stored.text}] = {list(wanted)} for N = {shape[0]}, K = {shape[1]}{shown}")
        shapes[name] = wanted
    return shapes


def _is_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is the wanted one, or has axes of length 1 more or less.

    With as many axes it must be equal: [1, 2] for [2, 1] is a transposed tensor.
    """
    shorter, longer = sorted((shape, wanted), key=len)
    others = iter(longer)
    return _squeezed(shape) == _squeezed(wanted) and all(extent in others for extent in shorter)


def _squeezed(shape: Sequence[int]) -> list[int]:
    """The shape without axes of length 1, which packages drop and add; some flatten all axes."""
    return [extent for extent in shape if extent != 1]
