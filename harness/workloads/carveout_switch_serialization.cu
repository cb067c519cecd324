// harness: rule carveout-switch-serialization
// harness: note the carve-out is a preference: a driver that leaves the multiprocessors configured for the larger demand shows no fault
// harness: expect kernels of two streams with different shared memory configurations wait for each other on most multiprocessors: 7 ms -> 5 ms
//
// A kernel with little shared memory and one with much, on two independent streams, with
// room on every multiprocessor for both. bad asks for all L1 and no shared memory for
// the small one (carve-out 0 against 100): before a multiprocessor can change its
// configuration it has to be empty. fixed asks for 100 for both.
#include "common.cuh"

constexpr int kBigBytes = 96 << 10;
constexpr int kSmallBytes = 256 * sizeof(unsigned);

// Passes a value through shared memory, and holds its place for `ns`.
__device__ void through_shared(long long ns, unsigned* counter) {
  extern __shared__ unsigned shared[];
  shared[threadIdx.x] = threadIdx.x + 1;
  __syncthreads();
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
  const unsigned other = blockDim.x - 1 - threadIdx.x;
  if (threadIdx.x == 0 && shared[other] == other + 1) atomicAdd(counter, 1U);
}

// Two functions, because a carve-out belongs to a function.
__global__ void small(long long ns, unsigned* counter) { through_shared(ns, counter); }
__global__ void big(long long ns, unsigned* counter) { through_shared(ns, counter); }

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "10"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));

  CHECK(cudaFuncSetAttribute(big, cudaFuncAttributeMaxDynamicSharedMemorySize, kBigBytes));
  CHECK(cudaFuncSetAttribute(big, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared));
  CHECK(cudaFuncSetAttribute(
      small, cudaFuncAttributePreferredSharedMemoryCarveout,
      args.bad() ? cudaSharedmemCarveoutMaxL1 : cudaSharedmemCarveoutMaxShared));

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      small<<<2 * sms, 256, kSmallBytes, streams[0]>>>(500'000, counter);
      big<<<sms, 256, kBigBytes, streams[1]>>>(500'000, counter);
    }
  });

  verify_counter("blocks", counter, 3ULL * sms * iterations * args.runs());
  return passed();
}
