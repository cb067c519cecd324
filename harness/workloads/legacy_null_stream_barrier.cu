// harness: rule legacy-null-stream-barrier
// harness: expect the null-stream work takes turns with both streams: kernel 14 ms -> 8 ms, other causes 12 ms -> 8 ms
//
// Two streams get a long and a short kernel in turn, so that each has 400 us of work in
// an iteration. Something on the legacy default stream comes between. With blocking
// streams (bad) it is a barrier: every iteration then takes 600 us and the barrier's
// own time. The fix makes the streams non-blocking; for the library it passes a
// stream of its own to the library, as one would with cublasSetStream.
#include <thrust/execution_policy.h>
#include <thrust/transform.h>

#include "common.cuh"

// A library function in the sense of this program: it runs where its policy says,
// and that is the legacy default stream unless told otherwise.
struct Step {
  int rounds;
  __host__ __device__ unsigned operator()(unsigned value) const {
    for (int i = 0; i < rounds; ++i) value = churn_step(value);
    return value;
  }
};

int main(int argc, char** argv) {
  const Args args(argc, argv,
                  {{"size", "20"}, {"cause", "kernel|memset|copy|event|library"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const bool library = args.is("cause", "library");
  const long long us = 1000;

  const unsigned flags =
      args.bad() || library ? cudaStreamDefault : cudaStreamNonBlocking;
  const auto streams = make_streams(2, flags);
  const cudaStream_t library_stream = args.bad() ? cudaStreamLegacy : make_stream();

  // Few elements, so that the library's kernel leaves room on the GPU.
  const size_t n = library ? 4096 : 1 << 20;
  const int rounds = 5000;
  unsigned* counters = device_alloc<unsigned>(3);  // of the streams, of the cause
  unsigned* data = device_alloc<unsigned>(n);
  unsigned* copied = device_alloc<unsigned>(n);
  CHECK(cudaMemset(data, 0x5a, n * sizeof(unsigned)));
  cudaEvent_t event;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

  const auto barrier = [&] {
    if (args.is("cause", "kernel")) spin<<<8, 64>>>(50 * us, &counters[2]);
    if (args.is("cause", "memset")) CHECK(cudaMemset(copied, 0x5a, n * sizeof(unsigned)));
    if (args.is("cause", "copy")) {
      CHECK(cudaMemcpy(copied, data, n * sizeof(unsigned), cudaMemcpyDeviceToDevice));
    }
    if (args.is("cause", "event")) CHECK(cudaEventRecord(event, nullptr));
    if (library) {
      const auto policy = thrust::cuda::par_nosync.on(library_stream);
      thrust::transform(policy, data, data + n, data, Step{rounds});
    }
  };

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      spin<<<8, 64, 0, streams[0]>>>(100 * us, &counters[0]);
      spin<<<8, 64, 0, streams[1]>>>(300 * us, &counters[1]);
      barrier();
      spin<<<8, 64, 0, streams[0]>>>(300 * us, &counters[0]);
      spin<<<8, 64, 0, streams[1]>>>(100 * us, &counters[1]);
      barrier();
    }
  });

  const unsigned barriers = 2U * iterations * args.runs();
  verify_counter("stream 0", &counters[0], 8ULL * barriers);
  verify_counter("stream 1", &counters[1], 8ULL * barriers);
  const bool kernel = args.is("cause", "kernel");
  verify_counter("kernel", &counters[2], kernel ? 8ULL * barriers : 0);
  const bool fills = args.is("cause", "memset") || args.is("cause", "copy");
  const unsigned churns = library ? barriers * rounds : 0;
  verify("data", download(data, n),
         [&](size_t) { return churned(0x5a5a5a5aU, churns); });
  verify("copied", download(copied, n), [&](size_t) { return fills ? 0x5a5a5a5aU : 0U; });
  return passed();
}
