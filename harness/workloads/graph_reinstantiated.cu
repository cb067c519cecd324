// harness: rule graph-reinstantiated
// harness: expect each iteration instantiates its graph of 50 nodes anew, uploads and destroys it: less than half the time with an update, without the profiler
//
// Every iteration captures the same 50 kernels with new arguments. bad makes an
// executable graph of each capture and destroys it once it has run, fixed instantiates
// the first and updates it. Both launch an iteration before they wait for the last one.
// The kernels are short, so that the host is the limit. nsys, tracing node by node,
// makes an update about as long as an instantiation: only the times without it differ.
// The warm-up has three iterations, to keep the trace small.
#include <algorithm>

#include "common.cuh"

constexpr int kKernels = 50;

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const size_t n = 3UL * sms * 256;
  unsigned* data = device_alloc<unsigned>(n);
  cudaEvent_t done[2];
  for (cudaEvent_t& event : done) {
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }

  cudaGraphExec_t execs[2] = {};  // fixed needs the first one only
  unsigned long long steps = 0;
  measure(args, [&] {
    const int count = in_region ? iterations : std::min(iterations, 3);
    for (int i = 0; i < count; ++i) {
      const Iteration iteration(i);
      const int rounds = 1 + i;
      cudaGraph_t graph = nullptr;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int k = 0; k < kKernels; ++k) {
        churn<<<blocks_for(n), 256, 0, stream>>>(data, n, rounds);
      }
      CHECK(cudaStreamEndCapture(stream, &graph));

      cudaGraphExec_t& exec = execs[args.bad() ? i % 2 : 0];
      if (exec) {
        cudaGraphExecUpdateResultInfo result;
        CHECK(cudaGraphExecUpdate(exec, graph, &result));
      } else {
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
      }
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaGraphDestroy(graph));
      CHECK(cudaEventRecord(done[i % 2], stream));
      steps += 1ULL * kKernels * rounds;

      if (i > 0) CHECK(cudaEventSynchronize(done[(i - 1) % 2]));
      if (args.bad() && i > 0) {
        CHECK(cudaGraphExecDestroy(execs[(i - 1) % 2]));
        execs[(i - 1) % 2] = nullptr;
      }
    }
    CHECK(cudaStreamSynchronize(stream));
    cudaGraphExec_t& last = execs[(count - 1) % 2];
    if (args.bad()) {
      CHECK(cudaGraphExecDestroy(last));
      last = nullptr;
    }
  });

  verify("data", download(data, n), [value = churned(0, steps)](size_t) { return value; });
  return passed();
}
