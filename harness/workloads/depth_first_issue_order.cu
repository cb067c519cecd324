// harness: rule depth-first-issue-order
// harness: silent this GPU has copy engines for both directions and a work queue for each stream, so neither order waits: the rule should stay silent on both
// harness: expect no difference on GPUs of compute capability 3.5 and later with two copy engines
//
// Upload, kernel and download of a piece on each stream. bad issues all three of one
// stream before the next stream (depth first), fixed all uploads, then all kernels,
// then all downloads (breadth first). Where uploads and downloads share one engine, the
// upload of stream 1 waits behind the download of stream 0 in the first order.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "2097152"}, {"streams", "4|2"}});
  const size_t n = args.integer("size");  // elements of a piece
  const int count = static_cast<int>(args.integer("streams"));
  const int iterations = 8, rounds = 1000;
  const auto streams = make_streams(count);
  unsigned* in = pinned_alloc<unsigned>(n * count);
  unsigned* out = pinned_alloc<unsigned>(n * count);
  unsigned* data = device_alloc<unsigned>(n * count);
  for (size_t i = 0; i < n * count; ++i) in[i] = static_cast<unsigned>(i);

  const auto upload_piece = [&](int s) {
    CHECK(cudaMemcpyAsync(data + s * n, in + s * n, n * sizeof(unsigned),
                          cudaMemcpyHostToDevice, streams[s]));
  };
  const auto compute = [&](int s) {
    churn<<<blocks_for(n), 256, 0, streams[s]>>>(data + s * n, n, rounds);
  };
  const auto download_piece = [&](int s) {
    CHECK(cudaMemcpyAsync(out + s * n, data + s * n, n * sizeof(unsigned),
                          cudaMemcpyDeviceToHost, streams[s]));
  };

  measure(
      args,
      [&] {
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          if (args.bad()) {
            for (int s = 0; s < count; ++s) {
              upload_piece(s);
              compute(s);
              download_piece(s);
            }
          } else {
            for (int s = 0; s < count; ++s) upload_piece(s);
            for (int s = 0; s < count; ++s) compute(s);
            for (int s = 0; s < count; ++s) download_piece(s);
          }
        }
      },
      Finish::device_sync, [&] { std::memset(out, 0, n * count * sizeof(unsigned)); });

  verify("out", out, n * count,
         [&](size_t i) { return churned(static_cast<unsigned>(i), rounds); });
  return passed();
}
