"""Tables of numbers that decode looks up by a code."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = {"f32": torch.float32, "i32": torch.int32}


class Table:
    """Numbers as float32 or int32, brought to a device when it first asks for them.  `table[codes]` keeps the codes' shape."""

    __slots__ = ("_on", "values")

    def __init__(self, kind: str, *numbers: float) -> None:
        self.values = torch.tensor(numbers, dtype=KINDS[kind])
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The numbers [entries] on a device."""
        if device.type in ("cpu", "meta"):
            return self.values.to(device)
        if device not in self._on:
            self._on[device] = self.values.to(device)
        return self._on[device]

    def __getitem__(self, codes: Tensor) -> Tensor:
        """The numbers of integer codes, each within the table."""
        return self.on(codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
