// What an access pattern costs: copies with a stride, at an offset, and with elements of 1 to 16 bytes. Thread i handles
// element i, so a warp's 32 threads ask for 32 elements at once. Prints one JSON object.

#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

static int blocks(size_t count) { return static_cast<int>((count + kThreads * kUnroll - 1) / (kThreads * kUnroll)); }

// y[i * y_stride] = x[i * x_stride + offset]. A thread takes kUnroll elements, kThreads apart: a warp's 32 threads always
// ask for 32 neighbouring elements, and several loads are in flight.
template <typename T>
__global__ void copy(const T *__restrict__ x, T *__restrict__ y, size_t count, size_t x_stride, size_t y_stride, size_t offset) {
    size_t first = blockIdx.x * size_t(kThreads * kUnroll) + threadIdx.x;
    T v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
        size_t i = first + j * kThreads;
        if (i < count) v[j] = x[i * x_stride + offset];
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
        size_t i = first + j * kThreads;
        if (i < count) y[i * y_stride] = v[j];
    }
}

// The same, several times over with data that stay in L2: volatile loads go past L1 and are not merged.
__global__ void copy_cached(const float *x, float *y, size_t count, size_t stride, size_t offset, int passes) {
    size_t i = blockIdx.x * size_t(kThreads) + threadIdx.x;
    if (i >= count) return;
    const float *from = x + i * stride + offset;
    float *to = y + i * stride;
    for (int pass = 0; pass < passes; pass += kUnroll) {
        float v[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v[j]) : "l"(from));
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) asm volatile("st.volatile.global.f32 [%0], %1;" ::"l"(to), "f"(v[j]));
    }
}

struct Buffers {
    Device<char> x, y;
    size_t bytes;
    explicit Buffers(size_t bytes) : x(bytes), y(bytes), bytes(bytes) {
        CHECK(cudaMemset(x.data(), 1, bytes));
        CHECK(cudaMemset(y.data(), 2, bytes));
    }
};

template <typename T>
static std::vector<double> time_copy(Timer &timer, const Buffers &buffers, bool flush, size_t count, size_t x_stride,
                                     size_t y_stride, size_t offset) {
    if (((count - 1) * std::max(x_stride, y_stride) + offset + 1) * sizeof(T) > buffers.bytes) {
        fprintf(stderr, "a copy of %zu elements with strides %zu and %zu does not fit\n", count, x_stride, y_stride);
        exit(1);
    }
    auto run = [&] {
        copy<T><<<blocks(count), kThreads>>>(reinterpret_cast<const T *>(buffers.x.data()),
                                                                 reinterpret_cast<T *>(buffers.y.data()), count, x_stride,
                                                                 y_stride, offset);
    };
    return timer.rounds(15, flush, run);
}

constexpr int kPasses = 64;

static std::vector<double> time_cached(Timer &timer, const Buffers &buffers, size_t count, size_t stride, size_t offset) {
    auto run = [&] {
        copy_cached<<<(count + kThreads - 1) / kThreads, kThreads>>>(reinterpret_cast<const float *>(buffers.x.data()),
                                                                    reinterpret_cast<float *>(buffers.y.data()), count, stride,
                                                                    offset, kPasses);
    };
    std::vector<double> seconds = timer.rounds(15, false, run);
    for (double &s : seconds) s /= kPasses;  // of one copy
    return seconds;
}

static void print_item(bool &first, const char *pattern, const char *level, int element_size, size_t count, size_t stride,
                       size_t offset, const std::vector<double> &seconds) {
    if (!first) printf(",\n");
    first = false;
    double useful = 2.0 * count * element_size;
    printf("{\"pattern\": \"%s\", \"level\": \"%s\", \"element_size\": %d, \"count\": %zu, \"stride\": %zu, \"offset\": %zu, ",
           pattern, level, element_size, count, stride, offset);
    print_timing(seconds);
    printf(", \"useful_bytes_per_second\": %.6g}", useful / quantile(seconds, 0.5));
}

int main(int argc, char **argv) {
    // elements of the copies from memory, and of those whose data stay in L2
    size_t many = static_cast<size_t>(option(argc, argv, "--count", 32ll << 20));
    size_t few = static_cast<size_t>(option(argc, argv, "--cached-count", 256ll << 10));
    size_t widest = static_cast<size_t>(option(argc, argv, "--widest", 64));
    size_t free_bytes, total_bytes;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    while (many * widest * 4 * 2 > free_bytes / 4 * 3) many /= 2;
    Buffers buffers(std::max(many * widest * 4, many * 16 + 4096));
    Timer timer;
    timer.rounds(20, true, [&] {
        copy<float><<<blocks(many), kThreads>>>(reinterpret_cast<const float *>(buffers.x.data()),
                                                   reinterpret_cast<float *>(buffers.y.data()), many, 1, 1, 0);
    });

    printf("{\"points\": [\n");
    bool first = true;
    const size_t strides[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64};
    for (size_t stride : strides) {
        if (stride > widest) continue;
        print_item(first, "strided read", "hbm", 4, many, stride, 0, time_copy<float>(timer, buffers, true, many, stride, 1, 0));
        print_item(first, "strided write", "hbm", 4, many, stride, 0, time_copy<float>(timer, buffers, true, many, 1, stride, 0));
        print_item(first, "strided copy", "hbm", 4, many, stride, 0,
                   time_copy<float>(timer, buffers, true, many, stride, stride, 0));
        if (stride <= 16)  // both arrays then fit in half of the L2 cache of an H100
            print_item(first, "strided copy", "l2", 4, few, stride, 0, time_cached(timer, buffers, few, stride, 0));
    }
    for (size_t offset = 0; offset <= 32; ++offset) {
        print_item(first, "misaligned copy", "hbm", 4, many, 1, offset, time_copy<float>(timer, buffers, true, many, 1, 1, offset));
        print_item(first, "misaligned copy", "l2", 4, few, 1, offset, time_cached(timer, buffers, few, 1, offset));
    }
    // the same bytes in elements of 1, 2, 4, 8 and 16 bytes
    size_t bytes = many * 4;
    print_item(first, "element size", "hbm", 1, bytes, 1, 0, time_copy<uint8_t>(timer, buffers, true, bytes, 1, 1, 0));
    print_item(first, "element size", "hbm", 2, bytes / 2, 1, 0, time_copy<uint16_t>(timer, buffers, true, bytes / 2, 1, 1, 0));
    print_item(first, "element size", "hbm", 4, bytes / 4, 1, 0, time_copy<uint32_t>(timer, buffers, true, bytes / 4, 1, 1, 0));
    print_item(first, "element size", "hbm", 8, bytes / 8, 1, 0, time_copy<uint2>(timer, buffers, true, bytes / 8, 1, 1, 0));
    print_item(first, "element size", "hbm", 16, bytes / 16, 1, 0, time_copy<uint4>(timer, buffers, true, bytes / 16, 1, 1, 0));
    printf("\n]}\n");
    return 0;
}
