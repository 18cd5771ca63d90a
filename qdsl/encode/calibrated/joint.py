"""Codes of a few columns each, of which every column reads some bits, and not every combination of values has a code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.encode.calibrated.affine import decoded, field_number, filled
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_fields

MOST_CODES = 1 << 16
MOST_COMBINATIONS = 1 << 18
BEAM = 4                                                         # with 16, the loss is 2 % less on the layer of the tests


@dataclass(frozen=True, slots=True)
class JointCodes:
    """Codes of `columns`, [codes of a block, columns of each], within blocks of `step` columns.

    values: float32 [blocks, rows, values], which all columns of a block have.  joint [values, values, ...]: the code of each
    combination of places among the values, -1 without one.  places [K, rows]: those of weights, which `choose` fills in.  dtype:
    that of codes.
    """

    field: str
    columns: Tensor
    step: int
    values: Tensor
    joint: Tensor
    places: Tensor
    dtype: torch.dtype

    @property
    def codes(self) -> Tensor:
        """The codes [rows, blocks, codes of a block] of all places."""
        of_columns = self.places.view(len(self.values), self.step, -1)[:, self.columns].long()
        return self.joint[of_columns.unbind(2)].permute(2, 0, 1).to(self.dtype)

    def order(self, sizes: Tensor) -> Tensor:
        """The columns [K], those of a code together, codes with the largest of sizes [K] first."""
        own = torch.arange(len(sizes), dtype=torch.int64, device=sizes.device).view(-1, self.step)[:, self.columns].flatten(0, 1)
        return own[sizes[own].amax(1).argsort(descending=True, stable=True)].flatten()

    def choose(self, columns: Tensor, old: Tensor, slopes: Tensor, inner: Tensor, pivots: Tensor) -> Tensor:
        """Choose the codes of some columns in order, as `levels.Vectors.choose` does."""
        changes, width = torch.empty_like(slopes), self.columns.shape[1]
        for start in range(0, len(columns), width):
            run = slice(start, start + width)
            self.places[columns[run]], changes[run] = self._search(
                self.values[int(columns[start]) // self.step], old[run], slopes[run], inner[run, run], pivots[run])
            slopes[run.stop:].addmm_(inner[run, run.stop:].T, changes[run], alpha=-1)
        return changes

    def _search(self, values: Tensor, old: Tensor, slopes: Tensor, inner: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
        """(places, changes) [columns, rows] of one code: column by column the BEAM best beginnings that have a code."""
        rows, count = values.shape
        costs, changes = values.new_zeros(rows, 1), values.new_zeros(rows, 1, 0)
        places = torch.zeros(rows, 1, 0, dtype=torch.int64, device=values.device)
        for column, pivot in enumerate(pivots.tolist()):
            wanted = (old[column] + slopes[column])[:, None] - changes @ inner[:column, column]
            trials = costs[..., None] + pivot * (values[:, None] - wanted[..., None]).square()
            exists = (self.joint >= 0).flatten(column + 1).any(-1) if column + 1 < len(pivots) else self.joint >= 0
            trials.masked_fill_(~exists[places.unbind(2)], torch.inf)
            costs, best = trials.flatten(1).topk(min(BEAM, trials[0].numel()), largest=False)
            before, place = (best // count)[..., None], best % count
            change = values.gather(1, place) - old[column][:, None]
            changes = torch.cat([changes.take_along_dim(before, 1), change[..., None]], 2)
            places = torch.cat([places.take_along_dim(before, 1), place[..., None]], 2)
        return places[:, 0].T.to(torch.int8), changes[:, 0].T


def joint_codes(packed: PackedWeight, fields: Mapping[str, Tensor]) -> JointCodes | None:
    """The field of codes that columns share by their bits, before any is chosen; None for other formats."""
    kinds, (n, k) = packed.variant.fields, packed.shape
    names = [name for name in fields if [axis.dim for axis in kinds[name].axes] == ["N", "K", "1"]]
    bits, is_float = field_number(packed, names[0]) if len(names) == 1 else (0, True)
    if is_float or 1 << bits > MOST_CODES:
        return None
    name, count = names[0], fields[names[0]].shape[2]
    step = k // fields[name].shape[1]
    alone = {other: values.flatten()[:1] for other, values in fields.items()}
    alone |= {other: torch.ones_like(values) for other, values in alone.items() if values.is_floating_point()}

    def of_block(codes: Tensor) -> Tensor:
        """What a block decodes to for codes [trials, codes of a block]."""
        shapes = {other: (len(codes), *(1 for _ in kinds[other].axes[1:])) for other in fields if other != name}
        trial = {other: alone[other].view([1] * len(shape)).expand(shape) for other, shape in shapes.items()}
        out = torch.empty(len(codes), step, dtype=torch.float32, device=codes.device)
        decode_fields(packed.variant, {**trial, name: codes[:, None].to(fields[name].dtype).contiguous()}, packed.sizes, out)
        return out

    every = torch.arange(1 << bits, dtype=torch.int32, device=fields[name].device)
    values, places = of_block(every[:, None].expand(-1, count)).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    single = torch.diag_embed((1 << every[:bits])[:, None].expand(-1, count))         # [bits, code, codes of a block]
    reads = (of_block(single.flatten(0, 1)) != of_block(torch.zeros_like(single[0, :1]))).view(bits, count, step).any(0)
    width = step // count
    if bool((reads.sum(1) != width).any()) or len(values) ** width > MOST_COMBINATIONS:
        return None
    columns = reads.nonzero()[:, 1].view(count, width)
    combinations = places[:, columns]                            # [codes, codes of a block, columns of each]
    if bool((combinations != combinations[:, :1]).any()):
        return None
    joint = torch.full([len(values)] * width, -1, dtype=torch.int32, device=every.device)
    joint[combinations[:, 0].unbind(1)] = every
    of_place = [decoded(packed, {**fields, name: filled(fields[name], every[places[:, columns[0, 0]] == place][0])})
                for place in range(len(values))]
    own = torch.stack(of_place, -1)[:, int(columns[0, 0])::step].transpose(0, 1).contiguous()
    return JointCodes(name, columns, step, own, joint, torch.full((k, n), -1, dtype=torch.int8, device=every.device),
                      fields[name].dtype)
