"""safetensors files byte by byte, as no writer would make them."""

from __future__ import annotations

import json


def framed(header: object, data: bytes = b"") -> bytes:
    """A file of this header (text, or what JSON makes of it) and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def item(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
