/* What printed decode functions call: a device function has one for scalars, and one with 'v' for vectors (vectors.h). */
#define LOOSE __attribute__((aligned(1), may_alias))             /* tensors may lie at any address */
typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16 LOOSE, f16 LOOSE, bf16 LOOSE;
typedef int16_t i16 LOOSE;
typedef uint32_t u32 LOOSE;
typedef int32_t i32 LOOSE;
typedef int64_t i64 LOOSE;
typedef float f32 LOOSE;

/* Without calls and branches, so that compilers make vectors of them. */
INLINE float soft_brain(uint16_t b) { return bits_to_float((uint32_t)b << 16); }
INLINE float soft_half(uint16_t h) {
    const uint32_t bits = (uint32_t)(h & 0x7FFF) << 13;
    const uint32_t value = (h & 0x7C00) == 0x7C00 ? bits | 0x7F800000 : float_to_bits(bits_to_float(bits) * 0x1p112f);
    return bits_to_float(value | (uint32_t)(h & 0x8000) << 16);
}
INLINE float round_half(float value) { return round_to_half(value); }
INLINE vf vround_half(vf value) { return vround_to_half(value); }
INLINE float round_brain(float a) {
    const uint32_t bits = float_to_bits(a);
    return a == a ? bits_to_float(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000) : a;
}
INLINE vf vround_brain(vf a) {
    const vu bits = (vu)a;
    return select_float(a == a, (vf)(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000), a);
}

/* Codes of small floats: the bits below the sign where a float has them, times a power of two; and codes that are others. */
#define SMALL(name, sign, shift, power, is_other, other) \
    INLINE float name(uint32_t code) { \
        const uint32_t bits = (code & (1u << sign) - 1) << shift | (code >> sign & 1) << 31; \
        return is_other ? bits_to_float(other) : bits_to_float(bits) * power; \
    } \
    INLINE vf v##name(vi given) { \
        const vu code = (vu)given, bits = (code & (1u << sign) - 1) << shift | (code >> sign & 1) << 31; \
        return select_float((vi)(is_other), (vf)((vu){0} + (other)), (vf)bits * power); \
    }
SMALL(e4m3, 7, 20, 0x1p120f, (code & 127) == 127, 0x7FC00000)
SMALL(e4m3fnuz, 7, 20, 0x1p119f, (code & 255) == 128, 0x7FC00000)
SMALL(e5m2fnuz, 7, 21, 0x1p111f, (code & 255) == 128, 0x7FC00000)
SMALL(e5m2, 7, 21, 0x1p112f, (code & 124) == 124, (bits | 0x7F800000))
SMALL(e3m2, 5, 21, 0x1p124f, code != code, 0)
SMALL(e2m3, 5, 20, 0x1p126f, code != code, 0)
SMALL(e2m1, 3, 22, 0x1p126f, code != code, 0)
INLINE float ue4m3(uint32_t code) { return code == 127 ? 0 : bits_to_float((code & 127) << 20) * 0x1p120f; }
INLINE vf vue4m3(vi code) { return select_float(code == 127, (vf){0}, (vf)((code & 127) << 20) * 0x1p120f); }
INLINE float e8m0(uint32_t code) { return bits_to_float(code == 0 ? 0x400000 : code == 255 ? 0x7FC00000 : code << 23); }
INLINE vf ve8m0(vi code) {
    return (vf)select_int(code == 0, all_int(0x400000), select_int(code == 255, all_int(0x7FC00000), code << 23));
}
INLINE float e8m0h(uint32_t code) { return bits_to_float(code < 2 ? 0x200000u << code : code - 1 << 23); }
INLINE vf ve8m0h(vi code) { return (vf)select_int(code < 2, all_int(0x200000) << (code & 1), code - 1 << 23); }
#define TRIT(byte, place) ((byte) * ((1 + 2 * (place & 1)) * (1 + 4 * (place & 2)) * (1 + 20 * (place & 4))) & 255) * 3 >> 8
INLINE int32_t trit(uint32_t byte, int place) { return TRIT(byte, place); }
INLINE vi vtrit(vi byte, int place) { return TRIT(byte, place); }

/* `width` bits from bit `at` of words that are `step` elements apart; words without such bits are not read. */
#define STREAM(type) \
    INLINE int32_t stream_##type(const type *words, int64_t step, int64_t at, int width, int bits) { \
        const int shift = at % bits; \
        uint64_t value = ((uint64_t)words[at / bits * step] & ~0ULL >> 64 - bits) >> shift; \
        for (int i = 1; i < (width + 2 * bits - 2) / bits; i++) \
            if (shift + width > i * bits) \
                value |= ((uint64_t)words[(at / bits + i) * step] & ~0ULL >> 64 - bits) << i * bits - shift; \
        return value & ~0ULL >> 64 - width; \
    }
STREAM(u8) STREAM(i8) STREAM(u16) STREAM(i16) STREAM(u32) STREAM(i32)

/* Lanes: their numbers, and elements of tables of 16, 32 or 64 floats. */
#if LANES == 16
#define IOTA (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define IOTA (vi){0, 1, 2, 3, 4, 5, 6, 7}
#else
#define IOTA (vi){0, 1, 2, 3}
#endif
