// harness: rule priority-without-effect
// harness: expect a high-priority kernel waits 2 ms for a low-priority one that fills the GPU: 25 ms -> 17 ms
//
// Background work on a low-priority stream fills the GPU. Each iteration a small
// kernel of high priority is launched and the host works on its result for 1 ms. A
// kernel that runs isn't preempted: with one kernel of about 2 ms (bad) the urgent one
// waits for nearly all of it. Cut into ten kernels (fixed), the same work lets the
// urgent kernel in after 0.2 ms, ahead of those that are queued.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "10"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const int parts = args.bad() ? 1 : 10;
  const int rounds = 100'000;

  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t background, urgent;
  CHECK(cudaStreamCreateWithPriority(&background, cudaStreamNonBlocking, least));
  CHECK(cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, greatest));

  // As many blocks as the GPU holds at once: no room for another until they end.
  int sms = 0, blocks_per_sm = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, churn, 256, 0));
  const unsigned blocks = static_cast<unsigned>(sms * blocks_per_sm);
  const size_t n = blocks * 256UL, urgent_n = sms * 256UL;
  unsigned* data = device_alloc<unsigned>(n);
  unsigned* urgent_data = device_alloc<unsigned>(urgent_n);

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (int part = 0; part < parts; ++part) {
        churn<<<blocks, 256, 0, background>>>(data, n, rounds / parts);
      }
      host_work_us(100);  // until the background work runs
      churn<<<sms, 256, 0, urgent>>>(urgent_data, urgent_n, 1000);
      CHECK(cudaStreamSynchronize(urgent));
      host_work_us(1000);
    }
  });

  const unsigned long long steps = 1ULL * iterations * args.runs();
  verify("background", download(data, n),
         [=, value = churned(0, steps * rounds)](size_t) { return value; });
  verify("urgent", download(urgent_data, urgent_n),
         [value = churned(0, steps * 1000)](size_t) { return value; });
  return passed();
}
