// How many bytes per second each level of memory delivers: every multiprocessor reads its own share of a working set again
// and again, 16 bytes a thread. Through L1 the share stays in the multiprocessor as long as it fits; past L1 it comes from
// L2 as long as the whole working set fits there; beyond that, from HBM. Prints one JSON object.

#include "common.cuh"

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;

template <bool ThroughL1> __device__ inline uint4 read16(const uint4 *p) {
    uint4 v;
    if (ThroughL1)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    else
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Block b reads its share of the data, elements [b * share, (b + 1) * share), again and again: `sweep` elements a pass. Each
// thread has kUnroll loads in flight; a share smaller than one such step is read several times in it.
template <bool ThroughL1>
__global__ void __launch_bounds__(kThreads, 1)
    read_share(const uint4 *data, int share, int sweep, int passes, uint32_t *sink, long long *cycles) {
    const uint4 *mine = data + size_t(blockIdx.x) * share + threadIdx.x;
    int wrap = share < kUnroll * kThreads ? share - 1 : ~0;  // shares that small are powers of two
    uint32_t seen = 0;
    long long start = clock64();
    for (int pass = 0; pass < passes; ++pass)
        for (int i = 0; i < sweep; i += kUnroll * kThreads) {
            uint4 v[kUnroll];
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) v[j] = read16<ThroughL1>(mine + ((i + j * kThreads) & wrap));
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    if (seen == 0x9e3779b9u) *sink = seen;
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
}

__global__ void __launch_bounds__(kThreads, 1) read_shared(int passes, uint32_t *sink, long long *cycles) {
    __shared__ uint4 tile[2 * kThreads];
    tile[threadIdx.x] = tile[threadIdx.x + kThreads] = make_uint4(threadIdx.x, 1, 2, 3);
    __syncthreads();
    uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(tile + threadIdx.x));
    uint32_t seen = 0;
    long long start = clock64();
    for (int pass = 0; pass < passes; ++pass) {
        uint4 v[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "r"(base + j * kThreads * 16));
#pragma unroll
        for (int j = 0; j < 2; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (seen == 0x9e3779b9u) *sink = seen;
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
}

// The rate from the events' seconds; bytes a cycle from the slowest block's own clock.
static void print_point(size_t bytes_read, size_t working_set, int sms, const std::vector<double> &seconds,
                        const std::vector<long long> &cycles) {
    long long slowest = *std::max_element(cycles.begin(), cycles.end());
    printf("{\"working_set\": %zu, \"bytes_per_second\": %.6g, ", working_set, bytes_read / quantile(seconds, 0.5));
    print_timing(seconds);
    printf(", \"bytes_per_cycle_per_sm\": %.4g}", double(bytes_read) / sms / slowest);
}

template <bool ThroughL1>
static void print_sweep(const char *name, const uint4 *data, size_t largest, size_t traffic, Timer &timer, uint32_t *sink,
                        Device<long long> &cycles) {
    int sms = multiprocessors();
    printf("\"%s\": [\n", name);
    bool first = true;
    // shares of 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96... times 16 KiB a multiprocessor
    for (int steps = 1;;) {
        int share = steps * kThreads;  // elements of 16 bytes
        size_t working_set = size_t(share) * 16 * sms;
        if (working_set > largest) break;
        int sweep = std::max(share, kUnroll * kThreads);
        size_t bytes_a_pass = size_t(sweep) * 16 * sms;
        int passes = static_cast<int>(std::max<size_t>(2, traffic / bytes_a_pass));
        auto run = [&] { read_share<ThroughL1><<<sms, kThreads>>>(data, share, sweep, passes, sink, cycles.data()); };
        std::vector<double> seconds = timer.rounds(5, false, run);
        if (!first) printf(",\n");
        first = false;
        print_point(bytes_a_pass * passes, working_set, sms, seconds, cycles.fetch());
        bool power_of_two = (steps & (steps - 1)) == 0;
        steps = steps < 4 ? 2 * steps : steps < 32 ? steps + 4 : power_of_two ? steps / 2 * 3 : steps / 3 * 4;
    }
    printf("],\n");
}

int main(int argc, char **argv) {
    size_t free_bytes, total_bytes;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    size_t largest = std::min(free_bytes / 4 * 3, static_cast<size_t>(option(argc, argv, "--largest", 4ll << 30)));
    size_t traffic = static_cast<size_t>(option(argc, argv, "--traffic", 16ll << 30));  // bytes read a launch, about
    int sms = multiprocessors();
    Device<uint4> data(largest / sizeof(uint4));
    CHECK(cudaMemset(data.data(), 1, largest));
    Device<uint32_t> sink(1);
    Device<long long> cycles(sms);
    Timer timer;
    timer.rounds(20, true, [&] {  // the clock is up after this
        read_share<false><<<sms, kThreads>>>(data.data(), 64 * kThreads, 64 * kThreads, 64, sink.data(), cycles.data());
    });

    printf("{\n");
    print_sweep<true>("through_l1", data.data(), largest, traffic, timer, sink.data(), cycles);
    print_sweep<false>("past_l1", data.data(), largest, traffic, timer, sink.data(), cycles);
    int passes = static_cast<int>(traffic / (size_t(sms) * kThreads * 32));
    auto run = [&] { read_shared<<<sms, kThreads>>>(passes, sink.data(), cycles.data()); };
    std::vector<double> seconds = timer.rounds(5, false, run);
    printf("\"shared\": ");
    print_point(size_t(passes) * sms * kThreads * 32, size_t(sms) * kThreads * 32, sms, seconds, cycles.fetch());
    printf("\n}\n");
    return 0;
}
