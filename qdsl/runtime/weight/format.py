"""A format at work: the functions that a generated module offers, driven by what the module says of itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.core.overflowed_zeros import OVERFLOWED_ZEROS, has_overflowed_zeros
from qdsl.core.shapes import Axis, extents
from qdsl.core.stored import OF_X, Description, resolve_default
from qdsl.runtime.cpu import int4
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.triton import on_device, runs_kernels
from qdsl.runtime.torch import experts, lookup, ops
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear, embedding_class, linear_class
from qdsl.runtime.torch.linear import mode_of, tile_weights
from qdsl.runtime.torch.private_apis import storage_key
from qdsl.runtime.weight import convert, order, streams, tiles
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.convert_format import convert_format
from qdsl.runtime.weight.device_dtypes import dtype_on
from qdsl.runtime.weight.layout import PLANAR, Storage, Variant
from qdsl.runtime.weight.match import Match, matches, torch_dtype
from qdsl.runtime.weight.packed import FormatError, PackedWeight, shape_tensor, stream_errors
from qdsl.runtime.weight.requantize import Report, compare

LARGEST = 1 << 60                                                # weights, whose bytes and bits still fit an int64


def _is_own_memory(out: Tensor, packed: PackedWeight) -> bool:
    """Whether a tensor that is written has a place for each element, outside of the tensors that are read meanwhile."""
    if out.layout is not torch.strided or out.device.type == "meta":
        return True
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        return False
    return all(tensor.layout is not torch.strided or storage_key(tensor) != storage_key(out)
               for tensor in packed.tensors.values())


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a format without touching a tensor."""

    name: str
    title: str
    source: str
    formula: str
    params: Mapping[str, tuple[int | str, ...]]
    storages: tuple[str, ...]
    variants: Mapping[tuple[int | str, ...], Variant]
    detect: Mapping[str, Any]


class Format:
    """One format.

    params: every parameter's values, the default first.  sizes: parameters that are block lengths, and the axis each
    divides.  variants: what depends on the parameters named in `by`, keyed by their values.  digest: of the spec's text; two
    formats with one name and one digest are the same format.
    """

    def __init__(self, *, name: str, title: str, source: str, formula: str, variants: Mapping[tuple[int | str, ...], Variant],
                 by: Sequence[str] = (), params: Mapping[str, tuple[int | str, ...]] | None = None,
                 sizes: Mapping[str, str] | None = None, detect: Mapping[str, Any] | None = None, digest: str = "") -> None:
        self.name = name
        self.params = dict(params or {})
        self.variants = dict(variants)
        self.by = tuple(by)
        self.size_axes = dict(sizes or {})
        tensors = {key: {name: storage.tensors for name, storage in variant.storages.items()}
                   for key, variant in self.variants.items()}
        axes = {key: {name: field.axes for name, field in variant.fields.items()} for key, variant in self.variants.items()
                if variant.cuts[1] != "1"}
        self.description = Description(name, self.params, self.size_axes, self.by, tensors, fields=axes, planar=frozenset(
            key for key, storages in tensors.items() if PLANAR in storages))
        self.storages = tuple(dict.fromkeys(storage for variant in self.variants.values() for storage in variant.storages))
        self.spec = Spec(name, title, source, formula, self.params, self.storages, self.variants, dict(detect or {}))
        written = next(iter(self.variants.values())).decode.__module__
        self.__module__ = written.rpartition(".")[0] if self.by else written
        self.key = ops.register_format(self, digest)

    def __reduce__(self) -> str:
        """A format is copied and pickled as what it is: the FORMAT of its generated module."""
        return "FORMAT"

    # -- parameters ---------------------------------------------------------------------------------------------------

    def variant(self, params: Mapping[str, int | str]) -> Variant:
        return self.variants[tuple(params[name] for name in self.by)]

    def complete(self, params: Mapping[str, int | str]) -> dict[str, int | str]:
        """All parameters: the given ones, checked, and the defaults of the others.  Raises FormatError."""
        for name, value in params.items():
            if name not in self.params:
                options = next(iter(self.variants.values())).options
                raise FormatError(f"{self.name} has no parameter '{name}'; it has {', '.join(self.params) or 'none'}"
                                  + (f", and the options {', '.join(options)} to quantize" if options else ""))
            if value not in self.params[name]:
                raise FormatError(f"{self.name}: {name} is one of {', '.join(map(str, self.params[name]))}, not {value}")
        return {name: values[values.index(params.get(name, values[0]))] for name, values in self.params.items()}

    def sizes(self, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, int]:
        """Size parameters as numbers: -1 is the axis that the parameter divides."""
        return self.description.numbers(params, shape)

    def storage(self, name: str | None, params: Mapping[str, int | str]) -> tuple[str, Storage]:
        """A storage by its name, or the default.  Raises FormatError."""
        variant = self.variant(params)
        chosen = name or next(iter(variant.storages))
        if chosen not in variant.storages:
            of_params = f" for {', '.join(f'{key}={params[key]}' for key in self.by)}" if chosen in self.storages else ""
            raise FormatError(f"{self.name} has no storage '{chosen}'{of_params}; it has {', '.join(variant.storages)}")
        return chosen, variant.storages[chosen]

    # -- from and to checkpoints --------------------------------------------------------------------------------------

    def wrap(self, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None, storage: str | None = None, *,
             verify: bool = False, **params: int | str) -> PackedWeight:
        """A checkpoint's own tensors, by their names, as a weight; nothing is copied.

        shape is (N, K), needed only where the tensors do not decide it.  Parameters and storage are found from dtypes and
        shapes; given ones are checked.  Indices are checked here: wrap tensors again that were changed in place.
        verify: decode every stream, too.  Tensors hold no checksums of numbers: `qdsl.open` has them from files.
        Raises FormatError with the tensor, what it is, and what the format needs.
        """
        self.complete(params)
        for name in OF_X:
            if name in tensors:
                raise FormatError(f"{self.name}: '{name}' multiplies the columns of x before the weight does, and linear knows "
                                  "nothing of that: multiply x by it, or what comes before, and give the other tensors alone")
        if storage is not None and storage not in self.storages:
            raise FormatError(f"{self.name} has no storage '{storage}'; it has {', '.join(self.storages)}")
        fitting = matches(self, tensors, None if shape is None else self._shape(shape), storage, params)
        match = self._choose(fitting)
        layout = self.variant(match.params).storages[match.storage]
        keys_of = {name: [key for key in (name, *layout.tensors[name].aliases) if key in tensors] for name in match.tensors}
        used = {keys[0] for keys in keys_of.values()}
        notes = [f"tensor '{name}' is not part of {self.name}.{match.storage}" for name in tensors if name not in used]
        for key, value in match.params.items():
            others = list(dict.fromkeys(str(other.params[key]) for other in fitting if other.params[key] != value))
            notes += [f"{key} = {value} by default; the tensors fit {' and '.join(others)} too"] if others else []
        notes += [f"tensor '{name}': {OVERFLOWED_ZEROS}" for name in self._overflowed_zeros(match)]
        names = {name: keys[0] for name, keys in keys_of.items() if keys[0] != name}
        empty = self.unfilled(match)
        notes += [f"tensor '{name}' has one value for all columns and tells no groups apart: taken for missing" for name in empty]
        present = {name: tensor for name, tensor in match.tensors.items() if name not in empty}
        packed = self._packed(match.storage, present, match.shape, match.params, notes, names)
        if verify:
            packed.decode_streams()
        return packed

    def _shape(self, shape: Sequence[int]) -> tuple[int, int]:
        try:
            n, k = map(int, shape)
            whole = (n, k) == tuple(shape)
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            raise FormatError(f"{self.name}: shape is (N, K), not {shape!r}")
        if min(n, k) < 0 or n * k >= LARGEST:
            raise FormatError(f"{self.name}: shape is (N, K), not {shape!r}: sizes are not negative, and weights fewer than 2^60")
        return n, k

    def unfilled(self, packed: Match | PackedWeight) -> dict[str, Tensor]:
        """Indices that nobody filled, which producers store as 0 (auto-gptq) or -1 (compressed-tensors), of several groups.

        With each what it would be if columns were in order, as they are where it is missing.
        """
        variant = self.variant(packed.params)
        stored = variant.storages[packed.storage].tensors
        indices = {name: tensor for name, tensor in packed.tensors.items()
                   if stored[name].dtype == "index" and stored[name].optional and not tensor.is_meta}
        if not indices:
            return {}
        sizes, groups = self.sizes(packed.params, packed.shape), _groups(variant)
        several = (groups.extent(*packed.shape, sizes) or 0) > 1
        return {name: _in_order(tensor, groups.by(sizes)) for name, tensor in indices.items()
                if several and tensor.numel() and int(tensor.max()) == int(tensor.min()) in (0, -1)}

    def _overflowed_zeros(self, match: Match) -> list[str]:
        """Tensors whose producer lost fields."""
        widths = {name: rule[name] for rule in self.spec.detect.get("spills", []) if rule.get("storage") == match.storage
                 for name in rule if name in match.tensors and not match.tensors[name].is_meta}
        return [name for name, bits in widths.items()
                if has_overflowed_zeros(match.tensors[name].cpu().contiguous().numpy().tobytes(), int(match.params[bits]))]

    def _choose(self, fitting: Sequence[Match]) -> Match:
        """The only match; of several of one storage and shape the one with default parameters where they are open."""
        storages = list(dict.fromkeys(match.storage for match in fitting))
        if len(storages) > 1:
            shown_params = {match.storage: "".join(f" {key}={match.params[key]}" for key in self.by) for match in fitting}
            differ = len(set(shown_params.values())) > 1
            listed = " and ".join(f"{storage}{shown_params[storage] if differ else ''}" for storage in storages)
            raise FormatError(f"{self.name}: the tensors fit the storages {listed}; say which with storage=")
        shapes = {match.shape: ", ".join(f"{key}={value}" for key, value in match.params.items()) for match in reversed(fitting)}
        if len(shapes) > 1:
            listed = " or ".join(f"{list(shape)} with {params}" for shape, params in reversed(shapes.items()))
            raise FormatError(f"{self.name}: the tensors fit {listed}; give parameters or shape=(N, K)")
        fits = {name: list(dict.fromkeys(match.params[name] for match in fitting)) for name in self.params}
        wanted = {name: resolve_default(fit, self.params[name][0]) for name, fit in fits.items()}
        for match in fitting:
            if match.params == wanted:
                return match
        shown = " or ".join(", ".join(f"{key}={value}" for key, value in match.params.items()) for match in fitting)
        raise FormatError(f"{self.name}: the tensors fit {shown}; say which")

    def _packed(self, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], params: Mapping[str, int | str],
                notes: Sequence[str] = (), names: Mapping[str, str] | None = None) -> PackedWeight:
        """A weight of tensors in the storage's own shapes and dtypes, with its index tensors range-checked."""
        layout = self.variant(params).storages[storage]
        sizes = self.sizes(params, shape)
        if why := layout.too_small(shape, sizes):
            raise FormatError(f"{self.name}.{storage}: {why}")
        in_order = {name for name, tensor in tensors.items() if (name == layout.order or layout.tensors[name].dtype == "index")
                    and self._check_columns(name, tensor, name == layout.order, shape, params)}
        if layout.shape and not tensors[layout.shape].is_meta and tuple(tensors[layout.shape].tolist()) != shape:
            raise FormatError(f"{self.name}.{storage}: '{layout.shape}' says {tensors[layout.shape].tolist()}; the weight is "
                              f"{list(shape)}")
        return PackedWeight(self, storage, tensors, shape, params, in_order=frozenset(in_order), notes=notes, names=names,
                            stream_info=self.stream_info(layout, tensors, shape))

    def stream_info(self, layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str:
        """Validates streams, and returns what kernels rely on (streams.check).  Raises FormatError for damaged ones."""
        if not layout.streams or any(tensor.is_meta for tensor in tensors.values()):
            return ""
        with stream_errors(self.name):
            return streams.check(layout, tensors, shape)

    def checked(self, packed: PackedWeight) -> PackedWeight:
        """The same weight with its tensors validated again.  Raises FormatError for those that do not fit, for groups that do
        not exist, and for an order that is no permutation.
        """
        wanted = self.stored(packed)
        for name, tensor in packed.tensors.items():
            if (tensor.dtype, tuple(tensor.shape)) != wanted[name]:
                dtype, shape = wanted[name]
                raise FormatError(f"{self.name}.{packed.storage}: tensor '{name}' has become {str(tensor.dtype)[6:]} "
                                  f"{list(tensor.shape)}; the weight stores {str(dtype)[6:]} {list(shape)}")
        return self._packed(packed.storage, packed.tensors, packed.shape, packed.params, packed.notes, packed.names)

    def _check_columns(self, name: str, tensor: Tensor, is_order: bool, shape: tuple[int, int],
                       params: Mapping[str, int | str]) -> bool:
        """Refuse groups that do not exist and an order that is none; say whether columns lie in order: then it adds nothing."""
        if tensor.is_meta:
            return False
        sizes = self.sizes(params, shape)
        groups = _groups(self.variant(params))
        count, size = groups.extent(*shape, sizes) or 0, groups.by(sizes)
        if why := order.wrong_order(tensor, size) if is_order else order.wrong_index(tensor, count):
            raise FormatError(f"{self.name}: '{name}' {why}")
        return torch.equal(tensor, _in_order(tensor, 1 if is_order else size))

    def empty(self, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              optional: Sequence[str] | None = None, **params: int | str) -> PackedWeight:
        """A weight [N, K] of the tensors that its storage would have, on a device that need not hold them, not filled.

        Tensors whose size depends on the weights have no elements.
        optional: which of the tensors that may be missing are there, by default scales.  Raises FormatError for a shape that does
        not fit.
        """
        chosen, shape = self.complete(params), self._shape(shape)
        name, layout = self.storage(storage, chosen)
        sizes = self.sizes(chosen, shape)
        field_of = {key: stored.optional for key, stored in layout.tensors.items() if stored.optional}
        optional = [key for key in field_of if layout.tensors[key].dtype in self.params] if optional is None else optional
        for key in optional:
            if key not in field_of:
                raise FormatError(f"{self.name}.{name} has no optional tensor '{key}'; it has {', '.join(field_of) or 'none'}")
        self._check_shape(name, layout.decoded, shape, sizes, [field_of[key] for key in optional])
        packed = PackedWeight(self, name, {}, shape, chosen)
        packed.tensors = {key: torch.empty(whole, dtype=dtype, device=device)
                          for key, (dtype, whole) in self.stored(packed).items() if key not in field_of or key in optional}
        if layout.shape and torch.device(device).type != "meta":
            packed.tensors[layout.shape] = shape_tensor(shape, packed.tensors[layout.shape].device)
        return packed

    def stored(self, packed: PackedWeight) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the shape of every tensor that a weight's storage has; extents that depend on the weights are its own."""
        stored, dtypes = {}, packed.dtypes
        for name, tensor in packed.layout.tensors.items():
            own = packed.tensors[name].shape if name in packed.tensors else ()
            shape = extents(tensor.axes, *packed.shape, packed.sizes, own)
            if shape is None and tensor.optional:
                continue                                         # it cannot be there
            assert shape is not None                             # a packed weight has a shape that its storage can hold
            dtype = dtypes[name]
            stored[name] = (dtype_on(packed.tensors[name].device, dtype) if name in packed.tensors else dtype, shape)
        return stored

    # -- fields -------------------------------------------------------------------------------------------------------

    def unpack(self, packed: PackedWeight) -> dict[str, Tensor]:
        """The fields by name: uint8 codes up to 8 bits, int32 above, floats in their own dtype; missing optional ones absent."""
        packed = packed.decode_streams()
        layout = packed.layout
        fields = layout.fields_of((packed.tensors.get(name) for name in layout.coded), packed.extents)
        if packed.order is None:
            return fields
        fields = _moved(packed.variant, fields, order.places(packed.order))
        index = order.index_of(packed.order, _groups(packed.variant).by(packed.sizes))
        return {**fields, **{name: index for name, field in packed.variant.fields.items() if field.type == "index"}}

    def pack(self, fields: Mapping[str, Tensor], storage: str | None = None, **params: int | str) -> PackedWeight:
        """Fields as a weight in a storage; the inverse of unpack.

        Parameters that the fields' dtypes and shapes decide need not be given.  Raises FormatError for fields of the wrong
        dtype, shape or range, and for values that the storage cannot hold.
        """
        present = {key: value for key, value in fields.items() if value is not None}
        for key, field in present.items():
            if not isinstance(field, Tensor):
                raise FormatError(f"{self.name}: field '{key}' is a {type(field).__name__}, not a torch tensor")
        chosen = self.complete({**self._dtype_params(present), **params})
        name, layout = self.storage(storage, chosen)
        variant = self.variant(chosen)
        shape = self._fields_shape(variant, present, chosen)
        sizes = self.sizes(chosen, shape)
        for key, field in present.items():
            self._check_field(variant, key, field, shape, sizes, chosen)
        others = {key: present.pop(key) for key in layout.where if key in present}
        extra: dict[str, Tensor] = {}
        for key, field in others.items():
            if not self.is_default(variant, key, field, sizes):
                extra = self._order_of(layout, name, key, field, shape, chosen)
                present = _moved(variant, present, extra[layout.order])
        present |= {key: self.default(variant, key, shape, chosen, next(iter(present.values())).device)
                 for key in layout.always if key not in present}
        stored = [key for key in variant.fields if key not in layout.where]
        missing = [key for key in stored if key not in present and key not in variant.defaults]
        if missing:
            raise FormatError(f"{self.name}: field '{missing[0]}' is missing; given are {', '.join(fields)}")
        self._check_shape(name, layout.decoded, shape, sizes, present)
        arranged = layout.tensors_of({key: present.get(key) for key in stored}, {**sizes, "N": shape[0], "K": shape[1]})
        tensors = {key: arranged[key].contiguous() for key in layout.decoded.tensors if key in arranged}
        with stream_errors(self.name):
            tensors = streams.encode(layout, tensors, shape) if layout.streams else tensors
        if layout.shape:
            extra[layout.shape] = shape_tensor(shape, next(iter(tensors.values())).device)
        packed = self._packed(name, {**tensors, **extra}, shape, chosen)
        for key in self.unfilled(packed):
            raise FormatError(f"{self.name}.{name}: '{key}' would have one value for all columns, which readers take for missing")
        return packed

    def _order_of(self, layout: Storage, storage: str, name: str, field: Tensor, shape: tuple[int, int],
                  params: Mapping[str, int | str]) -> dict[str, Tensor]:
        """The order of columns by which a storage holds an index that it does not store.  Raises FormatError for all else."""
        variant = self.variant(params)
        default = variant.defaults[name]
        if default is not None or not layout.order:
            raise FormatError(f"{self.name}.{storage} cannot hold '{name}': it has its default there "
                              f"({'columns in order' if default is None else default})")
        self._check_columns(name, field, False, shape, params)
        if why := order.uneven(field, _groups(variant).by(self.sizes(params, shape))):
            raise FormatError(f"{self.name}.{storage} cannot hold '{name}', because it stores columns by groups: {why}")
        return {layout.order: order.by_groups(field)}

    def _check_shape(self, name: str, layout: Storage, shape: tuple[int, int], sizes: Mapping[str, int],
                     included: Collection[str]) -> None:
        """Refuse what does not divide as the tensors need; included: the optional fields that are stored."""
        for stored in layout.tensors.values():
            for axis in stored.axes if not stored.optional or stored.optional in included else ():
                if axis.extent(*shape, sizes) is None:
                    raise FormatError(f"{self.name}.{name}: {axis.wrong(*shape, sizes)}")

    def _dtype_params(self, fields: Mapping[str, Tensor]) -> dict[str, int | str]:
        """Type parameters that the fields' dtypes decide."""
        params: dict[str, int | str] = {}
        for name, field in next(iter(self.variants.values())).fields.items():
            if field.type in self.params and name in fields:
                fit = [v for v in self.params[field.type] if torch_dtype(str(v)) == fields[name].dtype]
                params.update({field.type: fit[0]} if fit else {})
        return params

    def _fields_shape(self, variant: Variant, fields: Mapping[str, Tensor], params: Mapping[str, int | str]) -> tuple[int, int]:
        """(N, K) of the field that has a value for every weight, or for runs of columns that are always whole."""
        telling = {name: field.axes for name, field in variant.fields.items() if [axis.dim for axis in field.axes] == ["N", "K"]
                   and all(axis.solve(axis.words) is not None for axis in field.axes)}
        full = min(telling, key=lambda name: telling[name][1].by({}))
        if full in fields and fields[full].dim() == 2:
            n, k = (axis.solve(extent) for axis, extent in zip(telling[full], fields[full].shape, strict=True))
            if n is not None and k is not None:
                return n, k
        shown = ", ".join(axis.text for axis in telling[full])
        raise FormatError(f"{self.name}: field '{full}' [{shown}] is missing; given are {', '.join(fields) or 'none'}")

    def _check_field(self, variant: Variant, name: str, value: Tensor, shape: tuple[int, int], sizes: Mapping[str, int],
                     params: Mapping[str, int | str]) -> None:
        if name not in variant.fields:
            raise FormatError(f"{self.name} has no field '{name}'; it has {', '.join(variant.fields)}")
        field = variant.fields[name]
        kind = str(params.get(field.type, field.type))
        wanted = tuple(axis.rounded(*shape, sizes) for axis in field.axes)
        if value.dtype != torch_dtype(kind) or tuple(value.shape) != wanted:
            raise FormatError(f"{self.name}: field '{name}' is {str(value.dtype)[6:]} {list(value.shape)}; the format needs "
                              f"{str(torch_dtype(kind))[6:]} {list(wanted)}")
        scalar = number(kind)
        if scalar is not None and scalar.bits < 8 * value.element_size() and value.numel():
            low, high = (0, (1 << scalar.bits) - 1) if scalar.is_float else (scalar.low, scalar.high)
            most = int(value.max())
            if most > high or (value.dtype.is_signed and int(value.min()) < low):
                raise FormatError(f"{self.name}: field '{name}' has values from {int(value.min())} to {most}; {kind} holds {low} "
                                  f"to {high}")

    def default(self, variant: Variant, name: str, shape: tuple[int, int], params: Mapping[str, int | str],
                 device: torch.device) -> Tensor:
        """The field where no tensor says what it is."""
        field, value = variant.fields[name], variant.defaults[name]
        sizes, type = self.sizes(params, shape), str(params.get(field.type, field.type))
        if field.groups is not None:
            return _in_order(torch.empty(shape[1], dtype=torch.int32, device=device), field.groups.by(sizes))
        whole = extents(field.axes, *shape, sizes)
        assert whole is not None and value is not None
        return torch.full(whole, value, dtype=torch_dtype(type), device=device)

    def is_default(self, variant: Variant, name: str, value: Tensor, sizes: Mapping[str, int]) -> bool:
        """Whether a field that may be missing is as if it were."""
        default = variant.defaults[name]
        if default is not None:
            return bool((value == default).all())
        groups = variant.fields[name].groups
        return groups is not None and torch.equal(value, _in_order(value, groups.by(sizes)))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def quantize(self, weight: Tensor, storage: str | None = None, importance: Tensor | None = None, **options: Any,
                 ) -> PackedWeight:
        """A float weight [N, K] in this format; options are parameters of the format and of its encode scheme.

        importance: floats [K], none negative, how much an error in each column counts (llama.cpp's imatrix).  A format whose
        scheme has no use for it, so says `importance` of its Variant, makes the same tensors without, so that one file of
        importances serves a model in many formats.
        Raises FormatError for weights that are not finite, with the row and column, where a scale would overflow, and for
        an importance that does not fit.
        """
        params, scheme_options, name = self.chosen({"storage": storage, **options})
        variant = self.variant(params)
        layout = variant.storages[name]
        assert variant.encode is not None
        if not isinstance(weight, Tensor):
            raise FormatError(f"{self.name}: a weight is a torch tensor, not a {type(weight).__name__}")
        if weight.is_meta or weight.layout != torch.strided:
            raise FormatError(f"{self.name}: a weight is dense numbers in memory, not {weight.layout} on {weight.device}")
        if weight.dim() != 2 or not weight.is_floating_point():
            raise FormatError(f"{self.name}: a weight is floats [N, K], not {str(weight.dtype)[6:]} {list(weight.shape)}")
        weight = weight.detach()
        shape = (weight.shape[0], weight.shape[1])
        sizes = self.sizes(params, shape)
        types = {key: value for key, value in params.items() if isinstance(value, str)}
        importances = {} if importance is None else {"importance": self._importance(importance, weight)}
        chosen = {**layout.options, **scheme_options, **(importances if variant.importance else {})}
        index = {key: self.default(variant, key, shape, params, weight.device) for key, field in variant.fields.items()
                 if field.type == "index" and key not in (*layout.where, *layout.omits)}
        whole = self._unfilled(name, shape, params)
        quantized = _stacked(whole, (self.pack({**fields, **index}, storage=name, **params) for fields in tiles.encode_rows(
            variant, weight, sizes, {**sizes, **types, **chosen}, whole.step("N"))))
        free = "symmetric" in variant.options and not chosen.get("symmetric")   # then all layers have what any may need
        left = set() if free else convert.omitted(quantized, layout)
        if not left:
            return quantized
        return quantized.derive({key: tensor for key, tensor in quantized.tensors.items() if key not in left})

    def _unfilled(self, storage: str, shape: tuple[int, int], params: Mapping[str, int | str]) -> PackedWeight:
        """A weight of all the tensors that a storage can have, on meta.  Raises FormatError for a shape that does not fit."""
        layout = self.variant(params).storages[storage]
        self._check_shape(storage, layout.decoded, shape, self.sizes(params, shape), ())
        packed = PackedWeight(self, storage, {}, shape, params)
        packed.tensors = {key: torch.empty(whole, dtype=dtype, device="meta")
                          for key, (dtype, whole) in self.stored(packed).items()}
        return packed

    def _importance(self, importance: Tensor, weight: Tensor) -> Tensor:
        """float32 [K], on the weight's device."""
        if not importance.is_floating_point() or importance.shape != weight.shape[1:]:
            raise FormatError(f"{self.name}: importance is floats [{weight.shape[1]}], one for each column, not "
                              f"{str(importance.dtype)[6:]} {list(importance.shape)}")
        importances = importance.detach().to(weight.device, torch.float32)
        bad = torch.nonzero(~((importances >= 0) & torch.isfinite(importances)))
        if bad.numel():
            raise FormatError(f"{self.name}: the importance of column {int(bad[0])} is {float(importance[int(bad[0])]):g}")
        return importances

    def chosen(self, options: Mapping[str, Any]) -> tuple[dict[str, int | str], dict[str, Any], str]:
        """What options of quantize mean: parameters, options of the encode scheme, and the storage.  Raises FormatError."""
        choices = next(iter(self.variants.values())).options
        params = self.complete({key: value for key, value in options.items() if key not in (*choices, "storage")})
        scheme_options = {key: value for key, value in options.items() if key in choices}
        for key, value in scheme_options.items():
            if choices[key] and value not in choices[key]:
                raise FormatError(f"{self.name}: {key} is one of {', '.join(map(str, choices[key]))}, not {value}")
            if not choices[key] and not (type(value) in (int, float) and 0 < value < math.inf):
                raise FormatError(f"{self.name}: {key} is a positive number, not {value}")
        name, _ = self.storage(options.get("storage"), params)
        if self.variant(params).encode is None:
            raise FormatError(f"{self.name} has no quantizer yet: its spec names no encode scheme")
        return params, scheme_options, name

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """The weight [N, K]: exact by the formula in float32, rounded to nearest even once for other dtypes.

        out, if given, decides the dtype.  Raises FormatError where it does not fit.
        """
        self._own(packed)
        if not (dtype if out is None else out.dtype).is_floating_point:
            raise FormatError(f"weights are floats; {str(dtype if out is None else out.dtype)[6:]} is none")
        if out is not None and out.shape != packed.shape:
            raise FormatError(f"out {list(out.shape)} does not fit the weight {list(packed.shape)}")
        if not ops.is_plain(out, *packed.tensors.values()):
            result = ops.dequantize(packed, dtype if out is None else out.dtype)
            return result if out is None else out.copy_(result)
        if out is not None and not _is_own_memory(out, packed):
            raise FormatError("out has several elements in one place, or lies in the weight's tensors; give it memory of its own")
        return self._dequantized(packed, empty(packed.shape, dtype, packed.device) if out is None else out)

    @torch.no_grad()
    def _dequantized(self, packed: PackedWeight, out: Tensor) -> Tensor:
        if not out.numel():
            return out
        if packed.layout.streams and runs_kernels(packed.device):
            with on_device(packed.device):
                launch.dequantize(packed, out)
            return out
        packed = packed.decode_streams()
        copied = packed.variant.copies
        if copied is not None and torch_dtype(str(packed.params.get(copied, packed.variant.fields[copied].type))) == out.dtype:
            for start, stop in tiles.row_tiles(packed):
                out[start:stop].copy_(self.unpack(packed.cut("N", start, stop))[copied])
            return out
        if packed.order is not None:
            return self._dequantized_in_order(packed, order.places(packed.order), out)
        if runs_kernels(packed.device):
            with on_device(packed.device):
                launch.dequantize(packed, out)
            return out
        for start, stop in tiles.row_tiles(packed):
            tiles.decode_rows(packed, start, stop, out[start:stop])
        return out

    def _dequantized_in_order(self, packed: PackedWeight, places: Tensor, out: Tensor) -> Tensor:
        """Tiles of rows with columns as they are stored, and then each column from its place."""
        stored = packed.as_stored()
        for start, stop in tiles.row_tiles(packed, weights=tile_weights(out)):
            part = empty((stop - start, packed.shape[1]), out.dtype, out.device)
            torch.index_select(self._dequantized(stored.cut("N", start, stop), part), 1, places, out=out[start:stop])
        return out

    def dequantize_rows(self, packed: PackedWeight, index: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows of the decoded weight by their numbers, as an embedding looks them up: [*index.shape, K], bits as in `dequantize`.

        index: int32 or int64, of any shape.  Other rows are decoded only where they share blocks with a wanted one, or where a
        storage has no way to single rows (df11; on a GPU all streams).
        Raises IndexError for a row that does not exist, on a CPU, and FormatError for an index that is not of integers.
        """
        self._own(packed)
        return lookup.dequantize_rows(packed, index, dtype)

    def convert(self, packed: PackedWeight, storage: str, **params: int | str) -> PackedWeight:
        """The same numbers in another storage, exactly.  Raises FormatError where the other storage cannot hold them.

        params: parameters that the result must have; by default they are the weight's own, and of a weight of another format as
        near to its own as exactness allows.

        Tensors that both storages hold alike are shared.  Beside both weights it needs memory for a tile, not for fields; where
        streams hold either, for all fields.
        A weight of another format with the same codes becomes one of this, where convert_format.py finds no number that would
        change.
        """
        self.complete(params)
        is_own = packed.format is self and packed.params == {**packed.params, **params}
        if storage == packed.storage and is_own:
            return packed
        with self._offering_requantize(storage):
            if not is_own:
                tensors, chosen = convert_format(self, packed, storage, params)
                return self._packed(storage, tensors, packed.shape, chosen)
            self.storage(storage, packed.params)
        missing = {stored.optional for key, stored in packed.layout.tensors.items() if key not in packed.tensors}
        self._check_shape(storage, packed.variant.storages[storage].decoded, packed.shape, packed.sizes,
                          packed.variant.fields.keys() - missing - {*packed.layout.where})
        with self._offering_requantize(storage):
            return self._packed(storage, convert.convert(self, packed, storage), packed.shape, packed.params)

    @contextmanager
    def _offering_requantize(self, storage: str) -> Iterator[None]:
        """Errors of a conversion name `requantize`, where this format has the storage and quantizes."""
        try:
            yield
        except FormatError as error:
            helps = any(storage in variant.storages and variant.encode is not None for variant in self.variants.values())
            offer = "; requantize quantizes the decoded weight, and reports the error" if helps else ""
            raise FormatError(f"{error}{offer}") from None

    def requantize(self, packed: PackedWeight, other: Format | None = None, storage: str | None = None, **options: Any,
                   ) -> tuple[PackedWeight, Report]:
        """The decoded weight, quantized again in another format or in this one, and a report of its errors.

        For what `convert` refuses, because numbers would change; storage and options are those of `quantize`.  Needs memory
        for the weight in float32.  Raises FormatError where `quantize` does.
        """
        weight = self.dequantize(packed, torch.float32)
        quantized = (other or self).quantize(weight, storage, **options)
        return quantized, compare(weight, quantized)

    def planar(self, packed: PackedWeight, larger: bool = False) -> PackedWeight:
        """The weight in the storage of the kernels for matrix units, exactly; the same object where it has no such form.

        That is: another format's formula, columns that are no multiple of 128, an index (act-order) whose groups differ in
        size, or a storage that would be more than 4 % larger, 12 % for codes of fewer than 4 bits.
        larger: however much larger, as GGML's IQ1 to IQ3 are by 25 to 100 %.
        """
        return packed if self.why_not_planar(packed, larger) else self.convert(packed, PLANAR)

    def why_not_planar(self, packed: PackedWeight, larger: bool = False) -> str:
        """Why `planar` leaves a weight as it is; '' where it does not."""
        self._own(packed)
        if packed.storage == PLANAR or PLANAR not in packed.variant.storages:
            return "it is that already" if packed.storage == PLANAR else "its format has no storage for matrix units"
        if packed.shape[1] % 128:
            return f"{packed.shape[1]} columns are no multiple of 128"
        wide = {key: value for key, value in packed.tensors.items() if key not in packed.in_order}
        name = packed.variant.storages[PLANAR].order
        for key in _indices(packed):
            why = order.uneven(wide[key], _groups(packed.variant).by(packed.sizes)) if name else "columns are out of order"
            if why:
                return f"'{key}': {why}"
        for stored in packed.variant.storages[PLANAR].tensors.values():
            for axis in stored.axes:
                if axis.extent(*packed.shape, packed.sizes) is None:
                    return f"blocks of {axis.by(packed.sizes)} weights go over the ends of rows of {packed.shape[1]}"
        if larger:
            return ""
        size = sum(tensor.nbytes for tensor in wide.values())
        new = self.planar_like(packed).nbytes
        limit = 1.04 if 8 * size / max(1, math.prod(packed.shape)) >= 4 else 1.12
        return f"{size} bytes would become {new}" if new > size * limit else ""

    def planar_like(self, packed: PackedWeight) -> PackedWeight:
        """What `planar` makes of a weight, on meta: tensors of its dtypes and shapes, without numbers."""
        missing = {stored.optional for key, stored in packed.layout.tensors.items() if key not in packed.tensors}
        storage = packed.variant.storages[PLANAR]
        optional = [key for key, stored in storage.tensors.items() if stored.optional and (
            _indices(packed) if key == storage.order else key not in packed.layout.where and stored.optional not in missing)]
        return self.empty(packed.shape, PLANAR, "meta", optional, **packed.params)

    def for_device(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
        """An int4 weight of any format as torch's fused operation of its device, a CPU or an XPU, reads it; `linear` calls that.

        The result's format is int4pack on a CPU, int_group on an XPU: multiply with `result.format.linear`.  dtype: of x, in
        which scales are stored, rounded where it does not hold them; `notes` says so.  Columns lie by groups, `linear` moves
        those of x (act-order); groups of more than 256 are cut.  Raises FormatError where torch has no such operation.
        """
        return int4.for_device(packed, dtype)

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, quantize_x: bool = False,
               batch_invariant: bool = False, input_scale: float | None = None) -> Tensor:
        """x [..., K] times the weight's transpose, plus bias [N]: [..., N].  Differentiable in x and bias.

        batch_invariant: a row of x gives the same bits whatever rows are beside it; on a GPU the weight is then read once for
        every 8 rows, on a CPU each row is multiplied alone.
        quantize_x: first quantize each row of x to 8 bits, as torch/eight.py says, for a weight with codes of 8 bits; matrix
        units then multiply 8 bits with 8 bits.  Gradients are those without.  Raises FormatError for other weights.
        input_scale: with quantize_x the static scale of x, in place of a scale for each row; else it is not used.
        """
        if packed.format is not self:
            self._own(packed)
        is_plain = not (quantize_x or batch_invariant)
        return ops.linear(x, packed, bias, "" if is_plain else mode_of(quantize_x, batch_invariant, input_scale))

    def grouped_linear(self, x: Tensor, packed: PackedWeight, offsets: Tensor | Sequence[int], bias: Tensor | None = None,
                       partial: bool = False, rows: Tensor | None = None) -> Tensor:
        """x [M, K], sorted by expert, times the transposed weights [E * N, K] of E experts, plus bias [E, N]: [M, N].

        Expert e has rows [offsets[e], offsets[e + 1]) of x and [e * N, (e + 1) * N) of the weight; offsets are E + 1 integers, a
        list or a tensor.  On a GPU kernels follow the offsets there, which are trusted, without waiting for the host.
        partial: rows behind the last offset belong to no expert, and their results are 0.  rows: int64 [M], which row of x [T, K]
        each of the M rows is.  Differentiable in x and bias.  Raises FormatError where something does not fit.
        """
        self._own(packed)
        return experts.linear(x, packed, offsets, bias, partial, rows)

    @cached_property
    def Linear(self) -> type[QuantizedLinear]:
        """The module class: nn.Linear over a packed weight."""
        return linear_class(self)

    @cached_property
    def Embedding(self) -> type[QuantizedEmbedding]:
        """The module class: nn.Embedding over a packed weight."""
        return embedding_class(self)

    def _own(self, packed: PackedWeight) -> None:
        if packed.format is not self:
            raise FormatError(f"this is a weight of {packed.format.name}, not of {self.name}")


def _stacked(whole: PackedWeight, parts: Iterable[PackedWeight]) -> PackedWeight:
    """The weight whose rows are those of the parts, one after the other.  whole: one of its shape, without numbers."""
    start = 0
    for part in parts:
        if part.shape == whole.shape:
            return part
        if start == 0:
            whole.tensors = {key: empty(whole.tensors[key].shape, tensor.dtype, part.device) if key != whole.layout.shape
                             else shape_tensor(whole.shape, part.device) for key, tensor in part.tensors.items()}
        for key, tensor in whole.cut("N", start, start + part.shape[0]).tensors.items():
            tensor.copy_(part.tensors[key])
        start += part.shape[0]
    return PackedWeight(whole.format, whole.storage, whole.tensors, whole.shape, whole.params, in_order=part.in_order)


def _indices(packed: PackedWeight) -> list[str]:
    """The tensors that put columns into groups all over K (act-order)."""
    return [name for name in packed.tensors if packed.layout.tensors[name].dtype == "index" and name not in packed.in_order]


def _groups(variant: Variant) -> Axis:
    """How many groups columns are put into, by the variant's index field."""
    return next(field.groups for field in variant.fields.values() if field.groups is not None)


def _moved(variant: Variant, fields: Mapping[str, Tensor], columns: Tensor) -> dict[str, Tensor]:
    """Fields of the weight whose column j is column columns[j]; what belongs to groups stays with them."""
    moved = dict(fields)
    for name, field in fields.items():
        for place, axis in enumerate(variant.fields[name].axes):
            moved[name] = field.index_select(place, columns) if axis.text == "K" else moved[name]
    return moved


def _in_order(index: Tensor, by: int) -> Tensor:
    return torch.arange(index.numel(), dtype=index.dtype, device=index.device) // by
