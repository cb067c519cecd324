// harness: rule pipeline-chunk-size
// harness: expect chunks of 64 KiB copy at a quarter of the rate and cost three calls each: 9.9 ms -> 1.5 ms
//
// Upload, kernel and download in chunks that are dealt out to four streams. bad uses
// chunks of 64 KiB, fixed of 4 MiB; --chunk (KiB) sets any other. --size is the whole
// buffer in MiB; 1024 gives the GiB of the catalogue with 49152 operations. The warm-up
// has eight chunks, to keep the trace small.
#include <algorithm>

#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "64"}, {"chunk", "0"}});
  const size_t n = (args.integer("size") << 20) / sizeof(unsigned);
  const size_t chunk_kib = args.integer("chunk") ? args.integer("chunk")
                           : args.bad()          ? 64
                                                 : 4096;
  const size_t chunk = (chunk_kib << 10) / sizeof(unsigned);
  const int rounds = 16;
  const auto streams = make_streams(4);
  unsigned* in = pinned_alloc<unsigned>(n);
  unsigned* out = pinned_alloc<unsigned>(n);
  unsigned* data = device_alloc<unsigned>(n);
  for (size_t i = 0; i < n; ++i) in[i] = static_cast<unsigned>(i);

  measure(
      args,
      [&] {
        const size_t end = in_region ? n : std::min(n, 8 * chunk);
        for (size_t at = 0, i = 0; at < end; at += chunk, ++i) {
          const Iteration iteration(static_cast<int>(i));
          const cudaStream_t stream = streams[i % streams.size()];
          const size_t count = at + chunk < n ? chunk : n - at;
          const size_t bytes = count * sizeof(unsigned);
          CHECK(cudaMemcpyAsync(data + at, in + at, bytes, cudaMemcpyHostToDevice,
                                stream));
          churn<<<blocks_for(count), 256, 0, stream>>>(data + at, count, rounds);
          CHECK(cudaMemcpyAsync(out + at, data + at, bytes, cudaMemcpyDeviceToHost,
                                stream));
        }
      },
      Finish::device_sync, [&] { std::memset(out, 0, n * sizeof(unsigned)); });

  verify("out", out, n,
         [](size_t i) { return churned(static_cast<unsigned>(i), rounds); });
  return passed();
}
