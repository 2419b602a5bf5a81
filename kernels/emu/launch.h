// The arguments of a launch, and the table of kernels, which crates/backends/build.rs writes from
// their signatures.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Window;

// An argument: a value by its bits, or an address with the runs of bytes that it may reach.
struct Arg {
    uint64_t value, rows, row_bytes, pitch;
};

enum class Mode { Value, In, Out, InOut };

struct Kernel {
    const char *name;
    void (*call)(const Arg *args, const Window *windows);
    size_t arguments;
    const Mode *modes;
};

constexpr uint32_t ORDER_FORWARD = 0, ORDER_REVERSE = 1, ORDER_SHUFFLED = 2;

struct Options {
    // The order in which blocks and threads run.
    uint32_t order;
    // True if copy_async16 delivers at the wait, not at once.
    uint32_t late;
    // True if accesses are counted, which takes time.
    uint32_t count;
    uint64_t seed;
};

struct Counters {
    // Warp-wide accesses to global memory, the 32-byte sectors that they touch, and the minimum for
    // these bytes.
    uint64_t global_requests, global_sectors, global_least_sectors;
    // Steps in which the banks of shared memory serve lanes, and how many more steps conflicts
    // took.
    uint64_t shared_phases, bank_conflicts;
};

} // namespace emu

extern "C" {
extern const emu::Kernel finetune_emu_kernels[];
extern const size_t finetune_emu_kernel_count;
}
