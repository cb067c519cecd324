// harness: rule l2-persistence-not-reset
// harness: expect lines that phase one left persisting keep phase two out of most of L2: its kernels are shorter after a reset, 3.4 ms -> 2.2 ms
//
// The example of the CUDA Programming Guide. Phase one uses its data under a persisting
// window, ten times with one kernel and once more after that. Phase two reuses other
// data on another stream. fixed removes the window and resets the persisting lines in
// between, bad does not. Both wait for phase one: a reset acts at once, so without the
// wait there would be nothing to reset yet.
#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "28"}, {"iterations", "40"}});
  const int iterations = static_cast<int>(args.integer("iterations"));

  const cudaDeviceProp device = l2_device();
  const size_t reserved = set_aside(
      std::min<size_t>(device.l2CacheSize / 4 * 3, device.persistingL2CacheMaxSize));
  const auto streams = make_streams(2);
  List first(reserved), second(static_cast<size_t>(args.integer("size")) << 20);
  const auto window = persisting(first.data(), first.bytes(), 1.0F);

  measure(args, [&] {
    CHECK(set_window(streams[0], window));
    int i = 0;
    {
      const streamlint::L2Window scope(window);
      for (; i < 11; ++i) {
        const Iteration iteration(i);
        first.pass(streams[0], 4);
      }
    }
    CHECK(cudaStreamSynchronize(streams[0]));
    if (args.fixed()) end_persistence(streams[0]);
    for (; i < 11 + iterations; ++i) {
      const Iteration iteration(i);
      second.pass(streams[1], 4);
    }
  });

  first.check("first list");
  second.check("second list");
  return passed();
}
