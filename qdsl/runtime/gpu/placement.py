"""Which storage a loader puts a weight in: the planar one once, where products are faster by it.

Loaders call `fastest_storage` for weights that they place in a model.  A PackedWeight or a layer that the caller made stays as it
is; its plan has a note.  QDSL_PLANAR=never leaves all weights as they are stored, QDSL_PLANAR=larger lets them take more memory.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from qdsl.runtime.gpu import plan
from qdsl.runtime.gpu.strides import why_copied
from qdsl.runtime.gpu.triton import runs_kernels
from qdsl.runtime.torch.private_apis import is_fsdp_shard
from qdsl.runtime.weight import eight
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.planar import planar_template

SETTING, CHOICES = "QDSL_PLANAR", ("auto", "larger", "never")
ROWS = (1, 16)                                                   # of x, whose products are compared: most of a server's time
GAIN = 1.05                                                      # times as fast that the planar storage must be (predicted)


def fastest_storage(packed: PackedWeight) -> PackedWeight:
    """The same numbers in storage planar where products on the weight's device are then faster; else the weight itself.

    On a GPU modelled costs decide.  On a CPU weights in act-order are put in order: as stored, every product sorts their columns.
    The result is at most 4 % larger, 12 % for codes of fewer than 4 bits, unless QDSL_PLANAR is `larger`.  Raises FormatError for
    an unknown QDSL_PLANAR.
    """
    setting = os.environ.get(SETTING, CHOICES[0])
    if setting not in CHOICES:
        raise FormatError(f"{SETTING} is {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, not {setting!r}")
    if setting == "never" or eight.is_possible(packed):          # which serves quantize_x, and planar does not
        return packed
    if packed.device.type == "cpu" and not runs_kernels(packed.device):
        return packed.format.planar(packed) if is_permuted(packed) else packed
    larger = setting == "larger"
    return packed.format.planar(packed, larger) if planar_gain(packed, packed.device, larger) > GAIN else packed


def is_permuted(packed: PackedWeight) -> bool:
    """Whether an index puts columns into groups all over K (act-order)."""
    return any(tensor.dtype == "index" and name in packed.tensors and name not in packed.in_order
               for name, tensor in packed.layout.tensors.items())


def planar_gain(packed: PackedWeight, device: torch.device, larger: bool = False) -> float:
    """How many times as fast products on a GPU are in storage planar, as modelled; 0 where the weight has no such form.

    larger: the form may take more memory.
    """
    if not runs_kernels(device) or packed.format.why_not_planar(packed, larger):
        return 0.0
    planar = planar_template(packed)
    stored, faster = (sum(plan.choice(weight, m, torch.bfloat16, device).options[0].seconds for m in ROWS)
                      for weight in (packed, planar))
    return stored / faster


def note(packed: PackedWeight, device: torch.device) -> str:
    """What to know of a weight that runs as its caller stored it; '' where it is not copied, and no other storage is faster."""
    why = why_copied(packed)
    copied = f"copied once, for {why}" if why else ""
    gain = planar_gain(packed, device, larger=True)
    if gain <= GAIN:
        return copied
    text = f"products in storage planar are predicted to be {gain:.1f} times as fast: qdsl.planar_"
    if packed.format.why_not_planar(packed):
        text = f"{text} with larger=True, {planar_template(packed).nbytes / packed.nbytes:.2f} times the bytes"
    return "; ".join(filter(None, (copied, text)))


def may_change(module: nn.Module) -> bool:
    """Whether a loader may choose how a module stores its weight: it is not offloaded by a hook of accelerate, nor under FSDP."""
    is_hooked = getattr(module, "_hf_hook", None) is not None
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") or any(
        is_fsdp_shard(parameter) for parameter in module.parameters())
    return not is_hooked and not is_sharded
