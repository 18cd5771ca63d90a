"""linear, dequantize and Linear as citizens of torch: compiled, exported, differentiated, loaded, offloaded, adapted.

What they compute is tested elsewhere; here it has to stay the same, bit for bit, in every one of torch's ways to run it.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import qdsl
from qdsl.generated import fp8_block, fp8_tensor, hlane, int8_channel, int_group, q4_0, q8_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.linear import packed_matmul
from qdsl.runtime.torch.module import NoWeight
from qdsl.runtime.weight import assemble
from tests.support import formats
from tests.support.formats import ROOT, same_bits

W4 = """
format: w4
weight: [N, K]
fields:
  q: u4[n, k]
  s: f16[n, k // 32]
decode: (q - 8) * s
encode: absmax(code=q, scale=s, divisor=7)
storage:
  plain:
    codes:
      tensor: u8[n<N, j<K/2]
      record: q[n, 2*j] q[n, 2*j + 1]
    scales:
      tensor: f16[n<N, g<K/32]
      record: s[n, g]
"""


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def act_order(packed: PackedWeight, seed: int = 3) -> PackedWeight:
    index = packed.tensors["g_idx"]
    shuffled = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    return int_group.wrap({**packed.tensors, "g_idx": shuffled}, storage="gptq_v2", **packed.params)


@cache
def weights(n: int = 64, k: int = 64) -> dict[str, tuple[Any, PackedWeight]]:
    """Formats of different traits: blocks in bytes, an index in order and out of order, columns in another order, 8-bit floats,
    what is optional or not, streams.
    """
    w = sample(n, k)
    gptq = int_group.quantize(w, "gptq_v2", group=32)
    eight = int8_channel.quantize(w)
    zeros = {name: eight.tensors["weight"][:, :1].clone() for name, stored in eight.layout.tensors.items() if stored.optional}
    return {
        "blocks": (q4_0, q4_0.quantize(w)),
        "in order": (int_group, gptq),
        "act-order": (int_group, act_order(gptq)),
        "columns by groups": (int_group, int_group.convert(act_order(gptq), "planar")),
        "fp8": (fp8_block, fp8_block.quantize(w, bn=128, bk=128)),
        "without zeros": (int8_channel, eight),
        "with zeros": (int8_channel, int8_channel.wrap({**eight.tensors, **zeros})),
        "scalar scale": (fp8_tensor, fp8_tensor.quantize(w)),
        "stream": (hlane, hlane.quantize(w)),
    }


TRAITS = [trait for trait in weights() if trait != "stream"]     # which takes longest, and has the others' operations


def stack(n: int = 64) -> nn.Sequential:
    """A layer of every kind, with and without a bias."""
    layers = [module.Linear(packed.apply(torch.clone), sample(n, seed=i) if i % 2 else None)
              for i, (module, packed) in enumerate(weights(n, n).values())]
    return nn.Sequential(*layers)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trait", TRAITS)
def test_operations_are_what_torch_asks_of_them(trait: str) -> None:
    """Schema, fake kernels with dynamic shapes, and gradients, by torch's own checks."""
    _, packed = weights()[trait]
    tensors, key = ops.operands(packed)
    x, bias = sample(3, 64).requires_grad_(), sample(64, seed=1).requires_grad_()
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
        checks.remove("test_schema")                             # it compares arguments by arithmetic that 8-bit floats lack
    torch.library.opcheck(ops._linear, (x, tensors, bias, key), test_utils=checks)
    torch.library.opcheck(ops._transposed_linear, (x, tensors, key), test_utils=checks)
    torch.library.opcheck(ops._linear, (sample(64), tensors, None, key), test_utils="test_faketensor")
    torch.library.opcheck(ops._dequantize, (tensors, key, torch.bfloat16), test_utils="test_faketensor")


@pytest.mark.parametrize("trait", TRAITS)
def test_an_operation_computes_what_the_function_does(trait: str) -> None:
    module, packed = weights()[trait]
    tensors, key = ops.operands(packed)
    x, bias = sample(2, 3, 64, dtype=torch.bfloat16), sample(64, seed=1)
    assert same_bits(torch.ops.qdsl.linear(x, tensors, bias, key), module.linear(x, packed, bias))
    assert same_bits(torch.ops.qdsl.dequantize(tensors, key, torch.float32),
                     module.dequantize(packed, torch.float32))


def test_an_index_in_order_is_no_argument() -> None:
    """The operation is told by its absence that columns lie in order."""
    assert ops.weight_key(weights()["in order"][1])[1].names == "qweight qzeros scales"
    assert ops.weight_key(weights()["act-order"][1])[1].names == "qweight qzeros scales g_idx"


def test_nothing_is_dispatched_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("the operation ran")

    for name in ("_linear", "_transposed_linear", "_dequantize"):
        monkeypatch.setattr(ops, name, never)
    module, packed = weights()["blocks"]
    x = sample(2, 64).requires_grad_()
    module.linear(x, packed, sample(64).requires_grad_()).sum().backward()
    with torch.inference_mode():
        module.Linear(packed)(sample(2, 64))
    module.dequantize(packed)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(AssertionError, match="the operation ran"):
        module.linear(mode.from_tensor(x.detach()), packed)
    with pytest.raises(AssertionError, match="the operation ran"):
        module.linear(x.detach().to("meta"), packed.to("meta"))


@pytest.mark.parametrize("trait", TRAITS)
def test_tracers_see_one_operation(trait: str) -> None:
    """make_fx, over gradients too; FakeTensorMode; meta tensors.  What was traced computes the same."""
    module, packed = weights()[trait]
    x, bias = sample(3, 64), sample(64, seed=1)
    for function, seen in ((lambda x: module.linear(x, packed, bias), {"linear"}),
                           (torch.func.grad(lambda x: module.linear(x, packed).square().sum()), {"linear", "transposed"}),
                           (lambda x: x + module.dequantize(packed, torch.float32)[:3], {"dequantize"})):
        traced = make_fx(function)(x)
        assert {node.target._opname for node in traced.graph.nodes if "qdsl" in str(node.target)} == seen
        assert same_bits(traced(x), function(x))
    with FakeTensorMode() as mode:
        fake = packed.apply(mode.from_tensor)
        shown = module.linear(mode.from_tensor(x).half(), fake, mode.from_tensor(bias))
        assert (shown.shape, shown.dtype) == ((3, 64), torch.float16)
        assert module.dequantize(fake).shape == (64, 64)
    meta = packed.to("meta")
    assert module.linear(x.to("meta"), meta).is_meta and module.dequantize(meta).shape == (64, 64)


# -- torch.compile and torch.export ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_compiled_model_has_the_bits_of_eager_mode() -> None:
    """In one graph, forward and backward, for another batch without being compiled for each."""
    model = stack()
    compiled = torch.compile(model, fullgraph=True)
    parameters = [layer.bias for layer in model if layer.bias is not None]
    for batch, stance in ((3, "default"), (5, "default"), (8, "fail_on_recompile")):
        x, y = sample(batch, 64).requires_grad_(), sample(batch, 64).requires_grad_()
        with torch.compiler.set_stance(stance):
            output = compiled(x)
        wanted = model(y)
        assert same_bits(output.detach(), wanted.detach())
        for a, b in zip(torch.autograd.grad(output.sum(), [x, *parameters]), torch.autograd.grad(wanted.sum(), [y, *parameters]),
                        strict=True):
            assert same_bits(a, b)


def test_weights_as_arguments_of_a_compiled_function() -> None:
    """Other parameters, shapes and formats: compiled anew where they differ, never confused."""
    gptq = int_group.quantize(sample(64, 64), "gptq_v2", group=32)
    for module, several in ((int_group, [gptq, act_order(gptq), int_group.quantize(sample(96, 128), "gptq_v2", group=64),
                                         int_group.quantize(sample(96, 64), "gptq_v1", bits=8, group=-1)]),
                            (q4_0, [q4_0.quantize(sample(n, 64)) for n in (8, 16, 24)])):
        def run(x: Tensor, packed: PackedWeight, module: Any = module) -> tuple[Tensor, Tensor]:
            return module.linear(x, packed), module.dequantize(packed, torch.float16)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for packed in several:
            x = sample(3, packed.shape[1])
            assert all(map(same_bits, compiled(x, packed), run(x, packed)))
        out = torch.empty(several[0].shape)
        assert torch.compile(module.dequantize, fullgraph=True, backend="aot_eager")(several[0], out=out) is out
        assert same_bits(out, module.dequantize(several[0], torch.float32))


def test_a_compiled_layer_follows_what_is_loaded_into_it() -> None:
    """Columns in order, then not: the order is in the graph, so the graph must change."""
    ordered, shuffled = weights()["in order"][1], weights()["act-order"][1]
    layer = int_group.Linear(ordered.apply(torch.clone))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = sample(2, 64)
    for packed in (ordered, shuffled, ordered):
        layer.load_state_dict(packed.tensors)
        assert same_bits(compiled(x), int_group.linear(x, packed))


def test_errors_are_those_of_eager_mode_when_compiled() -> None:
    module, packed = weights()["blocks"]
    with pytest.raises(Exception, match=r"x \[3, 63\].*does not fit a weight \[64, 64\]"):
        torch.compile(module.linear, fullgraph=True, backend="aot_eager")(sample(3, 63), packed)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_layer_follows_its_bias() -> None:
    """By torch.jit.trace, which is going out of use."""
    layer = int_group.Linear(weights()["act-order"][1], sample(64))
    traced = torch.jit.trace(layer, sample(2, 64))
    assert "qdsl::linear" in str(traced.graph)
    x = sample(2, 64, seed=1).requires_grad_()
    gradients, wanted = (torch.autograd.grad(run(x).sum(), [x, layer.bias]) for run in (traced, layer))
    assert all(map(same_bits, gradients, wanted)) and same_bits(traced(x).detach(), layer(x).detach())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_saved_and_read(strict: bool) -> None:
    model = stack()
    program = torch.export.export(model, (sample(3, 64),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    read = torch.export.load(file)
    assert list(read.state_dict) and set(read.state_dict) == set(model.state_dict())
    for batch in (3, 7, 1):
        assert same_bits(read.module()(sample(batch, 64, seed=batch)).detach(), model(sample(batch, 64, seed=batch)).detach())


ANOTHER = """
import sys, torch, qdsl, qdsl.runtime
program = torch.export.load(sys.argv[1]).module()
x, wanted = torch.load(sys.argv[3])
try:
    program(x)
except qdsl.runtime.FormatError as error:
    print(error)
qdsl.load(sys.argv[2])
assert program(x).equal(wanted)
"""


def test_an_exported_program_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for its format, and computes when that is there: loaded from the same text, wherever that lies."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w4.yaml").write_text(W4)
    w4 = qdsl.load(tmp_path / "here" / "w4.yaml")
    layer, x = w4.Linear(w4.quantize(sample(8, 64))), sample(2, 64)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save((x, layer(x)), tmp_path / "wanted.pt")
    done = subprocess.run([sys.executable, "-c", ANOTHER, "layer.pt2", "there/w4.yaml", "wanted.pt"], cwd=tmp_path,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "QDSL_CACHE": str(tmp_path / "other"),
                               "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no format w4 with the spec" in done.stdout and "qdsl.load" in done.stdout


def test_formats_of_one_name_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a spec that is loaded a second time is the same again, also when its module was forgotten in between."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    texts = {"a": W4, "b": W4.replace("q[n, 2*j] q[n, 2*j + 1]", "q[n, 2*j + 1] q[n, 2*j]")}
    modules = []
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "w4.yaml").write_text(text)
        modules.append(qdsl.load(tmp_path / name / "w4.yaml"))
    tensors = modules[0].quantize(sample(8, 64)).tensors
    first, second = (module.wrap(tensors) for module in modules)
    x = sample(2, 64)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return modules[0].linear(x, first), modules[1].linear(x, second)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert all(map(same_bits, compiled(x), both(x))) and not both(x)[0].equal(both(x)[1])
    program = torch.export.export(modules[0].Linear(first), (x,)).module()
    del sys.modules[modules[0].FORMAT.__module__]
    again = qdsl.load(tmp_path / "a" / "w4.yaml")
    assert again is not modules[0] and again.FORMAT.key == modules[0].FORMAT.key != modules[1].FORMAT.key
    assert same_bits(program(x), both(x)[0]) and same_bits(again.linear(x, again.wrap(tensors)), both(x)[0])


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trait", TRAITS)
def test_derivatives_to_second_order_and_forwards(trait: str) -> None:
    """By differences, in float64: of the function, and of the operations."""
    module, packed = weights(8, 64)[trait] if trait != "in order" and trait != "act-order" else weights()[trait]
    x, bias = sample(2, 64, dtype=torch.float64).requires_grad_(), sample(packed.shape[0], dtype=torch.float64).requires_grad_()
    tensors, key = ops.operands(packed)
    for function in (lambda x, bias: module.linear(x, packed, bias),
                     lambda x, bias: torch.ops.qdsl.linear(x, tensors, bias, key)):
        torch.autograd.gradcheck(function, (x, bias), fast_mode=True)
        torch.autograd.gradgradcheck(lambda *both, call=function: call(*both).square(), (x, bias), fast_mode=True)
    torch.autograd.gradcheck(lambda x, bias: module.linear(x, packed, bias), (x, bias), check_forward_ad=True, fast_mode=True)
    with forward_ad.dual_level():
        dual = module.linear(forward_ad.make_dual(x.detach(), x.detach() + 1), packed, bias.detach())
        assert same_bits(forward_ad.unpack_dual(dual).tangent, module.linear(x.detach() + 1, packed))
    with pytest.raises(RuntimeError, match="qdsl::transposed"):  # torch's older vmap knows no rules but its own
        torch.autograd.grad(module.linear(x, packed), x, torch.ones(4, 2, packed.shape[0]).double(), is_grads_batched=True)


@pytest.mark.parametrize("trait", TRAITS)
def test_transforms_of_torch_func(trait: str) -> None:
    module, packed = weights()[trait]
    x, bias = sample(3, 64, dtype=torch.float64), sample(64, seed=1, dtype=torch.float64)
    dense = module.dequantize(packed, torch.float64)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return module.linear(x, packed, bias)

    def same(x: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(x, dense, bias)

    one, many = (None, 0), (0, None)
    for way in (lambda f: torch.func.grad(lambda *a: f(*a).square().sum(), (0, 1))(x, bias),
                lambda f: torch.func.jacrev(f)(x[0], bias), lambda f: torch.func.jacfwd(f)(x[0], bias),
                lambda f: torch.func.hessian(lambda x: f(x, bias).square().sum())(x[0]),
                lambda f: torch.func.jvp(f, (x, bias), (x + 1, bias - 1)),
                lambda f: torch.func.vmap(f, many, out_dims=1)(x, bias), lambda f: torch.func.vmap(f, one)(x, bias.expand(2, 64)),
                lambda f: torch.func.vmap(f, (None, 1))(x, torch.stack([bias, 2 * bias], 1)),
                lambda f: torch.func.vmap(f, (1, 0))(x.expand(2, 3, 64), bias.expand(3, 64)),
                lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x, bias).square().sum()))(x)):
        torch.testing.assert_close(way(run), way(same), rtol=1e-10, atol=1e-10)


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module, rank: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(sample(rank, 64, seed=5, dtype=dtype) / 8)
        self.up = nn.Parameter(sample(64, rank, seed=6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


@pytest.mark.parametrize("trait", TRAITS)
def test_an_adapter_has_the_gradients_of_the_dense_model(trait: str) -> None:
    """Through a second packed layer, and through functional_call as well."""
    module, packed = weights()[trait]
    bias = sample(64, dtype=torch.float64)
    first, second = (module.Linear(packed, bias.clone()) for _ in range(2))
    packed_model = nn.Sequential(Adapted(first), nn.Tanh(), Adapted(second))
    dense_model = nn.Sequential(Adapted(first.dense(torch.float64)), nn.Tanh(), Adapted(second.dense(torch.float64)))
    x = sample(5, 64, dtype=torch.float64)
    names = [name for name, p in packed_model.named_parameters() if name.split(".")[-1] in ("up", "down", "bias")]
    assert len(names) == 6

    def loss(chosen: dict[str, Tensor], model: nn.Module) -> Tensor:
        return torch.func.functional_call(model, chosen, (x,)).square().mean()

    gradients, wanted = (torch.func.grad(loss)({name: model.get_parameter(name).detach() for name in names}, model)
                         for model in (packed_model, dense_model))
    packed_model(x).square().mean().backward()
    for name in names:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(packed_model.get_parameter(name).grad, wanted[name], rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements that an operation's result had."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if isinstance(result, Tensor) and result._base is None:
            self.most = max(self.most, result.numel())
        return result


def test_no_weight_is_made_for_a_gradient() -> None:
    packed = q4_0.quantize(sample(2048, 1024))
    with Largest() as seen:
        packed_matmul(sample(2, 2048), packed)
    assert 0 < seen.most <= 2048 * 1024 // 8


def test_autocast_leaves_float64_and_the_sums_of_gradients_alone() -> None:
    module, packed = weights()["blocks"]
    x = sample(3, 64).requires_grad_()
    (wanted,) = torch.autograd.grad(module.linear(x, packed), x, torch.ones(3, 64))
    y = module.linear(x, packed)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.linear(x.double(), packed).dtype == nn.Linear(64, 64).double()(x.double()).dtype == torch.float64
        assert same_bits(torch.autograd.grad(y, x, torch.ones(3, 64))[0], wanted)


# -- the module --------------------------------------------------------------------------------------------------------


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it comes in, and not when the layer runs: that would make a GPU wait."""
    layer = int_group.Linear(weights()["in order"][1].apply(torch.clone))
    calls: list[str] = []
    real = assemble.check_columns
    monkeypatch.setattr(assemble, "check_columns", lambda *args: calls.append("looked") or real(*args))
    x = sample(1, 64).requires_grad_()

    def looks(change: Callable[[nn.Module], Any]) -> int:
        change(layer)
        before = len(calls)
        for _ in range(3):
            layer(x).sum().backward()
        return len(calls) - before

    assert looks(lambda layer: layer) == 0
    assert looks(lambda layer: layer.half().float()) == 0
    assert looks(lambda layer: layer.load_state_dict(weights()["act-order"][1].tensors)) == 0
    layer = copy.deepcopy(layer)
    assert looks(lambda layer: layer) == 0
    index = nn.Parameter(weights()["in order"][1].tensors["g_idx"].clone(), requires_grad=False)
    assert looks(lambda layer: layer._parameters.update(g_idx=index)) == 1


def test_a_tensor_that_is_put_in_place_of_another_is_looked_at() -> None:
    """As offloading and loaders do that know nothing of load_state_dict."""
    ordered, shuffled = (weights()[name][1] for name in ("in order", "act-order"))
    x = sample(2, 64)
    for first, second in ((ordered, shuffled), (shuffled, ordered)):
        layer = int_group.Linear(first)
        layer._parameters["g_idx"] = nn.Parameter(second.tensors["g_idx"], requires_grad=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert "g_idx" in ops.weight_key(layer.packed)[1].names   # not looked at yet, and not taken to be in order
        assert same_bits(layer(x), int_group.linear(x, second))
    layer._parameters["g_idx"] = nn.Parameter(ordered.tensors["g_idx"] + 9, requires_grad=False)
    with pytest.raises(FormatError, match=r"'g_idx' puts column 0 into group 9; there are groups 0 to 1"):
        layer(x)
    layer = int_group.Linear(ordered)._apply(lambda tensor: torch.full_like(tensor, 9))      # as to_empty, but not by chance
    with pytest.raises(FormatError, match="group 9"):
        layer(x)
    layer = int_group.Linear(ordered)
    layer._parameters["scales"] = nn.Parameter(ordered.tensors["scales"].bfloat16(), requires_grad=False)
    with pytest.raises(FormatError, match=r"'scales' has become bfloat16 \[2, 64\]; the weight stores float16 \[2, 64\]"):
        layer(x)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("trait", "name", "dtype"), [
    ("in order", "scales", torch.float32), ("in order", "scales", torch.bfloat16), ("in order", "qweight", torch.int64),
    ("in order", "g_idx", torch.int64), ("fp8", "weight", torch.float32), ("fp8", "weight", torch.int8),
    ("without zeros", "weight", torch.float32), ("without zeros", "weight", torch.uint8), ("blocks", "blocks", torch.int8),
    ("fp8", "weight_scale_inv", torch.float64),
])
def test_a_dtype_that_torch_would_cast_is_refused(trait: str, name: str, dtype: torch.dtype, assign: bool) -> None:
    """With the key and both dtypes, beside what else is wrong; and nothing at all is loaded into that layer."""
    module, packed = weights()[trait]
    model = nn.Sequential(module.Linear(packed.apply(torch.clone)))
    state = {f"0.{key}": torch.zeros_like(tensor) for key, tensor in packed.tensors.items()}
    state[f"0.{name}"] = packed.tensors[name].to(dtype)
    stored = str(packed.tensors[name].dtype)[6:]
    with pytest.raises(RuntimeError, match=rf"dtype mismatch for 0\.{name}: .*has {str(dtype)[6:]}, .*stores {stored}"):
        model.load_state_dict(state, assign=assign)
    assert all(same_bits(tensor, packed.tensors[key]) for key, tensor in model[0].packed.tensors.items())


@pytest.mark.parametrize("assign", [False, True])
def test_what_means_the_same_is_loaded(assign: bool) -> None:
    """16-bit scales into float32, bytes into 8-bit floats, and axes of one element."""
    packed = fp8_block.quantize(sample(64, 64), bn=128, bk=128)
    narrow = {**packed.tensors, "weight_scale_inv": packed.tensors["weight_scale_inv"].bfloat16()}
    wanted = fp8_block.wrap(narrow)
    layer = fp8_block.Linear(packed.apply(torch.zeros_like))
    layer.load_state_dict({**narrow, "weight": narrow["weight"].view(torch.uint8)}, assign=assign)
    assert same_bits(layer.dequantize(torch.float32), fp8_block.dequantize(wanted, torch.float32))
    assert [str(p.dtype)[6:] for p in layer.parameters()] == ["float8_e4m3fn", "float32"]
    one = fp8_tensor.quantize(sample(64, 64))
    layer = fp8_tensor.Linear(one.apply(torch.zeros_like))
    layer.load_state_dict({**one.tensors, "weight_scale": one.tensors["weight_scale"].reshape(1, 1)}, assign=assign)
    assert same_bits(layer.dequantize(torch.float32), fp8_tensor.dequantize(one, torch.float32))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_layer_without_a_weight_waits_for_one(trait: str) -> None:
    """On meta without a byte of it; loaded by assigning; or made room for, and loaded by copying."""
    module, packed = weights()[trait]
    optional = [name for name, stored in packed.layout.tensors.items() if stored.optional and name in packed.tensors]
    bias = sample(64)
    full = module.Linear(packed, bias)
    x = sample(2, 64)
    for device, assign in (("meta", True), ("meta", False), ("cpu", False)):
        layer = module.Linear.empty(packed.shape, packed.storage, bias=True, device=device, optional=optional, **packed.params)
        assert isinstance(layer, nn.Linear) and {p.device.type for p in layer.parameters()} == {device}
        assert {name: (p.shape, p.dtype) for name, p in layer.named_parameters()} == {
            name: (p.shape, p.dtype) for name, p in full.named_parameters()}
        layer = layer if assign or device == "cpu" else layer.to_empty(device="cpu")
        layer.load_state_dict(full.state_dict(), assign=assign)
        assert same_bits(layer(x), full(x)) and same_bits(copy.deepcopy(layer)(x), full(x))
    assert not list(module.Linear.empty((128, 256)).buffers())


def test_an_empty_layer_says_what_does_not_fit() -> None:
    with pytest.raises(FormatError, match=r"q4_0.gguf: K = 33 must be a multiple of 32"):
        q4_0.Linear.empty((8, 33))
    with pytest.raises(FormatError, match="no storage 'awq' for bits=8"):
        int_group.Linear.empty((64, 64), "awq", bits=8)
    with pytest.raises(FormatError, match=r"int_group\.gptq_v2 has no optional tensor 'scales'; it has g_idx"):
        int_group.Linear.empty((64, 64), "gptq_v2", optional=["scales"])
    assert int_group.Linear.empty((64, 64), "gptq_v2", dtype=torch.bfloat16).compute_dtype == torch.bfloat16


def test_what_stands_for_the_weight() -> None:
    """Shape, device and the dtype of a dense layer; no numbers, and a word of where they are."""
    layer = q4_0.Linear(q4_0.quantize(sample(8, 64)))
    assert isinstance(layer.weight, NoWeight) and hasattr(layer, "weight") and not hasattr(layer.weight, "clone")
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((8, 64), torch.float32, torch.device("cpu"))
    assert (layer.weight.size(1), layer.weight.dim(), layer.weight.numel()) == (64, 2, 512)
    assert layer.half().weight.dtype == torch.float16 and layer.to("meta").weight.device.type == "meta"
    assert copy.deepcopy(nn.Sequential(layer).bfloat16())[0].weight.dtype == torch.bfloat16
    for use in (lambda: nn.functional.linear(sample(2, 64), layer.weight), lambda: layer.weight.data.clone(),
                lambda: layer.weight.T, lambda: layer.weight + 1, lambda: layer.weight.data.mul_(2), lambda: list(layer.weight)):
        with pytest.raises((AttributeError, TypeError), match=r"dequantize\(\) gives it, dense\(\)"):
            use()
    with pytest.raises(FormatError, match="loaded or quantized, not initialised"):
        layer.reset_parameters()
    other = fp8_block.Linear(weights()["fp8"][1])
    assert isinstance(other.get_parameter("weight"), nn.Parameter) and other.weight.dtype == torch.float32
    assert dict(other.named_parameters())["weight"].dtype == torch.float8_e4m3fn
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing


@pytest.mark.parametrize("trait", TRAITS)
def test_a_layer_becomes_dense(trait: str) -> None:
    module, packed = weights()[trait]
    layer = module.Linear(packed, sample(64)).bfloat16()
    dense = layer.dense()
    assert type(dense) is nn.Linear and dense.bias is layer.bias
    assert same_bits(dense.weight.detach(), module.dequantize(packed, torch.bfloat16))
    torch.testing.assert_close(dense(sample(3, 64).bfloat16()), layer(sample(3, 64).bfloat16()), rtol=2e-2, atol=2e-2)


# -- quantize_ ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers of every sort that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.first = nn.Linear(64, 96)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(96, 64, bias=False)), nn.Sequential(nn.Linear(64, 64))])
        self.again = self.blocks[1][0]
        self.odd = nn.Linear(33, 8)
        self.attention = nn.MultiheadAttention(64, 2)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_hook(lambda *_: None)
        self.on_meta = nn.Linear(64, 64, device="meta")
        self.done = q8_0.Linear(q8_0.quantize(sample(64, 64)))
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_is_quantized_in_place() -> None:
    torch.manual_seed(0)
    model = Model().bfloat16().eval()
    dense = copy.deepcopy(model)
    report = qdsl.quantize_(model, q4_0)
    assert list(report.quantized) == ["first", "blocks.0.0", "blocks.1.0", "again", "head"]
    assert report.quantized["first"] == (2 * 96 * 64, 18 * 96 * 2)
    reasons = {"odd": "K = 33 must be a multiple of 32", "attention.out_proj": "NonDynamicallyQuantizableLinear is more",
               "hooked": "hooks", "on_meta": "on meta", "done": "q8_0 weight already"}
    assert report.skipped.keys() == reasons.keys() and all(reasons[name] in why for name, why in report.skipped.items())
    assert list(report.notes) == ["head"] and "embed.weight" in report.notes["head"]
    assert all(f"  {name}: {why}" in str(report) for name, why in report.skipped.items()) and str(report).startswith("5 layers")
    assert model.again is model.blocks[1][0] and not model.first.training and model.head.compute_dtype == torch.bfloat16
    for name in report.quantized:
        new, old = model.get_submodule(name), dense.get_submodule(name)
        assert isinstance(new, q4_0.Linear)
        assert same_bits(new.packed.tensors["blocks"], q4_0.quantize(old.weight).tensors["blocks"])
        assert (new.bias is None) == (old.bias is None)
    again = qdsl.quantize_(model, q4_0)
    assert not again.quantized and len(again.skipped) == 10


def test_a_bias_stays_the_parameter_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    bias = model[0].bias
    qdsl.quantize_(model, "q4_0")
    assert model[0].bias is bias and isinstance(model[0], q4_0.Linear)


def test_which_layers_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter by layer and name; options of the format; a format by its spec."""
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "w4.yaml").write_text(W4)
    model = Model()
    report = qdsl.quantize_(model, tmp_path / "w4.yaml",
                            lambda layer, name: name.startswith("blocks") and layer.in_features == 64)
    assert list(report.quantized) == ["blocks.1.0", "again"] and not report.skipped
    report = qdsl.quantize_(model, int_group, lambda layer, name: name == "first", storage="awq", bits=4, group=64)
    assert model.first.packed.storage == "awq" and model.first.packed.params == {"bits": 4, "group": 64, "scale_type": "f16"}


@pytest.mark.parametrize(("options", "message"), [
    ({"bits": 9}, "bits is one of"), ({"colour": 1}, "has no parameter 'colour'"), ({"storage": "gguf"}, "no storage 'gguf'"),
    ({"storage": "awq", "bits": 8}, "no storage 'awq'"),
])
def test_options_are_refused_before_anything_changes(options: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(FormatError, match=message):
        qdsl.quantize_(model, int_group, **options)
    with pytest.raises(FormatError, match="no quantizer yet"):
        qdsl.quantize_(model, formats.module(formats.NO_QUANTIZER))
    with pytest.raises(FormatError, match="itself a linear layer"):
        qdsl.quantize_(nn.Linear(64, 64), q4_0)
    assert type(model.first) is nn.Linear


def test_one_layer_at_a_time_and_nothing_lost_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is quantized, the one before is gone; when that fails, the model still runs, and can be gone on with."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    weight_refs = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    real = type(q4_0.FORMAT).quantize

    def quantize(self: Any, weight: Tensor, **options: Any) -> PackedWeight:
        gc.collect()
        alive.append(sum(ref() is not None for ref in weight_refs))
        if len(alive) == 3:
            raise KeyboardInterrupt
        return real(self, weight, **options)

    monkeypatch.setattr(type(q4_0.FORMAT), "quantize", quantize)
    with pytest.raises(KeyboardInterrupt):
        qdsl.quantize_(model, q4_0)
    assert alive == [4, 3, 2]
    assert [isinstance(layer, QuantizedLinear) for layer in model] == [True, True, False, False]
    model(sample(2, 64))
    assert list(qdsl.quantize_(model, q4_0).quantized) == ["2", "3"]


# -- accelerate and PEFT, where they are installed ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_accelerate_offloads_and_loads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    model, x = stack(), sample(3, 64)
    wanted = model(x)
    for offloaded in (accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu"),
                      accelerate.disk_offload(copy.deepcopy(model), str(tmp_path / "disk"), execution_device="cpu")):
        assert {p.device.type for p in offloaded.parameters()} == {"meta"}
        assert same_bits(offloaded(x), wanted)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    places = {str(i): "disk" if i % 3 == 1 else "cpu" for i in range(len(model))}
    for device_map in ({"": "cpu"}, places):
        empty = copy.deepcopy(model).to("meta")
        loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "model.safetensors"), device_map=device_map,
                                                         offload_folder=str(tmp_path / "offload"))
        assert same_bits(loaded(x), wanted)
    cast = accelerate.load_checkpoint_and_dispatch(copy.deepcopy(model).to("meta"), str(tmp_path / "model.safetensors"),
                                                   device_map={"": "cpu"}, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match=r"'scales' has become bfloat16"):
        cast(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["q4_0", "int_group", "fp8_block", "int8_channel", "bf16"])
def test_peft_trains_an_adapter(name: str) -> None:
    """Adapters beside packed layers, in float32, with the dense model's gradients, and no other parameter trained."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    assert len(qdsl.quantize_(model, name, **({"group": 32} if name == "int_group" else {})).quantized) == 2
    dense = nn.Sequential(model[0].dense(torch.float32), nn.Tanh(), model[2].dense(torch.float32))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
    x = sample(5, 64)
    adapted = []
    for base in (model, dense):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(base, config))
        trained = {key: p for key, p in adapted[-1].named_parameters() if p.requires_grad}
        assert len(trained) == 4 and all("lora" in key and p.dtype == torch.float32 for key, p in trained.items())
        adapted[-1](x).square().mean().backward()
    for key, p in trained.items():
        torch.testing.assert_close(adapted[0].get_parameter(key).grad, p.grad, rtol=1e-5, atol=1e-6)
    first = adapted[0](x).square().mean()
    torch.optim.SGD([p for p in adapted[0].parameters() if p.requires_grad], 0.05).step()
    assert adapted[0](x).square().mean() < first
    for key, tensor in before.items():
        layer, leaf = key.split(".")
        assert same_bits(dict(adapted[0].named_parameters())[f"base_model.model.{layer}.base_layer.{leaf}"].detach(), tensor)
    if name == "q4_0":
        with pytest.raises((TypeError, ValueError), match=r"qdsl\.models\.peft\.merge\(model\)"):
            adapted[0].merge_and_unload()


# -- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q6_k", "int8_channel", "fp8_block", "hlane", "df11", "nf4"])
def test_embeddings_are_rows_of_the_weight(name: str) -> None:
    form = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = form.quantize(weight)
    layer, ids = form.Embedding(packed, padding_idx=3), torch.tensor([[5, 0, 95], [7, 7, 64]])
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)
        wanted = torch.nn.functional.embedding(ids, form.dequantize(packed, dtype))
        assert same_bits(layer(ids), wanted) and same_bits(layer.dense()(ids), wanted)
    assert layer(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 256)
    again = form.Embedding.empty((96, 256), packed.storage, **packed.params)
    again.load_state_dict(layer.state_dict(), assign=True)
    assert same_bits(again.dequantize(), layer.dequantize())
    with pytest.raises(IndexError):
        layer(torch.tensor([96]))


def test_rows_alone_are_decoded_where_each_is_stored_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = q4_0.Embedding(q4_0.quantize(torch.randn(1000, 64)))
    shapes: list[tuple[int, int]] = []
    decode = q4_0.FORMAT.dequantize
    monkeypatch.setattr(q4_0.FORMAT, "dequantize", lambda packed, dtype: shapes.append(packed.shape) or decode(packed, dtype))
    layer(torch.tensor([1, 999, 1]))
    assert shapes == [(3, 64)]


def test_one_packed_weight_for_words_and_for_their_logits() -> None:
    """Tied weights: both layers hold the same memory."""
    packed = q4_0.quantize(torch.randn(96, 64))
    words, head = q4_0.Embedding(packed), q4_0.Linear(packed)
    ids = torch.arange(96)
    assert same_bits(words(ids), head.dequantize(torch.float32))
    assert words.blocks.data_ptr() == head.blocks.data_ptr()
