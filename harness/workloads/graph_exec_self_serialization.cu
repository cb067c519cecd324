// harness: rule graph-exec-self-serialization
// harness: expect launches of one executable graph wait for each other though they go to two streams: 16 ms -> 8 ms with one for each stream
//
// A graph of four kernels that leave room for a second one is launched into two
// independent streams. An executable graph never runs beside itself, so with one (bad)
// the streams take turns; fixed instantiates one for each stream.
#include "common.cuh"

constexpr int kKernels = 4;

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "10"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const unsigned blocks = 3 * sms;  // two of these kernels fit on the GPU together

  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
  for (int k = 0; k < kKernels; ++k) spin<<<blocks, 256, 0, streams[0]>>>(200'000, counter);
  CHECK(cudaStreamEndCapture(streams[0], &graph));
  cudaGraphExec_t execs[2] = {};
  CHECK(cudaGraphInstantiate(&execs[0], graph, 0));
  if (args.fixed()) CHECK(cudaGraphInstantiate(&execs[1], graph, 0));

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      CHECK(cudaGraphLaunch(execs[0], streams[0]));
      CHECK(cudaGraphLaunch(execs[args.bad() ? 0 : 1], streams[1]));
    }
  });

  verify_counter("blocks", counter, 2ULL * iterations * kKernels * blocks * args.runs());
  return passed();
}
