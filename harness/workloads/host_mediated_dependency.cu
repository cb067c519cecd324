// harness: rule host-mediated-dependency
// harness: expect the GPU idles about 8 us longer at each of 80 hand-overs while the host wakes up and launches: 3.8 ms -> 3.2 ms
//
// Two streams work on the same data in turns. bad hands over through the host, which
// waits for one stream and then launches on the other; fixed through an event that the
// other stream waits for.
#include "common.cuh"

constexpr int kRounds = 6'000;  // about 40 us

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "40"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const size_t n = 3UL * sms * 256;
  unsigned* data = device_alloc<unsigned>(n);
  cudaEvent_t handed_over[2];
  for (cudaEvent_t& event : handed_over) {
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (int s = 0; s < 2; ++s) {
        churn<<<blocks_for(n), 256, 0, streams[s]>>>(data, n, kRounds);
        if (args.bad()) {
          CHECK(cudaStreamSynchronize(streams[s]));
        } else {
          CHECK(cudaEventRecord(handed_over[s], streams[s]));
          CHECK(cudaStreamWaitEvent(streams[1 - s], handed_over[s], 0));
        }
      }
    }
  });

  const unsigned long long steps = 2ULL * iterations * args.runs() * kRounds;
  verify("data", download(data, n), [value = churned(0, steps)](size_t) { return value; });
  return passed();
}
