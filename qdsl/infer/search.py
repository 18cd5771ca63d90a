"""Searches for codes: in the packed tensor, between headers and trailers of its rows, and in planes of bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from qdsl.infer.elements import RECORDS, CodeSections, Element, cut_planes, cut_regions, cut_row_ends, join_tensors
from qdsl.infer.equal import match_equal_values
from qdsl.infer.fit import Blocks, fit_codes
from qdsl.infer.grids import solve_grid_rows
from qdsl.infer.labels import Values, labelings
from qdsl.infer.lookup import match_stored_tables
from qdsl.infer.numbers import Field
from qdsl.infer.records import Record, row_end
from qdsl.infer.solve import Solution, solve
from qdsl.infer.text import looked_up
from qdsl.infer.tiles import Labels, Layout, StoredBytes, Tile, candidate_tiles, match_layout
from qdsl.infer.vectors import stored_vectors


def search(packed: str, elements: Mapping[str, Element], values: Values) -> Solution | None:
    """The fields and the formula of the first cut and labeling of the values [N, K] that give a layout and a meaning."""
    search = _Search(packed, elements, values)
    ways = (search.search_stored_tables, lambda: stored_vectors(packed, elements, values), search.search_records,
            lambda: solve_grid_rows(packed, elements, values), search.search_equal_values,
            search.search_planes, search.search_regions)
    return next((solution for way in ways if (solution := way()) is not None), None)


class _Search:
    """The search in one packed tensor, given the other tensors and the decoded values."""

    def __init__(self, packed: str, elements: Mapping[str, Element], values: Values) -> None:
        self.packed, self.elements, self.values = packed, elements, values
        self.shape = (values.shape[0], values.shape[1])
        self.most_bits = 8 * len(elements[packed].stored.data) / values.size
        self.ends = list(cut_row_ends(packed, elements[packed], self.shape))
        self.cut: dict[CodeSections, StoredBytes] = {}
        self.refused: set[tuple[CodeSections, Tile, int, bytes]] = set()  # several labelings have the same layout

    def search_stored_tables(self) -> Solution | None:
        """Searches for codes into a table that another tensor holds."""
        others = {name: element for name, element in self.elements.items() if name != self.packed}
        for labels, levels in match_stored_tables(self.values, others, self.most_bits):
            for cut in (CodeSections(((self.packed, None),)), *self._planes(labels.bits)):
                layout = match_layout([(self._stored(cut), labels)])
                if layout is not None:
                    code = self._code_fields(cut, layout, f"u{labels.bits}")
                    return Solution((*code, levels), looked_up(levels, code[0], self.shape))
        return None

    def search_records(self) -> Solution | None:
        """Searches for codes in the whole tensor, or between headers and trailers of its rows."""
        cuts = [CodeSections(((self.packed, None),)), *self.ends]
        return self._first_solution(labelings(self.values, self.most_bits), lambda labels: cuts)

    def search_equal_values(self) -> Solution | None:
        """Searches for codes by comparing equal weights, for formats whose blocks choose the meaning of a code."""
        for cut in (CodeSections(((self.packed, None),)), *self.ends):
            for columns in RECORDS:
                layout = match_equal_values(self._stored(cut), self.values, columns)
                solution = None if layout is None else self._solve_layout(cut, self._stored(cut), layout)
                if solution is not None and not solution.problems:
                    return solution
        return None

    def search_planes(self) -> Solution | None:
        """Searches for codes whose bits are spread over regions, parts of rows, or tensors."""
        cuts = [*join_tensors(self.packed, self.elements, self.shape)]
        sizes = [sum(len(part.data) for part in self._stored(cut).parts) for cut in cuts]
        most_bits = max([self.most_bits, *(8 * size / self.values.size for size in sizes)])
        return self._first_solution((labels for labels in labelings(self.values, most_bits) if not labels.top),
                                    lambda labels: [*self._planes(labels.bits), *cuts])

    def search_regions(self) -> Solution | None:
        """Searches for codes before or after other numbers in the same tensor."""
        cuts = list(cut_regions(self.packed, self.elements[self.packed], self.shape))
        return self._first_solution(labelings(self.values, self.most_bits), lambda labels: cuts) if cuts else None

    def _planes(self, bits: int) -> Iterator[CodeSections]:
        return cut_planes(self.packed, self.elements[self.packed], self.shape, bits)

    def _stored(self, cut: CodeSections) -> StoredBytes:
        if cut not in self.cut:
            self.cut[cut] = cut.join_sections(self.elements, self.shape[0])
        return self.cut[cut]

    def _first_solution(self, labelings: Iterable[Labels],
                        cuts_of: Callable[[Labels], Iterable[CodeSections]]) -> Solution | None:
        for labels in labelings:
            for cut in cuts_of(labels):
                solution = self._solve_labels(cut, labels)
                if solution is not None:
                    return solution
        return None

    def _solve_labels(self, cut: CodeSections, labels: Labels) -> Solution | None:
        stored = self._stored(cut)
        layout = match_layout([(stored, labels)], self._tiles_of_cut(cut, stored))
        if layout is None or (key := (cut, layout.tile, layout.bits, layout.source.tobytes())) in self.refused:
            return None
        self.refused.add(key)
        return self._solve_layout(cut, stored, layout)

    def _solve_layout(self, cut: CodeSections, stored: StoredBytes, layout: Layout) -> Solution | None:
        """The meaning of codes with this layout, and the fields of their numbers."""
        codes = layout.read_codes(stored, self.shape)
        while layout.bits > 1 and not (codes & 1).any():
            layout, codes = layout.without_low_bit(), codes >> 1
        meaning = fit_codes(codes, self.values, layout.bits)
        if meaning is None:
            return None
        name, section = cut.codes[0]
        records = [Record(name, section, stored, layout, self.shape)] if len(cut.codes) == 1 else []
        records += [row_end(name, one, self.elements[name], self.shape) for one in cut.ends]
        holders = {name for name, part in cut.codes if part is None or part.by_rows}
        others = {name: element for name, element in self.elements.items() if name not in holders}
        return solve(self._code_fields(cut, layout, meaning.kind), meaning, codes, self.values, others, records)

    def _tiles_of_cut(self, cut: CodeSections, stored: StoredBytes) -> list[Tile] | None:
        """The tiles that codes may have, without whole rows if rows may have headers or trailers; None for all tiles."""
        if cut.ends:
            return [tile for tile in candidate_tiles(self.shape, stored) if tile.is_row]
        if self.ends and self.most_bits % 1:
            return [tile for tile in candidate_tiles(self.shape, stored) if tile.columns < self.shape[1]]
        return None

    def _code_fields(self, cut: CodeSections, layout: Layout, kind: str) -> list[Field]:
        """The codes as one field per part of the cut."""
        fields, start = [], 0
        for (name, section), part in zip(cut.codes, self._stored(cut).parts, strict=True):
            stop = start + 8 * len(part.data) // math.prod(layout.tile.grid(self.shape))
            piece = Layout(layout.tile, layout.bits, layout.source[start:stop])
            fields.append(Field("q", kind, Blocks(1, 1), name, piece, section=section))
            start = stop
        return fields
