// 128-bit integers, which are used to reduce integers. This file is compiled after elements.cuh.

typedef __int128 i128;
typedef unsigned __int128 u128;

#define LEAST ((i128)((u128)1 << 127))

// Returns the product, or the nearest 128-bit number if the product overflows. The magnitude of the second factor fits
// in 64 bits.
__device__ inline i128 saturating_product(i128 a, i128 b) {
    bool is_negative = a < 0 != b < 0;
    u128 size = a < 0 ? -(u128)a : (u128)a, most = (u128)~LEAST + is_negative;
    u64 factor = b < 0 ? -(u64)b : (u64)b;
    u128 low = (u128)(u64)size * factor, high = (u128)(u64)(size >> 64) * factor + (u64)(low >> 64);
    u128 product = high << 64 | (u64)low;
    if (high >> 64 || product > most) product = most;
    return is_negative ? -product : product;
}

// Reads an integer, and extends it to 128 bits.
__device__ inline i128 load_integer(Dtype dtype, u64 address, u32 lane) {
    switch (dtype) {
        case Dtype::Bool: return load<1>(address, 1, lane).word[0] != 0;
        case Dtype::U8: return load<1>(address, 1, lane).word[0];
        case Dtype::I8: return (signed char)load<1>(address, 1, lane).word[0];
        case Dtype::U16: return load<2>(address, 2, lane).word[0];
        case Dtype::I16: return (short)load<2>(address, 2, lane).word[0];
        case Dtype::U32: return load<4>(address, 4, lane).word[0];
        case Dtype::I32: return (int)load<4>(address, 4, lane).word[0];
        case Dtype::U64: return load<8>(address, 8, lane).get<u64>(0);
        default: return (long long)load<8>(address, 8, lane).get<u64>(0);
    }
}

// Stores an integer. Returns false and stores nothing if the dtype cannot represent the integer.
__device__ inline bool store_integer(i128 whole, Dtype dtype, u32 size, u64 address, u32 lane) {
    bool is_signed = dtype >= Dtype::I8;
    i128 most = ((i128)1 << 8 * size - is_signed) - 1, least = is_signed ? -most - 1 : 0;
    if (whole < least || whole > most) return false;
    Group stored;
    stored.put(0, (u64)whole);
    switch (size) {
        case 1: store<1>(stored, address, 1, lane); break;
        case 2: store<2>(stored, address, 2, lane); break;
        case 4: store<4>(stored, address, 4, lane); break;
        default: store<8>(stored, address, 8, lane);
    }
    return true;
}
