"""ik_iq4_kss: ik_llama.cpp IQ4_KSS, 15 bits for four codes of even parity, two tables of levels, scales ahead of rows.

    w = d * (2 * sc - 127) * levels[32 * h + 2 * q[n, k // 32, k // 2 % 8] // 2**(8 * (k % 2) + 4 * (k // 16 % 2)) % 32]
    float32, rounded after each operation

    d      f32 [N]
    sc     u7  [N, K/32]
    h      u1  [N, K/32]
    q      u15 [N, K/32, 8]

    ik_llama: 4 bits per weight

Built from the spec ik_iq4_kss (sha256 519c3c67cdc6196b) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_even
from qdsl.runtime import Format, Kernels, Storage, Table, Variant, as_type, integer, lookup
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -123, -100, -79, -61, -45, -31, -18, -6, 5,
        17, 29, 42, 57, 73, 93, 117)


LEVELS = Table("f32",
        *(VALUES[16 * (i // 32) + ((i % 4).bit_count() % 2) + 2 * ((i // 2 % 4).bit_count() % 2) + 4
            * ((i // 4 % 4).bit_count() % 2) + 8 * ((i // 8 % 4).bit_count() % 2)] for i in range(64)))


def unpack_ik_llama(rows: Tensor) -> dict[str, Tensor]:
    """Fields of rows uint8 [N, 4 + 16*K/32]."""
    head = rows[..., :4]
    blocks = rows[..., 4:]
    blocks_bytes = blocks.unflatten(-1, (-1, 16))
    sc_low = blocks_bytes[..., 2:3].squeeze(-1) & 1
    sc_high = blocks_bytes[..., 4:5].squeeze(-1) & 1
    sc_high2 = blocks_bytes[..., 6:7].squeeze(-1) & 1
    sc_high3 = blocks_bytes[..., 8:9].squeeze(-1) & 1
    sc_high4 = blocks_bytes[..., 10:11].squeeze(-1) & 1
    sc_high5 = blocks_bytes[..., 12:13].squeeze(-1) & 1
    sc_high6 = blocks_bytes[..., 14:15].squeeze(-1) & 1
    return {"d": as_type(head, torch.float32)[:, 0],
            "sc": sc_low | sc_high << 1 | sc_high2 << 2 | sc_high3 << 3 | sc_high4 << 4 | sc_high5 << 5 | sc_high6 << 6,
            "h": blocks_bytes[..., 0:1].squeeze(-1) & 1, "q": integer(blocks_bytes.unflatten(-1, (8, 2))) >> 1 & 32767}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """rows of the fields; the inverse of unpack_ik_llama."""
    head_bytes = as_type(d.unsqueeze(-1), torch.uint8)
    blocks_bytes = torch.zeros(h.shape[0], h.shape[1], 16, dtype=torch.uint8, device=h.device)
    blocks_bytes[..., 0:1] |= h.unsqueeze(-1)
    q_packed = q.to(torch.int32) << 1
    blocks_bytes[...] |= q_packed.unsqueeze(-1).view(torch.uint8)[..., :2].flatten(2)
    blocks_bytes[..., 2:3] |= (sc & 1).unsqueeze(-1)
    blocks_bytes[..., 4:5] |= (sc >> 1 & 1).unsqueeze(-1)
    blocks_bytes[..., 6:7] |= (sc >> 2 & 1).unsqueeze(-1)
    blocks_bytes[..., 8:9] |= (sc >> 3 & 1).unsqueeze(-1)
    blocks_bytes[..., 10:11] |= (sc >> 4 & 1).unsqueeze(-1)
    blocks_bytes[..., 12:13] |= (sc >> 5 & 1).unsqueeze(-1)
    blocks_bytes[..., 14:15] |= (sc >> 6).unsqueeze(-1)
    return {"rows": torch.cat([head_bytes, blocks_bytes.flatten(1)], -1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (2 * sc - 127) * levels[32 * h + 2 * q[n, k // 32, k // 2
    % 8] // 2**(8 * (k % 2) + 4 * (k // 16 % 2)) % 32].  d [N], sc [N, K/32], h [N, K/32], q [N, K/32, 8].
    """
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d[..., None, None]
    sc = sc.to(torch.int16).unsqueeze(-1)
    h = h.to(torch.int32).unsqueeze(-1)
    q = q[:, :, None, :]
    k = torch.arange(32, dtype=torch.int32, device=d.device)
    return torch.mul(d
        * (2 * sc - 127), LEVELS[32 * h + (2 * lookup(q, k // 2 % 8) >> 8 * (k % 2) + 4 * (k // 16 % 2) & 31)],
        out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares_nested; bits of a level are exclusive ors of neighbours among the
    bits of a code, so four levels are chosen together.  importance: float32 [K].
    """
    q, h, sc, d = least_squares_even(weight, code="u15", choice="u1", scale="u7", super_scale="f32", columns=32, super_axes=1,
            super_columns=weight.shape[1],
            steps=(-127, -125, -123, -121, -119, -117, -115, -113, -111, -109, -107, -105, -103, -101, -99, -97, -95, -93, -91,
                -89, -87, -85, -83, -81, -79, -77, -75, -73, -71, -69, -67, -65, -63, -61, -59, -57, -55, -53, -51, -49, -47,
                -45, -43, -41, -39, -37, -35, -33, -31, -29, -27, -25, -23, -21, -19, -17, -15, -13, -11, -9, -7, -5, -3, -1, 1,
                3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59,
                61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 81, 83, 85, 87, 89, 91, 93, 95, 97, 99, 101, 103, 105, 107, 109, 111,
                113, 115, 117, 119, 121, 123, 125, 127),
            group=(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
            place=(0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12, 4, 12),
            windows=LEVELS, importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    rows, levels = tensors
    rows += n * (16 * (K // 32) + 4)
    rows_f32 = rows.to(tl.pointer_type(tl.float32))
    d = tl.load(rows_f32, n < N, 0)
    sc_low = tl.load(rows + 16 * (k // 32) + 6, live, 0) & 1
    sc_high = tl.load(rows + 16 * (k // 32) + 8, live, 0) & 1
    sc_high1 = tl.load(rows + 16 * (k // 32) + 10, live, 0) & 1
    sc_high2 = tl.load(rows + 16 * (k // 32) + 12, live, 0) & 1
    sc_high3 = tl.load(rows + 16 * (k // 32) + 14, live, 0) & 1
    sc_high4 = tl.load(rows + 16 * (k // 32) + 16, live, 0) & 1
    sc_high5 = tl.load(rows + 16 * (k // 32) + 18, live, 0) & 1
    sc = (sc_low | sc_high << 1 | sc_high1 << 2 | sc_high2 << 3 | sc_high3 << 4 | sc_high4 << 5 | sc_high5 << 6).to(tl.int32)
    h = (tl.load(rows + 16 * (k // 32) + 4, live, 0) & 1).to(tl.int32)
    q = device.stream(rows + 16 * (k // 32) + 4, 1, 16 * (k // 2 % 8) + 1, 15, 8, live).to(tl.int32)
    digit = k % 2
    digit1 = k // 16 % 2
    return use(state, k, d * (2 * sc - 127) * tl.load(levels + 32 * h + (2 * q >> 8 * digit + 4 * digit1 & 31)), live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "ik_llama": Storage(unpack_ik_llama, pack_ik_llama, Kernels(_decode_ik_llama, rows="N", units="K", last="k",
                tables=(LEVELS,))),
    },
    decode=decode, encode=encode, importance=True,
)

PROGRAM = {
    "name": "ik_iq4_kss",
    "title": "ik_llama.cpp IQ4_KSS, 15 bits for four codes of even parity, two tables of levels, scales ahead of rows",
    "source": "ik_llama.cpp ggml-common.h block_iq4_kss, iqk_quantize.cpp dequantize_row_iq4_kss",
    "formula": "d * (2 * sc - 127) * levels[32 * h + 2 * q[n, k // 32, k // 2 % 8] // 2**(8 * (k % 2) + 4 * (k // 16 % 2)) % 32]",
    "bits": "4", "digest": "519c3c67cdc6196b",
    "detect": {"gguf": "IQ4_KSS"},
    "variants": {(): {
        "fields": {"d": ("f32", "N"), "sc": ("u7", "N", "K/32"), "h": ("u1", "N", "K/32"), "q": ("u15", "N", "K/32", "8")},
        "storages": {"ik_llama": {"tensors": {"rows": ("u8", "N", "4 + 16*K/32",
            {"slices": (("d", 0, [0], {"section": 0}), ("h", 0, [0, [(0, 16, 1)]], {"section": 1}),
            ("q", 1, [0, [(0, 16, 1)], [(8, 2, 1)]], {"section": 1}), ("sc", 16, [0, [(0, 16, 1)]], 0, 1, {"section": 1}),
            ("sc", 32, [0, [(0, 16, 1)]], 1, 1, {"section": 1}), ("sc", 48, [0, [(0, 16, 1)]], 2, 1, {"section": 1}),
            ("sc", 64, [0, [(0, 16, 1)]], 3, 1, {"section": 1}), ("sc", 80, [0, [(0, 16, 1)]], 4, 1, {"section": 1}),
            ("sc", 96, [0, [(0, 16, 1)]], 5, 1, {"section": 1}), ("sc", 112, [0, [(0, 16, 1)]], 6, 1, {"section": 1}))})}}},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
