// Reduces partial values, which follow each other in memory, in their order. The types and the single rounding are the
// same as in src/exec/reduce.rs. This file is compiled after integers.cuh and floats.cuh.
// src/gpu/arithmetic/reduction.rs writes the job table.

enum class Op : u32 { Sum, Product, Max, Min, Band, Bor, Bxor };

struct Reduction {
    u64 partial_values, target;
    // The number of elements of a partial value. A complex number counts as two elements.
    u64 numel;
    // The divisor of the sum: an integer, or the bits of a number in the type of the sums.
    u64 divisor;
    // The offset of this job's `Outcome` in the job table, in bytes.
    u64 outcome;
    u32 first_block, parts;
    Dtype dtype;
    u32 itemsize;
    Op op;
    // The alignment of the partial values and of the target.
    u32 lane;
};

// The first element whose result does not fit the dtype or has a remainder, and the sum of the element's partial
// values.
struct Outcome {
    u64 element, low, high;
};

struct Plus {
    template <typename Sum>
    __device__ Sum operator()(Sum sum, Sum partial) const { return sum + partial; }
};

struct Chosen {
    Op op;
    // If one value is a NaN, the result is a NaN. Of two zeros, the first is kept.
    template <typename Sum>
    __device__ Sum operator()(Sum sum, Sum partial) const {
        bool is_nan = partial != partial;
        if (op == Op::Product) return sum * partial;
        if (op == Op::Max) return partial > sum || is_nan ? partial : sum;
        return partial < sum || is_nan ? partial : sum;
    }
};

// Divides a sum. This function is not inlined, because a division is long.
template <typename Sum>
__device__ __noinline__ Sum quotient(Sum sum, Sum divisor) { return sum / divisor; }

// Reduces some units of a job. A unit has 16 bytes, or 4 elements of 8 bits.
template <typename Format, typename Combine>
__device__ void reduce_floats(const Reduction& job, u64 begin, u32 units, Combine combine) {
    typedef typename Format::Bits Bits;
    typedef typename Format::Sum Sum;
    const u32 width = sizeof(Bits) == 1 ? 4 : 16, each = width / sizeof(Bits);
    const u64 len = job.numel * sizeof(Bits);
    const Sum divisor = Format::divisor(job.divisor);
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
        u64 offset = (begin + unit) * width;
        if (offset >= len) return;
        u32 bytes = min((u64)width, len - offset);
        Sum sums[each];
        Group partial_values = load<width>(job.partial_values + offset, bytes, job.lane);
#pragma unroll
        for (u32 nth = 0; nth < each; nth++) sums[nth] = Format::number(partial_values.get<Bits>(nth));
#pragma unroll 1
        for (u32 part = 1; part < job.parts; part++) {
            partial_values = load<width>(job.partial_values + part * len + offset, bytes, job.lane);
#pragma unroll
            for (u32 nth = 0; nth < each; nth++)
                sums[nth] = combine(sums[nth], (Sum)Format::number(partial_values.get<Bits>(nth)));
        }
        Group values;
#pragma unroll
        for (u32 nth = 0; nth < each; nth++) {
            if (divisor != 1) sums[nth] = quotient(sums[nth], divisor);
            values.put(nth, Format::rounded(sums[nth]));
        }
        store<width>(values, job.target + offset, bytes, job.lane);
    }
}

template <typename Format>
__device__ void reduce_floats(const Reduction& job, u64 begin, u32 units) {
    if (job.op == Op::Sum) reduce_floats<Format>(job, begin, units, Plus());
    else reduce_floats<Format>(job, begin, units, Chosen{job.op});
}

__device__ inline i128 sum_of(const Reduction& job, u64 element) {
    u64 address = job.partial_values + element * job.itemsize;
    i128 sum = load_integer(job.dtype, address, job.lane);
#pragma unroll 1
    for (u32 part = 1; part < job.parts; part++) {
        address += job.numel * job.itemsize;
        i128 partial = load_integer(job.dtype, address, job.lane);
        switch (job.op) {
            case Op::Sum: sum += partial; break;
            case Op::Product: sum = saturating_product(sum, partial); break;
            case Op::Max: sum = partial > sum ? partial : sum; break;
            case Op::Min: sum = partial < sum ? partial : sum; break;
            case Op::Band: sum &= partial; break;
            case Op::Bor: sum |= partial; break;
            default: sum ^= partial;
        }
    }
    return sum;
}

// Reduces some units of a job with integers. A unit is one element.
__device__ inline void reduce_integers(const Reduction& job, u64 begin, u32 units, Outcome* outcome) {
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
        u64 element = begin + unit;
        if (element >= job.numel) return;
        i128 sum = sum_of(job, element), divisor = job.divisor;
        bool is_whole = divisor == 1 || sum % divisor == 0;
        u64 address = job.target + element * job.itemsize;
        i128 whole = divisor == 1 ? sum : sum / divisor;
        if (!is_whole || !store_integer(whole, job.dtype, job.itemsize, address, job.lane))
            atomicMin(&outcome->element, element);
    }
}

extern "C" __global__ void reduce(const Reduction* jobs, u32 count, u32 block_units) {
    __shared__ Reduction job;
    take(job, jobs, count);
    u64 begin = (u64)(blockIdx.x - job.first_block) * block_units;
    switch (job.dtype) {
        case Dtype::F64: return reduce_floats<F64>(job, begin, block_units);
        case Dtype::F32: return reduce_floats<F32>(job, begin, block_units);
        case Dtype::F16: return reduce_floats<F16>(job, begin, block_units);
        case Dtype::Bf16: return reduce_floats<Bf16>(job, begin, block_units);
        case Dtype::F8E4m3fn: return reduce_floats<F8E4m3fn>(job, begin, block_units);
        case Dtype::F8E5m2: return reduce_floats<F8E5m2>(job, begin, block_units);
        case Dtype::F8E4m3fnuz: return reduce_floats<F8E4m3fnuz>(job, begin, block_units);
        case Dtype::F8E5m2fnuz: return reduce_floats<F8E5m2fnuz>(job, begin, block_units);
        default: return reduce_integers(job, begin, block_units, (Outcome*)((u64)jobs + job.outcome));
    }
}

// Runs after `reduce`, with one block for each job: computes the sum for the first element that failed.
extern "C" __global__ void report_outcomes(const Reduction* jobs, u32, u32) {
    if (threadIdx.x != 0) return;
    Reduction job;
    read(job, jobs + blockIdx.x);
    Outcome* outcome = (Outcome*)((u64)jobs + job.outcome);
    u64 element = __ldg(&outcome->element);
    if (element == ~0ull) return;
    i128 sum = sum_of(job, element);
    __stwb(&outcome->low, (u64)sum);
    __stwb(&outcome->high, (u64)(sum >> 64));
}
