// harness: rule underfilled-serial-kernels
// harness: expect eight independent kernels of 16 blocks run one after another on a GPU that has room for all: 8.9 ms -> 1.2 ms
//
// Each iteration launches eight small kernels on data of their own: on one stream (bad)
// or one stream for each (fixed).
#include "common.cuh"

constexpr int kKernels = 8;
constexpr size_t kElements = 16 * 256;  // each kernel's: 16 blocks
constexpr int kRounds = 40'000;         // about 0.1 ms

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "12"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const auto streams = make_streams(args.bad() ? 1 : kKernels);
  unsigned* data = device_alloc<unsigned>(kKernels * kElements);

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (int k = 0; k < kKernels; ++k) {
        churn<<<16, 256, 0, streams[k % streams.size()]>>>(data + k * kElements, kElements,
                                                           kRounds);
      }
    }
  });

  const unsigned long long steps = 1ULL * iterations * args.runs() * kRounds;
  verify("data", download(data, kKernels * kElements),
         [value = churned(0, steps)](size_t) { return value; });
  return passed();
}
