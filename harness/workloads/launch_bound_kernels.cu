// harness: rule launch-bound-kernels
// harness: expect the GPU waits for the host to launch each tiny kernel: 7.7 ms -> 2.1 ms as a graph
//
// 20 iterations of 100 dependent tiny kernels: launched one by one (bad), or captured
// once into a graph of 100 nodes and launched as that (fixed). The warm-up runs a single
// iteration, to keep the trace small.
#include "common.cuh"

constexpr int kKernels = 100;

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const size_t n = 3UL * sms * 256;
  unsigned* data = device_alloc<unsigned>(n);
  const auto issue = [&] {
    for (int i = 0; i < kKernels; ++i) churn<<<blocks_for(n), 256, 0, stream>>>(data, n, 1);
  };

  cudaGraphExec_t exec = nullptr;
  if (args.fixed()) {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    issue();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphUpload(exec, stream));
  }

  unsigned long long done = 0;
  measure(args, [&] {
    for (int i = 0; i < (in_region ? iterations : 1); ++i) {
      const Iteration iteration(i);
      if (exec) {
        CHECK(cudaGraphLaunch(exec, stream));
      } else {
        issue();
      }
      done += kKernels;
    }
  });

  verify("data", download(data, n), [value = churned(0, done)](size_t) { return value; });
  return passed();
}
