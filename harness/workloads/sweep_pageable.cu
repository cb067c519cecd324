// harness: probe pageable_sweep
// harness: note not a rule pair: measures how host calls behave and prints `PROBE name key=value ...` lines
//
// Open questions about transfers and frees: which calls return while the GPU is busy,
// and what they cost when it is idle. Times are host microseconds. `busy` runs start
// with a kernel of kBusy and say how often the call returned before that kernel had
// ended (early=3/5); without the profiler for the times, with it for the rows: each
// probe is an NVTX range of its name. A call that fails is answered with rc=, what
// most likely fails comes last. Options are ignored.
#include <algorithm>

#include "common.cuh"

constexpr long long kMs = 1'000'000;
constexpr long long kBusy = 40 * kMs;
constexpr int kTimes = 5;

struct Sample {
  double us;
  bool early;  // the busy kernel was still running when the call returned
  cudaError_t code;
};

class Bench {
 public:
  Bench() { CHECK(cudaEventCreateWithFlags(&busy_end_, cudaEventDisableTiming)); }

  unsigned* counter() const { return counter_; }
  long long kernels() const { return kernels_; }

  // Makes the stream busy for kBusy; null for an idle run.
  void occupy(cudaStream_t stream) {
    busy_ = stream != nullptr;
    if (!busy_) return;
    spin<<<1, 32, 0, stream>>>(kBusy, counter_);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(busy_end_, stream));
    ++kernels_;
    host_work_us(200);  // until it runs
  }

  // Times one call, then waits for the device.
  template <class Call>
  Sample time(Call call) {
    const auto start = Clock::now();
    const cudaError_t code = call();
    const double us = us_since(start);
    (void)cudaGetLastError();  // printed, not left for the next CHECK
    const cudaError_t state = busy_ ? cudaEventQuery(busy_end_) : cudaSuccess;
    if (state != cudaErrorNotReady) CHECK(state);
    CHECK(cudaDeviceSynchronize());
    return {us, state == cudaErrorNotReady, code};
  }

  // Prints median, range and how many calls returned early.
  void print(const char* name, const std::string& keys, std::vector<Sample> samples) {
    std::sort(samples.begin(), samples.end(),
              [](const Sample& a, const Sample& b) { return a.us < b.us; });
    int early = 0;
    for (const Sample& sample : samples) early += sample.early;
    std::printf("PROBE %s %s median_us=%.1f min_us=%.1f max_us=%.1f", name, keys.c_str(),
                samples[samples.size() / 2].us, samples.front().us, samples.back().us);
    if (busy_) std::printf(" busy_us=%lld early=%d/%d", kBusy / 1000, early, kTimes);
    std::printf("\n");
  }

  // kTimes samples of a call on a device that `occupied` keeps busy (null: idle).
  template <class Call, class Setup = Nothing, class Cleanup = Nothing>
  void probe(const char* name, const std::string& keys, cudaStream_t occupied, Call call,
             Setup setup = {}, Cleanup cleanup = {}) {
    const Range range(name);
    std::vector<Sample> samples;
    for (int i = 0; i < kTimes; ++i) {
      setup();
      CHECK(cudaDeviceSynchronize());
      occupy(occupied);
      samples.push_back(time(call));
      if (const cudaError_t code = samples.back().code) {
        std::printf("PROBE %s %s rc=%s\n", name, keys.c_str(), cudaGetErrorName(code));
        return;
      }
      cleanup();
    }
    print(name, keys, samples);
  }

 private:
  unsigned* counter_ = device_alloc<unsigned>(1);
  cudaEvent_t busy_end_ = nullptr;
  bool busy_ = false;
  long long kernels_ = 0;
};

// Holds on to a buffer: touches it at once and then runs on. Not at the end: neither
// cudaFree of a pointer from cudaMallocAsync nor the pool waits for it, so by then the
// memory may be gone (cudaErrorIllegalAddress).
__global__ void use_early(long long ns, float* data) {
  data[threadIdx.x] = 1;
  __threadfence();
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
}

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a failure must not take answers with it
  Bench bench;
  const cudaStream_t free_stream = make_stream();  // non-blocking
  const cudaStream_t blocking = make_stream(cudaStreamDefault);
  const size_t most = 64ULL << 20;
  char* pageable = pageable_alloc<char>(most);
  char* pinned = pinned_alloc<char>(most);
  char* device = device_alloc<char>(most);
  char* other = device_alloc<char>(most);
  for (size_t i = 0; i < most; ++i) pageable[i] = static_cast<char>(i % 101);
  spin<<<1, 32, 0, free_stream>>>(1000, bench.counter());
  use_early<<<1, 32, 0, free_stream>>>(1000, reinterpret_cast<float*>(other));
  CHECK(cudaMemcpyAsync(device, pageable, most, cudaMemcpyHostToDevice, free_stream));
  CHECK(cudaDeviceSynchronize());

  // From which size on does a pageable upload wait for the work before it?
  for (const cudaStream_t occupied : {free_stream, cudaStream_t{}}) {
    for (const size_t mib : {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      const std::string on = occupied ? "stream=busy" : "stream=idle";
      const std::string keys = on + " mib=" + std::to_string(mib);
      bench.probe("pageable_h2d_async", keys, occupied, [&] {
        return cudaMemcpyAsync(device, pageable, mib << 20, cudaMemcpyHostToDevice,
                               free_stream);
      });
    }
  }
  for (const size_t mib : {1, 64}) {
    const std::string keys = "stream=busy mib=" + std::to_string(mib);
    bench.probe("pinned_h2d_async", keys, free_stream, [&] {
      return cudaMemcpyAsync(device, pinned, mib << 20, cudaMemcpyHostToDevice,
                             free_stream);
    });
  }

  // Frees of memory that a running kernel was given, and other frees on a busy device.
  void* memory = nullptr;
  const auto in_use = [&](const char* name, auto release) {
    const Range range(name);
    std::vector<double> times;
    cudaError_t code = cudaSuccess;
    for (int i = 0; i < kTimes; ++i) {
      CHECK(cudaMallocAsync(&memory, 1 << 20, free_stream));
      use_early<<<1, 32, 0, free_stream>>>(20 * kMs, static_cast<float*>(memory));
      CHECK(cudaGetLastError());
      host_work_us(1000);  // until it runs and has touched the memory
      const auto start = Clock::now();
      code = release();
      times.push_back(us_since(start));
      (void)cudaGetLastError();
      CHECK(cudaDeviceSynchronize());
    }
    std::sort(times.begin(), times.end());
    std::printf("PROBE %s busy_us=20000 median_us=%.1f min_us=%.1f max_us=%.1f rc=%s\n",
                name, times[kTimes / 2], times.front(), times.back(),
                cudaGetErrorName(code));
  };
  in_use("free_of_async_pointer_in_use", [&] { return cudaFree(memory); });
  in_use("free_async_of_pointer_in_use",
         [&] { return cudaFreeAsync(memory, free_stream); });

  cudaArray_t array = nullptr;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
  for (const cudaStream_t occupied : {free_stream, cudaStream_t{}}) {
    const std::string on = occupied ? "device=busy" : "device=idle";
    bench.probe(
        "malloc_array", on + " mib=16", occupied,
        [&] { return cudaMallocArray(&array, &format, 2048, 2048); }, Nothing{},
        [&] { CHECK(cudaFreeArray(array)); });
    bench.probe(
        "free_array", on + " mib=16", occupied, [&] { return cudaFreeArray(array); },
        [&] { CHECK(cudaMallocArray(&array, &format, 2048, 2048)); });
  }

  // A device-to-device copy on the legacy stream: does the call or the copy wait?
  const auto d2d = [&] {
    return cudaMemcpy(other, device, 1 << 20, cudaMemcpyDeviceToDevice);
  };
  const auto d2d_done = [&] {
    CHECK(d2d());
    return cudaStreamSynchronize(cudaStreamLegacy);
  };
  bench.probe("d2d_call", "busy_stream=non-blocking", free_stream, d2d);
  bench.probe("d2d_call", "busy_stream=blocking", blocking, d2d);
  bench.probe("d2d_until_done", "busy_stream=non-blocking", free_stream, d2d_done);
  bench.probe("d2d_until_done", "busy_stream=blocking", blocking, d2d_done);
  bench.probe("d2d_call", "busy_stream=none", nullptr, d2d);

  // What allocation calls cost on an idle device. The pool has its default release
  // threshold of 0, so each wait before a sample trims it: malloc_async regrows it.
  for (const size_t mib : {1, 16, 256}) {
    const std::string keys = "device=idle mib=" + std::to_string(mib);
    const size_t bytes = mib << 20;
    const auto make = [&] { CHECK(cudaMalloc(&memory, bytes)); };
    const auto drop = [&] { CHECK(cudaFree(memory)); };
    const auto make_host = [&] { CHECK(cudaHostAlloc(&memory, bytes, 0)); };
    const auto drop_host = [&] { CHECK(cudaFreeHost(memory)); };
    bench.probe(
        "malloc", keys, nullptr, [&] { return cudaMalloc(&memory, bytes); }, Nothing{},
        drop);
    bench.probe("free", keys, nullptr, [&] { return cudaFree(memory); }, make);
    bench.probe(
        "host_alloc", keys, nullptr, [&] { return cudaHostAlloc(&memory, bytes, 0); },
        Nothing{}, drop_host);
    bench.probe(
        "free_host", keys, nullptr, [&] { return cudaFreeHost(memory); }, make_host);
    bench.probe(
        "malloc_async", keys, nullptr,
        [&] { return cudaMallocAsync(&memory, bytes, free_stream); }, Nothing{},
        [&] { CHECK(cudaFreeAsync(memory, free_stream)); });
    bench.probe(
        "free_async", keys, nullptr, [&] { return cudaFreeAsync(memory, free_stream); },
        [&] { CHECK(cudaMallocAsync(&memory, bytes, free_stream)); });
  }
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  const auto make_one = [&] { stream = make_stream(); };
  const auto make_event = [&] { CHECK(cudaEventCreate(&event)); };
  bench.probe(
      "stream_create", "device=idle", nullptr,
      [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); },
      Nothing{}, [&] { CHECK(cudaStreamDestroy(stream)); });
  bench.probe(
      "stream_destroy", "device=idle", nullptr, [&] { return cudaStreamDestroy(stream); },
      make_one);
  bench.probe(
      "event_create", "device=idle", nullptr, [&] { return cudaEventCreate(&event); },
      Nothing{}, [&] { CHECK(cudaEventDestroy(event)); });
  bench.probe(
      "event_destroy", "device=idle", nullptr, [&] { return cudaEventDestroy(event); },
      make_event);

  for (const cudaStream_t occupied : {free_stream, cudaStream_t{}}) {
    const std::string on = occupied ? "device=busy" : "device=idle";
    bench.probe(
        "host_register", on + " mib=16", occupied,
        [&] { return cudaHostRegister(pageable, 16 << 20, cudaHostRegisterDefault); },
        Nothing{}, [&] { CHECK(cudaHostUnregister(pageable)); });
    bench.probe(
        "host_unregister", on + " mib=16", occupied,
        [&] { return cudaHostUnregister(pageable); },
        [&] { CHECK(cudaHostRegister(pageable, 16 << 20, cudaHostRegisterDefault)); });
  }

  CHECK(cudaMemcpyAsync(device, pageable, most, cudaMemcpyHostToDevice, free_stream));
  verify("device", download(device, most), [](size_t i) { return i % 101; });
  verify_counter("kernels", bench.counter(), 1ULL + bench.kernels());
  return passed();
}
