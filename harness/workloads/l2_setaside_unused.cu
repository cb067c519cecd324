// harness: rule l2-setaside-unused
// harness: expect with most of L2 set aside and no window, the reused list is evicted by data that are read once; fixed keeps it: kernels about half as long
//
// The example of the CUDA Programming Guide: three quarters of L2 (or as much as the
// GPU allows) set aside, then the same data used by one kernel after another, while
// other data pass through. bad forgets the access policy window: the set-aside serves
// nobody, and everything has to do with the rest of L2. fixed sets the window.
#include <optional>

#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "16"}, {"iterations", "40"}});
  const int iterations = static_cast<int>(args.integer("iterations"));

  const cudaDeviceProp device = l2_device();
  set_aside(std::min<size_t>(device.l2CacheSize / 4 * 3, device.persistingL2CacheMaxSize));
  const cudaStream_t stream = make_stream();
  List reused(static_cast<size_t>(args.integer("size")) << 20);
  const unsigned* cold = cold_alloc();
  const auto window = persisting(reused.data(), reused.bytes(), 1.0F);
  if (args.fixed()) CHECK(set_window(stream, window));

  measure(args, [&] {
    std::optional<streamlint::L2Window> scope;
    if (args.fixed()) scope.emplace(window);
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      reused.pass(stream, 8, cold);
    }
  });

  if (args.fixed()) end_persistence(stream);
  reused.check("list");
  return passed();
}
