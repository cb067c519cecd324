// harness: rule timing-event-as-dependency
// harness: expect a record of an event that keeps time costs the host about 1 us more: 2000 records, 4.1 ms -> 1.3 ms
//
// Two streams take turns on the same data, tied by 80 events at each turn, 25 turns. The
// host needs longer for the events than the GPU for a kernel, so their cost shows.
// bad creates the events with cudaEventCreate, though nothing reads their time; fixed
// with cudaEventDisableTiming. The warm-up has two turns, to keep the trace small.
#include "common.cuh"

constexpr int kEvents = 80;
constexpr int kRounds = 6'000;  // about 40 us

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "25"}});
  const int turns = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(2);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const size_t n = 3UL * sms * 256;
  unsigned* data = device_alloc<unsigned>(n);
  cudaEvent_t events[kEvents];
  for (cudaEvent_t& event : events) {
    CHECK(args.bad() ? cudaEventCreate(&event)
                     : cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }

  unsigned long long kernels = 0;
  measure(args, [&] {
    for (int i = 0; i < (in_region ? turns : 2); ++i) {
      const Iteration iteration(i);
      const cudaStream_t mine = streams[i % 2], other = streams[1 - i % 2];
      churn<<<blocks_for(n), 256, 0, mine>>>(data, n, kRounds);
      for (const cudaEvent_t event : events) {
        CHECK(cudaEventRecord(event, mine));
        CHECK(cudaStreamWaitEvent(other, event, 0));
      }
      ++kernels;
    }
  });

  verify("data", download(data, n),
         [value = churned(0, kernels * kRounds)](size_t) { return value; });
  return passed();
}
