// harness: rule l2-request-clamped-or-unsupported
// harness: cause window
// harness: expect the GPU refuses to set three quarters of L2 aside, so the window on them keeps nothing; --cause window: a window over the maximum is refused and the kernels run without one
//
// Asks for more than the GPU has, and never looks at the answer. In between its uses of
// a list, other data pass through L2 and evict what isn't kept.
// setaside: three quarters of L2, where less can be set aside (62.5 % on an H200). bad
// makes its list and window for the request, fixed asks for the maximum and lets as much
// of the list persist as was granted. window: a buffer larger than
// accessPolicyMaxWindowSize, of which only the beginning is used again. bad sets a
// window on all of it, which fails, fixed on the beginning.
#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "40"}, {"cause", "setaside|window"}});
  const int iterations = static_cast<int>(args.integer("size"));
  const bool too_wide = args.is("cause", "window");

  const cudaDeviceProp device = l2_device();
  const size_t largest = device.persistingL2CacheMaxSize;
  const size_t request = device.l2CacheSize / 4 * 3;
  size_t reserved = request;
  if (args.bad() && !too_wide) {
    (void)cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, request);
    (void)cudaGetLastError();  // whether the driver refuses or gives less: not asked
    streamlint::l2_setaside(request);
  } else {
    reserved = set_aside(std::min(request, largest));
  }

  const size_t buffer = device.accessPolicyMaxWindowSize + (32UL << 20);
  List list(too_wide ? reserved : request, 0.5, too_wide ? buffer : 0);
  OtherData others(device.l2CacheSize);
  const size_t bytes = too_wide && args.bad() ? buffer : list.bytes();
  const float fits = static_cast<float>(static_cast<double>(reserved) / bytes);
  const auto window = persisting(list.data(), bytes, std::min(1.0F, fits));
  const cudaStream_t stream = make_stream();
  if (set_window(stream, window) != cudaSuccess) {
    if (args.fixed() || !too_wide) usage_error("the window was refused");
    (void)cudaGetLastError();
  }

  measure(args, [&] {
    const streamlint::L2Window scope(window);
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      list.pass(stream, 1);
      others.pass(stream);
    }
  });

  end_persistence(stream);
  list.check("list");
  others.check();
  return passed();
}
