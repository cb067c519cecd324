// What the workloads about the L2 cache share: the set-aside, windows, and a kernel
// whose run time is the latency of the memory that it reads.
#pragma once

#include <algorithm>

#include "../include/streamlint_nvtx.h"
#include "common.cuh"

// Asks for the properties and says them in NVTX.
inline cudaDeviceProp l2_device() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  streamlint::l2_properties(properties);
  if (!properties.persistingL2CacheMaxSize) usage_error("this GPU has no L2 set-aside");
  return properties;
}

// Reserves L2, says so in NVTX, and returns what the driver granted.
inline size_t set_aside(size_t bytes) {
  size_t granted = 0;
  CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes));
  CHECK(cudaDeviceGetLimit(&granted, cudaLimitPersistingL2CacheSize));
  streamlint::l2_setaside(granted);
  return granted;
}

inline cudaAccessPolicyWindow persisting(void* base, size_t bytes, float hit_ratio) {
  return {base, bytes, hit_ratio, cudaAccessPropertyPersisting, cudaAccessPropertyStreaming};
}

inline cudaError_t set_window(cudaStream_t stream, const cudaAccessPolicyWindow& window) {
  cudaStreamAttrValue value = {};
  value.accessPolicyWindow = window;
  return cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
}

// As the Programming Guide ends persistence: no window, then no persisting lines.
inline void end_persistence(cudaStream_t stream) {
  CHECK(set_window(stream, {}));
  CHECK(cudaCtxResetPersistingL2Cache());
  streamlint::l2_reset();
}

__global__ void link_list(unsigned* next, size_t n, size_t hop) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < n) next[i] = static_cast<unsigned>((i + hop) % n);
}

// Every thread follows the list from where it stopped, one load after the other. All
// threads together pass over the list in order and over again: a list that stays in
// cache is read at its latency, one that doesn't fit misses with every load.
// cold (optional; a power of two elements) is read along, each element once a turn,
// which evicts what the cache doesn't hold on to. __ldcg leaves L1 out.
__global__ void follow(unsigned* at, unsigned* cold_sum, const unsigned* next, int steps,
                       const unsigned* cold, size_t cold_mask, size_t cold_from) {
  const size_t thread = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  const size_t threads = gridDim.x * static_cast<size_t>(blockDim.x);
  unsigned here = at[thread], sum = 0;
#pragma unroll 4
  for (int step = 0; step < steps; ++step) {
    here = __ldcg(next + here);
    if (cold) sum += __ldcg(cold + ((cold_from + step * threads + thread) & cold_mask));
  }
  at[thread] = here;
  cold_sum[thread] += sum;
}

// Memory that is read once: 512 MiB, far more than any L2. Every byte is 1.
constexpr size_t kCold = size_t{1} << 27;
constexpr unsigned kColdValue = 0x01010101;

inline unsigned* cold_alloc() {
  unsigned* cold = device_alloc<unsigned>(kCold);
  CHECK(cudaMemset(cold, 1, kCold * sizeof(unsigned)));
  CHECK(cudaDeviceSynchronize());
  return cold;
}

// A list of about `bytes` in device memory, followed by `share` of the GPU: latency,
// not bandwidth, decides how long that takes.
class List {
 public:
  explicit List(size_t bytes, double share = 0.5) {
    int sms = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    blocks_ = static_cast<unsigned>(share * sms * 8);
    threads_ = blocks_ * 256UL;
    n_ = std::max<size_t>(2, bytes / sizeof(unsigned) / threads_) * threads_;
    next_ = device_alloc<unsigned>(n_);
    link_list<<<blocks_for(n_), 256>>>(next_, n_, threads_);
    at_ = device_alloc<unsigned>(threads_);
    cold_sum_ = device_alloc<unsigned>(threads_);
    std::vector<unsigned> start(threads_);
    for (size_t i = 0; i < threads_; ++i) start[i] = static_cast<unsigned>(i);
    upload(at_, start.data(), threads_);
  }

  void* data() const { return next_; }
  size_t bytes() const { return n_ * sizeof(unsigned); }

  // One kernel that passes `times` over the whole list, and one step more, so that the
  // threads don't end where they began.
  void pass(cudaStream_t stream, int times, const unsigned* cold = nullptr) {
    const int steps = static_cast<int>(n_ / threads_) * times + 1;
    follow<<<blocks_, 256, 0, stream>>>(at_, cold_sum_, next_, steps, cold, kCold - 1,
                                        (cold ? steps_ : 0) * threads_);
    steps_ += steps;
    if (cold) cold_steps_ += steps;
  }

  void check(const char* what) const {
    verify(what, download(at_, threads_),
           [this](size_t i) { return (i + steps_ % (n_ / threads_) * threads_) % n_; });
    verify("cold data", download(cold_sum_, threads_), [this](size_t) {
      return static_cast<unsigned>(cold_steps_) * kColdValue;
    });
  }

 private:
  unsigned blocks_ = 0;
  size_t threads_ = 0, n_ = 0;
  unsigned *next_ = nullptr, *at_ = nullptr, *cold_sum_ = nullptr;
  size_t steps_ = 0, cold_steps_ = 0;
};
