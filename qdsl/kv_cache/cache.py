"""A paged cache: keys and values as rows of two packed weights.

Row (block * heads + head) * block_size + offset of a weight [blocks * heads * block_size, head_dim] is a token's head, where
slot = block * block_size + offset.  The tokens of a block and head lie next to one another, so that they may share numbers: a
spec says `s: f16[n // 32, k]`, and `block_size` is a multiple of 32.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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
        module = importlib.import_module(f"qdsl.generated.{format}") if isinstance(format, str) else format
        object.__setattr__(self, "format", module.FORMAT)
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "numbers", dict(numbers or {}))
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """All rows of keys, or of values, as a weight whose tensors change in place.

    group: how many tokens share numbers.  numbers: fields that all rows share.  options: of `quantize`.  settings: of its scheme,
    the spec's, the storage's and the caller's.
    """

    packed: PackedWeight
    group: int
    numbers: Mapping[str, float]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def shared(self) -> dict[str, Tensor]:
        """The numbers that all rows share, as they are stored."""
        types = {name: self.packed.params.get(field.type, field.type) for name, field in self.packed.variant.fields.items()}
        return {name: torch.tensor(number, dtype=FLOATS[str(types[name])]) for name, number in self.numbers.items()}

    def encoded(self, rows: Tensor) -> PackedWeight:
        """Rows [R * group, head_dim] as the reference encodes them, from float32.  Raises FormatError for those not finite."""
        packed, variant = self.packed, self.packed.variant
        shared = {name: number.to(rows.device) for name, number in self.shared.items()}
        rows, scale = rows.float(), variant.roles.get("scale", "")
        sample = rows
        for name, number in shared.items():
            rows = rows / number.float()                         # by a scale of codes, or of all scales
            sample = torch.zeros_like(rows) if name == scale else rows
        fields = {**packed.format.unpack(packed.format.quantize(sample, packed.storage, **self.options)), **shared}
        if scale in shared:
            code = variant.roles["code"]
            ties, offset = str(self.settings.get("ties", "even")), int(self.settings.get("offset", 0))
            fields[code] = codes(rows, self.code_type, ties, offset)
        return packed.format.pack(fields, packed.storage, **packed.params)

    @property
    def code_type(self) -> str:
        """The number type of codes."""
        kind = self.packed.variant.fields[self.packed.variant.roles["code"]].type
        return str(self.packed.params.get(kind, kind))

    def rows_of(self, tensor: Tensor) -> int:
        """How many rows of the weight share a row of one of its tensors; 0 for a tensor that all share."""
        n = self.packed.shape[0]
        return n // tensor.shape[0] if tensor.dim() and tensor.shape[0] * self.group >= n else 0


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of `blocks` blocks of `block_size` tokens, of `heads` heads of `head_dim` channels.

    tail: [sequences, heads, group, head_dim], the keys of the open group of every sequence, where keys share numbers among
    tokens; else None.
    """

    keys: CachedRows
    values: CachedRows
    blocks: int
    block_size: int
    heads: int
    head_dim: int
    tail: Tensor | None = field(default=None)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.keys.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and tail."""
        tail = 0 if self.tail is None else self.tail.numel() * self.tail.element_size()
        return self.keys.packed.nbytes + self.values.packed.nbytes + tail

    def rows(self, slots: Tensor) -> Tensor:
        """Rows of the packed weights that slots [T] are, of all heads: int64 [T, heads]."""
        slots = slots.long()
        heads = torch.arange(self.heads, device=slots.device)
        return ((slots // self.block_size)[:, None] * self.heads + heads) * self.block_size + (slots % self.block_size)[:, None]


def allocate(keys: CacheFormat | str, values: CacheFormat | str | None = None, *, blocks: int, block_size: int, heads: int,
             head_dim: int, sequences: int = 0, dtype: torch.dtype = torch.bfloat16,
             device: torch.device | str = "cpu") -> KVCache:
    """An empty cache; values have the format of keys by default.

    sequences, dtype: of the tail, where keys share numbers among tokens.  Raises FormatError for a format whose rows cannot be
    stored one by one, for values that share numbers among tokens, and for sizes that do not divide.
    """
    key_format = CacheFormat(keys) if isinstance(keys, str) else keys
    value_format = key_format if values is None else CacheFormat(values) if isinstance(values, str) else values
    if blocks * block_size >= LARGEST:
        raise FormatError(f"{blocks} blocks of {block_size} tokens are 2^31 slots or more")
    rows = blocks * heads * block_size
    key_rows, value_rows = (_allocated(choice, rows, block_size, head_dim, device) for choice in (key_format, value_format))
    if value_rows.group > 1:
        raise FormatError(f"{value_format.format.name}: values that share numbers among {value_rows.group} tokens cannot be "
                          "cached")
    tail = None
    if key_rows.group > 1:
        if sequences < 1:
            raise FormatError(f"{key_format.format.name}: keys share numbers among {key_rows.group} tokens: say how many "
                              "sequences there may be, each of which has a group that is not full")
        tail = torch.zeros(sequences, heads, key_rows.group, head_dim, dtype=dtype, device=device)
    return KVCache(key_rows, value_rows, blocks, block_size, heads, head_dim, tail)


def _allocated(choice: CacheFormat, rows: int, block_size: int, head_dim: int, device: torch.device | str) -> CachedRows:
    """All rows of one half of a cache: zeros, with the numbers that all share."""
    format = choice.format
    params, scheme_options, storage = format.chosen({"storage": choice.storage, **choice.options})
    variant = format.variant(params)
    layout = variant.storages[storage]
    if layout.streams or layout.whole or layout.order:
        raise FormatError(f"{format.name}.{storage}: a row cannot be stored by itself")
    _check_numbers(format, variant, choice.numbers)
    sizes = format.sizes(params, (block_size, head_dim))
    group = max(axis.by(sizes) for field in variant.fields.values() for axis in field.axes if axis.dim == "N")
    if block_size % group:
        raise FormatError(f"{format.name}: {group} tokens share numbers, and blocks have {block_size}")
    settings = {**variant.settings, **layout.options, **scheme_options}
    template = full_template(format, storage, (group, head_dim), params)
    cached = CachedRows(template, group, choice.numbers, choice.options, settings)
    tensors: dict[str, Tensor] = {}
    for name, tensor in cached.encoded(torch.zeros(group, head_dim)).tensors.items():
        axes = layout.tensors[name].axes
        if all(axis.dim != "N" for axis in axes):
            tensors[name] = tensor.to(device)
        elif axes[0].dim != "N" or group % tensor.shape[0] or axes[0].by(sizes) * tensor.shape[0] != group:
            raise FormatError(f"{format.name}.{storage}: rows do not lie one by one in '{name}' [{layout.tensors[name].text}]")
        else:
            tensors[name] = torch.zeros(rows // group * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype, device=device)
    packed = assemble(format, storage, tensors, (rows, head_dim), params)
    return CachedRows(packed, group, choice.numbers, choice.options, settings)


def _check_numbers(format: Format, variant: Variant, numbers: Mapping[str, float]) -> None:
    """Raises FormatError for numbers that are no fields which all rows share, and for a scale of all rows that is missing."""
    shared = [name for name, field in variant.fields.items() if not field.axes]
    for name in numbers:
        if name not in shared:
            raise FormatError(f"{format.name}: '{name}' is no number that all rows share; those are "
                              f"{', '.join(shared) or 'none'}")
    scale = variant.roles.get("scale", "")
    if scale in shared and scale not in numbers:
        raise FormatError(f"{format.name}: all rows share the scale '{scale}': give it, as numbers={{'{scale}': ...}}")
