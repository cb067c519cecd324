// harness: rule unsynchronized-d2h-result
// harness: note a warning about correctness: both variants take the same time
// harness: expect copies to page-locked memory that no later call waits for, until the end of the capture
//
// Kernels whose results are copied to page-locked memory. fixed waits for the stream
// before the host reads them. bad doesn't; a program like that reads what happens to
// be there. To check the numbers all the same, it watches the memory until every
// element has changed, which leaves no row in the trace. So the run must not wait for
// the device after the last repeat: no download(), no frees.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "1048576"}});
  const size_t n = args.integer("size");  // elements of an iteration
  const int iterations = 4;
  const cudaStream_t stream = make_stream();
  float* x = device_alloc<float>(n);
  float* y = device_alloc<float>(n * iterations);
  float* host = pinned_alloc<float>(n * iterations);
  unsigned* counter = device_alloc<unsigned>(1);
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
          spin<<<8, 64, 0, stream>>>(500'000, counter);
          saxpy<<<blocks_for(n), 256, 0, stream>>>(y + i * n, 1, x, n);
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
