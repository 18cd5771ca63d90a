"""linear, dequantize and Linear as citizens of torch: compiled, exported, differentiated, loaded, offloaded, adapted.

What they compute is tested elsewhere; here it has to stay the same, bit for bit, in every one of torch's ways to run it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
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
from qdsl.generated import int_group, q4_0
from qdsl.runtime import PackedWeight
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.linear import packed_matmul
from tests.support.formats import ROOT, same_bits
from tests.support.traits import TRAITS, W4, act_order, sample, stack, weights


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trait", TRAITS)
def test_operations_are_what_torch_asks_of_them(trait: str) -> None:
    """Schema, fake kernels with dynamic shapes, and gradients, by torch's own checks."""
    _, packed = weights()[trait]
    tensors, key = ops.operation_arguments(packed)
    x, bias = sample(3, 64).requires_grad_(), sample(64, seed=1).requires_grad_()
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
        checks.remove("test_schema")                             # it compares arguments by arithmetic that 8-bit floats lack
    torch.library.opcheck(ops._linear, (x, tensors, bias, key), test_utils=checks)
    torch.library.opcheck(ops._transposed_linear, (x, tensors, key, ""), test_utils=checks)
    torch.library.opcheck(ops._linear, (sample(64), tensors, None, key), test_utils="test_faketensor")
    torch.library.opcheck(ops._dequantize, (tensors, key, torch.bfloat16), test_utils="test_faketensor")


@pytest.mark.parametrize("trait", TRAITS)
def test_an_operation_computes_what_the_function_does(trait: str) -> None:
    module, packed = weights()[trait]
    tensors, key = ops.operation_arguments(packed)
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


@pytest.mark.own_state                                           # of gradients
@pytest.mark.parametrize("trait", TRAITS)
def test_derivatives_to_second_order_and_forwards(trait: str) -> None:
    """By differences, in float64: of the function, and of the operations."""
    module, packed = weights(8, 64)[trait] if trait != "in order" and trait != "act-order" else weights()[trait]
    x, bias = sample(2, 64, dtype=torch.float64).requires_grad_(), sample(packed.shape[0], dtype=torch.float64).requires_grad_()
    tensors, key = ops.operation_arguments(packed)
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


@pytest.mark.own_state                                           # of gradients
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
