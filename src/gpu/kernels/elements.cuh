// Elements in memory: a thread reads or writes up to 16 bytes in one access. This file is compiled after blocks.cuh.

// The codes of dtypes, as in src/catalog/dtype.rs.
enum class Dtype : u32 {
    Bool, U8, U16, U32, U64, I8, I16, I32, I64, F16, Bf16, F32, F64, C32, C64, C128,
    F8E4m3fn, F8E5m2, F8E4m3fnuz, F8E5m2fnuz,
};

// A few elements in registers. The first element is in the low bits.
struct Group {
    u32 word[4] = {};

    template <typename Bits>
    __device__ Bits get(u32 nth) const {
        if constexpr (sizeof(Bits) == 8) return word[2 * nth] | (u64)word[2 * nth + 1] << 32;
        return (Bits)(word[nth * sizeof(Bits) / 4] >> nth * sizeof(Bits) % 4 * 8);
    }

    // Sets the bits of one element in the group. The element must not have been set before.
    template <typename Bits>
    __device__ void put(u32 nth, Bits bits) {
        word[nth * sizeof(Bits) / 4] |= (u32)bits << nth * sizeof(Bits) % 4 * 8;
        if constexpr (sizeof(Bits) == 8) word[2 * nth + 1] = bits >> 32;
    }
};

// The type of a memory access that covers a whole group.
template <u32 WIDTH> struct Wide;
template <> struct Wide<1> { typedef u8 Lane; };
template <> struct Wide<2> { typedef u16 Lane; };
template <> struct Wide<4> { typedef u32 Lane; };
template <> struct Wide<8> { typedef u64 Lane; };
template <> struct Wide<16> { typedef uint4 Lane; };

// Returns the width in bytes of the widest access that has at most one word and that divides `bytes`.
__device__ inline u32 narrow(u32 lane, u32 bytes) {
    lane = min(lane, 4u);
    while (bytes % lane) lane /= 2;
    return lane;
}

// Access to groups that are unaligned or incomplete. These functions are not inlined, because they are long and rarely
// needed.
__device__ __noinline__ uint4 load_lanes(u64 address, u32 bytes, u32 lane) {
    lane = narrow(lane, bytes);
    u32 word[4] = {};
#pragma unroll
    for (u32 at = 0; at < 16; at++) {
        u32 value = 0;
        if (at % lane || at >= bytes) continue;
        if (lane == 1) value = __ldg((const u8*)(address + at));
        if (at % 2 == 0 && lane == 2) value = __ldg((const u16*)(address + at));
        if (at % 4 == 0 && lane == 4) value = __ldg((const u32*)(address + at));
        word[at / 4] |= value << at % 4 * 8;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __noinline__ void store_lanes(uint4 value, u64 address, u32 bytes, u32 lane) {
    lane = narrow(lane, bytes);
    const u32 word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (u32 at = 0; at < 16; at++) {
        u32 bits = word[at / 4] >> at % 4 * 8;
        if (at % lane || at >= bytes) continue;
        if (lane == 1) __stwb((u8*)(address + at), (u8)bits);
        if (at % 2 == 0 && lane == 2) __stwb((u16*)(address + at), (u16)bits);
        if (at % 4 == 0 && lane == 4) __stwb((u32*)(address + at), bits);
    }
}

// Loads the first `bytes` bytes of a group of up to WIDTH bytes. The address is a multiple of `lane`, and `lane` is at
// most WIDTH.
template <u32 WIDTH>
__device__ Group load(u64 address, u32 bytes, u32 lane) {
    Group group;
    if (lane != WIDTH || bytes != WIDTH) {
        uint4 value = load_lanes(address, bytes, lane);
        group.word[0] = value.x, group.word[1] = value.y, group.word[2] = value.z, group.word[3] = value.w;
        return group;
    }
    auto value = __ldg((const typename Wide<WIDTH>::Lane*)address);
    if constexpr (WIDTH == 16) {
        group.word[0] = value.x, group.word[1] = value.y, group.word[2] = value.z, group.word[3] = value.w;
    } else {
        group.put(0, value);
    }
    return group;
}

// Stores the first `bytes` bytes of a group, under the same conditions as `load`.
template <u32 WIDTH>
__device__ void store(const Group& group, u64 address, u32 bytes, u32 lane) {
    uint4 value = make_uint4(group.word[0], group.word[1], group.word[2], group.word[3]);
    if (lane != WIDTH || bytes != WIDTH) return store_lanes(value, address, bytes, lane);
    typedef typename Wide<WIDTH>::Lane Lane;
    if constexpr (WIDTH == 16) __stwb((Lane*)address, value);
    else __stwb((Lane*)address, group.get<Lane>(0));
}
