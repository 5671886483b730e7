// The kernels of dtshard, compiled as C++ for the host. Blocks and threads are loops that run one thread after the
// other, so errors in the synchronization of threads are not found. Every access is checked before it is made.

#include <setjmp.h>

typedef unsigned long long Address;

// An allocation: the address that programs see, and the address of the bytes in host memory.
struct Allocation {
    Address seen, real, bytes;
};

struct Illegal {
    Address address, bytes;
};

namespace {

struct Index {
    unsigned int x;
};

// These variables are thread-local, because streams are threads.
thread_local Index threadIdx, blockIdx, blockDim;
thread_local const Allocation *first, *end, *last;
thread_local Illegal illegal;
// The place where a launch continues after an illegal access.
thread_local jmp_buf end_of_launch;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

bool holds(const Allocation& allocation, Address address, Address bytes) {
    // The expressions are written so that no number can overflow.
    Address at = address - allocation.seen;
    return address >= allocation.seen && bytes <= allocation.bytes && at <= allocation.bytes - bytes;
}

template <typename T>
T* located(const T* pointer) {
    Address address = (Address)pointer;
    if (address % sizeof(T) == 0) {
        for (const Allocation* at = first; at < end && !(last && holds(*last, address, sizeof(T))); at++) last = at;
        if (last && holds(*last, address, sizeof(T))) return (T*)(last->real + (address - last->seen));
    }
    illegal = {address, sizeof(T)};
    longjmp(end_of_launch, 1);
}

template <typename T>
T __ldg(const T* from) { return *located(from); }

template <typename T>
void __stwb(T* at, T value) { *located(at) = value; }

template <typename T>
void atomicAdd(T* at, T value) { *located(at) += value; }

template <typename T>
void atomicMin(T* at, T value) {
    if (value < *located(at)) *located(at) = value;
}

template <typename T>
T min(T a, T b) { return b < a ? b : a; }

template <typename To, typename From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

float __uint_as_float(unsigned int bits) { return same_bits<float>(bits); }
unsigned int __float_as_uint(float number) { return same_bits<unsigned int>(number); }
double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
long long __double_as_longlong(double number) { return same_bits<long long>(number); }

}  // namespace

#define __global__
#define __device__
#define __noinline__
#define __shared__ static thread_local
#define __syncthreads()

#include "../../../src/gpu/kernels/blocks.cuh"
#include "../../../src/gpu/kernels/copy_runs.cu"
#include "../../../src/gpu/kernels/elements.cuh"
#include "../../../src/gpu/kernels/integers.cuh"
#include "../../../src/gpu/kernels/floats.cuh"
#include "../../../src/gpu/kernels/reduce.cu"
#include "../../../src/gpu/kernels/cast.cu"

namespace {

// All kernels have these arguments: a table, the number of its jobs, and the number of units of a block.
struct Kernel {
    const char* name;
    void (*run)(Address table, unsigned int jobs, unsigned int block_units);
};

template <typename Job, void (*kernel)(const Job*, unsigned int, unsigned int)>
void on_table(Address table, unsigned int jobs, unsigned int block_units) { kernel((const Job*)table, jobs, block_units); }

const Kernel KERNELS[] = {
    {"copy_runs", on_table<Copy, copy_runs>},
    {"reduce", on_table<Reduction, reduce>},
    {"report_outcomes", on_table<Reduction, report_outcomes>},
    {"cast", on_table<Conversion, cast>},
};

}  // namespace

// Returns the name of a kernel, or null after the last one.
extern "C" const char* stand_in_kernel(unsigned int number) {
    return number < sizeof(KERNELS) / sizeof(Kernel) ? KERNELS[number].name : nullptr;
}

// Runs a launch. Returns the illegal access that ended it, or an access of 0 bytes if the launch was completed.
extern "C" Illegal stand_in_launch(unsigned int number, const Allocation* allocations, Address count, unsigned int blocks,
                                   unsigned int threads, Address table, unsigned int jobs, unsigned int block_units) {
    first = allocations, end = allocations + count, last = nullptr, illegal = {0, 0};
    blockDim.x = threads;
    if (setjmp(end_of_launch)) return illegal;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            KERNELS[number].run(table, jobs, block_units);
    return illegal;
}
