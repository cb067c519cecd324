// harness: rule lazy-module-load-in-hot-path
// harness: env bad CUDA_MODULE_LOADING=LAZY
// harness: env fixed CUDA_MODULE_LOADING=EAGER
// harness: expect the first launch of each of 50 kernels loads it, inside the loop, and takes far longer than other launches: 1.6 ms -> 1.1 ms
//
// Each iteration launches two kernels that are loaded already and one that has not run
// before. With CUDA_MODULE_LOADING=LAZY, the default, that launch loads the kernel
// (bad); with EAGER all are loaded when the program starts (fixed). So there is no
// warm-up of these kernels: each repeat begins with a reset of the device, after which
// everything is loaded anew, outside the region.
#include <utility>

#include "common.cuh"

constexpr int kKernels = 50;
constexpr int kRounds = 1'000;

// One kernel for each K, with enough instructions of its own to be worth loading.
template <int K>
__global__ void rare(unsigned* data, size_t n) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  unsigned value = data[i];
#pragma unroll 250
  for (int round = 0; round < kRounds; ++round) value = churn_step(value ^ K);
  data[i] = value;
}

using Kernel = void (*)(unsigned*, size_t);

template <int... K>
std::vector<Kernel> kernels(std::integer_sequence<int, K...>) {
  return {rare<K>...};
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "50"}});
  const char* loading = std::getenv("CUDA_MODULE_LOADING");
  if (!loading || std::strcmp(loading, args.bad() ? "LAZY" : "EAGER")) {
    usage_error("set CUDA_MODULE_LOADING=LAZY for --variant bad, EAGER for fixed");
  }
  const auto all = kernels(std::make_integer_sequence<int, kKernels>());
  if (args.integer("size") > kKernels) usage_error("--size is at most 50");

  for (int run = 0; run < args.repeat(); ++run) {
    if (run > 0) CHECK(cudaDeviceReset());
    const auto streams = make_streams(2);
    int sms = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const size_t n = 3UL * sms * 256;
    unsigned* common_data = device_alloc<unsigned>(n);
    unsigned* rare_data = device_alloc<unsigned>(n);
    const unsigned blocks = blocks_for(n);
    churn<<<blocks, 256, 0, streams[0]>>>(common_data, n, kRounds);
    CHECK(cudaDeviceSynchronize());
    {
      const Region region(true);
      for (int i = 0; i < args.integer("size"); ++i) {
        const Iteration iteration(i);
        churn<<<blocks, 256, 0, streams[0]>>>(common_data, n, kRounds);
        churn<<<blocks, 256, 0, streams[0]>>>(common_data, n, kRounds);
        all[i]<<<blocks, 256, 0, streams[1]>>>(rare_data, n);
      }
      CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaGetLastError());

    const unsigned long long steps = (2ULL * args.integer("size") + 1) * kRounds;
    verify("common data", download(common_data, n),
           [value = churned(0, steps)](size_t) { return value; });
    unsigned value = 0;
    for (int k = 0; k < args.integer("size"); ++k) {
      for (int i = 0; i < kRounds; ++i) value = churn_step(value ^ k);
    }
    verify("rare data", download(rare_data, n), [=](size_t) { return value; });
  }
  return passed();
}
