// harness: rule l2-setaside-oversubscribed
// harness: cause streams
// harness: expect a persisting window of twice the set-aside evicts its own lines at hit ratio 1.0; at 0.5 half of them stay: 3.2 ms -> 2.5 ms
//
// bad lets a whole window of twice the set-aside persist (hit ratio 1.0), fixed as
// much of it as fits (0.5). --streams 2 (or --cause streams) has two concurrent streams
// with a window of one set-aside each: they fit one by one but not together.
#include "l2.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "32"}, {"iterations", "30"}, {"streams", "1|2"},
                               {"cause", "window|streams"}});
  const int iterations = static_cast<int>(args.integer("iterations"));
  const int count = args.is("cause", "streams") ? 2 : static_cast<int>(args.integer("streams"));
  const float hit_ratio = args.bad() ? 1.0F : 0.5F;

  const cudaDeviceProp device = l2_device();
  const size_t reserved = set_aside(std::min<size_t>(
      static_cast<size_t>(args.integer("size")) << 20, device.persistingL2CacheMaxSize));

  const auto streams = make_streams(count);
  std::vector<List> lists;
  std::vector<cudaAccessPolicyWindow> windows;
  for (const cudaStream_t stream : streams) {
    lists.emplace_back(2 * reserved / count, 0.5 / count);
    windows.push_back(persisting(lists.back().data(), lists.back().bytes(), hit_ratio));
    CHECK(set_window(stream, windows.back()));
  }

  measure(args, [&] {
    for (int i = 0; i < iterations; ++i) {
      const Iteration iteration(i);
      for (int s = 0; s < count; ++s) {
        const streamlint::L2Window scope(windows[s]);
        lists[s].pass(streams[s], 2);
      }
    }
  });

  for (const cudaStream_t stream : streams) end_persistence(stream);
  for (const List& list : lists) list.check("list");
  return passed();
}
