"""Known answers of every format: stored bytes, fields, weights and what quantize chooses, kept bit for bit in files.

`pytest tests/formats/test_answers.py --bless` writes the files anew, after a second reading of the specs has come to the same
answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.schema import parse
from tests.support.answers import FOLDER, MEND, differences, kept, weights
from tests.support.blessing import Disagreement, make, plan, prove_decoded, prove_quantized, prove_stored, reading, text
from tests.support.formats import SPECS, cases, module, random_packed


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_answers(path: Path, bless: bool) -> None:
    if bless:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{path.stem}.json").write_text(text(make(path)))
    wanted = [(case.storage, params, optional) for case, params, optional in plan(path)]
    kept_cases = [(case["storage"], case["params"], "absent" not in case) for case in kept(path.stem)["cases"]]
    assert kept_cases == wanted, f"the known answers are not those of the storages and parameters that {path.name} has: {MEND}"
    wrong = list(differences(kept(path.stem), module(path).FORMAT))
    assert not wrong, f"{wrong[0]} than the known answers have; if {path.name} is meant to mean something else now, {MEND}"


def test_every_file_belongs_to_a_spec() -> None:
    stems = {path.stem for path in SPECS}
    assert [file.name for file in FOLDER.iterdir() if file.stem not in stems] == []


def changed(spec: Spec, old: str, new: str) -> Spec:
    """The spec with another text in one place."""
    assert spec.source.text.count(old) == 1
    return parse(spec.source.text.replace(old, new))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("decode: d * (q - 8)", "decode: d * (q - 7)", "dequantize differs"),
    ("q[l]  q[l + 16]", "q[l + 16]  q[l]", "unpack reads 'blocks' otherwise"),
    ("divisor=-8", "divisor=-7", "quantize.* chooses another 'q'"),
])
def test_what_a_second_reading_does_not_confirm_is_not_blessed(old: str, new: str, message: str) -> None:
    """The code of q4_0 against the second reading of a spec that is not quite q4_0's."""
    case = next(case for case in cases() if case.path.stem == "q4_0")
    read = replace(reading(case, {}, (4, 64)), spec=changed(case.spec, old, new))
    packed = random_packed(case, read.shape)
    weight = weights(read.shape, 1, *read.span(), 0.0625)
    with pytest.raises(Disagreement, match=message):
        fields, _ = prove_stored(read, packed)
        prove_decoded(read, packed, fields)
        prove_quantized(read, case.module.quantize(weight), weight, {})
