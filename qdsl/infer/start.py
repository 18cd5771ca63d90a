"""Writes the spec that a new format starts from: integer codes and a scale per group."""

from __future__ import annotations

import math


def starting_spec(name: str, bits: int, group: int) -> str:
    """The text of a spec with centred codes of 2 to 8 bits, and a float16 scale per `group` columns."""
    run = math.lcm(bits, 8) // bits                              # codes in the shortest run of whole bytes
    return f"""\
format: {name}
weight: [N, K]
fields:
  q: u{bits}[n, k]                   # a code for every weight
  scale: f16[n, k // {group}]         # a scale for {group} columns of a row
decode: (q - {1 << bits - 1}) * scale
encode: absmax(code=q, scale=scale, divisor={(1 << bits - 1) - 1})
storage:
  file:
    codes:
      tensor: u8[n<N, t<K/{run} word]
      record: "i<{run}: q[n, {run}*t + i]"
    scales:
      tensor: f16[n<N, g<K/{group}]
      record: scale[n, g]
"""
