"""A format: the record that a generated module makes of itself, and the functions that users call with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qdsl.core.stored import Description
from qdsl.runtime.cpu import int4
from qdsl.runtime.torch import dequantize, experts, ops
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear, embedding_class, linear_class
from qdsl.runtime.torch.linear import mode_of
from qdsl.runtime.weight import assemble, convert_format, planar, quantize, wrap
from qdsl.runtime.weight import fields as weight_fields
from qdsl.runtime.weight.layout import PLANAR, Storage, Variant
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.requantize import Report, compare


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
        tensors = {key: {name: variant.tensors(name) for name in variant.storages} for key, variant in self.variants.items()}
        axes = {key: {name: field.axes for name, field in variant.fields.items()} for key, variant in self.variants.items()
                if variant.cuts[1] != "1"}
        self.description = Description(name, self.params, self.size_axes, self.by, tensors, fields=axes, planar=frozenset(
            key for key, storages in tensors.items() if PLANAR in storages),
            fixed=next(iter(next(iter(self.variants.values())).storages.values())).fixed)
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
        """What depends on the parameters that shape the bits, for these parameters."""
        return self.variants[tuple(params[name] for name in self.by)]

    def complete(self, params: Mapping[str, int | str]) -> dict[str, int | str]:
        """All parameters: those of the caller, checked, and the defaults of the others.  Raises FormatError."""
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
        return wrap.wrap(self, tensors, shape, storage, verify, params)

    def checked(self, packed: PackedWeight) -> PackedWeight:
        """The same weight with its tensors validated again.  Raises FormatError for those that do not fit, for groups that do
        not exist, and for an order that is no permutation.
        """
        return assemble.check_again(packed)

    def empty(self, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              optional: Sequence[str] | None = None, **params: int | str) -> PackedWeight:
        """A weight [N, K] of the tensors that its storage would have, on a device that need not hold them, not filled.

        Tensors whose size depends on the weights have no elements.
        optional: which of the tensors that may be missing are there, by default scales.  Raises FormatError for a shape that does
        not fit.
        """
        return assemble.empty_weight(self, shape, storage, device, optional, params)

    def stored(self, packed: PackedWeight) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the shape of every tensor that a weight's storage has; extents that depend on the weights are its own."""
        return assemble.stored_tensors(packed)

    # -- fields -------------------------------------------------------------------------------------------------------

    def unpack(self, packed: PackedWeight) -> dict[str, Tensor]:
        """The fields by name: uint8 codes up to 8 bits, int32 above, floats in their own dtype; missing optional ones absent."""
        return weight_fields.unpack(packed)

    def pack(self, fields: Mapping[str, Tensor], storage: str | None = None, **params: int | str) -> PackedWeight:
        """Fields as a weight in a storage; the inverse of unpack.

        Parameters that the fields' dtypes and shapes decide need not be given.  Raises FormatError for fields of the wrong
        dtype, shape or range, and for values that the storage cannot hold.
        """
        return weight_fields.pack(self, fields, storage, params)

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
        return quantize.quantize(self, weight, storage, importance, options)

    def chosen(self, options: Mapping[str, Any]) -> tuple[dict[str, int | str], dict[str, Any], str]:
        """What options of quantize mean: parameters, options of the encode scheme, and the storage.  Raises FormatError."""
        return quantize.choose_options(self, options)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """The weight [N, K]: exact by the formula in float32, rounded to nearest even once for other dtypes.

        out, if given, decides the dtype.  Raises FormatError where it does not fit.
        """
        self._own(packed)
        return dequantize.dequantize(packed, dtype, out)

    def dequantize_rows(self, packed: PackedWeight, index: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows of the decoded weight by their numbers, as an embedding looks them up: [*index.shape, K], bits as in `dequantize`.

        index: int32 or int64, of any shape.  Other rows are decoded only where they share blocks with a wanted one, or where a
        storage has no way to single rows (df11; on a GPU all streams).
        Raises IndexError for a row that does not exist, on a CPU, and FormatError for an index that is not of integers.
        """
        self._own(packed)
        return dequantize.dequantize_rows(packed, index, dtype)

    def convert(self, packed: PackedWeight, storage: str, **params: int | str) -> PackedWeight:
        """The same numbers in another storage, exactly.  Raises FormatError where the other storage cannot hold them.

        params: parameters that the result must have; by default they are the weight's own, and of a weight of another format as
        near to its own as exactness allows.

        Tensors that both storages hold alike are shared.  Beside both weights it needs memory for a tile, not for fields; where
        streams hold either, for all fields.
        A weight of another format with the same codes becomes one of this, where convert_format.py finds no number that would
        change.
        """
        return convert_format.converted(self, packed, storage, params)

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
        return planar.why_not_planar(packed, larger)

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
        quantize_x: first quantize each row of x to 8 bits, as weight/eight.py says, for a weight with codes of 8 bits; matrix
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
