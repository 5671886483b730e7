// Casts between floats, with the same bits as src/exec/cast.rs. This file is compiled after floats.cuh.
// src/gpu/arithmetic/conversion.rs writes the job table.

struct Conversion {
    u64 source, target, numel;
    // The range of elements for which lost values are counted.
    u64 begin, end;
    // The offset of this job's `Lost` in the job table, in bytes.
    u64 lost;
    u32 first_block, unused;
    Dtype from, to;
    // The alignment of the source and of the target.
    u32 source_lane, target_lane;
};

// The number of lost values. A value is lost if it is beyond the largest finite value of the target, or if it is a NaN
// in the source.
struct Lost {
    u64 overflows, nans;
};

// Casts some units of a job. A unit has 4 elements, or 2 if one of the dtypes has 64 bits.
template <typename From, typename To>
__device__ void convert(const Conversion& job, u64 begin, u32 units, Lost* lost) {
    typedef typename From::Bits Source;
    typedef typename To::Bits Target;
    const u32 from = sizeof(Source), to = sizeof(Target), each = from == 8 || to == 8 ? 2 : 4;
    u32 overflows = 0, nans = 0;
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
        u64 element = (begin + unit) * each;
        if (element >= job.numel) break;
        u32 count = min((u64)each, job.numel - element);
        Group source = load<each * from>(job.source + element * from, count * from, job.source_lane);
        Group target;
#pragma unroll
        for (u32 nth = 0; nth < each; nth++) {
            Loaded loaded = From::loaded(source.get<Source>(nth));
            Stored<Target> stored = To::stored(loaded.single);
            target.put(nth, stored.bits);
            bool is_counted = element + nth >= job.begin && element + nth < job.end;
            overflows += is_counted && stored.beyond && (loaded.was_finite || To::loses_infinity);
            nans += is_counted && magnitude(loaded.single) > INFINITY_BITS;
        }
        store<each * to>(target, job.target + element * to, count * to, job.target_lane);
    }
    if (overflows) atomicAdd(&lost->overflows, (u64)overflows);
    if (nans) atomicAdd(&lost->nans, (u64)nans);
}

template <typename From>
__device__ void convert_from(const Conversion& job, u64 begin, u32 units, Lost* lost) {
    switch (job.to) {
        case Dtype::F64: return convert<From, F64>(job, begin, units, lost);
        case Dtype::F32: return convert<From, F32>(job, begin, units, lost);
        case Dtype::F16: return convert<From, F16>(job, begin, units, lost);
        case Dtype::Bf16: return convert<From, Bf16>(job, begin, units, lost);
        case Dtype::F8E4m3fn: return convert<From, F8E4m3fn>(job, begin, units, lost);
        case Dtype::F8E5m2: return convert<From, F8E5m2>(job, begin, units, lost);
        case Dtype::F8E4m3fnuz: return convert<From, F8E4m3fnuz>(job, begin, units, lost);
        default: return convert<From, F8E5m2fnuz>(job, begin, units, lost);
    }
}

extern "C" __global__ void cast(const Conversion* jobs, u32 count, u32 block_units) {
    __shared__ Conversion job;
    take(job, jobs, count);
    u64 begin = (u64)(blockIdx.x - job.first_block) * block_units;
    Lost* lost = (Lost*)((u64)jobs + job.lost);
    switch (job.from) {
        case Dtype::F64: return convert_from<F64>(job, begin, block_units, lost);
        case Dtype::F32: return convert_from<F32>(job, begin, block_units, lost);
        case Dtype::Bf16: return convert_from<Bf16>(job, begin, block_units, lost);
        default:
            if (job.to == Dtype::Bf16) return convert<F16, Bf16OfF16>(job, begin, block_units, lost);
            return convert_from<F16>(job, begin, block_units, lost);
    }
}
