"""Parts of tokenizers that the package tokenizers has not, in Python: a tokenizer with one of them cannot be saved."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import NormalizedString

BOM = "\ufeff"
INVALID, UNKNOWN = -20_000_000, -10_000_000                      # scores of no tokens, and of characters without one


class Charsmap:
    """SentencePiece's normalizer: at each place of a text the longest text of a map is replaced.

    data: the bytes of a sparse trie, which their number precedes, and texts that end with 0; none for no map.  fixed: texts of
    users, of which llama.cpp leaves each beginning as it is, in bytes.  special: tokens that may not come of a text.
    Raises ValueError for other bytes.
    """

    def __init__(self, data: bytes, fixed: Iterable[str], special: Iterable[str]) -> None:
        size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else len(data)
        if data and (size + 4 >= len(data) or size % 4):
            raise ValueError(f"has {len(data)} bytes, and its trie {size}")
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._fixed = {own[:stop] for text in fixed for own in [text.encode()] for stop in range(1, len(own) + 1)}
        self._nodes: tuple[int, ...] = struct.unpack_from(f"<{size // 4}I", data, 4) if data else ()
        self._texts = data[size + 4:]

    def normalize(self, text: Any) -> None:
        """Replace a text of the package.  Raises ValueError where a special token comes of it, which llama.cpp does not take."""
        if own := text.normalized:
            text.replace(own, replaced := self.replaced(own.encode()).decode(errors="replace"))
            if match := self._special.search(replaced):
                raise ValueError(f"a text becomes the special token {match[0]!r} by the vocabulary's map: it cannot be divided")

    def replaced(self, data: bytes) -> bytes:
        """A text in the map's other texts."""
        place, parts = 0, []
        while place < len(data):
            length, own = 0, b""
            while data[place:place + length + 1] in self._fixed and place + length < len(data):
                length += 1
            if length:
                own = data[place:place + length]
            else:
                length, own = self._longest(data, place)
            if not length:
                length, own = _character(data, place)
            parts.append(own)
            place += length
        return b"".join(parts)

    def _longest(self, data: bytes, place: int) -> tuple[int, bytes]:
        """The length of the longest text of the map at a place, 0 for none, and what stands for it."""
        node, length, start = self._base(0) if self._nodes else 0, 0, 0
        for stop in range(place, len(data) if self._nodes else place):
            node ^= data[stop]
            if not data[stop] or self._nodes[node] & 0x8000_00FF != data[stop]:
                break
            ends = self._nodes[node] & 1 << 8
            node ^= self._base(node)
            if ends:
                length, start = stop + 1 - place, self._nodes[node] & 0x7FFF_FFFF
        return length, self._texts[start:self._texts.index(0, start)] if length else b""

    def _base(self, node: int) -> int:
        entry = self._nodes[node]
        return entry >> 10 << ((entry & 1 << 9) >> 6)


def _character(data: bytes, place: int) -> tuple[int, bytes]:
    """The length of the character at a place, and its bytes; the mark of none for a part, which a user's text may leave."""
    length = 1 if data[place] < 0xC0 else 2 if data[place] < 0xE0 else 3 if data[place] < 0xF0 else 4
    own = data[place:place + length]
    is_whole = own[0] < 0x80 or (own[0] >= 0xC0 and len(own) == length and all(byte & 0xC0 == 0x80 for byte in own[1:]))
    return (length, own) if is_whole else (1, "\ufffd".encode())


class BackwardSearch:
    """PLaMo 2's pre-tokenizer: divides a text into the tokens with the best sum of scores, found from its end, longer ones first.

    scores: of tokens, of which 1/10000 counts; after that those that are ever taken.
    """

    def __init__(self, scores: Mapping[str, float]) -> None:
        exact = {token: int(math.copysign(math.floor(abs(score * 1e4) + 0.5), score)) for token, score in scores.items()}
        self.scores = {token: score for token, score in exact.items() if score > (INVALID if len(token) > 1 else UNKNOWN - 1)}
        self._longest = max(map(len, self.scores), default=1)

    def pre_tokenize(self, text: Any) -> None:
        """Divide a text of the package."""
        text.split(lambda number, own: self._parts(own))

    def _parts(self, own: NormalizedString) -> list[NormalizedString | None]:
        text = str(own)
        first = len(BOM) if text.startswith(BOM) else 0
        sums, sizes = [0] * (len(text) + 1), [1] * len(text)
        for place in reversed(range(first, len(text))):
            sums[place] = 1 << 60
            for size in range(min(self._longest, len(text) - place), -1, -1):
                score = self.scores.get(text[place:place + size]) if size else UNKNOWN
                if score is not None and sums[place + (size or 1)] - score < sums[place]:
                    sums[place], sizes[place] = sums[place + (size or 1)] - score, size or 1
        parts = []
        while first < len(text):
            parts.append(own[first:first + sizes[first]])
            first += sizes[first]
        return parts
