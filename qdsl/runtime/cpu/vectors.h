/* Vectors of LANES floats or 32-bit integers: loads from packed tensors, table lookups and fused multiply-adds.

   Loops use no other operations but those of the compiler's own vector types.  With AVX-512 or AVX2 each
   function is one or two instructions; elsewhere it is a loop over lanes. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

INLINE float bits_to_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE uint32_t float_to_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float half(uint16_t h) {
#if defined(__F16C__) || defined(__AVX512F__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    if (magnitude >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    return bits_to_float(sign | (magnitude << 13)) * 0x1p112f;
#endif
}

INLINE float round_to_half(float value) {                        /* the nearest float16, of two the even one */
#if defined(__F16C__) || defined(__AVX512F__)
    return _cvtsh_ss(_cvtss_sh(value, 0));
#else
    uint32_t sign = float_to_bits(value) & 0x80000000, bits = float_to_bits(value) & 0x7FFFFFFF;
    if (bits < 0x38800000) {                                     /* steps of 2^-24, which floats from 0.5 to 1 have, too */
        volatile float shifted = bits_to_float(bits) + 0.5f;
        bits = float_to_bits(shifted - 0.5f);
    } else if (bits < 0x7F800000) {
        bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
        if (bits >= 0x47800000) bits = 0x7F800000;
    }
    return bits_to_float(sign | bits);
#endif
}

INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }        /* NaN where one of them is */
INLINE float brain(uint16_t b) { return bits_to_float((uint32_t)b << 16); }

#define LOAD(name, type, result, convert) \
    INLINE result name(const uint8_t *p) { type value; memcpy(&value, p, sizeof value); return convert(value); }
LOAD(load_uint8, uint8_t, int32_t, )
LOAD(load_int8, int8_t, int32_t, )
LOAD(load_uint16, uint16_t, int32_t, )
LOAD(load_int16, int16_t, int32_t, )
LOAD(load_int32, int32_t, int32_t, )
LOAD(load_uint32, uint32_t, uint32_t, )
LOAD(load_int64, int64_t, int64_t, )
LOAD(load_float32, float, float, )
LOAD(load_float16, uint16_t, float, half)
LOAD(load_bfloat16, uint16_t, float, brain)

/* A vector of what `each` is for i = 0, 1, ...  GCC takes seconds where many of these are loops. */
#define LANE(each, lane) ({ enum { i = lane }; each; })
#define FOUR(each, lane) LANE(each, lane), LANE(each, lane + 1), LANE(each, lane + 2), LANE(each, lane + 3)
#if LANES == 16
#define EACH(vector, each) return (vector){FOUR(each, 0), FOUR(each, 4), FOUR(each, 8), FOUR(each, 12)}
#elif LANES == 8
#define EACH(vector, each) return (vector){FOUR(each, 0), FOUR(each, 4)}
#else
#define EACH(vector, each) return (vector){FOUR(each, 0)}
#endif

/* LANES neighbours in memory. */
#if LANES == 16 && defined(__AVX512BW__)
#define LOAD_BYTES(p) _mm_loadu_si128((const __m128i *)(p))
#define LOAD_HALVES(p) _mm256_loadu_si256((const __m256i *)(p))
INLINE vi vload_uint8(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(LOAD_BYTES(p)); }
INLINE vi vload_int8(const uint8_t *p) { return (vi)_mm512_cvtepi8_epi32(LOAD_BYTES(p)); }
INLINE vi vload_uint16(const uint8_t *p) { return (vi)_mm512_cvtepu16_epi32(LOAD_HALVES(p)); }
INLINE vi vload_int16(const uint8_t *p) { return (vi)_mm512_cvtepi16_epi32(LOAD_HALVES(p)); }
INLINE vf vload_float16(const uint8_t *p) { return (vf)_mm512_cvtph_ps(LOAD_HALVES(p)); }
INLINE vf to_float(vi a) { return (vf)_mm512_cvtepi32_ps((__m512i)a); }
INLINE vi to_int(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
INLINE vf multiply_add(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE float sum(vf a) { return _mm512_reduce_add_ps((__m512)a); }
INLINE vf gather(const uint8_t *p, vi i) { return (vf)_mm512_i32gather_ps((__m512i)i, p, 1); }
#elif LANES == 8 && defined(__AVX2__)
#define LOAD_BYTES(p) _mm_loadl_epi64((const __m128i *)(p))
#define LOAD_HALVES(p) _mm_loadu_si128((const __m128i *)(p))
INLINE vi vload_uint8(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(LOAD_BYTES(p)); }
INLINE vi vload_int8(const uint8_t *p) { return (vi)_mm256_cvtepi8_epi32(LOAD_BYTES(p)); }
INLINE vi vload_uint16(const uint8_t *p) { return (vi)_mm256_cvtepu16_epi32(LOAD_HALVES(p)); }
INLINE vi vload_int16(const uint8_t *p) { return (vi)_mm256_cvtepi16_epi32(LOAD_HALVES(p)); }
INLINE vf vload_float16(const uint8_t *p) { return (vf)_mm256_cvtph_ps(LOAD_HALVES(p)); }
INLINE vf to_float(vi a) { return (vf)_mm256_cvtepi32_ps((__m256i)a); }
INLINE vi to_int(vf a) { return (vi)_mm256_cvtps_epi32((__m256)a); }
INLINE vf multiply_add(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE float sum(vf a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
INLINE vf gather(const uint8_t *p, vi i) { return (vf)_mm256_i32gather_ps((const float *)p, (__m256i)i, 1); }
#else
INLINE vi vload_uint8(const uint8_t *p) { EACH(vi, p[i]); }
INLINE vi vload_int8(const uint8_t *p) { EACH(vi, (int8_t)p[i]); }
INLINE vi vload_uint16(const uint8_t *p) { EACH(vi, load_uint16(p + 2 * i)); }
INLINE vi vload_int16(const uint8_t *p) { EACH(vi, load_int16(p + 2 * i)); }
INLINE vf vload_float16(const uint8_t *p) { EACH(vf, load_float16(p + 2 * i)); }
INLINE vf to_float(vi a) { EACH(vf, (float)a[i]); }
INLINE vi to_int(vf a) { EACH(vi, (int32_t)__builtin_rintf(a[i])); }
INLINE vf multiply_add(vf a, vf b, vf c) { return a * b + c; }
INLINE float sum(vf a) { float s = 0; for (int i = 0; i < LANES; i++) s += a[i]; return s; }
INLINE vf gather(const uint8_t *p, vi at) { EACH(vf, load_float32(p + at[i])); }
#endif
INLINE vf vload_float32(const uint8_t *p) { vf value; memcpy(&value, p, sizeof value); return value; }
INLINE vi vload_int32(const uint8_t *p) { vi value; memcpy(&value, p, sizeof value); return value; }
INLINE vu vload_uint32(const uint8_t *p) { vu value; memcpy(&value, p, sizeof value); return value; }

INLINE vf vload_bfloat16(const uint8_t *p) { return (vf)(vload_uint16(p) << 16); }
INLINE vf vround_to_half(vf a) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)a, 0));
#elif LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)a, 0));
#else
    EACH(vf, round_to_half(a[i]));
#endif
}
INLINE vf vbrain(vi bits) { return (vf)(bits << 16); }
INLINE vf vhalf(vi bits) { EACH(vf, half((uint16_t)bits[i])); }

/* Elements at byte offsets `at`, one per lane. */
INLINE vf gather_float32(const uint8_t *p, vi at) { return gather(p, at); }
INLINE vi gather_int32(const uint8_t *p, vi at) { return (vi)gather(p, at); }
INLINE vu gather_uint32(const uint8_t *p, vi at) { return (vu)gather(p, at); }
INLINE vi gather_uint16(const uint8_t *p, vi at) { EACH(vi, load_uint16(p + at[i])); }
INLINE vi gather_int16(const uint8_t *p, vi at) { EACH(vi, load_int16(p + at[i])); }
INLINE vi gather_uint8(const uint8_t *p, vi at) { EACH(vi, p[at[i]]); }
INLINE vi gather_int8(const uint8_t *p, vi at) { EACH(vi, (int8_t)p[at[i]]); }
INLINE vf gather_float16(const uint8_t *p, vi at) { EACH(vf, load_float16(p + at[i])); }
INLINE vf gather_bfloat16(const uint8_t *p, vi at) { EACH(vf, load_bfloat16(p + at[i])); }

INLINE int32_t largest(vi a) {                                   /* of lanes that are not negative */
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)a);
#else
    int32_t value = 0;
    for (int i = 0; i < LANES; i++) value = a[i] > value ? a[i] : value;
    return value;
#endif
}
INLINE vf all_float(float value) { return value - (vf){0}; }
INLINE vi all_int(int32_t value) { return value - (vi){0}; }
INLINE vi select_int(vi mask, vi yes, vi no) { return (yes & mask) | (no & ~mask); }
INLINE vf select_float(vi mask, vf yes, vf no) { return (vf)select_int(mask, (vi)yes, (vi)no); }
INLINE void store(float *p, vf value) { memcpy(p, &value, sizeof value); }

/* Entries of a table of 16, 32 or 64 floats; bits above those of an index may be set. */
INLINE vf lookup_16(const float *table, vu at) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)at, _mm512_loadu_ps(table));
#elif LANES == 8 && defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)at);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)at);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(at << 28));
#else
    EACH(vf, table[at[i] & 15]);
#endif
}
INLINE vf lookup_32(const float *table, vu at) {
#if LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)at, _mm512_loadu_ps(table + 16));
#else
    return select_float((vi)(at << 27) >> 31, lookup_16(table + 16, at), lookup_16(table, at));
#endif
}
INLINE vf lookup_64(const float *table, vu at) {
    return select_float((vi)(at << 26) >> 31, lookup_32(table + 32, at), lookup_32(table, at));
}

/* LANES rows of `out`, `step` floats apart, of as many columns in `from`, `length` floats apart. */
#if LANES == 16 && defined(__AVX512F__)
INLINE void exchange(__m512 *rows, int by) {                     /* the halves of all squares of 2 * by rows and lanes */
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi low = lane + ((lane & by) != 0 & 16 - by), high = lane + ((lane & by) != 0 & 16 - by) + by;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) if (!(i & by)) {
        __m512 a = rows[i], b = rows[i + by];
        rows[i] = _mm512_permutex2var_ps(a, (__m512i)low, b);
        rows[i + by] = _mm512_permutex2var_ps(a, (__m512i)high, b);
    }
}
INLINE void transpose(float *out, int64_t step, const float *from, int64_t length) {
    __m512 rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_ps(from + i * length);
    exchange(rows, 1), exchange(rows, 2), exchange(rows, 4), exchange(rows, 8);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(out + i * step, rows[i]);
}
#else
INLINE void transpose(float *out, int64_t step, const float *from, int64_t length) {
    for (int i = 0; i < LANES; i++) for (int j = 0; j < LANES; j++) out[i * step + j] = from[j * length + i];
}
#endif

/* Vectors of bytes, four for each lane. */
typedef uint8_t vb __attribute__((vector_size(4 * LANES)));
typedef uint16_t vs __attribute__((vector_size(4 * LANES)));
typedef int16_t vh __attribute__((vector_size(4 * LANES)));
typedef uint8_t vt __attribute__((vector_size(16)));
INLINE vb vload_bytes(const uint8_t *p) { vb value; memcpy(&value, p, sizeof value); return value; }
INLINE vt vload_16(const uint8_t *p) { vt value; memcpy(&value, p, sizeof value); return value; }

INLINE vb lookup(vt table, vb at) {
#if LANES == 16 && defined(__AVX512BW__)
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)at);
#elif LANES == 8 && defined(__AVX2__)
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)at);
#else
    vb value;
    for (int i = 0; i < 4 * LANES; i++) value[i] = table[at[i] & 15];
    return value;
#endif
}

/* A sum, and four products of unsigned codes and signed x, in each lane.  A product fits 16 bits, as do two of codes up to 127. */
INLINE vi halves_sum(vh a) { return ((vi)a << 16 >> 16) + ((vi)a >> 16); }
INLINE vi add_dot(vi sum, vb codes, vb x) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif LANES == 8 && defined(__AVX2__)                             /* even and odd bytes as halves */
    const __m256i c = (__m256i)codes, even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
    return sum + (vi)_mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)), even),
                                      _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16((__m256i)x, 8)));
#else
    return sum + halves_sum(((vh)codes & 255) * ((vh)x << 8 >> 8)) + halves_sum((vh)((vs)codes >> 8) * ((vh)x >> 8));
#endif
}
