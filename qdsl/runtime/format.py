"""A format: its description from a generated module, and the functions that users call with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qdsl.core import options as quantizer_options
from qdsl.core.program import program_description
from qdsl.runtime.cpu import int4
from qdsl.runtime.torch import dequantize, experts, ops
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear, embedding_class, linear_class
from qdsl.runtime.torch.linear import mode_of
from qdsl.runtime.weight import algebra, assemble, convert_format, planar, quantize, stream_kernels, wrap
from qdsl.runtime.weight import fields as weight_fields
from qdsl.runtime.weight.layout import PLANAR, Storage, Variant
from qdsl.runtime.weight.packed import FormatError, PackedWeight, check_weight
from qdsl.runtime.weight.requantize import Report, weight_error
from qdsl.runtime.weight.routing import Offsets
from qdsl.runtime.weight.spec import Spec


class Format:
    """A format and its functions for weights.

    program: what the module says of the format as data (core/program.py).  variants: the functions that depend on the parameters
    in `by`, keyed by their values.  Formats with the same name and digest of the spec's text are the same format.  path: the
    spec's file, if qdsl.load has built it.
    """

    path = ""

    def __init__(self, program: Mapping[str, Any], variants: Mapping[tuple[int | str, ...], Variant]) -> None:
        self.name: str = program["name"]
        self.description = program_description(program)
        self.params, self.by, self.size_axes = self.description.params, self.description.by, self.description.sizes
        self.variants = {key: variant.described(program["variants"][key], self.description.variants[key])
                         for key, variant in variants.items()}
        self.storages = tuple(dict.fromkeys(storage for variant in self.variants.values() for storage in variant.storages))
        self.spec = Spec(self.name, program["title"], program["source"], program["formula"], self.params, self.storages,
                         self.variants, program.get("detect", {}))
        written = next(iter(self.variants.values())).decode.__module__
        self.__module__ = written.rpartition(".")[0] if self.by else written
        self.key = ops.register_format(self, program["digest"])

    def __repr__(self) -> str:
        return f"<Format {self.name}: {', '.join(self.storages)}>"

    def __reduce__(self) -> str:
        """Copies and pickles refer to the FORMAT of the generated module."""
        return "FORMAT"

    # -- parameters ---------------------------------------------------------------------------------------------------

    def variant(self, params: Mapping[str, int | str]) -> Variant:
        """The variant for these parameters."""
        return self.variants[tuple(params[name] for name in self.by)]

    def complete(self, params: Mapping[str, int | str]) -> dict[str, int | str]:
        """All parameters: the caller's, validated, and defaults for the others.  Raises FormatError."""
        return quantizer_options.complete_params(self.description, params)

    def sizes(self, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, int]:
        """Size parameters as numbers; -1 becomes the length of the axis that the parameter divides."""
        return self.description.sizes_for(params, shape)

    def storage(self, name: str | None, params: Mapping[str, int | str]) -> tuple[str, Storage]:
        """A storage by its name, or the default.  Raises FormatError."""
        chosen = quantizer_options.storage_name(self.description, name, params)
        return chosen, self.variant(params).storages[chosen]

    # -- from and to checkpoints --------------------------------------------------------------------------------------

    def wrap(self, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None, storage: str | None = None, *,
             verify: bool = False, **params: int | str) -> PackedWeight:
        """The weight that a checkpoint's tensors hold, by their names; nothing is copied.

        shape: (N, K), needed only if the tensors do not determine it.  Parameters and storage follow from dtypes and shapes;
        given ones are validated.  Indices are validated here: call wrap again after changing a tensor in place.  verify: also
        decode every stream.  Tensors hold no checksums of numbers: `qdsl.open` has them from files.  Raises FormatError that
        names the tensor, its value, and the requirement.
        """
        return wrap.wrap(self, tensors, shape, storage, verify, params)

    def checked(self, packed: PackedWeight) -> PackedWeight:
        """The same weight with its tensors validated again.

        Raises FormatError for tensors that do not fit, for groups that do not exist, and for an order that is no permutation.
        """
        self._own(packed)
        return assemble.revalidate(packed)

    def empty(self, shape: tuple[int, int], storage: str | None = None, device: torch.device | str = "meta",
              optional: Sequence[str] | None = None, **params: int | str) -> PackedWeight:
        """A weight [N, K] with the uninitialised tensors of a storage, on a device (meta needs no memory).

        Tensors whose size depends on the weights have no elements.  optional: which optional tensors to include, by default
        scales.  Raises FormatError for a shape that does not fit.
        """
        return assemble.empty_weight(self, shape, storage, device, optional, params)

    def stored(self, packed: PackedWeight) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of every tensor of a weight's storage; extents that depend on the numbers are this weight's."""
        self._own(packed)
        return assemble.dtypes_and_shapes(packed)

    # -- fields -------------------------------------------------------------------------------------------------------

    def unpack(self, packed: PackedWeight) -> dict[str, Tensor]:
        """The fields by name: uint8 codes up to 8 bits, int32 above, floats in their own dtype; without missing optional ones."""
        self._own(packed)
        return weight_fields.unpack(packed)

    def pack(self, fields: Mapping[str, Tensor], storage: str | None = None, **params: int | str) -> PackedWeight:
        """The weight that holds these fields in a storage; the inverse of unpack.

        Parameters that follow from the fields' dtypes and shapes may be omitted.  Raises FormatError for fields of the wrong
        dtype, shape or range, and for values that the storage cannot hold.
        """
        return weight_fields.pack(self, fields, storage, params)

    # -- parts, for the methods of PackedWeight with these names -----------------------------------------------------------

    rows = staticmethod(algebra.gather_rows)
    cut = staticmethod(algebra.cut)
    shard = staticmethod(algebra.shard)
    join = staticmethod(algebra.join)
    decode_streams = staticmethod(stream_kernels.decoded_with_calls)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def quantize(self, weight: Tensor, storage: str | None = None, importance: Tensor | None = None, **options: Any,
                 ) -> PackedWeight:
        """Quantizes a float weight [N, K]; options are parameters of the format and of its encode scheme.

        importance: floats [K], none negative: the weight of each column in the error (llama.cpp's imatrix).  Formats whose scheme
        does not use it (`importance` of the Variant) ignore it, so that one importance file serves a model in many formats.
        Raises FormatError with row and column for a weight that is not finite, for a scale that overflows, and for an importance
        that does not fit.
        """
        return quantize.quantize(self, weight, storage, importance, options)

    def chosen(self, options: Mapping[str, Any]) -> tuple[dict[str, int | str], dict[str, Any], str]:
        """The parameters, options of the encode scheme, and storage that options of quantize select.  Raises FormatError."""
        return quantizer_options.choose_options(self.description, options)

    def dequantize(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """The weight [N, K]: exact by the formula in float32, rounded to nearest even once for other dtypes.

        out determines the dtype, if given.  Raises FormatError if it does not fit.
        """
        self._own(packed)
        return dequantize.dequantize(packed, dtype, out)

    def dequantize_rows(self, packed: PackedWeight, index: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows of the decoded weight for an embedding: [*index.shape, K], bits as in `dequantize`.

        index: int32 or int64, of any shape.  Other rows are decoded only if they share blocks with a wanted row, or if a storage
        has no random access to rows (df11; on a GPU all streams).  Raises IndexError for a row that does not exist, on a CPU, and
        FormatError for an index that is not of integers.
        """
        self._own(packed)
        return dequantize.dequantize_rows(packed, index, dtype)

    def convert(self, packed: PackedWeight, storage: str, **params: int | str) -> PackedWeight:
        """The same numbers in another storage, exactly.  Raises FormatError if the other storage cannot hold them.

        params: parameters that the result must have.  By default they are the weight's own; for a weight of another format they
        are as close to its own as exactness allows.

        Tensors that both storages hold alike are shared.  Besides both weights it needs memory for one tile, or for all fields if
        either storage has streams.  A weight of another format with the same codes is converted if no number would change
        (convert_format.py).
        """
        check_weight(packed)
        return convert_format.converted_weight(self, packed, storage, params)

    def requantize(self, packed: PackedWeight, other: Format | None = None, storage: str | None = None, **options: Any,
                   ) -> tuple[PackedWeight, Report]:
        """The decoded weight, quantized again in another format or in this one, and a report of its errors.

        Use it if `convert` refuses because numbers would change; storage and options are those of `quantize`.  Needs memory for
        the weight in float32.  Raises FormatError if `quantize` does.
        """
        if other is not None and not hasattr(other, "quantize"):
            raise FormatError(f"other is a format, such as qdsl.load('q8_0').FORMAT, not {other!r}")
        weight = self.dequantize(packed, torch.float32)
        quantized = (other or self).quantize(weight, storage, **options)
        return quantized, weight_error(weight, quantized)

    def planar(self, packed: PackedWeight, larger: bool = False) -> PackedWeight:
        """The weight in the storage for matrix-unit kernels, exactly; the same object if it has no such form.

        It has none if its formula does not factor, K is not a multiple of 128, act-order groups differ in size, or the storage
        would be more than 4 % larger, 12 % for codes of fewer than 4 bits.  larger: accept any size; GGML's IQ1 to IQ3 grow by 25
        to 100 %.
        """
        return packed if self.why_not_planar(packed, larger) else self.convert(packed, PLANAR)

    def why_not_planar(self, packed: PackedWeight, larger: bool = False) -> str:
        """Why `planar` returns the weight unchanged; '' if it converts it."""
        self._own(packed)
        return planar.why_not_planar(packed, larger)

    def for_device(self, packed: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
        """An int4 weight of any format in the storage of torch's fused operation for its device, a CPU or an XPU.

        `linear` calls that operation.  The result's format is int4pack on a CPU, int_group on an XPU: multiply with
        `result.format.linear`.  dtype: of x, in which scales are stored; `notes` says so if that rounds them.  Act-order columns
        are stored by groups, and `linear` permutes x.  Groups of more than 256 columns are divided.  Raises FormatError if torch
        has no such operation.
        """
        check_weight(packed)
        return int4.convert_for_device(packed, dtype)

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, quantize_x: bool = False,
               batch_invariant: bool = False, input_scale: float | None = None, match_dense: bool = False) -> Tensor:
        """x [..., K] times the weight's transpose, plus bias [N]: [..., N].  Differentiable in x and bias.

        batch_invariant: a row of x gives the same bits whatever the other rows are.  A GPU then reads the weight once per 8 rows;
        a CPU multiplies rows one by one.  quantize_x: quantize each row of x to 8 bits first (weight/eight.py), for a weight with
        8-bit codes; matrix units then multiply 8-bit numbers.  Gradients ignore the rounding.  Raises FormatError for other
        weights.  input_scale: with quantize_x, a static scale of x that replaces the scale per row; else it is ignored.

        match_dense: the bits of torch's linear with `dequantize(packed, x.dtype)`, which is in memory meanwhile, and the bits of
        torch's gradient of x.
        """
        if getattr(packed, "format", None) is not self or not isinstance(x, Tensor):
            self._own(packed, x)
        is_plain = not (quantize_x or batch_invariant or match_dense)
        return ops.linear(x, packed, bias, "" if is_plain else mode_of(quantize_x, batch_invariant, input_scale, match_dense))

    def grouped_linear(self, x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None = None,
                       partial: bool = False, rows: Tensor | None = None, match_dense: bool = False) -> Tensor:
        """x [M, K], sorted by expert, times the transposed weights [E * N, K] of E experts, plus bias [E, N]: [M, N].

        Expert e has rows [offsets[e], offsets[e + 1]) of x and [e * N, (e + 1) * N) of the weight; offsets are E + 1 integers, a
        list or a tensor.  On a GPU the offsets stay on the device and are not validated, so that nothing waits for the host.
        partial: rows after the last offset belong to no expert, and their results are 0.  rows: int64 [M], the row of x [T, K]
        for each of the M rows.  Differentiable in x and bias.  Raises FormatError if something does not fit.

        match_dense: as in `linear`, for every expert; a GPU then waits for the offsets.
        """
        self._own(packed, x)
        return experts.linear(x, packed, offsets, bias, partial, rows, mode_of(False, False, None, match_dense))

    @property
    def Linear(self) -> type[QuantizedLinear]:
        """The module class: nn.Linear over a packed weight."""
        return linear_class(self)

    @property
    def Embedding(self) -> type[QuantizedEmbedding]:
        """The module class: nn.Embedding over a packed weight."""
        return embedding_class(self)

    def _own(self, packed: PackedWeight, x: object = None) -> None:
        """Raises FormatError unless it is a weight of this format.  x: the argument before it."""
        if isinstance(x, PackedWeight):
            raise FormatError(f"{self.name}: x comes first, then the packed weight: linear(x, packed)")
        if x is not None and not isinstance(x, Tensor):
            raise FormatError(f"{self.name}: x is a torch tensor, not a {type(x).__name__}")
        check_weight(packed, self)
