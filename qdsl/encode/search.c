/* Searches, 16 lanes at a time.  Those of search.py, which says what they find and why in this order, have a block in each lane.

   Arrays are [elements, blocks].  Every operation is rounded by itself, and sums add one element after the other, as there. */
#include <stdint.h>
#include <string.h>
#define LANES 16
#define MOST 64                                                  /* elements of a block */
#define EACH for (int64_t i = 0; i < elements; i++)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

static inline vf all(float value) { return value - (vf){0}; }
static inline vf pick(vi mask, vf yes, vf no) { return (vf)((vi)yes & mask | (vi)no & ~mask); }
static inline vf magnitude(vf value) { return (vf)((vi)value & 0x7FFFFFFF); }

static inline vf code(vf value, float low, float high) {         /* the nearest integer as ggml takes it from the bits, cut */
    const vi bits = (vi)(value + 12582912.0f);
    const vf nearest = __builtin_convertvector((bits & 0x7FFFFF) - 0x400000, vf);
    const vf above = pick(nearest < low, all(low), nearest);
    return pick(above > high, all(high), above);
}

static inline void load(vf *lanes, const float *from, int64_t elements, int64_t blocks, int64_t first) {
    const int64_t count = blocks - first < LANES ? blocks - first : LANES;
    EACH { lanes[i] = (vf){0}; memcpy(lanes + i, from + i * blocks + first, 4 * count); }
}

static inline void save(float *to, vf lanes, int64_t blocks, int64_t first) {
    memcpy(to + first, &lanes, 4 * (blocks - first < LANES ? blocks - first : LANES));
}

static inline vf error(const vf *x, const vf *weights, const vf *codes, vf scale, vf low, int64_t elements, int magnitudes) {
    vf total = {0};
    EACH {
        const vf difference = codes[i] * scale + low - x[i];
        total += weights[i] * (magnitudes ? magnitude(difference) : difference * difference);
    }
    return total;
}

void fit_counts(const float *values /* elements * blocks */, const float *counts /* elements * blocks */, int64_t elements,
                int64_t blocks, float high, const float *tops /* trials */, int64_t trials, int magnitudes,
                float *scales /* blocks */, float *lows /* blocks */, float *shifts /* blocks */, float *inverses /* blocks */) {
    for (int64_t first = 0; first < blocks; first += LANES) {
        vf x[MOST], weights[MOST], codes[MOST];
        load(x, values, elements, blocks, first);
        load(weights, counts, elements, blocks, first);
        vf top = x[0], low = x[0], sum_w = weights[0], sum_x = weights[0] * x[0];
        for (int64_t i = 1; i < elements; i++) {
            top = pick(x[i] > top, x[i], top);
            low = pick(x[i] < low, x[i], low);
            sum_w += weights[i];
            sum_x += weights[i] * x[i];
        }
        low = pick(low > 0, all(0), low);
        const vi flat = top == low;
        vf span = pick(flat, all(1), top - low), inverse = high / span, scale = 1 / inverse, shift = low;
        EACH codes[i] = code((x[i] - low) * inverse, 0, high);
        vf best = error(x, weights, codes, scale, low, elements, magnitudes);
        for (int64_t trial = 0; trial < trials; trial++) {
            const vf tried = tops[trial] / span;
            vf sum_l = {0}, sum_l2 = {0}, sum_xl = {0};
            EACH {
                codes[i] = code((x[i] - low) * tried, 0, high);
                const vf product = weights[i] * codes[i];
                sum_l += product;
                sum_l2 += product * codes[i];
                sum_xl += product * x[i];
            }
            const vf d = sum_w * sum_l2 - sum_l * sum_l, exact = (sum_l2 * sum_x - sum_l * sum_xl) / d;
            const vf new_scale = pick(exact > 0, sum_xl / sum_l2, (sum_w * sum_xl - sum_x * sum_l) / d);
            const vf new_low = pick(exact > 0, all(0), exact);
            const vf errors = error(x, weights, codes, new_scale, new_low, elements, magnitudes);
            const vi better = d > 0 & errors < best & ~flat;
            inverse = pick(better, tried, inverse);
            shift = pick(better, low, shift);
            best = pick(better, errors, best);
            scale = pick(better, new_scale, scale);
            low = pick(better, new_low, low);
            span = pick(better, top - low, span);
        }
        save(scales, pick(flat, all(0), scale), blocks, first);
        save(lows, low, blocks, first);
        save(shifts, shift, blocks, first);
        save(inverses, pick(flat, all(0), inverse), blocks, first);
    }
}

void fit_signed(const float *values /* elements * blocks */, const float *counts /* elements * blocks */, int64_t elements,
                int64_t blocks, float low, float high, const float *ends /* trials */, int64_t trials,
                float *scales /* blocks */, float *inverses /* blocks */) {
    for (int64_t first = 0; first < blocks; first += LANES) {
        vf x[MOST], weights[MOST], most = {0}, extreme = {0}, inverse = {0}, scale = {0}, best = {0};
        load(x, values, elements, blocks, first);
        load(weights, counts, elements, blocks, first);
        EACH {
            const vi more = magnitude(x[i]) > most;
            most = pick(more, magnitude(x[i]), most);
            extreme = pick(more, x[i], extreme);
        }
        const vi tiny = most < 1e-15f;
        extreme = pick(tiny, all(1), extreme);
        for (int64_t trial = 0; trial < trials; trial++) {
            const vf tried = ends[trial] / extreme;
            vf sum_lx = {0}, sum_l2 = {0};
            EACH {
                const vf l = code(x[i] * tried, low, high);
                sum_lx += weights[i] * x[i] * l;
                sum_l2 += weights[i] * l * l;
            }
            const vf fitted = pick(sum_l2 != 0, sum_lx / sum_l2, all(0));
            const vi better = trial ? sum_l2 > 0 & sum_lx * sum_lx > best * sum_l2 : (vi){0} == 0;
            inverse = pick(better, tried, inverse);
            scale = pick(better, fitted, scale);
            best = pick(better, fitted * sum_lx, best);
        }
        save(scales, pick(tiny, all(0), scale), blocks, first);
        save(inverses, pick(tiny, all(0), inverse), blocks, first);
    }
}

static inline vf neighbours(const float *p) { vf value; memcpy(&value, p, sizeof value); return value; }

/* For each group the first column of the largest linear - factor * square, and that number; false where one is NaN. */
int best_rows(const float *linear /* groups * columns */, const float *square /* groups * columns */,
              const float *factor /* groups */, int64_t groups, int64_t columns, int64_t *chosen /* groups */,
              float *gain /* groups */) {
    vi wrong = {0};
    for (int64_t g = 0; g < groups; g++, linear += columns, square += columns) {
        vf by = factor[g] - (vf){0}, best = -__builtin_inff() - (vf){0};
        vi at = {0}, place = {0};
        for (int64_t c = 0; c < columns; c += LANES, place += LANES) {
            vf value = neighbours(linear + c) - neighbours(square + c) * by;
            vi more = value > best;
            best = (vf)((vi)value & more | (vi)best & ~more);
            at = place & more | at & ~more;
            wrong |= value != value;
        }
        int first = 0;
        for (int i = 1; i < LANES; i++)
            if (best[i] > best[first] || (best[i] == best[first] && at[i] + i < at[first] + first)) first = i;
        chosen[g] = at[first] + first;
        gain[g] = linear[chosen[g]] - square[chosen[g]] * factor[g];
    }
    for (int i = 0; i < LANES; i++) if (wrong[i]) return 0;
    return 1;
}

static inline vi larger(vi a, vi b) { const vi more = a > b; return a & more | b & ~more; }
#ifdef __clang__
#define EXCHANGE(a, by) __builtin_shufflevector(a, a, 0 ^ by, 1 ^ by, 2 ^ by, 3 ^ by, 4 ^ by, 5 ^ by, 6 ^ by, 7 ^ by, 8 ^ by, 9 ^ by, \
                                                10 ^ by, 11 ^ by, 12 ^ by, 13 ^ by, 14 ^ by, 15 ^ by)
#else
#define EXCHANGE(a, by) __builtin_shuffle(a, (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ by)
#endif
static inline int32_t largest(vi a) {                            /* the largest lane */
    a = larger(a, EXCHANGE(a, 8));
    a = larger(a, EXCHANGE(a, 4));
    a = larger(a, EXCHANGE(a, 2));
    return larger(a, EXCHANGE(a, 1))[0];
}

/* The number of largest magnitude of a block, of which NaN is one, and of equals the first; without its sign, or with it. */
static inline float extreme(const float *values, int64_t columns, int with_sign) {
    vi above = {0}, below = {0};                                 /* bits without a sign, of which larger ones are larger numbers */
    for (int64_t k = 0; k < columns; k += LANES) {
        const vi bits = (vi)neighbours(values + k);
        above = larger(bits, above), below = larger(bits ^ INT32_MIN, below);
    }
    const int32_t high = largest(above), low = largest(below), top = high > low ? high : low;
    int32_t bits = with_sign && low > high ? top | INT32_MIN : top;
    for (int64_t k = 0; with_sign && low == high && k < columns; k++) {
        memcpy(&bits, values + k, sizeof bits);
        if ((bits & INT32_MAX) == top) break;
    }
    float number;
    memcpy(&number, &bits, sizeof number);
    return number + 0.0f;
}

/* The scale of each block of neighbours, its largest magnitude / divisor, and the codes of values in units of it.  up: codes are
   floor(value + (offset + 0.5)); else ties go away from zero.  lost: the value where 1 / scale overflows. */
void scaled_codes(const float *values /* blocks * columns */, int64_t blocks, int64_t columns, float divisor, int with_sign,
                  int offset, int low, int high, int up, int lost, float *scales /* blocks */, uint8_t *codes /* blocks * columns */) {
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    const vf least = all((float)(low - offset)), most = all((float)(high - offset)), half = all(0.5f - 0x1p-25f);
    for (int64_t block = 0; block < blocks; block++, values += columns, codes += columns) {
        const float scale = extreme(values, columns, with_sign) / divisor, inverse = scale == 0 ? 0 : 1 / scale;
        const int is_lost = __builtin_isinf(inverse);
        scales[block] = scale;
        for (int64_t k = 0; k < columns; k += LANES) {
            vf x = is_lost ? all(lost) : neighbours(values + k) * inverse;
            x = pick(x < least, least, x);
            x = pick(x > most, most, x);
            if (up) x += offset + 0.5f;
            else x += pick(x > half, half, pick(x < -half, -half, x));
            vi whole = __builtin_convertvector(x, vi);
            whole += up ? __builtin_convertvector(whole, vf) > x : offset - (vi){0};
            const vb bytes = __builtin_convertvector(whole, vb);
            memcpy(codes + k, &bytes, sizeof bytes);
        }
    }
}

#define COLUMNS 128

/* The places in rising `values` of columns in order, of weights first + factor * values[place].

   old: the weights before.  slopes: by how much their loss falls with them.  inner: by what a change of a column lessens the slopes
   of those that follow; a slope is 0 after a change of slope / inner's diagonal. */
void choose_columns(const float *old /* columns * rows */, float *slopes /* columns * rows */,
                    const float *inner /* columns * columns */, const float *first /* columns * rows */,
                    const float *factor /* columns * rows */, const float *borders /* choices - 1 */,
                    const float *values /* choices */, int64_t columns, int64_t rows, int64_t choices,
                    int32_t *places /* columns * rows */, float *changes /* columns * rows */) {
    for (int64_t row = 0; row < rows; row += LANES) {
        vf slope[COLUMNS], before, offset, scale, change;
        load(slope, slopes, columns, rows, row);
        for (int64_t c = 0; c < columns; c++) {
            const float own = inner[c * columns + c];
            load(&before, old + c * rows, 1, rows, row);
            load(&offset, first + c * rows, 1, rows, row);
            load(&scale, factor + c * rows, 1, rows, row);
            const vf target = own > 0 ? before + slope[c] / own : before;
            const vf wanted = pick(scale != 0, (target - offset) / scale, all(0));
            vi place = {0};
            for (int64_t b = 0; b < choices - 1; b++) place -= wanted > borders[b];
            for (int i = 0; i < LANES; i++) change[i] = values[place[i]];
            change = offset + scale * change - before;
            for (int64_t later = c + 1; later < columns; later++) slope[later] -= inner[c * columns + later] * change;
            save((float *)places + c * rows, (vf)place, rows, row);
            save(changes + c * rows, change, rows, row);
        }
        for (int64_t c = 0; c < columns; c++) save(slopes + c * rows, slope[c], rows, row);
    }
}

/* For each vector the first entry of a table [columns, entries] with the least sum of count * (x - entry)^2. */
void nearest_vectors(const double *x /* vectors * columns */, const double *count /* vectors * columns */,
                     const double *table /* columns * entries */, int64_t vectors, int64_t columns, int64_t entries,
                     int64_t *codes /* vectors */) {
    typedef double vd __attribute__((vector_size(32)));          /* wider ones are taken apart where a machine has none */
    typedef int64_t vl __attribute__((vector_size(32)));
    const vl lanes = {0, 1, 2, 3};
    for (int64_t v = 0; v < vectors; v++, x += columns, count += columns) {
        vd best = __builtin_inf() - (vd){0};
        vl at = {0};
        for (int64_t e = 0; e < entries; e += LANES) {
            vd cost[LANES / 4] = {0}, entry;
            for (int64_t c = 0; c < columns; c++)
                #pragma GCC unroll 4
                for (int i = 0; i < LANES / 4; i++) {            /* sums in registers */
                    memcpy(&entry, table + c * entries + e + 4 * i, sizeof entry);
                    entry = x[c] - entry;
                    cost[i] += entry * entry * count[c];
                }
            #pragma GCC unroll 4
            for (int i = 0; i < LANES / 4; i++) {
                const vl less = cost[i] < best;
                best = (vd)((vl)cost[i] & less | (vl)best & ~less);
                at = (lanes + e + 4 * i) & less | at & ~less;
            }
        }
        int first = 0;
        for (int i = 1; i < 4; i++) if (best[i] < best[first] || (best[i] == best[first] && at[i] < at[first])) first = i;
        codes[v] = at[first];
    }
}
