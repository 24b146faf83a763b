// GeLU in its tanh form, one element a thread. Compiled as a shared library and called from Python with raw addresses.

#include <cuda_runtime.h>

__global__ void gelu_kernel(const float *__restrict__ x, float *__restrict__ y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;  // which element is this thread's?
    if (i >= n) return;                                              // the last block may have threads to spare
    float v = x[i];
    float inner = 0.7978845608f * (v + 0.044715f * v * v * v);  // sqrt(2 / pi)
    y[i] = 0.5f * v * (1.0f + tanhf(inner));
}

// Enqueues the kernel on `stream`; the addresses are those of n floats each on the GPU. Returns CUDA's error code.
extern "C" int gelu(const float *x, float *y, long long n, void *stream) {
    const int threads = 256;
    long long blocks = (n + threads - 1) / threads;
    gelu_kernel<<<(unsigned)blocks, threads, 0, (cudaStream_t)stream>>>(x, y, n);
    return cudaGetLastError();
}
