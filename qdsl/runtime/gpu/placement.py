"""The storage that a loader gives a weight: planar if its products are faster, converted once.

Loaders call `fastest_storage` for weights that they place in a model.  A PackedWeight or layer of the caller stays unchanged; its
plan has a note.  QDSL_PLANAR=never keeps all weights as stored; QDSL_PLANAR=larger lets them take more memory.
"""

from __future__ import annotations

import math
import os

import torch
from torch import nn

from qdsl.runtime.gpu import plan
from qdsl.runtime.gpu.strides import why_unreadable
from qdsl.runtime.libraries.private_apis import is_fsdp_shard
from qdsl.runtime.libraries.triton import runs_kernels
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.planar import planar_template
from qdsl.runtime.weight.settings import EnvironmentSetting

PLANAR = EnvironmentSetting("QDSL_PLANAR", ("auto", "larger", "never"))
ROWS = (1, 1, 16, 64)                                            # rows of x to compare; one row per token counts twice
GAIN = 1.05                                                      # the speedup that planar must reach (predicted)


def fastest_storage(packed: PackedWeight, quantizes_x: bool = False) -> PackedWeight:
    """The weight in storage planar if products on its device are then faster; else the weight itself.

    quantizes_x: products take x in 8 bits, which needs rows of 8-bit codes.  On a GPU modelled costs decide.  On a CPU act-order
    weights become planar: else every product sorts their columns.  The result is at most 4 % larger, or 12 % for codes below 4
    bits, unless QDSL_PLANAR is `larger`.  Raises FormatError for an unknown QDSL_PLANAR.
    """
    choice = PLANAR.value()
    if choice == "never" or quantizes_x:
        return packed
    if packed.device.type == "cpu" and not runs_kernels(packed.device):
        return packed.format.planar(packed) if packed.moved_indices else packed
    larger = choice == "larger"
    return packed.format.planar(packed, larger) if planar_gain(packed, packed.device, larger) > GAIN else packed


def planar_gain(packed: PackedWeight, device: torch.device, larger: bool = False) -> float:
    """The modelled speedup of products on a GPU in storage planar; 0 if the weight has no planar form.

    It is the geometric mean over ROWS: no number of rows outweighs the others.  larger: allow forms that take more memory.
    """
    if not runs_kernels(device) or packed.format.why_not_planar(packed, larger):
        return 0.0
    planar = planar_template(packed)
    gains = [math.prod(plan.choice(weight, m, torch.bfloat16, device).options[0].seconds ** power
                       for weight, power in ((packed, 1), (planar, -1))) for m in ROWS]
    return math.prod(gains) ** (1 / len(ROWS))


def storage_advice(packed: PackedWeight, device: torch.device) -> str:
    """A note for users of a weight that runs as stored; '' if nothing is copied and no other storage is faster."""
    why = why_unreadable(packed)
    copied = f"copied once, for {why}" if why else ""
    gain = planar_gain(packed, device, larger=True)
    if gain <= GAIN:
        return copied
    text = f"products in storage planar are predicted to be {gain:.1f} times as fast: qdsl.planar_"
    if packed.format.why_not_planar(packed):
        text = f"{text} with larger=True, {planar_template(packed).nbytes / packed.nbytes:.2f} times the bytes"
    return "; ".join(filter(None, (copied, text)))


def may_change_storage(module: nn.Module) -> bool:
    """Whether a loader may change how a module stores its weight: not under accelerate's offload hooks or FSDP."""
    is_hooked = getattr(module, "_hf_hook", None) is not None
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") or any(
        is_fsdp_shard(parameter) for parameter in module.parameters())
    return not is_hooked and not is_sharded
