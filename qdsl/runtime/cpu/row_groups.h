/* Loops over weights whose rows are interleaved by 16: `dot` for few rows of x, `gemm` for many.

       block of 16 rows x 32 columns                       a word of a lane (a row), BITS = 4
       word 0: lane 0 .. lane 15                           bits 16e + 4j:  column 8j + 2c + e   of word c
       word 1: ...                                         e < 2, j < 4, c < 4

   Lanes of a vector are rows, so that a sum needs no addition across lanes, and a number of x is one broadcast.  Columns 2p and
   2p + 1 lie in the halves of a word: the order of the pairs that bfloat16 instructions and AMX tiles multiply.
   Planes of 4, 2 and 1 bits have 4, 2 and 1 words in a block; bits of the later ones are where one shift puts them above those
   of the first.  A code of 8 bits takes a byte: byte 2e + (j >> 1) of word 2c + (j & 1).

   A format's part is printed by the compiler before these loops:
       BITS, FIELDS                                  the bits of a code, the number of group fields
       vf number(w, codes)                           the numbers of codes; bits above a code's may be set
       void group(w, at, k, *scale, *offset)         w = scale * number + offset, in the group of column k
   HAS_OFFSET says that offsets are not all zero.  SPAN is the columns that all numbers are the same for, 0 for all columns.  */

#define SHORT_GROUPS (SPAN == 16)

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define GROUP_ROWS 16
#define PARTS (GROUP_ROWS / LANES)
#define BLOCK 32
#define BLOCK_BYTES (4 * GROUP_ROWS * BITS)
#define AHEAD 8192                                               /* bytes between a load and its prefetch */

/* codes: blocks of 16 rows.  fields: numbers of groups, [row groups, groups of columns, 16].  shift: log2 of columns in a group.
   bytes: of a row group. */
typedef struct {
    const uint8_t *codes, *levels;
    int64_t rows, columns;
    const uint8_t *fields[8];
    int64_t bytes[8], shift[8];
} Weight;

/* -- numbers of groups ---------------------------------------------------------------------------------------------------- */

INLINE vf vload_e8m0(const uint8_t *p) {
    const vi code = vload_uint8(p);
    return (vf)(select_int(code == 0, all_int(0x400000), select_int(code == 255, all_int(0x7FC00000), code << 23)));
}
INLINE vf vload_e8m0h(const uint8_t *p) {                        /* 2^(code - 128) */
    const vi code = vload_uint8(p);
    return (vf)(select_int(code < 2, all_int(0x200000) << (code & 1), code - 1 << 23));
}
INLINE vf smaller(vf a, vf b) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select_float(a < b, a, b);
#endif
}
/* Exponents from 1 on are in place.  Those of 0 are read as 2^-7 * (1 + m / 8) for 2^-6 * m / 8, twice as far from 2^-7: the
   smaller of both is right.  Bits above a code may be set.  127 and 255 are NaN. */
INLINE vf float_of_e4m3(vi code) {
    const vf read = (vf)((code << 20 & 0x07F00000) + (120 << 23));
    const vi value = (vi)smaller(read, multiply_add(read, all_float(2), all_float(-0x1p-6f)));
    const vi special = (code & 127) == 127;
    return (vf)((code << 24 & (int32_t)0x80000000) | value | (special & 0x7FC00000));
}
INLINE vf float_of_e5m2(vi code) {
    const vi bits = (code & 127) << 21, sign = (code & 128) << 24;
    const vi small = (vi)(to_float(code & 3) * all_float(0x1p-16f));
    const vi value = select_int((code & 124) == 0, small, bits + (112 << 23));
    return (vf)(sign | select_int((code & 124) == 124, bits | 0x7F800000, value));
}
INLINE vf vload_e4m3(const uint8_t *p) { return float_of_e4m3(vload_uint8(p)); }
INLINE vf vload_ue4m3(const uint8_t *p) {                        /* without a sign; 127 is 0 */
    const vi code = vload_uint8(p), small = (vi)(to_float(code & 7) * all_float(0x1p-9f));
    const vi value = select_int((code & 120) == 0, small, ((code & 127) << 20) + (120 << 23));
    return (vf)(value & ~(code == 127));
}
INLINE vf fvload_uint8(const uint8_t *p) { return to_float(vload_uint8(p)); }
INLINE vf fvload_int8(const uint8_t *p) { return to_float(vload_int8(p)); }
enum { SIZE_float32 = 4, SIZE_float16 = 2, SIZE_bfloat16 = 2, SIZE_uint8 = 1, SIZE_int8 = 1, SIZE_e8m0 = 1, SIZE_e8m0h = 1,
       SIZE_e4m3 = 1, SIZE_ue4m3 = 1 };
#define READ_float32 vload_float32
#define READ_float16 vload_float16
#define READ_bfloat16 vload_bfloat16
#define READ_uint8 fvload_uint8
#define READ_int8 fvload_int8
#define READ_e8m0 vload_e8m0
#define READ_e8m0h vload_e8m0h
#define READ_e4m3 vload_e4m3
#define READ_ue4m3 vload_ue4m3

/* Where a loop is: a group of rows, and the first of LANES of them. */
typedef struct { int64_t group; int lane; } Place;
#define FIELD(i) CAT(READ_, CAT(KIND_, i))(w->fields[i] + at.group * w->bytes[i] \
    + ((k >> w->shift[i]) * GROUP_ROWS + at.lane) * CAT(SIZE_, CAT(KIND_, i)))

/* -- codes ---------------------------------------------------------------------------------------------------------------- */

#define MASK ((1u << BITS) - 1)
INLINE vf unsigned_number(vu codes) { return to_float((vi)(codes & MASK)); }
INLINE vf signed_number(vu codes) { return to_float((vi)(codes << 32 - BITS) >> 32 - BITS); }

/* Words of part c of a block, with the codes of columns 8j + 2c + e: nibbles of `low`, or bytes, those of even j in `low`. */
typedef struct { vu low, high; } Words;
INLINE vu word(const uint8_t *block, int i) { return vload_uint32(block + 4 * GROUP_ROWS * i); }
INLINE Words words(const uint8_t *block, int c) {
    Words v = {{0}, {0}};
#if BITS == 8
    v.low = word(block, 2 * c), v.high = word(block, 2 * c + 1);
#else
#if BITS & 2
    v.high = word(block, (BITS & 4) + c / 2) >> 2 * (c & 1) & 0x33333333;
#endif
#if BITS & 1
    v.high |= (word(block, BITS - 1) >> c & 0x11111111) << (BITS & 2);
#endif
#if BITS & 4
    v.low = word(block, c);
#else
    v.low = v.high;
#endif
#if BITS > 4                                                     /* joined to bytes, as codes of 8 bits are stored */
    const vu low = v.low, high = v.high;
    v.low = (low & 0x0F0F0F0F) | (high & 0x0F0F0F0F) << 4;
    v.high = (low >> 4 & 0x0F0F0F0F) | (high & 0xF0F0F0F0);
#endif
#endif
    return v;
}
INLINE vu codes_of(Words v, int j, int e) {
#if BITS > 4
    return (j & 1 ? v.high : v.low) >> 16 * e + 8 * (j >> 1);
#else
    return v.low >> 16 * e + 4 * j;
#endif
}
