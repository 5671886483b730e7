// Common code of all kernels: a launch runs the jobs of a table, and each job has consecutive thread blocks.
//
// Kernels read memory only by `__ldg`, and write it only by `__stwb` and atomics. Therefore a stand-in for a device can
// check each access. This file needs no headers.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

template <typename Job>
__device__ void read(Job& job, const Job* from) {
    for (u32 word = 0; word < sizeof(Job) / sizeof(u64); word++) ((u64*)&job)[word] = __ldg((const u64*)from + word);
}

// Finds the job of this block. The table is sorted by the first block of each job; the result is the last job whose
// first block is not after this block.
template <typename Job>
__device__ void take(Job& job, const Job* jobs, u32 count) {
    if (threadIdx.x == 0) {
        u32 found = 0, beyond = count;
        while (beyond - found > 1) {
            u32 middle = found + (beyond - found) / 2;
            if (__ldg(&jobs[middle].first_block) <= blockIdx.x) found = middle;
            else beyond = middle;
        }
        read(job, jobs + found);
    }
    __syncthreads();
}
