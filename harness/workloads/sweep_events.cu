// harness: probe events_graphs
// harness: note not a rule pair: measures how events, graphs, host functions and L2 requests behave and prints `PROBE name key=value ...` lines
//
// Open questions about what happens on the GPU between streams. Times are host
// microseconds. Run it without the profiler for the times, with it for the rows: each
// probe is an NVTX range of its name. The name of a probe as first argument runs that
// one alone, any other argument is ignored. `range_capture` is made for
//   nsys profile --capture-range=cudaProfilerApi ... sweep_events range_capture
#include <cuda_profiler_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "common.cuh"

constexpr long long kMs = 1'000'000;
constexpr int kTimes = 5;

unsigned* counter = nullptr;
unsigned long long expected = 0;  // of *counter, at the end
unsigned sms = 0;

void hold(cudaStream_t stream, long long ns, unsigned blocks = 1, unsigned threads = 32) {
  spin<<<blocks, threads, 0, stream>>>(ns, counter);
  CHECK(cudaGetLastError());
  expected += blocks;
}

// Median, least and most of kTimes runs, after one that is not counted.
std::string timed(const std::function<void()>& body) {
  std::vector<double> times;
  for (int i = 0; i <= kTimes; ++i) {
    CHECK(cudaDeviceSynchronize());
    const auto start = Clock::now();
    body();
    CHECK(cudaDeviceSynchronize());
    if (i > 0) times.push_back(us_since(start));
  }
  std::sort(times.begin(), times.end());
  char text[96];
  std::snprintf(text, sizeof text, "median_us=%.1f min_us=%.1f max_us=%.1f",
                times[kTimes / 2], times.front(), times.back());
  return text;
}

void print(const char* name, const std::string& keys) {
  std::printf("PROBE %s %s\n", name, keys.c_str());
  std::fflush(stdout);
}

cudaEvent_t make_event(bool timing) {
  cudaEvent_t event = nullptr;
  CHECK(timing ? cudaEventCreate(&event)
               : cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

cudaGraphExec_t instantiate(cudaStream_t stream, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  body();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  return exec;
}

// ---------------------------------------------------------------------------

__device__ void through_shared(long long ns, unsigned* count) {
  extern __shared__ unsigned shared[];
  shared[threadIdx.x] = threadIdx.x + 1;
  __syncthreads();
  const long long start = globaltimer_ns();
  while (globaltimer_ns() - start < ns) {
  }
  const unsigned other = blockDim.x - 1 - threadIdx.x;
  if (threadIdx.x == 0 && shared[other] == other + 1) atomicAdd(count, 1U);
}
__global__ void small(long long ns, unsigned* count) { through_shared(ns, count); }
__global__ void big(long long ns, unsigned* count) { through_shared(ns, count); }

// Do kernels with different shared memory configurations share a multiprocessor?
// Together 1 ms a pair if they do, 2 ms if not.
void carveout() {
  const auto streams = make_streams(2);
  const int big_bytes = 96 << 10;
  CHECK(cudaFuncSetAttribute(big, cudaFuncAttributeMaxDynamicSharedMemorySize, big_bytes));
  const auto prefer = [](void (*kernel)(long long, unsigned*), int carve_out) {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carve_out));
  };
  for (const auto& [small_carve_out, big_carve_out] :
       {std::pair{0, 100}, {25, 100}, {100, 100}, {-1, -1}, {0, -1}}) {
    prefer(small, small_carve_out);
    prefer(big, big_carve_out);
    for (const bool small_first : {true, false}) {
      const std::string times = timed([&] {
        for (int i = 0; i < 5; ++i) {
          if (small_first) small<<<2 * sms, 256, 1024, streams[0]>>>(kMs, counter);
          big<<<sms, 256, big_bytes, streams[1]>>>(kMs, counter);
          if (!small_first) small<<<2 * sms, 256, 1024, streams[0]>>>(kMs, counter);
          CHECK(cudaGetLastError());
          expected += 3 * sms;
        }
      });
      print("carveout", "small=" + std::to_string(small_carve_out) + " big=" +
                            std::to_string(big_carve_out) + " first=" +
                            (small_first ? "small" : "big") +
                            " together_us=5000 serial_us=10000 " + times);
    }
  }
}

// 16 streams of 4 kernels of 1 ms, issued stream after stream or round after round.
// 4 ms if nothing waits. In a child process for each number of connections.
void connections_here() {
  const auto streams = make_streams(16);
  const char* value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  for (const bool depth_first : {true, false}) {
    const std::string times = timed([&] {
      for (int i = 0; i < 64; ++i) hold(streams[depth_first ? i / 4 : i % 16], kMs);
    });
    print("connections", std::string("max_connections=") + (value ? value : "unset") +
                             " order=" + (depth_first ? "depth" : "breadth") +
                             " ideal_us=4000 " + times);
  }
}

void connections(const char* program) {
  for (const char* value : {"", "1", "8", "16", "32"}) {
    const pid_t child = fork();
    if (child < 0) usage_error("no child process");
    if (child == 0) {
      if (*value) {
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", value, 1);
      } else {
        unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
      }
      execl("/proc/self/exe", program, "connections_here", static_cast<char*>(nullptr));
      _exit(2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) usage_error("a child process failed");
  }
}

// What keeping time costs: the calls, a loop that the host limits, and hand-overs that
// the GPU limits. In both orders, so that neither kind is always first.
void timing_events() {
  const auto streams = make_streams(2);
  const cudaEvent_t events[2] = {make_event(false), make_event(true)};
  for (const int kind : {0, 1, 1, 0}) {
    const cudaEvent_t event = events[kind];
    const std::string keys = kind ? "timing=yes" : "timing=no";

    CHECK(cudaDeviceSynchronize());
    auto start = Clock::now();
    for (int i = 0; i < 500; ++i) CHECK(cudaEventRecord(event, streams[0]));
    const double record_us = us_since(start) / 500;
    CHECK(cudaDeviceSynchronize());
    start = Clock::now();
    for (int i = 0; i < 500; ++i) CHECK(cudaStreamWaitEvent(streams[1], event, 0));
    const double wait_us = us_since(start) / 500;
    print("event_calls", keys + " record_us=" + std::to_string(record_us) +
                             " wait_us=" + std::to_string(wait_us));

    const auto hand_over = [&](int count, long long ns) {
      for (int i = 0; i < count; ++i) {
        hold(streams[i % 2], ns);
        CHECK(cudaEventRecord(event, streams[i % 2]));
        CHECK(cudaStreamWaitEvent(streams[1 - i % 2], event, 0));
      }
    };
    print("event_issue_bound", keys + " hand_overs=1000 kernel_us=0 " +
                                   timed([&] { hand_over(1000, 0); }));
    print("event_gpu_bound", keys + " hand_overs=200 kernel_us=30 " +
                                 timed([&] { hand_over(200, 30'000); }));
  }
  print("event_gpu_bound", "timing=none same_stream kernels=200 kernel_us=30 " + timed([&] {
                             for (int i = 0; i < 200; ++i) hold(streams[0], 30'000);
                           }));
}

// Launches of one executable graph in two streams, and of two. 2 ms if they overlap.
void two_execs() {
  const auto streams = make_streams(2);
  const auto body = [&] { spin<<<1, 32, 0, streams[0]>>>(2 * kMs, counter); };
  const cudaGraphExec_t first = instantiate(streams[0], body);
  const cudaGraphExec_t second = instantiate(streams[0], body);
  for (const bool same : {true, false}) {
    print("two_execs", std::string("execs=") + (same ? "1" : "2") +
                           " streams=2 overlapped_us=2000 serial_us=4000 " + timed([&] {
                             CHECK(cudaGraphLaunch(first, streams[0]));
                             CHECK(cudaGraphLaunch(same ? first : second, streams[1]));
                             expected += 2;
                           }));
  }
}

// What calls about a graph cost once the first of their kind are done with, each on an
// idle stream. Every graph has the same kernels with another argument.
void graph_calls() {
  const cudaStream_t stream = make_stream();
  for (const int nodes : {10, 50, 200}) {
    std::map<std::string, std::vector<double>> times;
    cudaGraphExec_t kept = nullptr;
    for (int i = 0; i <= 4 * kTimes; ++i) {
      const auto time = [&](const char* what, auto call) {
        CHECK(cudaStreamSynchronize(stream));
        const auto start = Clock::now();
        CHECK(call());
        if (kept) times[what].push_back(us_since(start));
      };
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      time("capture", [&] {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int node = 0; node < nodes; ++node) spin<<<1, 32, 0, stream>>>(i, counter);
        return cudaStreamEndCapture(stream, &graph);
      });
      time("instantiate", [&] { return cudaGraphInstantiate(&exec, graph, 0); });
      time("first_launch", [&] { return cudaGraphLaunch(exec, stream); });
      time("launch", [&] { return cudaGraphLaunch(exec, stream); });
      expected += 2ULL * nodes;
      if (kept) {
        cudaGraphExecUpdateResultInfo result;
        time("update", [&] { return cudaGraphExecUpdate(kept, graph, &result); });
        time("launch_after_update", [&] { return cudaGraphLaunch(kept, stream); });
        time("exec_destroy", [&] { return cudaGraphExecDestroy(exec); });
        expected += nodes;
      } else {
        kept = exec;
      }
      CHECK(cudaGraphDestroy(graph));
    }
    for (auto& [what, us] : times) {
      std::sort(us.begin(), us.end());
      char text[128];
      std::snprintf(text, sizeof text, "call=%s nodes=%d median_us=%.1f min_us=%.1f max_us=%.1f",
                    what.c_str(), nodes, us[us.size() / 2], us.front(), us.back());
      print("graph_calls", text);
    }
  }
}

// How long a kernel waits behind four that fill the GPU (0.5 ms each, 2 waves), with a
// higher and with the same priority.
void priorities() {
  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t background, high, equal;
  CHECK(cudaStreamCreateWithPriority(&background, cudaStreamNonBlocking, least));
  CHECK(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, greatest));
  CHECK(cudaStreamCreateWithPriority(&equal, cudaStreamNonBlocking, least));
  for (const bool is_high : {true, false, true, false}) {
    std::vector<double> latencies;
    timed([&] {
      for (int i = 0; i < 4; ++i) hold(background, kMs / 2, 16 * sms, 256);
      host_work_us(100);
      const auto start = Clock::now();
      hold(is_high ? high : equal, 0, sms, 256);
      CHECK(cudaStreamSynchronize(is_high ? high : equal));
      latencies.push_back(us_since(start));
    });
    std::sort(latencies.begin(), latencies.end());
    char text[96];
    std::snprintf(text, sizeof text, "latency_us=%.1f min_us=%.1f max_us=%.1f background_us=4000",
                  latencies[latencies.size() / 2], latencies.front(), latencies.back());
    print("priority", std::string("other=") + (is_high ? "high " : "equal ") + text);
  }
}

// What a host function adds to the stream it is in, with and without a body.
void host_functions() {
  const cudaStream_t stream = make_stream();
  const int count = 20;
  const auto run = [&](cudaHostFn_t function) {
    return timed([&] {
      for (int i = 0; i < count; ++i) {
        hold(stream, kMs / 5);
        if (function) CHECK(cudaLaunchHostFunc(stream, function, nullptr));
      }
    });
  };
  const std::string keys = "functions=20 kernel_us=200 ";
  print("host_function", "body_us=none " + keys + run(nullptr));
  print("host_function", "body_us=0 " + keys + run([](void*) { const Range range("body"); }));
  print("host_function", "body_us=1000 " + keys + run([](void*) {
                           const Range range("body");
                           host_work_us(1000);
                         }));
}

// Which requests for L2 the driver refuses, clamps or grants.
void l2_requests() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const size_t l2 = device.l2CacheSize, largest = device.persistingL2CacheMaxSize;
  const size_t widest = device.accessPolicyMaxWindowSize;
  for (const size_t request : {largest / 3, largest, largest + 4096, l2 / 4 * 3, l2, 2 * l2}) {
    const cudaError_t code = cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, request);
    (void)cudaGetLastError();
    size_t granted = 0;
    CHECK(cudaDeviceGetLimit(&granted, cudaLimitPersistingL2CacheSize));
    print("l2_limit", "request=" + std::to_string(request) + " persist_max=" +
                          std::to_string(largest) + " rc=" + cudaGetErrorName(code) +
                          " granted=" + std::to_string(granted));
  }
  const cudaStream_t stream = make_stream();
  const size_t allocated = widest + (64UL << 20);
  char* buffer = device_alloc<char>(allocated);
  char* tail = device_alloc<char>(64UL << 20);
  const auto window = [&](const char* what, void* base, size_t bytes) {
    cudaStreamAttrValue value = {};
    value.accessPolicyWindow = {base, bytes, 1.0F, cudaAccessPropertyPersisting,
                                cudaAccessPropertyStreaming};
    const cudaError_t code =
        cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
    (void)cudaGetLastError();
    value = {};
    CHECK(cudaStreamGetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value));
    print("l2_window", std::string("where=") + what + " bytes=" + std::to_string(bytes) +
                           " max_window=" + std::to_string(widest) + " rc=" +
                           cudaGetErrorName(code) + " now_bytes=" +
                           std::to_string(value.accessPolicyWindow.num_bytes));
  };
  window("inside", buffer, widest - 4096);
  window("inside", buffer, widest);
  window("inside", buffer, widest + 4096);
  window("inside", buffer, allocated);
  window("past_end", tail, 65UL << 20);
  window("off", nullptr, 0);
  print("l2_reset", timed([] { CHECK(cudaCtxResetPersistingL2Cache()); }));
  CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 0));
}

// Does a set-aside that nothing uses cost other data anything? 50 kernels in a row that
// read and write the same data. Without one, with one alone, and under a window.
void l2_unused() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const cudaStream_t stream = make_stream();
  for (const size_t mib : {8, 16, 24, 32, 48}) {
    const size_t n = (mib << 20) / sizeof(unsigned);
    unsigned* data = device_alloc<unsigned>(n);
    for (const char* way : {"none", "set_aside", "window", "none"}) {
      const bool reserve = *way != 'n', window = *way == 'w';
      CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize,
                               reserve ? device.persistingL2CacheMaxSize : 0));
      cudaStreamAttrValue value = {};
      if (window) {
        value.accessPolicyWindow = {data, mib << 20, 1.0F, cudaAccessPropertyPersisting,
                                    cudaAccessPropertyStreaming};
      }
      CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value));
      const std::string times = timed([&] {
        for (int i = 0; i < 50; ++i) churn<<<blocks_for(n), 256, 0, stream>>>(data, n, 1);
      });
      print("l2_unused", "mib=" + std::to_string(mib) + " with=" + way + " kernels=50 " + times);
      value = {};
      CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value));
      CHECK(cudaCtxResetPersistingL2Cache());
    }
    CHECK(cudaFree(data));
  }
}

// A wait for an event that was recorded before the capture of the trace began.
void range_capture() {
  const auto streams = make_streams(2);
  const cudaEvent_t event = make_event(false);
  hold(streams[0], 5 * kMs);
  CHECK(cudaEventRecord(event, streams[0]));
  CHECK(cudaProfilerStart());
  const auto start = Clock::now();
  CHECK(cudaStreamWaitEvent(streams[1], event, 0));
  hold(streams[1], kMs);
  CHECK(cudaEventSynchronize(event));
  const double event_us = us_since(start);
  CHECK(cudaStreamSynchronize(streams[1]));
  print("range_capture", "event_sync_us=" + std::to_string(event_us) + " both_us=" +
                             std::to_string(us_since(start)) + " pending_us=5000");
  CHECK(cudaProfilerStop());
}

int main(int argc, char** argv) {
  const std::vector<std::pair<std::string, std::function<void()>>> probes = {
      {"connections", [&] { connections(argv[0]); }},  // first: before any CUDA call
      {"carveout", carveout},
      {"timing_events", timing_events},
      {"two_execs", two_execs},
      {"graph_calls", graph_calls},
      {"priorities", priorities},
      {"host_functions", host_functions},
      {"l2_requests", l2_requests},
      {"l2_unused", l2_unused},
      {"range_capture", range_capture},  // last: nsys may end the program with it
      {"connections_here", connections_here},
  };
  const std::string wanted = argc > 1 ? argv[1] : "";
  const bool all = std::none_of(probes.begin(), probes.end(),
                                [&](const auto& probe) { return probe.first == wanted; });
  for (const auto& [name, probe] : probes) {
    if (all ? name == "connections_here" : name != wanted) continue;
    if (name != "connections" && !counter) {
      int count = 0;
      CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
      sms = static_cast<unsigned>(count);
      counter = device_alloc<unsigned>(1);
    }
    const Range range(name.c_str());
    probe();
    if (counter) CHECK(cudaDeviceSynchronize());
  }
  if (counter) verify_counter("blocks", counter, expected);
  return wanted == "connections_here" ? 0 : passed();
}
