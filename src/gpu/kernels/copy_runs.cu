// Copies runs of bytes in loop nests, many nests in one launch. All sizes and offsets are in bytes; dtypes do not
// matter.
//
// A block copies `block_units` units of one nest. A unit has `lane` bytes: the widest access that divides addresses,
// run and steps. This file is compiled after blocks.cuh. src/gpu/copies.rs writes the job table.

struct Loop {
    u64 source_step, target_step;
    // The number of iterations. `unused` is the upper half of this number in the job table, and is always 0.
    u32 count, unused;
};

struct Copy {
    u64 source, target;
    // The loops over the runs, with the outermost loop first.
    Loop loop[4];
    // The index of the first thread block; the number of bytes in a unit; the number of units in the nest and in a run;
    // the number of loops.
    u32 first_block, lane, units, run_units, loops, unused;
};

template <typename Lane>
__device__ void copy_units(const Copy& copy, u32 begin, u32 end) {
    // A thread loads this many units before it stores them, so that several loads run at the same time.
    const u32 batch = 4;
    for (u32 first = begin + threadIdx.x; first < end; first += batch * blockDim.x) {
        Lane value[batch];
        u64 target[batch];
#pragma unroll
        for (u32 nth = 0; nth < batch; nth++) {
            u32 unit = first + nth * blockDim.x;
            if (unit >= end) break;
            u32 run = unit / copy.run_units;
            u64 within = (u64)(unit - run * copy.run_units) * sizeof(Lane);
            u64 source = copy.source + within;
            target[nth] = copy.target + within;
#pragma unroll 1
            for (u32 at = copy.loops; at-- > 0;) {
                const Loop& loop = copy.loop[at];
                u32 outer = run / loop.count;
                u32 turn = run - outer * loop.count;
                source += turn * loop.source_step;
                target[nth] += turn * loop.target_step;
                run = outer;
            }
            value[nth] = __ldg((const Lane*)source);
        }
#pragma unroll
        for (u32 nth = 0; nth < batch; nth++) {
            if (first + nth * blockDim.x < end) __stwb((Lane*)target[nth], value[nth]);
        }
    }
}

extern "C" __global__ void copy_runs(const Copy* copies, u32 count, u32 block_units) {
    __shared__ Copy copy;
    take(copy, copies, count);
    u32 begin = (blockIdx.x - copy.first_block) * block_units;
    u32 end = min(begin + block_units, copy.units);
    switch (copy.lane) {
        case 16: return copy_units<uint4>(copy, begin, end);
        case 8: return copy_units<u64>(copy, begin, end);
        case 4: return copy_units<u32>(copy, begin, end);
        case 2: return copy_units<u16>(copy, begin, end);
        default: return copy_units<u8>(copy, begin, end);
    }
}
