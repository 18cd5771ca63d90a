"""Compares this project's CPU loops with ggml's on one thread: x @ w.T of GGUF weights, and quantizing to their types.

ggml is the library that llama-cpp-python builds (`pip install '.[ggml]'`); QDSL_GGML=FOLDER is another folder of its
libraries.  ggml rounds x to 8 bits; `exact` keeps x, `int8` rounds it too.  The faster of ggml's layouts counts, stored or
interleaved for SIMD.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.quantize import ours as our_quantizer
from bench.timing import Side, WrongResult, calls
from bench.weights import F32_BYTES, SHAPE, floats, packed
from qdsl.checkpoint.files.ggml_types import BY_NAME

GOALS = {"q4_0": 0.5, "q8_0": 0.5, "q4_k": 0.5, "q6_k": 0.5}     # exact, of ggml's speed
INT8_GOAL = 0.8
QUANTIZED = {"q4_k": 1.0, "q6_k": 1.0}                           # from float32, the same bytes
OTHERS = ("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m")       # without goals
CACHE = 96 << 20                                                 # bytes that the copies of a weight have together, at least
MOST_ERROR = 0.02                                                # of x in 8 bits, relative, RMS
QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, line, data: None)
LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")                    # in the order in which they need each other
INTERLEAVED = "REPACK"                                           # in the name of the buffers that hold interleaved rows


def figures(rounds: int) -> Iterator[Figure]:
    """Speeds at M = 1 as multiples of ggml's; nothing where ggml is not installed."""
    if _folder() is None:
        return
    for name in (*GOALS, *OTHERS):
        nbytes = packed(name, "gguf").nbytes
        layouts = [layout for layout in (False, True) if _Product.takes(name, layout)]
        sides = [*(Side(ggml, {"name": name, "interleaved": layout}) for layout in layouts),
                 *(Side(ours, {"name": name, "int8": int8}) for int8 in (False, True))]
        *theirs, exact, int8 = [[seconds / _copies(nbytes) for seconds in side] for side in calls(sides, rounds, same=False)]
        best = [min(times) for times in zip(*theirs, strict=True)]
        note = f"ggml {rates(nbytes / 1e9, [min(best)])[0]:.1f} GB/s"
        yield Figure(f"linear {name}, M = 1, one thread, exact, to ggml", "x", ratios(best, exact), GOALS.get(name), note=note)
        yield Figure(f"linear {name}, M = 1, one thread, int8, to ggml", "x", ratios(best, int8),
                     INT8_GOAL if name in GOALS else None, note=note)
    for name, goal in QUANTIZED.items():
        sides = [Side(quantizer, {"name": name}), Side(our_quantizer, {"name": name, "dtype": "float32"})]
        slow, fast = calls(sides, rounds)
        yield Figure(f"quantize {name} to ggml", "x", ratios(slow, fast), goal,
                     note=f"same bytes; ggml {rates(F32_BYTES / 1e6, [min(slow)])[0]:.0f} MB/s of f32 weight")


def ours(name: str, int8: bool) -> Callable[[], Tensor]:
    """This project's linear, with x in 8 bits or as it is."""
    os.environ |= {"QDSL_CPU_INT8": str(int(int8)), "QDSL_CPU_INTERLEAVE": "always"}      # as layers have them
    torch.set_num_threads(1)
    weight, x = packed(name, "gguf"), _x()
    layers = [weight.apply(torch.clone) for _ in range(_copies(weight.nbytes))]
    return lambda: torch.cat([weight.format.linear(x, layer) for layer in layers])


def ggml(name: str, interleaved: bool) -> Callable[[], Tensor]:
    """ggml's product.  Raises WrongResult where it is further from the exact one than rounding x explains."""
    weight, x = packed(name, "gguf"), _x()
    layers = [_Product(name, weight.tensors["blocks"], interleaved) for _ in range(_copies(weight.nbytes))]
    exact = x @ weight.format.dequantize(weight, torch.float32).T
    error = float((layers[0](x) - exact).norm() / exact.norm())
    if not error < MOST_ERROR:
        raise WrongResult(f"ggml's product with {name} is {error:.1%} from the exact one")
    return lambda: torch.cat([layer(x) for layer in layers])


def quantizer(name: str) -> Callable[[], Tensor]:
    """ggml's quantizer of the weight that this project's quantizes."""
    call, weight = _Library(), floats()
    blocks = torch.empty_like(packed(name, "gguf").tensors["blocks"])

    def quantize() -> Tensor:
        sizes = [ctypes.c_int64(size) for size in (0, *SHAPE)]
        call("ggml_quantize_chunk", ctypes.c_int(BY_NAME[name.upper()].id), weight.data_ptr(), blocks.data_ptr(), *sizes, None,
             result=ctypes.c_size_t)
        return blocks

    return quantize


class _InitParams(ctypes.Structure):
    """`ggml_init_params`: bytes for descriptions of tensors, where they lie, and that data lies elsewhere."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Product:
    """A graph of ggml that holds one matmul, on one thread."""

    def __init__(self, name: str, blocks: Tensor | None, interleaved: bool) -> None:
        """blocks: uint8 [N, bytes of a row]; None: no product, only the question whether there could be one."""
        call, (n, k) = _Library(), SHAPE
        room = 8 * call("ggml_tensor_overhead", result=ctypes.c_size_t) + call("ggml_graph_overhead", result=ctypes.c_size_t)
        weights, self.graph = (call("ggml_init", _InitParams(room, None, True)) for _ in range(2))
        self.call, self.backend = call, call("ggml_backend_cpu_init")
        call("ggml_backend_cpu_set_n_threads", self.backend, ctypes.c_int(1))
        self.plain = call("ggml_backend_cpu_buffer_type")
        device = call("ggml_backend_get_device", self.backend)
        weight = call("ggml_new_tensor_2d", weights, ctypes.c_int(BY_NAME[name.upper()].id), ctypes.c_int64(k), ctypes.c_int64(n))
        kind = self._interleaving(device) if interleaved else self.plain
        stored = kind and call("ggml_backend_alloc_ctx_tensors_from_buft", weights, kind)
        self.x = call("ggml_new_tensor_2d", self.graph, ctypes.c_int(0), ctypes.c_int64(k), ctypes.c_int64(1))
        self.out = call("ggml_mul_mat", self.graph, weight, self.x)
        self.is_served = bool(stored) and call("ggml_backend_dev_supports_op", device, self.out, result=ctypes.c_bool)
        if blocks is not None:
            call("ggml_backend_tensor_set", weight, blocks.data_ptr(), ctypes.c_size_t(0), ctypes.c_size_t(blocks.nbytes))
            call("ggml_backend_alloc_ctx_tensors_from_buft", self.graph, self.plain)
            self.nodes = call("ggml_new_graph", self.graph)
            call("ggml_build_forward_expand", self.nodes, self.out)

    @classmethod
    def takes(cls, name: str, interleaved: bool) -> bool:
        """Whether ggml has such a product on this machine."""
        return cls(name, None, interleaved).is_served

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [1, K]; [1, N]."""
        out = torch.empty(1, SHAPE[0])
        size = ctypes.c_size_t
        self.call("ggml_backend_tensor_set", self.x, x.data_ptr(), size(0), size(x.nbytes))
        self.call("ggml_backend_graph_compute", self.backend, self.nodes)
        self.call("ggml_backend_tensor_get", self.out, out.data_ptr(), size(0), size(out.nbytes))
        return out

    def _interleaving(self, device: int) -> int | None:
        """The type of buffers whose rows are interleaved; None where this build or machine has none."""
        registry = self.call("ggml_backend_dev_backend_reg", device)
        address = self.call("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for kind in kinds:                                       # the list ends with a null pointer
            if kind is None:
                return None
            if INTERLEAVED in self.call("ggml_backend_buft_name", kind, result=ctypes.c_char_p).decode():
                return int(kind)
        return None


class _Library:
    """Functions of ggml by name; addresses are integers."""

    def __init__(self) -> None:
        folder = _folder()
        assert folder is not None
        self.parts: Sequence[ctypes.CDLL] = [ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in LIBRARIES]
        self("ggml_log_set", QUIET, None)

    def __call__(self, name: str, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        function = next(getattr(part, name) for part in self.parts if hasattr(part, name))
        function.restype = result
        return function(*(ctypes.c_void_p(value) if isinstance(value, int) else value for value in arguments))


def _folder() -> Path | None:
    """Where ggml's libraries lie; None where they are not installed."""
    spec = find_spec("llama_cpp")
    places = [Path(os.environ.get("QDSL_GGML", "")), *(Path(place, "lib") for place in
              (spec.submodule_search_locations or () if spec else ()))]
    return next((place for place in places if all((place / f"lib{name}.so").is_file() for name in LIBRARIES)), None)


def _x() -> Tensor:
    return torch.randn(1, SHAPE[1], generator=torch.Generator().manual_seed(1))


def _copies(nbytes: int) -> int:
    return -(-CACHE // nbytes)
