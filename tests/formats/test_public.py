"""The Python interface at a prompt or in a notebook: names, what is printed, weights on disk, and a newcomer's mistakes."""

from __future__ import annotations

import html.parser
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qdsl
from qdsl.checkpoint.files.safetensors import write
from qdsl.core.text import LINE, ROWS, byte_text, nearest_names
from qdsl.generated import fp8_block, int_group, q4_0
from qdsl.models.peft import MergeReport
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import pickling
from tests.support.formats import SHIPPED, cases, random_packed, same_bits, smallest
from tests.support.paths import ROOT
from tests.support.small_models import Mlp, fp8_mlp, mlp

WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
PACKED = q4_0.quantize(WEIGHT)
CASES = [case for case in cases() if case.path in SHIPPED]


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_listed() -> None:
    assert sorted(set(qdsl.__all__)) == sorted(qdsl.__all__) and {*qdsl.__all__, "__version__"} <= {*dir(qdsl)}
    assert not [name for name in dir(qdsl) if name.startswith("_") and not name.startswith("__")]
    for name in qdsl.__all__:
        value = getattr(qdsl, name)
        assert not (inspect.isroutine(value) or inspect.isclass(value)) or inspect.getdoc(value), name


def test_every_format_is_listed_and_imported_when_it_is_used() -> None:
    assert dir(qdsl.generated) == [path.stem for path in SHIPPED]
    for name in ("q8_0", "int_group"):
        assert getattr(qdsl.generated, name) is qdsl.load(name)
    with pytest.raises(AttributeError, match="no attribute 'quantize'; did you mean 'quantize_'"):
        _ = qdsl.quantize


@pytest.mark.parametrize("line", ["qdsl.generated.{}", "import qdsl.generated.{}", "from qdsl.generated import {}",
                                  "from qdsl.generated import q4_0, {}", "from qdsl.generated.{} import quantize"])
def test_a_mistyped_format_gets_the_name_that_is_like_it(line: str) -> None:
    for wrong, answer in {"q4k": "; did you mean q4_k?", "Q4_K": "; did you mean q4_k?", "mxfp_4": "; did you mean mxfp4?",
                          "int_grup": "; did you mean int_group", "zzz": ": dir(qdsl.generated) has all"}.items():
        with pytest.raises((AttributeError, ImportError)) as caught:
            exec(line.format(wrong), {"qdsl": qdsl})  # noqa: S102
        assert f"qdsl has no format '{wrong}'{answer}" in str(caught.value)
    assert not hasattr(qdsl.generated, "q4k") and not hasattr(qdsl.generated, "_q4k")


def test_a_spec_of_a_format_that_ships_is_that_format(tmp_path: Path) -> None:
    """By its name, by its file, and by a copy of the file; a spec that differs is another format."""
    path = tmp_path / "copy.yaml"
    path.write_bytes((ROOT / "specs" / "q4_0.yaml").read_bytes())
    assert qdsl.load("q4_0") is qdsl.load(ROOT / "specs" / "q4_0.yaml") is qdsl.load(path) is q4_0
    path.write_text(path.read_text() + "# changed\n")
    other = qdsl.load(path)
    assert other is not q4_0 and qdsl.load(path) is other
    with pytest.raises(FormatError, match=r"a weight of another spec called q4_0, not of q4_0; `packed.format` has"):
        other.dequantize(PACKED)


# -- what is printed -----------------------------------------------------------------------------------------------------


class Tags(html.parser.HTMLParser):
    """The tags of a text; each is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Objects of every public class, by its name, and the reports that functions return."""
    root = tmp_path_factory.mktemp("public")
    model, filled = Mlp(), mlp()
    wide = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(40)])
    value = qdsl.GgufValue.of("f32[]", [0.5] * 1000)
    tensor = qdsl.GgufTensor("a", qdsl.GGML_TYPES["F32"], (4, 32), [bytes(512)])
    qdsl.write_gguf(root / "a.gguf", {"general.architecture": qdsl.GgufValue.of("string", "llama"), "x": value}, [tensor])
    write(root / "many.safetensors", {f"<b>{i}</b>.weight": torch.ones(2, 2) for i in range(40)})
    folder = fp8_mlp(root / "fp8")
    checkpoints = [qdsl.open(path) for path in (folder, root / "a.gguf", root / "many.safetensors")]
    named: dict[str, list[Any]] = {
        "Checkpoint": checkpoints, "PackedWeight": [PACKED, int_group.quantize(WEIGHT, "gptq_v2"), PACKED.derive({}),
                                                    PACKED.to("meta")],
        "Experts": [qdsl.Experts(PACKED, 2)], "GgufFile": [qdsl.GgufFile(root / "a.gguf")], "GgufTensor": [tensor],
        "GgufValue": [value, qdsl.GgufValue.of("string", "x" * 1000)],
        "reports": [*(checkpoint.report() for checkpoint in checkpoints), qdsl.load_weights_(filled, folder),
                    qdsl.save_model(filled, root / "saved"), qdsl.quantize_(wide, "q4_0"), qdsl.planar_(model),
                    q4_0.requantize(PACKED, fp8_block.FORMAT)[1], MergeReport(filled, "same", {}, [str(i) for i in range(90)]),
                    q4_0.SPEC, int_group.SPEC],
        "others": [q4_0.FORMAT, *checkpoints[0].layers.values()]}
    for checkpoint in checkpoints:
        checkpoint.close()
    return named


def test_every_public_object_prints_on_a_screen(samples: dict[str, list[Any]]) -> None:
    public = {name for name in qdsl.__all__ if inspect.isclass(value := getattr(qdsl, name)) and not issubclass(value, Exception)}
    assert public == samples.keys() - {"reports", "others"}
    for value in [value for values in samples.values() for value in values]:
        lines = repr(value).splitlines()
        assert 0 < len(lines) <= ROWS + 2 and max(map(len, lines)) <= LINE and " object at 0x" not in lines[0]


def test_notebooks_get_tables(samples: dict[str, list[Any]]) -> None:
    for value in [value for kind in ("Checkpoint", "PackedWeight", "reports") for value in samples[kind]]:
        text = value._repr_html_()
        assert Tags(text).seen.count("tr") <= ROWS + 2 and "<b>0</b>" not in text
    assert "svg" in Tags(PACKED._repr_html_()).seen and "blocks: 18 bytes hold 1 d, 32 q" in PACKED._repr_html_()


def test_the_picture_is_that_of_the_weight(tmp_path: Path) -> None:
    """Of its storage and parameters, of a spec that qdsl.load has built too; none of a spec that has changed since."""
    for bits in (2, 4):
        drawn = int_group.quantize(WEIGHT, "gptq_v2", bits=bits)._repr_html_()
        assert f"hold {32 // bits} q" in drawn and "awq" not in drawn
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("format: q4_0", "format: mine"))
    packed = qdsl.load(path).quantize(WEIGHT)
    assert "<title>mine</title>" in packed._repr_html_()
    path.write_text("format: another\n")
    assert "svg" not in Tags(qdsl.load("q4_0").quantize(WEIGHT).derive({})._repr_html_()).open


def test_sizes_and_near_names() -> None:
    sizes = {0: "0 bytes", 1: "1 byte", 999: "999 bytes", 1000: "1 kB", 497664: "497.7 kB", 1234567890: "1.235 GB"}
    assert {size: byte_text(size) for size in sizes} == sizes
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head", "model.norm"]
    assert nearest_names("layers.0.mlp.up_proj", names)[0] == nearest_names("model.layers.0.mlp.upproj", names)[0] == names[0]
    assert nearest_names("transformer.lm_head", names) == ["lm_head"] and nearest_names("embedding", names) == []


# -- mistakes ------------------------------------------------------------------------------------------------------------


def test_a_mistyped_layer_gets_the_names_that_are_like_it(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {f"model.layers.{i}.{name}.weight": torch.ones(2, 2) for i in range(4)
                                       for name in ("mlp.up_proj", "mlp.down_proj", "norm")})
    with qdsl.open(tmp_path / "m.safetensors") as checkpoint:
        for wrong, hint in {"model.layers.0.mlp.upproj": "did you mean 'model.layers.0.mlp.up_proj'",
                            "layers.1.mlp.down_proj": "did you mean 'model.layers.1.mlp.down_proj'",
                            "model.layers.2.mlp": r"it holds 'model.layers.2.mlp.\w+.weight', 'model.layers.2.mlp.\w+.weight'$",
                            }.items():
            with pytest.raises(qdsl.CheckpointError, match=hint):
                checkpoint.weight(wrong)
        with pytest.raises(qdsl.CheckpointError, match="it is a plain tensor, which `weight` reads"):
            checkpoint.layer("model.layers.0.norm")


CALLS = {"linear": lambda module, weight: module.linear(torch.ones(1, 128), weight),
         "grouped_linear": lambda module, weight: module.grouped_linear(torch.ones(1, 128), weight, [0, 1]),
         "dequantize": lambda module, weight: module.dequantize(weight), "unpack": lambda module, weight: module.unpack(weight),
         "rows": lambda module, weight: module.FORMAT.dequantize_rows(weight, torch.tensor([0])),
         "convert": lambda module, weight: module.convert(weight, "gguf"), "planar": lambda module, weight: module.planar(weight),
         "requantize": lambda module, weight: module.requantize(weight), "Linear": lambda module, weight: module.Linear(weight),
         "Embedding": lambda module, weight: module.Embedding(weight),
         "checked": lambda module, weight: module.FORMAT.checked(weight),
         "stored": lambda module, weight: module.FORMAT.stored(weight)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_no_packed_weight(call: Any, request: pytest.FixtureRequest) -> None:
    for wrong, shown in ((WEIGHT, r"float32 \[64, 128\]"), (64, "int"), (None, "NoneType"), (PACKED.tensors, "dict")):
        with pytest.raises(FormatError, match=f"expected a PackedWeight, not {shown}: `quantize` makes one"):
            call(q4_0, wrong)
    if "convert" not in request.node.name:                       # which takes weights of other formats
        with pytest.raises(FormatError, match=r"a weight of q4_0, not of q8_0; `packed.format` has the functions for it"):
            call(qdsl.load("q8_0"), PACKED)


def test_x_comes_first() -> None:
    for product in (q4_0.linear, lambda packed, x: q4_0.grouped_linear(packed, x, [0, 1])):
        with pytest.raises(FormatError, match=r"x comes first, then the packed weight: linear\(x, packed\)"):
            product(PACKED, torch.ones(1, 128))


# -- as a tensor ---------------------------------------------------------------------------------------------------------


def test_a_packed_weight_has_what_a_tensor_has() -> None:
    assert (PACKED.numel(), PACKED.size(), PACKED.size(0), PACKED.size(-1), PACKED.ndim, PACKED.dim()) == (
        64 * 128, torch.Size((64, 128)), 64, 128, 2, 2)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(PACKED.dequantize(dtype), q4_0.dequantize(PACKED, dtype))
    assert PACKED.dtype == PACKED.dequantize().dtype and PACKED.cpu().device.type == PACKED.to("cpu").device.type == "cpu"
    with pytest.raises(FormatError, match=r"uint8 cannot become torch.float16; `dequantize\(torch.float16\)` decodes it"):
        PACKED.to(torch.float16)
    if torch.cuda.is_available():
        assert PACKED.cuda().cpu().dequantize().equal(PACKED.dequantize())


def loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_weights_of_every_storage_load_without_code() -> None:
    """Of shipped formats; tensors have the same bits, and everything else is the same."""
    for case in CASES:
        packed = random_packed(case, smallest(case))
        again = loaded({"w": [packed]})["w"][0]
        assert isinstance(again, PackedWeight) and again.format is packed.format
        for name in ("storage", "shape", "params", "names", "in_order", "stream_info"):
            assert getattr(again, name) == getattr(packed, name), (str(case), name)
        assert again.tensors.keys() == packed.tensors.keys()
        for name, tensor in packed.tensors.items():
            assert same_bits(again.tensors[name], tensor), str(case)


def test_a_weight_of_a_spec_that_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "own4.yaml"
    path.write_text((ROOT / "specs" / "q4_0.yaml").read_text().replace("format: q4_0", "format: own4"))
    packed = qdsl.load(path).quantize(WEIGHT)
    assert torch.equal(loaded(packed).dequantize(), packed.dequantize())
    with pytest.raises(FormatError, match=r"format 'own4' is not here: load its spec with qdsl.load first"):
        pickling.wrapped("qdsl_loaded_0123456789abcdef_own4", "gguf", {}, (64, 128), {}, (), {})


def test_a_hostile_file_makes_no_weight() -> None:
    """Other modules, other tensors, and indices that lie outside."""
    for module in ("os", "qdsl.generated.q4_0.os", "qdsl.host.files", "qdsl.generated.nothing"):
        with pytest.raises(FormatError, match=r"no module of a format|is not here"):
            pickling.wrapped(module, "gguf", dict(PACKED.tensors), (64, 128), {}, (), {})
    ordered = int_group.quantize(WEIGHT, "gptq_v2", group=32)
    outside = ordered.derive({**ordered.tensors, "g_idx": ordered.tensors["g_idx"] + 1000})
    short = PACKED.derive({"blocks": PACKED.tensors["blocks"][:, :-1]})
    for wrong, message in ((outside, "'g_idx'"), (short, "blocks"), (PACKED.derive(PACKED.tensors, (128, 128)), "blocks")):
        with pytest.raises(FormatError, match=message):
            loaded(wrong)


# -- layers to skip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("skip", "left"), [
    (None, []), ("up", ["up"]), (["up", "down"], ["down", "up"]), (["d.*"], ["down"]), ((), []),
    (lambda layer, name: layer.in_features == 64, ["up"])], ids=["none", "name", "names", "pattern", "nothing", "function"])
def test_layers_are_skipped_by_patterns_or_a_function(skip: Any, left: list[str]) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})})
    report = qdsl.quantize_(model, "q4_0", skip)
    assert sorted(report.quantized) == [f"block.{name}" for name in ("down", "up") if name not in left]


@pytest.mark.parametrize("function", [lambda model, skip: qdsl.quantize_(model, "q4_0", skip), qdsl.planar_])
@pytest.mark.parametrize(("skip", "notes"), [
    (["upp", "down"], {"skip 'upp'": "matches no linear layer; did you mean 'up'?"}),
    (".*x", {"skip '.*x'": "matches no linear layer"}),
    (["up"], {}), (None, {}), (lambda layer, name: False, {})])
def test_a_pattern_that_matches_no_layer_is_noted(function: Any, skip: Any, notes: dict[str, str]) -> None:
    report = function(nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("up", "down")}), skip)
    assert report.notes == notes and all(f"  {name}: {note}" in str(report) for name, note in notes.items())
    assert all(note in report._repr_html_().replace("&#x27;", "'") for note in notes.values())


@pytest.mark.parametrize("function", [lambda model, skip: qdsl.quantize_(model, "q4_0", skip), qdsl.planar_, qdsl.fuse_])
def test_a_wrong_pattern_is_told_before_anything_changes(function: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    for wrong in (["("], 5, [None]):
        with pytest.raises(FormatError, match=r"skip is regular expressions of layers' names, or a function"):
            function(model, wrong)
    assert type(model[0]) is nn.Linear


# -- a first session -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda: q4_0.quantize(WEIGHT, storage="guff"), "no storage 'guff'; it has gguf, .*; did you mean 'gguf'"),
    (lambda: int_group.quantize(WEIGHT, grop=64), "no parameter 'grop'; it has bits, .*; did you mean 'group'"),
    (lambda: q4_0.quantize(WEIGHT.numpy()), "a weight is a torch tensor, not a ndarray"),
    (lambda: q4_0.linear(WEIGHT.numpy(), PACKED), "x is a torch tensor, not a ndarray"),
    (lambda: PACKED.dequantize("float32"), "dtype is one of torch's, such as torch.bfloat16, not 'float32'"),
    (lambda: q4_0.requantize(PACKED, "q8_0"), r"other is a format, such as qdsl.load\('q8_0'\).FORMAT, not 'q8_0'"),
    (lambda: q4_0.wrap(PACKED.tensors["blocks"]), r"tensors are a mapping of their names, \{'blocks': ...\}, not a Tensor"),
    (lambda: qdsl.quantize_("model", "q4_0"), "a model is a torch.nn.Module, not a str"),
    (lambda: qdsl.quantize_("q4_0", Mlp()), "a model is a torch.nn.Module, not a str"),
    (lambda: qdsl.quantize_(Mlp(), "q4_0", ignore="up"), r"quantize_ has no option 'ignore': skip=\.\.\. names the layers"),
    (lambda: int_group.quantize(WEIGHT, bits="4"), "int_group: bits is one of 4, .*, not '4'"),
    (lambda: qdsl.planar_("model"), "a model is a torch.nn.Module"),
    (lambda: qdsl.fuse_("model"), "a model is a torch.nn.Module"),
    (lambda: qdsl.match_dense_("model"), "a model is a torch.nn.Module"),
    (lambda: qdsl.load_weights_("folder", Mlp()), "a model is a torch.nn.Module, not a str"),
    (lambda: qdsl.save_model("folder", "model"), "a model is a torch.nn.Module, not a str")], ids=range(16))
def test_mistakes_of_a_first_session(call: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()


def test_a_checkpoint_is_read_like_a_mapping(tmp_path: Path) -> None:
    with qdsl.open(fp8_mlp(tmp_path / "fp8")) as checkpoint:
        assert sorted(checkpoint) == sorted(checkpoint.keys()) == ["down", "norm.bias", "norm.weight", "up"]
        assert "up" in checkpoint and "nothing" not in checkpoint and checkpoint["up.bias"].shape == (256,)
        assert isinstance(checkpoint["up"], PackedWeight) and checkpoint["norm.weight"].shape == (128,)
        with pytest.raises(qdsl.CheckpointError, match=r"no weight '7'; there are '\w+', '\w+', 'norm.bias', 'norm'"):
            checkpoint["7"]


X = torch.ones(4, 128)


@pytest.mark.parametrize("use", [
    lambda: X @ PACKED, lambda: PACKED @ X, lambda: PACKED.t(), lambda: PACKED.T, lambda: PACKED * 2, lambda: 2 * PACKED,
    lambda: X - PACKED,
    lambda: nn.Parameter(PACKED), lambda: PACKED.float(), lambda: PACKED[0], lambda: list(PACKED)])
def test_methods_and_operators_of_tensors_say_what_to_call(use: Any) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"PackedWeight.*`packed\.format\.linear"):
        use()
    assert PACKED and not hasattr(PACKED, "detach") and PACKED.format.linear(X, PACKED).shape == (4, 64)
    with pytest.raises(AttributeError, match=r"^a PackedWeight has no attribute 'nothing'$"):
        _ = PACKED.nothing
