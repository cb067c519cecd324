// harness: rule stream-false-dependency
// harness: env fixed CUDA_DEVICE_MAX_CONNECTIONS=32
// harness: expect streams i and i+8 share a work queue and take turns: 25 ms -> 16 ms
//
// 16 independent streams with four kernels of 1 ms each, issued stream after stream,
// four rounds. The GPU has room for all of them, but by default only eight work
// queues: the first kernel of stream i+8 sits behind the last one of stream i and
// can't start before that one has started. bad runs with the default, the commonest
// case; fixed has a queue for every stream. The variable must be set outside: the
// trace tells the launch environment only.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "4"}, {"streams", "16"}});
  const int rounds = static_cast<int>(args.integer("size"));
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (args.fixed() &&
      (!connections || std::atoi(connections) < args.integer("streams"))) {
    usage_error("set CUDA_DEVICE_MAX_CONNECTIONS=32 for --variant fixed");
  }
  if (args.bad() && connections && std::atoi(connections) > 8) {
    usage_error("unset CUDA_DEVICE_MAX_CONNECTIONS for --variant bad");
  }
  const auto streams = make_streams(static_cast<int>(args.integer("streams")));
  unsigned* counter = device_alloc<unsigned>(1);

  measure(args, [&] {
    for (int round = 0; round < rounds; ++round) {
      const Iteration iteration(round);
      for (const cudaStream_t stream : streams) {
        for (int i = 0; i < 4; ++i) spin<<<1, 32, 0, stream>>>(1'000'000, counter);
      }
    }
  });

  verify_counter("kernels", counter, 4ULL * rounds * streams.size() * args.runs());
  return passed();
}
