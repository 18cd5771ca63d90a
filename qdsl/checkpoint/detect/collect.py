"""Collects what a module's tensors are: dtypes and shapes from headers, and what small tensors say.  Nothing imports torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdsl.checkpoint.detect.header_claims import HeaderClaims, layer_tensors, scale_markers
from qdsl.checkpoint.detect.tensor_names import TensorNames
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import START_BYTES, CheckpointError, shown, strict_json, torch_name
from qdsl.core.stored import Description, TensorInfo

NUMBERS_LIMIT = 1 << 10                                          # bytes of a tensor of numbers that says something
NUMBER_CODES = {"I64": "q", "I32": "i", "U8": "B", "I8": "b", "F32": "f"}        # as struct has them, by dtype


@dataclass(frozen=True, slots=True)
class Module:
    """A module's tensors as files have them, by the last parts of their names.

    tensors: their names in the checkpoint, of those whose files are there.  claims: what a header says of the weight, None for
    nothing.  shape: (N, K) or (E, N, K) that the caller knows, () for none.  transposed: tensors of three axes are read with the
    last two swapped.  is_complete: whether no tensor lies in a file that is missing.
    """

    name: str
    tensors: Mapping[str, str]
    claims: Mapping[str, Any] | None
    shape: tuple[int, ...] = ()
    transposed: bool = False
    is_complete: bool = True


class Collector:
    """Reads the headers and small tensors of a folder's modules, by which formats are recognised."""

    def __init__(self, folder: Folder, formats: Sequence[Description]) -> None:
        self.folder = folder
        self.header_claims = HeaderClaims(folder)
        self.names = TensorNames(formats, self.header_claims)
        self.layer_tensors = layer_tensors()
        markers = scale_markers()
        self.has_scale_marker = any(name.rpartition(".")[2] in markers for name in folder.names())
        self.shape_tensors = {leaf for format in formats for storages in format.variants.values() for layout in storages.values()
                              for leaf, stored in layout.items() if stored.dtype == "shape"}
        self.small_tensors: dict[str, object] = dict.fromkeys(self.shape_tensors)
        self.small_tensors |= {leaf: rule for format in formats for leaf, rule in format.detect.get("tensors", {}).items()}

    def module(self, name: str, tensors: Mapping[str, str], shape: tuple[int, ...], transposed: bool) -> Module:
        """A module.  Raises CheckpointError where what should be JSON in a header is none."""
        present = self.present(tensors)
        return Module(name, present, self.header_claims.settings(name, present), shape, transposed, len(present) == len(tensors))

    def present(self, tensors: Mapping[str, str]) -> dict[str, str]:
        """Those tensors whose files are there."""
        return {leaf: full for leaf, full in tensors.items() if full not in self.folder.missing}

    def missing(self, tensors: Mapping[str, str]) -> str:
        """The tensors of the module whose files are missing, as text; '' for none."""
        return "; ".join(f"'{leaf}' lies in {self.folder.missing[full]}, which is missing" for leaf, full in tensors.items()
                         if full in self.folder.missing)

    def kind(self, leaf: str, full: str) -> tuple[str, str, int]:
        """The last part of a tensor's name, its dtype and its rank, which tell quantized layers apart."""
        entry = self.folder.entry(full)
        return leaf, entry.dtype, len(entry.shape)

    def entries(self, tensors: Mapping[str, str]) -> dict[str, TensorInfo]:
        """Dtypes, as torch calls them, and shapes."""
        entries = {leaf: self.folder.entry(full) for leaf, full in tensors.items()}
        dtypes = {leaf: "I64" if leaf in self.shape_tensors and entry.dtype == "I32" else entry.dtype
                  for leaf, entry in entries.items()}
        return {leaf: TensorInfo(torch_name(dtypes[leaf]), entry.shape) for leaf, entry in entries.items()}

    def read_entries(self, module: Module, contents: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """The same for a module, in the order of its axes, with the numbers of tensors that state N and K."""
        entries = self.entries(module.tensors)
        if module.transposed:
            entries = {leaf: replace(entry, shape=(*entry.shape[:1], *entry.shape[:0:-1])) if len(entry.shape) == 3 else entry
                       for leaf, entry in entries.items()}
        return entries | {leaf: replace(entries[leaf], values=tuple(content)) for leaf, content in contents.items()
                          if isinstance(content, list)}

    def contents(self, tensors: Mapping[str, str]) -> dict[str, Any]:
        """What small tensors say: a JSON object where a format's rule for them is one, else numbers.  Raises CheckpointError."""
        contents: dict[str, Any] = {}
        for leaf, full in tensors.items():
            if leaf not in self.small_tensors:
                continue
            data, dtype = self.start(full), self.folder.entry(full).dtype
            if not data:                                         # known by its header alone
                continue
            if isinstance(self.small_tensors[leaf], Mapping):
                where = f"{self.folder.file(full).path}: tensor {shown(full)}"
                contents[leaf] = strict_json(data, where, depth=8)
                if not isinstance(contents[leaf], Mapping):
                    raise CheckpointError(f"{where}: not a JSON object")
            elif dtype in NUMBER_CODES and len(data) <= NUMBERS_LIMIT:
                code = NUMBER_CODES[dtype]
                numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
                contents[leaf] = numbers[0] if len(numbers) == 1 else numbers
        return contents

    def start(self, full: str) -> bytes:
        """The first bytes of a tensor, none where its header alone is known."""
        return self.folder.file(full).start(full, START_BYTES)

    def is_filled(self, full: str, word: int) -> bool:
        """Whether the first bytes of a tensor repeat one 32-bit word."""
        data = self.start(full)
        return len(data) > 0 and data == word.to_bytes(4, "little") * (len(data) // 4)
