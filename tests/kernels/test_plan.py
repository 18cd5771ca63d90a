"""What a plan chooses and prepares, for GPUs that are not there."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton

from bench import costs as writer
from bench import dispatch
from bench.launch import StubDriver
from qdsl.generated import awq_gemv_fast, fp8_block, int_group, iq2_xxs, q4_0, q4_k, quanto, squeezellm
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, launch, plan, tiles
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu
from qdsl.runtime.gpu.families.units import ONE_BY_ONE
from qdsl.runtime.gpu.prepared import Prepared, prepare
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import linear, ops
from tests.support import compiling
from tests.support.covering import quarter_of
from tests.support.interpreter import INTERPRETED

META, BF16 = torch.device("meta"), torch.bfloat16


@pytest.fixture
def kernels() -> Iterator[None]:
    """Tensors on the CPU meet kernels, as those on a GPU do; Triton interprets them."""
    if not INTERPRETED:
        pytest.skip("on a GPU tensors are there")
    with patch.object(PackedWeight, "runs_kernels", True):
        yield


def choice_for(packed: PackedWeight, m: int, gpu: Gpu) -> plan.Choice:
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        return plan.choice(packed, m, BF16, META)


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", quarter_of([*GPUS.values()]), ids=lambda gpu: gpu.name)
def test_no_candidate_is_much_cheaper(gpu: Gpu) -> None:
    """Of every storage, entropy codes too.  `python -m bench --only dispatch` takes all shapes and rows for every GPU."""
    turn = [*GPUS.values()].index(gpu)
    for packed in dispatch.storages(dispatch.SHAPES[turn % len(dispatch.SHAPES)]):
        for ratio, m in dispatch.ratios(packed, gpu, dispatch.ROWS[turn % 4::4]):
            assert ratio <= dispatch.WORST, (costs.storage_key(packed), packed.shape, m)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_traps(gpu: Gpu) -> None:
    """Words along N, a weight decoded anew for every row, and a cliff behind 8 rows."""
    awq = int_group.FORMAT.empty((4096, 4096), "awq", "meta", bits=4)
    options = choice_for(awq, 1, gpu).options
    most = 4 if gpu.is_nvidia else 5                             # on AMD, decoding takes a fifth of it by whole sectors
    assert {option.candidate.kind: option.seconds for option in options}["matvec"] <= most * options[0].seconds
    iq2 = iq2_xxs.FORMAT.empty((4096, 4096), None, "meta")
    assert choice_for(iq2, 16, gpu).candidate.kind == ("decode" if gpu.name in ("t4", "a100", "b200") else "gemm")
    assert choice_for(iq2, 2048, gpu).candidate.kind == "decode"
    int4 = int_group.FORMAT.empty((4096, 4096), "planar", "meta", bits=4)
    times = {m: choice_for(int4, m, gpu).options[0].seconds for m in (1, 8, 9, 16)}
    assert times[8] <= times[9] <= 2 * times[8] and times[16] <= 2 * times[8]
    fused = {"gemv", "skinny", "tile_gemm"} if ARCHS[gpu.arch].capability >= 80 else {"matvec", "decode", "gemm"}
    kinds = {m: choice_for(int4, m, gpu).candidate.kind for m in times}
    assert kinds.pop(1) in {*fused, "matvec"} and {*kinds.values()} <= fused


@pytest.mark.parametrize("form, gpu, more, many", [
    (int_group, "h100", 1.3, 2), (fp8_block, "h100", 1.3, 2), (q4_0, "h100", 1.4, 2),
    (int_group, "h200", 1.31, 2), (fp8_block, "h200", 1.3, 2), (q4_0, "h200", 1.44, 2.05)])
def test_more_rows_are_no_cliff(form: ModuleType, gpu: str, more: float, many: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share K, and 16 rows of x in a program: 4096 x 4096, by exact counts; 1.3 and 2 are wanted of all."""
    monkeypatch.setattr(costs, "counts", writer.exact)
    packed = form.FORMAT.empty((4096, 4096), "planar", "meta")
    times = {m: choice_for(packed, m, GPUS[gpu]).options[0].seconds for m in (1, 9, 16, 64)}
    assert times[9] <= times[16] <= more * times[1] and times[64] <= many * times[1]


def test_sixteen_rows_of_x_where_they_are_counted() -> None:
    """`skinny` takes them in the configurations of the table, which has none that spills; never with 8 rows or fewer."""
    counted = 0
    for packed in (q4_0.FORMAT.empty((4096, 4096), "planar", "meta"), q4_k.FORMAT.empty((4096, 4096), "planar", "meta")):
        for gpu in (GPUS["h200"], GPUS["t4"]):
            wide = {option.candidate.config["R"] for option in choice_for(packed, 9, gpu).options
                    if option.candidate.kind == "skinny" and "BM" in option.candidate.config}
            entry = costs.counts(costs.storage_key(packed))["sm_90"] if gpu.name == "h200" else {}
            assert wide == {r for r in (1, 2) if ("skinny", r, 16, 0) in entry}
            assert not any("BM" in option.candidate.config for option in choice_for(packed, 8, gpu).options
                           if option.candidate.kind == "skinny")
            counted += len(wide)
    assert counted


def test_sixty_four_rows_of_x_and_short_groups() -> None:
    """`tile_gemm` takes them at once in the configurations of the table; of groups of 128 columns in all."""
    for packed, are_short in ((q4_k.FORMAT.empty((4096, 4096), "planar", "meta"), True),
                              (int_group.FORMAT.empty((4096, 4096), "planar", "meta", bits=4), False)):
        entry = costs.counts(costs.storage_key(packed))["sm_90"]
        wide = {option.candidate.config["R"] for option in choice_for(packed, 64, GPUS["h200"]).options
                if option.candidate.kind == "tile_gemm" and option.candidate.config["BM"] == 64
                and not option.candidate.config.get("SCALED")}
        assert wide == {r for r in (1, 2) if not are_short or ("tile_gemm", r, 64, 0) in entry}
        assert not are_short or wide == {1}


def test_no_kernel_that_spills_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table, which leaves kernels out that spill: the shipped one, and one without R = 2."""
    packed = q4_0.FORMAT.empty((4096, 4096), "planar", "meta")
    few = {arch: {key: cost for key, cost in entry.items() if key[1] != 2} for arch, entry in costs.counts("q4_0.planar").items()}

    def launched() -> set[tuple[str, int]]:
        return {costs.kernel_key(way.kind, way.config)[:2] for m in (1, 8, 64)
                for way in plan.candidates(packed, m, BF16, META) if way.kind in writer.LANES}

    with configure.assumed(9, 132, GPUS["h200"]):
        assert {(kind, r) for kind in writer.LANES for r in (1, 2)} == launched()
        monkeypatch.setattr(costs, "counts", lambda storage: few)
        assert {(kind, 1) for kind in writer.LANES} == launched()


def test_what_was_counted_is_chosen() -> None:
    """Stages of copies that the table counts, which others take the time of; others' warps where they are faster by far alone."""
    tiles = 0
    for packed in (q4_k.FORMAT.empty((4096, 4096), "planar", "meta"), awq_gemv_fast.FORMAT.empty((4096, 4096), "planar", "meta")):
        for m in (16, 33, 64, 96, 256):
            choice = choice_for(packed, m, GPUS["h200"])
            counted = [option.seconds for option in choice.options if costs.has_counts(packed, option.candidate, "sm_90")]
            assert choice.options[0].seconds <= min(counted)
            if choice.candidate.kind == "tile_gemm" and choice.candidate.config["BM"] <= 64:
                assert choice.candidate.config["STAGES"] == 3
                tiles += 1
    assert tiles


def test_sizes_that_a_chunk_is_no_multiple_of() -> None:
    """Groups of 96 columns are left to the kernels for any storage; those of other sizes have all kernels."""
    for group, served in ((128, True), (32, True), (-1, True), (96, False)):
        packed = quanto.FORMAT.empty((256, 384), "planar", bits=4, group=group, scale_type="bf16")
        assert ("gemv" in plan.kinds(packed, 1, BF16, META)) == served
        assert ("skinny" in plan.kinds(packed, 4, BF16, META)) == served


def test_candidates_are_launches() -> None:
    """The grid that costs are modelled for is the one that is launched, in the same configuration."""
    for packed in (q4_0.FORMAT.empty((4112, 4096), "planar", "meta"), awq_gemv_fast.FORMAT.empty((512, 4096), None, "meta")):
        for m in (1, 5, 12, 100):
            x, out = (torch.empty(m, size, dtype=BF16, device="meta") for size in packed.shape[::-1])
            with configure.assumed(9, 132):
                legal = plan.candidates(packed, m, BF16, META)
                kinds = [option.kind for option in legal]
                assert (kinds[-1], kinds.count("decode"), kinds.count("matvec")) == ("decode", 1, m <= ONE_BY_ONE)
                for candidate in legal[:-1]:
                    [call] = launch.linear_calls(x, packed, None, out, candidate=candidate)
                    assert call.grid == candidate.grid
                    assert {key: call.constants[key] for key in candidate.config} == candidate.config


@pytest.mark.parametrize("capability", [8, 9, 12])
def test_launches_overlap_where_that_is_set(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By QDSL_PDL alone, from Hopper on; not with experts, whose tiles an early program could not read."""
    packed, rows = q4_0.FORMAT.empty((4096, 4096), "planar", "meta"), torch.empty(8, 4096, dtype=BF16, device="meta")
    gguf = q4_k.FORMAT.empty((4096, 4096), "gguf", "meta")
    tiles = torch.empty(1, 3, dtype=torch.int32, device="meta")

    def calls() -> list[Call]:
        with configure.assumed(capability, 132):
            return [call for weight, x in ((packed, rows), (packed, rows[:1]), (gguf, rows[:1])) for candidate in
                    plan.candidates(weight, len(x), BF16, META) if candidate.kind in ("gemv", "skinny")
                    for call in launch.linear_calls(x, weight, None, x, candidate=candidate)]

    assert {call.family for call in calls()} == {"gemv", "gemv_records", "skinny"}
    for setting in ("never", "auto", None):
        if setting is None:
            monkeypatch.delenv(configure.OVERLAP.variable)
        else:
            monkeypatch.setenv(configure.OVERLAP.variable, setting)
        overlap = setting == "auto" and capability >= 9
        assert {(call.arguments[-1], "launch_pdl" in call.options) for call in calls() if call.arguments[0][0].shape[1] == 512} \
            == {(512 if overlap else None, overlap)}
        assert {call.arguments[-1] for call in calls()} == ({512, 576} if overlap else {None})
    monkeypatch.setenv(configure.OVERLAP.variable, "auto")
    [grouped] = launch.grouped_calls(rows, packed, tiles, None, rows)
    assert grouped.arguments[-1] is None and "launch_pdl" not in grouped.options
    monkeypatch.setenv(configure.OVERLAP.variable, "always")
    with pytest.raises(FormatError, match="QDSL_PDL is never or auto, not 'always'"):
        calls()


def test_an_invariant_product_has_one_configuration() -> None:
    packed = q4_0.FORMAT.empty((512, 8192), "planar", "meta")
    configs = {json.dumps(dict(plan.invariant_candidate(packed, m, BF16, META).config)) for m in (1, 2, 8, 9, 64, 500)}
    assert len(configs) == 1 and plan.invariant_candidate(packed, 1, BF16, META).kind == "skinny"


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_weights_that_are_described_alike_share_a_plan(kernels: None) -> None:
    x = torch.randn(2, 256, dtype=BF16)
    one, other = (q4_0.planar(q4_0.quantize(torch.randn(32, 256))) for _ in range(2))
    q4_0.linear(x, one), q4_0.linear(x, other)
    assert one.plan is not None and one.plan is other.plan
    assert q4_0.planar(q4_0.quantize(torch.randn(48, 256))).plan is None
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one.to("cpu")):  # noqa: S301
        assert again.plan is None
    kept = weakref.ref(one.plan)
    del one, other, again
    gc.collect()
    assert kept() is None


def test_a_plan_holds_no_memory(kernels: None) -> None:
    """Tensors that a layer loses, as when it is offloaded, are freed; what takes their place is multiplied."""
    layer = q4_0.Linear(q4_0.planar(q4_0.quantize(torch.randn(32, 256))))
    x, other = torch.randn(2, 256, dtype=BF16), q4_0.planar(q4_0.quantize(torch.randn(32, 256)))
    layer(x)
    assert layer._packed.plan is not None
    before = [weakref.ref(tensor) for tensor in layer.parameters()]
    for name, tensor in other.tensors.items():
        layer._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
    gc.collect()
    assert not any(reference() for reference in before)
    assert torch.equal(layer(x), q4_0.linear(x, other))
    for name, tensor in q4_0.planar(q4_0.quantize(torch.ones(32, 256))).tensors.items():
        layer._parameters[name].data = tensor
    assert torch.allclose(layer(x).float(), x.float().sum(1, keepdim=True).expand(2, 32), rtol=2 ** -7, atol=2 ** -6)


@pytest.mark.parametrize(("form", "storage", "n"), [
    (int_group, "awq", 4096), (int_group, "gptq_v2", 4096), (squeezellm, "", 1024)], ids=str)
def test_words_that_neighbour_along_n_are_walked_by_programs_enough(form: ModuleType, storage: str, n: int) -> None:
    """A program of `matvec` takes a sector of rows of tiles and is long along K; it does not walk thousands of short tiles."""
    packed = form.FORMAT.empty((n, 4096), storage or None)
    rows, units = tiles.grid_axes(packed)
    candidate = plan.any_product(packed, 1)
    assert packed.layout.kernels.last == "n" and candidate.grid[0] >= min(64, rows // 8)
    assert units // candidate.config["BK"] <= 32
    assert candidate.config["BN"] * candidate.config["BK"] <= tiles.UNITS


def test_columns_in_another_order(kernels: None) -> None:
    """The plan names the order of columns last, in which x has to be brought; the weight without the order has another plan."""
    index = torch.arange(256, dtype=torch.int32) % 2
    fields = int_group.unpack(int_group.quantize(torch.randn(32, 256), bits=4, group=128))
    packed = int_group.planar(int_group.pack({**fields, "g": index}, storage="gptq_v1", bits=4, group=128))
    assert packed.order is not None
    x = torch.randn(2, 256, dtype=BF16)
    first, again = int_group.linear(x, packed), int_group.linear(x, packed)
    assert packed.plan is not None and packed.plan.names[-1] == "order" and torch.equal(first, again)
    assert plan.plan_of(packed.as_stored()) is not packed.plan
    wide = x.float() @ int_group.dequantize(packed, torch.float32).t()
    assert torch.allclose(first.float(), wide, rtol=2 ** -7, atol=2 ** -5)


def test_products_of_the_interpreter(kernels: None) -> None:
    """Every path of a product on a GPU, with a bias, in any shape, beside the CPU's."""
    weight, bias = torch.randn(48, 256), torch.randn(48)
    for packed in (q4_0.quantize(weight), q4_0.planar(q4_0.quantize(weight))):
        exact = q4_0.dequantize(packed, torch.float32).double().t()
        for shape, dtype in (((1, 256), BF16), ((2, 3, 256), torch.float16), ((9, 256), torch.float32), ((0, 256), BF16),
                             ((256,), BF16)):
            x = torch.randn(shape).to(dtype)
            for mode in ("", linear.INVARIANT):
                product = ops.linear(x, packed, bias, mode)
                assert product.shape == (*shape[:-1], 48) and product.dtype == dtype
                assert torch.allclose(product.double(), x.double() @ exact + bias, rtol=2 ** -6, atol=2 ** -4)


# -- what is prepared --------------------------------------------------------------------------------------------------


def test_contraction_does_not_depend_on_the_release_of_triton() -> None:
    """A product and a sum are contracted wherever that is allowed; where it would skip a rounding of the formula, never."""
    packed, x = q4_0.FORMAT.empty((64, 256), "gguf"), torch.empty(1, 256, device="meta")
    [decoding], [multiplying] = launch.dequantize_calls(packed, torch.empty(64, 256, device="meta")), launch.linear_calls(
        x, packed, None, torch.empty(1, 64, device="meta"), candidate=plan.any_product(packed, 1))
    assert not decoding.options["enable_fp_fusion"] and multiplying.options["enable_fp_fusion"]


class _Watched(torch.autograd.Function):
    """Prepared launches refuse the gradients of autograd's own vmap, which have the type of plain tensors and no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ready: Prepared, weight: torch.Tensor) -> torch.Tensor:
        ctx.ready, ctx.weight = ready, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        assert ctx.ready.run(gradients[0], [ctx.weight], None) is None
        return gradients[0], None, None


def test_arguments_of_prepared_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are filled in, those inside of a tensor and those in tuples too; what nobody passes again is refused."""
    monkeypatch.setattr(triton.runtime.driver, "_active", StubDriver())
    calls: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(params=[SimpleNamespace(name=name) for name in ("planes", "x", "m", "function")], pre_run_hooks=[])
    compiled = SimpleNamespace(run=lambda *arguments: calls.append(arguments), function=5, packed_metadata="metadata")
    table, weight, x, out = torch.zeros(8), torch.zeros(64, 8), torch.zeros(4, 8), torch.zeros(4, 64)

    def prepared(planes: tuple[torch.Tensor | int | None, ...]) -> Prepared | None:
        call = Call(kernel, (planes, x[2:], 4), {"function": len}, (7, 2), {}, aligned=((weight, 64),))
        return prepare([(call, compiled)], [x, weight, None], out, [table], False)

    ready = prepared((weight[16:], None, 3, table))
    assert ready is not None and not ready.is_decoded
    memory = torch.zeros(200)
    start = -memory.data_ptr() % 64 // 4
    other, own = memory[start:start + 64], torch.zeros(4, 8)
    product = ready.run(own, [other], None)
    assert product is not None and product.shape == (4, 64)
    assert calls == [(7, 2, 1, 0, 5, "metadata", None, None, None, (other.data_ptr() + 16 * 8 * 4, None, 3, table),
                      own.data_ptr() + 2 * 8 * 4, 4, len)]
    assert ready.run(own, [memory[start + 4:start + 68]], None) is None    # a multiple of 16 bytes, not of 64
    assert ready.run(own, [other.view(8, 8).t()], None) is None
    torch.autograd.grad(_Watched.apply(own.requires_grad_(), ready, other), own, torch.ones(2, 4, 8), is_grads_batched=True)
    with monkeypatch.context() as patched:                       # as a profiler of launches does, which may be another's
        patched.setattr(triton.knobs.runtime, "launch_exit_hook", len)
        assert ready.run(own, [other], None) is None
    with torch.inference_mode():
        shaped = ready.reshaped((2, 2, 64)).run(own.detach().view(2, 2, 8), [other], None)
    assert shaped is not None and shaped.shape == (2, 2, 64) and shaped.is_contiguous() and shaped.is_inference()
    kernel.pre_run_hooks.append(len)
    assert ready.run(own, [other], None) is None and len(calls) == 2
    assert prepared((weight, torch.zeros(8))) is None            # a tensor of this call alone
    assert prepare([], [torch.zeros(9)[1:]], out, [], False) is None  # no multiple of 16 bytes
    call = Call(kernel, ((weight,), x, 4), {"function": len}, (1,), {})
    assert prepare([(call, None)], [x, weight], out, [], False) is None      # the interpreter compiles nothing


def test_prepared_launches() -> None:
    """The second product of a kind is launched with the kernel, grid and arguments that Triton's launcher has for it."""
    run = compiling.run("tests.kernels.prepared_launches")
    assert not run.returncode, run.stderr
    *rows, without, with_hook, called, operators, captured = map(json.loads, run.stdout.splitlines())
    for row in rows:
        is_aligned = " 0" in row["case"][-13:]
        assert row["same"] and row["prepared"] == [False, is_aligned, is_aligned], row
    assert {row["kind"] for row in rows} >= {"gemv", "skinny", "tile_gemm", "matvec", "decode", "quantize_x"}
    assert any(row["split"] > 1 for row in rows)
    kernels = {row["case"]: row["kernels"] for row in rows}
    # Two: x is quantized, or a code decoded, by a kernel of its own.  Three: tiles of a decoded weight.
    assert {len(names) for names in kernels.values()} == {1, 2, 3}
    eighteen, sixteen, seventeen = (kernels[f"q4_0.planar ({m}, 256) torch.bfloat16 None 0"] for m in (18, 16, 17))
    assert eighteen == seventeen == sixteen                      # M only bounds loads and stores: one kernel serves all
    assert without == {"case": "hook False", "prepared": [True], "hook": False}
    assert len(called.pop("gradients")) <= 17                    # torch asks for what its own derivatives need
    assert all(len(functions) <= 12 for functions in called.values()), called
    assert with_hook == {"case": "hook True", "prepared": [False], "hook": True}
    assert {"linear", "quantize_x", "decoded", "grouped_linear", "grouped_linear decoded", "dequantize",
            "grouped_linear float64", "gradients of grouped_linear"} <= operators.keys()
    for name, row in operators.items():
        assert not {*row} & {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero"}, (name, row)
    assert operators.keys() == captured["streams"].keys() and all(streams == [99] for streams in captured["streams"].values())
    assert len({*captured["counters"]}) == len(captured["counters"]) == 2    # own ones for each launch that shares K
