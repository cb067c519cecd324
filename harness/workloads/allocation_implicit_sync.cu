// harness: rule allocation-implicit-sync
// harness: cause host
// harness: expect each free waits for a kernel on a stream that never used the memory, so two independent streams take turns: 11 ms -> 5.5 ms; --cause host the same with cudaFreeHost
//
// Two streams take kernels in turn, and each iteration gives back a buffer that
// nothing on the GPU uses any more. cudaFree and cudaFreeHost wait for all work of the
// device: in bad the host can't launch on the other stream until then. fixed keeps the
// buffers until the work is done and frees them then, as cheaply as frees are.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}, {"cause", "device|host"}});
  const bool device = args.is("cause", "device");
  const auto streams = make_streams(2);
  unsigned* counter = device_alloc<unsigned>(1);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const unsigned blocks = 3 * sms;  // two of these kernels fit on the GPU together

  std::vector<void*> unused(args.integer("size"));
  const auto release = [&](void* buffer) {
    CHECK(device ? cudaFree(buffer) : cudaFreeHost(buffer));
  };
  measure(
      args,
      [&] {
        for (size_t i = 0; i < unused.size(); ++i) {
          const Iteration iteration(static_cast<int>(i));
          spin<<<blocks, 256, 0, streams[i % 2]>>>(500'000, counter);
          if (args.bad()) release(unused[i]);
        }
        CHECK(cudaDeviceSynchronize());
        if (args.fixed()) {
          for (void* buffer : unused) release(buffer);
        }
      },
      Finish::by_body,
      [&] {
        for (void*& buffer : unused) {
          CHECK(device ? cudaMalloc(&buffer, 1 << 20)
                       : cudaHostAlloc(&buffer, 1 << 16, cudaHostAllocDefault));
        }
      });

  verify_counter("blocks", counter, 1ULL * unused.size() * blocks * args.runs());
  return passed();
}
