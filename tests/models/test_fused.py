"""Int4 layers over torch's own fused operations: torch's bytes, equal products, and checkpoints saved as they were."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.checkpoint.files.crc import FILE
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import int4pack, int_group, q8_0
from qdsl.host import library
from qdsl.models.fused import FusedLinear
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.cpu.int4 import OPERATIONS, _fused_call, convert_for_device, native_storage
from qdsl.runtime.cpu.linear import has_torch_kernels
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.weight.arrays import cdiv
from tests.support.folders import files
from tests.support.formats import same_bits

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not hasattr(aten, OPERATIONS["cpu"].name), reason="this torch has no int4 product for CPUs")
K, GROUP = 256, 64
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(n: int, storage: str = "gptq_v2", act_order: bool = False, seed: int = 0, **options: Any) -> PackedWeight:
    weight = int_group.quantize(random(n, K, seed=seed), storage, **{"bits": 4, "group": GROUP, **options})
    if not act_order:
        return weight
    columns = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    return int_group.pack(int_group.unpack(weight) | {"g": columns.int() // GROUP}, storage, **weight.params)


def assert_near(got: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """Within sums of K float32 numbers, and roundings of them to x's dtype, of the exact product."""
    exact_weight = weight.format.dequantize(weight, torch.float32).double()
    exact = x.double() @ exact_weight.t() + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ exact_weight.abs().t() + (0 if bias is None else bias.double().abs())
    assert got.dtype == x.dtype and got.shape == exact.shape
    eps = torch.finfo(x.dtype).eps
    rounded = max((K + 2) * 2.0 ** -24, eps ** 2) * sizes        # the second term of scales is eps of the first
    assert bool(((got - exact).abs() <= rounded + eps * exact.abs()).all())


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Two orders of float32 sums."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.detach().abs().max()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """The dtype and the rows of x in every call of the fused operation of CPUs."""
    seen: list[tuple[torch.dtype, int]] = []
    whole = FusedLinear._fused

    def watched(self: FusedLinear, x: Tensor) -> Tensor:
        seen.append((x.dtype, x.shape[:-1].numel()))
        return whole(self, x)

    monkeypatch.setattr(FusedLinear, "_fused", watched)
    return seen


# -- a layer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("n", [16, 48, 64, 80, 96, 112, 208])
def test_tensors_are_those_that_torch_packs(n: int, act_order: bool) -> None:
    """Rows that fill no tile lie behind whole tiles, in one tensor."""
    weight = packed(n, act_order=act_order)
    bias = random(n, seed=1)
    layer = FusedLinear(weight, bias)
    codes = int_group.unpack(weight)["q"]
    if act_order:
        codes = codes.index_select(1, layer.ret_idx)
    assert torch.equal(layer.qweight, aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1))
    assert torch.equal(layer.dequantize(torch.float32), int_group.dequantize(weight, torch.float32))
    assert layer.scales_and_zeros.dtype == torch.bfloat16 and layer.scales_and_zeros.shape == (2, K // GROUP, n, 2)
    x = random(2, 3, K, seed=2)
    assert_close(layer(x), int_group.linear(x, weight, bias))
    x = x.bfloat16()
    assert_near(layer(x), x, weight, bias)
    restored = layer.checkpoint_weight()
    assert (restored.storage, restored.params, list(restored.tensors)) == (weight.storage, weight.params, list(weight.tensors))
    assert all(same_bits(restored.tensors[name], tensor) for name, tensor in weight.tensors.items())


def test_any_x(calls: list[tuple[torch.dtype, int]]) -> None:
    weight = packed(80)
    layer = FusedLinear(weight)
    for shape in ((K,), (1, K), (33, K), (2, 1, 3, K)):
        x = random(*shape).bfloat16()
        assert_near(layer(x), x, weight)
        view = random(*shape, 2)[..., 0].bfloat16()
        assert_near(layer(view), view, weight)
    assert calls == [(torch.bfloat16, rows) for rows in (1, 1, 33, 6) for _ in range(2)]
    assert layer(random(0, K).bfloat16()).shape == (0, 80)
    one = FusedLinear(packed(80, symmetric=True, scale_type="bf16"))
    for rows, product in ((64, layer), (65, layer), (128, one), (129, one)):                   # two calls for a product, and one
        x = random(rows, K).bfloat16()
        torch.testing.assert_close(product(x), product._ordinary(x), rtol=0.02, atol=0.02 * float(product(x).abs().max()))
    assert [rows for _, rows in calls[8:]] == [64, 64, 128, 128]
    with pytest.raises(FormatError, match="does not fit a weight"):
        layer(random(2, K + 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_in_which_the_operation_is_slow(dtype: torch.dtype, calls: list[tuple[torch.dtype, int]]) -> None:
    weight, bias = packed(80), random(80)
    x = random(2, 3, K).to(dtype)
    ours, theirs = FusedLinear(weight, bias)(x), int_group.linear(x, weight, bias)
    assert ours.dtype == dtype and calls == []
    torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("storage", ["gptq_v1", "awq", "awq_gemv", "pack_quantized", "pack_quantized_0_8", "marlin", "modelopt",
                                     "torchao_plain_int32", "xpu_int4pack", "planar"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_storages_come_back(storage: str, symmetric: bool) -> None:
    own = "gptq_v2" if storage == "planar" else storage
    if storage in ("marlin", "modelopt") and not symmetric:
        pytest.skip("it has no zero points")
    weight = int_group.quantize(random(192, 1024), own, bits=4, group=128, scale_type="bf16", symmetric=symmetric)
    weight = int_group.convert(weight, storage)
    restored = FusedLinear(weight).checkpoint_weight()
    assert (restored.storage, list(restored.tensors)) == (storage, list(weight.tensors))
    assert all(same_bits(restored.tensors[name], tensor) for name, tensor in weight.tensors.items())


@pytest.mark.parametrize("storage", ["tinygemm", "tile_packed", "torchao"])
def test_scales_of_bfloat16_are_one_term(storage: str) -> None:
    weight = int4pack.quantize(random(64, 1024), storage, group=64)
    layer = FusedLinear(weight)
    assert layer.scales_and_zeros.shape == (1, 16, 64, 2)
    assert torch.equal(layer.dequantize(torch.float32), int4pack.dequantize(weight, torch.float32))


@pytest.mark.parametrize(("weight", "message"), [
    (lambda: packed(40), "N = 40 is no multiple of 16, which aten::_weight_int4pack_mm_for_cpu needs"),
    (lambda: int_group.quantize(random(64, 512), bits=4, group=512), "int_group has group = 512; int4pack has 128, 32, 64, 256"),
    (lambda: packed(64, scale_type="f32"), "int4pack cannot hold this weight of int_group: at row 0, column 0"),
    (lambda: packed(64, bits=8), r"'q' is u8 \[N, K\] in int_group and u4 \[N, K\] in int4pack"),
    (lambda: q8_0.quantize(random(64, K)), "q8_0 has fields"),
    (lambda: packed(64).to("meta"), "torch has fused int4 operations for cpu and xpu, not for meta")])
def test_refused_weights(weight: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        FusedLinear(weight())


def test_zero_points_that_would_be_lost_are_refused() -> None:
    """A scale of zero makes all zero points equal; the checkpoint's own one could not be written back."""
    fields = int_group.unpack(packed(64))
    fields["s"][5, 1] = 0
    fields["z"][5, 1] = 3
    weight = int_group.pack(fields, "gptq_v2", bits=4, group=GROUP)
    with pytest.raises(FormatError, match=r"int_group.gptq_v2 would not come back bit for bit: 'qzeros' differs"):
        FusedLinear(weight)
    fields["z"][5, 1] = 8
    FusedLinear(int_group.pack(fields, "gptq_v2", bits=4, group=GROUP))


def test_another_machine_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = replace(OPERATIONS["cpu"], storages=("cpu_rest",))
    monkeypatch.setitem(OPERATIONS, "cpu", unknown)
    with pytest.raises(FormatError, match="aten::_convert_weight_to_int4pack_for_cpu packs as none of cpu_rest on this machine"):
        FusedLinear(packed(64))
    monkeypatch.setitem(OPERATIONS, "cpu", replace(unknown, name="_weight_int5pack_mm"))
    with pytest.raises(FormatError, match=r"torch .* has no operation aten::_weight_int5pack_mm"):
        FusedLinear(packed(64))


@pytest.mark.parametrize("act_order", [False, True])
def test_gradients(act_order: bool, calls: list[tuple[torch.dtype, int]]) -> None:
    """With respect to x they are those of the unfused layer; the bias alone needs no other product."""
    weight, bias = packed(80, act_order=act_order), random(80, seed=1)
    layer = FusedLinear(weight, bias)
    gradients = []
    for run in (layer, int_group.Linear(weight, bias)):
        x = random(3, K).requires_grad_()
        run(x).square().sum().backward()
        gradients.append((x.grad, run.bias.grad))
    assert calls == []
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs)
    layer.bias.grad = None
    narrow = random(3, K).bfloat16()
    layer(narrow).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((80,), 3.))
    with torch.no_grad():
        layer(narrow.requires_grad_())
    assert len(calls) == 2
    assert_close(torch.func.vmap(layer)(random(2, 3, K)), layer(random(2, 3, K)))
    torch.func.vmap(layer)(narrow.detach())
    layer.batch_invariant = True
    layer(narrow.detach())
    assert len(calls) == 2


@pytest.mark.parametrize("act_order", [False, True])
def test_compile(act_order: bool) -> None:
    layer = FusedLinear(packed(80, act_order=act_order), random(80, seed=1))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = random(2, 3, K).bfloat16()
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum(OPERATIONS["cpu"].name in target for target in targets) == 2            # a call for each term of scales
    x = x.float()
    wide, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(wide).sum().backward()
    layer(theirs).sum().backward()
    assert_close(wide.grad, theirs.grad)


def test_autocast(calls: list[tuple[torch.dtype, int]]) -> None:
    layer = FusedLinear(packed(64))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(random(2, K)).dtype == torch.bfloat16 and calls == [(torch.bfloat16, 2)]


def test_copies_states_and_casts() -> None:
    weight = packed(80, act_order=True)
    layer = FusedLinear(weight, random(80))
    x = random(2, K).bfloat16()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))
        assert same_bits(other.checkpoint_weight().tensors["qweight"], weight.tensors["qweight"])
    state = layer.state_dict()
    assert list(state) == ["qweight", "scales_and_zeros", "ret_idx", "bias"]
    other = FusedLinear(packed(80, act_order=True, seed=3), torch.zeros(80))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))
    with pytest.raises(RuntimeError, match="state_dict has int8"):
        other.load_state_dict({**state, "qweight": state["qweight"].view(torch.int8)})
    with pytest.raises(RuntimeError, match="names column"):
        other.load_state_dict({**state, "ret_idx": torch.zeros_like(state["ret_idx"])})
    half = layer.half()
    assert half.scales_and_zeros.dtype == torch.bfloat16 and half.bias.dtype == half.weight.dtype == torch.float16
    assert half(x.half()).dtype == torch.float16
    assert torch.equal(half.dense(torch.float32).weight, int_group.dequantize(weight, torch.float32))


# -- an XPU, by a stand-in --------------------------------------------------------------------------------------------


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """The CPU with the operation of XPUs, written out; the dtypes that it multiplied in."""
    seen: list[torch.dtype] = []

    def multiply(x: Tensor, codes: Tensor, group: int, scale: Tensor, zero: Tensor) -> Tensor:
        assert x.dim() == 2 and x.is_contiguous() and codes.dtype == torch.int32 and zero.dtype == torch.int8
        assert codes.is_contiguous() and group % 32 == 0 == x.shape[1] % group
        assert scale.dtype == x.dtype and scale.shape == zero.shape == (x.shape[1] // group, codes.shape[0])
        q = (codes.unsqueeze(2) >> torch.arange(0, 32, 4) & 15).flatten(1)
        wide = [part.t().repeat_interleave(group, 1) for part in (zero, scale)]
        seen.append(x.dtype)
        return (x.float() @ ((q - wide[0]) * wide[1].float()).t()).to(x.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl(OPERATIONS["xpu"].name, multiply, "CPU")
    monkeypatch.setitem(OPERATIONS, "cpu", OPERATIONS["xpu"])
    _fused_call.cache_clear()
    yield seen
    library._destroy()
    _fused_call.cache_clear()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [64, -1])
def test_xpu(act_order: bool, group: int, xpu: list[torch.dtype]) -> None:
    """All zero points stay integers; x and scales meet in their own dtype, or in float32."""
    if act_order and group == -1:
        pytest.skip("one group has no order")
    weight, bias = packed(40, act_order=act_order, group=group), random(40)
    layer = FusedLinear(weight, bias)
    assert layer.qweight.shape == (40, K // 8) and layer.qzeros.dtype == torch.int8
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = random(2, 3, K).to(dtype)
        got = layer(x)
        assert got.dtype == dtype
        assert torch.allclose(got.float(), int_group.linear(x.float(), weight, bias), rtol=2 ** -7, atol=0.25)
    assert xpu == [torch.float16, torch.float32, torch.float32]
    assert all(same_bits(layer.checkpoint_weight().tensors[name], tensor) for name, tensor in weight.tensors.items())


@pytest.mark.parametrize("group", [16, 24, 32, 48, 64, 128, -1])
def test_groups_that_an_xpu_takes_only_padded(group: int, xpu: list[torch.dtype]) -> None:
    """Its groups are whole multiples of 32 columns: others, and a short last one, get columns of zeros, in x and in codes."""
    for k in (8, 72, 128, 200, 264):
        fields = {"q": torch.randint(16, (8, k), dtype=torch.uint8), "z": torch.randint(16, (8, cdiv(k, group % 1024)),
                  dtype=torch.uint8), "s": random(8, cdiv(k, group % 1024)).abs().half()}
        for in_order in (True, False):
            index = {} if in_order or group == -1 else {"g": torch.randperm(k).int() // group}
            weight = int_group.pack(fields | index, "gptq_v2", bits=4, group=group, scale_type="f16")
            x = torch.randint(-2, 3, (3, k)).half()
            exact = x.float() @ int_group.dequantize(weight, torch.float32).t()
            layer, moved = FusedLinear(weight), convert_for_device(weight, torch.float16)
            for got in (layer(x), int_group.linear(x, moved)):
                assert torch.allclose(got.float(), exact, rtol=2 ** -10, atol=1e-3)
            assert len(xpu) == 2 and xpu.clear() is None
            assert all(same_bits(layer.checkpoint_weight().tensors[name], own) for name, own in weight.tensors.items())


def test_groups_that_an_xpu_does_not_take(xpu: list[torch.dtype]) -> None:
    """Codes of 8 columns share a word, so that a group of 20 cannot be padded; `linear` decodes such a weight."""
    weight = int_group.quantize(random(16, 80), "pack_quantized", bits=4, group=20)
    for convert in (FusedLinear, lambda weight: convert_for_device(weight, torch.float16)):
        with pytest.raises(FormatError, match="groups of 20 are no multiple of 8, which aten::_weight_int4pack_mm_with"):
            convert(weight)
    x = random(2, 80).half()
    assert torch.equal(int_group.linear(x, int_group.convert(weight, "xpu_int4pack")), int_group.linear(x, weight)) and not xpu


# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up = nn.Linear(K, 208)
        self.wide = nn.Linear(K, 128, bias=False)
        self.narrow = nn.Linear(K, 24, bias=False)
        self.head = nn.Linear(K, 32, bias=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.norm(x)
        return [self.up(x), self.wide(x), self.narrow(x), self.head(x)]


def checkpoint(path: Path, config: dict[str, Any], storage: str, act_order: bool) -> Path:
    path.mkdir()
    weights = {name: packed(n, storage, act_order, seed) for seed, (name, n) in enumerate(
        {"up": 208, "wide": 128, "narrow": 24}.items())}
    tensors = {f"{name}.{own}": tensor for name, weight in weights.items() for own, tensor in weight.tensors.items()}
    plain = {"up.bias": random(208), "norm.weight": random(K), "norm.bias": random(K), "head.weight": random(32, K)}
    tensors |= {name: tensor.bfloat16() for name, tensor in plain.items()}
    write(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "toy", "quantization_config": config}))
    return path


@pytest.mark.parametrize(("config", "storage", "act_order"), [
    pytest.param(GPTQ, "gptq_v2", False, id="gptq_v2"),
    pytest.param({**GPTQ, "desc_act": True}, "gptq_v2", True, id="desc_act"),
    pytest.param({**GPTQ, "checkpoint_format": "gptq"}, "gptq_v1", False, id="gptq_v1"),
    pytest.param(AWQ, "awq", False, id="awq")])
def test_a_checkpoint_is_loaded_fused_and_saved(config: dict[str, Any], storage: str, act_order: bool, tmp_path: Path,
                                                calls: list[tuple[torch.dtype, int]]) -> None:
    source = checkpoint(tmp_path / "in", config, storage, act_order)
    model = Net()
    qdsl.load_weights_(model, source, dtype=torch.bfloat16)
    x = random(2, 5, K).bfloat16()
    seen: list[int] = []
    model.up.register_forward_pre_hook(lambda module, args: seen.append(1))
    model.eval()
    with torch.no_grad():
        weights = {"up": model.up.packed, "wide": model.wide.packed}
        before, bias = model(x), model.up.bias
        report = qdsl.fuse_(model)
        after = model(x)
    assert report.quantized.keys() == {"up", "wide"} and len(calls) == 2
    assert report.skipped == {"narrow": "N = 24 is no multiple of 16, which aten::_weight_int4pack_mm_for_cpu needs"}
    assert "2 layers stored for torch's fused int4 operations" in str(report)
    assert_near(after[0], model.norm(x), weights["up"], bias)
    assert_near(after[1], model.norm(x), weights["wide"])
    for ours, theirs in zip(after, before, strict=True):         # which rounds weights to bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    assert isinstance(model.up, FusedLinear) and model.up.bias is bias and not model.up.training and len(seen) == 2
    saved = qdsl.save_model(model, tmp_path / "out")
    assert saved.exact and {**files(tmp_path / "out"), FILE: b""} == {**files(source), FILE: b""}
    again = qdsl.fuse_(model)
    assert again.quantized == {} and again.skipped["up"] == "fused already"


@pytest.mark.parametrize("act_order", [False, True])
def test_without_a_compiler_loading_stores_weights_for_the_operation(act_order: bool, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is fast on this processor and for the dtype of products, and QDSL_PLANAR allows it.  Saving is exact."""
    if not has_torch_kernels():
        pytest.skip("torch's operation has no vectors here")
    source = checkpoint(tmp_path / "in", {**GPTQ, "desc_act": act_order}, "gptq_v2", act_order)

    def loaded(dtype: torch.dtype = torch.bfloat16) -> tuple[Net, dict[str, str]]:
        model = Net()
        return model, qdsl.load_weights_(model, source, dtype=dtype).packed

    stored = "int_group.planar" if act_order else "int_group.gptq_v2"
    plain, packed = loaded()
    assert packed == dict.fromkeys(("up", "wide", "narrow"), stored)
    monkeypatch.setattr(library, "compiler", lambda: (_ for _ in ()).throw(library.NoCompiler("no C compiler")))
    model, packed = loaded()
    fused = f"int4pack.{native_storage(OPERATIONS['cpu'])}"
    assert packed == {"up": fused, "wide": fused, "narrow": stored} and isinstance(model.up, FusedLinear)
    x = random(2, 5, K).bfloat16()
    with torch.no_grad():
        up, wide, *_ = model(x)
        assert_near(up, model.norm(x), plain.up.packed, plain.up.bias)
        assert_near(wide, model.norm(x), plain.wide.packed)
    assert qdsl.save_model(model, tmp_path / "out").exact
    assert {**files(tmp_path / "out"), FILE: b""} == {**files(source), FILE: b""}
    assert set(loaded(torch.float32)[1].values()) == {stored}
    with monkeypatch.context() as other:
        other.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert set(loaded()[1].values()) == {stored}
    monkeypatch.setenv("QDSL_PLANAR", "never")
    assert set(loaded()[1].values()) == {"int_group.gptq_v2"}


def test_a_filter_and_shared_weights(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": int_group.Linear(packed(64)), "b": int_group.Linear(packed(64)), "c": nn.Linear(K, 64)})
    model["twice"] = model["a"]
    model["tied"] = int_group.Embedding(packed(64))
    tied = int_group.Linear(packed(64))
    tied._parameters.update({name: model["tied"]._parameters[name] for name in tied._parameters if name != "bias"})
    model["head"] = tied
    stack = qdsl.Experts(packed(64), 2)
    model["stack"] = stack
    report = qdsl.fuse_(model, "b")
    assert report.quantized.keys() == {"a", "twice"} and model["twice"] is model["a"]
    assert isinstance(model["b"], int_group.Linear)
    assert report.skipped == {"head": "another module has the same tensors",
                              "stack.parts.0": "experts of a stack are multiplied together"}
    with pytest.raises(FormatError, match="itself a linear layer"):
        qdsl.fuse_(tied)


def test_a_model_that_no_checkpoint_filled_is_saved_in_its_own_format(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(K, 80))
    qdsl.quantize_(model, "int_group", bits=4, group=64)
    weight = model[0].packed
    assert qdsl.fuse_(model).notes == {"0": "runs unfused in float32: cast the model to bfloat16"}
    qdsl.save_model(model, tmp_path / "out")
    other = nn.Sequential(nn.Linear(K, 80))
    qdsl.load_weights_(other, tmp_path / "out")
    assert isinstance(other[0], QuantizedLinear) and other[0].format is int_group.FORMAT
    assert all(same_bits(other[0].packed.tensors[name], tensor) for name, tensor in weight.tensors.items())


def test_a_planar_model_is_fused_and_back() -> None:
    model = nn.Sequential(int_group.Linear(packed(128)))
    weight = model[0].dequantize(torch.float32)
    assert qdsl.planar_(model).quantized
    assert qdsl.fuse_(model).quantized and torch.equal(model[0].dequantize(torch.float32), weight)
    assert native_storage(OPERATIONS["cpu"]) in repr(model)
