// How long one load waits: a single thread follows a chain of pointers, so that every load needs the one before it.
//
// The chain visits every 128-byte line of its working set once, in a random cyclic order (Sattolo's algorithm), so that no
// prefetcher and no open DRAM page can guess the next line. Cycles are the multiprocessor's own clock (clock64); seconds
// come from the global timer over the same loop. Prints one JSON object.

#include "common.cuh"

constexpr int kLine = 128;
constexpr int kUnroll = 8;
constexpr int kSamples = 4096;
constexpr int kBinCycles = 4;
constexpr int kBins = 512;

struct Lap {
    long long cycles;
    unsigned long long nanoseconds;
    uint64_t end;
};

__device__ inline unsigned long long nanotime() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ inline unsigned int sm_id() {
    unsigned int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

// A plain load may be served by L1; cg goes past it to L2. Volatile, so that no load is moved or dropped.
template <bool ThroughL1> __device__ inline uint64_t follow(uint64_t p) {
    uint64_t next;
    if (ThroughL1)
        asm volatile("ld.global.u64 %0, [%1];" : "=l"(next) : "l"(p) : "memory");
    else
        asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(next) : "l"(p) : "memory");
    return next;
}

__device__ inline uint32_t follow_shared(uint32_t p) {
    uint32_t next;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(next) : "r"(p) : "memory");
    return next;
}

// Writes line i's pointer: to line next[i], each line at its place (line i starts at byte place[i] of base).
__global__ void link(char *base, const uint64_t *place, const uint32_t *next, uint32_t lines) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < lines; i += gridDim.x * blockDim.x)
        *reinterpret_cast<uint64_t *>(base + place[i]) = reinterpret_cast<uint64_t>(base + place[next[i]]);
}

template <bool ThroughL1> __global__ void chase(uint64_t start, int warm_steps, int steps, Lap *lap) {
    uint64_t p = start;
    for (int i = 0; i < warm_steps; ++i) p = follow<ThroughL1>(p);
    unsigned long long wall = nanotime();
    long long clock = clock64();
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) p = follow<ThroughL1>(p);
    }
    lap->end = p;  // needs the last load, so the clock below is read after it
    __threadfence_block();
    long long done = clock64();
    lap->cycles = done - clock;
    lap->nanoseconds = nanotime() - wall;
}

// Every load timed by itself: the store to shared memory needs the loaded value, so the second clock waits for it.
template <bool ThroughL1> __global__ void histogram(uint64_t start, int warm_steps, uint32_t *counts) {
    __shared__ uint64_t seen[kSamples];
    __shared__ uint32_t bins[kBins];
    for (int i = 0; i < kBins; ++i) bins[i] = 0;
    uint64_t p = start;
    for (int i = 0; i < warm_steps; ++i) p = follow<ThroughL1>(p);
    long long overhead = 1 << 20;
    for (int i = 0; i < 64; ++i) {
        long long before = clock64();
        reinterpret_cast<volatile uint64_t *>(seen)[i] = p;
        long long after = clock64();
        overhead = min(overhead, after - before);
    }
    for (int i = 0; i < kSamples; ++i) {
        long long before = clock64();
        p = follow<ThroughL1>(p);
        reinterpret_cast<volatile uint64_t *>(seen)[i] = p;
        long long after = clock64();
        long long cycles = max(after - before - overhead, 0ll);
        ++bins[min(int(cycles / kBinCycles), kBins - 1)];
    }
    for (int i = 0; i < kBins; ++i) counts[i] = bins[i];
}

// The walk through L1 written as array indexing, next = numbers[next], on lines of 128 bytes.
__global__ void chase_by_index(const uint32_t *numbers, int warm_steps, int steps, Lap *lap) {
    uint32_t index = 0;
    auto follow_index = [&] {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(index) : "l"(numbers + index) : "memory");
    };
    for (int i = 0; i < warm_steps; ++i) follow_index();
    long long clock = clock64();
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) follow_index();
    }
    lap->end = index;
    __threadfence_block();
    lap->cycles = clock64() - clock;
}

// One line that points to itself, read past L1 by one thread of each multiprocessor in turn.
__global__ void from_each_sm(uint64_t line, unsigned int wanted, int steps, long long *cycles) {
    if (threadIdx.x != 0 || sm_id() != wanted) return;
    uint64_t p = line;
    for (int i = 0; i < 64; ++i) p = follow<false>(p);
    long long clock = clock64();
    for (int i = 0; i < steps; ++i) p = follow<false>(p);
    if (p == 1) return;  // never: the line holds its own address
    cycles[wanted] = clock64() - clock;
}

struct SharedLaps {
    long long load, by_index, round_trip, store, fence;
    uint32_t end;
};

__global__ void shared_latency(int steps, SharedLaps *laps) {
    __shared__ uint32_t ring[1024];
    uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
    for (int i = 0; i < 1024; ++i) ring[i] = base + 4 * ((i + 33) % 1024);  // 33: a different bank each step
    uint32_t p = base;
    for (int i = 0; i < 1024; ++i) p = follow_shared(p);

    long long t0 = clock64();
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) p = follow_shared(p);
    }
    laps->end = p;
    __threadfence_block();
    long long t1 = clock64();

    // store the pointer where it points, load it back: the load cannot start before the store
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
            asm volatile("st.volatile.shared.u32 [%0], %0;" ::"r"(p) : "memory");
            p = follow_shared(p);
        }
    }
    laps->end += p;
    __threadfence_block();
    long long t2 = clock64();

    // a store alone, and a fence that waits until the block sees it
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
            asm volatile("st.volatile.shared.u32 [%0], %0;" ::"r"(p) : "memory");
            __threadfence_block();
        }
    }
    long long t3 = clock64();
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) __threadfence_block();
    }
    long long t4 = clock64();
    // the same walk written as array indexing: each step also computes an address from an index
    __shared__ volatile uint32_t numbers[1024];
    for (int i = 0; i < 1024; ++i) numbers[i] = (i + 33) % 1024;
    uint32_t index = p == base ? 0 : 1;
    for (int i = 0; i < 1024; ++i) index = numbers[index];
    long long t5 = clock64();
    for (int i = 0; i < steps; i += kUnroll) {
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) index = numbers[index];
    }
    laps->end += index;
    __threadfence_block();
    long long t6 = clock64();
    laps->load = t1 - t0;
    laps->by_index = t6 - t5;
    laps->round_trip = t2 - t1;
    laps->store = t3 - t2;
    laps->fence = t4 - t3;
}

// ---- host ----------------------------------------------------------------------------------------------------------

static uint64_t random_state = 0x243f6a8885a308d3ull;  // fixed: the same chains on every run

static uint64_t next_random() {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}

// A random permutation that is one single cycle (Sattolo 1986).
static std::vector<uint32_t> one_cycle(uint32_t lines) {
    std::vector<uint32_t> order(lines), next(lines);
    for (uint32_t i = 0; i < lines; ++i) order[i] = i;
    for (uint32_t i = lines - 1; i > 0; --i) std::swap(order[i], order[next_random() % i]);
    // order is a cyclic permutation: element i is followed by order[i]
    for (uint32_t i = 0; i < lines; ++i) next[i] = order[i];
    return next;
}

static void lay_out(char *base, const std::vector<uint64_t> &place) {
    uint32_t lines = static_cast<uint32_t>(place.size());
    Device<uint64_t> device_place(place);
    Device<uint32_t> device_next(one_cycle(lines));
    link<<<256, 256>>>(base, device_place.data(), device_next.data(), lines);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
}

static void lay_out_lines(char *base, size_t working_set) {
    std::vector<uint64_t> place(std::max<size_t>(1, working_set / kLine));
    for (size_t i = 0; i < place.size(); ++i) place[i] = i * kLine;
    lay_out(base, place);
}

template <bool ThroughL1> static void print_point(const char *name, size_t size, char *base, int warm, int steps) {
    constexpr int kRuns = 3;
    Device<Lap> lap(1);
    std::vector<double> cycles, seconds;
    uint64_t start = reinterpret_cast<uint64_t>(base);
    for (int run = 0; run < kRuns; ++run) {
        chase<ThroughL1><<<1, 1>>>(start, run ? 0 : warm, steps, lap.data());
        CHECK(cudaGetLastError());
        Lap done = lap.fetch()[0];
        cycles.push_back(double(done.cycles) / steps);
        seconds.push_back(double(done.nanoseconds) * 1e-9 / steps);
        start = done.end;  // go on where this run stopped: what a long chain has passed is still cached
    }
    printf("{\"%s\": %zu, \"cycles\": %.3f, \"seconds\": %.6g, \"steps\": %d}", name, size, quantile(cycles, 0.5), quantile(seconds, 0.5),
           steps);
}

template <bool ThroughL1> static void print_sweep(const char *name, char *base, size_t largest, size_t smallest) {
    printf("\"%s\": [\n", name);
    bool first = true;
    for (size_t octave = smallest; octave <= largest; octave *= 2)
        for (int quarter = 4; quarter < 8; ++quarter) {
            size_t size = octave / 4 * quarter / kLine * kLine;
            if (size > largest || (quarter % 2 && (octave < (64u << 10) || octave >= (256u << 20)))) continue;
            lay_out_lines(base, size);
            int lines = static_cast<int>(size / kLine);
            bool long_chain = size > (160u << 20);
            // a chain that can stay in a cache is walked once before it is timed; a longer one evicts itself
            int warm = long_chain ? 4096 : lines;
            int steps = size <= (256u << 10) ? 65536 : 32768;
            if (!first) printf(",\n");
            first = false;
            print_point<ThroughL1>("working_set", size, base, warm, steps);
        }
    printf("],\n");
}

static void print_pages(char *base, size_t capacity) {
    constexpr size_t kPage = size_t(2) << 20;
    printf("\"pages\": [\n");
    bool first = true;
    for (size_t octave = 4; octave * kPage <= capacity; octave *= 2)
        for (int half = 2; half < 4; ++half) {
            size_t pages = octave / 2 * half;
            if (pages * kPage > capacity) continue;
            std::vector<uint64_t> place(pages);
            // one line in each 2 MiB page, at a random place in it: the lines fit in L2, their addresses fill the TLBs
            for (size_t i = 0; i < pages; ++i) place[i] = i * kPage + next_random() % (kPage / kLine) * kLine;
            lay_out(base, place);
            if (!first) printf(",\n");
            first = false;
            print_point<false>("pages", pages, base + place[0], static_cast<int>(2 * pages), 32768);
        }
    printf("],\n");
}

template <bool ThroughL1> static void print_histogram(const char *name, char *base, size_t size, int warm) {
    Device<uint32_t> counts(kBins);
    lay_out_lines(base, size);
    histogram<ThroughL1><<<1, 1>>>(reinterpret_cast<uint64_t>(base), warm, counts.data());
    CHECK(cudaGetLastError());
    std::vector<uint32_t> found = counts.fetch();
    while (found.size() > 1 && found.back() == 0) found.pop_back();
    printf("\"%s\": {\"working_set\": %zu, \"bin_cycles\": %d, \"counts\": [", name, size, kBinCycles);
    for (size_t i = 0; i < found.size(); ++i) printf("%s%u", i ? ", " : "", found[i]);
    printf("]}");
}

int main(int argc, char **argv) {
    size_t free_bytes, total_bytes;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    size_t most = free_bytes / 10 * 9;
    size_t largest = std::min(most, static_cast<size_t>(option(argc, argv, "--largest", 2ll << 30)));
    size_t page_span = std::min(most, static_cast<size_t>(option(argc, argv, "--page-span", 64ll << 30)));
    char *base;
    CHECK(cudaMalloc(&base, std::max(largest, page_span)));
    CHECK(cudaMemset(base, 0, largest));
    CHECK(cudaFuncSetAttribute(chase<true>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));
    CHECK(cudaFuncSetAttribute(chase<false>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));

    CHECK(cudaFuncSetAttribute(histogram<true>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));
    CHECK(cudaFuncSetAttribute(chase_by_index, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));

    lay_out_lines(base, 16384);
    Device<Lap> unused(1);
    for (int i = 0; i < 20; ++i) chase<true><<<1, 1>>>(reinterpret_cast<uint64_t>(base), 0, 1 << 20, unused.data());
    CHECK(cudaDeviceSynchronize());  // the clock is up now

    printf("{\n");
    print_sweep<true>("through_l1", base, largest, 1 << 10);
    print_sweep<false>("past_l1", base, largest, 1 << 10);
    print_pages(base, page_span);

    printf("\"distribution\": {\n");
    print_histogram<true>("l1", base, 32 << 10, 256);
    printf(",\n");
    print_histogram<false>("l2", base, 8 << 20, (8 << 20) / kLine);
    printf(",\n");
    print_histogram<false>("hbm", base, std::min(largest, size_t(1) << 30), 1024);
    printf("},\n");

    int sms = multiprocessors();
    constexpr int kSmSteps = 2048;
    Device<long long> per_sm(std::vector<long long>(sms, 0));
    lay_out_lines(base, kLine);
    for (int i = 0; i < sms; ++i)
        from_each_sm<<<2 * sms, 1024>>>(reinterpret_cast<uint64_t>(base), i, kSmSteps, per_sm.data());
    CHECK(cudaGetLastError());
    printf("\"one_line_from_each_sm\": [");
    bool first = true;
    for (long long cycles : per_sm.fetch()) {
        if (cycles == 0) continue;  // that multiprocessor got no block
        printf("%s%.2f", first ? "" : ", ", double(cycles) / kSmSteps);
        first = false;
    }
    printf("],\n");

    constexpr int kSharedSteps = 8192;
    Device<SharedLaps> shared(1);
    for (int i = 0; i < 2; ++i) shared_latency<<<1, 1>>>(kSharedSteps, shared.data());
    CHECK(cudaGetLastError());
    SharedLaps laps = shared.fetch()[0];
    constexpr int kIndexLines = 128;  // 16 KiB
    std::vector<uint32_t> order = one_cycle(kIndexLines), numbers(kIndexLines * kLine / 4);
    for (int i = 0; i < kIndexLines; ++i) numbers[i * kLine / 4] = order[i] * kLine / 4;
    Device<uint32_t> device_numbers(numbers);
    chase_by_index<<<1, 1>>>(device_numbers.data(), kIndexLines, kSharedSteps, unused.data());
    CHECK(cudaGetLastError());
    printf("\"by_index\": {\"shared_cycles\": %.3f, \"l1_cycles\": %.3f},\n", double(laps.by_index) / kSharedSteps,
           double(unused.fetch()[0].cycles) / kSharedSteps);
    printf("\"shared\": {\"load_cycles\": %.3f, \"store_then_load_cycles\": %.3f, \"store_then_fence_cycles\": %.3f, "
           "\"fence_cycles\": %.3f}\n}\n",
           double(laps.load) / kSharedSteps, double(laps.round_trip) / kSharedSteps, double(laps.store) / kSharedSteps,
           double(laps.fence) / kSharedSteps);
    return 0;
}
