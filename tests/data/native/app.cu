#include "work.h"
#include <cstdio>
static void step_backward(float *out, float *in, int n) {
  work_launch(out, in, n);
  cudaDeviceSynchronize();
}
static void step_forward(float *out, float *in, float *host, int n) {
  cudaMemcpyAsync(in, host, n * sizeof(float), cudaMemcpyHostToDevice, 0);
  work_launch(out, in, n);
}
int main() {
  const int n = 1 << 20;
  float *in, *out, *host = new float[n]();
  cudaMalloc(&in, n * sizeof(float));
  cudaMalloc(&out, n * sizeof(float));
  for (int i = 0; i < 60; ++i) {
    step_forward(out, in, host, n);
    step_backward(out, in, n);
  }
  printf("%s\n", cudaGetErrorString(cudaGetLastError()));
}
