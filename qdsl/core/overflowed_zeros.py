"""Detects zero points that overflowed during packing: the producer wrote -1 over all higher fields of the word.

auto-gptq stores zero points minus one, and packs a 0 as uint32(-1), shifted.  The fields above it cannot be recovered.  Does not
import torch.
"""

from __future__ import annotations

from math import lcm

WORD = 32
MIN_BITS = 16                                                    # bits that are all ones by chance once in 2**16 cases

OVERFLOWED_ZEROS = "a -1 was written over the fields above it in a word, as auto-gptq does with a zero point of 0; these are lost"


def has_overflowed_zeros(words: bytes, width: int) -> bool:
    """Whether a -1 was written over higher fields, for fields of `width` bits packed in words of 32 bits.

    True if every field above an all-ones field is all ones too, and such fields have at least MIN_BITS bits.  Not checked: fields
    that straddle words, and a last run of words whose fields do not end with a word.
    """
    run = lcm(width, WORD)
    count = 8 * len(words) // run
    bits = int.from_bytes(words[:count * run // 8], "little")
    ones = bits
    for place in range(1, width):
        ones &= bits >> place
    ones &= _places(width, run, 1) * _once_in(run, count)
    below = ones & _places(width, run, 2) * _once_in(run, count)
    return not below & ~(ones >> width) and width * below.bit_count() >= MIN_BITS


def _places(width: int, run: int, fields: int) -> int:
    """The lowest bits of fields for which `run` fields lie in one word."""
    return sum(1 << at for at in range(0, run, width) if at % WORD + fields * width <= WORD)


def _once_in(run: int, count: int) -> int:
    return int.from_bytes(((1).to_bytes(run // 8, "little")) * count, "little")
