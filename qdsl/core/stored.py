"""Which storage, parameters and shape given tensors are, from their dtypes and shapes alone; and why they are none.

`wrap` asks of tensors in memory, a reader of checkpoints of those that headers list: nothing here needs torch.  Dtypes are
called as in torch: 'float8_e4m3fn'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from qdsl.core.numbers import TORCH_FLOATS, number
from qdsl.core.shapes import Axis, axis, extents, seen_shape

PLANAR = "planar"                                                # the storage that the compiler derives
NO_SHAPE = "; give shape=(N, K)"                                 # how messages end where tensors do not say N and K
INTEGERS = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32", "i64": "int64",
            "index": "int32", "shape": "int64"}
# Tensors of a layer without which its weight is another one: x is multiplied by them first.
OF_X = ("pre_quant_scale", "act_pre_scale", "_weight_act_pre_scale", "prequant_scaling_factor")


def field_dtype(kind: str) -> str:
    """The dtype of a field: codes up to 8 bits and floats that torch lacks are bytes, wider codes and indices int32."""
    number_type = number(kind)
    if kind in TORCH_FLOATS or number_type is None or number_type.bits > 8:
        return TORCH_FLOATS.get(kind, "int32")
    return "int8" if number_type.kind == "signed" else "uint8"


def element_dtype(kind: str) -> str:
    """The dtype of a stored tensor's elements."""
    return INTEGERS.get(kind) or field_dtype(kind)


def resolve_default(values: Sequence[int | str], default: int | str) -> int | str:
    """The value of a parameter among those that fit: the default, else -1, the whole axis, which covers the others."""
    return values[0] if len(values) == 1 else -1 if -1 in values and default not in values else default


@dataclass(frozen=True, slots=True, init=False)
class Stored:
    """A stored tensor: element type and axes.

    The type is 'u8', 'i32', 'e4m3', a parameter, 'index' for a field of that type, or 'shape' for N and K themselves.
    optional: the field that has its default where the tensor is missing; '' for a tensor that must be there.
    bits: where all its fields lie, as runtime/weight/bits.py reads it; nothing where they do not lie at digits.
    adds: what an element that the file holds has more than the one whose bits these are.
    padding: the bits of an element that hold nothing, for readers of checkpoints.  seen: the axes that files give the tensor,
    where they are others.  within: the type of integers in which files hold the elements, several in each, low ones first.
    """

    dtype: str
    axes: tuple[Axis, ...]
    aliases: tuple[str, ...]
    optional: str
    bits: tuple[str, ...]
    adds: int
    padding: int
    seen: tuple[Axis, ...]
    within: str

    def __init__(self, dtype: str, *axes: str, aliases: Sequence[str] = (), optional: str = "", bits: Sequence[str] = (),
                 adds: int = 0, padding: int = 0, seen: Sequence[str] = (), within: str = "") -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "axes", tuple(map(axis, axes)))
        object.__setattr__(self, "aliases", tuple(aliases))
        object.__setattr__(self, "optional", optional)
        object.__setattr__(self, "bits", tuple(bits))
        object.__setattr__(self, "adds", adds)
        object.__setattr__(self, "padding", padding)
        object.__setattr__(self, "seen", tuple(map(axis, seen)))
        object.__setattr__(self, "within", within)

    def elements_of(self, tensor: TensorInfo) -> TensorInfo:
        """A tensor of a file as one of elements, where it is one of integers that hold several."""
        if not self.within or not tensor.shape or tensor.dtype != INTEGERS[self.within]:
            return tensor
        several = int(self.within[1:]) // int(self.dtype[1:])
        return TensorInfo(element_dtype(self.dtype), (*tensor.shape[:-1], tensor.shape[-1] * several))

    def of_file(self, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The dtype and shape in files of a tensor of elements: where integers hold several, their list."""
        several = int(self.within[1:]) // int(self.dtype[1:]) if self.within else 1
        return (dtype, shape) if several == 1 or prod(shape) % several else (INTEGERS[self.within], (prod(shape) // several,))

    def called(self, aliases: Sequence[str]) -> Stored:
        """The same tensor with further aliases."""
        tensor = copy(self)
        object.__setattr__(tensor, "aliases", (*self.aliases, *aliases))
        return tensor

    @property
    def text(self) -> str:
        """The axes as a text: 'N, 18*K/32'."""
        return ", ".join(axis.text for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Description:
    """A format as readers of tensors need it: values of parameters, the default first, and the tensors of its storages.

    sizes: parameters that are block lengths, and the axis each divides.  variants: the tensors by storage, for each choice of
    the parameters named in `by`.  detect: the rules of the spec and of producers for checkpoints.  tables: the numbers that
    small tensors of a weight repeat, as those rules say.  fields: their axes by the same choices, of variants whose blocks are
    runs of weights.  planar: the choices that have the storage `planar`.  fixed: N or K where all weights have the same.
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

    @property
    def singles(self) -> list[str]:
        """The tensors of one number."""
        layouts = [layout for storages in self.variants.values() for layout in storages.values()]
        return list(dict.fromkeys(name for layout in layouts for name, stored in layout.items() if not stored.axes))

    @property
    def spared(self) -> set[str]:
        """The fields that have a value where no tensor says one."""
        return {stored.optional for storages in self.variants.values() for layout in storages.values()
                for stored in layout.values()} - {""}

    @property
    def indices(self) -> set[str]:
        """The fields of them that say where columns belong."""
        return {stored.optional for storages in self.variants.values() for layout in storages.values()
                for stored in layout.values() if stored.dtype == "index"}

    @property
    def in_bytes(self) -> set[str]:
        """The names of tensors of bytes, and their aliases."""
        layouts = [layout for storages in self.variants.values() for layout in storages.values()]
        tensors = [tensor for layout in layouts for tensor in layout.items()]
        return {key for name, stored in tensors if stored.dtype == "u8" for key in (name, *stored.aliases)}

    def layout(self, storage: str, params: Mapping[str, int | str]) -> Mapping[str, Stored]:
        """The tensors of a storage, by all parameters."""
        return self.variants[self.key(params)][storage]

    def key(self, params: Mapping[str, int | str]) -> tuple[int | str, ...]:
        """The choice of the parameters named in `by`."""
        return tuple(params[name] for name in self.by)

    def numbers(self, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, int]:
        """Size parameters as numbers: -1 is the axis that the parameter divides."""
        whole = {"N": shape[0], "K": shape[1]}
        values = {name: int(params.get(name, self.params[name][0])) for name in self.sizes}
        return {name: value if value > 0 else max(1, whole[self.sizes[name]]) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and shape of a tensor whose data need not be loaded.  values: N and K, of the tensor that says them."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """What a given tensor is in a storage: its name there, and the dtype and the shape to view it in."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to read the tensors: what each of the storage's is among those given.

    as_stored: no tensor has all its axes run together, as some packages do.  exact: all have their very shapes; else axes of
    one element are more or less than the storage's, experts have an axis for themselves, or records are seen in other shapes.
    """

    storage: str
    params: Mapping[str, int | str]
    shape: tuple[int, int]
    tensors: Mapping[str, Use]
    as_stored: bool
    exact: bool


class LayoutMismatch(ValueError):
    """Tensors do not have the dtypes and shapes of a format.  reached: how many checks the nearest layout passed."""

    def __init__(self, reached: int, message: str) -> None:
        super().__init__(message)
        self.reached = reached


def fits(format: Description, tensors: Mapping[str, TensorInfo], shape: tuple[int, int] | None = None, storage: str | None = None,
         params: Mapping[str, int | str] | None = None) -> list[Fit]:
    """Every way to read the tensors, those with given (N, K), storage and parameters alone.

    Raises LayoutMismatch with the reason of the nearest miss, the closest reading, where there is none.
    """
    matches: list[Fit] = []
    nearest = LayoutMismatch(-1, f"{format.name} has no storage '{storage}' here")
    requested = dict(params or {})
    for choice, name, layout in _candidates(format, storage, requested):
        label = f"{format.name}.{name}" + "".join(f" {key}={value}" for key, value in choice.items())
        try:
            matches += _fits(format, layout, name, label, tensors, shape, {**requested, **choice})
        except LayoutMismatch as miss:
            nearest = max(nearest, miss, key=lambda mismatch: mismatch.reached)
    if not matches:
        raise nearest
    matches = [fit for fit in matches if fit.as_stored] or matches
    return [fit for fit in matches if not any(_leaves_out(fit, other) for other in matches)]


def _leaves_out(fit: Fit, other: Fit) -> bool:
    """Whether another storage of the same weight takes all tensors that this one takes, and more, such as zero points."""
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
          shape: tuple[int, int] | None, params: Mapping[str, int | str]) -> list[Fit]:
    keys = named(layout, tensors)
    missing = [name for name, stored in layout.items() if not stored.optional and name not in keys]
    if missing:
        raise LayoutMismatch(0, f"{label} needs tensor '{missing[0]}'; given are {', '.join(tensors) or 'none'}")
    present = _rows_of_experts(layout, {name: layout[name].elements_of(tensors[key]) for name, key in keys.items()})
    chosen, dtypes = _typed(format, layout, label, present, params)
    declared = _declared_shape(layout, label, present, shape) or shape
    solved = declared or _solved(layout, label, present, _lengths(format, chosen), format.fixed)
    for dim, extent in zip("NK", solved, strict=True):
        if format.fixed.get(dim, extent) != extent:
            raise LayoutMismatch(2, f"{label} is for weights with {dim} = {format.fixed[dim]}, not {list(solved)}")
    matches: list[Fit] = []
    nearest = LayoutMismatch(0, "")
    for sizes in _open(format, chosen):
        try:
            shapes = _shaped(layout, label, present, solved, format.numbers({**chosen, **sizes}, solved), declared is not None)
        except LayoutMismatch as miss:
            nearest = max(nearest, miss, key=lambda mismatch: mismatch.reached)
            continue
        values = {**chosen, **sizes}
        complete = {name: own[own.index(values.get(name, own[0]))] for name, own in format.params.items()}
        uses = {name: Use(keys[name], dtypes[name], shapes[name]) for name in present}
        alike = all(_squeezed(shapes[name]) == _squeezed(tensor.shape) for name, tensor in present.items())
        exact = all(shapes[name] == tensors[keys[name]].shape for name in present)
        matches.append(Fit(storage, complete, solved, uses, alike, exact))
    if not matches:
        raise nearest
    return matches


def _lengths(format: Description, params: Mapping[str, int | str]) -> dict[str, int]:
    """The block lengths that are given, or that have one value alone."""
    values = {name: params.get(name, format.params[name][0]) for name in format.sizes
              if name in params or len(format.params[name]) == 1}
    return {name: value for name, value in values.items() if isinstance(value, int) and value > 0}


def named(layout: Mapping[str, Stored], tensors: Mapping[str, object]) -> dict[str, str]:
    """What a storage's tensors are called among those given, by their own names or by aliases."""
    keys: dict[str, str] = {}
    for name, stored in layout.items():
        key = next((key for key in (name, *stored.aliases) if key in tensors), None)
        if key is not None:
            keys[name] = key
    return keys


def _rows_of_experts(layout: Mapping[str, Stored], tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors of experts [E, N, ...] as those of one weight of E * N rows, where all of them have that axis in front."""
    more = {tensor.shape[0] if len(tensor.shape) == 1 + len(layout[name].axes) > 1 and layout[name].axes[0].dim == "N" else 0
            for name, tensor in tensors.items()}
    if len(more) > 1 or 0 in more:
        return dict(tensors)
    return {name: TensorInfo(tensor.dtype, (tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
            for name, tensor in tensors.items()}


def _typed(format: Description, layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo],
           params: Mapping[str, int | str]) -> tuple[dict[str, int | str], dict[str, str]]:
    """Parameters that dtypes decide, and the dtypes of the storage: 8-bit floats may come as raw bytes."""
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
    """N and K from the tensor that says them."""
    for name, tensor in tensors.items():
        if layout[name].dtype == "shape" and tensor.values:
            if len(tensor.values) != 2 or min(tensor.values) < 0 or shape not in (None, tensor.values):
                raise LayoutMismatch(2, f"{label}: '{name}' says {list(tensor.values)}{f', not {list(shape)}' if shape else ''}")
            return tensor.values[0], tensor.values[1]
    return None


def _solved(layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo], sizes: Mapping[str, int],
            fixed: Mapping[str, int]) -> tuple[int, int]:
    """N and K from the axes that decide them, else from how many elements a tensor has.  sizes: block lengths that are known.

    fixed: what N or K is where no axis decides it.
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
        solved |= _counted(layout[name].axes, prod(tensor.shape), solved, sizes) if len(solved) == 1 else {}
    if missing := [dim for dim in ("N", "K") if dim not in solved]:
        shown_all = ", ".join(f"'{name}' {list(tensor.shape)} is [{layout[name].text}]" for name, tensor in tensors.items())
        raise LayoutMismatch(1, f"{label}: the tensors do not say what {' and '.join(missing)} are ({shown_all}){NO_SHAPE}")
    return solved["N"], solved["K"]


def _counted(axes: Sequence[Axis], count: int, dims: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The one of N and K that is not in `dims`, from a tensor's number of elements; nothing where that does not decide it."""
    missing = "K" if "N" in dims else "N"
    elements, step, missing_axes = 1, 1, 0
    for own in axes:
        if own.sections or (by := own.solve(own.words, sizes)) is None:
            return {}
        elements, step = elements * own.words, step * by
        for dim in own.dim.split("*"):
            elements, missing_axes = elements * dims.get(dim, 1), missing_axes + (dim == missing)
    return {missing: count * step // elements} if missing_axes == 1 and elements and count * step % elements == 0 else {}


def _open(format: Description, chosen: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    """All values of parameters that dtypes and names leave open: block sizes, and types of codes in bytes."""
    names = [name for name in format.params if name not in chosen]
    for values in product(*(format.params[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _shaped(layout: Mapping[str, Stored], label: str, tensors: Mapping[str, TensorInfo], shape: tuple[int, int],
            sizes: Mapping[str, int], is_declared: bool) -> dict[str, tuple[int, ...]]:
    """Exactly the storage's shapes.  Records that have the last axis for themselves may be seen in any shape.

    is_declared: N and K come from the caller or a tensor, not from these shapes; then axes may be flattened into one.
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
        shown_as = seen_shape(stored.seen, *shape, sizes, prod(wanted)) if stored.seen else None
        allowed = (wanted, shown_as, (prod(wanted),) if is_declared else None)
        fit = [_squeezed(extents_) for extents_ in allowed if extents_ is not None]
        if not records and _squeezed(tensor.shape) not in fit:
            shown = "".join(f", {key} = {value}" for key, value in sizes.items())
            raise LayoutMismatch(3 + reached, f"{label}: tensor '{name}' has shape {list(tensor.shape)}; the format needs "
                                      f"[{stored.text}] = {list(wanted)} for N = {shape[0]}, K = {shape[1]}{shown}")
        shapes[name] = wanted
    return shapes


def _squeezed(shape: Sequence[int]) -> list[int]:
    """Without axes of one element, which packages drop and add; some run all axes together."""
    return [extent for extent in shape if extent != 1]
