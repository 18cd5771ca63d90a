"""The tables of the documents, printed from the code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import by_dense as dense_ratios
from bench import dispatch as ways
from bench.bandwidth import REACHED, SHAPES, reaches
from qdsl.compiler.passes import PASSES, compile_spec, list_programs
from qdsl.compiler.passes.derive_planar import why_no_planar
from qdsl.compiler.passes.record_lines import MAX_PIECES
from qdsl.compiler.spec import grammar, marked, schema, tokens
from qdsl.compiler.spec.schema import load
from qdsl.core import places, program
from qdsl.core.branches import BRANCHES, BranchKind
from qdsl.core.codecs import CODECS, Codec
from qdsl.core.numbers import FLOATS
from qdsl.core.schemes import SCHEMES
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap, model_types
from qdsl.runtime.gpu.devices import GPUS
from tests.support import public_figures
from tests.support.compatibility import lines as pair_lines
from tests.support.design import WALK
from tests.support.global_state import FORK, STATES
from tests.support.paths import ROOT

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "results"
RESULTS = FOLDER / "cpu-amd-epyc.json"
QUALITY = FOLDER / "smollm2-quality.json"
PREDICTED = FOLDER / "predicted-h200.json"
SHOWN = (".planar", "fix4.fix4", "fix3.fix3", "hlane.hlane")                 # storages whose kernels work with matrix units


def rows(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    shown = [list(heads), *map(list, lines)]
    shown.insert(1, ["---"] * len(shown[0]))
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in shown]


def keys() -> list[str]:
    return rows(["key", "what it holds"], ([f"`{key}`", what] for key, what in schema.KEYS.items()))


def tensor_keys() -> list[str]:
    return rows(["key", "what it holds"], ([f"`{key}`", what] for key, what in schema.TENSOR_KEYS.items()))


def floats() -> list[str]:
    special = {"ieee": "infinities and NaN", "nan": "NaN where all bits are ones", "fnuz": "NaN in place of -0", "none": "none"}
    return rows(["type", "bits", "sign, exponent, mantissa", "bias", "largest", "specials", "what it is"], (
        [f"`{name}`", str(kind.bits), f"{int(kind.signed)}, {kind.exponent}, {kind.mantissa}", str(kind.bias),
         f"{kind.largest:.6g}", special[kind.specials], kind.source] for name, kind in FLOATS.items()))


def streams() -> list[str]:
    def tensors(coding: Codec) -> str:
        return ", ".join(f"`{role}` {kind} [{', '.join(axis.removesuffix('*1') for axis in axes)}]"
                         for role, (kind, axes) in coding.tensors.items())

    return rows(["code", "of", "how", "its tensors"], (
        [f"`{name}`", "`u8[e<N*K]`" if coding.flat else "`u8[n<N, k<K]`", coding.summary, tensors(coding)]
        for name, coding in CODECS.items()))


def branch_kinds() -> list[str]:
    def fields(kind: BranchKind) -> str:
        return ", ".join(f"`{role}` {'i32' if field.is_index else 'float'} [{', '.join(field.extents)}]"
                         for role, field in kind.roles.items())

    return rows(["kind", "what it adds to weight [n, k]", "its fields"], (
        [f"`{name}`", kind.summary, fields(kind)] for name, kind in BRANCHES.items()))


def schemes() -> list[str]:
    def options(scheme: str) -> str:
        return "; ".join(f"`{name}`: {'a number' if words is None else ', '.join(words)}"
                         for name, words in SCHEMES[scheme].options.items()) or "none"

    def chosen(scheme: str) -> str:
        return ", ".join(f"`{role}`{'' if role in SCHEMES[scheme].required else ' if given'}" for role in SCHEMES[scheme].roles)

    return rows(["scheme", "chooses", "options", "importance", "how", "inverts"], (
        [f"`{name}`", chosen(name), options(name), "yes" if scheme.importance else "",
         scheme.summary, " or ".join(f"`{pattern}`" for pattern in scheme.patterns)]
        for name, scheme in SCHEMES.items()))


def limits() -> list[str]:
    return rows(["limit", "at most"], [
        ["size of a spec", f"{marked.MAX_BYTES // 1024} KiB, {marked.MAX_NODES} nodes, {marked.MAX_DEPTH} levels"],
        ["entries of a mapping or a list", str(schema.MAX_ENTRIES)],
        ["entries of a table", str(schema.MAX_TABLE)],
        ["characters, names and numbers, levels of an expression",
         f"{tokens.MAX_LENGTH}, {grammar.MAX_ATOMS}, {grammar.MAX_DEPTH}"],
        ["lines of a record", str(grammar.MAX_LINES)],
        ["items of a record, its loops written out", str(MAX_PIECES)],
        ["storages times values of the parameters that shape bits", str(sys.modules[list_programs.__module__].MAX_PROGRAMS)],
    ])


def reserved() -> list[str]:
    return [", ".join(f"`{word}`" for word in sorted(schema.RESERVED, key=lambda word: (word.lower(), word)))]


def passes() -> list[str]:
    """The first sentence of each pass's file."""
    files = [list_programs, *PASSES]
    texts = {step.__name__: (sys.modules[step.__module__].__doc__ or "").split("\n\n")[0].replace("\n", " ") for step in files}
    return rows(["pass", "what it does"], ([f"`{name}`", sentence] for name, sentence in texts.items()))


def formats() -> list[str]:
    lines = []
    for name, path in program.program_files([str(ROOT / "generated")]).items():
        about = program.summary(program.read_program(path))
        lines.append([f"[{name}](../specs/{name}.yaml)", about["bits"], about["title"]])
    return rows(["format", "bits per weight", "what it is"], lines)


def figures() -> list[str]:
    """The figures that have a goal, or a rate beside another package's, of the committed result."""
    results = json.loads(RESULTS.read_text())
    lines = [[figure["what"], f"{figure['median']:.3g} {figure['unit']}",
              "" if figure["goal"] is None else f"{'at least' if figure['better'] == 'more' else 'at most'} {figure['goal']:g}",
              "**missed**" if is_missed(figure) else ""]
             for figure in results["figures"] if figure["goal"] is not None or figure["what"].startswith("quantize")]
    return [*rows(["what", "measured", "goal", ""], lines), "",
            f"Device: {results['device']['cpu']}, `{results['command']}`, {results['date']}."]


def is_missed(figure: dict[str, Any]) -> bool:
    """Whether a figure does not reach its goal, as it is printed with three digits."""
    if figure["goal"] is None:
        return False
    shown, goal = (float(f"{number:.3g}") for number in (figure["median"], figure["goal"]))
    return shown < goal if figure["better"] == "more" else shown > goal


def missed() -> list[str]:
    """The measured figures that miss their goal, for the first page."""
    figures = json.loads(RESULTS.read_text())["figures"]
    lines = [f"- {figure['what']}: {figure['median']:.3g} {figure['unit']}, goal {figure['goal']:g}"
             for figure in figures if is_missed(figure)]
    return lines or ["None."]


def no_planar() -> list[str]:
    """Formats for whose products there are no kernels for matrix units, and why."""
    programs = {path.stem: compile_spec(load(path)) for path in places.shipped()}
    reasons = {name: why_no_planar(every) for name, every in programs.items()}
    return rows(["format", "why"], ([f"`{name}`", reason] for name, reason in reasons.items() if reason))


def speeds() -> list[str]:
    """Linear on a GPU: what was measured, beside what is predicted; while no GPU has been measured, that alone."""
    runs = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("gpu-*.json"))]
    return speed_lines(json.loads(PREDICTED.read_text()), max(runs, key=lambda run: (run["date"], len(run.get("times", []))),
                                                              default=None))


def speed_lines(predicted: dict[str, Any], measured: dict[str, Any] | None) -> list[str]:
    """A line for each format in a storage for matrix units, bfloat16 x, the shape and the rows that are predicted."""
    shape = {(row["n"], row["k"]) for row in predicted["times"]}
    [(n, k)] = shape
    counts = sorted({row["rows"] for row in predicted["times"]})
    expected = {(row["what"], row["rows"]): row for row in predicted["times"] if row["x"] == "bf16"}
    times = {(row["what"], row["rows"]): row for row in (measured or {}).get("times", [])
             if row["x"] == "bf16" and (row["n"], row["k"]) == (n, k)}
    names = [name for name in dict.fromkeys(name for name, _ in expected) if any(part in name for part in SHOWN)]
    heads = ["linear, bfloat16 x", *(f"M = {count}" for count in counts)]
    lines = [[name, *(_speed(expected.get((name, count)), times.get((name, count))) for count in counts)] for name in names]
    gpu, triton = predicted["device"]["gpu"], predicted["versions"]["triton"]
    how = (f"Predicted: microseconds by `qdsl analyze` for {gpu}, triton {triton}, and the "
           "share of the data sheet's bandwidth. Where nothing is predicted, a matmul of torch's does most of the work.")
    if not times:
        return [*rows(heads, lines), "", f"N x K = {n} x {k}. No number here is measured: there is no result of a GPU yet. {how}"]
    assert measured is not None
    note = (f"Measured on {measured['device']['gpu']}: microseconds, and the share of a copy's {measured['copy_gbps']:.0f} GB/s. "
            f"The last number is the speed by that of torch's F.linear with the weight in bfloat16. `{measured['command']}`, "
            f"torch {measured['versions']['torch']}, triton {measured['versions']['triton']}, {measured['date']}.")
    return [*rows(heads, lines), "", f"N x K = {n} x {k}. {note} {how}"]


def _speed(expected: dict[str, Any] | None, measured: dict[str, Any] | None) -> str:
    """A cell: what is measured first, then what is predicted, each called so."""
    cells = [f"measured {measured['us']:.1f} us, {measured['of_copy']:.0%}, {measured['times_dense']:.2f} x"] if measured else []
    cells += [f"predicted {expected['us']:.1f} us, {expected['of_bandwidth']:.0%}"] if expected else []
    return "; ".join(cells) or "-"


def gguf_maps() -> list[str]:
    """The model types that have a map from GGUF files."""
    maps = [GgufMap.read(MAPS / f"{name}.json") for name in model_types()]
    return rows(["model type", "architecture in files", "class"], (
        [f"`{own.model_type}`", f"`{own.architecture}`", f"`{own.model_class}`"] for own in maps))


def quality() -> list[str]:
    """What formats cost SmolLM2, as `qdsl evaluate` measured it; most bits first."""
    result = json.loads(QUALITY.read_text())
    models = sorted(result["models"], key=lambda model: -model["bits_per_weight"])
    lines = [[model["name"].removeprefix(f"{result['against']} as "), f"{model['bits_per_weight']:.2f}", str(model["packed"]),
              f"{model['perplexity']:.3f}", f"{model['divergence']:.6f}", f"{model['percentile']:.6f}",
              f"{model['agreement']:.2%}"] for model in models]
    heads = ["file or format", "bits per weight", "packed layers", "perplexity", "KL mean", "KL 99 %", "same top token"]
    return [*rows(heads, lines), "", f"{models[0]['tokens']} scored tokens in chunks of {result['context']}; standard error of a "
            f"perplexity {models[0]['perplexity_error']:.2f}."]


def compatibility() -> list[str]:
    """The pairs of programs and artefacts, and the tests that prove them."""
    return pair_lines()


def public() -> list[str]:
    """Figures of others, and the model's."""
    return rows(public_figures.HEADS, public_figures.lines())


def dispatch() -> list[str]:
    """The rows of bench/dispatch.py: each plan's choice and the best candidate, by counts of compiled kernels."""
    return rows(ways.HEADS, (summary.cells() for summary in ways.summaries(ways.recorded()).values()))


def by_dense() -> list[str]:
    return rows(["storage", *(GPUS[name].title for name in dense_ratios.COMPARED)], dense_ratios.shown())


def of_dense() -> list[str]:
    """The README's part of by_dense, by the formats' names."""
    lines = dense_ratios.shown(dense_ratios.README, dense_ratios.README_GPUS, dense_ratios.README_ROWS)
    return rows(["", *(GPUS[name].title for name in dense_ratios.README_GPUS)], lines)


def bandwidth() -> list[str]:
    """What every format reaches of an H200's bandwidth, as modelled; those that miss the goal with what bounds them."""
    best = sorted(reaches(GPUS["h200"]), key=lambda reach: (-round(100 * reach.part.reached), reach.format))
    return rows(["format", "best storage", "kernel", *(f"{n} x {k}" for n, k in SHAPES), "missed: what bounds it"], (
        [f"`{reach.format}`", reach.storage, reach.kernel,
         *(f"{100 * part.reached:.0f} of {100 * part.most:.0f}" for part in reach.parts),
         "" if reach.part.reached >= REACHED else f"{reach.part.bound}, {100 * reach.part.limit:.0f}"] for reach in best))


def matrix() -> list[str]:
    return rows(["Python", "torch", "Triton", "numpy", "core tests", "CPU seconds"], (
        [row.get(key, "") for key in ("python", "torch", "triton", "numpy", "result", "seconds")]
        for row in json.loads((FOLDER / "matrix.json").read_text()) if row))


def global_states() -> list[str]:
    """What a caller may have set for all of torch, by the name that --global-state takes."""
    states = [*((name, state.summary) for name, state in STATES.items()), (FORK, "the test runs in a forked child")]
    return rows(["state", "around each call of qdsl"], ([f"`{name}`", summary] for name, summary in states))


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (
        keys, tensor_keys, floats, schemes, streams, branch_kinds, limits, reserved, passes, formats, no_planar, figures, missed,
        speeds, gguf_maps, quality, compatibility, public, bandwidth, by_dense, of_dense, dispatch, matrix, global_states, *WALK)}
