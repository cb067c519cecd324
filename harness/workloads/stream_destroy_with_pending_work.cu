// harness: rule stream-destroy-with-pending-work
// harness: note a warning about correctness: both variants take 2 ms
// harness: expect the stream is destroyed while its kernels run and no wait follows; cudaStreamDestroy returns within 50 us
//
// Kernels of 2 ms on a stream of its own, which is then destroyed: in bad while they
// run, in fixed after a wait. cudaStreamDestroy doesn't wait, so in bad nothing says
// when the work is done. To check the result all the same, the last kernel writes it to
// page-locked memory and the host watches that, which leaves no row in the trace.
#include "common.cuh"

__global__ void publish(volatile unsigned* host, const unsigned* counter) {
  *host = *counter;
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "4"}});
  const int kernels = static_cast<int>(args.integer("size"));
  unsigned* counter = device_alloc<unsigned>(1);
  volatile unsigned* result = pinned_alloc<unsigned>(1);
  cudaStream_t stream = nullptr;
  unsigned expected = 0;

  measure(
      args,
      [&] {
        for (int i = 0; i < kernels; ++i) spin<<<8, 64, 0, stream>>>(500'000, counter);
        publish<<<1, 1, 0, stream>>>(result, counter);
        if (args.fixed()) CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaStreamDestroy(stream));
        expected += 8U * kernels;
        wait_unrecorded([&] { return *result == expected; });
      },
      Finish::by_body, [&] { stream = make_stream(); });

  // Not download(): that would wait for the device.
  const unsigned got = *result;
  verify("result", &got, 1, [&](size_t) { return 8ULL * kernels * args.runs(); });
  return passed();
}
