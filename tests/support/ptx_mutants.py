"""Texts of PTX with one mistake: what a compiler or an author may get wrong, and only what runs can show."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator

Change = Callable[[re.Match[str]], str]


def _longer_wait(match: re.Match[str]) -> str:
    """One group more may be in flight."""
    return f"{match[1]}{int(match[2], 0) + 1};"


# A kind of mistake: where it may be made, and what stands there then.
KINDS: dict[str, tuple[str, Change]] = {
    "barrier": (r"\bbar\.sync\s+0;", lambda match: ""),
    "copy-wait": (r"(\bcp\.async\.wait_group\s+)(\w+);", _longer_wait),
    "product-wait": (r"(\bwgmma\.wait_group\.sync\.aligned\s+)(\d+);", _longer_wait),
    "product-fence": (r"\bwgmma\.fence\.sync\.aligned;", lambda match: ""),
    "proxy-fence": (r"\bfence\.proxy\.async\.shared::cta;", lambda match: ""),
    "mask": (r"\bsetp\.lt\.s32\b([^;]*?, )([^;]*);", lambda match: f"setp.le.s32{match[1]}{match[2]};"),
    # a step that another shuffle of the sum takes already
    "lane": (r"(\bshfl\.sync\.bfly\.b32\s+[^;]*, )(\d+)(, 31, -1;)",
             lambda match: f"{match[1]}{int(match[2]) // 2 or 16}{match[3]}"),
    "swizzle": (r"(\bxor\.b32\s+%r\d+, %r\d+, )(16|32|64|128);", lambda match: f"{match[1]}{int(match[2]) ^ 48};"),
    "place": (r"(\bld\.shared\.\S+\s+[^;]*\[%r\d+)\];", lambda match: f"{match[1]}+16];"),
    "transposed": (r"(\b(?:ld|st)matrix\.sync\.aligned\.m8n8\.x4)(\.shared)", lambda match: f"{match[1]}.trans{match[2]}"),
    "selector": (r"(\bprmt\.b32\s+[^;]*, )(0x[0-9A-Fa-f]+|\d+)(U?;)",
                 lambda match: f"{match[1]}{int(match[2], 0) ^ 4}{match[3]}"),
}
# Mutants that compute the same, each with the reason.
EQUAL: dict[str, str] = {
    **dict.fromkeys(("q4_0 33 barrier 0", "fp8_block 33 barrier 0"), "the first copies go where no thread has read yet"),
    **dict.fromkeys(("q4_0 33 copy-wait 1", "fp8_block 33 copy-wait 1"), "nothing reads shared memory after the last wait"),
    **dict.fromkeys(("q4_0 33 product-wait 0", "q4_0 33 product-wait 2"), "the sums are used after the next wait, not before"),
    **dict.fromkeys(("q4_0 33 product-fence 0", "q4_0 33 product-fence 2", "fp8_block 33 product-fence 0"),
                    "no accumulator was written since the last product, and ptxas orders the registers of A itself"),
    "q6_k 1 selector 0": "both halves come from registers that nothing writes, and are not used",
    "fp8_channel 0 transposed 0": "each matrix holds the scale of one row",
}


def mutants(ptx: str, lines: Container[int], most: int) -> Iterator[tuple[str, str, str]]:
    """Up to `most` texts of each kind, spread over the places on lines where the mistake may be made.

    A name for each, the text, and for a mask a probe: the right text with a store to address 0, which faults, where the two
    numbers that are compared are equal; where it does not fault the mutant computes the same.
    """
    for kind, (pattern, change) in KINDS.items():
        places = [match for match in re.finditer(pattern, ptx) if 1 + ptx.count("\n", 0, match.start()) in lines]
        for number in range(0, len(places), -(-len(places) // most) or 1):
            match = places[number]
            before, after, probe = ptx[:match.start()], ptx[match.end():], ""
            if kind == "mask":
                _, a, b = match[0].rstrip(";").split(",")
                trap = f"{{ .reg .pred %equal; setp.eq.s32 %equal, {a}, {b}; @%equal st.global.b8 [0], 0; }}"
                probe = f"{before}{match[0]} {trap}{after}"
            yield f"{kind} {number}", before + change(match) + after, probe
