// What all kernels begin with: a launch does a table of jobs, each of which has a row of blocks.
//
// Memory is read by `__ldg` and written by `__stwb` and atomics alone, so that a stand-in for a device can look at each
// access. Needs no headers.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

template <typename Job>
__device__ void read(Job& job, const Job* from) {
    for (u32 word = 0; word < sizeof(Job) / sizeof(u64); word++) ((u64*)&job)[word] = __ldg((const u64*)from + word);
}

// Take the job of this block out of a table in the order of blocks: the last that begins at it or before.
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
