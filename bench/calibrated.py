"""`python -m bench.calibrated OUT.json MODEL --calibrate TEXT --test TEXT --test TEXT [FORMAT ...]`: what calibration gains.

Perplexity of a model whose layers are rounded to a format, and quantized by their inputs, on texts that it was not calibrated
with.  GGUF's types are compared with ggml's own quantizer, which gets the mean squares of the same inputs as importance.  `nats`
are those that a token costs more than in the model itself; `error` is their standard error, from differences token by token.
Run it again to resume: rows of the file are kept.  A FORMAT may have parameters, 'int_group bits=4 group=64'; 'ggml' is needed
for ggml's rows, by QDSL_LLAMA_LIBRARY or `make live` (bench/llama_library.py).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench import llama_library
from bench.perplexity import variants
from bench.report import write_rows
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.encode.calibrated import solve
from qdsl.encode.calibrated.hessian import Hessian
from qdsl.jobs.calibrate import samples_of
from qdsl.models.calibrate import calibrate, linear_layers
from qdsl.models.language import LanguageModel, load_language_model
from qdsl.runtime import FormatError

TYPES = {name.lower(): type for name, type in BY_NAME.items()}
METHODS = ("rounded", "ggml", "importance", "calibrated")
Quantize = Callable[[Tensor, Hessian], tuple[Tensor, int]]      # a weight's numbers after it, and the bytes that they take


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """The name and parameters of a format."""
    name, *pairs = text.split()
    read = (pair.partition("=")[::2] for pair in pairs)
    values = {"True": True, "False": False}
    return name, {key: values[value] if value in values else int(value) if value.isdigit() else value for key, value in read}


def quantizers(name: str, params: Mapping[str, Any]) -> dict[str, Quantize]:
    """The ways to quantize a layer to a format, by their names."""
    form = import_module(f"qdsl.generated.{name}").FORMAT

    def by_data(method: str) -> Quantize:
        def quantize(weight: Tensor, hessian: Hessian) -> tuple[Tensor, int]:
            packed = solve.quantize(form, weight, hessian, method, **params)
            return form.dequantize(packed, torch.float32), packed.nbytes
        return quantize

    def rounded(weight: Tensor, hessian: Hessian) -> tuple[Tensor, int]:
        packed = form.quantize(weight.float(), **params)
        return form.dequantize(packed, torch.float32), packed.nbytes

    def ggml(weight: Tensor, hessian: Hessian) -> tuple[Tensor, int]:
        data = torch.zeros(len(weight) * TYPES[name].row_bytes(weight.shape[1]), dtype=torch.uint8)
        arrays = [weight.float().contiguous(), data, hessian.importance.float().contiguous()]
        source, out, importance = (ctypes.c_void_p(tensor.data_ptr()) for tensor in arrays)
        count = _ggml()(TYPES[name].id, source, out, 0, *map(ctypes.c_int64, weight.shape), importance)
        assert count == len(data)
        [tensor] = form.variant({}).storages["gguf"].tensors
        packed = form.wrap({tensor: data.view(len(weight), -1)}, (len(weight), weight.shape[1]))
        return form.dequantize(packed, torch.float32), packed.nbytes

    ways = {"rounded": rounded, "importance": by_data(solve.IMPORTANCE), "calibrated": by_data(solve.GPTQ)}
    return ways | ({"ggml": ggml} if name in TYPES and llama_library.folder() is not None else {})


def _ggml() -> Any:
    """ggml_quantize_chunk(type, from, to, first row, rows, columns, importance) of llama.cpp's library."""
    place = llama_library.folder()
    assert place is not None
    function = ctypes.CDLL(str(next(place.glob("libggml-base.so")))).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function


@torch.no_grad()
def losses(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """The losses of all tokens but the first of each sample, in nats."""
    return torch.cat([nn.functional.cross_entropy(model(sample, use_cache=False).logits[0, :-1].float(), sample[0, 1:],
                                                  reduction="none") for sample in samples]).double()


def compared(own: Tensor, base: Tensor) -> dict[str, float]:
    """Perplexity, the nats per token that it has more than a base, and the standard error of these."""
    more = own - base
    return {"perplexity": round(float(own.mean().exp()), 4), "nats": round(float(more.mean()), 5),
            "error": round(float(more.std() / len(more) ** 0.5), 5)}


class Measured:
    """A model, the moments of its layers, and its losses on texts."""

    def __init__(self, language: LanguageModel, options: argparse.Namespace) -> None:
        def samples(path: Path, count: int) -> list[Tensor]:
            return samples_of(language.tokenizer, path.read_text(errors="replace"), count, options.length)

        self.model, self.texts = language.model, [samples(path, options.test_samples) for path in options.test]
        start = time.process_time()
        self.hessians = calibrate(self.model, samples(options.calibrate, options.samples))
        self.seconds = time.process_time() - start
        self.weights = {name: layer.weight.detach().clone() for name, layer in linear_layers(self.model).items()
                        if name in self.hessians and isinstance(layer.weight, Tensor)}
        self.base = [losses(self.model, text) for text in self.texts]

    def row(self, quantize: Quantize) -> dict[str, Any]:
        """The figures of a way to quantize.  Raises FormatError for shapes that a format cannot have."""
        nbytes, start = 0, time.process_time()
        try:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    numbers, size = quantize(weight, self.hessians[name])
                    self.model.get_submodule(name).weight.copy_(numbers)
                    nbytes += size
            seconds = time.process_time() - start
            texts = [compared(losses(self.model, text), base) for text, base in zip(self.texts, self.base, strict=True)]
        finally:
            for name, weight in self.weights.items():
                self.model.get_submodule(name).weight.data.copy_(weight)
        bits = 8 * nbytes / sum(weight.numel() for weight in self.weights.values())
        return {"bits_per_weight": round(bits, 4), "cpu_s": round(seconds, 1), "texts": texts}


def rows(measured: Measured, formats: Sequence[tuple[str, dict[str, Any]]], methods: Sequence[str], kept: set[str],
         ) -> Iterator[dict[str, Any]]:
    """A row for each format and method that is not kept."""
    for name, params in formats:
        ways = quantizers(name, params)
        for method in methods:
            key = {"format": name, "params": params, "method": method}
            if method in ways and json.dumps(key) not in kept:
                try:
                    yield {**key, **measured.row(ways[method])}
                except FormatError as error:
                    yield {**key, "why": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calibrated", description="Measure what calibration gains.")
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("formats", nargs="*", type=parsed, help="all without any")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--test", type=Path, action="append", required=True, metavar="TEXT")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--test-samples", type=int, default=20, help="of each text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model's products")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)                                     # as the commands that quantize do
    language = load_language_model(options.model, device="cpu", dtype=options.dtype)
    if language.packed_layers:
        language.model.dequantize()
    measured = Measured(language, options)
    every = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    head = {"model": Path(language.name).name, "date": date.today().isoformat(), "dtype": options.dtype,
            "calibration": {"text": options.calibrate.name, "samples": options.samples, "length": options.length},
            "collecting_cpu_s": round(measured.seconds, 1),
            "texts": [{"name": path.name, "tokens": len(base), "perplexity": round(float(base.mean().exp()), 4)}
                      for path, base in zip(options.test, measured.base, strict=True)],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    kept = {json.dumps({key: row[key] for key in ("format", "params", "method")}) for row in every}
    for row in rows(measured, options.formats or variants(), options.method or METHODS, kept):
        every.append(row)
        print(json.dumps(row), flush=True)
        write_rows(options.out, head, "rows", every)


if __name__ == "__main__":
    main()
