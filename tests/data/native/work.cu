#include "work.h"
__global__ void scale(float *out, const float *in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float x = i < n ? in[i] : 0;
  for (int k = 0; k < 200; ++k) x = x * 1.0001f + 0.5f;
  if (i < n) out[i] = x;
}
void work_launch(float *out, float *in, int n) {
  scale<<<n / 256, 256>>>(out, in, n);
  cudaStreamSynchronize(0);
}
