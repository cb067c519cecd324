// harness: rule pdl-candidate
// harness: arch-min 90
// harness: expect a gap of 1 us between dependent kernels of one queue goes away, and each starts before the one before it has ended: 300 kernels, about 0.3 ms less
//
// A chain of kernels in one stream. Each prepares something of its own, waits for its
// predecessor with cudaGridDependencySynchronize, lets its successor start, and goes on.
// Only with the launch attribute programmatic stream serialization (fixed) does the
// successor start early; without it (bad) both device calls do nothing. The kernels
// leave room for each other on the GPU.
#include "common.cuh"

constexpr int kPrepare = 100, kRounds = 1'500;  // about 11 us

// data[i] = churn(data[i], kRounds) + churn(i, kPrepare)
__global__ void step(unsigned* data) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned own = i;
  for (int round = 0; round < kPrepare; ++round) own = churn_step(own);
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  unsigned value = data[i];
  for (int round = 0; round < kRounds; ++round) value = churn_step(value);
  data[i] = value + own;
}

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "300"}});
  const int kernels = static_cast<int>(args.integer("size"));
  const cudaStream_t stream = make_stream();
  int sms = 0, major = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) usage_error("needs a GPU of compute capability 9.0 or later");
  const size_t n = 3UL * sms * 256;
  unsigned* data = device_alloc<unsigned>(n);

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = args.fixed();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks_for(n));
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;

  measure(args, [&] {
    for (int i = 0; i < kernels / 30; ++i) {
      const Iteration iteration(i);
      for (int k = 0; k < 30; ++k) CHECK(cudaLaunchKernelEx(&config, step, data));
    }
  });

  // kRounds steps of the generator are one multiplication and one addition.
  const unsigned add = churned(0, kRounds), factor = churned(1, kRounds) - add;
  const int launches = kernels / 30 * 30 * args.runs();
  verify("data", download(data, n), [=](size_t i) {
    const unsigned own = churned(static_cast<unsigned>(i), kPrepare);
    unsigned value = 0;
    for (int k = 0; k < launches; ++k) value = value * factor + add + own;
    return value;
  });
  return passed();
}
