// What every workload shares: options, error checks, the measured region, kernels
// with results that can be checked, host verification. Include it once per program.
//
//   int main(int argc, char** argv) {
//     const Args args(argc, argv, {{"size", "1024"}, {"cause", "kernel|memset"}});
//     unsigned* data = device_alloc<unsigned>(args.integer("size"));
//     ...
//     measure(args, [&] {                       // a warm-up, then --repeat times
//       for (int i = 0; i < 20; ++i) {
//         const Iteration iteration(i);         // NVTX "iteration 0", ...
//         churn<<<grid, block, 0, stream>>>(data, n, 100);
//       }
//     });                                       // waits for the device
//     verify("data", download(data, n), [&](size_t i) { return churned(i, ...); });
//     return passed();
//   }
//
// Output: one `REGION_US <float>` for each repeat, then `CHECK ok`.
// Exit code: 0 good, 1 wrong results, 2 wrong options or a failed call.
//
// Nothing is freed: frees wait for the device and would add rows to every trace, and
// the end of the process frees it all. A workload about freeing calls them itself.
#pragma once

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------------
// Errors

// CHECK(call): prints what failed and exits 2 unless the call returns cudaSuccess.
// Launches need no check of their own: see measure().
#define CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)

inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  const char* name = std::strrchr(file, '/');
  std::fprintf(stderr, "%s:%d: %s: %s (%s)\n", name ? name + 1 : file, line, call,
               cudaGetErrorName(code), cudaGetErrorString(code));
  std::exit(2);
}

[[noreturn]] inline void usage_error(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

// ---------------------------------------------------------------------------
// Options

// --variant bad|fixed (required), --repeat N (default 7), and those that the workload
// names with their default: {"size", "1024"}. A default with bars lists the allowed
// values, the first is the default: {"cause", "kernel|memset"}.
class Args {
 public:
  using Defaults = std::map<std::string, std::string>;

  Args(int argc, char** argv, Defaults defaults) : values_(std::move(defaults)) {
    values_.emplace("variant", "|bad|fixed");
    values_.emplace("repeat", "7");
    Defaults allowed = values_;
    for (auto& option : values_) {
      option.second = option.second.substr(0, option.second.find('|'));
    }
    for (int i = 1; i < argc; i += 2) {
      const std::string name = std::strncmp(argv[i], "--", 2) ? "" : argv[i] + 2;
      const auto option = values_.find(name);
      if (option == values_.end()) usage_error(usage(argv[0], allowed));
      if (i + 1 == argc) usage_error("--" + name + " needs a value");
      option->second = argv[i + 1];
    }
    for (const auto& [name, choices] : allowed) {
      if (choices.find('|') != std::string::npos &&
          ("|" + choices + "|").find("|" + values_[name] + "|") == std::string::npos) {
        usage_error("--" + name + " takes one of " + choices);
      }
    }
    if (text("variant").empty()) usage_error(usage(argv[0], allowed));
    if (repeat() < 1) usage_error("--repeat takes a number from 1");
  }

  bool bad() const { return text("variant") == "bad"; }
  bool fixed() const { return !bad(); }
  int repeat() const { return static_cast<int>(integer("repeat")); }
  // How often measure() calls its body: the repeats and one warm-up before them.
  int runs() const { return repeat() + 1; }

  const std::string& text(const char* name) const { return values_.at(name); }
  bool is(const char* name, const char* value) const { return text(name) == value; }
  long long integer(const char* name) const {
    char* end = nullptr;
    const long long value = std::strtoll(text(name).c_str(), &end, 10);
    if (text(name).empty() || *end) {
      usage_error(std::string("--") + name + " takes a whole number");
    }
    return value;
  }

 private:
  static std::string usage(const char* program, const Defaults& options) {
    std::string line = std::string("usage: ") + program;
    for (const auto& [name, value] : options) {
      const bool required = name == "variant";
      line += required ? " --variant bad|fixed" : " [--" + name + " " + value + "]";
    }
    return line;
  }

  Defaults values_;
};

// ---------------------------------------------------------------------------
// The measured region

using Clock = std::chrono::steady_clock;

inline double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// NVTX range of the default domain on this thread, open as long as the object lives.
class Range {
 public:
  explicit Range(const char* text, bool open = true) : open_(open) {
    if (open_) nvtxRangePushA(text);
  }
  ~Range() {
    if (open_) nvtxRangePop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  bool open_;
};

// True while a measured repeat runs; false in the warm-up.
inline std::atomic<bool> in_region{false};

// One repeat: NVTX range "region" and host time, printed when it ends. A Region that
// is not measured (the warm-up) does neither. measure() makes them; use it directly
// only where the body can't be a function, such as in a child process.
class Region {
 public:
  explicit Region(bool measured)
      : measured_(measured), range_("region", measured), start_(Clock::now()) {
    in_region = measured;
  }
  ~Region() {
    const double us = us_since(start_);
    if (measured_) std::printf("REGION_US %.2f\n", us);
    in_region = false;
  }

 private:
  bool measured_;
  Range range_;
  Clock::time_point start_;
};

// NVTX range "iteration N" inside a region, on any thread; nothing in the warm-up, so
// that the iterations of a trace are those of the measured repeat.
class Iteration {
 public:
  explicit Iteration(int number)
      : range_(in_region ? ("iteration " + std::to_string(number)).c_str() : "",
               in_region) {}

 private:
  Range range_;
};

enum class Finish {
  device_sync,  // the region ends with cudaDeviceSynchronize
  by_body,      // the body waits itself (or its fault is that it doesn't)
};

struct Nothing {
  void operator()() const {}
};

// Runs body once as warm-up and then --repeat times as measured region.
// prepare (optional) runs before each of them, outside the region, and before the
// device is drained: put resets of buffers there.
// A launch error stays until it is asked for, so it is asked for here once a repeat;
// asking after each launch would add a row for each to the trace. Threads that launch
// have an error state of their own: call CHECK(cudaGetLastError()) at their end.
template <class Body, class Prepare = Nothing>
void measure(const Args& args, Body body, Finish finish = Finish::device_sync,
             Prepare prepare = {}) {
  for (int run = 0; run < args.runs(); ++run) {
    prepare();
    CHECK(cudaDeviceSynchronize());
    {
      const Region region(run > 0);
      body();
      if (finish == Finish::device_sync) CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaGetLastError());
  }
}

// Keeps this host thread busy for so long, as preparing the next step would.
inline void host_work_us(double us) {
  const auto start = Clock::now();
  while (us_since(start) < us) {
  }
}

// Waits until ready() is true without a CUDA call, so without a row in the trace: for
// workloads about missing waits. ready() looks at page-locked memory that the GPU
// writes (through volatile pointers).
template <class Ready>
void wait_unrecorded(Ready ready) {
  const auto start = Clock::now();
  while (!ready()) {
    if (us_since(start) > 10e6) usage_error("the GPU did not answer within 10 s");
  }
}

// ---------------------------------------------------------------------------
// Memory and streams

template <class T>
T* device_alloc(size_t n) {
  T* data = nullptr;
  CHECK(cudaMalloc(&data, n * sizeof(T)));
  CHECK(cudaMemset(data, 0, n * sizeof(T)));
  CHECK(cudaDeviceSynchronize());
  return data;
}

// Page-locked, zeroed.
template <class T>
T* pinned_alloc(size_t n) {
  void* data = nullptr;
  CHECK(cudaHostAlloc(&data, n * sizeof(T), cudaHostAllocDefault));
  std::memset(data, 0, n * sizeof(T));
  return static_cast<T*>(data);
}

// Ordinary memory, zeroed by writing, so that no page fault falls into the region.
template <class T>
T* pageable_alloc(size_t n) {
  void* data = std::malloc(n * sizeof(T));
  if (!data) usage_error("out of host memory: choose a smaller --size");
  std::memset(data, 0, n * sizeof(T));
  return static_cast<T*>(data);
}

// Non-blocking unless told otherwise: pass cudaStreamDefault for a stream that
// synchronizes with the legacy default stream.
inline cudaStream_t make_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

inline std::vector<cudaStream_t> make_streams(int count,
                                              unsigned flags = cudaStreamNonBlocking) {
  std::vector<cudaStream_t> streams;
  for (int i = 0; i < count; ++i) streams.push_back(make_stream(flags));
  return streams;
}

// Copies to the device and waits; for set-up, not for the region.
template <class T>
void upload(T* device, const T* host, size_t n) {
  CHECK(cudaMemcpy(device, host, n * sizeof(T), cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
}

// Waits for all work and copies to the host; for verification, not for the region.
template <class T>
std::vector<T> download(const T* device, size_t n) {
  std::vector<T> host(n);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// ---------------------------------------------------------------------------
// Kernels

inline unsigned blocks_for(size_t n, unsigned threads = 256) {
  return static_cast<unsigned>((n + threads - 1) / threads);
}

__device__ inline long long globaltimer_ns() {
  long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Every block holds its place on the GPU for at least `ns` and then adds 1 to
// *counter. Blocks that run together don't slow each other down: made for tests of
// what overlaps. Check afterwards: *counter == launches * blocks.
__global__ void spin(long long ns, unsigned* counter) {
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
  if (threadIdx.x == 0) atomicAdd(counter, 1U);
}

// One step of a linear congruential generator: exact, with a result that the host can
// compute fast. The empty asm keeps the compiler from folding many steps into one.
constexpr unsigned kChurnFactor = 1664525U;
constexpr unsigned kChurnAdd = 1013904223U;

__host__ __device__ inline unsigned churn_step(unsigned value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value * kChurnFactor + kChurnAdd;
}

// Compute-bound work that can be checked exactly: `rounds` generator steps on every
// element. Applying it twice equals one call with the sum of the rounds.
// On an H200 a step takes about 4 clocks (2.2 ns), and about 35 (19 ns) once the GPU
// is full (sm count * 2048 threads); more elements take proportionally longer.
__global__ void churn(unsigned* data, size_t n, int rounds) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  unsigned value = data[i];
#pragma unroll 16
  for (int round = 0; round < rounds; ++round) value = churn_step(value);
  data[i] = value;
}

// out = churn(in); reads one buffer and writes another.
__global__ void churn_into(unsigned* out, const unsigned* in, size_t n, int rounds) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  unsigned value = in[i];
#pragma unroll 16
  for (int round = 0; round < rounds; ++round) value = churn_step(value);
  out[i] = value;
}

// What churn makes of `value`, on the host, in log2(rounds) steps.
inline unsigned churned(unsigned value, unsigned long long rounds) {
  unsigned factor = kChurnFactor, add = kChurnAdd;  // of 2^k steps
  for (; rounds; rounds >>= 1) {
    if (rounds & 1) value = value * factor + add;
    add = add * factor + add;
    factor *= factor;
  }
  return value;
}

// c = a + b
__global__ void vector_add(float* c, const float* a, const float* b, size_t n) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

// y = a * x + y
__global__ void saxpy(float* y, float a, const float* x, size_t n) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

// ---------------------------------------------------------------------------
// Verification

// Compares got[i] with expected(i), exactly; prints the first difference and exits 1.
template <class T, class Expected>
void verify(const char* what, const T* got, size_t n, Expected expected) {
  for (size_t i = 0; i < n; ++i) {
    const T want = static_cast<T>(expected(i));
    if (got[i] == want) continue;
    std::printf("CHECK failed: %s[%zu] is %.9g, not %.9g\n", what, i,
                static_cast<double>(got[i]), static_cast<double>(want));
    std::exit(1);
  }
}

template <class T, class Expected>
void verify(const char* what, const std::vector<T>& got, Expected expected) {
  verify(what, got.data(), got.size(), expected);
}

// One number on the device, such as the counter of spin.
inline void verify_counter(const char* what, const unsigned* device,
                           unsigned long long expected) {
  verify(what, download(device, 1), [&](size_t) { return expected; });
}

// The last line of main: `return passed();`
inline int passed() {
  std::printf("CHECK ok\n");
  return 0;
}
