"""spqr: SpQR, 3-bit codes, scales and zeros in tiles of 16 x 16, columns in an order of their own, and outliers.

    w = round(round(ss * round(s - sz, f16), f16) * round(q - round(zs * round(z - zz, f16), f16), f16), f16)
        + csr(row_offsets, col_vals, col_vals)
    float32, rounded after each operation

    p      index into K groups [K]
    ss     f16   [N/16, K/16]
    sz     f16   [N/16, K/16]
    zs     f16   [N/16, K/16]
    zz     f16   [N/16, K/16]
    s      u3    [N, K/16]
    z      u3    [N, K/16]
    q      u3    [N, K]

    spqr: 4 bits per weight

Built from the spec spqr (sha256 41fd246dfcf5c7a7) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import Format, Kernels, Storage, Variant, as_float, as_type, integer, rounded, workspace
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_spqr(dense_weights: Tensor) -> dict[str, Tensor]:
    """Fields of dense_weights int32 [N/16, K/16, 32]."""
    r = as_type(dense_weights, torch.uint8)
    q_words = integer(r[..., 0:128].unflatten(-1, (16, 8))[..., :7])
    ss_low = integer(r[..., 6:8]) >> 6 & 255
    ss_high = integer(r[..., 22:24]) >> 6 & 255
    zs_low = integer(r[..., 38:40]) >> 6 & 255
    zs_high = integer(r[..., 54:56]) >> 6 & 255
    sz_low = integer(r[..., 70:72]) >> 6 & 255
    sz_high = integer(r[..., 86:88]) >> 6 & 255
    zz_low = integer(r[..., 102:104]) >> 6 & 255
    zz_high = integer(r[..., 118:120]) >> 6 & 255
    return {
        "ss": (ss_low.to(torch.int32) | ss_high.to(torch.int32) << 8).to(torch.int16).view(torch.float16),
        "sz": (sz_low.to(torch.int32) | sz_high.to(torch.int32) << 8).to(torch.int16).view(torch.float16),
        "zs": (zs_low.to(torch.int32) | zs_high.to(torch.int32) << 8).to(torch.int16).view(torch.float16),
        "zz": (zz_low.to(torch.int32) | zz_high.to(torch.int32) << 8).to(torch.int16).view(torch.float16),
        "s": (r[..., 0:121:8] & 7).permute(0, 2, 1).flatten(0, 1),
        "z": (r[..., 0:121:8] >> 3 & 7).permute(0, 2, 1).flatten(0, 1),
        "q": torch.stack([q_words >> 6 + 3 * i & 7 for i in range(16)], -1).to(torch.uint8).permute(0, 2, 1, 3).flatten(0,
            1).flatten(1),
    }


def pack_spqr(ss: Tensor, sz: Tensor, zs: Tensor, zz: Tensor, s: Tensor, z: Tensor, q: Tensor) -> dict[str, Tensor]:
    """dense_weights of the fields; the inverse of unpack_spqr."""
    r = torch.zeros(ss.shape[0], ss.shape[1], 128, dtype=torch.uint8, device=s.device)
    r[..., 0:121:8] |= s.unflatten(0, (-1, 16)).permute(0, 2, 1)
    r[..., 0:121:8] |= (z.unflatten(0, (-1, 16)) << 3).permute(0, 2, 1)
    q_split = q.unflatten(-1, (-1, 16)).unflatten(0, (-1, 16))
    q_packed = sum(q_split[..., i].to(torch.int64) << 6 + 3 * i for i in range(16)).permute(0, 2, 1)
    r[..., 0:128].unflatten(-1, (16, 8))[..., :7] |= q_packed.unsqueeze(-1).view(torch.uint8)[..., :7]
    ss_packed = (ss.view(torch.int16) & 255).to(torch.int32) << 6
    r[..., 6:8] |= ss_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    ss_packed2 = (ss.view(torch.int16) >> 8 & 255).to(torch.int32) << 6
    r[..., 22:24] |= ss_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 14:16] |= ss_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 30:32] |= ss_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    zs_packed = (zs.view(torch.int16) & 255).to(torch.int32) << 6
    r[..., 38:40] |= zs_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    zs_packed2 = (zs.view(torch.int16) >> 8 & 255).to(torch.int32) << 6
    r[..., 54:56] |= zs_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 46:48] |= zs_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 62:64] |= zs_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    sz_packed = (sz.view(torch.int16) & 255).to(torch.int32) << 6
    r[..., 70:72] |= sz_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    sz_packed2 = (sz.view(torch.int16) >> 8 & 255).to(torch.int32) << 6
    r[..., 86:88] |= sz_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 78:80] |= sz_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 94:96] |= sz_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    zz_packed = (zz.view(torch.int16) & 255).to(torch.int32) << 6
    r[..., 102:104] |= zz_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    zz_packed2 = (zz.view(torch.int16) >> 8 & 255).to(torch.int32) << 6
    r[..., 118:120] |= zz_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 110:112] |= zz_packed.unsqueeze(-1).view(torch.uint8)[..., :2]
    r[..., 126:128] |= zz_packed2.unsqueeze(-1).view(torch.uint8)[..., :2]
    return {"dense_weights": as_type(r, torch.int32)}


def decode(ss: Tensor, sz: Tensor, zs: Tensor, zz: Tensor, s: Tensor, z: Tensor, q: Tensor, p: Tensor | None = None,
        out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = round(round(ss * round(s - sz, f16), f16) * round(q - round(zs
    * round(z - zz, f16), f16), f16), f16).  ss [N/16, K/16], sz [N/16, K/16], zs [N/16, K/16], zz [N/16, K/16], s [N, K/16], z
    [N, K/16], q [N, K], p [K].
    """
    out = out if out is None else out.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
    ss = ss.float()[:, None, :, None]
    sz = sz.float()[:, None, :, None]
    zs = zs.float()[:, None, :, None]
    zz = zz.float()[:, None, :, None]
    s = s.unflatten(0, (-1, 16)).unsqueeze(-1)
    z = z.unflatten(0, (-1, 16)).unsqueeze(-1)
    q = q.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
    space = workspace(out)
    w = torch.sub(as_float(q, out), rounded(zs * rounded(z - zz, torch.float16), torch.float16), out=space)
    w = rounded(w, torch.float16, space)
    w = torch.mul(rounded(ss * rounded(s - sz, torch.float16), torch.float16), w, out=space)
    return rounded(w, torch.float16, out).flatten(2).flatten(0, 1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_spqr(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    dense_weights, = tensors
    dense_weights += 32 * (n // 16 * (K // 16))
    ss_low = (tl.load(dense_weights + 32 * (k // 16) + 1, live, 0) >> 22 & 255).to(tl.int32)
    ss_high = (tl.load(dense_weights + 32 * (k // 16) + 5, live, 0) >> 22 & 255).to(tl.int32)
    ss = (ss_low | ss_high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    sz_low = (tl.load(dense_weights + 32 * (k // 16) + 17, live, 0) >> 22 & 255).to(tl.int32)
    sz_high = (tl.load(dense_weights + 32 * (k // 16) + 21, live, 0) >> 22 & 255).to(tl.int32)
    sz = (sz_low | sz_high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zs_low = (tl.load(dense_weights + 32 * (k // 16) + 9, live, 0) >> 22 & 255).to(tl.int32)
    zs_high = (tl.load(dense_weights + 32 * (k // 16) + 13, live, 0) >> 22 & 255).to(tl.int32)
    zs = (zs_low | zs_high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zz_low = (tl.load(dense_weights + 32 * (k // 16) + 25, live, 0) >> 22 & 255).to(tl.int32)
    zz_high = (tl.load(dense_weights + 32 * (k // 16) + 29, live, 0) >> 22 & 255).to(tl.int32)
    zz = (zz_low | zz_high << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = tl.load(dense_weights + 32 * (k // 16) + 2 * (n % 16), live, 0) & 7
    z = tl.load(dense_weights + 32 * (k // 16) + 2 * (n % 16), live, 0) >> 3 & 7
    q = device.stream(dense_weights + 32 * (k // 16), 1, 64 * (n % 16) + 3 * (k % 16) + 6, 3, 32, live)
    return use(state, k,
        device.rounded(device.rounded(ss * device.rounded(s - sz, tl.float16), tl.float16)
        * device.rounded(q - device.rounded(zs * device.rounded(z - zz, tl.float16), tl.float16), tl.float16), tl.float16), live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "spqr": Storage(unpack_spqr, pack_spqr, Kernels(_decode_spqr, rows="N", units="K", last="k")),
    },
    decode=decode,
)

PROGRAM = {
    "name": "spqr",
    "title": "SpQR, 3-bit codes, scales and zeros in tiles of 16 x 16, columns in an order of their own, and outliers",
    "source": "SpQR inference_lib/src/spqr_quant inference.py QuantizedLinear, spqr_cuda.cpp, sparse strategy csr",
    "formula": "round(round(ss * round(s - sz, f16), f16) * round(q - round(zs * round(z - zz, f16), f16), f16), f16)",
    "bits": "4", "digest": "41fd246dfcf5c7a7",
    "variants": {(): {
        "fields": {
            "p": ("index", "K", {"groups": "K"}),
            "ss": ("f16", "N/16", "K/16"), "sz": ("f16", "N/16", "K/16"), "zs": ("f16", "N/16", "K/16"),
            "zz": ("f16", "N/16", "K/16"), "s": ("u3", "N", "K/16"), "z": ("u3", "N", "K/16"), "q": ("u3", "N", "K"),
        },
        "cuts": ("ceil(N/16)", "K"),
        "storages": {"spqr": {
            "tensors": {
                "dense_weights": ("i32", "N/16", "K/16", "32",
                    {"seen": ("N*K/8",), "within": "i64",
                    "slices": (("s", 0, [[(16, 2, 2), (0, 1, 0)], 1]), ("z", 3, [[(16, 2, 2), (0, 1, 0)], 1]),
                    ("q", 6, [[(16, 2, 2), (0, 1, 0)], [(16, 3), (0, 1, 1)]]), ("ss", 54, [0, 1], 0, 8),
                    ("ss", 182, [0, 1], 8, 8), ("ss", 118, [0, 1], 0, 8, {"copy": True}),
                    ("ss", 246, [0, 1], 8, 8, {"copy": True}), ("zs", 310, [0, 1], 0, 8), ("zs", 438, [0, 1], 8, 8),
                    ("zs", 374, [0, 1], 0, 8, {"copy": True}), ("zs", 502, [0, 1], 8, 8, {"copy": True}),
                    ("sz", 566, [0, 1], 0, 8), ("sz", 694, [0, 1], 8, 8), ("sz", 630, [0, 1], 0, 8, {"copy": True}),
                    ("sz", 758, [0, 1], 8, 8, {"copy": True}), ("zz", 822, [0, 1], 0, 8), ("zz", 950, [0, 1], 8, 8),
                    ("zz", 886, [0, 1], 0, 8, {"copy": True}), ("zz", 1014, [0, 1], 8, 8, {"copy": True}))}),
                "in_perm": ("i16", "K", {"optional": "in_perm", "within": "i32"}),
            },
            "order": "in_perm",
        }},
        "only_read": True,
        "defaults": {"p": None},
        "plus": (("csr",
            {"start": ("row_offsets", "i32", "?"), "column": ("col_vals", "i32", "?", {"half": ("i32", 0)}),
            "value": ("col_vals", "i32", "?", {"half": ("f16", 16)})}, True),),
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
