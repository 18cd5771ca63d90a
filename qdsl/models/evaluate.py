"""Evaluates quantized language models: perplexity, divergence from another model, and signal to noise of layers.

Perplexity and divergence are those of llama-perplexity: the text is cut into independent chunks of `context` tokens, and the
second half of each chunk is scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.core.drawing import drawing, text
from qdsl.models.calibrate import counted_run
from qdsl.models.experts import Experts
from qdsl.models.language import CLEAR, LanguageModel, named_errors
from qdsl.models.plan import LoadError
from qdsl.runtime.torch.module import PackedModule

LEAST = 1e-7                                                     # divergence that a drawing shows, in nats
# Headings after the name of a model, and the widths of their columns.
COLUMNS = {"bits/weight": 11, "packed": 6, "perplexity": 20, "KL mean": 9, "KL 99 %": 9, "same top token": 14, "least SNR": 9}
MOST_KEPT = 2 << 30                                              # bytes of a base's log-probabilities


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of a model on a text.

    packed: how many of its layers hold packed weights.  tokens: how many were scored.  perplexity: with its standard error.
    divergence: mean of KL(base || model) over tokens, in nats; percentile: that which 99 % of tokens do not exceed; agreement:
    share of tokens whose most probable successor is the same.  None without a base.  snr: of each packed layer against the
    base, in dB; infinite where no number differs.
    """

    name: str
    bits_per_weight: float
    packed: int
    tokens: int
    perplexity: float
    perplexity_error: float
    divergence: float | None = None
    percentile: float | None = None
    agreement: float | None = None
    snr: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Base:
    """A model that others are compared with, and its cached log-probabilities, up to MOST_KEPT bytes."""

    language: LanguageModel
    kept: dict[int, Tensor] = field(default_factory=dict)

    def log_probabilities(self, number: int, chunk: Tensor) -> Tensor:
        """Log-probabilities [tokens, vocabulary] of a chunk, by its number, from the cache if possible."""
        if number in self.kept:
            return self.kept[number]
        result = _log_probabilities(self.language.model, chunk)
        if sum(kept.nbytes for kept in self.kept.values()) + result.nbytes <= MOST_KEPT:
            self.kept[number] = result
        return result


def evaluate(language: LanguageModel, chunks: Sequence[Tensor], base: Base | None = None) -> Evaluation:
    """Score chunks of tokens, and compare with a base.  Raises LoadError where the base has another vocabulary."""
    losses, divergences, same = [], [], []
    for number, chunk in enumerate(chunks):
        with counted_run(language.model, chunk):
            own = _log_probabilities(language.model, chunk)
            expected = None if base is None else base.log_probabilities(number, chunk).to(own.device)
        losses.append(-own.gather(1, chunk[-len(own):, None].to(own.device))[:, 0])
        if base is not None and expected is not None:
            if expected.shape != own.shape:
                raise LoadError(f"{base.language.name} has {expected.shape[1]} tokens, and {language.name} {own.shape[1]}")
            divergences.append((expected.exp() * (expected - own)).sum(1))
            same.append(expected.argmax(1) == own.argmax(1))
    loss = torch.cat(losses).double()
    perplexity = math.exp(loss.mean())
    error = perplexity * float(loss.std(correction=1)) / math.sqrt(len(loss))
    figures: dict[str, Any] = {}
    if base is not None:
        divergence = torch.cat(divergences).double()
        figures = {"divergence": float(divergence.mean()), "percentile": float(divergence.quantile(0.99)),
                   "agreement": float(torch.cat(same).double().mean()),
                   "snr": dict(_signal_to_noise(language.model, base.language.model))}
    return Evaluation(language.name, language.bits_per_weight, language.packed_layers, len(loss), perplexity, error, **figures)


def chunks(tokenizer: Any, content: str, context: int, option: str = "--context") -> list[Tensor]:
    """Divides a text into chunks of tokens [context]; each begins with the BOS token if the tokenizer adds one.

    An incomplete last chunk is not scored.  option: that sets `context`, for the message.  Raises LoadError for a text shorter
    than one chunk.
    """
    with named_errors("transformers does not divide the text into tokens", *CLEAR):
        tokens = torch.tensor(tokenizer(content, verbose=False)["input_ids"], dtype=torch.int64, device="cpu")
    if len(tokens) < context:
        raise LoadError(f"the text has {len(tokens)} tokens, and a chunk takes {context}: give more text or a smaller {option}")
    cut = list(tokens[:len(tokens) // context * context].view(-1, context).clone())
    if tokenizer.bos_token_id is not None and int(tokens[0]) == tokenizer.bos_token_id:
        for chunk in cut:
            chunk[0] = tokenizer.bos_token_id
    return cut


@torch.no_grad()
def _log_probabilities(model: Any, chunk: Tensor) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of the tokens in the second half of a chunk."""
    logits = model(chunk[None].to(model.device), use_cache=False).logits[0, len(chunk) // 2:-1]
    probabilities: Tensor = logits.float().log_softmax(1)
    return probabilities


def _signal_to_noise(model: nn.Module, base: nn.Module) -> Iterator[tuple[str, float]]:
    """The signal to noise of packed layers against those of another model, in dB, by name."""
    others: dict[str, Any] = dict(base.named_modules(remove_duplicate=False)) | dict(base.named_parameters())
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule | Experts)}
    for name, module in packed.items():
        weight = None if name.rpartition(".parts.")[0] in packed else _dense(others.get(name))
        if weight is not None:
            own = module.dequantize(torch.float32).to(weight.device)
            noise, signal = float((own - weight).double().square().sum()), float(weight.double().square().sum())
            yield name, math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def _dense(other: Any) -> Tensor | None:
    """The weight of a layer of another model, in float32; None where it has none."""
    if isinstance(other, PackedModule | Experts):
        return other.dequantize(torch.float32)
    weight = other if isinstance(other, Tensor) else getattr(other, "weight", None)
    return weight.detach().float() if isinstance(weight, Tensor) else None


def last_row(evaluations: Sequence[Evaluation], width: int) -> str:
    """The line of a table for the last model, below a line of headings if it is the first.  width: of the longest name."""
    last = evaluations[-1]
    least = min(last.snr.values(), default=None)
    row = [last.name, f"{last.bits_per_weight:.2f}", str(last.packed), f"{last.perplexity:.4f} ± {last.perplexity_error:.4f}",
           *("" if value is None else f"{value:.6f}" for value in (last.divergence, last.percentile)),
           "" if last.agreement is None else f"{last.agreement:.2%}", "" if least is None else f"{least:.1f} dB"]
    widths = [width, *COLUMNS.values()]
    return "\n".join("  ".join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True)).rstrip()
                     for cells in ([["model", *COLUMNS], row] if len(evaluations) == 1 else [row]))


def svg(title: str, evaluations: Sequence[Evaluation]) -> str:
    """A point for each model: mean divergence over bits per weight, on a logarithmic scale whose bottom is LEAST."""
    points = [(one.bits_per_weight, max(one.divergence or 0.0, LEAST), one.name) for one in evaluations]
    most_bits = max(bits for bits, _, _ in points) * 1.1
    low, high = math.log10(LEAST), max(math.log10(most) for _, most, _ in points) + 0.5
    left, top, width, height = 70, 40, 640, 400
    body = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = top + height * (high - power) / (high - low)
        body += [f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
                 text(10, y + 4, f"1e{power}")]
    body += [text(left + width * mark / most_bits, top + height + 16, str(mark), "middle")
             for mark in range(0, math.ceil(most_bits), 2)]
    for bits, divergence, name in points:
        x, y = left + width * bits / most_bits, top + height * (high - math.log10(divergence)) / (high - low)
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4477aa"/>', text(x + 7, y + 4, name)]
    body += [text(left + width / 2, top + height + 34, "bits per weight", "middle"), text(10, 28, "mean KL divergence, nats")]
    return drawing(title, left + width + 160, top + height + 50, body)
