"""Writing GGUF files: the header first, then one tensor after the other, in chunks, so that a few chunks are all the memory it
takes.  The same metadata and tensors give the same bytes; what the reader would not read without a problem is not written.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from qdsl.checkpoint.files.ggml_types import GgmlType
from qdsl.checkpoint.files.gguf import MAGIC, alignment_of, parse
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.resume import Resume, write_tensors
from qdsl.checkpoint.files.safetensors import Buffer, CheckpointError, shown

VERSION = 3
NAME_LIMIT = 63                                                  # bytes that every reader of llama.cpp's takes
ELEMENTS_LIMIT = 1 << 40                                         # of a tensor: all together stay under 2^63 bytes
# Architectures whose readers take longer names: diffusion models keep those of their checkpoints.
DIFFUSION = ("flux", "sd1", "sdxl", "sd3", "aura", "hidream", "cosmos", "ltxv", "hyvid", "wan", "lumina2", "qwen_image")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written.  shape: in torch's order.  chunks: its bytes, in pieces of any length, asked for once, when the
    tensors before it are written.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    chunks: Iterable[Buffer] = field(repr=False)


def write(path: str | os.PathLike[str], metadata: Mapping[str, Value], tensors: Sequence[NewTensor],
          resume: Resume | None = None, state_checksums: bool = False) -> None:
    """Write a GGUF file.  Alignment is what general.alignment says, 32 without it.

    resume, state_checksums: as of `write_tensors`.
    Raises CheckpointError for what the reader would refuse, for names that are too long for the architecture, and where chunks
    do not add up to a tensor's size; the destination is then as it was.
    """
    target = Path(path)
    header, sizes, alignment = _header(metadata, tensors, target)
    _check_names(metadata, tensors, target)
    parts = [(tensor.name, tensor.chunks, size, -size % alignment) for tensor, size in zip(tensors, sizes, strict=True)]
    write_tensors(target, header, parts, resume, state_checksums)


def _check_names(metadata: Mapping[str, Value], tensors: Sequence[NewTensor], path: Path) -> None:
    architecture = metadata["general.architecture"].decoded() if "general.architecture" in metadata else None
    for tensor in tensors:
        length = len(_encoded(tensor.name, path))
        if length > NAME_LIMIT and architecture not in DIFFUSION:
            raise CheckpointError(f"{path}: tensor {shown(tensor.name)}: a name of {length} bytes; readers of architecture "
                                  f"{shown(str(architecture))} take {NAME_LIMIT}")


def _header(metadata: Mapping[str, Value], tensors: Sequence[NewTensor], path: Path) -> tuple[bytes, list[int], int]:
    """The encoded header, which the parser accepts, the sizes of the tensors in bytes, and the alignment."""
    for tensor in tensors:                                       # what cannot even be written down
        if not isinstance(tensor.type, GgmlType):
            raise CheckpointError(f"{path}: tensor {shown(tensor.name)}: its type is one of GGML_TYPES, not {tensor.type!r}")
        lengths = [max(1, length) for length in tensor.shape]
        if not tensor.type.is_readable or min((*tensor.shape, 0)) < 0 or math.prod(lengths) >= ELEMENTS_LIMIT:
            raise CheckpointError(f"{path}: tensor {shown(tensor.name)}: {tensor.type.name} {list(tensor.shape)} is not stored")
    for key, value in metadata.items():
        if not isinstance(value, Value):
            raise CheckpointError(f"{path}: metadata {shown(key)} is a GgufValue, such as GgufValue.of('u32', 1), not {value!r}")
    alignment = alignment_of(metadata, path)
    parts = [MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_text(key, path) + value.stored() for key, value in metadata.items()]
    place = 0
    sizes = []
    for tensor in tensors:
        row = tensor.shape[-1] if tensor.shape else 1
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts.append(_text(tensor.name, path) + dims + struct.pack("<IQ", tensor.type.id, place))
        size = math.prod(tensor.shape[:-1]) * tensor.type.row_bytes(row)
        sizes.append(size)
        place += -(-size // alignment) * alignment
    header = b"".join(parts)
    header += bytes(-len(header) % alignment)
    parsed = parse(BytesIO(header), len(header) + place, path)
    for entry in parsed.tensors.values():
        if entry.problem is not None:
            raise CheckpointError(f"{path}: tensor {shown(entry.name)}: {entry.problem}")
    return header, sizes, alignment


def _text(text: str, path: Path) -> bytes:
    data = _encoded(text, path)
    return struct.pack("<Q", len(data)) + data


def _encoded(text: str, path: Path) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: {shown(text)}: half of a surrogate pair") from None
