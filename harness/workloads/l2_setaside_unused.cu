// harness: rule l2-setaside-unused
// harness: expect without a window each pass over the list waits for memory, as other data have been through L2 since the last; fixed keeps it in the set-aside
//
// The example of the CUDA Programming Guide: three quarters of L2 (or as much as the
// GPU allows) set aside, then the same data used again and again, while other data pass
// through. bad forgets the access policy window: the set-aside serves nobody, and the
// other data evict the list. fixed sets the window.
#include <optional>

#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "32"}, {"iterations", "40"}});
  const int iterations = static_cast<int>(args.integer("iterations"));

  const cudaDeviceProp device = l2_device();
  set_aside(std::min<size_t>(device.l2CacheSize / 4 * 3, device.persistingL2CacheMaxSize));
  const cudaStream_t stream = make_stream();
  List reused(static_cast<size_t>(args.integer("size")) << 20);
  OtherData others(device.l2CacheSize);
  const auto window = persisting(reused.data(), reused.bytes(), 1.0F);
  if (args.fixed()) CHECK(set_window(stream, window));

  measure(args, [&] {
    std::optional<streamlint::L2Window> scope;
    if (args.fixed()) scope.emplace(window);
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      reused.pass(stream, 1);
      others.pass(stream);
    }
  });

  if (args.fixed()) end_persistence(stream);
  reused.check("list");
  others.check();
  return passed();
}
