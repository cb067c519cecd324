// harness: rule resource-churn-in-loop
// harness: expect the host allocates and frees in each iteration, and the GPU is idle meanwhile: 14 ms -> 11 ms
//
// Each iteration computes in scratch memory and copies a result to page-locked memory.
// bad allocates both anew and frees them once the result was read, fixed allocates two
// sets before the loop. The host reads the result of an iteration while the next one
// runs, so the GPU runs dry in bad only: there the frees wait for it.
#include "common.cuh"

constexpr size_t kElements = 1 << 20;
constexpr size_t kResult = 1 << 18;
constexpr int kRounds = 4'000;

struct Buffers {
  unsigned *scratch = nullptr, *result = nullptr;
};

Buffers allocate() {
  Buffers buffers;
  CHECK(cudaMalloc(&buffers.scratch, kElements * sizeof(unsigned)));
  CHECK(cudaHostAlloc(&buffers.result, kResult * sizeof(unsigned), cudaHostAllocDefault));
  return buffers;
}

void release(const Buffers& buffers) {
  CHECK(cudaFree(buffers.scratch));
  CHECK(cudaFreeHost(buffers.result));
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  unsigned* data = device_alloc<unsigned>(kElements);

  Buffers buffers[2];
  cudaEvent_t done[2];
  for (int i = 0; i < 2; ++i) {
    if (args.fixed()) buffers[i] = allocate();
    CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
  }
  unsigned expected = 0;
  const auto finish = [&](int i) {
    CHECK(cudaEventSynchronize(done[i % 2]));
    expected = churned(expected, 2 * kRounds);
    verify("result", buffers[i % 2].result + kResult - 1, 1, [&](size_t) { return expected; });
    if (args.bad()) release(buffers[i % 2]);
  };

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      if (args.bad()) buffers[i % 2] = allocate();
      const Buffers& now = buffers[i % 2];
      const unsigned blocks = blocks_for(kElements);
      churn_into<<<blocks, 256, 0, stream>>>(now.scratch, data, kElements, kRounds);
      churn_into<<<blocks, 256, 0, stream>>>(data, now.scratch, kElements, kRounds);
      CHECK(cudaMemcpyAsync(now.result, data, kResult * sizeof(unsigned),
                            cudaMemcpyDeviceToHost, stream));
      CHECK(cudaEventRecord(done[i % 2], stream));
      if (i > 0) finish(i - 1);
    }
    finish(iterations - 1);
  });

  verify("data", download(data, kElements), [&](size_t) { return expected; });
  return passed();
}
