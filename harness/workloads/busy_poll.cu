// harness: rule busy-poll
// harness: note polling costs a processor core, not run time: both variants take 2 ms
// harness: expect hundreds of queries for each 400 us kernel; region time stays the same, the host thread sleeps instead
//
// Steps of 400 us alternate between two streams, each ordered after the one before by
// an event. The host waits for the previous step while the next one is queued, so the
// GPU never runs dry. bad asks cudaStreamQuery again and again, fixed sleeps in
// cudaEventSynchronize on an event made with cudaEventBlockingSync. The warm-up has two
// steps, to keep the trace small.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "5"}});
  const int steps = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  cudaEvent_t done[2];
  for (cudaEvent_t& event : done) {
    const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
    CHECK(cudaEventCreateWithFlags(&event, flags));
  }

  const auto wait_for = [&](int slot) {
    if (args.fixed()) {
      CHECK(cudaEventSynchronize(done[slot]));
      return;
    }
    cudaError_t state;
    while ((state = cudaStreamQuery(streams[slot])) == cudaErrorNotReady) {
    }
    CHECK(state);
  };

  unsigned long long kernels = 0;
  measure(args, [&] {
    for (int step = 0; step < (in_region ? steps : 2); ++step) {
      const Iteration iteration(step);
      const int slot = step % 2;
      if (step > 0) CHECK(cudaStreamWaitEvent(streams[slot], done[1 - slot], 0));
      spin<<<8, 64, 0, streams[slot]>>>(400'000, counter);
      CHECK(cudaEventRecord(done[slot], streams[slot]));
      ++kernels;
      if (step > 0) wait_for(1 - slot);
    }
  });

  verify_counter("counter", counter, 8 * kernels);
  return passed();
}
