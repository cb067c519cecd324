// harness: rule threads-share-legacy-stream
// harness: nvcc -Xcompiler -pthread
// harness: expect four threads take turns on the legacy default stream: 8 ms -> 2 ms
//
// Four host threads launch independent kernels that fill little of the GPU. Without a
// stream argument all of them land on the one legacy default stream (bad); fixed uses
// each thread's own default stream, as --default-stream per-thread would.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common.cuh"

// Lets all threads go on together once the last one has come (std::barrier is C++20).
class Meeting {
 public:
  explicit Meeting(int count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++here_ == count_) {
      here_ = 0;
      ++round_;
      all_.notify_all();
    }
    all_.wait(lock, [&] { return round != round_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  const int count_;
  int here_ = 0, round_ = 0;
};

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const int count = 4;
  unsigned* counters = device_alloc<unsigned>(count);
  const cudaStream_t stream = args.bad() ? cudaStreamLegacy : cudaStreamPerThread;

  // The threads live through all repeats, so that each one's first CUDA call and the
  // creation of its default stream fall into the warm-up.
  Meeting start(count + 1), done(count + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      for (int run = 0; run < args.runs(); ++run) {
        start.wait();
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          spin<<<8, 64, 0, stream>>>(100'000, &counters[t]);
        }
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGetLastError());
        done.wait();
      }
    });
  }
  measure(
      args,
      [&] {
        start.wait();
        done.wait();
      },
      Finish::by_body);
  for (std::thread& thread : threads) thread.join();

  verify("counters", download(counters, count),
         [&](size_t) { return 8ULL * iterations * args.runs(); });
  return passed();
}
