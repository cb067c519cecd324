// harness: rule failed-cuda-call
// harness: cause cluster
// harness: arch-min 90
// harness: note a warning about correctness: the kernel of bad never runs, which costs no time
// harness: expect launches that return an error and have no kernel: cudaErrorInvalidConfiguration, with --cause cluster cudaErrorInvalidClusterSize or the like
//
// Besides its work, each iteration launches a kernel for statistics. In bad that launch
// is impossible (config: 2048 threads in a block; cluster: 64 blocks in a cluster), and
// the program never looks at its error. What is verified doesn't depend on it.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "20"}, {"cause", "config|cluster"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  const size_t n = 1 << 20;
  const int rounds = 1'000;
  unsigned* data = device_alloc<unsigned>(n);
  unsigned* statistics = device_alloc<unsigned>(n);

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = args.bad() && args.is("cause", "cluster") ? 64 : 1;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks_for(n));
  config.blockDim = dim3(args.bad() && args.is("cause", "config") ? 2048 : 256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = args.is("cause", "cluster") ? 1 : 0;

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      churn<<<blocks_for(n), 256, 0, stream>>>(data, n, rounds);
      CHECK(cudaGetLastError());
      (void)cudaLaunchKernelEx(&config, churn, statistics, n, rounds);
      (void)cudaGetLastError();  // or measure() would find it
    }
  });

  const unsigned long long steps = 1ULL * iterations * args.runs() * rounds;
  verify("data", download(data, n), [value = churned(0, steps)](size_t) { return value; });
  return passed();
}
