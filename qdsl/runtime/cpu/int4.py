"""int4 weights for torch's fused operations on CPUs and XPUs, and products by these operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.functional import pad

from qdsl.runtime.weight import order
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.assemble import assemble
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat


@dataclass(frozen=True)
class Int4Operation:
    """A fused int4 product of torch, called with (x, codes, group size, *scales), and the weights that it reads.

    name, packer: functions of torch.ops.aten; the packer makes the bytes of codes [N, K] that `name` reads on this machine.
    format: a module of qdsl.generated.  storages: candidates for these bytes; `_storage` finds the right one.  params: parameters
    of the format.  arguments: the storage's tensors in the order of the call.  tail: the storage of rows after the last full
    tile; '' if a storage takes all rows.  rows, group: N and the group size must be multiples of these.  pads: groups that are
    multiples of it, or the only one of a row, are padded with columns of zeros to what the operation takes, also a short last
    one; 0 if none may be.  dtypes: of x that the operation takes.  split: scales are a sum of tensors [terms, ...] in the first
    of these dtypes; the operation is called once per term.  most: up to how many rows of x, times those terms, it is faster than
    decoded tiles; None for all.

    Only this class knows which storage an operation reads.  A spec describes bytes; which function of a library reads them
    depends on the library's version, the device and the CPU.
    """

    name: str
    format: str
    storages: tuple[str, ...]
    arguments: tuple[str, ...]
    packer: str = ""
    tail: str = ""
    rows: int = 1
    group: int = 32
    pads: int = 0
    params: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    split: bool = False
    most: int | None = None


# On x86 torch has vector kernels only for x and scales in bfloat16; its loops for other dtypes are 30 to 110 times slower. Most
# scales are not bfloat16 numbers but are sums of two: a float16 has 11 bits, its product with a zero point 15, two terms 16.
OPERATIONS = {
    "cpu": Int4Operation("_weight_int4pack_mm_for_cpu", "int4pack", ("cpu_avx512", "cpu_avx2", "cpu_scalar"),
                         ("weight", "scales_and_zeros"), "_convert_weight_to_int4pack_for_cpu", "cpu_rest", rows=16,
                         params=(("scale_type", "f32"),), dtypes=(torch.bfloat16,), split=True, most=128),
    "xpu": Int4Operation("_weight_int4pack_mm_with_scales_and_zeros", "int_group", ("xpu_int4pack",),
                         ("qweight", "scales", "qzeros"), pads=8),
}


def operation_for(device: torch.device) -> Int4Operation:
    """The fused int4 operation of a device.  Raises FormatError if this torch has none."""
    operation = OPERATIONS.get(device.type)
    if operation is None:
        raise FormatError(f"torch has fused int4 operations for {' and '.join(OPERATIONS)}, not for {device.type}")
    for name in filter(None, (operation.name, operation.packer)):
        if not hasattr(torch.ops.aten, name):
            raise FormatError(f"torch {torch.__version__} has no operation aten::{name}")
    return operation


@cache
def format_of(operation: Int4Operation) -> WeightFormat:
    """The format whose storages an operation reads."""
    format: WeightFormat = import_module(f"qdsl.generated.{operation.format}").FORMAT
    return format


@cache
def native_storage(operation: Int4Operation) -> str:
    """The storage with the bytes of torch's packer on this machine.  Raises FormatError if none has them."""
    if not operation.packer:
        return operation.storages[0]
    n, k = 128, 32
    codes = (torch.arange(n * k, device="cpu") * 2654435761 // 65536 % 16).view(n, k)
    wanted = getattr(torch.ops.aten, operation.packer)(codes.int(), 1).flatten()
    scales = torch.ones(n, 1, dtype=torch.float32, device="cpu")
    fields = {"q": codes.byte(), "s": scales, "z": torch.zeros_like(scales)}
    for storage in operation.storages:
        packed = format_of(operation).pack(fields, storage, group=k, **dict(operation.params))
        if torch.equal(packed.tensors[operation.arguments[0]].flatten(), wanted):
            return storage
    raise FormatError(f"aten::{operation.packer} packs as none of {', '.join(operation.storages)} on this machine")


def padded_group(packed: PackedWeight, operation: Int4Operation) -> int:
    """The columns of each group as an operation gets them, padded with zeros; 0 if it takes no such groups."""
    k, group = packed.shape[1], min(packed.sizes["group"], packed.shape[1])
    is_whole = not group % operation.group and not k % group
    is_padded = operation.pads and (not group % operation.pads or group == k)
    return cdiv(group, operation.group) * operation.group if is_whole or is_padded else 0


def check_groups(packed: PackedWeight, operation: Int4Operation) -> int:
    """`padded_group` of a weight.  Raises FormatError if there is none."""
    padded = padded_group(packed, operation)
    if not padded:
        raise FormatError(f"groups of {packed.sizes['group']} are no multiple of {operation.pads or operation.group}, which "
                          f"aten::{operation.name} needs")
    return padded


def pad_groups(columns: Tensor, packed: PackedWeight, padded: int) -> Tensor:
    """Columns [..., K], or words of codes, with zeros after each group of a weight; the same tensor if groups need none.

    Zeros in x and in codes add zero times a finite weight to a product, so that it stays exact.
    """
    k, group = packed.shape[1], min(packed.sizes["group"], packed.shape[1])
    groups, per = cdiv(k, group), k // columns.shape[-1]
    if groups * padded == k:
        return columns
    whole = pad(columns, (0, (groups * group - k) // per))
    if padded == group:
        return whole
    return pad(whole.reshape(*whole.shape[:-1], groups, -1), (0, (padded - group) // per)).flatten(-2)


def unpad_groups(columns: Tensor, packed: PackedWeight, padded: int) -> Tensor:
    """The inverse of `pad_groups`."""
    k, group = packed.shape[1], min(packed.sizes["group"], packed.shape[1])
    groups = cdiv(k, group)
    if groups * padded == k:
        return columns
    per = groups * padded // columns.shape[-1]
    return columns.reshape(*columns.shape[:-1], groups, -1)[..., :group // per].flatten(-2)[..., :k // per].contiguous()


def convert_for_device(packed: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight for the fused int4 operation of its device: its storage, columns by groups, scales in x's dtype.

    dtype: of x.  Scales and zeros are rounded to it once, and `notes` of the result says so if that changes them.  On a CPU
    float16 keeps float32 scales, and products do not use the operation.  Groups that are too long for the operation are divided;
    the parts have the same scale.  On an XPU groups that are too short, such as a last one, are padded with zeros in each
    product; FusedLinear stores the padded codes.  Raises FormatError if torch has no operation for the device or such groups, or
    if codes would change.
    """
    operation = operation_for(packed.device)
    if packed.has_branch:
        raise FormatError(f"'{packed.branch_names[0]}' is added to the weight, and aten::{operation.name} knows nothing of that")
    format = format_of(operation)
    kinds = format.params["scale_type"]
    kind = next((kind for kind in kinds if FLOATS[str(kind)] == dtype), "f32")
    wide = format.convert(_divide_groups(packed, format), native_storage(operation), **dict(operation.params))
    check_groups(wide, operation)
    if wide.params["scale_type"] == kind:
        return wide
    scaled = {name for name, stored in wide.layout.tensors.items() if stored.dtype == "scale_type"}
    tensors = {name: tensor.to(FLOATS[str(kind)]) if name in scaled else tensor for name, tensor in wide.tensors.items()}
    if not all(bool(tensors[name].isfinite().all()) for name in scaled):
        raise FormatError(f"{packed.format.name}: scales are beyond {str(dtype)[6:]}; choose another dtype")
    is_exact = all(torch.equal(tensors[name].to(wide.tensors[name].dtype), wide.tensors[name]) for name in scaled)
    notes = () if is_exact else (f"scales and zeros are rounded to {str(dtype)[6:]}",)
    return assemble(format, wide.storage, tensors, wide.shape, {**wide.params, "scale_type": kind}, notes)


def _divide_groups(packed: PackedWeight, format: WeightFormat) -> PackedWeight:
    """The weight with groups divided to a size of another format, with the scale repeated; unchanged if it already fits."""
    own, k = packed.sizes.get("group", 0), packed.shape[1]
    if own in format.params["group"]:
        return packed
    sizes = [int(size) for size in {*format.params["group"]} & {*packed.format.params.get("group", ())} if int(size) > 0]
    fits = [size for size in sizes if math.gcd(own, k) % size == 0]
    if not fits:
        return packed                                            # the conversion raises the error
    size, fields = max(fits), packed.format.unpack(packed)
    for name, field in packed.variant.fields.items():
        if field.groups is not None and name in fields:          # columns of a group are divided in stored order
            parts = torch.arange(k, dtype=torch.int32, device=packed.device) // size
            fields[name] = torch.empty_like(parts).index_copy_(0, order.by_groups(fields[name]).long(), parts)
        elif name in fields and any(axis.step == ("group",) for axis in field.axes):
            fields[name] = fields[name].repeat_interleave(own // size, 1)
    return packed.format.pack(fields, packed.storage, **{**packed.params, "group": size})


@dataclass(frozen=True, slots=True)
class _FusedCall:
    """Constants of a product by an operation, looked up once: a product evicts Python's data from the caches.

    codes, scales: the tensors of the storage.
    """

    operation: Int4Operation
    function: Callable[..., Tensor]
    format: WeightFormat
    codes: str
    scales: tuple[str, ...]


@cache
def _fused_call(device: str, storage: str) -> _FusedCall | None:
    """The operation of a device that reads a storage on this machine; None if none does."""
    operation = OPERATIONS.get(device)
    if operation is None or storage not in operation.storages or storage != native_storage(operation):
        return None
    codes, *scales = operation.arguments
    function = getattr(torch.ops.aten, operation.name).default
    return _FusedCall(operation, function, format_of(operation), codes, tuple(scales))


def int4_product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """x [M, K] @ w.T + bias by the fused operation of the device; None if it cannot take the weight or x."""
    call = _fused_call(x.device.type, packed.storage)
    if call is None or packed.format is not call.format or x.dtype not in call.operation.dtypes or not x.numel():
        return None
    codes, scales = packed.tensors[call.codes], [packed.tensors[name] for name in call.scales]
    padded = padded_group(packed, call.operation)
    if scales[0].dtype != x.dtype or not padded:
        return None
    n, rows = packed.shape[0], scales[0].shape[1]                # rows in full tiles
    x, codes = [pad_groups(columns, packed, padded) for columns in (x, codes.view(rows, -1))]
    out = call.function(x, codes, padded, *scales)
    out = out if rows == n else out[:, :n].contiguous()
    return out if bias is None else (out.float() + bias.float()).to(x.dtype)
