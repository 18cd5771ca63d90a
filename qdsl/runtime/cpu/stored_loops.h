/* Loops over weights as they are stored, written once; printed decode functions complete them (printed.py):

       SCALARS    steps [first, last) of row n:              USE_ONE(row, column, weight, is there)
       VECTORS    the same, or those of LANES rows from n:   USE(number, row, column, place, weight)

   TILE: rows of a unit.  STEP, COLUMNS: units and columns of a step of VECTORS; STEP_ONE, COLUMNS_ONE: of SCALARS.  MULTIPLE: of
   K, for whole steps.  M: rows of x; 0 to decode, when `out` is w [N, K].  place: of a weight in the order of use. */
#define PARAMETERS const uint8_t *const *tensors, const float *x, const float *ordered, float *restrict out, int64_t N, int64_t K, \
    int64_t first, int64_t last, int64_t units
enum { MANY = 4 * LANES };                                       /* columns of a tile of rows, at least: a few cache lines */

/* Steps whose units and columns all are there. */
#define WHOLE(step, columns) ((columns) == 0 ? 0 : units / (step) < K / ((columns) + !(columns)) ? units / (step) : K / ((columns) + !(columns)))

/* -- row by row -------------------------------------------------------------------------------------------------------------- */

#define USE_ONE(row, column, weight, is_there) if (is_there) w[(row) * step + (column)] = weight
INLINE void decode_steps(const uint8_t *const *tensors, float *restrict w, int64_t step, int64_t n, int64_t N, int64_t K,
                         int64_t first, int64_t last, int64_t units, const int whole) {
SCALARS
}
#undef USE_ONE
static void decode_whole(const uint8_t *const *tensors, float *w, int64_t step, int64_t n, int64_t N, int64_t K, int64_t first,
                         int64_t last, int64_t units) {
    decode_steps(tensors, w, step, n, N, K, first, last, units, 1);
}
/* Steps of row n, of which the last one may be short; w: column 0. */
static void decode(const uint8_t *const *tensors, float *w, int64_t step, int64_t n, int64_t N, int64_t K, int64_t first, int64_t last,
                   int64_t units) {
    const int64_t whole = n * TILE + TILE > N ? 0 : WHOLE(STEP_ONE, COLUMNS_ONE), end = last < whole ? last : whole;
    if (first < end) decode_whole(tensors, w, step, n, N, K, first, end, units);
    if (end < last) decode_steps(tensors, w, step, n, N, K, first < end ? end : first, last, units, 0);
}

INLINE void add_row(const float *x, const float *w, int64_t count, float *to) {
    vf a[4] = {{0}};
    int64_t k = 0;
    for (; k + 4 * LANES <= count; k += 4 * LANES)
        for (int i = 0; i < 4; i++)
            a[i] = multiply_add(vload_float32((const uint8_t *)(w + k + i * LANES)),
                                vload_float32((const uint8_t *)(x + k + i * LANES)), a[i]);
    for (; k + LANES <= count; k += LANES)
        a[0] = multiply_add(vload_float32((const uint8_t *)(w + k)), vload_float32((const uint8_t *)(x + k)), a[0]);
    float rest = 0;
    for (; k < count; k++) rest += w[k] * x[k];
    *to += sum(a[0] + a[1] + (a[2] + a[3])) + rest;
}

/* sums += steps of row n times x, by weights that are decoded into a buffer. */
#define CHUNK (COLUMNS_ONE > 1024 ? 1 : 1024 / COLUMNS_ONE)
static void add_steps(const uint8_t *const *tensors, const float *x, float *sums, int64_t n, int64_t N, int64_t K, int64_t first,
                      int64_t last, int64_t units) {
    float w[TILE * CHUNK * COLUMNS_ONE];
    for (int64_t i = first; i < last; i += CHUNK) {
        const int64_t end = i + CHUNK < last ? i + CHUNK : last, k = i * COLUMNS_ONE;
        const int64_t count = end * COLUMNS_ONE < K ? end * COLUMNS_ONE - k : K - k;
        decode(tensors, w - k, CHUNK * COLUMNS_ONE, n, N, K, i, end, units);
        for (int m = 0; m < M; m++)
            for (int r = 0; r < TILE; r++) add_row(x + m * K + k, w + r * CHUNK * COLUMNS_ONE, count, &sums[m * TILE + r]);
    }
}

#define STEPS ((units + STEP_ONE - 1) / STEP_ONE)
INLINE void row_alone(PARAMETERS, int64_t n, int64_t start) {    /* from a step of SCALARS on */
#if M
    float sums[M * TILE] = {0};
    add_steps(tensors, x, sums, n, N, K, start, STEPS, units);
    for (int m = 0; m < M; m++)
        for (int r = 0; r < TILE && n * TILE + r < N; r++) out[m * N + n * TILE + r] += sums[m * TILE + r];
#else
    decode(tensors, out + n * TILE * K, K, n, N, K, start, STEPS, units);
#endif
}

/* -- in vectors -------------------------------------------------------------------------------------------------------------- */

#if !HAS_VECTORS
void run(PARAMETERS) {
    for (int64_t n = first; n < last; n++) {
        for (int m = 0; m < M; m++) memset(out + m * N + n * TILE, 0, TILE * sizeof *out);
        row_alone(tensors, x, ordered, out, N, K, first, last, units, n, 0);
    }
}

#else
/* Sums of a row, one after the other: additions take four cycles. */
enum { EACH = USES / TILE * (ALONG_ROWS ? 1 : LENGTH / LANES), SUMS = TILE * M > 4 ? 1 : EACH < 4 ? EACH : 4 };
INLINE vf joined(const vf *sums) {
    vf value = sums[0];
    for (int i = 1; i < SUMS; i++) value += sums[i];
    return value;
}
#endif

#if HAS_VECTORS && ALONG_ROWS                                    /* lanes are rows */
#if M
#define USE(number, row, column, place, weight) { \
        const vf value = weight; \
        for (int m = 0; m < M; m++) \
            a[m][row][number / TILE % SUMS] = multiply_add(value, all_float(x[m * K + (column)]), a[m][row][number / TILE % SUMS]); \
    }
#else
#define USE(number, row, column, place, weight) store(tile + ((column) - start) * TILE * LANES + (row) * LANES, weight);
#endif
#define AFTER(column)
INLINE void steps_of_rows(const uint8_t *const *tensors, const float *x, vf (*a)[TILE][SUMS], float *restrict tile, int64_t start, int64_t n,
                          int64_t N, int64_t K, int64_t first, int64_t last, int64_t units) {
    const int whole = 1;
VECTORS
}
void run(PARAMETERS) {
    const int64_t steps = WHOLE(STEP, COLUMNS);
    int64_t n = first;
    for (; n + LANES <= last && (n + LANES) * TILE <= N; n += LANES) {
#if M
        vf a[M][TILE][SUMS];
        for (int i = 0; i < M * TILE * SUMS; i++) a[i / TILE / SUMS][i / SUMS % TILE][i % SUMS] = (vf){0};
        steps_of_rows(tensors, x, a, 0, 0, n, N, K, 0, steps, units);
        for (int m = 0; m < M; m++) for (int r = 0; r < TILE; r++) {
            const vf sums = joined(a[m][r]);
            for (int i = 0; i < LANES; i++) out[m * N + (n + i) * TILE + r] = sums[i];
        }
#else
        enum { COUNT = COLUMNS < MANY ? (MANY + COLUMNS - 1) / COLUMNS : 1 };
        float tile[COUNT * COLUMNS * TILE * LANES];
        for (int64_t i = 0; i < steps; i += COUNT) {
            const int64_t end = i + COUNT < steps ? i + COUNT : steps, at = i * COLUMNS, count = (end - i) * COLUMNS;
            steps_of_rows(tensors, x, 0, tile, at, n, N, K, i, end, units);
            for (int r = 0; r < TILE; r++) {
                float *to = out + (n * TILE + r) * K + at;
                int64_t c = 0;
                for (; c + LANES <= count; c += LANES)
                    transpose(to + c, TILE * K, tile + c * TILE * LANES + r * LANES, TILE * LANES);
                for (; c < count; c++) for (int j = 0; j < LANES; j++) to[j * TILE * K + c] = tile[(c * TILE + r) * LANES + j];
            }
        }
#endif
        if (steps * STEP < units)
            for (int i = 0; i < LANES; i++) row_alone(tensors, x, ordered, out, N, K, first, last, units, n + i, steps * (STEP / STEP_ONE));
    }
    for (; n < last; n++) {
        for (int m = 0; m < M; m++) for (int r = 0; r < TILE && n * TILE + r < N; r++) out[m * N + n * TILE + r] = 0;
        row_alone(tensors, x, ordered, out, N, K, first, last, units, n, 0);
    }
}

#elif HAS_VECTORS                                                /* lanes are columns */
#define SUM(number) ((number / TILE + USES / TILE * own) % SUMS)
#if M
#define USE(number, row, column, place, weight) { \
        const vf value = weight; \
        for (int m = 0; m < M; m++) \
            a[m][row][SUM(number)] = multiply_add(value, vload_float32((const uint8_t *)(ordered + m * K + (PLACE(column, place)))), \
                                                  a[m][row][SUM(number)]); \
    }
#define AFTER(column)
#elif TURNS                                                      /* neighbours are weights of TURNS uses in turn */
#define USE(number, row, column, place, weight) store(turns[number] + (place) % LENGTH, weight);
#define AFTER(column) \
    for (int i = 0; i < LENGTH; i++) for (int j = 0; j < TURNS; j++) w[(column) + TURNS * i + j] = turns[turn[j]][i];
#else
#define USE(number, row, column, place, weight) store(w + (row) * K + (column), weight);
#define AFTER(column)
#endif
#if ORDERED
#define PLACE(column, place) place
void arrange(const float *x, float *ordered, int64_t K) {
    for (int64_t k = 0; k + COLUMNS <= K; k += COLUMNS)
        for (int i = 0; i < COLUMNS; i++) ordered[k + i] = x[k + order[i]];
}
#else
#define PLACE(column, place) column
#endif
INLINE void steps_of_row(const uint8_t *const *tensors, const float *ordered, vf (*a)[TILE][SUMS], float *restrict w, int64_t n, int64_t N,
                         int64_t K, int64_t first, int64_t last, int64_t units) {
    const int whole = 1;
#if TURNS
    float turns[TURNS][LENGTH];
#endif
VECTORS
}
void run(PARAMETERS) {
    for (int64_t n = first; n < last; n++) {
        const int64_t steps = n * TILE + TILE > N ? 0 : WHOLE(STEP, COLUMNS);
#if M
        vf a[M][TILE][SUMS];
        for (int i = 0; i < M * TILE * SUMS; i++) a[i / TILE / SUMS][i / SUMS % TILE][i % SUMS] = (vf){0};
        steps_of_row(tensors, ordered, a, 0, n, N, K, 0, steps, units);
        for (int m = 0; m < M; m++)
            for (int r = 0; r < TILE && n * TILE + r < N; r++) out[m * N + n * TILE + r] = sum(joined(a[m][r]));
#else
        steps_of_row(tensors, x, 0, out + n * TILE * K, n, N, K, 0, steps, units);
#endif
        if (steps * STEP < units) row_alone(tensors, x, ordered, out, N, K, first, last, units, n, steps * (STEP / STEP_ONE));
    }
}
#endif
