"""Collects a module's tensors for detection: dtypes and shapes from headers, and contents of small tensors.  No torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from qdsl.checkpoint.detect.header_claims import HeaderClaims, scale_markers
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.tensor_names import TensorNames
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import START_BYTES, as_byte_entry, shown, torch_name
from qdsl.checkpoint.files.strict_json import strict_object
from qdsl.core.stored import Description, TensorInfo

NUMBERS_LIMIT = 1 << 10                                          # most bytes of a tensor whose numbers are read
NUMBER_CODES = {"I64": "q", "I32": "i", "U8": "B", "I8": "b", "F32": "f"}        # codes of struct, by dtype


@dataclass(frozen=True, slots=True)
class Module:
    """A module's tensors as files have them, by the last parts of their names.

    tensors: their names in the checkpoint, if their files exist.  claims: the header's metadata of the weight, or None.  shape:
    the caller's (N, K) or (E, N, K), or ().  transposed: swap the last two axes of three-axis tensors.  is_complete: whether no
    tensor is in a missing file.
    """

    name: str
    tensors: Mapping[str, str]
    claims: Mapping[str, Any] | None
    shape: tuple[int, ...] = ()
    transposed: bool = False
    is_complete: bool = True


class ModuleReader:
    """Reads headers and small tensors of a folder's modules, for detection of formats."""

    def __init__(self, folder: Folder, formats: Sequence[Description]) -> None:
        self.folder = folder
        self.formats = formats
        self.header_claims = HeaderClaims(folder)
        self.names = TensorNames(formats, self.header_claims)
        self.layer_tensors = [header.tensor for header in producers().headers if header.tensor]
        self.has_layer_tensors = any(name.rpartition(".")[2] in self.layer_tensors for name in folder.names())
        markers = scale_markers()
        self.has_scale_marker = any(name.rpartition(".")[2] in markers for name in folder.names())
        every = [tensor for format in formats for tensor in format.tensors]
        self.shape_tensors = {leaf for leaf, stored in every if stored.dtype == "shape"}
        self.indices = {key for leaf, stored in every if stored.dtype == "index" for key in (leaf, *stored.aliases)}
        self.optional = {key for leaf, stored in every if stored.optional for key in (leaf, *stored.aliases)}
        self.small_tensors: dict[str, object] = dict.fromkeys(self.shape_tensors)
        self.small_tensors |= {leaf: rule for format in formats for leaf, rule in format.detect.get("tensors", {}).items()}
        self.json_keys: dict[str, set[str]] = {}                 # of small tensors that hold JSON
        for leaf, rule in self.small_tensors.items():
            if isinstance(rule, Mapping):
                rules = [format.detect.get("tensors", {}).get(leaf, {}) for format in formats]
                self.json_keys[leaf] = {key for own in rules for key in own}

    def module(self, name: str, tensors: Mapping[str, str], shape: tuple[int, ...], transposed: bool) -> Module:
        """A module by its tensors.  Raises CheckpointError for invalid JSON in a header."""
        present = self.present(tensors)
        return Module(name, present, self.header_claims.settings(name, present), shape, transposed, len(present) == len(tensors))

    def present(self, tensors: Mapping[str, str]) -> dict[str, str]:
        """The tensors whose files exist."""
        return {leaf: full for leaf, full in tensors.items() if full not in self.folder.missing}

    def missing(self, tensors: Mapping[str, str]) -> str:
        """The tensors of the module in missing files, as text; '' for none."""
        return "; ".join(f"'{leaf}' lies in {self.folder.missing[full]}, which is missing" for leaf, full in tensors.items()
                         if full in self.folder.missing)

    def kind(self, leaf: str, full: str) -> tuple[str, str, int]:
        """The last part of a tensor's name, its dtype and its rank, by which quantized layers are told apart."""
        entry = self.folder.entry(full)
        return leaf, entry.dtype, len(entry.shape)

    def entries(self, tensors: Mapping[str, str]) -> dict[str, TensorInfo]:
        """Dtypes, by torch's names, and shapes, as storages have them: of extents 64 bits, of indices 32.

        Without empty tensors that a storage may lack: gptqmodel's g_idx of no columns stands for those in order.
        """
        entries = {leaf: as_byte_entry(self.folder.entry(full)) for leaf, full in tensors.items()
                   if not self.is_empty(leaf, full)}
        dtypes = {leaf: "I64" if leaf in self.shape_tensors and entry.dtype == "I32" else
                  "I32" if leaf in self.indices and entry.dtype == "I64" else entry.dtype for leaf, entry in entries.items()}
        return {leaf: TensorInfo(torch_name(dtypes[leaf]), entry.shape) for leaf, entry in entries.items()}

    def is_empty(self, leaf: str, full: str) -> bool:
        """Whether a tensor that a storage may lack has no elements."""
        return leaf in self.optional and 0 in self.folder.entry(full).shape

    def read_entries(self, module: Module, contents: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """The same for a module with its axes in order, with the numbers of tensors that state N and K."""
        entries = self.entries(module.tensors)
        if module.transposed:
            entries = {leaf: replace(entry, shape=(*entry.shape[:1], *entry.shape[:0:-1])) if len(entry.shape) == 3 else entry
                       for leaf, entry in entries.items()}
        return entries | {leaf: replace(entries[leaf], values=tuple(content)) for leaf, content in contents.items()
                          if isinstance(content, list)}

    def contents(self, tensors: Mapping[str, str]) -> dict[str, Any]:
        """The contents of small tensors: a JSON object if a format's rule is one, else numbers.  Raises CheckpointError."""
        contents: dict[str, Any] = {}
        for leaf, full in tensors.items():
            if leaf not in self.small_tensors:
                continue
            data, dtype = self.start(full), self.folder.entry(full).dtype
            if not data:                                         # only its header exists
                continue
            if isinstance(self.small_tensors[leaf], Mapping):
                where = f"{self.folder.file(full).path}: tensor {shown(full)}"
                contents[leaf] = strict_object(data, where, depth=8)
            elif dtype in NUMBER_CODES and len(data) <= NUMBERS_LIMIT:
                code = NUMBER_CODES[dtype]
                numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
                contents[leaf] = numbers[0] if len(numbers) == 1 else numbers
        return contents

    def start(self, full: str) -> bytes:
        """The first bytes of a tensor; none if only its header exists."""
        return self.folder.file(full).start(full, START_BYTES)

    def rises(self, full: str) -> bool:
        """Whether the first integers of an index are sorted."""
        return _rises(self.start(full), NUMBER_CODES.get(self.folder.entry(full).dtype, "i"))

    def is_filled(self, full: str, word: int) -> bool:
        """Whether the first bytes of a tensor repeat one 32-bit word."""
        data = self.start(full)
        return len(data) > 0 and data == word.to_bytes(4, "little") * (len(data) // 4)


@lru_cache(maxsize=64)                                           # most layers have the same
def _rises(data: bytes, code: str) -> bool:
    """Whether integers are sorted.  code: of struct."""
    numbers = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    return list(numbers) == sorted(numbers)
