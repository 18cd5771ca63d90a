"""Lookup tables of numbers, or of rows of numbers, that decode indexes by a code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdsl.runtime.libraries.private_apis import FakeTensor
from qdsl.runtime.weight.arrays import as_type

KINDS = {"f32": torch.float32, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8}
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
FEW = 16                                                         # entries up to which a traced lookup is short enough


def entries(rows: Tensor, codes: Tensor) -> Tensor:
    """The rows of tables [..., entries, columns] at integer codes, which must be in range: the codes' shape, then columns.

    Axes before the entries are those of the codes, or 1.  Raises RuntimeError in a traced program, because it would look whole
    tensors up.
    """
    if isinstance(codes, FakeTensor):
        raise RuntimeError("rows are not looked up in a program that is traced")
    if rows.dim() > 2:                                           # many tables become one long table
        count = rows.shape[:-2].numel()
        first = torch.arange(0, count * rows.shape[-2], rows.shape[-2], dtype=torch.int32, device=rows.device)
        codes = codes + first.view(rows.shape[:-2])
        rows = rows.flatten(0, -2)
    if rows.device.type == "cpu":                                # numpy copies short rows twice as fast
        return torch.from_numpy(np.take(rows.numpy(), codes.numpy().astype(np.intp), 0, mode="clip"))
    return rows.index_select(0, codes.flatten().to(torch.int32)).view(*codes.shape, -1)


def lookup(numbers: Tensor, codes: Tensor) -> Tensor:
    """The numbers of stored tables [..., entries] at integer codes, which must be in range: the codes' shape.

    Axes before the entries are those of the codes, or 1.
    """
    return entries(numbers.unsqueeze(-1), codes).squeeze(-1)


class Table:
    """A table of numbers as float32, int32 or int8, copied to a device at first use.

    `table[codes]` has the codes' shape, followed by the columns of a table of rows.
    """

    __slots__ = ("_bits", "_on", "_pairs", "numbers", "values")

    @torch.inference_mode(False)                                 # what is kept serves all later calls
    def __init__(self, kind: str, *numbers: float, columns: int = 0) -> None:
        self.numbers = numbers
        self.values = torch.tensor(numbers, dtype=KINDS[kind], device="cpu")
        self._bits: list[int] = [] if columns else self.values.view(torch.int32).tolist()
        if columns:
            self.values = self.values.view(-1, columns)
        self._on: dict[torch.device, Tensor] = {}
        self._pairs: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The numbers [entries], or [rows, columns], on a device."""
        if device.type in ("cpu", "meta"):
            return self.values.to(device)
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = self.values.to(device)
        return self._on[device]

    def halves(self, count: int, unit: float) -> Table:
        """The bits of `count` numbers divided by `unit` in float16, 0 for a unit of 0, then of these in bfloat16."""
        numbers = self.values[:count].float()
        halves = ((numbers / (unit or torch.inf)).half(), numbers.bfloat16())
        return Table("i16", *torch.cat([half.view(torch.int16) for half in halves]).tolist())

    def with_codes(self, function: Callable[[Tensor, Tensor], Tensor], count: int) -> Table:
        """The table of function(row, code) for all rows and `count` codes: entry r + c * rows is row r with code c."""
        codes = torch.arange(count, dtype=torch.int32, device="cpu")[:, None, None]
        rows = self.values if self.values.is_floating_point() else self.values.to(torch.int32)
        numbers = function(rows, codes).flatten(0, 1)
        least, most = int(numbers.min()), int(numbers.max())
        kind = "f32" if numbers.is_floating_point() else "i8" if least >= -128 and most < 128 else "i32"
        return Table(kind, *numbers.flatten().tolist(), columns=numbers.shape[1])

    def __getitem__(self, codes: Tensor) -> Tensor:
        """The numbers, or rows, at integer codes, which must be in range."""
        if isinstance(codes, FakeTensor):
            return self._select_by_bits(codes)
        values = self.on(codes.device)
        if values.dim() == 1 and len(values) <= FEW and codes.device.type == "cpu" and codes.element_size() == 1 \
                and codes.numel() % 2 == 0:
            words = as_type(codes.flatten(), torch.int16)
            return self.pair_lookup().index_select(0, words.to(torch.int32)).view(values.dtype).view(codes.shape)
        if values.dim() > 1 and values.dtype == torch.int8 and values.shape[1] in WORDS:
            values = values.view(WORDS[values.shape[1]]).flatten()          # a row is one word, and looked up ten times as fast
        elif values.dim() > 1:
            return entries(values, codes)
        selected = values.index_select(0, codes.flatten().to(torch.int32))
        return selected.view(self.values.dtype).view(*codes.shape, *self.values.shape[1:])

    @torch.inference_mode(False)
    def pair_lookup(self) -> Tensor:
        """The numbers of two codes as one word, at the word of both code bytes, to halve the lookups."""
        if self._pairs is None:
            words = torch.arange(FEW << 8, device="cpu")
            codes = torch.stack([words, words >> 8], -1).bitwise_and_(FEW - 1).clamp_(max=len(self.values) - 1)
            self._pairs = self.values[codes].view(WORDS[2 * self.values.element_size()]).flatten()
        return self._pairs

    def _select_by_bits(self, codes: Tensor) -> Tensor:
        """As __getitem__, by selecting on one bit of the codes at a time, which a compiler can vectorize.

        Raises RuntimeError for a table that is too long for that.
        """
        if self.values.dim() > 1 or len(self.numbers) > FEW:
            raise RuntimeError(f"a table of {len(self.numbers)} numbers is not looked up in a program that is traced")
        wide = codes.to(torch.int32)
        left: list[Any] = [*self._bits, *self._bits[-1:] * (FEW - len(self._bits))]
        for bit in range(FEW.bit_length() - 1):
            mask = wide << 31 - bit >> 31
            left = [(mask & (a ^ b)) ^ a for a, b in zip(left[::2], left[1::2], strict=True)]
        chosen: Tensor = left[0].view(self.values.dtype)
        return chosen
