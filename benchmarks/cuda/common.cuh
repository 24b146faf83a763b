// What the CUDA benchmarks share: checked calls, medians, a flushed cache, and JSON on standard output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                                         \
    do {                                                                                                    \
        cudaError_t status_ = (call);                                                                       \
        if (status_ != cudaSuccess) {                                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));     \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

// Linear interpolation between the two nearest order statistics, as utils/timing.py does it.
inline double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    double position = q * (values.size() - 1);
    size_t below = static_cast<size_t>(position);
    size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (position - below) * (values[above] - values[below]);
}

// "--name value" from the command line.
inline long long option(int argc, char **argv, const char *name, long long otherwise) {
    for (int i = 1; i + 1 < argc; ++i)
        if (strcmp(argv[i], name) == 0) return atoll(argv[i + 1]);
    return otherwise;
}

inline int multiprocessors() {
    int device = 0, count = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

// Plain device memory, freed at the end of its scope; fetch() waits for the kernels before it.
template <typename T> class Device {
  public:
    explicit Device(size_t count) : count_(count) { CHECK(cudaMalloc(&data_, count * sizeof(T))); }
    explicit Device(const std::vector<T> &values) : Device(values.size()) {
        CHECK(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;
    ~Device() { cudaFree(data_); }

    T *data() const { return data_; }

    std::vector<T> fetch() const {
        std::vector<T> values(count_);
        CHECK(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    size_t count_;
    T *data_ = nullptr;
};

__global__ void read_all(const uint4 *data, size_t count, uint32_t *sink) {
    uint32_t seen = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        uint4 v = data[i];
        seen ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (seen == 0x9e3779b9u) *sink = seen;  // never true in practice, but the compiler cannot know
}

// Times launches with the L2 cache flushed before each one. The flush reads, so that it leaves no modified lines behind.
class Timer {
  public:
    Timer() : buffer_(kBytes / sizeof(uint4)), sink_(1) {
        CHECK(cudaMemset(buffer_.data(), 1, kBytes));
        CHECK(cudaEventCreate(&start_));
        CHECK(cudaEventCreate(&end_));
    }
    ~Timer() {
        cudaEventDestroy(start_);
        cudaEventDestroy(end_);
    }

    template <typename Launch> std::vector<double> rounds(int count, bool flush, Launch launch) {
        std::vector<double> seconds;
        for (int i = 0; i < 2; ++i) launch();
        for (int i = 0; i < count; ++i) {
            // without a flush one block reads little: that only gives the host time to enqueue the launch
            read_all<<<flush ? 4 * multiprocessors_ : 1, 512>>>(buffer_.data(), flush ? kBytes / 16 : 1 << 14, sink_.data());
            CHECK(cudaEventRecord(start_));
            launch();
            CHECK(cudaEventRecord(end_));
            CHECK(cudaEventSynchronize(end_));
            CHECK(cudaGetLastError());
            float milliseconds = 0;
            CHECK(cudaEventElapsedTime(&milliseconds, start_, end_));
            seconds.push_back(milliseconds * 1e-3);
        }
        return seconds;
    }

  private:
    static constexpr size_t kBytes = size_t(512) << 20;
    int multiprocessors_ = multiprocessors();
    Device<uint4> buffer_;
    Device<uint32_t> sink_;
    cudaEvent_t start_, end_;
};

// "seconds", "low", "high" and "rounds" of a timing, as utils/timing.py writes them.
inline void print_timing(const std::vector<double> &seconds) {
    printf("\"seconds\": %.6g, \"low\": %.6g, \"high\": %.6g, \"rounds\": %zu", quantile(seconds, 0.5),
           quantile(seconds, 0.2), quantile(seconds, 0.8), seconds.size());
}
