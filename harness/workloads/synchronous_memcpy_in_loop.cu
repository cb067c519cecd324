// harness: rule synchronous-memcpy-in-loop
// harness: expect the GPU idles after each synchronous copy until the host launches again: 9.9 ms -> 7.7 ms
//
// Upload 1 MiB, a kernel of about 400 us, download, 100 us of host work to prepare the
// next input. bad copies with cudaMemcpy, fixed with cudaMemcpyAsync: the same page-
// locked buffers and the same (default) stream, so only the calls differ. Each
// iteration has its own part of the buffers, so no wait is needed before the end.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const size_t n = 1 << 18, bytes = n * sizeof(unsigned);
  const int rounds = 20'000;
  unsigned* in = pinned_alloc<unsigned>(n * iterations);
  unsigned* out = pinned_alloc<unsigned>(n * iterations);
  unsigned* data = device_alloc<unsigned>(n);
  for (size_t i = 0; i < n * iterations; ++i) in[i] = static_cast<unsigned>(i);

  const auto copy = [&](unsigned* to, const unsigned* from, cudaMemcpyKind kind) {
    CHECK(args.bad() ? cudaMemcpy(to, from, bytes, kind)
                     : cudaMemcpyAsync(to, from, bytes, kind, cudaStreamLegacy));
  };

  measure(
      args,
      [&] {
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          copy(data, in + i * n, cudaMemcpyHostToDevice);
          churn<<<blocks_for(n), 256>>>(data, n, rounds);
          copy(out + i * n, data, cudaMemcpyDeviceToHost);
          host_work_us(100);
        }
      },
      Finish::device_sync, [&] { std::memset(out, 0, bytes * iterations); });

  verify("out", out, n * iterations,
         [](size_t i) { return churned(static_cast<unsigned>(i), rounds); });
  return passed();
}
