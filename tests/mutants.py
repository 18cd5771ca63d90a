"""Mutants, specs with one mistake each: every one must be refused by the compiler or contradict the known answers.

`python -m tests.mutants [SPEC ...]` prints every mutant and what caught it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from qdsl.emit.module import module as module_text
from qdsl.passes import compile_spec
from qdsl.runtime.format import Format
from qdsl.spec.source import SpecError
from tests.support.answers import Answers, differences, kept
from tests.support.formats import SPECS
from tests.support.mistakes import Mutant, mutants

FLOAT_TIES = "codes that are floats round to even, whatever the option says"
WHOLE_TIES = "minmax rounds to even itself before it adds the zero point, and whole numbers have no ties"
ONE_WORD = "a record is one word, so it does not matter which of the two digits is the slower"
ALSO_ELSEWHERE = "another tensor of the storage divides the axis by a multiple of this number, so nothing can be padded"
SAME_BYTE = "only the bits of the tensor's elements count, and a ue4m3 is held in the same dtype as a u8"

# Mutants that are the same format, and why: name -> proof.
EQUAL: dict[str, dict[str, str]] = {
    "fp8_block": {
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=away)": FLOAT_TIES,
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=up)": FLOAT_TIES,
    },
    "fp8_channel": {
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=away)": FLOAT_TIES,
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=up)": FLOAT_TIES,
    },
    "fp8_tensor": {
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=away)": FLOAT_TIES,
        "encode: absmax(code=q, scale=s, divisor=448) -> absmax(code=q, scale=s, divisor=448, ties=up)": FLOAT_TIES,
    },
    "int_group": {
        "encode: minmax(code=q, zero=z, scale=s) -> minmax(code=q, zero=z, scale=s, ties=away)": WHOLE_TIES,
        "encode: minmax(code=q, zero=z, scale=s) -> minmax(code=q, zero=z, scale=s, ties=up)": WHOLE_TIES,
        "dims.P: lcm(bits, 32) / bits -> ceil(lcm(bits, 32) / bits)": "bits divides every multiple of itself",
        "gptq_v1.qzeros.stored: bits in (2, 4, 8), word = word - (((2 ** 32) - 1) / ((2 ** bits) - 1)) -> "
        "bits in (2, 4, 8), word = word - ceil(((2 ** 32) - 1) / ((2 ** bits) - 1))":
            "2^a - 1 divides 2^b - 1 where a divides b, and 2, 4 and 8 divide 32",
        "awq.qweight: i32[k<K, t<N / 8 word] -> i32[k<K, word t<N / 8]": ONE_WORD,
        "awq.qzeros: i32[g<G, t<N / 8 word] -> i32[g<G, word t<N / 8]": ONE_WORD,
        "awq.qweight: i32[k<K, t<N / 8 word] -> i32[k<K, t<ceil(N / 8) word]": ALSO_ELSEWHERE,
        "awq.qzeros: i32[g<G, t<N / 8 word] -> i32[g<G, t<ceil(N / 8) word]": ALSO_ELSEWHERE,
    },
    "q4_k": {
        "decode: ((d * sc) * q) - (dmin * mn) -> "
        "(d * (sc * q)) - (dmin * mn)":
            "11 bits of d, 6 of sc and 4 of q: every product is exact in float32, and a zero has the sign of d either way",
    },
    "dense_rows": {
        "encode: minmax(code=q, zero=z, scale=s) -> minmax(code=q, zero=z, scale=s, ties=away)": WHOLE_TIES,
        "encode: minmax(code=q, zero=z, scale=s) -> minmax(code=q, zero=z, scale=s, ties=up)": WHOLE_TIES,
    },
    "flat_nibbles": {
        "flat.codes: u8[e<(N * K) / 2, 1] -> ue4m3[e<(N * K) / 2, 1]": SAME_BYTE,
    },
    "marlin_tiles": {
        "marlin.words: i32[t<K / 16, u<N / 64 word] -> i32[t<ceil(K / 16), u<N / 64 word]": ALSO_ELSEWHERE,
    },
    "planes": {
        "planes.blocks.record: l<64: b[l].hi:3 -> l<64: b[l].at(1):3": "the upper three of four bits begin at bit 1",
        "rows.high: u8[n<N, t<K / 4 word] -> ue4m3[n<N, t<K / 4 word]": SAME_BYTE,
        "rows.low: u8[n<N, t<K / 2 word] -> ue4m3[n<N, t<K / 2 word]": SAME_BYTE,
        "rows.b: u8[k<K, t<N / 2 word] -> ue4m3[k<K, t<N / 2 word]": SAME_BYTE,
        "rows.b: u8[k<K, t<N / 2 word] -> u8[k<K, word t<N / 2]": ONE_WORD,
        "rows.high: u8[n<N, t<K / 4 word] -> u8[n<N, t<ceil(K / 4) word]": ALSO_ELSEWHERE,
        "rows.low: u8[n<N, t<K / 2 word] -> u8[n<N, t<ceil(K / 2) word]": ALSO_ELSEWHERE,
    },
    "same_names": {
        "encode: minmax(code=codes, zero=zeros, scale=scales) -> "
        "minmax(code=codes, zero=zeros, scale=scales, ties=away)":
            WHOLE_TIES,
        "encode: minmax(code=codes, zero=zeros, scale=scales) -> "
        "minmax(code=codes, zero=zeros, scale=scales, ties=up)":
            WHOLE_TIES,
    },
}
WORD_FIRST = "legal, with several words in a record, but a traceback instead of code or a refusal"
CONSTANT_ABOVE = "an extent that divides a constant by N or K is a traceback instead of a refusal"

# Mutants over which the compiler is wrong.  An entry goes when the compiler is right; the test says when.
FAULTS: dict[str, dict[str, str]] = {
    "int_group": {
        "gptq_v2.qweight: i32[t<K / P word, n<N] -> i32[word t<K / P, n<N]": WORD_FIRST,
        "gptq_v1.qweight: i32[t<K / P word, n<N] -> i32[word t<K / P, n<N]": WORD_FIRST,
        "gptq_v2.qzeros: i32[g<G, t<N / P word] -> i32[g<G, word t<N / P]": WORD_FIRST,
        "gptq_v1.qzeros: i32[g<G, t<N / P word] -> i32[g<G, word t<N / P]": WORD_FIRST,
        "awq.qweight: i32[k<K, t<N / 8 word] -> i32[k<K, t<8 / N word]": CONSTANT_ABOVE,
        "awq.qzeros: i32[g<G, t<N / 8 word] -> i32[g<G, t<8 / N word]": CONSTANT_ABOVE,
    },
    "marlin_tiles": {
        "marlin.words: i32[t<K / 16, u<N / 64 word] -> i32[t<16 / K, u<N / 64 word]": CONSTANT_ABOVE,
        "marlin.words: i32[t<K / 16, u<N / 64 word] -> i32[t<K / 16, word u<N / 64]": WORD_FIRST,
    },
    "planes": {
        "rows.high: u8[n<N, t<K / 4 word] -> u8[n<N, t<4 / K word]": CONSTANT_ABOVE,
        "rows.low: u8[n<N, t<K / 2 word] -> u8[n<N, t<2 / K word]": CONSTANT_ABOVE,
        "rows.c: i16[t<K / 40, n<N] -> i16[t<40 / K, n<N]": CONSTANT_ABOVE,
        "rows.t: bf16[g<K / 32, n<N] -> bf16[g<32 / K, n<N]": CONSTANT_ABOVE,
        "rows.u: e8m0[n<N, g<ceil(K / 64)] -> "
        "e8m0[n<N, g<ceil(K / 65)]":
            "ceil(K / 64) and ceil(K / 65) differ first at K = 4160, beyond the sizes that are compared",
    },
}


def caught(mutant: Mutant, answers: Answers) -> str:
    """'refused: ...' or 'answers: ...' for a mutant that is caught; 'crash: ...' where the compiler is; '' for one that lives."""
    try:
        files = module_text(compile_spec(mutant.spec))
    except SpecError as error:
        return f"refused: {error.problems[0].message}"
    except Exception as error:                                   # no catch: a wrong spec is refused, with its place
        return f"crash: {type(error).__name__}: {error}"
    format = built(files)
    try:
        return next((f"answers: {difference}" for difference in differences(answers, format)), "")
    except Exception as error:                                   # from the mutant's own text, at work on the answers
        return f"answers: {type(error).__name__}: {error}".split("\n")[0]


def built(files: Mapping[str, str]) -> Format:
    """The format of generated files, in memory.  Kernels stay plain functions: nothing calls them."""
    stem = next(iter(files)).split("/")[0].removesuffix(".py")
    package = ModuleType(f"mutant_{stem}")
    package.__path__ = []
    sys.modules[package.__name__] = package
    parts: list[str] = []
    try:
        for name, text in sorted(files.items(), key=lambda file: file[0].endswith("__init__.py")):
            inside = ModuleType(f"{package.__name__}.{Path(name).stem}") if len(files) > 1 and "__init__" not in name else package
            sys.modules[inside.__name__] = inside
            inside.__package__ = package.__name__
            parts.append(inside.__name__)
            exec(compile(text.replace("@triton.jit\n", ""), name, "exec"), inside.__dict__)  # noqa: S102
            if inside is not package:
                setattr(package, Path(name).stem, inside)
    finally:
        for name in {*parts, package.__name__}:
            sys.modules.pop(name, None)
    found = package.FORMAT
    assert isinstance(found, Format)
    return found


def verdict(mutant: Mutant, stem: str, answers: Answers) -> str:
    """What is wrong with a mutant and what is said of it here; '' if nothing is."""
    found = caught(mutant, answers)
    lives = found.partition(":")[0] in ("", "crash")
    said = EQUAL if mutant.name in EQUAL.get(stem, {}) else FAULTS if mutant.name in FAULTS.get(stem, {}) else None
    if said is None:
        return f"not caught: {mutant.name} {found}" if lives else ""
    return "" if lives else f"caught, so not to be listed in {'EQUAL' if said is EQUAL else 'FAULTS'}: {mutant.name} ({found})"


def main(stems: Sequence[str]) -> None:
    for path in SPECS:
        if stems and path.stem not in stems:
            continue
        answers = kept(path.stem)
        counts: Counter[str] = Counter()
        for mutant in mutants(path):
            known = "equal" if mutant.name in EQUAL.get(path.stem, {}) else "NOT CAUGHT"
            found = caught(mutant, answers) or known
            counts[found.partition(":")[0]] += 1
            print(f"{path.stem} {mutant.kind}: {mutant.name}\n    {found}")
        print(f"{path.stem}: {counts.total()} mutants, {', '.join(f'{n} {what}' for what, n in counts.items())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
