"""GGUF files byte by byte, as no writer would make them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

WORDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "string": 8, "array": 9, "u64": 10,
         "i64": 11, "f64": 12}
LETTERS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?", "u64": "Q", "i64": "q",
           "f64": "d"}


def text(content: bytes, length: int | None = None) -> bytes:
    """A string, with a length that may be a lie."""
    return struct.pack("<Q", len(content) if length is None else length) + content


def item(type: str, content: object) -> bytes:
    if type == "string":
        assert isinstance(content, bytes)
        return text(content)
    return struct.pack(f"<{LETTERS[type]}", content)


def pair(key: bytes, type: str, content: object) -> bytes:
    """A metadata key and its value; content is a list for a type that ends in []."""
    element = type.removesuffix("[]")
    if element == type:
        return text(key) + struct.pack("<I", WORDS[type]) + item(type, content)
    assert isinstance(content, list | tuple)
    return text(key) + array(element, len(content)) + b"".join(item(element, value) for value in content)


def array(element: str | int, count: int) -> bytes:
    """The type word and the head of an array."""
    return struct.pack("<IIQ", WORDS["array"], WORDS[element] if isinstance(element, str) else element, count)


def info(name: bytes = b"a", dims: Sequence[int] = (32,), type: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    """A tensor in the header; dims with that of rows first."""
    return (text(name) + struct.pack("<I", len(dims) if rank is None else rank) + struct.pack(f"<{len(dims)}Q", *dims)
            + struct.pack("<IQ", type, offset))


def framed(infos: Sequence[bytes] = (), pairs: Sequence[bytes] = (), data: bytes = b"", *, magic: bytes = b"GGUF",
           version: int = 3, tensors: int | None = None, keys: int | None = None, alignment: int = 32) -> bytes:
    """A file; the header is padded if there are data."""
    head = magic + struct.pack("<IQQ", version, len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys)
    head += b"".join([*pairs, *infos])
    return head + bytes(-len(head) % alignment) + data if data else head
