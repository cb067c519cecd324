// harness: rule mempool-trim-thrash
// harness: expect every stream synchronization gives the pool's memory back to the system and the next cudaMallocAsync fetches it again: pool events in each iteration of bad, none in fixed; 24 ms -> 10 ms
//
// Each iteration allocates from the memory pool, computes, frees and waits for its
// stream. The pool's release threshold is 0 by default (bad): at each synchronization
// it gives back what it has unused. fixed lets it keep everything. Another stream
// keeps the GPU busy, so that the wait itself costs nothing.
#include "common.cuh"

// Uses the memory as a step would: writes it, computes for `ns`, reads it back.
__global__ void use(volatile unsigned* scratch, long long ns, unsigned* counter) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  scratch[i] = static_cast<unsigned>(i);
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
  if (threadIdx.x == 0 && scratch[i] == i) atomicAdd(counter, 1U);
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}, {"mebibytes", "256"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const size_t bytes = static_cast<size_t>(args.integer("mebibytes")) << 20;
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const unsigned blocks = 3 * sms;  // two of these kernels fit on the GPU together
  if (bytes < blocks * 256 * sizeof(unsigned)) usage_error("choose more --mebibytes");

  if (args.fixed()) {
    cudaMemPool_t pool = nullptr;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    std::uint64_t everything = UINT64_MAX;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything));
  }

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      spin<<<blocks, 256, 0, streams[1]>>>(500'000, counter);
      unsigned* scratch = nullptr;
      CHECK(cudaMallocAsync(&scratch, bytes, streams[0]));
      use<<<blocks, 256, 0, streams[0]>>>(scratch, 400'000, counter);
      CHECK(cudaFreeAsync(scratch, streams[0]));
      CHECK(cudaStreamSynchronize(streams[0]));
    }
  });

  verify_counter("blocks", counter, 2ULL * iterations * blocks * args.runs());
  return passed();
}
