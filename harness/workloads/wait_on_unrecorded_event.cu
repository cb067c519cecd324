// harness: rule wait-on-unrecorded-event
// harness: note a warning about correctness: the wait in bad does nothing, so bad is no slower
// harness: expect bad waits for an event that was never recorded, which succeeds at once; in fixed the second stream starts after the first
//
// Each iteration stream 2 is meant to wait for stream 1. bad forgets to record the
// event, so nothing is waited for. The kernels only count, in any order, so that both
// variants have the same result all the same.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const unsigned blocks = 3 * sms;  // two of these kernels fit on the GPU together
  cudaEvent_t ready = nullptr;
  CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      spin<<<blocks, 256, 0, streams[0]>>>(200'000, counter);
      if (args.fixed()) CHECK(cudaEventRecord(ready, streams[0]));
      CHECK(cudaStreamWaitEvent(streams[1], ready, 0));
      spin<<<blocks, 256, 0, streams[1]>>>(200'000, counter);
    }
  });

  verify_counter("blocks", counter, 2ULL * iterations * blocks * args.runs());
  return passed();
}
