"""Metadata of GGUF files: typed values, located in a header without decoding them, decoded on access."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qdsl.checkpoint.files.safetensors import Buffer, CheckpointError, shown

CHUNK = 1 << 16                                                  # bytes that a header is read by
HEADER_LIMIT = 256 << 20                                         # bytes before the data; large vocabularies take about 16 MB
KEYS_LIMIT = 1 << 16
KEY_LIMIT = (1 << 16) - 1                                        # bytes of a key, as the format has it
STRINGS_LIMIT = 1 << 22                                          # in all of a file's values; large vocabularies take 1 << 19

# What a type word stands for: the place in this list; and the letter that struct has for it.
_WORDS = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"]
_LETTERS = dict(zip(_WORDS, "BbHhIif?__Qqd", strict=True))
_ARRAY = 9
_SIZES = {word: struct.calcsize(f"<{letter}") for word, letter in _LETTERS.items() if letter != "_"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value as a file stores it.

    type: u8 to u64, i8 to i64, f32, f64, bool, string, or an array of these, as i32[].  count: of elements, 1 if no array.
    data: the elements' bytes; a string has its length before it.
    """

    type: str
    count: int
    data: Buffer

    def __repr__(self) -> str:
        content = self.decoded(8)
        more = ", ..." if self.count > 8 else ""
        shown_text = f"[{', '.join(map(repr, content))}{more}]" if isinstance(content, list) else repr(content)
        return f"GgufValue({self.type}, {shown_text if len(shown_text) <= 120 else shown_text[:116] + ' ...'})"

    @classmethod
    def of(cls, type: str, content: Any) -> Value:
        """Encodes a value of a metadata type; content is a list for an array.  Raises CheckpointError where the type cannot hold
        it.
        """
        element = type.removesuffix("[]")
        items = list(content) if type.endswith("[]") else [content]
        if element not in _LETTERS or element == "array":
            names = ", ".join(word for word in _WORDS if word != "array")
            raise CheckpointError(f"no metadata type {shown(type)}; there are {names}, each with [] too")
        try:
            if element == "string":
                texts = [text.encode() for text in items]
                data = b"".join(_U64.pack(len(text)) + text for text in texts)
            else:
                data = struct.pack(f"<{len(items)}{_LETTERS[element]}", *items)
        except (struct.error, OverflowError, AttributeError, UnicodeEncodeError):
            raise CheckpointError(f"a value of type {type} cannot be {shown(repr(content))}") from None
        return cls(type, len(items), data)

    def decoded(self, limit: int | None = None) -> Scalar | list[Scalar]:
        """The value as Python types; of an array a list of at most `limit` elements.

        Bytes of a string that are no UTF-8 become escapes.
        """
        element = self.type.removesuffix("[]")
        count = self.count if limit is None else min(limit, self.count)
        items = self._strings(count) if element == "string" else struct.unpack_from(f"<{count}{_LETTERS[element]}", self.data)
        return list(items) if self.type.endswith("[]") else items[0]

    def _strings(self, count: int) -> list[str]:
        texts = []
        place = 0
        for _ in range(count):
            stop = place + 8 + _U64.unpack_from(self.data, place)[0]
            texts.append(bytes(self.data[place + 8:stop]).decode(errors="backslashreplace"))
            place = stop
        return texts

    def stored(self) -> bytes:
        """The bytes that a file stores: type number, array head, data."""
        element = self.type.removesuffix("[]")
        if element == self.type:
            return _U32.pack(_WORDS.index(element)) + self.data
        return struct.pack("<IIQ", _ARRAY, _WORDS.index(element), self.count) + self.data


class Metadata(Mapping[str, Any]):
    """Keys and values of a file, in its order; metadata[key] is decoded at every access, an array as a list."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key].decoded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stored(self) -> dict[str, Value]:
        """All values as stored, so that they can be written again."""
        return dict(self._values)


class Cursor:
    """A read position in a header, which only moves forward and never past the end.

    data: the bytes up to it, read and not mapped: a file that shrinks meanwhile is an error, and does not end the process.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path = file, size, path
        self.data = bytearray()
        self.place = 0
        self.end = min(size, HEADER_LIMIT)
        self.strings = 0                                         # so far, those in arrays and others

    def fail(self, what: str, place: int | None = None) -> CheckpointError:
        """A CheckpointError that names the file and a byte offset, by default the current one."""
        return CheckpointError(f"{self.path}: byte {self.place if place is None else place}: {what}")

    def left(self) -> str:
        """How many bytes are left, as a phrase for messages."""
        count = self.end - self.place
        return f"{count} follow" if self.end == self.size else f"{count} are left of the {HEADER_LIMIT} of a header"

    def skip(self, count: int, what: str) -> int:
        """Skips `count` bytes and returns the offset at which they begin."""
        start = self.place
        if count > self.end - start:
            raise self.fail(f"{what} of {count} bytes, but {self.left()}")
        self.place = start + count
        self.read(self.place)
        return start

    def read(self, stop: int) -> None:
        """Read the file's bytes up to `stop`, which is not past the end.  Raises CheckpointError for a file that became shorter.
        """
        if stop > len(self.data):
            self.data += self.file.read(min(max(stop - len(self.data), CHUNK), self.end - len(self.data)))
        if stop > len(self.data):
            raise CheckpointError(f"{self.path}: became shorter while it was read")

    def u32(self, what: str) -> int:
        """Reads a 32-bit unsigned integer.  what: its name in messages."""
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """Reads a 64-bit unsigned integer.  what: its name in messages."""
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def text(self, limit: int, what: str) -> str:
        """Reads a UTF-8 string of 1 to `limit` bytes."""
        length = self.u64(what)
        if not 0 < length <= limit:
            raise self.fail(f"{what} of {length} bytes; it has 1 to {limit}", self.place - 8)
        start = self.skip(length, what)
        try:
            return str(self.data[start:self.place], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8", start) from None

    def skip_elements(self, element: str, count: int) -> None:
        """Skip `count` elements of an array, or a value that is no array."""
        size = _SIZES.get(element, 8)                            # of a string: its length alone
        if count > (self.end - self.place) // size:
            raise self.fail(f"{count} {element} take {size} bytes each at least, but {self.left()}")
        if element == "string":
            self._skip_strings(count)
        else:
            self.skip(count * size, element)

    def _skip_strings(self, count: int) -> None:
        self.strings += count
        if self.strings > STRINGS_LIMIT:
            raise self.fail(f"{self.strings} strings are over the limit of {STRINGS_LIMIT}")
        place, last, data, unpack = self.place, len(self.data) - 8, self.data, _U64.unpack_from
        for _ in range(count):                                   # every token of a vocabulary: nothing else in this loop
            if place > last:
                if place > self.end - 8:
                    break
                self.read(place + 8)
                last = len(data) - 8
            place += 8 + unpack(data, place)[0]
        else:
            if place <= self.end:
                self.skip(place - self.place, "strings")
                return
        raise self.fail(f"of {count} strings from here on, one passes the end of the header, {self.end}")


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Reads `count` keys and values.  Raises CheckpointError with the byte offset of what is wrong."""
    values: dict[str, Value] = {}
    for _ in range(count):
        start = cursor.place
        key = cursor.text(KEY_LIMIT, "a metadata key")
        if key in values:
            raise cursor.fail(f"metadata key {shown(key)} occurs twice", start)
        word = cursor.u32("the type of a value")
        if word == _ARRAY:
            element = _word(cursor, cursor.u32("the type of elements"), key)
            length = cursor.u64("the length of an array")
            type = element + "[]"
        else:
            element = type = _word(cursor, word, key)
            length = 1
        start = cursor.place
        cursor.skip_elements(element, length)
        values[key] = Value(type, length, bytes(memoryview(cursor.data)[start:cursor.place]))
    return Metadata(values)


def _word(cursor: Cursor, word: int, key: str) -> str:
    if word >= len(_WORDS) or word == _ARRAY:
        what = "an array of arrays" if word == _ARRAY else f"type {word}, which does not exist"
        raise cursor.fail(f"metadata {shown(key)} has {what}", cursor.place - 4)
    return _WORDS[word]
