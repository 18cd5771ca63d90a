"""`python -m bench.target_bits OUT.json MODEL MIX ... --calibrate TEXT --test TEXT`: types by cost beside ggml's mixes.

Each mix is compared with the types that `quantize --target-bits` chooses for its size.  Both are calibrated alike, at once;
embeddings and heads are rounded.  `nats` are those that a token costs more than in the plain model, `divergence` is from its
predictions, and `saved` is how much less of both the chosen types have; with standard errors, of differences token by token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import write_rows
from qdsl.encode.calibrated import solve
from qdsl.encode.calibrated.store import Moments
from qdsl.jobs.calibrate import Sampling, samples_of, tensor_layers
from qdsl.jobs.gguf import budget, plan_file
from qdsl.jobs.gguf.mixes import Options, mix_for, mix_of
from qdsl.jobs.gguf.run import quantizer_of
from qdsl.jobs.type_costs import tensor_costs
from qdsl.models import gguf_vocabulary
from qdsl.models.calibrate import weights_of
from qdsl.models.gguf_folder import LanguageFolder
from qdsl.models.language import load_language_model

Types = Mapping[str, str]                                        # of layers


@torch.no_grad()
def predictions(model: nn.Module, sample: Tensor) -> Tensor:
    """Log probabilities of all tokens but the last, [tokens, vocabulary]."""
    scores: Tensor = model(sample, use_cache=False).logits[0, :-1].float()
    return scores.log_softmax(-1)


def compared(model: nn.Module, base: Sequence[Tensor], samples: Sequence[Tensor]) -> Tensor:
    """What each token costs more than in a base with these predictions, and the divergence from it: [2, tokens], in nats."""
    values = []
    for sample, other in zip(samples, base, strict=True):
        less = other - predictions(model, sample)
        values.append(torch.stack([less.gather(1, sample[0, 1:, None])[:, 0], (other.exp() * less).sum(1)]))
    return torch.cat(values, 1).double()


def figures(values: Tensor) -> dict[str, float]:
    """The means of [2, tokens] in thousandths of a nat, and their standard errors."""
    means, errors = 1e3 * values.mean(1), 1e3 * values.std(1) / values.shape[1] ** 0.5
    return {"nats": round(float(means[0]), 3), "nats_error": round(float(errors[0]), 3),
            "divergence": round(float(means[1]), 3), "divergence_error": round(float(errors[1]), 3)}


class Quantized:
    """A model whose layers take the numbers of types; each is quantized once to a type."""

    def __init__(self, model: Any, moments: Moments) -> None:
        self.model, self.moments = model, moments
        table = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is table)
        self.weights = {**weights_of(model, ""), name: table.weight.data}
        self.plain: dict[str, Tensor] = {name: weight.clone() for name, weight in self.weights.items()}
        self.done: dict[tuple[str, str], Tensor] = {}

    def take(self, types: Types) -> None:
        """Give layers the numbers of their types."""
        for name, type in types.items():
            if (name, type) not in self.done:
                self.done[name, type] = self._numbers(name, type)
            self.weights[name].copy_(self.done[name, type])

    def _numbers(self, name: str, type: str) -> Tensor:
        if (module := quantizer_of(type)) is None:
            return self.plain[name]
        form, weight = module.FORMAT, self.plain[name].float()
        packed = solve.quantize(form, weight, self.moments[name]) if name in self.moments else form.quantize(weight)
        numbers: Tensor = form.dequantize(packed, self.plain[name].dtype)
        return numbers


def rows(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each mix."""
    gguf_vocabulary.pre_tokenizer = lambda tokenizer, folder: "gpt-2"        # no file is written, and any tokenizer does
    source = LanguageFolder(options.model)
    language = load_language_model(str(options.model), device="cpu", dtype="float32")
    texts = [samples_of(language.tokenizer, path.read_text(errors="replace"), options.test_samples, options.length)
             for path in options.test]
    base = [[predictions(language.model, sample) for sample in text] for text in texts]
    sampling = Sampling(options.calibrate, solve.GPTQ, options.samples, options.length, False)
    plain = plan_file.plan(source, Options(mix_for(8)))
    tensors = [step.tensor for step in plain.steps if not step.copied]
    every = {tensor.name: budget.candidates(tensor, budget.types_of(options.types), Options(mix_for(8))) for tensor in tensors}
    begun = time.process_time()
    costs = tensor_costs(options.model, tensors, every, sampling, folder, lambda amounts: nullcontext())
    seconds = time.process_time() - begun
    layers = tensor_layers(options.model, tensors)
    quantized = Quantized(language.model, Moments(folder))

    def types_of(plan: plan_file.Plan) -> dict[str, str]:
        return {layer: step.type for step in plan.steps for layer in layers.get(step.tensor.name, ())}

    for name in options.mixes:
        own = plan_file.plan(source, Options(mix_of(name), imatrix=True))
        bits = own.bits(own.steps)
        assert bits is not None
        chosen = plan_file.plan(source, budget.within(plain, costs, bits, Options(mix_for(bits))))
        row: dict[str, Any] = {"mix": name, "bits": round(bits, 4), "chosen_bits": round(chosen.bits(chosen.steps) or 0, 4),
                               "types": dict(sorted((step.tensor.name, step.type) for step in chosen.steps if not step.copied)),
                               "measuring_cpu_s": round(seconds, 1), "texts": []}
        measured = []
        for plan in (own, chosen):
            quantized.take(types_of(plan))
            measured.append([compared(language.model, own_base, text) for own_base, text in zip(base, texts, strict=True)])
        for path, (mix, ours) in zip(options.test, zip(*measured, strict=True), strict=True):
            row["texts"].append({"name": path.name, "tokens": mix.shape[1], "mix": figures(mix), "chosen": figures(ours),
                                 "saved": figures(mix - ours)})
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.target_bits", description="Types by cost beside ggml's mixes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("mixes", nargs="+")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--test", type=Path, action="append", required=True, metavar="TEXT")
    parser.add_argument("--types")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--test-samples", type=int, default=20, help="of each text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what is measured here")
    options = parser.parse_intermixed_args()
    head = {"model": options.model.name, "types": budget.types_of(options.types), "samples": options.samples,
            "length": options.length}
    every = []
    with TemporaryDirectory() as folder:
        for row in rows(options, options.keep or Path(folder)):
            every.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "types"}), flush=True)
            write_rows(options.out, head, "rows", every)


if __name__ == "__main__":
    main()
