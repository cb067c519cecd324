// harness: rule unsynchronized-d2h-result
// harness: note a warning about correctness: both variants take 2 ms
// harness: expect copies to page-locked memory that no later call waits for, until the end of the capture
//
// Kernels of 0.5 ms whose results, 16 KiB each, are copied to page-locked memory: far
// too little to be worth an overlap. fixed waits for the stream before the host reads
// them. bad doesn't; a program like that reads what happens to be there. To check the
// numbers all the same, it watches the memory until every element has changed, which
// leaves no row in the trace. fixed looks as well, so that both do the same. The run
// must not wait for the device after the last repeat: no download(), no frees.
#include "common.cuh"

// A kernel of at least `ns` that leaves its result in y.
__global__ void slow_saxpy(float* y, float a, const float* x, size_t n, long long ns) {
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "4096"}});
  const size_t n = args.integer("size");  // elements of an iteration
  const int iterations = 4;
  const cudaStream_t stream = make_stream();
  float* x = device_alloc<float>(n);
  float* y = device_alloc<float>(n * iterations);
  float* host = pinned_alloc<float>(n * iterations);
  {
    std::vector<float> numbers(n);
    for (size_t i = 0; i < n; ++i) numbers[i] = static_cast<float>(i % 1000 + 1);
    upload(x, numbers.data(), n);
  }

  measure(
      args,
      [&] {
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          slow_saxpy<<<blocks_for(n), 256, 0, stream>>>(y + i * n, 1, x, n, 500'000);
          CHECK(cudaMemcpyAsync(host + i * n, y + i * n, n * sizeof(float),
                                cudaMemcpyDeviceToHost, stream));
        }
        if (args.fixed()) CHECK(cudaStreamSynchronize(stream));
        size_t arrived = 0;
        const volatile float* watched = host;
        wait_unrecorded([&] {
          while (arrived < n * iterations && watched[arrived] != 0) ++arrived;
          return arrived == n * iterations;
        });
      },
      Finish::by_body,
      [&] {
        std::memset(host, 0, n * iterations * sizeof(float));
        CHECK(cudaMemsetAsync(y, 0, n * iterations * sizeof(float), stream));
      });

  verify("result", host, n * iterations,
         [&](size_t i) { return static_cast<float>(i % n % 1000 + 1); });
  return passed();
}
