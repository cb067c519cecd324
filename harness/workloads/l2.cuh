// What the workloads about the L2 cache share: the set-aside, windows, a kernel whose
// run time is the latency of the memory that it reads, and one that flushes L2.
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
// __ldcg leaves L1 out.
__global__ void follow(unsigned* at, const unsigned* next, int steps) {
  const size_t thread = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  unsigned here = at[thread];
#pragma unroll 4
  for (int step = 0; step < steps; ++step) here = __ldcg(next + here);
  at[thread] = here;
}

// Adds up memory that nobody needs again: evicts what L2 doesn't hold on to.
__global__ void sweep(unsigned* sums, const uint4* cold, size_t n) {
  const size_t thread = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  const size_t threads = gridDim.x * static_cast<size_t>(blockDim.x);
  unsigned sum = 0;
#pragma unroll 4
  for (size_t i = thread; i < n; i += threads) {
    const uint4 value = __ldcg(cold + i);
    sum += value.x + value.y + value.z + value.w;
  }
  sums[thread] += sum;
}

inline int sm_count() {
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  return sms;
}

// A list of about `bytes` in device memory, followed by `share` of the GPU: latency,
// not bandwidth, decides how long that takes. `room` is the size of the buffer that it
// is the beginning of, if that is larger.
class List {
 public:
  explicit List(size_t bytes, double share = 0.5, size_t room = 0) {
    blocks_ = static_cast<unsigned>(share * sm_count() * 8);
    threads_ = blocks_ * 256UL;
    n_ = std::max<size_t>(2, bytes / sizeof(unsigned) / threads_) * threads_;
    next_ = device_alloc<unsigned>(std::max(n_, room / sizeof(unsigned)));
    link_list<<<blocks_for(n_), 256>>>(next_, n_, threads_);
    at_ = device_alloc<unsigned>(threads_);
    std::vector<unsigned> start(threads_);
    for (size_t i = 0; i < threads_; ++i) start[i] = static_cast<unsigned>(i);
    upload(at_, start.data(), threads_);
  }

  void* data() const { return next_; }
  size_t bytes() const { return n_ * sizeof(unsigned); }

  // One kernel that passes `times` over the whole list, and one step more, so that the
  // threads don't end where they began.
  void pass(cudaStream_t stream, int times) {
    const int steps = static_cast<int>(n_ / threads_) * times + 1;
    follow<<<blocks_, 256, 0, stream>>>(at_, next_, steps);
    steps_ += steps;
  }

  void check(const char* what) const {
    verify(what, download(at_, threads_),
           [this](size_t i) { return (i + steps_ % (n_ / threads_) * threads_) % n_; });
  }

 private:
  unsigned blocks_ = 0;
  size_t threads_ = 0, n_ = 0;
  unsigned *next_ = nullptr, *at_ = nullptr;
  size_t steps_ = 0;
};

// Other data that pass through L2 between two uses of a list: twice its size.
class OtherData {
 public:
  explicit OtherData(size_t l2_bytes) : n_(2 * l2_bytes / sizeof(uint4)) {
    blocks_ = static_cast<unsigned>(sm_count() * 8);
    cold_ = device_alloc<uint4>(n_);
    sums_ = device_alloc<unsigned>(blocks_ * 256UL);
    CHECK(cudaMemset(cold_, 1, n_ * sizeof(uint4)));
    CHECK(cudaDeviceSynchronize());
  }

  void pass(cudaStream_t stream) {
    sweep<<<blocks_, 256, 0, stream>>>(sums_, cold_, n_);
    ++passes_;
  }

  void check() const {
    const size_t threads = blocks_ * 256UL;
    verify("other data", download(sums_, threads), [&](size_t i) {
      const size_t loads = (n_ - i + threads - 1) / threads;
      return static_cast<unsigned>(passes_ * loads * 4 * 0x01010101UL);
    });
  }

 private:
  unsigned blocks_ = 0;
  size_t n_ = 0, passes_ = 0;
  uint4* cold_ = nullptr;
  unsigned* sums_ = nullptr;
};
