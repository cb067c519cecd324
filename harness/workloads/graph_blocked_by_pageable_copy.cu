// harness: rule graph-blocked-by-pageable-copy
// harness: expect cudaGraphLaunch returns only when the graph's copies of pageable memory are done, so the host can't prepare the next step meanwhile: 20 ms -> 10 ms
//
// Each iteration the host works for 0.4 ms and launches a graph: upload, kernel of 0.5
// ms, download. With pageable host memory for both copies (bad) the launch waits for
// them; with page-locked memory (fixed) it returns at once.
#include "common.cuh"

constexpr size_t kElements = 1 << 17;
constexpr int kRounds = 55'000;  // about 0.5 ms

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  const auto host = [&] {
    return args.bad() ? pageable_alloc<unsigned>(kElements) : pinned_alloc<unsigned>(kElements);
  };
  unsigned *source = host(), *result = host();
  for (size_t i = 0; i < kElements; ++i) source[i] = static_cast<unsigned>(i);
  unsigned* input = device_alloc<unsigned>(kElements);
  unsigned* output = device_alloc<unsigned>(kElements);

  cudaGraph_t graph = nullptr;
  cudaGraphNode_t upload = nullptr, kernel = nullptr, download = nullptr;
  const size_t bytes = kElements * sizeof(unsigned);
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaGraphAddMemcpyNode1D(&upload, graph, nullptr, 0, input, source, bytes,
                                 cudaMemcpyHostToDevice));
  size_t n = kElements;
  int rounds = kRounds;
  void* arguments[] = {&output, &input, &n, &rounds};
  cudaKernelNodeParams node = {};
  node.func = reinterpret_cast<void*>(churn_into);
  node.gridDim = dim3(blocks_for(n));
  node.blockDim = dim3(256);
  node.kernelParams = arguments;
  CHECK(cudaGraphAddKernelNode(&kernel, graph, &upload, 1, &node));
  CHECK(cudaGraphAddMemcpyNode1D(&download, graph, &kernel, 1, result, output, bytes,
                                 cudaMemcpyDeviceToHost));
  cudaGraphExec_t exec = nullptr;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));

  measure(
      args,
      [&] {
        for (int i = 0; i < iterations; ++i) {
          const Iteration iteration(i);
          host_work_us(400);
          CHECK(cudaGraphLaunch(exec, stream));
        }
      },
      Finish::device_sync, [&] { std::memset(result, 0, bytes); });

  verify("result", result, kElements,
         [](size_t i) { return churned(static_cast<unsigned>(i), kRounds); });
  return passed();
}
