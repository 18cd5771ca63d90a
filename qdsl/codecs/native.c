/* The inner loops of qdsl/codecs: what numpy does there in many passes, in one.  Sizes are checked before (reference.py). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 512                                                /* columns that are worked on together, in registers and L1 */
#define LANES 32                                                 /* of a group */
#define INDEX 12                                                 /* bits that one lookup reads */
#define LONGEST 32                                               /* bits of a code of huffman_windows */

/* Of each four bytes the second and the third, exchanged. */
static uint64_t in_quads(uint64_t word)
{
    return (word & 0xFF0000FFFF0000FF) | (word >> 8 & 0x0000FF000000FF00) | (word << 8 & 0x00FF000000FF0000);
}

static void swap_quads(const uint8_t *from, uint8_t *to, int64_t bytes)
{
    for (int64_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, from + 8 * i, 8);
        word = in_quads(word);
        memcpy(to + 8 * i, &word, 8);
    }
}

/* out: bfloat16 of exponents, and of signs above mantissas. */
void join_flat(const uint8_t *exponents /* count */, const uint8_t *sign_mantissa /* count */, uint16_t *out /* count */,
               int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (uint16_t)((sign_mantissa[i] & 0x80) << 8 | exponents[i] << 7 | (sign_mantissa[i] & 0x7F));
}

/* The inverse of join_flat. */
void split_flat(const uint16_t *patterns /* count */, uint8_t *exponents /* count */, uint8_t *sign_mantissa /* count */,
                int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        exponents[i] = (uint8_t)(patterns[i] >> 7);
        sign_mantissa[i] = (uint8_t)((patterns[i] >> 8 & 0x80) | (patterns[i] & 0x7F));
    }
}

/* out [n, k]: bfloat16 of exponents [n, k] and of signs above mantissas [n, k rounded up to 8], in quads. */
void join(const uint8_t *exponents /* n * k */, const uint8_t *sign_mantissa /* n * ((k + 7) / 8 * 8) */,
          uint16_t *out /* n * k */, int64_t n, int64_t k)
{
    int64_t stride = (k + 7) / 8 * 8;
    uint8_t straight[CHUNK];
    for (int64_t row = 0; row < n; row++)
        for (int64_t start = 0; start < k; start += CHUNK) {
            int64_t count = k - start < CHUNK ? k - start : CHUNK;
            swap_quads(sign_mantissa + row * stride + start, straight, (count + 7) / 8 * 8);
            join_flat(exponents + row * k + start, straight, out + row * k + start, count);
        }
}

/* The inverse of join. */
void split(const uint16_t *patterns /* n * k */, uint8_t *exponents /* n * k */,
           uint8_t *sign_mantissa /* n * ((k + 7) / 8 * 8) */, int64_t n, int64_t k)
{
    int64_t stride = (k + 7) / 8 * 8;
    for (int64_t row = 0; row < n; row++)
        for (int64_t start = 0; start < k; start += CHUNK) {
            int64_t count = k - start < CHUNK ? k - start : CHUNK;
            uint8_t straight[CHUNK] = {0};
            split_flat(patterns + row * k + start, exponents + row * k + start, straight, count);
            swap_quads(straight, sign_mantissa + row * stride + start, (count + 7) / 8 * 8);
        }
}

/* counts [256], zeros before: how often a symbol occurs.  Neighbours often are one symbol: they have counters of their own. */
void count_symbols(const uint8_t *symbols /* length */, int64_t *counts /* 256 */, int64_t length)
{
    int64_t parts[4][256] = {{0}};
    for (int64_t i = 0; i < length; i++)
        parts[i & 3][symbols[i]]++;
    for (int i = 0; i < 4 * 256; i++)
        counts[i & 255] += parts[i >> 8][i & 255];
}

/* window: symbols [n, k] of codes [n, k / 8 rounded up], without patches. */
void window_decode(const uint32_t *codes /* n * ((k + 7) / 8) */, int base, uint8_t *out /* n * k */, int64_t n, int64_t k)
{
    int64_t words = (k + 7) / 8;
    uint64_t bases = 0x0101010101010101 * (uint64_t)base;
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < words; i++) {
            uint64_t lower = codes[row * words + i] & 0xFFFF, upper = codes[row * words + i] >> 16;
            lower = (lower | lower << 24) & 0x000000FF000000FF;
            upper = (upper | upper << 24) & 0x000000FF000000FF;
            lower = (lower | lower << 12) & 0x000F000F000F000F;
            upper = (upper | upper << 12) & 0x000F000F000F000F;
            uint64_t eight = (lower | upper << 8) + bases;       /* a base is at most 240: no byte overflows */
            memcpy(out + row * k + 8 * i, &eight, 8 * i + 8 <= k ? 8 : k - 8 * i);
        }
}

/* Up to eight symbols less a base, byte by byte.  Those that then have bits of `far` are 0; their places are noted, and they. */
static uint64_t distances(const uint8_t *symbol, int count, int base, uint64_t far, int64_t at, int64_t **places,
                          uint8_t **values, int64_t *room)
{
    uint64_t bases = 0x0101010101010101 * (uint64_t)base, highest = 0x8080808080808080, eight = bases;
    memcpy(&eight, symbol, count == 8 ? 8 : count);
    eight = ((eight | highest) - (bases & ~highest)) ^ ((eight ^ ~bases) & highest);
    if (eight & far)
        for (int j = 0; j < count; j++)
            if (eight >> 8 * j & far & 0xFF && (*room)-- > 0) {
                *(*places)++ = at + j;
                *(*values)++ = symbol[j];
                eight &= ~((uint64_t)0xFF << 8 * j);
            }
    return eight;
}

/* window: codes of symbols [n, k]; the places of those that have none, and themselves: the `room` that the caller counted. */
void window_encode(const uint8_t *symbols /* n * k */, int base, uint32_t *codes /* n * ((k + 7) / 8) */,
                   int64_t *places /* room */, uint8_t *values /* room */, int64_t room, int64_t n, int64_t k)
{
    int64_t words = (k + 7) / 8;
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < words; i++) {
            int64_t at = row * k + 8 * i;
            uint64_t eight = distances(symbols + at, 8 * i + 8 <= k ? 8 : (int)(k - 8 * i), base, 0xF0F0F0F0F0F0F0F0, at, &places,
                                       &values, &room);
            uint64_t even = eight & 0x00FF00FF00FF00FF, odd = eight >> 8 & 0x00FF00FF00FF00FF;
            even = (even | even >> 12) & 0x000000FF000000FF;
            odd = (odd | odd >> 12) & 0x000000FF000000FF;
            codes[row * words + i] = (uint32_t)(((even | even >> 24) & 0xFFFF) | ((odd | odd >> 24) & 0xFFFF) << 16);
        }
}

/* row_window: of each row of symbols [n, k] the first base from which on eight symbols are most frequent, and how often they are. */
void row_window_bases(const uint8_t *symbols /* n * k */, uint8_t *bases /* n */, int64_t *coded /* n */, int64_t n, int64_t k)
{
    for (int64_t row = 0; row < n; row++) {
        int64_t counts[256] = {0}, sum = 0;
        count_symbols(symbols + row * k, counts, k);
        for (int last = 0; last < 256; last++) {
            sum += counts[last] - (last < 8 ? 0 : counts[last - 8]);
            if (last == 7 || (last > 7 && sum > coded[row])) {
                coded[row] = sum;
                bases[row] = (uint8_t)(last - 7);
            }
        }
    }
}

/* row_window: the lower two bits of codes of symbols [n, k], their third bits, and what has no code as of `window_encode`. */
void row_window_encode(const uint8_t *symbols /* n * k */, const uint8_t *bases /* n */, uint32_t *codes /* n * 2 * ((k + 31) / 32) */,
                       uint32_t *upper /* n * ((k + 31) / 32) */, int64_t *places /* room */, uint8_t *values /* room */,
                       int64_t room, int64_t n, int64_t k)
{
    int64_t groups = (k + 31) / 32;
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < 4 * groups; i++) {
            int64_t at = row * k + 8 * i, left = k - 8 * i;
            uint64_t eight = left <= 0 ? 0 : distances(symbols + at, left < 8 ? (int)left : 8, bases[row], 0xF8F8F8F8F8F8F8F8, at,
                                                       &places, &values, &room);
            uint64_t even = eight & 0x0003000300030003, odd = eight >> 8 & 0x0003000300030003;
            even |= even >> 14, odd |= odd >> 14;
            uint32_t two = (uint32_t)(((even | even >> 28) & 0xFF) | ((odd | odd >> 28) & 0xFF) << 16);
            even = eight >> 2 & 0x0001000100010001, odd = eight >> 10 & 0x0001000100010001;
            even |= even >> 15, odd |= odd >> 15;
            uint32_t one = (uint32_t)(((even | even >> 30) & 0xF) | ((odd | odd >> 30) & 0xF) << 16);
            uint32_t *code = codes + row * 2 * groups + i / 2, *third = upper + row * groups + i / 4;
            *code = i % 2 ? *code | two << 8 : two;
            *third = i % 4 ? *third | one << 4 * (i % 4) : one;
        }
}

/* row_window: symbols [n, k] of codes, without patches. */
void row_window_decode(const uint32_t *codes /* n * 2 * ((k + 31) / 32) */, const uint32_t *upper /* n * ((k + 31) / 32) */,
                       const uint8_t *bases /* n */, uint8_t *out /* n * k */, int64_t n, int64_t k)
{
    int64_t groups = (k + 31) / 32;
    for (int64_t row = 0; row < n; row++) {
        uint64_t base = 0x0101010101010101 * (uint64_t)bases[row];
        for (int64_t i = 0; 8 * i < k; i++) {
            uint64_t two = codes[row * 2 * groups + i / 2] >> 8 * (i % 2), one = upper[row * groups + i / 4] >> 4 * (i % 4);
            uint64_t even = (two & 0xF) | (two & 0xF0) << 28, odd = (two >> 16 & 0xF) | (two >> 16 & 0xF0) << 28;
            even = (even | even << 14) & 0x0003000300030003;
            odd = (odd | odd << 14) & 0x0003000300030003;
            uint64_t lower = (one & 3) | (one & 0xC) << 30, higher = (one >> 16 & 3) | (one >> 16 & 0xC) << 30;
            even |= ((lower | lower << 15) & 0x0001000100010001) << 2;
            odd |= ((higher | higher << 15) & 0x0001000100010001) << 2;
            uint64_t eight = (even | odd << 8) + base;           /* a base is at most 248: no byte overflows */
            memcpy(out + row * k + 8 * i, &eight, 8 * i + 8 <= k ? 8 : k - 8 * i);
        }
    }
}

/* What INDEX bits begin with: up to four symbols in the lower half, their number from bit 32 on, their bits from bit 40 on. */
static void fill_lookup(const uint16_t *table, uint64_t *lookup)
{
    for (uint32_t index = 0; index < 1 << INDEX; index++) {
        uint64_t symbols = 0;
        int count = 0, used = 0;
        while (count < 4) {
            uint32_t entry = table[(index << used >> (INDEX - 8)) & 255];
            int size = (int)(entry & 127);
            if (used + size > INDEX)
                break;
            symbols |= (uint64_t)(entry >> 7 & 255) << 8 * count++;
            used += size;
        }
        lookup[index] = symbols | (uint64_t)count << 32 | (uint64_t)used << 40;
    }
}

/* 32 bits and more from bit `at` on, at the upper end of 64. */
static uint64_t bits_at(const uint32_t *words, int64_t at)
{
    return ((uint64_t)words[at >> 5] << 32 | words[(at >> 5) + 1]) << (at & 31);
}

/* One step of a lane: two lookups of four symbols or fewer. */
#define STEP(lane) do { \
    uint64_t bits = bits_at(words[lane], at[lane]); \
    uint64_t first = lookup[bits >> (64 - INDEX)]; \
    uint64_t second = lookup[bits << (first >> 40) >> (64 - INDEX)]; \
    uint8_t *target = symbols[lane] + count[lane]; \
    memcpy(target, &first, 4); \
    memcpy(target + (first >> 32 & 255), &second, 4); \
    count[lane] += (int64_t)((first >> 32 & 255) + (second >> 32 & 255)); \
    at[lane] += (int64_t)((first >> 40) + (second >> 40)); \
} while (0)

/* Four lanes of `total` symbols, in turns: the lookups of one wait for each other.  The bits that the longest takes. */
static int64_t four_lanes(const uint32_t *const *words, uint8_t *const *symbols, int64_t total, const uint64_t *lookup,
                          const uint16_t *table)
{
    int64_t at[4] = {0}, count[4] = {0}, longest = 0;
    while (count[0] + 8 <= total && count[1] + 8 <= total && count[2] + 8 <= total && count[3] + 8 <= total) {
        STEP(0);
        STEP(1);
        STEP(2);
        STEP(3);
    }
    for (int lane = 0; lane < 4; lane++) {
        while (count[lane] + 8 <= total)
            STEP(lane);
        for (; count[lane] < total; count[lane]++) {
            uint32_t entry = table[bits_at(words[lane], at[lane]) >> 56];
            symbols[lane][count[lane]] = (uint8_t)(entry >> 7);
            at[lane] += entry & 127;
        }
        longest = at[lane] > longest ? at[lane] : longest;
    }
    return longest;
}

/* huffman_lanes: the symbols of groups [starts, stops), `runs` runs of eight for each lane, `per_row` lanes to a row.

   out: rows begin at `start`, `stride` bytes from one to the next.  table: of the code, no entry without bits.  used [groups]:
   the bits of each group's longest lane, more than its words have where they are damaged; zeros are then read after them.
   Returns 0 where there is no memory. */
int lanes_decode(const uint32_t *words /* 32 * max(stops) */, const int64_t *starts /* groups */,
                 const int64_t *stops /* groups */, int64_t groups, int64_t runs, int64_t per_row,
                 const uint16_t *table /* 256 */,
                 uint8_t *out /* start + groups * (32 / per_row) * stride - (stride - runs * per_row * 8) */, int64_t start,
                 int64_t stride, int64_t *used /* groups */)
{
    int64_t total = 8 * runs, room = total / 4 + 3;              /* words that codes of eight bits fill, and one ahead */
    uint64_t *lookup = malloc(sizeof(uint64_t) << INDEX);
    uint32_t *streams = malloc(sizeof(uint32_t) * (size_t)(LANES * room));
    uint8_t *symbols = malloc((size_t)(4 * (total + 8)));
    int enough = lookup && streams && symbols;
    out += start;
    if (enough)
        fill_lookup(table, lookup);
    for (int64_t group = 0; enough && group < groups; group++) {
        int64_t turns = stops[group] - starts[group];
        const uint32_t *from = words + LANES * starts[group];
        memset(streams, 0, sizeof(uint32_t) * (size_t)(LANES * room));
        for (int64_t turn = 0; turn < turns; turn++)
            for (int lane = 0; lane < LANES; lane++)
                streams[lane * room + turn] = from[LANES * turn + lane];
        used[group] = 0;
        for (int lane = 0; lane < LANES; lane += 4) {
            const uint32_t *four[4];
            uint8_t *target[4];
            for (int i = 0; i < 4; i++) {
                four[i] = streams + (lane + i) * room;
                target[i] = symbols + i * (total + 8);
            }
            int64_t bits = four_lanes(four, target, total, lookup, table);
            used[group] = bits > used[group] ? bits : used[group];
            for (int i = 0; i < 4; i++) {
                uint8_t *row = out + (group * (LANES / per_row) + (lane + i) / per_row) * stride + (lane + i) % per_row * 8;
                for (int64_t run = 0; run < runs; run++)
                    memcpy(row + run * per_row * 8, target[i] + 8 * run, 8);
            }
        }
    }
    free(lookup);
    free(streams);
    free(symbols);
    return enough;
}

/* Eight symbols of a row from a column on; `filler` for those behind its k columns. */
static void eight_from(const uint8_t *row, int64_t column, int64_t k, int filler, uint8_t *eight)
{
    int64_t inside = column + 8 <= k ? 8 : column < k ? k - column : 0;
    if (inside < 8)
        memset(eight, filler, 8);
    memcpy(eight, row + (inside ? column : 0), inside);
}

/* huffman_lanes: how many words each group of lanes has, in a chunk of `runs` runs from run `start` on of symbols [n, k].

   codes [256]: 256 times the code, plus its bits. */
void lanes_turns(const uint8_t *symbols /* n * k */, int64_t n, int64_t k, int64_t per_row, int64_t start, int64_t runs,
                 const uint16_t *codes /* 256 */, int filler, int64_t *turns /* (n * per_row + 31) / 32 */)
{
    int64_t rows = LANES / per_row;
    for (int64_t row = 0; row < n; row++)
        for (int64_t lane = 0; lane < per_row; lane++) {
            int64_t bits = 0;
            for (int64_t run = start; run < start + runs; run++) {
                uint8_t eight[8];
                eight_from(symbols + row * k, (run * per_row + lane) * 8, k, filler, eight);
                for (int i = 0; i < 8; i++)
                    bits += codes[eight[i]] & 255;
            }
            if (turns[row / rows] < (bits + 31) / 32)
                turns[row / rows] = (bits + 31) / 32;
        }
}

/* The words of those groups, which begin at `starts`, in units of LANES words; they are zeros before. */
void lanes_encode(const uint8_t *symbols /* n * k */, int64_t n, int64_t k, int64_t per_row, int64_t start, int64_t runs,
                  const uint16_t *codes /* 256 */, int filler, const int64_t *starts /* (n * per_row + 31) / 32 */,
                  uint32_t *words /* 32 * max(starts) */)
{
    int64_t rows = LANES / per_row;
    for (int64_t row = 0; row < n; row++)
        for (int64_t lane = 0; lane < per_row; lane++) {
            uint32_t *out = words + LANES * starts[row / rows] + row % rows * per_row + lane;
            uint64_t buffer = 0;
            int pending = 0;                                     /* bits of the buffer that are not written */
            for (int64_t run = start; run < start + runs; run++) {
                uint8_t eight[8];
                eight_from(symbols + row * k, (run * per_row + lane) * 8, k, filler, eight);
                for (int half = 0; half < 8; half += 4) {        /* four codes have at most 32 bits */
                    for (int i = half; i < half + 4; i++) {
                        uint32_t code = codes[eight[i]];
                        buffer = buffer << (code & 255) | code >> 8;
                        pending += (int)(code & 255);
                    }
                    if (pending >= 32) {
                        pending -= 32;
                        *out = (uint32_t)(buffer >> pending);
                        out += LANES;
                    }
                }
            }
            if (pending)
                *out = (uint32_t)(buffer << (32 - pending));
        }
}

/* A prefix code: codes fill all windows of 32 bits, that of order[i] those from first[i] on; -1 in `order` is the end's. */
struct code {
    const uint32_t *first;
    const int16_t *order;
    const uint8_t *lengths;
    int64_t count;
    uint64_t lookup[1 << INDEX];                                 /* as fill_lookup has it; no symbol: a longer code, or the end */
};

static int symbol_of(const struct code *code, uint32_t window)
{
    int64_t i = code->count - 1;
    while (i > 0 && code->first[i] > window)
        i--;
    return code->order[i];
}

static void fill_code(struct code *code)
{
    for (uint32_t index = 0; index < 1 << INDEX; index++) {
        uint64_t symbols = 0;
        int count = 0, used = 0;
        while (count < 4 && used < INDEX) {
            int symbol = symbol_of(code, index << (32 - INDEX) << used);
            if (symbol < 0 || used + code->lengths[symbol] > INDEX)
                break;
            symbols |= (uint64_t)symbol << 8 * count++;
            used += code->lengths[symbol];
        }
        code->lookup[index] = symbols | (uint64_t)count << 32 | (uint64_t)used << 40;
    }
}

/* 57 bits and more from bit `at` on, at the upper end of 64; zeros after the data. */
static uint64_t stream_bits(const uint8_t *data, int64_t size, int64_t at)
{
    uint64_t word = 0;
    int64_t byte = at >> 3;
    if (byte + 8 <= size) {
        memcpy(&word, data + byte, 8);
        word = __builtin_bswap64(word);
    } else {
        for (int64_t i = 0; i < 8; i++)
            word = word << 8 | (byte + i < size ? data[byte + i] : 0);
    }
    return word << (at & 7);
}

struct lane {
    int64_t at, end;                                             /* bits */
    uint8_t *next;                                               /* where its next symbol goes */
};

/* All symbols that one lookup gives; 0 where it gives none. */
static int step_of(const struct code *code, const uint8_t *data, int64_t size, struct lane *lane)
{
    uint64_t entry = code->lookup[stream_bits(data, size, lane->at) >> (64 - INDEX)];
    memcpy(lane->next, &entry, 4);
    lane->next += entry >> 32 & 255;
    lane->at += (int64_t)(entry >> 40);
    return (int)(entry >> 32 & 255);
}

/* A symbol of any length; 0 at the end's code. */
static int long_step_of(const struct code *code, const uint8_t *data, int64_t size, struct lane *lane)
{
    int symbol = symbol_of(code, (uint32_t)(stream_bits(data, size, lane->at) >> 32));
    if (symbol < 0)
        return 0;
    *lane->next++ = (uint8_t)symbol;
    lane->at += code->lengths[symbol];
    return 1;
}

/* huffman_windows: the symbols of lanes that begin at rising bits `starts` of the data, and end with the code that crosses the next
   one's start, or at the end's code.

   counts: symbols of each lane.  closed: the bit at which its last code ends.  out: room for `room` symbols, and what is more is
   left out.  longest: of a lane, in bits.  Returns 0 where there is no memory. */
int windows_decode(const uint8_t *data /* size */, int64_t size, const int64_t *starts /* count */, int64_t count,
                   int64_t longest, const uint32_t *first /* codes */, const int16_t *order /* codes */, int64_t codes,
                   const uint8_t *lengths /* 256 */, uint8_t *out /* room */, int64_t room, int64_t *counts /* count */,
                   int64_t *closed /* count */)
{
    struct code *code = malloc(sizeof(struct code));
    uint8_t *symbols = malloc((size_t)(4 * (longest + 8)));
    int enough = code && symbols;
    if (enough) {
        code->first = first;
        code->order = order;
        code->lengths = lengths;
        code->count = codes;
        fill_code(code);
    }
    for (int64_t base = 0; enough && base < count; base += 4) {
        struct lane lanes[4];
        int many = count - base < 4 ? (int)(count - base) : 4, inside = many == 4;     /* all are far from their ends */
        for (int i = 0; i < many; i++) {
            int64_t lane = base + i;
            lanes[i] = (struct lane){starts[lane], lane + 1 < count ? starts[lane + 1] : 8 * size, symbols + i * (longest + 8)};
            inside &= lanes[i].at + LONGEST < lanes[i].end;
        }
        while (inside) {                                         /* a lookup of each in turn: those of one wait for each other */
            for (int i = 0; i < 4; i++)
                if (!step_of(code, data, size, &lanes[i]) && !long_step_of(code, data, size, &lanes[i]))
                    inside = 0;
            for (int i = 0; i < 4; i++)
                inside &= lanes[i].at + LONGEST < lanes[i].end;
        }
        for (int i = 0; i < many; i++) {
            int64_t length;
            while (lanes[i].at + INDEX < lanes[i].end && (step_of(code, data, size, &lanes[i])
                                                          || long_step_of(code, data, size, &lanes[i])))
                ;
            while (lanes[i].at < lanes[i].end && long_step_of(code, data, size, &lanes[i]))
                ;
            length = lanes[i].next - (symbols + i * (longest + 8));
            counts[base + i] = length;
            closed[base + i] = lanes[i].at;
            length = length < room ? length : room;
            memcpy(out, symbols + i * (longest + 8), (size_t)length);
            out += length;
            room -= length;
        }
    }
    free(code);
    free(symbols);
    return enough;
}

/* huffman_windows: the codes of symbols one after the other, first bit highest, and in which symbol's code each window of 64 bits
   begins: starts and gaps as bits.BitStream has them, filled before with `count` and zeros.

   codes [256]: the value of a code above its bits, which are the lower 8; of at most 32 bits.  bits: of all codes.
   data: zeros. */
void windows_encode(const uint8_t *symbols /* count */, int64_t count, int64_t bits, const uint64_t *codes /* 256 */,
                    uint8_t *data /* 4 * (bits / 32 + 1) */, int64_t *starts /* bits / 64 + 2 */,
                    uint8_t *gaps /* bits / 64 + 2 */)
{
    uint64_t buffer = 0;
    int pending = 0;                                             /* bits of the buffer that are not written */
    int64_t at = 0, window = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t code = codes[symbols[i]];
        int length = (int)(code & 255);
        if (at >= 64 * window) {
            starts[window] = i;
            gaps[window] = (uint8_t)(at - 64 * window);
            window++;
        }
        buffer = buffer << length | code >> 8;
        pending += length;
        at += length;
        if (pending >= 32) {
            uint32_t word = __builtin_bswap32((uint32_t)(buffer >> (pending - 32)));
            memcpy(data, &word, 4);
            data += 4;
            pending -= 32;
        }
    }
    if (pending) {
        uint32_t word = __builtin_bswap32((uint32_t)(buffer << (32 - pending)));
        memcpy(data, &word, 4);
    }
}
