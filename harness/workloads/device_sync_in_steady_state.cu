// harness: rule device-sync-in-steady-state
// harness: expect the host waits for all four streams though it reads a result of one: 8.4 ms -> 6 ms
//
// Each iteration gives four independent streams one kernel (100 us on the first, 300 us
// on the others). The host reads a number that the first stream made and works on it
// for 100 us. bad waits for the device, so the other streams run dry while the host
// works; fixed waits for the first stream, and the others stay busy.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(4);
  unsigned* counters = device_alloc<unsigned>(streams.size());
  unsigned* result = pinned_alloc<unsigned>(1);
  std::vector<unsigned> seen;

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (size_t s = 0; s < streams.size(); ++s) {
        spin<<<8, 64, 0, streams[s]>>>(s == 0 ? 100'000 : 300'000, &counters[s]);
      }
      CHECK(cudaMemcpyAsync(result, counters, sizeof(unsigned), cudaMemcpyDeviceToHost,
                            streams[0]));
      CHECK(args.bad() ? cudaDeviceSynchronize() : cudaStreamSynchronize(streams[0]));
      seen.push_back(*result);
      host_work_us(100);
    }
  });

  verify("result", seen, [](size_t step) { return 8 * (step + 1); });
  verify("counters", download(counters, streams.size()),
         [&](size_t) { return 8 * seen.size(); });
  return passed();
}
