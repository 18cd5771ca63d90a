"""The page of a format, written from its spec: formula, bit pictures, who reads it, how it is quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from qdsl.checkpoint.detect.producers import producers
from qdsl.compiler.emit.axes import field_axes, field_kinds, tensor_axes
from qdsl.compiler.emit.show import page, picture
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.passes.check_claims import bits_text
from qdsl.compiler.spec.schema import load
from qdsl.core.schemes import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
RULER = """How to read the pictures: a row is a byte, or bytes that are alike. Its left end is bit 7, the most significant.
Its right end is bit 0, as the ruler above it says. Numbers of several bytes are little-endian. A grid lists elements from
bit 0 of the first word on."""
PROGRAMS = {"gguf": "llama.cpp and what is built on it", "planar": "qdsl's kernels for matrix units",
            **dict.fromkeys(("ik_llama", "q4_0_r8", "iq4_nl_r4"), "ik_llama.cpp"),
            **dict.fromkeys(("q4_0_4_4", "q4_0_4_8", "q4_0_8_8"), "llama.cpp before 2025")}
COSTS = "../which_format.md#what-it-costs"
# What quantizing costs: the measured file, its key, how it is written, and what it is of.
FIGURES = (("minilm", "snr_db", "{:.1f} dB", f"Signal to noise of [real weights]({COSTS})"),
           ("smollm2", "perplexity", "{:.2f}", f"Perplexity of [SmolLM2]({COSTS}), by itself 13.93"),
           ("trained", "divergence", "{:.2g} nats", f"Divergence of [a smaller model]({COSTS})"))


def rows(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, and an empty line."""
    cells = [list(heads), ["---"] * len(heads), *map(list, lines)]
    return [*(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in cells), ""]


def code(*words: str) -> list[str]:
    """Cells of code."""
    return [f"`{word}`" for word in words]


def write(path: Path, out: Path) -> None:
    """Write the page of a spec into a folder."""
    programs = page.distinct_layouts(compile_spec(load(path)))
    spec, about = programs[0].spec, page.spec_json(programs)
    kinds = field_kinds(programs)
    first = {program.storage: program for program in reversed(programs)}
    storages = {name: first[name] for name in about["storages"]}
    lines = [f"# {path.stem}", "", f"{spec.title}.", "", f"    weight[n, k] = {spec.decode_text}", "",
             f"{about['bits']} bits per weight. [The spec](../files/specs/{path.name}.txt) has every rule.", ""]
    lines += rows(["field", "type", "subscripts"], [
        code(field.name, kinds[field.name] if field.number else "index", f"[{', '.join(field_axes(programs, field))}]")
        for field in programs[0].fields])
    lines += ["## Quantizing", "", *_quantizing(programs[0]), "## Readers and writers", "", *_readers(path.stem, storages)]
    lines += ["## Where every bit lies", "", RULER, ""]
    for name, program in storages.items():
        lines += [f"### {name}", "", *_storage(program)]
    (out / f"{path.stem}.md").write_text("\n".join(lines))


def _storage(program: Program) -> Iterator[str]:
    """Tensors and picture of a storage."""
    parameters = ", ".join(f"{key} = {value}" for key, value in program.params.items())
    yield from [f"{bits_text(program)}{', at ' + parameters if parameters else ''}.", ""]
    yield from rows(["tensor", "type", "shape"], [code(tensor.name, str(tensor.kind), f"[{', '.join(tensor_axes(tensor))}]")
                                                  for tensor in program.tensors])
    yield from [f"<div class=\"wide\" data-search-exclude>{picture.svg_picture([program]).strip()}</div>", ""]


def _quantizing(program: Program) -> list[str]:
    encode = program.encode
    if encode is None:
        return ["qdsl has no quantizer for it: it reads, converts and runs what other programs wrote.", ""]
    lines = [f"By the scheme [{encode.scheme}](../language/reference.md): {SCHEMES[encode.scheme].summary}.", ""]
    for results, key, form, what in FIGURES:
        rows = json.loads((ROOT / "bench" / "results" / f"formats-{results}.json").read_text())["formats"]
        if figures := [f"{form.format(row[key])} at {row['bits_per_weight']:.2f} bits" for row in rows
                       if row["format"] == program.spec.name.value and row.get(key) is not None]:
            lines += [f"{what}: {'; '.join(figures)}.", ""]
    return lines


def _readers(name: str, storages: dict[str, Program]) -> Iterator[str]:
    """For each storage who reads it by which settings, then the programs that tests compare with."""
    lines = []
    for storage in storages:
        of_storage = [producer for producer in producers().every if any(
            rule.get("storage", next(iter(storages))) == storage for rule in producer.formats.get(name, ()))]
        by_settings = [f"{', '.join(own.readers.programs) or 'qdsl'}, by {own.name}'s settings" for own in of_storage]
        programs = [PROGRAMS[storage]] if storage in PROGRAMS else []
        lines.append([f"`{storage}`", "; ".join(dict.fromkeys(by_settings + programs)) or "qdsl"])
    yield from rows(["storage", "read by"], lines)
    proven = list(dict.fromkeys(_proven({name, *(storage for storage in storages if storage not in PROGRAMS)})))
    if proven:
        yield from ["[Tests](../compatibility.md) compare with these programs:", "",
                    *rows(["program", "direction", "result"], proven)]


def _proven(names: set[str]) -> Iterator[tuple[str, str, str]]:
    """Rows of the table of compatible programs that have one of these names among their artefacts."""
    for group in yaml.safe_load((ROOT / "tests" / "data" / "compatibility.yaml").read_text()):
        artefacts: Any = group.get("pairs") or dict.fromkeys(group.get("artefacts", ()), group.get("result", ""))
        for artefact, result in artefacts.items():
            if names & set(re.findall(r"\w+", artefact.lower())):
                yield group["program"], group["direction"], str(result[-1] if isinstance(result, list) else result)
