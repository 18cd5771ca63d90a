"""Compares a quantized Llama of random weights with a dense one on this GPU: logits, and seconds per step.

`python -m bench.gpu.model`.  A step is a forward of one token, without a cache of keys and values.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import qdsl
from bench.gpu import clock, report
from bench.gpu.device import device_info
from qdsl.models.dense import make_dense

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000}
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("q4_0", {}), ("int_group", {"bits": 4}), ("fp8_block", {}), ("mxfp4", {}), ("nf4", {}), ("q8_0", {}), ("int8_channel", {}),
    ("q4_k", {}))
ROWS = (1, 8, 64, 512)                                           # tokens of a forward
NEW = 32                                                         # tokens that `generate` makes
TOLERANCE = 1.5                                                  # times the error of dense layers in bfloat16


def main() -> int:
    """0 where all logits are right."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90.0, help="no format is begun after so long")
    parser.add_argument("--compile", action="store_true", help="also by torch.compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun, wrong = time.monotonic(), 0
    info = device_info()
    dense = llama(options.layers)
    data = report.head(" ".join(["python", "-m", "bench.gpu.model", *sys.argv[1:]]), info, False)
    rows: list[dict[str, Any]] = [{"what": "bfloat16", **steps(dense)}]
    data["model"] = rows
    report.say(str(rows[0]))
    for name, chosen in FORMATS:
        if time.monotonic() - begun > options.seconds:
            break
        try:
            rows.append(quantized(dense, name, chosen, options.compile and name in ("q4_0", "fp8_block")))
        except Exception as error:                               # one format that fails keeps no other from it
            rows.append({"what": name, "failed": f"{type(error).__name__}: {str(error)[:400]}"})
            torch.cuda.synchronize()
        report.say(str(rows[-1]))
        wrong += "failed" in rows[-1] or not rows[-1]["off"] < TOLERANCE * rows[-1]["dense_off"]
        if options.json:
            report.keep(options.json, data)
    return 1 if wrong else 0


def llama(layers: int) -> nn.Module:
    """The sizes of Llama 3 8B but for its vocabulary, with so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: nn.Module = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def quantized(dense: nn.Module, name: str, chosen: dict[str, Any], compiled: bool) -> dict[str, Any]:
    """A row: how far logits are from those of the same weights in float32, those of dense layers in bfloat16 too, and seconds."""
    model = copy.deepcopy(dense)
    begun = time.monotonic()
    qdsl.quantize_(model, name, "lm_head", **chosen)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"what": name, "quantized_in": round(time.monotonic() - begun, 2)}
    row["storage"] = model.model.layers[0].mlp.gate_proj.packed.storage  # type: ignore[union-attr,index]
    logits = {m: forward(model, ids(m)) for m in ROWS}
    row |= steps(model)
    if compiled:
        begun = time.monotonic()
        whole = torch.compile(model, fullgraph=True, dynamic=False)
        row["compiled_off"] = off(forward(whole, ids(1)), logits[1])
        row["compiled_in"] = round(time.monotonic() - begun, 1)
    make_dense(model, torch.bfloat16)
    in_bfloat16 = {m: forward(model, ids(m)) for m in ROWS}
    model.float()
    exact = {m: forward(model, ids(m)) for m in ROWS}
    row["off"], row["dense_off"] = (max(off(way[m], exact[m]) for m in ROWS) for way in (logits, in_bfloat16))
    return row


def ids(rows: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (1, rows), generator=torch.Generator().manual_seed(rows)).cuda()


@torch.inference_mode()
def forward(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def off(logits: Tensor, wanted: Tensor) -> float:
    """The norm of a difference as a part of that of what is wanted."""
    return float(f"{float((logits - wanted).norm() / wanted.norm()):.3g}")


@torch.inference_mode()
def steps(model: Any) -> dict[str, Any]:
    """Milliseconds of a forward of so many tokens in a CUDA graph, without one, and tokens per second of `generate`."""
    row: dict[str, Any] = {"graph_ms": {}, "eager_ms": {}}
    for m in ROWS:
        tokens = ids(m)

        def call(tokens: Tensor = tokens) -> Tensor:
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
            return logits

        call()
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - begun)
        row["eager_ms"][m] = round(1e3 * median(samples), 3)
        try:
            row["graph_ms"][m] = round(1e3 * clock.seconds([call, call], 3), 3)
        except Exception as error:                               # a model that cannot be captured is timed without
            row["graph_ms"][m] = f"{type(error).__name__}: {str(error)[:100]}"
            torch.cuda.synchronize()
    begun = time.perf_counter()
    model.generate(ids(16), attention_mask=torch.ones_like(ids(16)), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                   pad_token_id=0)
    torch.cuda.synchronize()
    row["generate_tokens_per_s"] = round(NEW / (time.perf_counter() - begun), 1)
    return row


if __name__ == "__main__":
    sys.exit(main())
