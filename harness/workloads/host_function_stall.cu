// harness: rule host-function-stall
// harness: nvcc -Xcompiler -pthread
// harness: expect the stream stands still while its host function runs for 1 ms, ten times: 21 ms -> 11 ms
//
// After each kernel the host logs its result, which takes 1 ms; the next kernel doesn't
// need that. bad logs in a host function: the stream waits for it. fixed records an
// event for a worker thread to wait for, and the stream goes on.
#include <thread>

#include "common.cuh"

constexpr size_t kElements = 1 << 20;
constexpr size_t kResult = 1024;
constexpr int kRounds = 14'000;  // about 1 ms

struct Log {
  const unsigned* result;  // page-locked
  unsigned seen;
};

void write_log(void* entry) {
  const Range range("log");
  Log& log = *static_cast<Log*>(entry);
  log.seen = log.result[kResult - 1];
  host_work_us(1000);
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "10"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  unsigned* data = device_alloc<unsigned>(kElements);
  unsigned* results = pinned_alloc<unsigned>(iterations * kResult);
  std::vector<Log> logs;
  std::vector<cudaEvent_t> copied(iterations);
  for (int i = 0; i < iterations; ++i) {
    logs.push_back({results + i * kResult, 0});
    CHECK(cudaEventCreateWithFlags(&copied[i],
                                   cudaEventDisableTiming | cudaEventBlockingSync));
  }

  measure(
      args,
      [&] {
        std::atomic<int> recorded{0};
        const auto worker = [&] {
          for (int i = 0; i < iterations; ++i) {
            while (recorded <= i) std::this_thread::yield();
            CHECK(cudaEventSynchronize(copied[i]));
            write_log(&logs[i]);
          }
        };
        std::thread thread;
        if (args.fixed()) thread = std::thread(worker);
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          churn<<<blocks_for(kElements), 256, 0, stream>>>(data, kElements, kRounds);
          CHECK(cudaMemcpyAsync(results + i * kResult, data, kResult * sizeof(unsigned),
                                cudaMemcpyDeviceToHost, stream));
          if (args.bad()) {
            CHECK(cudaLaunchHostFunc(stream, write_log, &logs[i]));
          } else {
            CHECK(cudaEventRecord(copied[i], stream));
            ++recorded;
          }
        }
        CHECK(cudaStreamSynchronize(stream));
        if (thread.joinable()) thread.join();
      },
      Finish::by_body);

  const unsigned long long before = 1ULL * iterations * args.repeat() * kRounds;
  for (int i = 0; i < iterations; ++i) {
    verify("log", &logs[i].seen, 1,
           [&](size_t) { return churned(0, before + (i + 1ULL) * kRounds); });
  }
  verify("data", download(data, kElements),
         [value = churned(0, before + 1ULL * iterations * kRounds)](size_t) { return value; });
  return passed();
}
