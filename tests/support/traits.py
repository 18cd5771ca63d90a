"""Packed weights of different traits: blocks in bytes, an index, 8-bit floats, streams."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.generated import fp8_block, fp8_tensor, hlane, int8_channel, int_group, q4_0
from qdsl.runtime import PackedWeight

W4 = """
format: w4
weight: [N, K]
fields:
  q: u4[n, k]
  s: f16[n, k // 32]
decode: (q - 8) * s
encode: absmax(code=q, scale=s, divisor=7)
storage:
  plain:
    codes:
      tensor: u8[n<N, j<K/2]
      record: q[n, 2*j] q[n, 2*j + 1]
    scales:
      tensor: f16[n<N, g<K/32]
      record: s[n, g]
"""


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def act_order(packed: PackedWeight, seed: int = 3) -> PackedWeight:
    index = packed.tensors["g_idx"]
    shuffled = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    return int_group.wrap({**packed.tensors, "g_idx": shuffled}, storage="gptq_v2", **packed.params)


@cache
def weights(n: int = 64, k: int = 64) -> dict[str, tuple[Any, PackedWeight]]:
    """Formats of different traits: blocks in bytes, an index in order and out of order, columns in another order, 8-bit floats,
    what is optional or not, streams.
    """
    w = sample(n, k)
    gptq = int_group.quantize(w, "gptq_v2", group=32)
    eight = int8_channel.quantize(w)
    zeros = {name: eight.tensors["weight"][:, :1].clone() for name, stored in eight.layout.tensors.items() if stored.optional}
    return {
        "blocks": (q4_0, q4_0.quantize(w)),
        "in order": (int_group, gptq),
        "act-order": (int_group, act_order(gptq)),
        "columns by groups": (int_group, int_group.convert(act_order(gptq), "planar")),
        "fp8": (fp8_block, fp8_block.quantize(w, bn=128, bk=128)),
        "without zeros": (int8_channel, eight),
        "with zeros": (int8_channel, int8_channel.wrap({**eight.tensors, **zeros})),
        "scalar scale": (fp8_tensor, fp8_tensor.quantize(w)),
        "stream": (hlane, hlane.quantize(w)),
    }


TRAITS = [trait for trait in weights() if trait != "stream"]     # which takes longest, and has the others' operations


def stack(n: int = 64) -> nn.Sequential:
    """A layer of every kind, with and without a bias."""
    layers = [module.Linear(packed.apply(torch.clone), sample(n, seed=i) if i % 2 else None)
              for i, (module, packed) in enumerate(weights(n, n).values())]
    return nn.Sequential(*layers)
