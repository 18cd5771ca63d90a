/* A product by strips of rows, whose sums stay in a cache, and by runs of columns, which share scales of the weight.

   Of one block of x all units are read side by side, a few cache lines of each, while those of the next block are fetched.

   RUN: columns of a run.  STEP: rows of tiles, as one iteration takes them.  STRIP: steps of a strip.  TILE: rows of a tile.
   SUMS: vectors of sums of a step.  ROWS: of x.  BLOCKS: blocks of x whose scales, then sums, lie side by side. */
$signature
{
    enum {$sizes};
    $tensors
    const uint8_t *q[ROWS];
    const float *d[ROWS], *rounded = ordered + K / 4 + K / 16;
    for (int m = 0; m < ROWS; m++) {
        q[m] = (const uint8_t *)(ordered + ARRANGED * K * m);
        d[m] = (const float *)(q[m] + K);
        memset(out + N * m + first * TILE, 0, (last - first) * TILE * sizeof *out);
    }
#define SCALE(column) (column) / (32 * BLOCKS) * (2 * BLOCKS) + (column) / 32 % BLOCKS
    vf totals[STRIP * SUMS * ROWS] = {0};
    for (int64_t start = first / STEP; start < last / STEP; start += STRIP) {
        const int64_t stop = start + STRIP < last / STEP ? start + STRIP : last / STEP;
        for (int64_t g = 0; g < K / RUN; g++) {
            for (int b = 0; b < RUN / 32; b++) {
                const int64_t column = RUN * g + 32 * b;
                for (int64_t step = start; step < stop; step++) {
                    vf *t = totals + (step - start) * (SUMS * ROWS);
                    vi s[SUMS * ROWS] = {0};
                    $products
#pragma GCC unroll 64
                    for (int i = 0; i < SUMS * ROWS; i++)
                        t[i] = multiply_add(to_float(s[i]), all_float(d[i % ROWS][SCALE(column)]), t[i]);
                }
            }
            float sums[ROWS] = {0};                              /* of x in this run */
            for (int m = 0; m < ROWS; m++)
                for (int64_t column = RUN * g; column < RUN * (g + 1); column += 32)
                    sums[m] += d[m][SCALE(column)] * d[m][SCALE(column) + BLOCKS];
            for (int64_t step = start; step < stop; step++) {
                vf *t = totals + (step - start) * (SUMS * ROWS);
                $scaled
                memset(t, 0, SUMS * ROWS * sizeof *t);
            }
        }
    }
    $tail
}
