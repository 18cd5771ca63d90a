"""Whether 8-bit float codes hold a NaN or an infinity, which the kernels for matrix units would decode as numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qdsl.runtime.weight.layout import Storage

SIGN = 128


def has_special_codes(layout: Storage) -> bool:
    """Whether the tensors of a storage can hold codes that its kernels for matrix units cannot decode."""
    kernels = layout.kernels.matrix_unit
    return kernels is not None and kernels.special is not None


def are_codes_finite(layout: Storage, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether no code is NaN or infinite.  Reads every code, at memory speed; on a GPU it waits for the answer.

    Its bits are the upper ones below the sign, so the largest code of each sign is enough, without a mask per code.
    """
    kernels = layout.kernels.matrix_unit
    special = None if kernels is None else kernels.special
    codes = None if special is None else tensors.get(special.tensor)
    if special is None or codes is None or codes.is_meta or not codes.numel():
        return True
    stored = codes.detach().contiguous()
    return int(stored.view(torch.int8).amax()) < special.bits and int(stored.view(torch.uint8).amax()) < special.bits + SIGN
