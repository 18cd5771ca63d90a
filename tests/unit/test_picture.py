"""Pictures of records: a screen for each storage, in which nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from qdsl.compiler.emit.show import page, picture
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.schema import load
from qdsl.core import places

NAMES = ("q4_k", "q3_k", "iq2_xs", "iq1_s", "iq3_xxs", "tq1_0", "int4pack", "int_group", "ocp_mxfp6", "fix4")
SCREEN = 1000                                                    # pixels of height


def storages(name: str) -> Iterator[Program]:
    """The first program of each storage."""
    programs = page.distinct_layouts(compile_spec(load(places.find_spec(name))))
    yield from {program.storage: program for program in reversed(programs)}.values()


@pytest.mark.parametrize("name", NAMES)
def test_a_storage_is_a_screen_and_folds_lose_no_row(name: str) -> None:
    for program in storages(name):
        [height] = re.findall(r'height="(\d+)" font', picture.svg_picture([program]))
        assert int(height) <= SCREEN, program.storage
        for tensor in program.tensors:
            every = picture.record_rows(tensor)
            folds = list(picture._repeated_rows(every))
            assert sum(len(fold.rows) * fold.times for fold in folds) == len(every)
            assert [fold.last for fold in folds][-1] == every[-1].last
            starts = [fold.rows[0].first for fold in folds]
            assert starts == [0, *(fold.last + 1 for fold in folds[:-1])]


def test_repeated_bytes_are_drawn_once() -> None:
    [program] = [program for program in storages("iq2_xs") if program.storage == "gguf"]
    folds = list(picture._repeated_rows(picture.record_rows(program.tensors[0])))
    assert [(len(fold.rows), fold.times) for fold in folds] == [(1, 1), (2, 32), (1, 1)]
    assert folds[1].change == "g +1, s +1"


def test_the_order_of_lanes_is_a_grid_of_all_columns() -> None:
    [planar] = [program for program in storages("q4_k") if program.storage == "planar"]
    cells = re.findall(r'font-size="9" text-anchor="middle">(\d+)<', picture.svg_picture([planar]))
    assert cells[:8] == ["0", "8", "16", "24", "1", "9", "17", "25"]     # the eight codes of a lane's first word
    assert sorted(map(int, cells)) == list(range(128))
