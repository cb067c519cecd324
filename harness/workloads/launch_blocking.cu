// harness: rule launch-blocking
// harness: env bad CUDA_LAUNCH_BLOCKING=1
// harness: expect every launch call lasts as long as its kernel, so three streams take turns: 9 ms -> 3 ms
//
// Three independent streams with kernels that fit on the GPU together. The variants
// differ in the environment alone: CUDA_LAUNCH_BLOCKING=1 (bad), meant for debugging.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "10"}});
  const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (args.bad() != (blocking && std::atoi(blocking) != 0)) {
    usage_error("set CUDA_LAUNCH_BLOCKING=1 for --variant bad, and only for that");
  }
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(3);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const unsigned blocks = 2 * sms;

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (const cudaStream_t stream : streams) {
        spin<<<blocks, 256, 0, stream>>>(300'000, counter);
      }
    }
  });

  verify_counter("blocks", counter, 3ULL * iterations * blocks * args.runs());
  return passed();
}
