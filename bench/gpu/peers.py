"""Other packages' 4-bit and 8-bit linears, and dfloat11's decoder, if they can be imported; missing ones are reported.

Each linear gets a weight of its own format.  Before timing, its result is compared with a product by its own dense weight: a
layer that computes something else is excluded.  The numbers that dfloat11 decodes are compared in the same way.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu import clock
from bench.gpu.weights import ROWS, normal
from qdsl.codecs.huffman_windows.reference import THREADS, shared_memory
from qdsl.runtime import PackedWeight
from qdsl.runtime.weight.arrays import cdiv

DFLOAT11 = "dfloat11"
TOLERANCE = 0.03                                                 # of the result's norm
GROUP = 128


@dataclass
class Peer:
    """name: with what is compared.  layers: its linear with weights of their own memory.  nbytes: of one."""

    name: str
    x: str
    layers: list[Callable[[torch.Tensor], torch.Tensor]]
    nbytes: int


@dataclass
class Packages:
    """Which packages are there, and what is to be said of each."""

    versions: dict[str, str | None] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def decoded(self, weights: list[PackedWeight], out: torch.Tensor) -> list[Callable[[], None]]:
        """dfloat11's launches that decode df11's weights of normal rows (weights.large) into out [N, K]; none where it cannot."""
        if self.versions.get(DFLOAT11) is None or DFLOAT11 in self.notes:
            return []
        try:
            calls = [_decoder(weight, out) for weight in weights]
            calls[0]()
            rows = normal(min(len(out), ROWS), out.shape[1]).to(out.device).view(torch.int16)
            if not bool((out.view(torch.int16).view(-1, *rows.shape) == rows).all()):
                raise ValueError("it decodes other numbers")
            return calls
        except Exception as error:                               # no cupy, no PTX file, or none for this device
            self._note(DFLOAT11, error)
            return []

    def _note(self, name: str, error: Exception) -> None:
        self.notes[name] = f"not timed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        torch.cuda.synchronize()

    def peers_for(self, shape: tuple[int, int], l2: int) -> list[Peer]:
        """Those that can be made for a shape."""
        peers = []
        for name, make in MAKERS.items():
            if self.versions.get(name) is None or name in self.notes:
                continue
            try:
                peers += make(shape, l2)
            except Exception as error:                           # whatever another package needs and does not find
                self._note(name, error)
        return peers

    def data(self) -> dict[str, Any]:
        return {name: {"version": installed, "note": self.notes.get(name, "" if installed else "not installed")}
                for name, installed in self.versions.items()}


def find() -> Packages:
    """Look for the packages; nothing is timed yet."""
    packages = Packages()
    for name in (*MAKERS, DFLOAT11):
        try:
            importlib.import_module(name)
            packages.versions[name] = version(name)
        except PackageNotFoundError:
            packages.versions[name] = "unknown"
        except Exception as error:
            packages.versions[name] = None
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                packages.notes[name] = f"cannot be imported: {type(error).__name__}: {str(error)[:200]}"
    return packages


def _decoder(weight: PackedWeight, out: torch.Tensor) -> Callable[[], None]:
    """A launch of dfloat11's kernel on torch's current stream, with the arguments of its own hook."""
    cupy = importlib.import_module("cupy")
    path = Path(str(importlib.import_module(DFLOAT11).__file__)).parent / "decode.ptx"
    kernel = cupy.RawModule(path=str(path)).get_function("decode")
    luts, data, sign_mantissa, positions, gaps = (weight.tensors[name] for name in (
        "luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps"))
    memory = shared_memory(THREADS, int(positions.cpu().view(torch.int32).diff().max()))
    tensors = (luts, data, sign_mantissa, positions, gaps, out)
    arguments = [*(tensor.data_ptr() for tensor in tensors), len(luts), len(data), len(sign_mantissa)]
    grid = (cdiv(len(data), 8 * THREADS),)

    def launched() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(grid, (THREADS,), arguments, shared_mem=memory)

    return launched


def _layers(first: Any, count: int) -> list[Any]:
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def _checked(name: str, layer: Callable[[torch.Tensor], torch.Tensor], dense: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError where the layer's product is not that of its dense weight."""
    x = torch.randn(4, dense.shape[1], device="cuda").to(dtype)
    wanted = x.float() @ dense.float().t()
    off = float((layer(x).float() - wanted).norm() / wanted.norm())
    if not off <= TOLERANCE:
        raise ValueError(f"{name} is {off:.2g} of the norm away from its dense weight")


def _gemlite(shape: tuple[int, int], l2: int) -> list[Peer]:
    """4 bits, groups of 128, with the configurations that it ships for the H100 where it has none for this device."""
    gemlite = importlib.import_module("gemlite")
    shipped = Path(str(gemlite.__file__)).parent / "configs"
    name = torch.cuda.get_device_name().lower().replace(" ", "_")
    if not any(path.stem in name for path in shipped.glob("*.json")):
        gemlite.load_config(str(shipped / "h100.json"))
    n, k = shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    peers = []
    for x, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        scales = torch.rand(n, k // GROUP, device="cuda").to(dtype) / 64 + 1 / 64
        zeros = torch.randint(0, 16, (n, k // GROUP), device="cuda").to(dtype)
        nbytes = n * k // 2 + 2 * 2 * n * (k // GROUP)
        dense = (codes.view(n, -1, GROUP).float() - zeros[:, :, None].float()) * scales[:, :, None].float()
        layers = [gemlite.helper.A16Wn(device="cuda:0", dtype=dtype).from_weights(
            codes, scales.reshape(-1, 1), zeros.reshape(-1, 1), 4, GROUP, None) for _ in range(clock.copies(nbytes, l2))]
        _checked("gemlite", layers[0], dense.view(n, k), dtype)
        peers.append(Peer("gemlite 4 bits, group 128", x, layers, nbytes))
    return peers


def _torchao(shape: tuple[int, int], l2: int) -> list[Peer]:
    """int4 weight only, groups of 128, by its default way of packing."""
    quantization = importlib.import_module("torchao.quantization")
    n, k = shape
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    dense = linear.weight.detach().clone()
    model = torch.nn.Sequential(linear)
    quantization.quantize_(model, quantization.Int4WeightOnlyConfig(group_size=GROUP))
    nbytes = n * k // 2 + 2 * 2 * n * (k // GROUP)
    x = torch.randn(4, k, device="cuda", dtype=torch.bfloat16)
    off = float((model(x).float() - x.float() @ dense.float().t()).norm() / (x.float() @ dense.float().t()).norm())
    if not off < 0.2:                                            # rounding to 4 bits is part of it
        raise ValueError(f"torchao is {off:.2g} of the norm away from the weight it was given")
    return [Peer("torchao int4, group 128", "bf16", _layers(model, clock.copies(nbytes, l2)), nbytes)]


def _bitsandbytes(shape: tuple[int, int], l2: int) -> list[Peer]:
    """NF4, its blocks of 64, scales not quantized again."""
    nn = importlib.import_module("bitsandbytes.nn")
    functional = importlib.import_module("bitsandbytes.functional")
    n, k = shape
    layer = nn.Linear4bit(k, n, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16, compress_statistics=False).cuda()
    nbytes = n * k // 2 + 4 * n * k // 64
    dense = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    _checked("bitsandbytes", layer, dense.view(n, k), torch.bfloat16)
    return [Peer("bitsandbytes nf4", "bf16", _layers(layer, clock.copies(nbytes, l2)), nbytes)]


MAKERS: dict[str, Callable[[tuple[int, int], int], list[Peer]]] = {
    "gemlite": _gemlite, "torchao": _torchao, "bitsandbytes": _bitsandbytes}
