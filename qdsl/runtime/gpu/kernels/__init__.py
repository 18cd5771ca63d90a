"""The kernel families (runtime/gpu/families): one hand-written kernel each, completed by short functions of a format.

A format's functions are constants of a launch (runtime/weight/matrix_unit.py), so that every format has a kernel
of its own:

- decode(tensors, n, u, live, N, K, sizes, use, state): `state` after use(state, k, w, live, row) for each weight of unit u in
  row n of tiles, for kernels that decode unit by unit; `row` is left out where it is 0
- words(tensors, row, K, chunk, more): the words of 128 columns of two rows; defined in bitplanes.py
- numbers(words, half, i, digit, to, flip, F): pairs of codes of these words as numbers; bitplanes.py has one per code type
- table(g, N, F): the words of the lookup table of codes; those of a stored table are loaded (codebook.stored_table)
- scale(fields, sum, ones, BASE, total): a group's share of the result, plus `total` unless that is None, in multiply-adds.
  fields: the group's numbers, such as its scale.  sum: codes times x.  ones: the sum of x.  BASE: the difference of numbers
  and codes; None if the zero point was already subtracted
- finish(fields, sum, ones, BASE): the same for fields that all columns of a row share; group_sums.py has the common ones

The lanes that need a group's numbers depend on the family, so a format never loads numbers.  It lists them as GroupFields
(runtime/weight/layout.py), and the family loads them by its own `field(plane, at, rows, columns, kind)`.  A number is shared by
`rows` rows and `columns` columns, by all if that is 0; `kind` is how it is stored (group_numbers.number).
"""
