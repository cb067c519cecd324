// harness: rule copy-compute-not-overlapped
// harness: expect pinned: uploads, kernels and downloads take turns on one stream, 7.8 ms -> 5.4 ms; the uploads alone need 5.2 ms
//
// c = a + b in 16 pieces: upload two, add, download one. bad puts all pieces on one
// stream, fixed deals them out to four. Uploads are two thirds of the work, so 1.5
// times is the most that overlap can give.
// --memory pageable completes the 2x2 of the seed article (which claims 2.26 times for
// four streams, with --size 268435456): there the calls block the host, which is
// pageable-async-copy and leaves nothing for the streams to overlap.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "33554432"}, {"memory", "pinned|pageable"}});
  const size_t n = args.integer("size");
  const int pieces = 16;
  const auto streams = make_streams(args.bad() ? 1 : 4);

  const auto host = [&] {
    const bool pinned = args.is("memory", "pinned");
    return pinned ? pinned_alloc<float>(n) : pageable_alloc<float>(n);
  };
  float *host_a = host(), *host_b = host(), *host_c = host();
  float* a = device_alloc<float>(n);
  float* b = device_alloc<float>(n);
  float* c = device_alloc<float>(n);
  for (size_t i = 0; i < n; ++i) {
    host_a[i] = static_cast<float>(i % 1000);
    host_b[i] = static_cast<float>(i % 777 + 1);
  }

  measure(
      args,
      [&] {
        for (int piece = 0; piece < pieces; ++piece) {
          const Iteration iteration(piece);
          const cudaStream_t stream = streams[piece % streams.size()];
          const size_t at = n * piece / pieces;
          const size_t count = n * (piece + 1) / pieces - at;
          const size_t bytes = count * sizeof(float);
          const auto up = cudaMemcpyHostToDevice;
          const auto down = cudaMemcpyDeviceToHost;
          CHECK(cudaMemcpyAsync(a + at, host_a + at, bytes, up, stream));
          CHECK(cudaMemcpyAsync(b + at, host_b + at, bytes, up, stream));
          const unsigned blocks = blocks_for(count);
          vector_add<<<blocks, 256, 0, stream>>>(c + at, a + at, b + at, count);
          CHECK(cudaMemcpyAsync(host_c + at, c + at, bytes, down, stream));
        }
      },
      Finish::device_sync, [&] { std::memset(host_c, 0, n * sizeof(float)); });

  verify("c", host_c, n,
         [](size_t i) { return static_cast<float>(i % 1000 + i % 777 + 1); });
  return passed();
}
