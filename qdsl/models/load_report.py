"""What loading did to a model, and the bytes that its tensors take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qdsl.core.text import Displayed, byte_text, counted
from qdsl.models.names import Names


@dataclass(slots=True, repr=False, kw_only=True)
class LoadReport(Displayed):
    """What happened to a model's layers and a checkpoint's tensors.

    packed: 'format.storage' of each layer that holds its weight packed.  dense: Linear and Embedding layers, and packed weights
    of the checkpoint, that became plain numbers, and why.  unused: tensors of the checkpoint that have no place in the model.
    unread: files of weights beside it that are no part of the model, such as an adapter's.
    allowed: what the checkpoint says that qdsl does not compute, which `allow_unknown` let pass.  as_llama_cpp: keys and tensors
    of a GGUF file that llama.cpp does not compute either.
    bytes_before: what the model's parameters and buffers would take in plain numbers; bytes_after: what they take now.
    device_bytes: that by device.  resident_bytes: memory of this process after loading, mapped files included.  dtype: of
    products, and why, where the loader chooses it.
    """

    packed: dict[str, str] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    as_llama_cpp: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    dtype: str = ""

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """Layers by format and storage, then the dense ones with the reasons."""
        title = f"{byte_text(self.bytes_before)} of plain numbers are {byte_text(self.bytes_after)}"
        rows: list[tuple[object, ...]] = [*Counter(self.packed.values()).items()]
        rows += [("dense", f"{name}: {why}") for name, why in self.dense.items()]
        return title, ("stored as", "layers"), [*rows, *(("not used", name) for name in self.unused)]

    def __str__(self) -> str:
        labels = ", ".join(f"{count} {label}" for label, count in Counter(self.packed.values()).items())
        lines = [f"{counted(len(self.packed), 'layer')} packed: {labels}",
                 f"{self.bytes_before} bytes of plain numbers are {self.bytes_after} bytes: "
                 + ", ".join(f"{nbytes} on {device}" for device, nbytes in self.device_bytes.items())]
        lines += [f"products in {self.dtype}"] if self.dtype else []
        lines += [f"{counted(len(self.dense), 'layer')} dense"] if self.dense else []
        lines += [f"  {name}: {why}" for name, why in self.dense.items()]
        lines += [f"not computed: {text}" for text in self.allowed]
        lines += [f"not computed, as in llama.cpp: {', '.join(self.as_llama_cpp)}"] if self.as_llama_cpp else []
        lines += [f"{counted(len(self.unused), 'tensor')} not used: {', '.join(self.unused)}"] if self.unused else []
        lines += [f"not read, as no part of the model: {', '.join(self.unread)}"] if self.unread else []
        return "\n".join(lines)


def bytes_by_device(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters and buffers by device, shared ones once."""
    sizes: dict[str, dict[tuple[int, int], int]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes.setdefault(str(tensor.device), {})[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
    return {device: sum(per_tensor.values()) for device, per_tensor in sizes.items()}


def dense_bytes(names: Names, dtype: torch.dtype | None) -> int:
    """Bytes of a model's parameters and buffers in plain numbers, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*names.parameters.values(), *names.buffers.values())}
    return sum(tensor.numel() * (dtype or tensor.dtype).itemsize if tensor.is_floating_point() else tensor.nbytes
               for tensor in tensors.values())
