// harness: rule small-copy-storm
// harness: expect 512 copies of 4 KiB in a row cost a call each: 5.2 ms -> 0.8 ms packed
//
// Each iteration brings 512 pieces of 4 KiB, scattered over page-locked memory, into one
// device buffer and adds it up. bad copies each piece; fixed gathers them in a
// page-locked buffer and copies that (--fix packed, the host's gathering counts), or
// hands the list to cudaMemcpyBatchAsync (--fix batch). The warm-up has one iteration, to
// keep the trace small.
#include "common.cuh"

int main(int argc, char** argv) {
  const Args args(argc, argv, {{"size", "512"}, {"fix", "packed|batch"}});
  const size_t pieces = args.integer("size"), n = 1024;  // floats of a piece
  const size_t piece_bytes = n * sizeof(float), total = pieces * n;
  const int iterations = 4;
  const cudaStream_t stream = make_stream();

  float* scattered = pinned_alloc<float>(2 * total);  // every other piece is used
  float* packed = pinned_alloc<float>(total * iterations);
  float* data = device_alloc<float>(total);
  float* sum = device_alloc<float>(total);
  std::vector<const void*> from(pieces);
  std::vector<void*> to(pieces);
  std::vector<size_t> sizes(pieces, piece_bytes);
  for (size_t piece = 0; piece < pieces; ++piece) {
    float* source = scattered + 2 * piece * n;
    for (size_t i = 0; i < n; ++i) source[i] = static_cast<float>((piece * n + i) % 1000);
    from[piece] = source;
    to[piece] = data + piece * n;
  }

  const auto copy_singly = [&] {
    for (size_t piece = 0; piece < pieces; ++piece) {
      CHECK(cudaMemcpyAsync(to[piece], from[piece], piece_bytes, cudaMemcpyHostToDevice,
                            stream));
    }
  };
  const auto copy_packed = [&](int i) {
    float* buffer = packed + i * total;  // one each: the last may still be read
    for (size_t piece = 0; piece < pieces; ++piece) {
      std::memcpy(buffer + piece * n, from[piece], piece_bytes);
    }
    CHECK(cudaMemcpyAsync(data, buffer, pieces * piece_bytes, cudaMemcpyHostToDevice,
                          stream));
  };
  const auto copy_batch = [&] {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;  // the attributes hold from this copy on
    CHECK(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), pieces, &attributes,
                               &first, 1, stream));
  };

  int added = 0;
  measure(args, [&] {
    for (int i = 0; i < (in_region ? iterations : 1); ++i) {
      const Iteration iteration(i);
      if (args.bad()) {
        copy_singly();
      } else if (args.is("fix", "packed")) {
        copy_packed(i);
      } else {
        copy_batch();
      }
      saxpy<<<blocks_for(total), 256, 0, stream>>>(sum, 1, data, total);
      ++added;
    }
  });

  const float times = static_cast<float>(added);
  verify("sum", download(sum, total),
         [&](size_t i) { return static_cast<float>(i % 1000) * times; });
  return passed();
}
