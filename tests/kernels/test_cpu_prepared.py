"""Prepared products on a CPU: what may change between two calls, and threads."""

from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from qdsl.generated import fp8_block, int_group, q4_0, q4_k
from qdsl.host import library
from qdsl.models.experts import Experts
from qdsl.runtime import PackedWeight
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu import loops, threads
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.target import Target, plan_of
from tests.support.cpu_products import sample
from tests.support.formats import same_bits


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    """Products of small weights are compiled, too."""
    monkeypatch.setenv("QDSL_CACHE", str(cache_folder))
    cpu.compile_products()
    yield
    cpu.compile_products(False)


def weight(seed: int = 0) -> PackedWeight:
    return int_group.quantize(sample(64, 256, seed=seed), "gptq_v2", bits=4, group=64)


def prepared_layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> QuantizedLinear:
    """A layer that has a prepared product for one row of x."""
    layer = int_group.Linear(weight(), sample(64, seed=3) if bias else None)
    with torch.no_grad():
        layer(row(dtype))
    assert layer._packed.plan.ready
    return layer


def row(dtype: torch.dtype = torch.float32) -> Tensor:
    return sample(1, 1, 256, seed=1, dtype=dtype)


def expected(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """The product in float64 from the layer's present tensors, by torch."""
    decoded = layer.dequantize(torch.float32).double()
    product = x.detach().double() @ decoded.t()
    return product if layer.bias is None else product + layer.bias.detach().double()


def check(layer: QuantizedLinear, x: Tensor, out: Tensor) -> None:
    wanted = expected(layer, x)
    assert out.shape == wanted.shape
    limit = torch.finfo(out.dtype).eps * (x.double().abs() @ layer.dequantize(torch.float32).double().abs().t() + 1)
    assert ((out.double() - wanted).abs() <= 8 * limit).all()


# -- what may change -----------------------------------------------------------------------------------------------------


def _replace(layer: QuantizedLinear) -> None:
    layer.qweight = nn.Parameter(weight(5).tensors["qweight"], requires_grad=False)


def _change(layer: QuantizedLinear) -> None:
    layer.scales.data.mul_(2)


def _new_data(layer: QuantizedLinear) -> None:
    layer.qweight.data = weight(6).tensors["qweight"]


def _load(layer: QuantizedLinear) -> None:
    layer.load_state_dict(int_group.Linear(weight(7), sample(64, seed=8)).state_dict())


def _strided(layer: QuantizedLinear) -> None:
    layer.qweight.data = torch.empty(*layer.qweight.shape, 2, dtype=torch.int32)[..., 0].copy_(layer.qweight)


def _wide(layer: QuantizedLinear) -> None:
    layer.scales.data = layer.scales.data.float()


def _other_bias(layer: QuantizedLinear) -> None:
    layer.bias = nn.Parameter(sample(64, seed=9, dtype=torch.float16))


def _no_bias(layer: QuantizedLinear) -> None:
    layer.bias = None


def _there_and_back(layer: QuantizedLinear) -> None:
    layer.to("meta").to_empty(device="cpu").load_state_dict(int_group.Linear(weight(7), sample(64, seed=8)).state_dict())


@pytest.mark.parametrize("change", [_replace, _change, _new_data, _load, _strided, _wide, _other_bias, _no_bias, _there_and_back])
def test_a_layer_multiplies_by_the_tensors_that_it_has_now(change: Callable[[QuantizedLinear], None]) -> None:
    layer, x = prepared_layer(), row()
    with torch.no_grad():
        before = layer(x)
        change(layer)
        after = layer(x)
        check(layer, x, after)
        assert not torch.equal(before, after) or change in (_strided, _wide)
        check(layer, x, layer(x))


def test_a_tensor_that_became_shorter_or_another_type_is_refused() -> None:
    for name, make in (("qweight", lambda t: t[:8]), ("qweight", lambda t: t.float()), ("scales", lambda t: t[:1])):
        layer = prepared_layer()
        tensor = getattr(layer, name)
        tensor.data = make(tensor.data)
        with torch.no_grad(), pytest.raises((FormatError, RuntimeError, ValueError)):
            layer(row())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_x_of_all_kinds(dtype: torch.dtype) -> None:
    """Strided, of other leading axes, empty, of more rows, and of a wrong size."""
    layer = prepared_layer(dtype)
    wide = sample(2, 3, 512, dtype=dtype)
    with torch.inference_mode():
        for x in (wide[..., ::2], wide[..., :256], wide[0, 0, :256], wide[:1, :1, 256:], sample(9, 256, dtype=dtype),
                  sample(2, 2, 256, dtype=dtype), sample(0, 256, dtype=dtype)):
            for _ in range(2):
                check(layer, x, layer(x))
        with pytest.raises(FormatError, match="does not fit"):
            layer(wide)


def test_autograd_autocast_tracers_and_transforms_see_the_product() -> None:
    layer, x = prepared_layer(), row()
    needs = x.clone().requires_grad_()
    layer(needs).sum().backward()
    assert needs.grad is not None and torch.allclose(needs.grad[0, 0], layer.dequantize(torch.float32).sum(0), atol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.no_grad():
        check(layer, x, torch.compile(layer, backend="eager", fullgraph=True)(x))
        check(layer, x, torch.func.vmap(layer)(x))
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    assert torch.allclose(tangent, layer(x) - layer.bias, atol=1e-6)
    packed = layer.packed
    with FakeTensorMode() as mode, torch.no_grad():
        assert isinstance(ops.linear(mode.from_tensor(x), packed.apply(mode.from_tensor)), FakeTensor)


def test_the_operation_takes_prepared_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled programs call it: without the slow way from the second call on."""
    packed, x = weight(), row()
    tensors, key = ops.operation_arguments(packed)
    with torch.no_grad():
        first = torch.ops.qdsl.linear(x, tensors, None, key)
        monkeypatch.setattr(ops, "compute_product", None)
        assert same_bits(first, torch.ops.qdsl.linear(x, tensors, None, key))
        assert torch.ops.qdsl.linear(x[0], tensors, None, key).shape == (1, 64)


def test_copies_do_not_share_tensors() -> None:
    layer, x = prepared_layer(), row()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        before = layer(x)
        other.scales.data.mul_(4)
        check(other, x, other(x))
        assert same_bits(layer(x), before)
        del layer
        check(other, x, other(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_product_runs_no_operator_of_torch(dtype: torch.dtype) -> None:
    """Each would take 1 to 5 us, and torch divides even a small index among threads."""
    layer, x = q4_k.Linear(q4_k.quantize(sample(48, 512)), sample(48)), sample(1, 1, 512, dtype=dtype)
    with torch.no_grad():
        first = layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            second = layer(x)
    assert same_bits(first, second)
    assert {event.key for event in profile.key_averages()} == set()


def test_columns_stored_by_groups_are_permuted_in_the_prepared_product(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**int_group.unpack(weight()), "g": torch.arange(256, dtype=torch.int32) % 4}
    packed, x = int_group.planar(int_group.pack(fields, "gptq_v2", bits=4, group=64)), row()
    layer = int_group.Linear(packed)
    with torch.no_grad():
        first = layer(x)
        assert plan_of(packed).is_permuted
        monkeypatch.setattr(cpu, "product", None)
        second = layer(x)
    assert packed.order is not None and same_bits(first, second)
    check(layer, x, second)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "fp8_block", "gptq", "one expert"])
def test_experts_take_prepared_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every expert share one; where experts lie apart in a tensor, as GPTQ's do, each is multiplied anew."""
    dense, count = sample(512, 256), 1 if name == "one expert" else 4
    packed = {"q4_k": lambda: q4_k.quantize(dense), "fp8_block": lambda: fp8_block.quantize(dense, bn=128, bk=128),
              "gptq": lambda: int_group.quantize(dense, "gptq_v2", bits=4, group=64)}.get(name, lambda: q4_0.quantize(dense))()
    stack, x, bias = Experts(packed, count), sample(3, 256, seed=2), sample(count, 512 // count, seed=4)
    for offsets in ([0, 1, 1, 2, 3], [0, 0, 1, 2, 3], [0, 2, 2, 3, 3]) if count > 1 else ([0, 3],):
        with torch.no_grad():
            for added in (None, bias):
                out = stack(x, offsets, added)
                for e, (start, stop) in enumerate(pairwise(offsets)):
                    own = packed.format.Linear(stack.weight(e), None if added is None else added[e])
                    check(own, x[start:stop], out[start:stop])
    if name != "gptq":
        monkeypatch.setattr(ops, "compute_product", None)
    with torch.no_grad():
        assert same_bits(stack(x, offsets, bias), out)


# -- candidates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_all_candidates_compute_the_product(rows: int) -> None:
    target: Target = cpu                                         # has its functions, which mypy compares
    packed, x = q4_0.quantize(sample(64, 256)), sample(rows, 256)
    ways = target.candidates(packed, rows, torch.float32)
    kinds = [way.kind for way in ways]
    assert kinds == (["plain", "decode", "tiles"] if rows <= loops.FEW else ["decode", "tiles"])
    for way in ways:
        check(q4_0.Linear(packed), x, target.run(way, x, packed, None))
        assert ("void run(" in target.lower(way, packed)) == (way.kind != "tiles")


# -- threads ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are divided among threads, too."""
    monkeypatch.setattr(loops, "SHARE", 1 << 8)


@pytest.fixture
def regions(small_shares: None) -> Iterator[list[int]]:
    """The numbers of threads of regions, which the function of a test runs in place of OpenMP."""
    yield []
    functions = threads.functions()
    functions.attach(ctypes.cast(functions.parallel, ctypes.c_void_p), threads.PROCESS)


def attach(function: Callable[[int, int, int, int], None], process: int = 0) -> object:
    """Have regions run by a function; the result keeps it alive."""
    parallel = threads.Parallel(function)
    threads.functions().attach(ctypes.cast(parallel, ctypes.c_void_p), process)
    return parallel


def test_threads_divide_the_rows(small_shares: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is summed by one thread: the bits are those of one thread, for several callers too."""
    packed, x = weight(), sample(5, 256)
    products = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        products.append(int_group.linear(x, packed))
    with ThreadPoolExecutor(4) as pool:
        products += pool.map(lambda _: int_group.linear(x, packed), range(8))
    assert all(same_bits(product, products[0]) for product in products)


def test_regions_run_in_the_openmp_of_torch_and_in_own_threads_alike(regions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = weight(), sample(1, 256)
    wanted = int_group.linear(x, packed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def watched(body: int, work: int, count: int, flags: int) -> None:
        regions.append(count)
        threads._in_own_pool(body, work, count, flags)

    kept = attach(watched)
    assert same_bits(int_group.linear(x, packed), wanted) and regions == [3]
    del kept


@pytest.mark.parametrize("waits", ["at its beginning", "at its end"])
def test_a_region_that_waits_is_followed_by_loops_on_one_thread(waits: str, regions: list[int], monkeypatch: pytest.MonkeyPatch,
                                                                ) -> None:
    """As where another program uses the processor of the second thread: the first waits for it before and after its parts."""
    packed, x = weight(), sample(1, 256)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def late(body: int, work: int, count: int, flags: int) -> None:
        regions.append(count)
        if waits == "at its beginning":
            time.sleep(0.02)
        threads.Body(body)(work)
        if waits == "at its end":
            time.sleep(0.02)

    kept = attach(late)
    for _ in range(50):
        int_group.linear(x, packed)
    assert 1 <= len(regions) < 25                                # pauses double, up to a second
    del kept


def test_another_process_runs_on_one_thread(regions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = weight(), sample(1, 256)
    wanted = int_group.linear(x, packed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    kept = attach(lambda *region: regions.append(region[2]), os.getpid() + 1)
    assert same_bits(int_group.linear(x, packed), wanted) and regions == []
    del kept


def run_python(program: str, **settings: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120,
                            env={**os.environ, "QDSL_CPU_COMPILE": "auto", **settings}, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_forked_child_does_not_wait_for_threads_of_its_parent(cache_folder: Path) -> None:
    program = """
        import os, torch
        from qdsl.generated import q4_0
        torch.set_num_threads(2)
        layer, x = q4_0.Linear(q4_0.quantize(torch.randn(2048, 512))), torch.randn(1, 512)
        with torch.no_grad():
            wanted = layer(x)
            for _ in range(20):
                layer(x)
            child = os.fork()
            if not child:
                os._exit(0 if layer(x).tolist() == wanted.tolist() else 3)
            print(os.waitpid(child, 0)[1])
    """
    assert run_python(program, QDSL_CACHE=str(cache_folder)) == "0\n"


def test_loops_start_no_threads_beside_those_of_torch(cache_folder: Path) -> None:
    """Their threads are those of torch's OpenMP."""
    if threads.functions().parallel is None or isinstance(threads.functions().parallel, threads.Parallel):
        pytest.skip("torch has no OpenMP here")
    program = """
        import os, torch
        from qdsl.generated import q4_0
        torch.set_num_threads(2)
        count = lambda: len(os.listdir("/proc/self/task"))
        torch.randn(1 << 20).exp()
        before = count()
        layer, x = q4_0.Linear(q4_0.quantize(torch.randn(2048, 512))), torch.randn(1, 512)
        started = count()
        with torch.no_grad():
            for _ in range(20):
                layer(x)
        print(count() - started)
    """
    assert run_python(program, QDSL_CACHE=str(cache_folder)) == "0\n"


def test_subnormal_numbers_stay(tmp_path: Path) -> None:
    """-ffast-math for a shared library would set them to zero in the whole process, even where $CC asks for it."""
    program = """
        import torch
        from qdsl.generated import q4_0
        layer = q4_0.Linear(q4_0.quantize(torch.randn(256, 512)))
        with torch.no_grad():
            layer(torch.randn(1, 512))
        print((torch.tensor([1e-40]) * 1.0).item() > 0)
    """
    command = " ".join([*library.compiler(), "-ffast-math"])
    assert run_python(program, QDSL_CACHE=str(tmp_path), CC=command) == "True\n"
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & {*library.OPTIONS, *library.machine_options("AVX512")}
