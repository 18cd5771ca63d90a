/* The loops over interleaved rows that row_groups.h describes, written once; the compiler's functions complete them. */

/* M: rows of x.  A loop that reads codes once keeps them out of the L2 cache, where the rest of the program has its data.  Intel's
   processors fetch them at half the speed then: there all go to the L2 cache. */
INLINE void prefetch_block(const uint8_t *block, const int M) {
    for (int i = 0; i < BLOCK_BYTES; i += 64)
#ifdef INTEL
        __builtin_prefetch(block + AHEAD + i, 0, 2);
#else
        if (LANES == GROUP_ROWS && M < 4) __builtin_prefetch(block + AHEAD + i, 0, 0);
        else __builtin_prefetch(block + AHEAD + i);
#endif
}

/* The LANES numbers of columns 8j + 2c + e of a block, for one c. */
INLINE void part_numbers(const Weight *w, const uint8_t *block, int c, vf q[4][2]) {
    const Words v = words(block, c);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) q[i >> 1][i & 1] = number(w, codes_of(v, i >> 1, i & 1));
}

/* The results of LANES rows of w for M rows of x. */
INLINE void store_rows(const Weight *w, Place at, const vf *total, float *out, int64_t N, const int M) {
    const int64_t row = at.group * GROUP_ROWS + at.lane;
    for (int m = 0; m < M; m++)
        for (int i = 0; i < LANES && row + i < w->rows; i++) out[m * N + row + i] = total[m][i];
}

/* -- dot: M rows of x, 1 to 4, times exact weights ------------------------------------------------------------------------

   out[m] += scale * sum of number * x + offset * sum of x, group by group, in float32.  Four sums, one for each j, because an
   addition takes four cycles. */
#define SUMS 4
#define JOIN(p) ((p[0] + p[1]) + (p[2] + p[3]))

INLINE void add_group(const Weight *w, Place at, int64_t k, const vf (*p)[SUMS], int first, int last, const float *sums,
                      int64_t step, vf *total, const int M) {
    vf scale, offset;
    group(w, at, k, &scale, &offset);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        total[m] = multiply_add(last - first == SUMS ? JOIN(p[m]) : p[m][first] + p[m][first + 1], scale, total[m]);
#ifdef HAS_OFFSET
        total[m] = multiply_add(offset, all_float(sums[m * step + (SPAN ? k / SPAN : 0)]), total[m]);
#endif
    }
}

/* x of bfloat16 times numbers that bfloat16 holds, two products in one instruction, which takes subnormal numbers for 0.  No number
   of x below LEAST is multiplied so: products and sums of the others are far from subnormal numbers. */
#define LEAST 0x1p-100f
#define PAIRS(K) ((K) / 2 + 1)                                   /* numbers that pairs take after those of `arrange` */
#if defined(BRAIN_NUMBERS) && LANES == 16 && defined(__AVX512BF16__)
#define HAS_PAIRS 1
/* The numbers of codes, 32 in a vector, of which instructions look up 32 or 64.  They repeat those of fewer codes. */
typedef struct { __m512i part[BITS == 8 ? 4 : BITS > 5 ? 2 : 1]; } Table;
INLINE Table table_of(const Weight *w) {
    Table t;
    const vu first = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (unsigned i = 0; i < sizeof t.part / sizeof *t.part; i++)
        t.part[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)number(w, first + 32 * i + 16), (__m512)number(w, first + 32 * i));
    return t;
}

/* The numbers of columns 8j + 2c and 8j + 2c + 1 in the halves of a word.  Bits above those of a code are another's. */
INLINE __m512bh pair_numbers(const Table *t, Words v, int j) {
    const __m512i codes = (__m512i)(BITS > 4 ? (j & 1 ? v.high : v.low) >> 8 * (j >> 1) : v.low >> 4 * j);
#if BITS == 8                                                    /* floats, whose highest bit is the sign */
    const __m512i low = _mm512_permutex2var_epi16(t->part[0], codes, t->part[1]);
    const __m512i high = _mm512_permutex2var_epi16(t->part[2], codes, t->part[3]);
    const __m512i size = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), high);
    return (__m512bh)_mm512_or_si512(size, _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(128)), 8));
#elif BITS > 5
    return (__m512bh)_mm512_permutex2var_epi16(t->part[0], codes, t->part[1]);
#else
    return (__m512bh)_mm512_permutexvar_epi16(codes, t->part[0]);
#endif
}
INLINE vf add_pairs(vf sum, __m512bh numbers, float pair) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, numbers, (__m512bh)_mm512_set1_ps(pair));
}
#else
#define HAS_PAIRS 0
typedef struct { char unused; } Table;
INLINE Table table_of(const Weight *w) { return (Table){0}; }
#endif

/* p[m][j] += number * x of columns 8j + 2c + e of a block.  x: of the block, as numbers or as pairs. */
INLINE void add_part(const Weight *w, const Table *t, const uint8_t *block, const float *x, int64_t step, int c, vf (*p)[SUMS],
                     const int M, const int are_pairs) {
#if HAS_PAIRS
    if (are_pairs) {
        const Words v = words(block, c);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512bh pair = pair_numbers(t, v, j);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) p[m][j] = add_pairs(p[m][j], pair, x[m * step + 4 * j + c]);
        }
        return;
    }
#endif
    vf q[4][2];
    part_numbers(w, block, c, q);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
            p[m][i >> 1] = multiply_add(q[i >> 1][i & 1], all_float(x[m * step + 8 * (i >> 1) + 2 * c + (i & 1)]), p[m][i >> 1]);
}

INLINE void dot_rows(const Weight *w, const float *x, int64_t step, float *out, int64_t N, Place at, const int M,
                     const int are_pairs) {
    const int64_t K = w->columns, span = SPAN < BLOCK ? SPAN ? BLOCK : K : SPAN;
    const float *sums = x + K, *own = are_pairs ? x + step - PAIRS(K) : x;
    const Table t = table_of(w);
    const uint8_t *block = w->codes + at.group * (K / BLOCK) * BLOCK_BYTES + 4 * at.lane;
    vf total[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) total[m] = (vf){0};
    for (int64_t k = 0; k < K;) {
        vf p[M][SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < M * SUMS; i++) p[i / SUMS][i % SUMS] = (vf){0};
        const int64_t start = k, end = k + span < K ? k + span : K;
        do {
            prefetch_block(block, M);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) add_part(w, &t, block, own + (are_pairs ? k / 2 : k), step, c, p, M, are_pairs);
            k += BLOCK, block += BLOCK_BYTES;
        } while (k < end && !SHORT_GROUPS);
#if SHORT_GROUPS
        add_group(w, at, start, p, 0, 2, sums, step, total, M);
        add_group(w, at, start + 16, p, 2, 4, sums, step, total, M);
#else
        add_group(w, at, start, p, 0, 4, sums, step, total, M);
#endif
    }
    store_rows(w, at, total, out, N, M);
}

/* A row of x as `run` takes it: with zeros up to whole blocks, and, for weights with offsets, its sums in every group. */
void arrange(const float *x, float *arranged, int64_t K) {
    const int64_t columns = (K + BLOCK - 1) / BLOCK * BLOCK;
    memcpy(arranged, x, K * sizeof *x);
    for (int64_t k = K; k < columns; k++) arranged[k] = 0;
#ifdef HAS_OFFSET
    const int64_t span = SPAN ? SPAN : columns;
    float *sums = arranged + columns;
    for (int64_t k = 0; k < columns; k += span) {
        const int64_t end = k + span < columns ? k + span : columns;
        vf s = {0};
        for (int64_t i = k; i < end; i += LANES) s += vload_float32((const uint8_t *)(arranged + i));
        *sums++ = sum(s);
    }
#endif
}

/* x [M, K] times groups of rows [first, last): out [M, N].  ordered: M rows of x, with `step` numbers each. */
INLINE void run_rows(const Weight *w, const float *ordered, int64_t step, float *restrict out, int64_t N, int64_t first,
                     int64_t last, int64_t M, const int are_pairs) {
    for (int64_t g = first; g < last; g++) for (int lane = 0; lane < GROUP_ROWS; lane += LANES) {
        const Place at = {g, lane};
        int64_t m = 0;
        for (; m + 4 <= M; m += 4) dot_rows(w, ordered + m * step, step, out + m * N, N, at, 4, are_pairs);
        if (M - m == 3) dot_rows(w, ordered + m * step, step, out + m * N, N, at, 3, are_pairs);
        if (M - m == 2) dot_rows(w, ordered + m * step, step, out + m * N, N, at, 2, are_pairs);
        if (M - m == 1) dot_rows(w, ordered + m * step, step, out + m * N, N, at, 1, are_pairs);
    }
}

INLINE int64_t arranged_size(int64_t columns) {
#ifdef HAS_OFFSET
    columns += SPAN ? (columns + SPAN - 1) / (SPAN ? SPAN : 1) : 1;
#endif
    return columns;
}

/* ordered: what `arrange` made of x, or x.  units: M. */
void run(const void *const *tensors, const float *x, const float *ordered, float *restrict out, int64_t N, int64_t K,
         int64_t first, int64_t last, int64_t units) {
    const Weight *w = tensors[0];
    run_rows(w, ordered, arranged_size(w->columns), out, N, first, last, units, 0);
}

#if HAS_PAIRS
INLINE int is_small_number(float value) { return value != 0 && value > -LEAST && value < LEAST; }

/* As `arrange`, then x in pairs of bfloat16, which it is exact in, and whether all pairs may be multiplied. */
void arrange_pairs(const float *x, float *arranged, int64_t K) {
    const int64_t columns = (K + BLOCK - 1) / BLOCK * BLOCK;
    float *pairs = arranged + arranged_size(columns);
    int is_small = 0;
    arrange(x, arranged, K);
    for (int64_t p = 0; p < columns / 2; p++) {
        const float low = arranged[2 * p], high = arranged[2 * p + 1];
        is_small |= is_small_number(low) | is_small_number(high);
        pairs[p] = bits_to_float(float_to_bits(low) >> 16 | float_to_bits(high));
    }
    pairs[columns / 2] = !is_small;
}

/* As `run`.  ordered: what `arrange_pairs` made of x. */
void run_pairs(const void *const *tensors, const float *x, const float *ordered, float *restrict out, int64_t N, int64_t K,
               int64_t first, int64_t last, int64_t units) {
    const Weight *w = tensors[0];
    const int64_t step = arranged_size(w->columns) + PAIRS(w->columns);
    int are_pairs = 1;
    for (int64_t m = 0; m < units; m++) are_pairs &= ordered[(m + 1) * step - 1] != 0;
    if (are_pairs) run_rows(w, ordered, step, out, N, first, last, units, 1);
    else run_rows(w, ordered, step, out, N, first, last, units, 0);
}
#endif

/* -- dot with x in 8 bits ---------------------------------------------------------------------------------------------------

   A lane's word has four codes as bytes, which one instruction multiplies by four of x: those of columns 2c + 8h + 16b + e, in
   byte 2e + b.  A block of x has 32 integers in that order, then its scale d, and d times the sums of both halves. */
#ifdef BASE
typedef struct { float d, sums[2]; } Scale;
#define HALF 0x00FF00FF                                          /* bytes of the first 16 columns of a block */

INLINE vb block_bytes(Words v, int h) {
#if BITS > 4
    return bytes_of_codes((vb)(h ? v.high : v.low));
#else
    return bytes_of_codes((vb)(v.low >> 4 * h & 0x0F0F0F0F));
#endif
}

INLINE void dot_bytes(const Weight *w, const float *x, int64_t step, float *out, int64_t N, Place at, const int M) {
    const int64_t K = w->columns;
    const uint8_t *block = w->codes + at.group * (K / BLOCK) * BLOCK_BYTES + 4 * at.lane;
    vf total[M], scale[2], offset[2];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) total[m] = (vf){0};
    for (int64_t k = 0; k < K; k += BLOCK, block += BLOCK_BYTES) {
        vi p[M][2];
        prefetch_block(block, M);
        if (SPAN ? k % (SPAN ? SPAN : 1) < BLOCK : !k) group(w, at, k, &scale[0], &offset[0]);
        if (SHORT_GROUPS) group(w, at, k + 16, &scale[1], &offset[1]);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) p[m][0] = p[m][1] = (vi){0};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const vb bytes = block_bytes(words(block, i >> 1), i & 1);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const vb four = (vb)all_int(load_int32((const uint8_t *)(x + m * step) + k + 4 * i));
                if (SHORT_GROUPS) {
                    p[m][0] = add_dot(p[m][0], (vb)((vu)bytes & HALF), four);
                    p[m][1] = add_dot(p[m][1], (vb)((vu)bytes & ~HALF), four);
                } else p[m][i & 1] = add_dot(p[m][i & 1], bytes, four);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            Scale s;
            memcpy(&s, x + m * step + K / 4 + k / BLOCK * 3, sizeof s);
            for (int half = 0; half < 1 + SHORT_GROUPS; half++) {
                const float sum = SHORT_GROUPS ? s.sums[half] : s.sums[0] + s.sums[1];
                const vi products = SHORT_GROUPS ? p[m][half] : p[m][0] + p[m][1];
                const vf value = multiply_add(to_float(products), all_float(s.d), all_float(BASE * sum));
                total[m] = multiply_add(value, scale[half] * UNIT, total[m]);
#ifdef HAS_OFFSET
                total[m] = multiply_add(offset[half], all_float(sum), total[m]);
#endif
            }
        }
    }
    store_rows(w, at, total, out, N, M);
}

/* A row of x rounded to 8 bits, with a scale for every block of 32 columns. */
void arrange_bytes(const float *x, float *arranged, int64_t K) {
    const int64_t columns = (K + BLOCK - 1) / BLOCK * BLOCK;
    int8_t *bytes = (int8_t *)arranged;
    for (int64_t k = 0; k < columns; k += BLOCK, bytes += BLOCK) {
        float part[BLOCK] = {0};
        int32_t whole[BLOCK];
        memcpy(part, x + k, (K - k < BLOCK ? K - k : BLOCK) * sizeof *part);
        vi all = {0};                                            /* magnitudes as integers: NaN is the largest */
        for (int i = 0; i < BLOCK; i += LANES) {
            const vi bits = vload_int32((const uint8_t *)(part + i)) & 0x7FFFFFFF;
            all = select_int(bits > all, bits, all);
        }
        const float most = bits_to_float(largest(all));
        const vf inverse = all_float(most > 0 ? 127 / most : 0);
        for (int i = 0; i < BLOCK; i += LANES) {
            const vi rounded = to_int(vload_float32((const uint8_t *)(part + i)) * inverse);
            memcpy(whole + i, &rounded, sizeof rounded);
        }
        int32_t sums[2] = {0};
        for (int i = 0; i < BLOCK; i++) {
            const int c = i >> 3, h = i >> 2 & 1, e = i >> 1 & 1, b = i & 1;
            sums[i >> 4] += whole[i];
            bytes[i] = (int8_t)whole[2 * c + 8 * h + 16 * b + e];
        }
        const Scale s = {most / 127, {most / 127 * sums[0], most / 127 * sums[1]}};
        memcpy(arranged + columns / 4 + k / BLOCK * 3, &s, sizeof s);
    }
}

/* As `run`.  ordered: what `arrange_bytes` made of x. */
void run_bytes(const void *const *tensors, const float *x, const float *ordered, float *restrict out, int64_t N, int64_t K,
               int64_t first, int64_t last, int64_t units) {
    const Weight *w = tensors[0];
    const int64_t step = w->columns / 4 + w->columns / BLOCK * 3;
    for (int64_t g = first; g < last; g++) for (int lane = 0; lane < GROUP_ROWS; lane += LANES) {
        const Place at = {g, lane};
        int64_t m = 0;
        for (; m + 4 <= units; m += 4) dot_bytes(w, ordered + m * step, step, out + m * N, N, at, 4);
        for (; m < units; m++) dot_bytes(w, ordered + m * step, step, out + m * N, N, at, 1);
    }
}
#endif

/* -- gemm: many rows of x -------------------------------------------------------------------------------------------------

       panel: 32 rows of w, DEPTH columns, decoded       part: rows of x times 32; in registers while k runs over the panel
         [pair of columns][32 rows]  bfloat16 pairs          32 rows in tiles of 16 x 16 (AMX), 12 rows x 2 vectors (AVX-512)
         [column][32 rows]           float32                  6 rows x 2 vectors of 8 (AVX2)

   A weight is decoded once for MOST rows of x.  A panel fits the first cache (32 KB).  TILES of w meet a part of x while the L2
   cache has it.  `part` has the sums of the panels before.  All are on the stack, of 290 KB, so that a loop needs no memory. */
#define TILE_ROWS 32
#define TILES 4
#define DEPTH 512                                                /* of bfloat16; half as many of float32 */
#define MOST 512
#define SPACE 64                                                 /* bytes after a row of x, see arrange_* */
enum { AT_ONCE = LANES == 16 ? 12 : 6 };

/* Numbers of groups in a block: of its first 16 columns, and of the others. */
typedef struct { vf scale[2], offset[2]; } Groups;
INLINE Groups block_groups(const Weight *w, Place at, int64_t k) {
    Groups g = {0};
    group(w, at, k, &g.scale[0], &g.offset[0]);
    g.scale[1] = g.scale[0], g.offset[1] = g.offset[0];
#if SHORT_GROUPS
    group(w, at, k + 16, &g.scale[1], &g.offset[1]);
#endif
    return g;
}

/* The weights of columns 8j + 2c + e of a block, for one c. */
INLINE void part_weights(const Weight *w, const Groups *g, const uint8_t *block, int c, vf q[4][2]) {
    part_numbers(w, block, c, q);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        vf *a = &q[i >> 1][i & 1];
#ifdef HAS_OFFSET
        *a = multiply_add(*a, g->scale[i >> 2], g->offset[i >> 2]);
#else
        *a = *a * g->scale[i >> 2];
#endif
    }
}
INLINE const uint8_t *block_at(const Weight *w, Place at, int64_t k) {
    return w->codes + (at.group * (w->columns / BLOCK) + k / BLOCK) * BLOCK_BYTES + 4 * at.lane;
}

/* Where a product ends: rows of out, with bias, rounded to bfloat16 if `narrow`. */
typedef struct { void *out; const float *bias; int64_t N; int narrow; } Target;

typedef uint16_t vbrains __attribute__((vector_size(2 * LANES)));
INLINE vbrains to_brains(vf value) {                             /* to nearest even */
    const vu bits = (vu)value, rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16;
    return __builtin_convertvector((vu)select_int(value != value, all_int(0x7FC0), (vi)rounded), vbrains);
}
#define SOON 8                                                   /* rows between a store and its prefetch */
INLINE void finish(const Weight *w, const Target *t, const float *part, int64_t M, int64_t row) {
    const int64_t count = w->rows - row < TILE_ROWS ? w->rows - row : TILE_ROWS, size = t->narrow ? 2 : 4;
    float bias[TILE_ROWS] = {0};
    if (t->bias) memcpy(bias, t->bias + row, count * sizeof *bias);
    for (int64_t m = 0; m < M; m++) {
        uint8_t *to = (uint8_t *)t->out + (m * t->N + row) * size;
        for (int i = 0; i < count * size; i += 64) __builtin_prefetch(to + SOON * t->N * size + i, 1);
        for (int i = 0; i < count; i += LANES, to += LANES * size) {
            const int64_t bytes = (count - i < LANES ? count - i : LANES) * size;
            const vf value = vload_float32((const uint8_t *)(part + m * TILE_ROWS + i)) + vload_float32((const uint8_t *)(bias + i));
            const vbrains brains = to_brains(value);
            if (bytes == LANES * size && t->narrow) memcpy(to, &brains, sizeof brains);
            else if (bytes == LANES * size) memcpy(to, &value, sizeof value);
            else memcpy(to, t->narrow ? (const void *)&brains : &value, bytes);
        }
    }
}

/* R rows of float32 x, `step` numbers each, times LANES * 2 rows of a panel. */
INLINE void multiply_floats(const float *x, int64_t step, const float *panel, int64_t depth, float *part, const int R) {
    vf a[R][2];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * R; i++) a[i / 2][i % 2] = vload_float32((const uint8_t *)(part + i / 2 * TILE_ROWS + i % 2 * LANES));
    for (int64_t k = 0; k < depth; k++) {
        const vf low = vload_float32((const uint8_t *)(panel + k * TILE_ROWS));
        const vf high = vload_float32((const uint8_t *)(panel + k * TILE_ROWS + LANES));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const vf value = all_float(x[r * step + k]);
            a[r][0] = multiply_add(low, value, a[r][0]), a[r][1] = multiply_add(high, value, a[r][1]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * R; i++) store(part + i / 2 * TILE_ROWS + i % 2 * LANES, a[i / 2][i % 2]);
}

#define EACH_ROW(multiply, panel, part) do { \
    int64_t m = 0; \
    for (; m + AT_ONCE <= M; m += AT_ONCE) multiply(x + m * step, step, panel, depth, part + m * TILE_ROWS, AT_ONCE); \
    for (; m + 4 <= M; m += 4) multiply(x + m * step, step, panel, depth, part + m * TILE_ROWS, 4); \
    for (; m < M; m++) multiply(x + m * step, step, panel, depth, part + m * TILE_ROWS, 1); \
} while (0)

/* A function of its own, so that all vector registers are for sums. */
static __attribute__((noinline)) void multiply_wide(const float *x, int64_t step, const float *panel, int64_t depth, float *part, int64_t M) {
    for (int lane = 0; lane < TILE_ROWS; lane += 2 * LANES) EACH_ROW(multiply_floats, panel + lane, part + lane);
}

#if LANES == 16 && defined(__AVX512BF16__)
#define HAS_BRAINS 1
INLINE void store_pairs(uint32_t *to, vf low, vf high) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(order), both));
}

#ifdef __AMX_TILE__
/* How tiles lie in the matrix unit's registers: 8 of 16 rows of 64 bytes. */
typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } Shapes;
INLINE void set_tiles(void) {
    Shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    _tile_loadconfig(&shapes);
}

/* 1 or 2 tiles of rows of bfloat16 x times a panel: sums in registers 0 to 3, x in 4 and 5, weights in 6 and 7. */
INLINE void multiply_tiles(const uint16_t *x, int64_t step, const uint32_t *panel, int64_t depth, float *part, const int R) {
    enum { STRIDE = 4 * TILE_ROWS };
    float *low = part + 16 * TILE_ROWS;
    { _tile_loadd(0, part, STRIDE); _tile_loadd(1, part + 16, STRIDE); }
    if (R == 2) { _tile_loadd(2, low, STRIDE); _tile_loadd(3, low + 16, STRIDE); }
    for (int64_t k = 0; k < depth; k += BLOCK, panel += BLOCK / 2 * TILE_ROWS) {
        { _tile_loadd(6, panel, STRIDE); _tile_loadd(7, panel + 16, STRIDE); }
        { _tile_stream_loadd(4, x + k, 2 * step); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); }
        if (R == 2) { _tile_stream_loadd(5, x + 16 * step + k, 2 * step); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
    }
    { _tile_stored(0, part, STRIDE); _tile_stored(1, part + 16, STRIDE); }
    if (R == 2) { _tile_stored(2, low, STRIDE); _tile_stored(3, low + 16, STRIDE); }
}

#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")         /* GCC does not know it of _tile_loadd */
INLINE void multiply_brains(const uint16_t *x, int64_t step, const uint32_t *panel, int64_t depth, float *part, int64_t M) {
    int64_t m = 0;
    MEMORY_IS_READ;
    set_tiles();
    for (; m + 16 < M; m += 32) multiply_tiles(x + m * step, step, panel, depth, part + m * TILE_ROWS, 2);
    if (m < M) multiply_tiles(x + m * step, step, panel, depth, part + m * TILE_ROWS, 1);
    _tile_release();
    MEMORY_IS_READ;
}
#else
/* R rows of bfloat16 x times a panel: products of pairs, added in float32. */
INLINE void multiply_rows(const uint16_t *x, int64_t step, const uint32_t *panel, int64_t depth, float *part, const int R) {
    __m512 a[R][2];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * R; i++) a[i / 2][i % 2] = _mm512_loadu_ps(part + i / 2 * TILE_ROWS + i % 2 * 16);
    for (int64_t k = 0; k < depth; k += 2, panel += TILE_ROWS) {
        const __m512bh low = (__m512bh)_mm512_load_si512(panel), high = (__m512bh)_mm512_load_si512(panel + 16);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32(load_int32((const uint8_t *)(x + r * step + k)));
            a[r][0] = _mm512_dpbf16_ps(a[r][0], low, value), a[r][1] = _mm512_dpbf16_ps(a[r][1], high, value);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * R; i++) _mm512_storeu_ps(part + i / 2 * TILE_ROWS + i % 2 * 16, a[i / 2][i % 2]);
}
static __attribute__((noinline)) void multiply_brains(const uint16_t *x, int64_t step, const uint32_t *panel, int64_t depth,
                                                      float *part, int64_t M) {
    EACH_ROW(multiply_rows, panel, part);
}
#endif
#else
#define HAS_BRAINS 0
INLINE void store_pairs(uint32_t *to, vf low, vf high) {}
INLINE void multiply_brains(const uint16_t *x, int64_t step, const uint32_t *panel, int64_t depth, float *part, int64_t M) {}
#endif

/* Columns [start, start + depth) of the weights of a tile.  Those of missing rows stay. */
INLINE void decode_panel(const Weight *w, int64_t tile, int64_t start, int64_t depth, uint32_t *panel, const int narrow) {
    for (int lane = 0; lane < TILE_ROWS; lane += LANES) {
        const Place at = {2 * tile + lane / GROUP_ROWS, lane % GROUP_ROWS};
        for (int64_t k = 0; k < depth && at.group * GROUP_ROWS < w->rows; k += BLOCK) {
            const uint8_t *block = block_at(w, at, start + k);
            const Groups g = block_groups(w, at, start + k);
            uint32_t *to = panel + (narrow ? k / 2 : k) * TILE_ROWS + lane;
            prefetch_block(block, MOST);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                vf q[4][2];
                part_weights(w, &g, block, c, q);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    if (narrow) store_pairs(to + (4 * j + c) * TILE_ROWS, q[j][0], q[j][1]);
                    else {
                        store((float *)to + (8 * j + 2 * c) * TILE_ROWS, q[j][0]);
                        store((float *)to + (8 * j + 2 * c + 1) * TILE_ROWS, q[j][1]);
                    }
            }
        }
    }
}

/* M rows of x, at most MOST, times `count` tiles. */
INLINE void multiply(const Weight *w, const void *all, int64_t M, int64_t tile, int64_t count, const Target *t, const int narrow) {
    const int64_t K = w->columns, most = narrow ? DEPTH : DEPTH / 2, panels = (K + most - 1) / most;
    const int64_t even = (K / BLOCK + panels - 1) / (panels ? panels : 1) * BLOCK, step = K + SPACE / (narrow ? 2 : 4);
    uint32_t panel[DEPTH / 2 * TILE_ROWS] __attribute__((aligned(64))) = {0};
    float part[TILES][MOST * TILE_ROWS] __attribute__((aligned(64)));
    for (int i = 0; i < count; i++) memset(part[i], 0, (M + 15) / 16 * 16 * TILE_ROWS * sizeof(float));
    for (int64_t start = 0; start < K; start += even) for (int i = 0; i < count; i++) {
        const int64_t depth = K - start < even ? K - start : even;
        decode_panel(w, tile + i, start, depth, panel, narrow);
        if (narrow) multiply_brains((const uint16_t *)all + start, step, panel, depth, part[i], M);
        else multiply_wide((const float *)all + start, step, (const float *)panel, depth, part[i], M);
    }
    for (int i = 0; i < count; i++) finish(w, t, part[i], M, (tile + i) * TILE_ROWS);
}

/* As `run`, for many rows: tiles of 32 rows.  tensors: the weight and the bias, or NULL.  ordered: what arrange_* made of x, in
   memory for a multiple of 16 rows.  out: bfloat16 if x is.

   arrange_*: a row of x, zeros up to whole blocks, and space: rows whose distance is a multiple of 4096 bytes would have the
   same lines of the first cache. */
#define GEMM(name, type, narrow) \
    void gemm_##name(const void *const *tensors, const void *x, const void *ordered, void *restrict out, int64_t N, int64_t K, \
                     int64_t first, int64_t last, int64_t units) { \
        const Weight *w = tensors[0]; \
        for (int64_t m = 0; m < units; m += MOST) { \
            const Target t = {(type *)out + m * N, tensors[1], N, narrow}; \
            for (int64_t tile = first; tile < last; tile += TILES) \
                multiply(w, (const type *)ordered + m * (w->columns + SPACE / sizeof(type)), units - m < MOST ? units - m : MOST, \
                         tile, last - tile < TILES ? last - tile : TILES, &t, narrow); \
        } \
    } \
    void arrange_##name(const type *x, type *arranged, int64_t K) { \
        memcpy(arranged, x, K * sizeof *x); \
        memset(arranged + K, 0, (K + BLOCK - 1) / BLOCK * BLOCK * sizeof *x - K * sizeof *x + SPACE); \
    }
#if HAS_BRAINS
GEMM(bfloat16, uint16_t, 1)
#endif
GEMM(float32, float, 0)

/* -- placement --------------------------------------------------------------------------------------------------------------- */

/* Codes [rows, columns], a byte each, as blocks: groups of rows [first, last).  Missing rows and columns are zeros. */
void interleave(const uint8_t *codes, uint8_t *out, int64_t rows, int64_t columns, int64_t count) {
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    for (int64_t g = 0; g < count; g++) for (int64_t b = 0; b < blocks; b++, out += BLOCK_BYTES) {
        uint8_t t[BLOCK][GROUP_ROWS] = {{0}};
        for (int r = 0; r < GROUP_ROWS && g * GROUP_ROWS + r < rows; r++) {
            const uint8_t *row = codes + (g * GROUP_ROWS + r) * columns + b * BLOCK;
            const int64_t left = columns - b * BLOCK;
            for (int i = 0; i < BLOCK && i < left; i++) t[i][r] = row[i];
        }
        for (int lane = 0; lane < GROUP_ROWS; lane += LANES) {
            vu w[8] = {{0}};
#pragma GCC unroll 32
            for (int i = 0; i < BLOCK; i++) {
                const int j = i >> 3, c = i >> 1 & 3, e = i & 1, s = 16 * e + 4 * j;
                const vu code = (vu)vload_uint8(t[i] + lane) & (BITS == 8 ? 255 : MASK);
#if BITS == 8
                w[2 * c + (j & 1)] |= code << 16 * e + 8 * (j >> 1);
#else
                const vu high = BITS & 4 ? code >> 4 : code;     /* what planes of 2 and 1 bits hold */
                if (BITS & 4) w[c] |= (code & 15) << s;
                if (BITS & 2) w[(BITS & 4) + c / 2] |= (high & 3) << s + 2 * (c & 1);
                if (BITS & 1) w[BITS - 1] |= (high >> (BITS & 2) & 1) << s + c;
#endif
            }
            for (int i = 0; i < BITS; i++) memcpy(out + 4 * (GROUP_ROWS * i + lane), &w[i], sizeof w[i]);
        }
    }
}
