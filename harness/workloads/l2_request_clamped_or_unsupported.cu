// harness: rule l2-request-clamped-or-unsupported
// harness: cause window
// harness: expect the GPU grants less L2 than three quarters, so a window that counts on them does not fit; --cause window: a window over the maximum is refused and the kernels run without one
//
// Asks for more than the GPU has, and never looks at the answer.
// setaside: three quarters of L2, where less can be set aside (62.5 % on an H200). bad
// sizes the hit ratio of its window for the request, fixed asks for the maximum and
// uses what was granted. window: bad sets a window larger than accessPolicyMaxWindowSize,
// which fails, fixed one of the maximum.
#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "30"}, {"cause", "setaside|window"}});
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

  const size_t widest = device.accessPolicyMaxWindowSize;
  List list(too_wide ? widest + (32UL << 20) : request);
  const size_t bytes = too_wide && args.fixed() ? widest : list.bytes();
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
      list.pass(stream, 2);
    }
  });

  end_persistence(stream);
  list.check("list");
  return passed();
}
