"""linear and Linear on a CPU: what they compute, what they refuse, their gradients, and the module's life in torch.

The kernels of `linear` are tested in test_kernels.py; nothing here launches one.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qdsl
from qdsl.generated import fp8_block, fp8_tensor, int_group, q4_0, q8_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.cpu import linear as cpu
from tests.support.covering import ALL, by_turns, quarter_of
from tests.support.formats import Case, cases, random_packed, same_bits, shapes, smallest

CASES = cases()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCHES = ((), (1,), (5,), (2, 3), (0,), (2, 0))
ROWS = (7, 40, 136, 160, 192, 1088)                              # 1088 rows: the weight is decoded in several tiles
COLUMNS = (33, 77, 256, 768, 960, 544, 520, 333)                 # ragged ones last


def weight_of(case: Case, packed: PackedWeight) -> Tensor:
    return case.module.dequantize(packed, torch.float32).double()


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers small enough that float16 holds sums of them times any weight of `random_packed`."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 256).to(dtype)


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x @ weight.T + bias in float64, and how far from it a result in x's dtype may be.

    With u the unit roundoff of x's dtype: rounding a weight or a bias to that dtype changes it by at most u of
    itself, or by half the smallest subnormal where that is more.  A float32 sum of K + 1 terms, in any order, is off
    by at most g = (K + 1) 2^-24 / (1 - (K + 1) 2^-24) of the sum of their magnitudes.  The sum is rounded to x's dtype
    once, by at most u of itself.
    """
    info = torch.finfo(x.dtype)
    u = 0.0 if x.dtype == torch.float32 else info.eps / 2
    terms = (weight.shape[1] + 1) * 2.0 ** -24
    g = terms / (1 - terms)
    extra = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double()
    wanted = x.double() @ weight.t() + extra
    spread = x.double().abs() @ weight.abs().t() + extra.abs()
    underflow = info.smallest_normal * info.eps / 2 * (1 + x.double().abs().sum(-1, keepdim=True))
    inner = ((1 + u) * (1 + g) - 1) * spread + (1 + g) * underflow
    return wanted, inner + u * (wanted.abs() + inner) + underflow


def check(product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, what: object = "") -> None:
    wanted, allowed = bound(x, weight, bias)
    assert product.dtype == x.dtype and product.shape == wanted.shape, what
    assert ((product.double() - wanted).abs() <= allowed).all(), what


# -- linear ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", quarter_of(CASES), ids=str)
def test_linear_is_the_product_with_the_dequantized_weight(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest weight, and ragged ones: the last block short along both axes where the format allows that.

    Each shape meets another dtype, and in `make test-all` every dtype; every dtype meets a bias and none, by turns.
    """
    monkeypatch.setattr(cpu, "TILE", 1 << 18)
    possible = list(shapes(case, ROWS, COLUMNS)) or [smallest(case)]
    for number, shape in enumerate(dict.fromkeys([smallest(case), possible[0], possible[-1]])):
        packed = random_packed(case, shape, seed=number)
        weight = weight_of(case, packed)
        for turn, dtype in list(enumerate(DTYPES, number))[slice(None) if ALL else slice(number, number + 1)]:
            x = sample(5, shape[1], seed=number, dtype=dtype)
            bias = sample(shape[0], seed=9, dtype=dtype) if turn % 2 else None
            check(case.module.linear(x, packed, bias), x, weight, bias, (shape, dtype))


@pytest.mark.parametrize(("case", "batch"), by_turns(CASES, BATCHES), ids=str)
def test_x_may_have_any_batch_dimensions(case: Case, batch: tuple[int, ...]) -> None:
    shape = smallest(case)
    packed = random_packed(case, shape)
    x, bias = sample(*batch, shape[1]), sample(shape[0], seed=1)
    product = case.module.linear(x, packed, bias)
    assert product.shape == (*batch, shape[0])
    check(product, x, weight_of(case, packed), bias)


def test_x_need_not_be_contiguous() -> None:
    packed = q8_0.quantize(sample(48, 64))
    x = sample(64, 3, 2).permute(2, 1, 0)
    for view in (x, x[:, :1].expand(2, 3, 64), x[:, 1:, ::2].repeat(1, 1, 2), x.flip(0)[1]):
        assert same_bits(q8_0.linear(view, packed), q8_0.linear(view.contiguous(), packed))


def test_a_bias_may_have_another_float_dtype() -> None:
    packed = q8_0.quantize(sample(48, 64))
    x, bias = sample(3, 64, dtype=torch.bfloat16), sample(48, seed=1)
    check(q8_0.linear(x, packed, bias), x, q8_0.dequantize(packed, torch.float32).double(), bias)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_without_rows_or_columns(case: Case) -> None:
    """No rows: no outputs.  No columns: the bias alone.  Gradients have the shapes of what they belong to."""
    n, k = smallest(case)
    for shape in shapes(case, (0, n), (0, k)):
        packed = random_packed(case, shape)
        x, bias = torch.ones(3, shape[1], requires_grad=True), torch.ones(shape[0], requires_grad=True)
        product = case.module.linear(x, packed, bias)
        assert product.shape == (3, shape[0]), shape
        assert shape[1] or torch.equal(product, torch.ones(3, shape[0])), shape
        product.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape, shape
        assert bias.grad is not None and torch.equal(bias.grad, torch.full((shape[0],), 3.0)), shape


@pytest.mark.parametrize("case", [case for case in CASES if case.module.FORMAT.variant(case.choice).encode], ids=str)
def test_a_weight_without_rows_or_columns_is_quantized(case: Case) -> None:
    n, k = smallest(case)
    for shape in shapes(case, (0, n), (0, k)):
        if 0 in shape:
            packed = case.module.quantize(torch.zeros(shape), case.storage, **case.choice)
            assert case.module.dequantize(packed, torch.float32).shape == shape
            assert torch.equal(case.module.linear(torch.ones(3, shape[1]), packed), torch.zeros(3, shape[0])), shape


# -- what is refused ---------------------------------------------------------------------------------------------------


class Nothing(TorchDispatchMode):
    """No operation of torch may run inside."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran")


@pytest.mark.parametrize(("x", "bias", "message"), [
    (torch.zeros(2, 63), None, r"x \[2, 63\] .*weight \[4, 64\].*\[\.\.\., 64\]"),
    (torch.zeros(64, 2), None, r"x \[64, 2\] .*weight \[4, 64\].*\[\.\.\., 64\]"),
    (torch.zeros(()), None, r"x \[\] .*weight \[4, 64\].*\[\.\.\., 64\]"),
    (torch.zeros(2, 64, dtype=torch.int64), None, r"x \[2, 64\] int64 .*floats"),
    (torch.zeros(2, 64, dtype=torch.bool), None, r"x \[2, 64\] bool .*floats"),
    (torch.zeros(2, 64, dtype=torch.complex64), None, r"x \[2, 64\] complex64 .*floats"),
    (torch.zeros(2, 64, device="meta"), None, r"x is on meta.* weight .*on cpu"),
    (torch.zeros(2, 64), torch.zeros(5), r"bias \[5\].*\[4\]"),
    (torch.zeros(2, 64), torch.zeros(1), r"bias \[1\].*\[4\]"),
    (torch.zeros(2, 64), torch.zeros(2, 4), r"bias \[2, 4\].*\[4\]"),
    (torch.zeros(2, 64), torch.zeros(4, dtype=torch.int32), r"bias .*int32.*floats"),
    (torch.zeros(2, 64), torch.zeros(4, device="meta"), r"bias is on meta.* on cpu"),
])
def test_linear_says_what_does_not_fit_and_runs_nothing(x: Tensor, bias: Tensor | None, message: str) -> None:
    packed = q4_0.quantize(sample(4, 64))
    with Nothing(), pytest.raises(FormatError, match=message):
        q4_0.linear(x, packed, bias)


def test_a_weight_of_another_format_is_refused() -> None:
    packed = q8_0.quantize(sample(4, 64))
    x = torch.zeros(2, 64)
    with Nothing(), pytest.raises(FormatError, match="a weight of q8_0, not of q4_0"):
        q4_0.linear(x, packed)
    with pytest.raises(FormatError, match="a weight of q8_0, not of q4_0"):
        q4_0.Linear(packed)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(product: Tensor, out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(product, leaves, out)


@pytest.mark.parametrize(("case", "dtype"), by_turns(CASES, DTYPES), ids=str)
def test_gradients_are_those_of_the_dense_layer(case: Case, dtype: torch.dtype) -> None:
    """In float64 the dense layer's gradients are out @ weight and out summed; sums are float32, rounded once."""
    shape = [smallest(case), *shapes(case, ROWS, COLUMNS)][-1] if dtype == torch.float32 else smallest(case)
    packed = random_packed(case, shape)
    weight = weight_of(case, packed)
    x, bias = sample(2, 3, shape[1], dtype=dtype).requires_grad_(), sample(shape[0], dtype=dtype).requires_grad_()
    out = sample(2, 3, shape[0], seed=2, dtype=dtype)
    to_x, to_bias = gradients(case.module.linear(x, packed, bias), out, x, bias)
    check(to_x, out, weight.t(), None)
    check(to_bias[:, None], out.flatten(0, 1).t(), torch.ones(1, 6, dtype=torch.float64), None)


def test_gradients_flow_to_what_asks_for_them_alone() -> None:
    """To x without bias, to bias without x, to neither; and never to the packed tensors, asked or not."""
    tensors = fp8_tensor.quantize(sample(4, 64)).tensors
    scale = tensors["weight_scale"].clone().requires_grad_()
    packed = fp8_tensor.wrap({**tensors, "weight_scale": scale})
    x, bias = sample(3, 64), sample(4)
    assert not fp8_tensor.linear(x, packed, bias).requires_grad
    fp8_tensor.linear(x.requires_grad_(), packed).sum().backward()
    assert x.grad is not None and scale.grad is None
    x.grad = None
    fp8_tensor.linear(x.detach(), packed, bias.requires_grad_()).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((4,), 3.0)) and scale.grad is None
    with torch.no_grad():
        assert not fp8_tensor.linear(x, packed, bias).requires_grad


def test_a_gradient_has_the_dtype_of_what_it_belongs_to() -> None:
    packed = q8_0.quantize(sample(4, 64))
    x, bias = sample(3, 64, dtype=torch.bfloat16).requires_grad_(), sample(4).requires_grad_()
    q8_0.linear(x, packed, bias).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert bias.grad is not None and bias.grad.dtype == torch.float32


def test_no_rows_give_gradients_of_zero() -> None:
    packed = q8_0.quantize(sample(4, 64))
    x, bias = torch.zeros(0, 64, requires_grad=True), torch.zeros(4, requires_grad=True)
    q8_0.linear(x, packed, bias).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 64)
    assert bias.grad is not None and torch.equal(bias.grad, torch.zeros(4))


def test_weights_tie_as_in_a_dense_layer() -> None:
    """A chain of two uses of one weight: the gradient passes through both."""
    packed = q8_0.quantize(sample(64, 64) * 16)
    dense = q8_0.dequantize(packed, torch.float32).double()
    x = sample(2, 64).requires_grad_()
    out = sample(2, 64, seed=3)
    (gradient,) = gradients(q8_0.linear(q8_0.linear(x, packed), packed), out, x)
    most = out.double().abs() @ dense.abs() @ dense.abs()        # what two sums of 64 terms in float32 may lose
    assert ((gradient.double() - out.double() @ dense @ dense).abs() <= 2 * 66 * 2.0 ** -24 * most).all()


# -- the module --------------------------------------------------------------------------------------------------------


def layer(case: Case, seed: int = 0, bias: bool = True) -> Any:
    shape = smallest(case)
    return case.module.Linear(random_packed(case, shape, seed=seed), sample(shape[0], seed=seed) if bias else None)


def stored(module: Any) -> dict[str, Tensor]:
    return dict(module.packed.tensors)


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return list(a) == list(b) and all(same_bits(a[name].detach(), b[name].detach()) for name in a)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_module_is_a_linear_layer_over_the_tensors_it_was_given(case: Case) -> None:
    packed = random_packed(case, smallest(case, tiles=2))
    n, k = packed.shape
    bias, x = sample(n), sample(3, k)
    module = case.module.Linear(packed, bias)
    assert isinstance(module, nn.Linear) and (module.out_features, module.in_features) == (n, k)
    assert same_bits(module(x), case.module.linear(x, packed, bias))
    assert same_bits(case.module.Linear(packed)(x), case.module.linear(x, packed))
    assert same_bits(module.dequantize(torch.float32), case.module.dequantize(packed, torch.float32))
    parameters = dict(module.named_parameters())
    assert {name: p.data_ptr() for name, p in parameters.items()} == {
        name: t.data_ptr() for name, t in {**packed.tensors, "bias": bias}.items()}
    assert [name for name, p in parameters.items() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_dict_is_the_checkpoint_and_loads_into_a_fresh_module(case: Case) -> None:
    """Keys in storage order; through torch.save without pickles of its own; strictly, into another weight's module."""
    module, other = layer(case, seed=1), layer(case, seed=2)
    state = module.state_dict()
    assert list(state) == [*module.packed.tensors, "bias"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert same_tensors(read, state)
    other.load_state_dict(read, strict=True)
    assert same_tensors(stored(other), stored(module))
    x = sample(2, module.in_features)
    assert same_bits(other(x), module(x))
    assert list(layer(case, bias=False).state_dict()) == list(module.packed.tensors)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    module = q4_0.Linear(q4_0.quantize(sample(4, 64)))
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        module.load_state_dict({**module.state_dict(), "bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks"):
        module.load_state_dict(q4_0.Linear(q4_0.quantize(sample(4, 96))).state_dict())


def act_order(seed: int) -> PackedWeight:
    """A GPTQ weight whose columns lie in groups all over K."""
    packed = int_group.quantize(sample(64, 128, seed=seed), "gptq_v2", group=32)
    shuffled = packed.tensors["g_idx"][torch.randperm(128, generator=torch.Generator().manual_seed(seed))]
    return int_group.wrap({**packed.tensors, "g_idx": shuffled}, storage="gptq_v2")


@pytest.mark.parametrize("assign", [False, True])
def test_an_order_of_columns_that_is_loaded_counts(assign: bool) -> None:
    """A module made from a weight with its columns in order, and loaded with one that has another order; and back."""
    plain, shuffled = int_group.quantize(sample(64, 128), "gptq_v2", group=32), act_order(seed=1)
    for first, second in ((plain, shuffled), (shuffled, plain)):
        module = int_group.Linear(first.apply(torch.clone))      # without assign, loading writes into the tensors it is made of
        module.load_state_dict(int_group.Linear(second).state_dict(), assign=assign)
        assert same_bits(module.dequantize(torch.float32), int_group.dequantize(second, torch.float32))


def test_groups_that_do_not_exist_are_refused_when_they_are_loaded() -> None:
    """An index that points past the scales never reaches a kernel."""
    module = int_group.Linear(act_order(seed=0))
    state = module.state_dict()
    wrong = {**state, "g_idx": state["g_idx"].clone().index_fill_(0, torch.tensor([5]), 1 << 20)}
    with pytest.raises((FormatError, RuntimeError), match=r"'g_idx' puts column 5 into group 1048576"):
        module.load_state_dict(wrong)
        module(sample(2, 128))


CASTS = {
    "half": nn.Module.half, "bfloat16": nn.Module.bfloat16, "float": nn.Module.float, "double": nn.Module.double,
    "to": lambda module: module.to(torch.bfloat16), "to with a device": lambda module: module.to("cpu", torch.float16),
}


@pytest.mark.parametrize(("case", "cast"), by_turns(cases(types=True), list(CASTS)), ids=str)
def test_casts_reach_the_bias_alone(case: Case, cast: str) -> None:
    """Stored bits stay, whatever type a scale has; also in a module that holds this one."""
    module = layer(case)
    before = {name: tensor.clone() for name, tensor in stored(module).items()}
    dtype = CASTS[cast](nn.Linear(1, 1)).bias.dtype
    CASTS[cast](nn.Sequential(module))
    assert same_tensors(stored(module), before)
    assert module.bias.dtype == dtype
    x = sample(2, module.in_features, dtype=dtype)
    assert module(x).dtype == dtype


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_module_on_meta_is_filled_from_a_state_dict(case: Case) -> None:
    """As large models are loaded: shapes first, then the tensors of the file."""
    full = layer(case, seed=1)
    empty = layer(case, seed=2).to("meta")
    x = sample(2, full.in_features)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {name: (p.shape, p.dtype) for name, p in empty.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in full.named_parameters()}
    assert empty(x.to("meta")).shape == (2, full.out_features)
    with pytest.raises(FormatError, match=r"x is on cpu.* weight .*on meta"):
        empty(x)
    empty.load_state_dict(full.state_dict(), assign=True)
    assert same_bits(empty(x), full(x))


def test_a_module_made_on_meta_is_filled_too() -> None:
    """Made from meta tensors, so that nothing was known of the order of its columns."""
    for packed in (int_group.quantize(sample(64, 128), "gptq_v2", group=32), act_order(seed=1)):
        shown = int_group.wrap({name: t.to("meta") for name, t in packed.tensors.items()}, storage="gptq_v2", group=32)
        module = int_group.Linear(shown)
        module.load_state_dict(dict(packed.tensors), assign=True)
        assert same_bits(module.dequantize(torch.float32), int_group.dequantize(packed, torch.float32))
        module = int_group.Linear(shown).to_empty(device="cpu")
        module.load_state_dict(dict(packed.tensors))
        assert same_bits(module.dequantize(torch.float32), int_group.dequantize(packed, torch.float32))


COPIED = [case for case in CASES if str(case).startswith(("q4_0.", "fp8_block.", "int_group.gptq_v2-bits4"))]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# torch 2.13 cannot pickle a tensor of 8-bit floats but by torch.save.
@pytest.mark.parametrize(("case", "way"), [(case, way) for case in COPIED for way in (copy.deepcopy, pickled, saved)
                                           if way is not pickled or case.path.stem != "fp8_block"],
                         ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_module_is_copied_whole(case: Case, way: Any) -> None:
    """Another module with tensors of its own, of the same format, that computes the same."""
    module = layer(case)
    other = way(module)
    x = sample(2, module.in_features)
    wanted = module(x)
    assert type(other) is type(module)
    assert same_tensors(other.state_dict(), module.state_dict())
    assert same_bits(other(x), wanted)
    first = next(iter(stored(other).values()))
    first.view(torch.uint8).bitwise_not_()
    assert same_bits(module(x), wanted)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_packed_weight_is_copied_whole(way: Any) -> None:
    packed = q4_0.quantize(sample(4, 64))
    other = way(packed)
    assert same_bits(q4_0.dequantize(other, torch.float32), q4_0.dequantize(packed, torch.float32))
    assert other.tensors["blocks"].data_ptr() != packed.tensors["blocks"].data_ptr()


def test_a_module_says_what_it_holds() -> None:
    packed = int_group.quantize(sample(64, 128), "gptq_v1", bits=3, group=32)
    shown = repr(int_group.Linear(packed, sample(64)))
    assert re.fullmatch(r"Linear\(in_features=128, out_features=64, bias=True, .*int_group\.gptq_v1.*\)", shown)
    assert "bias=False" in repr(int_group.Linear(packed))


def test_autocast_decides_the_dtype_as_for_a_dense_layer() -> None:
    packed = q4_0.quantize(sample(8, 64))
    x = sample(3, 64)
    dense = nn.Linear(64, 8, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        product, wanted = q4_0.linear(x, packed), dense(x)
    assert product.dtype == wanted.dtype == torch.bfloat16
    assert same_bits(product, q4_0.linear(x.bfloat16(), packed))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64], ids=str)
def test_x_of_another_kind_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"x \[3, 64\] \w+ does not fit a weight \[8, 64\]: expected floats"):
        q4_0.linear(torch.zeros(3, 64).to(dtype), q4_0.quantize(sample(8, 64)))


def test_a_module_calls_its_tensors_as_the_checkpoint_does() -> None:
    packed = fp8_block.quantize(sample(130, 140), bn=128, bk=128)
    scale = packed.tensors["weight_scale_inv"]
    wrapped = fp8_block.wrap({"weight": packed.tensors["weight"], "weight_scale": scale}, bn=128, bk=128)
    module = fp8_block.Linear(wrapped.apply(torch.clone))
    assert list(module.state_dict()) == ["weight", "weight_scale"]
    x = sample(2, 140)
    module.load_state_dict({"weight": packed.tensors["weight"], "weight_scale": scale * 2})
    assert same_bits(module(x), fp8_block.linear(x, fp8_block.wrap({"weight": packed.tensors["weight"], "scale": scale})) * 2)
    assert list(copy.deepcopy(fp8_block.Linear(wrapped.to("cpu"))).state_dict()) == ["weight", "weight_scale"]
    both = fp8_block.wrap({**packed.tensors, "scale": scale})
    assert any("'scale' is not part of" in note for note in both.notes)


def test_a_tensor_may_be_called_as_something_of_the_module(tmp_path: Path) -> None:
    """`packed` and `forward` are taken in a module, and a bias is no tensor of the weight."""
    (tmp_path / "named.yaml").write_text(
        "format: named\nweight: [N, K]\nfields: {q: 'u8[n, k]', s: 'f32[n]'}\ndecode: q * s\nstorage:\n  p:\n"
        "    packed:\n      tensor: u8[n<N, k<K]\n      record: q[n, k]\n"
        "    forward:\n      tensor: f32[n<N]\n      record: s[n]\n      aliases: [bias]\n")
    named = qdsl.load(tmp_path / "named.yaml")
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    packed = named.wrap({"packed": codes, "bias": torch.ones(3)})
    module = named.Linear(packed, torch.full((3,), 2.0))
    assert list(module.state_dict()) == ["packed_", "bias_", "bias"]
    assert torch.equal(module(torch.ones(1, 4)), codes.float().sum(1)[None] + 2)


@pytest.mark.parametrize("module", [q4_0, fp8_block], ids=lambda module: module.SPEC.name)
def test_batch_invariant(module: ModuleType) -> None:
    """A row gives the same bits alone, among others and in another place; compiled, and by a layer, too."""
    generator = torch.Generator().manual_seed(0)
    packed = module.quantize(torch.randn(70, 256, generator=generator))
    x = torch.randn(9, 256, generator=generator).bfloat16()
    whole = module.linear(x, packed, batch_invariant=True)
    for i in (0, 4, 8):
        assert torch.equal(module.linear(x[i:i + 1], packed, batch_invariant=True), whole[i:i + 1])
    assert torch.equal(module.linear(x.flip(0), packed, batch_invariant=True), whole.flip(0))
    layer = module.Linear(packed)
    layer.batch_invariant = True
    assert torch.equal(layer(x), whole)
    weight, eps = module.dequantize(packed, torch.float32).double(), torch.finfo(torch.bfloat16).eps / 2
    exact, spread = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    # On a CPU weights are rounded to x's dtype, the sum is float32, and the result is rounded once.
    assert ((whole.double() - exact).abs() <= eps * exact.abs() + (eps + 256 * 2.0 ** -24) * (1 + eps) * spread).all()
    with pytest.raises(FormatError, match="exclude each other"):
        module.linear(x, packed, quantize_x=True, batch_invariant=True)
