"""Compares a quantized Llama of random weights with a dense one on this GPU: logits, and seconds per step.

`python -m bench.gpu.model`.  A step is a forward of one token, without a cache of keys and values.  `--stand-in` tries all of it
on a CPU, in small.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qdsl
from bench.gpu import report
from bench.gpu.where import Where
from qdsl.models.dense import make_dense

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000}
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("q4_0", {}), ("int_group", {"bits": 4}), ("fp8_block", {}), ("mxfp4", {}), ("nf4", {}), ("q8_0", {}), ("int8_channel", {}),
    ("q4_k", {}))
SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
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
    parser.add_argument("--stand-in", action="store_true", help="a small model on a CPU")
    options = parser.parse_args()
    begun, wrong = time.monotonic(), 0
    where = Where.of(options.stand_in)
    dense = llama(1 if where.is_stand_in else options.layers, where)
    data = report.head(" ".join(["python", "-m", "bench.gpu.model", *sys.argv[1:]]), where.info, False)
    rows: list[dict[str, Any]] = [{"what": "bfloat16", **steps(dense, where)}]
    data["model"], data["complete"] = rows, False
    report.say(str(rows[0]))
    for name, chosen in FORMATS[:2 if where.is_stand_in else None]:
        if time.monotonic() - begun > options.seconds:
            break
        try:
            rows.append(quantized(dense, name, chosen, options.compile and name in ("q4_0", "fp8_block"), where))
        except Exception as error:                               # one format that fails keeps no other from it
            rows.append({"what": name, "failed": f"{type(error).__name__}: {str(error)[:400]}"})
            where.wait()
        report.say(str(rows[-1]))
        wrong += "failed" in rows[-1] or not rows[-1]["off"] < TOLERANCE * rows[-1]["dense_off"]
        if options.json:
            report.keep(options.json, data)
    else:
        data["complete"] = True
    if options.json:
        report.keep(options.json, data)
    return 1 if wrong else 0


def tokens_of(where: Where) -> tuple[int, ...]:
    """The numbers of tokens of a forward."""
    return ROWS[:2] if where.is_stand_in else ROWS


def llama(layers: int, where: Where) -> nn.Module:
    """The sizes of Llama 3 8B but for its vocabulary, with so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(SMALL if where.is_stand_in else SIZES), num_hidden_layers=layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with where.device:
        model: nn.Module = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def quantized(dense: nn.Module, name: str, chosen: dict[str, Any], compiled: bool, where: Where) -> dict[str, Any]:
    """A row: how far logits are from those of the same weights in float32, those of dense layers in bfloat16 too, and seconds."""
    model = copy.deepcopy(dense)
    begun = time.monotonic()
    qdsl.quantize_(model, name, "lm_head", **chosen)
    where.wait()
    row: dict[str, Any] = {"what": name, "quantized_in": round(time.monotonic() - begun, 2)}
    row["storage"] = model.model.layers[0].mlp.gate_proj.packed.storage  # type: ignore[union-attr,index]
    logits = {m: forward(model, ids(m, where)) for m in tokens_of(where)}
    row |= steps(model, where)
    if compiled:
        begun = time.monotonic()
        whole = torch.compile(model, fullgraph=True, dynamic=False, backend="eager" if where.is_stand_in else "inductor")
        row["compiled_off"] = off(forward(whole, ids(1, where)), logits[1])
        row["compiled_in"] = round(time.monotonic() - begun, 1)
        row["compiled_ms"] = round(1e3 * where.eager_seconds(lambda: forward(whole, ids(1, where))), 3)
    make_dense(model, torch.bfloat16)
    in_bfloat16 = {m: forward(model, ids(m, where)) for m in tokens_of(where)}
    model.float()
    exact = {m: forward(model, ids(m, where)) for m in tokens_of(where)}
    row["off"], row["dense_off"] = (max(off(way[m], exact[m]) for m in tokens_of(where)) for way in (logits, in_bfloat16))
    return row


def ids(rows: int, where: Where) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (1, rows), generator=torch.Generator().manual_seed(rows)).to(where.device)


@torch.inference_mode()
def forward(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def off(logits: Tensor, wanted: Tensor) -> float:
    """The norm of a difference as a part of that of what is wanted."""
    return float(f"{float((logits - wanted).norm() / wanted.norm()):.3g}")


@torch.inference_mode()
def steps(model: Any, where: Where) -> dict[str, Any]:
    """Milliseconds of a forward of so many tokens in a CUDA graph, without one, and tokens per second of `generate`."""
    row: dict[str, Any] = {"graph_ms": {}, "eager_ms": {}}
    for m in tokens_of(where):
        tokens = ids(m, where)

        def call(tokens: Tensor = tokens) -> Tensor:
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
            return logits

        call()
        row["eager_ms"][m] = round(1e3 * where.eager_seconds(call), 3)
        try:
            row["graph_ms"][m] = round(1e3 * where.seconds([call, call], 3), 3)
        except Exception as error:                               # a model that cannot be captured is timed without
            row["graph_ms"][m] = f"{type(error).__name__}: {str(error)[:100]}"
            where.wait()
    begun, new, prompt = time.perf_counter(), 2 if where.is_stand_in else NEW, ids(16, where)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                   pad_token_id=0)
    where.wait()
    row["generate_tokens_per_s"] = round(new / (time.perf_counter() - begun), 1)
    return row


if __name__ == "__main__":
    sys.exit(main())
