"""Mutants, specs with one mistake each: every one must be refused by the compiler or contradict the known answers.

`python -m tests.mutants [SPEC ...]` prints every mutant and what caught it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from qdsl.compiler.emit.module.module import module_files as module_text
from qdsl.compiler.emit.triton.matrix_unit import FUNCTIONS
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.source import SpecError
from qdsl.runtime.format import Format
from qdsl.runtime.torch import ops
from tests.support.answers import Answers, differences, kept, told_lacking, told_params
from tests.support.covering import ALL
from tests.support.formats import SPECS, spec
from tests.support.mistakes import Mutant, listing, mutants

ONE_WORD = "a record is one word, so it does not matter which of the two digits is the slower"
ALSO_ELSEWHERE = "another tensor of the storage divides the axis by a multiple of this number, so nothing can be padded"

EXACT = "11 bits of d, at most 5 of a scale and 6 of a grid's number: every product is exact in float32, whose zero has d's sign"

# Mutants that are the same format, and why: name -> proof.
BY_POWER = "the power of two at the largest magnitude is found without a quotient, and codes with what is stored"
OWN = "the same for float32; the goldens of test_goldens.py are of bfloat16"
NESTED = "encode: nested_absmax(code=q, scale=s, super_scale=g, divisor=6, {}) -> " \
    "nested_absmax(code=q, scale=s, super_scale=g, divisor=6, {})"
EQUAL: dict[str, dict[str, str]] = {
    "mlx": {
        "dims.P: lcm(bits, 32) / bits -> ceil(lcm(bits, 32) / bits)": "bits divides every multiple of itself",
        "dims.P: lcm(bits, 32) / bits -> lcm(bits, 64) / bits": "two runs of whole words are a run of whole words",
        "mlx.weight: u32[n<N, t<K / P word] -> u32[n<N, t<ceil(K / P) word]": ALSO_ELSEWHERE,
        "mlx.scales: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
        "mlx.biases: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
    },
    "coreml_lut": {"dims.P: lcm(bits, 8) / bits -> ceil(lcm(bits, 8) / bits)": "bits divides every multiple of itself"},
    "smoothed": {
        "rows.q: u8[n<N, t<K / 2 word] -> u8[n<N, t<ceil(K / 2) word]": ALSO_ELSEWHERE,
        **{f"rows.{name}: scale_type[n<N, g<K / 64] -> scale_type[n<N, g<ceil(K / 64)]": ALSO_ELSEWHERE for name in "sb"},
    },
    "short_rows": {f"fields.extra: u8[n, 3] -> {kind}[n, 3]": "decode does not read it, and its bytes are as many"
                   for kind in ("e8m0h", "ue4m3")},
    "half_steps": {
        "bytes.codes: u8[n<N, t<K / 8 word] -> u8[n<N, t<ceil(K / 8) word]": ALSO_ELSEWHERE,
        "bytes.scale: scale_type[n<N, t<K / 8] -> scale_type[n<N, t<ceil(K / 8)]": ALSO_ELSEWHERE,
    },
    "coreml_vectors": {"dims.P: 8 / bits -> ceil(8 / bits)": "only bits that divide 8 are packed so"},
    "low_rank_tiles": {"rows.codes: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE},
    "learned_levels": {
        "levels.codes: u8[n<N, t<K / 8 word] -> u8[n<N, t<ceil(K / 8) word]": ALSO_ELSEWHERE,
        "levels.tables: u8[a<N, b<K / 8, word] -> u8[a<N, b<ceil(K / 8), word]": ALSO_ELSEWHERE,
    },
    "fp6_llm": {
        **{f"fp6_llm.{plane}: u8[r<N / 64, j<K / 16, word] -> u8[{axes}, word]": ALSO_ELSEWHERE
           for plane in ("high", "low") for axes in ("r<ceil(N / 64), j<K / 16", "r<N / 64, j<ceil(K / 16)")},
    },
    "int8_channel": {"eetq.weight.stored: q = q - 128 -> q = q + 128": "modulo 256"},
    "quanto": {
        "quanto.scale: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
        "quanto.shift: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
    },
    "int_group": {
        "dims.E: 8 // bits -> 9 // bits": "only bits that divide 8 are packed so",
        "onnx_matmul_nbits.B: u8[n<N, t<K / E word] -> u8[n<N, t<ceil(K / E) word]": ALSO_ELSEWHERE,
        "onnx_matmul_nbits.scales: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
        "dims.P: lcm(bits, 32) / bits -> ceil(lcm(bits, 32) / bits)": "bits divides every multiple of itself",
        "gptq_v1.qzeros.stored: bits in (2, 4, 8), word = word - (((2 ** 32) - 1) / ((2 ** bits) - 1)) -> "
        "bits in (2, 4, 8), word = word - ceil(((2 ** 32) - 1) / ((2 ** bits) - 1))":
            "2^a - 1 divides 2^b - 1 where a divides b, and 2, 4 and 8 divide 32",
        "dims.C: 32 // bits -> 31 // bits": "only bits that do not divide 32 are packed so",
        **{f"gptq_p.{tensor}.record: {line.replace('?', bits)} -> {line.replace('?', bits).replace('bits // 4', 'bits // 5')}":
           "3 is below both numbers, and 5, 6 and 7 above" for tensor, bits in (("qweight", "q[n, (32 * t) + i]"),
                                                                                ("qzeros", "z[(32 * t) + i, g]"))
           for line in ("i<32 * (bits // 4): ?.lo:4", "i<32 * ((bits // 2) % 2): ?.at((bits // 4) * 4):2")},
        "awq.qweight: i32[k<K, t<N / 8 word] -> i32[k<K, word t<N / 8]": ONE_WORD,
        "awq.qzeros: i32[g<K / group, t<N / 8 word] -> i32[g<K / group, word t<N / 8]": ONE_WORD,
        "awq.qweight: i32[k<K, t<N / 8 word] -> i32[k<K, t<ceil(N / 8) word]": ALSO_ELSEWHERE,
        "awq.qzeros: i32[g<K / group, t<N / 8 word] -> i32[g<K / group, t<ceil(N / 8) word]": ALSO_ELSEWHERE,
        "awq.qzeros: i32[g<K / group, t<N / 8 word] -> i32[g<ceil(K / group), t<N / 8 word]": ALSO_ELSEWHERE,
        "awq.scales: scale_type[g<K / group, n<N] -> scale_type[g<ceil(K / group), n<N]": ALSO_ELSEWHERE,
        "marlin.qweight: i32[t<K / 16, u<N / 64 word] -> i32[t<K / 16, u<ceil(N / 64) word]": ALSO_ELSEWHERE,
        "marlin.qweight: i32[t<K / 16, u<N / 64 word] -> i32[t<ceil(K / 16), u<N / 64 word]": ALSO_ELSEWHERE,
        "modelopt.weight.stored: q = q - 8 -> q = q + 8": "modulo 16",
        "int_quantized.weight.stored: q = q - 128 -> q = q + 128": "modulo 256",
        "int_quantized.weight_zero_point.stored: z = z - 128 -> z = z + 128": "modulo 256",
        "marlin.scales: scale_type[g<K / group, u<N / 64 word] -> scale_type[g<K / group, u<ceil(N / 64) word]": ALSO_ELSEWHERE,
        "torchao_plain_int32.scale: scale_type[g<K / group, n<N] -> scale_type[g<ceil(K / group), n<N]": ALSO_ELSEWHERE,
        "torchao_plain_int32.zero_point: i8[g<K / group, n<N] -> i8[g<ceil(K / group), n<N]": ALSO_ELSEWHERE,
        "torchao_int8.qdata.stored: q = q - 128 -> q = q + 128": "modulo 256",
        "torchao_int8.zero_point.stored: z = z - 128 -> z = z + 128": "modulo 256",
        "openvino_u4.weight: u8[n<N, t<K / 2 word] -> u8[n<N, t<ceil(K / 2) word]": ALSO_ELSEWHERE,
        "openvino_u4.zero_point: u8[n<N, t<(K / group) / 2 word] -> u8[n<N, t<ceil(K / group) / 2 word]": ALSO_ELSEWHERE,
        "openvino_u4.scale: scale_type[n<N, g<K / group] -> scale_type[n<N, g<ceil(K / group)]": ALSO_ELSEWHERE,
        "openvino_i4.weight.stored: q = q - 8 -> q = q + 8": "modulo 16",
    },
    "q4_0": {f"q4_0_{rows}.blocks.stored: q = q - 8 -> q = q + 8": "modulo 16" for rows in ("4_4", "4_8", "8_8")},
    "qserve": {
        **{f"qserve.qweight: i8[t<N / 32, u<K / 32 word] -> i8[{axes} word]": ALSO_ELSEWHERE
           for axes in ("t<ceil(N / 32), u<K / 32", "t<N / 32, u<ceil(K / 32)")},
        **{f"qserve.{name}: i8[g<K / 128, t<N / 32 word] -> i8[{axes} word]": ALSO_ELSEWHERE
           for name in ("s2_scales", "s2_zeros") for axes in ("g<ceil(K / 128), t<N / 32", "g<K / 128, t<ceil(N / 32)")},
    },
    "ocp_mxfp4": {
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=exact)": BY_POWER,
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=inverse)": BY_POWER,
        "compressed_tensors.weight_packed: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "modelopt.weight: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "gpt_oss.blocks: u8[n<N, j<K / 32, word] -> u8[n<N, j<ceil(K / 32), word]": ALSO_ELSEWHERE,
        "gpt_oss.scales: u8[n<N, j<K / 32] -> u8[n<N, j<ceil(K / 32)]": ALSO_ELSEWHERE,
        "deepseek.weight: i8[n<N, j<K / 2] -> i8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "torchao.qdata: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
    },
    "ocp_mxfp6": {
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=exact)": BY_POWER,
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=inverse)": BY_POWER,
        "compressed_tensors.weight_packed: u8[n<N, t<K / 32 word] -> u8[n<N, t<ceil(K / 32) word]": ALSO_ELSEWHERE,
        "compressed_tensors.weight_scale: u8[n<N, j<K / 32] -> u8[n<N, j<ceil(K / 32)]": ALSO_ELSEWHERE,
    },
    "ocp_mxfp8": {
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=exact)": BY_POWER,
        "encode: absmax(code=q, scale=e, power=floor) -> absmax(code=q, scale=e, power=floor, by=inverse)": BY_POWER,
    },
    "int4pack": {
        "dims.G: ceil(K / group) -> K / group": "its storages have whole groups alone",
        "tinygemm.scale_and_zero: scale_type[g<K / group, n<N, word] -> bf16[g<K / group, n<N, word]": "it has no other scales",
        "tile_packed.scale_and_zero: scale_type[g<(ceil(K / 1024) * 1024) / group, n<ceil(N / 8) * 8, word] -> "
        "bf16[g<(ceil(K / 1024) * 1024) / group, n<ceil(N / 8) * 8, word]": "it has no other scales",
        "tinygemm.scale_and_zero: scale_type[g<K / group, n<N, word] -> scale_type[g<ceil(K / group), n<N, word]": ALSO_ELSEWHERE,
        "torchao.qdata: i8[n<N, j<K / 2] -> i8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "torchao.qdata.stored: q = q - 8 -> q = q + 8": "modulo 16",
        **{f"torchao.{name}: scale_type[g<K / group, n<N] -> {other}": why for name in ("scale", "zero_point") for other, why in (
            ("bf16[g<K / group, n<N]", "it has no other scales"), ("scale_type[g<ceil(K / group), n<N]", ALSO_ELSEWHERE))},
    },
    "nvfp4_modelopt": {
        NESTED.format("empty=1, least=0.001953125", "empty=1, least=0.001953125, precision=own"): OWN,
        "modelopt.weight: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "torchao.qdata: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
        "mlx.weight: u32[n<N, t<K / 8 word] -> u32[n<N, t<ceil(K / 8) word]": ALSO_ELSEWHERE,
    },
    "nvfp4_ct": {
        NESTED.format("empty=0.125, precision=own, zeros=positive", "empty=0.125, zeros=positive"): OWN,
        NESTED.format("empty=0.125, precision=own, zeros=positive", "empty=0.125, precision=f32, zeros=positive"): OWN,
        "compressed_tensors.weight_packed: u8[n<N, j<K / 2] -> u8[n<N, j<ceil(K / 2)]": ALSO_ELSEWHERE,
    },
    "q2_k": {
        "decode: ((d * sc) * q) - (dmin * mn) -> (d * (sc * q)) - (dmin * mn)":
            "11 bits of d, 4 of sc and 2 of q: every product is exact in float32, and a zero has the sign of d either way",
    },
    "q4_k": {
        "decode: ((d * sc) * q) - (dmin * mn) -> "
        "(d * (sc * q)) - (dmin * mn)":
            "11 bits of d, 6 of sc and 4 of q: every product is exact in float32, and a zero has the sign of d either way",
    },
    "q5_k": {
        "decode: ((d * sc) * q) - (dmin * mn) -> "
        "(d * (sc * q)) - (dmin * mn)":
            "11 bits of d, 6 of sc and 5 of q: every product is exact in float32, and a zero has the sign of d either way",
    },
    "iq1_m": {
        "decode: (d * ((2 * sc) + 1)) * (grid[g, k % 8] + (0.125 * (1 - (2 * down)))) -> "
        "d * (((2 * sc) + 1) * (grid[g, k % 8] + (0.125 * (1 - (2 * down)))))": EXACT,
    },
    "iq1_s": {
        "decode: (d * ((2 * sc) + 1)) * (grid[g, k % 8] + (0.125 * (1 - (2 * down)))) -> "
        "d * (((2 * sc) + 1) * (grid[g, k % 8] + (0.125 * (1 - (2 * down)))))": EXACT,
    },
    "iq2_s": {
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * (1 - (2 * s))) -> "
        "(d * (sc + 0.5)) * (0.25 * (grid[g, k % 8] * (1 - (2 * s))))": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * (1 - (2 * s))) -> "
        "(((d * (sc + 0.5)) * 0.25) * grid[g, k % 8]) * (1 - (2 * s))": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * (1 - (2 * s))) -> "
        "(d * ((sc + 0.5) * 0.25)) * (grid[g, k % 8] * (1 - (2 * s)))": EXACT,
    },
    "iq2_xs": {
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * sign[s, k % 8]) -> "
        "(d * (sc + 0.5)) * (0.25 * (grid[g, k % 8] * sign[s, k % 8]))": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * sign[s, k % 8]) -> "
        "(d * ((sc + 0.5) * 0.25)) * (grid[g, k % 8] * sign[s, k % 8])": EXACT,
    },
    "iq2_xxs": {
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * sign[s, k % 8]) -> "
        "(d * (sc + 0.5)) * (0.25 * (grid[g, k % 8] * sign[s, k % 8]))": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * sign[s, k % 8]) -> "
        "(((d * (sc + 0.5)) * 0.25) * grid[g, k % 8]) * sign[s, k % 8]": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.25) * (grid[g, k % 8] * sign[s, k % 8]) -> "
        "(d * ((sc + 0.5) * 0.25)) * (grid[g, k % 8] * sign[s, k % 8])": EXACT,
    },
    "iq3_s": {
        "decode: (d * ((2 * sc) + 1)) * (grid[g, k % 4] * (1 - (2 * s))) -> "
        "d * (((2 * sc) + 1) * (grid[g, k % 4] * (1 - (2 * s))))": EXACT,
    },
    "iq3_xxs": {
        "decode: ((d * (sc + 0.5)) * 0.5) * (grid[g, k % 4] * sign[s, k % 8]) -> "
        "(d * (sc + 0.5)) * (0.5 * (grid[g, k % 4] * sign[s, k % 8]))": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.5) * (grid[g, k % 4] * sign[s, k % 8]) -> "
        "(((d * (sc + 0.5)) * 0.5) * grid[g, k % 4]) * sign[s, k % 8]": EXACT,
        "decode: ((d * (sc + 0.5)) * 0.5) * (grid[g, k % 4] * sign[s, k % 8]) -> "
        "(d * ((sc + 0.5) * 0.5)) * (grid[g, k % 4] * sign[s, k % 8])": EXACT,
    },
    "nvfp4": {
        "decode: ((e * 0.5) * level[q]) * s -> (e * (0.5 * level[q])) * s":
            "4 bits of e and 4 of a level: their product, and half of it, are exact in float32",
    },
    "curve": {
        "stream.scales: f16[n<N, j<K / 16] -> f16[n<N, j<ceil(K / 16)]": ALSO_ELSEWHERE,
    },
    "levels_less_points": {
        "pairs.codes: u8[n<N, t<K / 2] -> u8[n<N, t<ceil(K / 2)]": ALSO_ELSEWHERE,
        "pairs.points: i8[n<N, j<K / 32] -> i8[n<N, j<ceil(K / 32)]": ALSO_ELSEWHERE,
    },
    "super_blocks": {
        "halves.blocks.record: pad:64 pad:32 -> pad:32 pad:64": "96 bits are skipped",
        "pairs.words.record: pad:64 pad:32 -> pad:32 pad:64": "96 bits are skipped",
    },
    "marlin_tiles": {
        "marlin.words: i32[t<K / 16, u<N / 64 word] -> i32[t<ceil(K / 16), u<N / 64 word]": ALSO_ELSEWHERE,
    },
    "planes": {
        "planes.blocks.record: l<64: b[l].hi:3 -> l<64: b[l].at(1):3": "the upper three of four bits begin at bit 1",
        "rows.b: u8[k<K, t<N / 2 word] -> u8[k<K, word t<N / 2]": ONE_WORD,
        "rows.high: u8[n<N, t<K / 4 word] -> u8[n<N, t<ceil(K / 4) word]": ALSO_ELSEWHERE,
        "rows.low: u8[n<N, t<K / 2 word] -> u8[n<N, t<ceil(K / 2) word]": ALSO_ELSEWHERE,
    },
}

# Mutants that the answers do not tell from the format, as their weights are small; tests of test_beside_answers.py do.
CAUGHT_ELSEWHERE = {
    "coreml_vectors": "dims.P: 8 / bits -> 16 / bits",
    "fp8_ds_mla": "encode: absmax(code=q, scale=s, least=1.1754943508222875e-38) -> "
                  "absmax(code=q, scale=s, least=1.1754943508222875e-38, by=exact)",
}


def caught(mutant: Mutant, answers: Answers) -> str:
    """'refused: ...' or 'answers: ...' for a mutant that is caught; 'crash: ...' where the compiler is; '' for one that lives.

    What a spec lists is compared as it stands.  Else the storage with the mistake is tried alone, with one type of scales, or
    the first where it is in none; where that is not enough, all of the spec is.
    """
    right = spec(next(path for path in SPECS if path.stem == answers["format"]))
    if listed(mutant.spec) != listed(right):
        return "answers: other parameters, or storages"
    return caught_whole(*alone(mutant.spec, right, answers)) or caught_whole(mutant.spec, answers)


def listed(spec: Spec) -> list[Any]:
    """Parameters and storages, in order."""
    return [*((param.name.value, param.values) for param in spec.params), *(storage.name.value for storage in spec.storages)]


def alone(mutated: Spec, right: Spec, answers: Answers) -> tuple[Spec, Answers]:
    """A spec and its answers with the first of the storages that are not as they should be."""
    rows, wanted = listing(mutated), listing(right)
    storage = next((candidate for candidate in mutated.storages if [row for row in rows if row.startswith(f"{candidate.name}.")]
                    != [row for row in wanted if row.startswith(f"{candidate.name}.")]), mutated.storages[0])
    params = tuple(replace(param, values=param.values[:1]) if isinstance(param.values[0], str) else param
                   for param in mutated.params)
    types = {param.name.value: param.values[0] for param in params if isinstance(param.values[0], str)}
    few = {key: [answer for answer in answers[key] if answer["storage"] == storage.name.value
                 and types.items() <= answer["params"].items()] for key in ("cases", "quantized", "branches") if key in answers}
    return replace(mutated, storages=(storage,), params=params), {**answers, **few, "params": None}


def caught_whole(mutated: Spec, answers: Answers) -> str:
    """The same for a spec as it is; answers without parameters are not compared in what they list."""
    try:
        files = text_of(mutated)
    except SpecError as error:
        return f"refused: {error.problems[0].message}"
    except Exception as error:                                   # no catch: a wrong spec is refused, with its place
        return f"crash: {type(error).__name__}: {error}"
    with patch.dict(ops._formats):                                # a mutant has the name and the text of what others use
        format = built(files)
        if answers["params"] is None:
            listings = {"params": told_params(format), "storages": list(format.storages), "lacking": told_lacking(format)}
            answers = {**answers, **listings}
        try:
            return next((f"answers: {difference}" for difference in differences(answers, format)), "")
        except Exception as error:                                   # from the mutant's own text, at work on the answers
            return f"answers: {type(error).__name__}: {error}".split("\n")[0]


def text_of(mutated: Spec) -> Mapping[str, str]:
    """Its module; of the kernels, the most of the text, the names alone, because nothing calls them (`make test-all`: whole)."""
    programs = compile_spec(mutated)
    with patch("qdsl.compiler.emit.module.module.kernel_functions", names_of_kernels) if not ALL else nullcontext():
        return module_text(programs)


def names_of_kernels(program: Program) -> list[str]:
    return [line for kind in ("decode", "pairs", *FUNCTIONS)
            for line in (f"def _{kind}_{program.storage}():", '    """Nothing calls it."""', "", "")]


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
    format = package.FORMAT
    assert isinstance(format, Format)
    return format


def verdict(mutant: Mutant, stem: str, answers: Answers) -> str:
    """What is wrong with a mutant and what is said of it here; '' if nothing is."""
    outcome = caught(mutant, answers)
    lives = outcome.partition(":")[0] in ("", "crash")
    if mutant.name in EQUAL.get(stem, {}) or mutant.name == CAUGHT_ELSEWHERE.get(stem):
        return "" if outcome == "" else f"told by the answers, so not to be listed: {mutant.name} ({outcome})"
    return f"not caught: {mutant.name} {outcome}" if lives else ""


def main(stems: Sequence[str]) -> None:
    for path in SPECS:
        if stems and path.stem not in stems:
            continue
        answers = kept(path.stem)
        counts: Counter[str] = Counter()
        for mutant in mutants(path):
            uncaught = "equal" if mutant.name in EQUAL.get(path.stem, {}) else "NOT CAUGHT"
            outcome = caught(mutant, answers) or uncaught
            counts[outcome.partition(":")[0]] += 1
            print(f"{path.stem} {mutant.kind}: {mutant.name}\n    {outcome}")
        print(f"{path.stem}: {counts.total()} mutants, {', '.join(f'{n} {what}' for what, n in counts.items())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
