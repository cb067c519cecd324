// harness: rule host-sync-drains-gpu
// harness: expect the GPU idles while the host works on each value it waited for: 7.1 ms -> 4.6 ms
//
// A training-like loop: a kernel of about 100 us, a 4-byte result read back, 60 us of
// host work on it. bad waits for the result of the iteration it just issued (what
// PyTorch's .item() does), so nothing is queued while the host works. fixed reads the
// value one iteration later, while the next kernel runs. Both read every value.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "40"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const size_t n = 64 * 256;
  const int rounds = 45'000;
  const cudaStream_t stream = make_stream();
  unsigned* data = device_alloc<unsigned>(n);
  unsigned* results = pinned_alloc<unsigned>(2);  // of this iteration and the last
  cudaEvent_t copied[2];
  for (cudaEvent_t& event : copied) {
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  std::vector<unsigned> seen;
  const auto use = [&](int slot) {
    seen.push_back(results[slot]);
    host_work_us(60);
  };

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      const int slot = i % 2;
      churn<<<blocks_for(n), 256, 0, stream>>>(data, n, rounds);
      CHECK(cudaMemcpyAsync(&results[slot], data, sizeof(unsigned),
                            cudaMemcpyDeviceToHost, stream));
      CHECK(cudaEventRecord(copied[slot], stream));
      if (args.bad()) {
        CHECK(cudaStreamSynchronize(stream));
        use(slot);
      } else if (i > 0) {
        CHECK(cudaEventSynchronize(copied[1 - slot]));
        use(1 - slot);
      }
    }
    if (args.fixed()) {
      const int slot = (iterations - 1) % 2;
      CHECK(cudaEventSynchronize(copied[slot]));
      use(slot);
    }
  });

  verify("result", seen, [](size_t step) { return churned(0, (step + 1) * rounds); });
  verify("data", download(data, n), [value = seen.back()](size_t) { return value; });
  return passed();
}
