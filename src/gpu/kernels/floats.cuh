// Floats as bits: reads each format, and rounds numbers to each format, with the same bits as src/exec/floats.rs, which
// explains the constants. This file is compiled after elements.cuh.

#define INFINITY_BITS 0x7f800000u
#define QUIET_NAN 0x7fc00000u

__device__ inline u32 magnitude(u32 single) { return single & 0x7fffffff; }

// A source element, as the bits of an f32.
struct Loaded {
    u32 single;
    // True if the source value is finite, before any rounding.
    bool was_finite;
};

// The bits that a target format stores for the bits of an f32.
template <typename Bits>
struct Stored {
    Bits bits;
    // True if the value is larger than the largest finite value of the format.
    bool beyond;
};

__device__ inline Loaded exact(u32 single) { return {single, magnitude(single) < INFINITY_BITS}; }

struct F64 {
    // The first type is the type in which elements are stored; the second type is the type of computations.
    typedef u64 Bits;
    typedef double Sum;
    // True if the format has no infinities. They are then treated as values beyond the largest finite value.
    static const bool loses_infinity = false;

    static __device__ Loaded loaded(u64 bits) {
        u64 value = bits & 0x7fffffffffffffff, infinity = 0x7ffull << 52;
        u32 rounded = __float_as_uint((float)__longlong_as_double(bits));
        u32 nan = (u32)(bits >> 32) & 0x80000000 | QUIET_NAN | (u32)(bits >> 29) & 0x003fffff;
        return {value > infinity ? nan : rounded, value < infinity};
    }

    static __device__ Stored<u64> stored(u32 single) {
        u64 exact = __double_as_longlong((double)__uint_as_float(single));
        u64 nan = (u64)(single >> 31) << 63 | 0x7ff8ull << 48 | (u64)(single & 0x007fffff) << 29;
        return {magnitude(single) > INFINITY_BITS ? nan : exact, magnitude(single) == INFINITY_BITS};
    }

    static __device__ double number(u64 bits) { return __longlong_as_double(bits); }
    static __device__ double divisor(u64 bits) { return __longlong_as_double(bits); }

    // Every NaN becomes the quiet NaN without sign and payload.
    static __device__ u64 rounded(double number) {
        return number == number ? __double_as_longlong(number) : 0x7ff8ull << 48;
    }
};

struct F32 {
    typedef u32 Bits;
    typedef double Sum;
    static const bool loses_infinity = false;

    static __device__ Loaded loaded(u32 bits) { return exact(bits); }
    static __device__ Stored<u32> stored(u32 single) { return {single, magnitude(single) == INFINITY_BITS}; }
    static __device__ double number(u32 bits) { return __uint_as_float(bits); }
    static __device__ double divisor(u64 bits) { return __longlong_as_double(bits); }
    static __device__ u32 rounded(double number) {
        return number == number ? __float_as_uint((float)number) : QUIET_NAN;
    }
};

// Rules for the bits of a NaN result. PAYLOAD: a quiet NaN with the sign and the part of the payload that fits. SIGNED:
// the value NAN with the sign. FIXED: the value NAN.
enum Nan { PAYLOAD, SIGNED, FIXED };

#define FNUZ_NAN 0x80

// A format with sign, exponent and MANTISSA bits. FIRST_BEYOND is the smallest f32 that rounds beyond the largest
// finite value, and BEYOND is stored for it.
template <typename Stands, u32 MANTISSA, u32 BIAS, u32 FIRST_BEYOND, u32 BEYOND, Nan KIND, u32 NAN_BITS>
struct Narrow {
    typedef Stands Bits;
    typedef float Sum;
    static const u32 bits = 8 * sizeof(Bits), drop = 23 - MANTISSA;
    static const bool loses_infinity = BEYOND == 0x7e || BEYOND == FNUZ_NAN;

    static __device__ Stored<Bits> stored(u32 single) {
        u32 value = magnitude(single), sign = single >> 31 << (bits - 1);
        u32 carried = value + (1u << (drop - 1)) - 1 + (value >> drop & 1);
        u32 finite = (carried >> drop) - ((127 - BIAS) << MANTISSA);
        if (BIAS != 127) {
            const u32 anchor = (127 + 24 - BIAS - MANTISSA) << 23;
            float sum = __uint_as_float(value) + __uint_as_float(anchor);
            if (value < (128 - BIAS) << 23) finite = __float_as_uint(sum) - anchor;
        }
        bool beyond = value >= FIRST_BEYOND;
        u32 unsigned_bits = beyond ? BEYOND : finite;
        u32 signed_bits = unsigned_bits == 0 && BEYOND == FNUZ_NAN ? 0 : unsigned_bits | sign;
        u32 quiet = (1u << (bits - 1)) - (1u << (MANTISSA - 1));
        u32 nan = KIND == PAYLOAD  ? sign | quiet | value >> drop & ((1u << MANTISSA) - 1)
                  : KIND == SIGNED ? NAN_BITS | sign
                                   : NAN_BITS;
        bool is_nan = value > INFINITY_BITS;
        return {(Bits)(is_nan ? nan : signed_bits), beyond && !is_nan};
    }

    static __device__ Bits rounded(float number) {
        return stored(number == number ? __float_as_uint(number) : QUIET_NAN).bits;
    }

    static __device__ float divisor(u64 bits) { return __uint_as_float((u32)bits); }

    // Returns the number that has this code. Subnormals are exact as well, because the powers of two are well inside
    // the range of f32.
    static __device__ float number(u32 stored) {
        float size = __uint_as_float((stored & ((1u << (bits - 1)) - 1)) << drop) * __uint_as_float((254 - BIAS) << 23);
        return __uint_as_float(__float_as_uint(size) | stored >> (bits - 1) << 31);
    }
};

struct F16 : Narrow<u16, 10, 15, 0x477ff000, 0x7c00, PAYLOAD, 0> {
    static __device__ Loaded loaded(u32 stored) {
        u32 shifted = (stored & 0x7fff) << 13, special = shifted | INFINITY_BITS;
        if (shifted > 31u << 23) special |= 1u << 22;
        u32 single = shifted >= 31u << 23 ? special : magnitude(__float_as_uint(Narrow::number(stored)));
        return exact(single | stored >> 15 << 31);
    }
    static __device__ float number(u32 stored) { return __uint_as_float(loaded(stored).single); }
};

struct Bf16 : Narrow<u16, 7, 127, 0x7f7f8000, 0x7f80, FIXED, 0xffff> {
    static __device__ Loaded loaded(u32 stored) { return exact(stored << 16); }
    static __device__ float number(u32 stored) { return __uint_as_float(stored << 16); }
};

typedef Narrow<u16, 7, 127, 0x7f7f8000, 0x7f80, FIXED, 0x7fc0> Bf16OfF16;

struct F8E4m3fn : Narrow<u8, 3, 7, 0x43e80001, 0x7e, SIGNED, 0x7f> {
    static __device__ float number(u32 stored) {
        return (stored & 0x7f) == 0x7f ? __uint_as_float(QUIET_NAN) : Narrow::number(stored);
    }
};

struct F8E5m2 : Narrow<u8, 2, 15, 0x47700000, 0x7c, SIGNED, 0x7f> {
    static __device__ float number(u32 stored) { return F16::number(stored << 8); }
};

struct F8E4m3fnuz : Narrow<u8, 3, 8, 0x43780000, FNUZ_NAN, FIXED, FNUZ_NAN> {
    static __device__ float number(u32 stored) {
        return stored == FNUZ_NAN ? __uint_as_float(QUIET_NAN) : Narrow::number(stored);
    }
};

struct F8E5m2fnuz : Narrow<u8, 2, 16, 0x47700000, FNUZ_NAN, FIXED, FNUZ_NAN> {
    static __device__ float number(u32 stored) {
        return stored == FNUZ_NAN ? __uint_as_float(QUIET_NAN) : Narrow::number(stored);
    }
};
