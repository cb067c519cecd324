// harness: rule cross-context-serialization
// harness: processes 2
// harness: note without MPS the GPU runs one process at a time; under MPS, or with the GPU in exclusive mode, bad can't show the fault
// harness: expect kernels of two processes never run together, though each fills little of the GPU: 22 ms -> 10 ms
//
// Two workers queue the same small kernels. In bad the second worker is a process of
// its own, started from this one before any CUDA call; in fixed it is a second stream.
// The kernels compute rather than wait for a clock: a clock would go on while the
// process is switched out.
#include <sys/wait.h>
#include <unistd.h>

#include "common.cuh"

constexpr unsigned kBlocks = 8;
constexpr size_t kElements = kBlocks * 256;
constexpr int kRounds = 45'000;  // about 0.1 ms

// One byte each way: the other process is ready (or done), or shall start.
void tell(int fd) {
  const char byte = 1;
  if (write(fd, &byte, 1) != 1) usage_error("the other process is gone");
}
void hear(int fd) {
  char byte = 0;
  if (read(fd, &byte, 1) != 1) usage_error("the other process is gone");
}

void issue(unsigned* data, cudaStream_t stream) {
  churn<<<kBlocks, 256, 0, stream>>>(data, kElements, kRounds);
}

void verify_worker(const unsigned* data, unsigned long long kernels) {
  verify("data", download(data, kElements),
         [value = churned(0, kernels * kRounds)](size_t) { return value; });
}

// The second process: the same work each time that the first one asks for it.
int second_process(const Args& args) {
  const int from = static_cast<int>(args.integer("from"));
  const int to = static_cast<int>(args.integer("to"));
  const int iterations = static_cast<int>(args.integer("size"));
  unsigned* data = device_alloc<unsigned>(kElements);
  const cudaStream_t stream = make_stream();
  for (int run = 0; run < args.runs(); ++run) {
    tell(to);
    hear(from);
    const Range range("region", run > 0);
    in_region = run > 0;
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      issue(data, stream);
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGetLastError());
    tell(to);
  }
  verify_worker(data, 1ULL * iterations * args.runs());
  return 0;
}

int main(int argc, char** argv) {
  // --from and --to are for the second process alone: its ends of the pipes.
  const Args args(argc, argv, {{"size", "100"}, {"from", "-1"}, {"to", "-1"}});
  if (args.integer("from") >= 0) return second_process(args);
  const int iterations = static_cast<int>(args.integer("size"));

  int there[2] = {-1, -1}, back[2] = {-1, -1};
  pid_t child = -1;
  if (args.bad()) {
    if (pipe(there) || pipe(back)) usage_error("no pipe");
    child = fork();
    if (child < 0) usage_error("no second process");
    if (child == 0) {
      close(there[1]);
      close(back[0]);
      execl("/proc/self/exe", argv[0], "--variant", "bad", "--repeat",
            args.text("repeat").c_str(), "--size", args.text("size").c_str(), "--from",
            std::to_string(there[0]).c_str(), "--to", std::to_string(back[1]).c_str(),
            static_cast<char*>(nullptr));
      _exit(2);
    }
    close(there[0]);
    close(back[1]);
  }

  unsigned* data = device_alloc<unsigned>(2 * kElements);
  const auto streams = make_streams(args.bad() ? 1 : 2);
  measure(
      args,
      [&] {
        if (args.bad()) tell(there[1]);
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          for (size_t s = 0; s < streams.size(); ++s) {
            issue(data + s * kElements, streams[s]);
          }
        }
        for (const cudaStream_t stream : streams) CHECK(cudaStreamSynchronize(stream));
        if (args.bad()) hear(back[0]);
      },
      Finish::by_body,
      [&] {
        if (args.bad()) hear(back[0]);
      });

  for (size_t s = 0; s < streams.size(); ++s) {
    verify_worker(data + s * kElements, 1ULL * iterations * args.runs());
  }
  if (args.bad()) {
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) {
      usage_error("the second process failed");
    }
  }
  return passed();
}
