"""Divides texts into tokens as llama.cpp does, in Python: for vocabularies that the package tokenizers cannot express.

Each function of DIVIDERS takes a vocabulary and returns a function: the numbers of the tokens of a text without special tokens.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from qdsl.models import llama_vocabulary as kinds
from qdsl.models.llama_vocabulary import SPECIAL, Vocabulary
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf_text import Charsmap

Divide = Callable[[str], list[int]]
SPACE = "\u2581"
SPACES = " \t\n\v\f\r"                                           # that special tokens take with them
ESCAPES = {"t": 9, "n": 10, "r": 13}                             # behind a backslash
# Tags of runs of DNA, the token of a run that is none, and what ends the text of a token that is there twice, as of six letters.
DNA, OTHER, SIX, MARK = ("<dna>", "</dna>"), "<oov>", 6, "\ue000"
PENALTY = 10.0                                                   # of characters without a token, below the least score
LENGTHS = (1,) * 12 + (2, 2, 3, 4)                               # of a character in bytes, by half of its first one


def numbers_of(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: number for number, token in enumerate(vocabulary.tokens)}


def byte_tokens(text: str) -> list[str]:
    """The tokens of a text's single bytes."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


# -- special tokens --------------------------------------------------------------------------------------------------------


class Partition:
    """Finds special tokens in a text, the longest in the whole text first, and divides what is between them."""

    def __init__(self, vocabulary: Vocabulary, divide: Divide) -> None:
        tokens = [(number, token) for number, token in enumerate(vocabulary.tokens) if vocabulary.kinds[number] & SPECIAL]
        self._special = sorted(tokens, key=lambda entry: -len(entry[1].encode()))
        self._vocabulary, self._divide = vocabulary, divide

    def tokens(self, text: str) -> list[int]:
        parts: list[str | int] = [text]
        for number, token in self._special:
            parts = [own for part in parts for own in ([part] if isinstance(part, int) else self._cut(part, number, token))]
        return [own for part in parts if part != "" for own in ([part] if isinstance(part, int) else self._divide(part))]

    def _cut(self, text: str, number: int, token: str) -> Iterator[str | int]:
        while (place := text.find(token)) >= 0:
            before, text = text[:place], text[place + len(token):]
            yield before.rstrip(SPACES) if number in self._vocabulary.left else before
            yield number
            text = text.lstrip(SPACES) if number in self._vocabulary.right else text
        yield text


# -- merges ----------------------------------------------------------------------------------------------------------------


def merged(text: str, rank: Callable[[str, str], float | None]) -> list[str]:
    """The characters of a text, of which neighbours are merged: those of the least rank first, of them the first in the text."""
    parts, before, after = list(text), list(range(-1, len(text) - 1)), [*range(1, len(text)), -1]
    queue: list[tuple[float, int, int, str]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (own := rank(parts[left], parts[right])) is not None:
            heapq.heappush(queue, (own, left, right, parts[left] + parts[right]))

    for place in range(1, len(text)):
        consider(place - 1, place)
    while queue:
        _, left, right, both = heapq.heappop(queue)
        if not parts[left] or not parts[right] or parts[left] + parts[right] != both:
            continue                                             # one of them was merged otherwise since
        parts[left], parts[right], after[left] = both, "", after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [part for part in parts if part]


def by_scores(vocabulary: Vocabulary) -> Divide:
    """Neighbours that are a token together are merged, the best score first; what is no token then becomes bytes."""
    numbers = numbers_of(vocabulary)
    ranks = {token: -vocabulary.scores[number] for token, number in numbers.items()}
    prefix = SPACE if vocabulary.flags["add_space_prefix"] else ""

    def of_bytes(text: str) -> list[int]:
        tokens = [token if token in numbers else chr(byte) for token, byte in zip(byte_tokens(text), text.encode(), strict=True)]
        if missing := [token for token in tokens if token not in numbers or not token.isascii()]:
            raise ValueError(f"{vocabulary.path}: a text has a byte without a token: {missing[0]!r}")
        return [numbers[token] for token in tokens]

    def divide(text: str) -> list[int]:
        parts = merged(prefix + text.replace(" ", SPACE), lambda left, right: ranks.get(left + right))
        return [number for part in parts for number in ([numbers[part]] if part in numbers else of_bytes(part))]
    return divide


def lowercase() -> list[Any]:
    """Normalizers of the package, which give one character for each."""
    return [normalizers.Replace("\u0130", "i"), normalizers.Lowercase()]


def word_normalizer(vocabulary: Vocabulary) -> Any:
    """The package's normalizer before a text is divided into words."""
    has_marks = vocabulary.pre.get("characters") and not vocabulary.pre.get("plain_spaces")
    return normalizers.Sequence([*(lowercase() if vocabulary.model.get("drops_spaces") and vocabulary.flags["lowercase"] else []),
                                 *([normalizers.Replace(" ", SPACE)] if has_marks else [])])


def word_steps(vocabulary: Vocabulary) -> list[Any]:
    """The package's steps that divide a text into words, of bytes or of characters."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(r"\s+"), "removed")] if vocabulary.model.get("drops_spaces") else []
    steps += [pre_tokenizers.Split(Regex(own), "isolated") for own in vocabulary.patterns]
    of_bytes = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return steps + ([] if vocabulary.pre.get("characters") else of_bytes)


def by_merge_ranks(vocabulary: Vocabulary) -> Divide:
    """Pairs are merged by rank inside of words; what is no token then becomes bytes that are, and others are left out."""
    numbers, pre = numbers_of(vocabulary), vocabulary.pre
    ranks: dict[tuple[str, str], int] = {}
    for place, merge in enumerate(vocabulary.merges or ()):
        cut = merge.find(" ", 1)
        ranks.setdefault((merge[:cut], merge[cut + 1:]) if cut > 0 else ("", ""), place)
    words, normalizer = pre_tokenizers.Sequence(word_steps(vocabulary)), word_normalizer(vocabulary)

    def of_word(word: str) -> Iterator[int]:
        is_whole = pre.get("whole_words") or (pre.get("whole_newlines") and not word.strip("\n"))
        parts = [word] if is_whole and word in numbers else merged(word, lambda left, right: ranks.get((left, right)))
        for part in parts:
            others = byte_tokens(part) if pre.get("characters") else [own for own in part if own.isascii()]
            yield from (numbers[own] for own in ([part] if part in numbers else others) if own in numbers)

    def divide(text: str) -> list[int]:
        return [number for word, _ in words.pre_tokenize_str(normalizer.normalize_str(text)) for number in of_word(word)]
    return _with_dna(divide, numbers) if vocabulary.model.get("dna") else divide


def _with_dna(divide: Divide, numbers: Mapping[str, int]) -> Divide:
    """The same, but between tags of DNA six letters at once, filled with A."""
    if not {*DNA, OTHER} <= numbers.keys():
        return divide

    def of_letters(text: str) -> list[int]:
        letters = "".join(own.upper() if own.isascii() else own for own in text).encode()
        runs = [letters[place:place + SIX].ljust(SIX, b"A") for place in range(0, len(letters), SIX)]
        return [numbers.get(run.decode(errors="replace") + MARK, numbers[OTHER]) for run in runs]

    def divide_with_dna(text: str) -> list[int]:
        result: list[int] = []
        while text:
            outside, start, text = text.partition(DNA[0])
            result += divide(outside)
            if start:
                inside, stop, text = text.partition(DNA[1])
                result += [numbers[start], *of_letters(inside), *([numbers[stop]] if stop else [])]
        return result
    return divide_with_dna


# -- the best sum of scores ------------------------------------------------------------------------------------------------


def by_sums(vocabulary: Vocabulary) -> Divide:
    """The tokens with the best sum of scores, found over bytes.  Characters without one become one unknown token together."""
    matched = {token.encode(): number for number, token in enumerate(vocabulary.tokens)
               if vocabulary.kinds[number] & (kinds.NORMAL | kinds.USER_DEFINED | kinds.UNUSED)}
    starts = {token[:stop] for token in matched for stop in range(1, len(token) + 1)}
    entries = list(zip(vocabulary.scores, vocabulary.kinds, strict=True))
    scores = [0.0 if kind & kinds.USER_DEFINED else score for score, kind in entries]
    least = min((score for score, kind in entries if kind & kinds.NORMAL), default=0.0)
    (unlikely,) = struct.unpack("f", struct.pack("f", least - PENALTY))
    unknown, normalized = vocabulary.special["unk"], _normalizer(vocabulary)

    def divide(text: str) -> list[int]:
        data = normalized(text)
        best: list[tuple[float, int, int]] = [(0.0, 0, unknown)] + [(float("-inf"), 0, unknown)] * len(data)
        place = 0
        while place < len(data):
            width = min(LENGTHS[data[place] >> 4], len(data) - place)
            options, stop = list[tuple[int, int, float]](), place + 1
            while stop <= len(data) and data[place:stop] in starts:
                if (number := matched.get(data[place:stop])) is not None:
                    options.append((stop - place, number, scores[number]))
                stop += 1
            if all(size != width for size, _, _ in options):
                options.append((width, unknown, unlikely))
            for size, number, score in options:
                if best[place][0] + score > best[place + size][0]:
                    best[place + size] = best[place][0] + score, place, number
            place += width
        return _path(best, unknown) if data else []
    return divide


def _path(best: Sequence[tuple[float, int, int]], unknown: int) -> list[int]:
    """The tokens of the best division, from entries of a sum, a place before and a token; unknown neighbours are one."""
    place, result = len(best) - 1, list[int]()
    while True:
        _, place, number = best[place]
        if not result or (number, result[-1]) != (unknown, unknown):
            result.append(number)
        if place == 0:
            return result[::-1]


def _normalizer(vocabulary: Vocabulary) -> Callable[[str], bytes]:
    """A function: a text by SentencePiece's map, with marks for spaces."""
    users = [token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind & kinds.USER_DEFINED]
    charsmap, flags = Charsmap(vocabulary.charsmap, users, ()), vocabulary.flags

    def normalized(text: str) -> bytes:
        result, is_word, has_prefix = bytearray(), False, False
        for byte in charsmap.replaced(text.encode()):
            if byte == ord(" "):
                is_word = False
                result += b"" if flags["remove_extra_whitespaces"] else SPACE.encode()
                continue
            if not is_word and (flags["remove_extra_whitespaces"] or (flags["add_space_prefix"] and not has_prefix)):
                result += SPACE.encode()
                has_prefix = True
            is_word = True
            result.append(byte)
        return bytes(result)
    return normalized


# -- the longest bytes -----------------------------------------------------------------------------------------------------


def by_length(vocabulary: Vocabulary) -> Divide:
    """At each place the longest token is taken, of equal ones the last."""
    numbers = {unescaped(token): number for number, token in enumerate(vocabulary.tokens)}
    longest = max(map(len, numbers))
    if any(token and token[:1] not in numbers for token in numbers):
        raise LoadError(f"{vocabulary.path}: a token of bytes begins with one that is no token: llama.cpp finds no end there")

    def divide(text: str) -> list[int]:
        data, place, result = text.encode(), 0, list[int]()
        while place < len(data):
            size = next((own for own in range(longest, 0, -1) if data[place:place + own] in numbers), 1)
            number = numbers.get(data[place:place + size], vocabulary.special.get("unk"))
            if number is None:
                raise ValueError(f"{vocabulary.path}: a text has a byte without a token: {data[place]}")
            result.append(number)
            place += min(size, len(data) - place)
        return result
    return divide


def unescaped(token: str) -> bytes:
    r"""The bytes of a token with escapes, such as \xff and \n."""
    data, place, result = token.encode(), 0, bytearray()
    if b"\\" not in data:
        return data
    while place < len(data):
        own = data[place:place + 2].decode("latin-1")
        if own[0] != "\\" or len(own) < 2:
            result += b"" if own[0] == "\\" else own[:1].encode("latin-1")
            place += 1
        elif own[1] == "x":
            high, low = ([code - (87 if code >= ord("a") else 48) for code in data[place + 2:place + 4]] + [0, 0])[:2]
            result += bytes([(high << 4) + low & 255]) if place + 4 <= len(data) else b""
            place += 4
        else:
            result.append(ESCAPES.get(own[1], ord(own[1])))
            place += 2
    return bytes(result)


def byte_alphabet() -> list[str]:
    """The character that byte-level vocabularies have for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_names(vocabulary: Vocabulary) -> list[str]:
    """The bytes of tokens as byte-level vocabularies write them, with a mark behind those that there are before."""
    alphabet, names = byte_alphabet(), dict[str, None]()
    for token in vocabulary.tokens:
        name = "".join(alphabet[byte] for byte in unescaped(token))
        while name in names:
            name += MARK
        names[name] = None
    return list(names)


DIVIDERS: Mapping[str, Callable[[Vocabulary], Divide]] = {
    "bpe": by_merge_ranks, "spm": by_scores, "unigram": by_sums, "trie": by_length}
