/* Prepares x [K] for products of codes, in steps of COLUMNS columns.

   First the columns in the order of use.  Then by step two vectors for all PLACES lanes of scales and offsets: the scales of x,
   where that has 8 bits, and the sums of x over the columns of a lane, times its factor.  Where ROUNDS_X
   is 2, the rounded x come last, as floats in their own order. */
#if ROUNDS_X
void arrange(const float *x, int8_t *codes, int64_t K) {
    float *vectors = (float *)(codes + K);
#if ROUNDS_X == 2
    float *rounded = vectors + K / COLUMNS * 2 * PLACES;
#endif
    for (int64_t step = 0; step < K / COLUMNS; step++, codes += COLUMNS, vectors += 2 * PLACES) {
        float d[COLUMNS / 32];
        int8_t q[COLUMNS];
        int32_t sums[PLACES] = {0};
        for (int b = 0; b < COLUMNS / 32; b++, x += 32) {
            vi all = {0};                                        /* magnitudes as integers: NaN is the largest */
            for (int i = 0; i < 32; i += LANES) {
                const vi bits = vload_int32((const uint8_t *)(x + i)) & 0x7FFFFFFF;
                all = select_int(bits > all, bits, all);
            }
            const float most = bits_to_float(largest(all));
            const vf inverse = all_float(most > 0 ? 127 / most : 0);
            d[b] = most / 127;
            for (int i = 0; i < 32; i += LANES) {
                const vi whole = to_int(vload_float32((const uint8_t *)(x + i)) * inverse);
                const vc part = __builtin_convertvector(whole, vc);
#if ROUNDS_X == 2
                store(rounded, to_float(whole) * all_float(d[b])), rounded += LANES;
#endif
                memcpy(q + 32 * b + i, &part, sizeof part);
            }
        }
        for (int i = 0; i < COLUMNS; i += SIDE_BY_SIDE) memcpy(codes + i, q + order[i], SIDE_BY_SIDE);
        for (int i = 0; i < COLUMNS; i += 4 * LANES) {
            const vi four = small_dot((vb){0} + (uint8_t)1, vload_bytes((const uint8_t *)codes + i));
            for (int j = 0; j < LANES; j++) sums[slots[i / 4 + j]] += four[j];
        }
        for (int i = 0; i < PLACES; i++) {
            vectors[i] = d[blocks[i]];
            vectors[PLACES + i] = factors[i] * sums[sources[i]];
        }
    }
}
#else
void arrange(const float *x, float *ordered, int64_t K) {
    float *vectors = ordered + K;
    for (int64_t step = 0; step < K / COLUMNS; step++, x += COLUMNS, ordered += COLUMNS, vectors += 2 * PLACES) {
        float sums[PLACES] = {0};
        for (int i = 0; i < COLUMNS; i++) ordered[i] = x[order[i]];
        for (int i = 0; i < COLUMNS; i += 4 * LANES) {
            vf four = {0};
            for (int j = 0; j < 4; j++) four += vload_float32((const uint8_t *)(ordered + i + j * LANES));
            for (int j = 0; j < LANES; j++) sums[slots[i / 4 + j]] += four[j];
        }
        for (int i = 0; i < PLACES; i++) vectors[PLACES + i] = factors[i] * sums[sources[i]];
    }
}
#endif
