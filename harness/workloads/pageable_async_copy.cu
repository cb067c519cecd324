// harness: rule pageable-async-copy
// harness: expect the host is blocked in every copy call and the copies run at a fraction of the pinned rate: 35 ms -> 3 ms
//
// A pipeline over four streams: upload, kernel, download. The only difference is where
// the host buffers come from: malloc (bad) or cudaHostAlloc (fixed).
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "2097152"}});
  const size_t n = args.integer("size");  // elements of a piece
  const int pieces = 16, rounds = 100;
  const auto streams = make_streams(4);
  const auto host = [&] {
    return args.bad() ? pageable_alloc<unsigned>(n * pieces)
                      : pinned_alloc<unsigned>(n * pieces);
  };
  unsigned *in = host(), *out = host();
  unsigned* data = device_alloc<unsigned>(n * streams.size());
  for (size_t i = 0; i < n * pieces; ++i) in[i] = static_cast<unsigned>(i);

  measure(
      args,
      [&] {
        for (int piece = 0; piece < pieces; ++piece) {
          const Iteration iteration(piece);
          const size_t slot = piece % streams.size();
          const cudaStream_t stream = streams[slot];
          unsigned* buffer = data + slot * n;
          const size_t bytes = n * sizeof(unsigned);
          CHECK(cudaMemcpyAsync(buffer, in + piece * n, bytes, cudaMemcpyHostToDevice,
                                stream));
          churn<<<blocks_for(n), 256, 0, stream>>>(buffer, n, rounds);
          CHECK(cudaMemcpyAsync(out + piece * n, buffer, bytes, cudaMemcpyDeviceToHost,
                                stream));
        }
      },
      Finish::device_sync, [&] { std::memset(out, 0, n * pieces * sizeof(unsigned)); });

  verify("out", out, n * pieces,
         [](size_t i) { return churned(static_cast<unsigned>(i), rounds); });
  return passed();
}
