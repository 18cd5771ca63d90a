"""A paged cache: keys and values as rows of two packed weights.

A weight is [blocks * heads * block_size, head_dim].  Its row (block * heads + head) * block_size + offset is one head of the
token in slot block * block_size + offset.  The tokens of a block and head are neighbouring rows, so that they may share numbers:
a spec says `s: f16[n // 32, k]`, and `block_size` is a multiple of 32.

A row may have numbers after the columns that the weight decodes, which are stored unchanged: `rope: bf16[n, 64]`.  If values are
the first numbers of the rows of keys, there is one packed weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.detect.targets import with_storage
from qdsl.encode.blocks import codes
from qdsl.runtime import Format, FormatError, PackedWeight
from qdsl.runtime.weight.assemble import assemble, full_template
from qdsl.runtime.weight.layout import FLOATS, Variant

LARGEST = 1 << 31                                                # slots and pages are int32


@dataclass(frozen=True, slots=True, init=False)
class CacheFormat:
    """A format of keys or values.

    format: a generated module, or the name of a shipped spec.  storage: by default the format's first.  numbers: fields that all
    rows share, such as the calibrated scale of `fp8_tensor`.  options: parameters, and options of the encode scheme.
    """

    format: Format
    storage: str | None
    numbers: Mapping[str, float]
    options: Mapping[str, Any]

    def __init__(self, format: ModuleType | str, storage: str | None = None, numbers: Mapping[str, float] | None = None,
                 **options: Any) -> None:
        if isinstance(format, str):
            name, chosen = with_storage(format, {} if storage is None else {"storage": storage})
            format, storage = importlib.import_module(f"qdsl.generated.{name}"), chosen.get("storage")
        object.__setattr__(self, "format", format.FORMAT)
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "numbers", dict(numbers or {}))
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """All rows of keys, or of values, as a weight whose tensors change in place.

    group: the number of tokens that share numbers.  numbers: fields that all rows share.  options: of `quantize`.  settings: of
    its scheme, merged from the spec, the storage and the caller.
    """

    packed: PackedWeight
    group: int
    numbers: Mapping[str, float]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def shared(self) -> dict[str, Tensor]:
        """The numbers that all rows share, as they are stored."""
        return {name: torch.tensor(number, dtype=FLOATS[self.type_of(name)], device="cpu")
                for name, number in self.numbers.items()}

    def type_of(self, field: str) -> str:
        kind = self.packed.variant.fields[field].type
        return str(self.packed.params.get(kind, kind))

    @property
    def appended(self) -> dict[str, int]:
        """The fields after the columns of a row, and the count of each one's numbers."""
        fields = self.packed.variant.fields
        return {name: fields[name].axes[1].extent(*self.packed.shape, {}) or 0 for name in self.packed.variant.appended}

    @property
    def row_numbers(self) -> int:
        """The count of numbers in a row, columns and those after them."""
        return self.packed.shape[1] + sum(self.appended.values())

    def decoded(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes all numbers of rows, given row indices [...]: [..., row_numbers]."""
        packed = self.packed
        columns = packed.format.dequantize_rows(packed, rows, dtype)
        if not self.appended:
            return columns
        fields = packed.format.unpack(packed.rows(rows.flatten()))
        return torch.cat([columns, *(fields[name].to(dtype).view(*rows.shape, -1) for name in self.appended)], -1)

    def encoded(self, rows: Tensor) -> PackedWeight:
        """Encodes rows [R * group, row_numbers] in float32 with the reference.

        Raises FormatError for columns that are not finite.
        """
        packed, variant = self.packed, self.packed.variant
        shared = {name: number.to(rows.device) for name, number in self.shared.items()}
        scale = variant.roles.get("scale", "")
        rows, *behind = torch.split(rows.float(), [packed.shape[1], *self.appended.values()], 1)
        sample = rows
        for name, number in shared.items():
            rows = rows / number.float()                         # by a scale of codes, or of all scales
            sample = torch.zeros_like(rows) if name == scale else rows
        fields = {**packed.format.unpack(packed.format.quantize(sample, packed.storage, **self.options)), **shared}
        if scale in shared:
            code = variant.roles["code"]
            ties, offset = str(self.settings.get("ties", "even")), int(self.settings.get("offset", 0))
            fields[code] = codes(rows, self.code_type, ties, offset)
        for name, numbers in zip(self.appended, behind, strict=True):
            fields[name] = numbers.to(FLOATS[self.type_of(name)])
        return packed.format.pack(fields, packed.storage, **packed.params)

    @property
    def code_type(self) -> str:
        return self.type_of(self.packed.variant.roles["code"])

    def rows_of(self, tensor: Tensor) -> int:
        """The number of weight rows per row of one of its tensors; 0 for a tensor that all rows share."""
        n = self.packed.shape[0]
        return n // tensor.shape[0] if tensor.dim() and tensor.shape[0] * self.group >= n else 0


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of `blocks` blocks of `block_size` tokens, of `heads` heads of `head_dim` channels.

    value_dim: channels of values.  If values are the first channels of keys, `values` is `keys`.  tail: [sequences, heads, group,
    head_dim], the keys of every sequence's incomplete group, if tokens share numbers of keys; else None.
    """

    keys: CachedRows
    values: CachedRows
    blocks: int
    block_size: int
    heads: int
    head_dim: int
    value_dim: int
    tail: Tensor | None = field(default=None)

    @property
    def is_shared(self) -> bool:
        """Whether values are the first channels of keys."""
        return self.values is self.keys

    @property
    def device(self) -> torch.device:
        return self.keys.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and tail."""
        tail = 0 if self.tail is None else self.tail.numel() * self.tail.element_size()
        return self.keys.packed.nbytes + (0 if self.is_shared else self.values.packed.nbytes) + tail

    def rows(self, slots: Tensor) -> Tensor:
        """The rows of the packed weights for slots [T] and all heads: int64 [T, heads]."""
        slots = slots.long()
        heads = torch.arange(self.heads, device=slots.device)
        return ((slots // self.block_size)[:, None] * self.heads + heads) * self.block_size + (slots % self.block_size)[:, None]


def allocate(keys: CacheFormat | str, values: CacheFormat | str | None = None, *, blocks: int, block_size: int, heads: int,
             head_dim: int, value_dim: int | None = None, sequences: int = 0, dtype: torch.dtype = torch.bfloat16,
             device: torch.device | str = "cpu") -> KVCache:
    """Allocates an empty cache; values have the format of keys by default.

    value_dim: values are the first `value_dim` channels of keys, in the same memory (multi-head latent attention).  sequences,
    dtype: of the tail, needed if tokens share numbers of keys.  Raises FormatError for a format whose rows cannot be stored one
    by one, for values that share numbers among tokens, and for sizes that do not divide.
    """
    key_format = CacheFormat(keys) if isinstance(keys, str) else keys
    value_format = key_format if values is None else CacheFormat(values) if isinstance(values, str) else values
    if blocks * block_size >= LARGEST:
        raise FormatError(f"{blocks} blocks of {block_size} tokens are 2^31 slots or more")
    if value_dim is not None and not (values is None and 0 < value_dim <= head_dim):
        raise FormatError(f"values are at most the {head_dim} channels of keys, and at least one, not {value_dim}" if not values
                          else f"values that are the first {value_dim} of {head_dim} channels of keys have the format of keys")
    rows = blocks * heads * block_size
    key_rows = _allocate_rows(key_format, rows, block_size, head_dim, device)
    value_rows = key_rows if value_dim is not None else _allocate_rows(value_format, rows, block_size, head_dim, device)
    if value_rows.group > 1:
        raise FormatError(f"{value_format.format.name}: values that share numbers among {value_rows.group} tokens cannot be "
                          "cached")
    tail = None
    if key_rows.group > 1:
        if sequences < 1:
            raise FormatError(f"{key_format.format.name}: keys share numbers among {key_rows.group} tokens: say how many "
                              "sequences there may be, each of which has a group that is not full")
        tail = torch.zeros(sequences, heads, key_rows.group, head_dim, dtype=dtype, device=device)
    return KVCache(key_rows, value_rows, blocks, block_size, heads, head_dim, value_dim or head_dim, tail)


def _allocate_rows(choice: CacheFormat, rows: int, block_size: int, head_dim: int, device: torch.device | str) -> CachedRows:
    """Allocates all rows of keys or of values: zeros, and the numbers that all rows share."""
    format = choice.format
    params, scheme_options, storage = format.chosen({"storage": choice.storage, **choice.options})
    variant = format.variant(params)
    layout = variant.storages[storage]
    if layout.streams or layout.whole or layout.order:
        raise FormatError(f"{format.name}.{storage}: a row cannot be stored by itself")
    _check_numbers(format, variant, choice.numbers)
    behind = sum(variant.fields[name].axes[1].extent(1, 1, {}) or 0 for name in variant.appended)
    k = head_dim - behind
    if k < 1:
        raise FormatError(f"head_dim is {head_dim} and {format.name}.{storage} has {behind} channels behind its columns")
    if fault := layout.why_unsupported_shape((block_size, k), format.sizes(params, (block_size, k))):
        raise FormatError(f"{format.name}.{storage}: {fault}" + (f", and {behind} channels behind them" if behind else ""))
    sizes = format.sizes(params, (block_size, k))
    group = max(axis.by(sizes) for field in variant.fields.values() for axis in field.axes if axis.dim == "N")
    if block_size % group:
        raise FormatError(f"{format.name}: {group} tokens share numbers, and blocks have {block_size}")
    settings = {**variant.settings, **layout.options, **scheme_options}
    template = full_template(format, storage, (group, k), params)
    cached = CachedRows(template, group, choice.numbers, choice.options, settings)
    tensors: dict[str, Tensor] = {}
    for name, tensor in cached.encoded(torch.zeros(group, head_dim, dtype=torch.float32, device="cpu")).tensors.items():
        axes = layout.tensors[name].axes
        if all(axis.dim != "N" for axis in axes):
            tensors[name] = tensor.to(device)
        elif axes[0].dim != "N" or group % tensor.shape[0] or axes[0].by(sizes) * tensor.shape[0] != group:
            raise FormatError(f"{format.name}.{storage}: rows do not lie one by one in '{name}' [{layout.tensors[name].text}]")
        else:
            tensors[name] = torch.zeros(rows // group * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype, device=device)
    return CachedRows(assemble(format, storage, tensors, (rows, k), params), group, choice.numbers, choice.options, settings)


def _check_numbers(format: Format, variant: Variant, numbers: Mapping[str, float]) -> None:
    """Raises FormatError for numbers of no field that all rows share, and for a missing scale of all rows."""
    shared = [name for name, field in variant.fields.items() if not field.axes]
    for name in numbers:
        if name not in shared:
            raise FormatError(f"{format.name}: '{name}' is no number that all rows share; those are "
                              f"{', '.join(shared) or 'none'}")
    scale = variant.roles.get("scale", "")
    if scale in shared and scale not in numbers:
        raise FormatError(f"{format.name}: all rows share the scale '{scale}': give it, as numbers={{'{scale}': ...}}")
