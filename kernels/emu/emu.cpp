// Runs kernels on the host, one thread block after another, with checks that a GPU does not make.
//
// Each CUDA thread is a fiber. It runs until it waits at a barrier or a warp-wide instruction; then
// the next one runs. _setjmp and _longjmp switch fibers (makecontext only starts them: it makes
// system calls). The last lane to reach a warp-wide instruction computes it for all lanes.
//
// Checked, each with a message that names kernel, block and thread:
//   - accesses to global memory are within the window of the launch (for an address from a table:
//     of the table's length), are aligned, and are allowed there;
//   - every byte of an Out is written exactly once, and no block reads or overwrites bytes of
//     another one;
//   - shared memory is not read before it is written; two threads that touch the same two bytes,
//     one of them writing, have a barrier between them (for lanes of one warp sync_warp is enough);
//   - all threads of a block reach each barrier, all lanes of a warp the same warp-wide
//     instruction;
//   - data of copy_async16 or copy_async4 is not read before its thread waited for it, and a thread
//     ends after it has waited for all of its copies. Data arrives at once or as late as possible,
//     and threads and blocks run forward, backward or shuffled, as the launch requests: the results
//     must be the same bits.
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <setjmp.h>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "../compat.cuh"
#include "launch.h"
#include "layouts.h"

namespace emu {

thread_local Running running;

namespace {

constexpr int WARP = 32;
constexpr size_t STACK = 64 << 10;
// Shared memory of one block on compute capability 9.0.
constexpr size_t SHARED_BYTES = 227 << 10;
// Gap between two arrays of shared memory, so that an access beyond an array is detected.
constexpr size_t RED_ZONE = 128;
// Two bytes are tracked as one: bf16 is the smallest type in shared memory.
constexpr size_t GRAIN = 2;

enum class Status { Fresh, Ready, AtBarrier, InWarp, Done };
enum class WarpOp { Sync, Shuffle, Mma, LoadMatrices };
const char *const WARP_OP_NAMES[] = {"sync_warp", "shuffle", "mma_16816", "ldmatrix_x4"};

// The operands of a lane in a warp-wide instruction, and the memory for its results.
struct Deposit {
    const uint32_t *a, *b;
    float *d;
    uint32_t *out;
    const void *row;
    uint32_t bits;
    int lane;
    bool transposed;
};

struct Fiber;

struct AsyncCopy {
    void *to;
    const void *from;
    size_t bytes;
    bool there;
    int group;
};

struct Thread {
    Index index;
    int number;
    Status status;
    Fiber *fiber;
    Deposit deposit;
    std::vector<AsyncCopy> copies;
    int group;
};

struct Warp {
    WarpOp op;
    int arrived, first;
    uint32_t epoch;
};

struct Fiber {
    jmp_buf where;
    ucontext_t context;
    void *stack = nullptr;
    bool started = false;
    Thread *thread = nullptr;
};

// The last accesses to two bytes of shared memory.
struct Touched {
    int writer = -1, reader = -1;
    uint32_t write_barrier = 0, write_warp_epoch = 0, read_barrier = 0, read_warp_epoch = 0;
    bool allowed = false, pending = false;
};
constexpr int MANY_LANES = -2, MANY_WARPS = -3;

struct Site {
    int number;
    size_t start, bytes;
};

// An instruction of a warp: a position in the program with its argument, the number of barriers
// before it, and the number of visits since the last of them. A lane that skipped a visit is in
// step again after the next barrier.
struct Request {
    const void *place;
    const Window *window;
    uint32_t barrier;
    int visit;
    bool operator<(const Request &other) const {
        return std::tie(place, window, barrier, visit) < std::tie(other.place, other.window, other.barrier, other.visit);
    }
};
// The access of each lane in it; 0 for none.
using Requests = std::map<Request, std::array<uint64_t, WARP>>;

// Memory with an address that a kernel read from a table.
struct Listed {
    Window window;
    std::vector<uint32_t> writer;
};

struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Window> windows;
    std::vector<std::vector<uint32_t>> writers;
    // By address: memory that kernels access through tables.
    std::map<uint64_t, std::unique_ptr<Listed>> listed;
    std::vector<unsigned char> memory;
    unsigned char *shared = nullptr;
    std::vector<Touched> touched;
    std::vector<Site> sites;
    size_t dynamic_bytes = 0, shared_end = 0, swept = 0;
    uint32_t barrier = 0;
    int at_barrier = 0, done = 0;
    jmp_buf scheduler;
    Thread *now = nullptr;
    const Kernel *kernel = nullptr;
    const Arg *args = nullptr;
    Options options{};
    Counters counters{};
    uint64_t random = 0;
    uint32_t block_number = 0;
    std::string error;
    // By thread and instruction: number of visits since the last barrier.
    std::map<std::pair<int, Request>, int> visits;
    std::vector<Requests> global_requests, shared_requests;
};

Machine &machine() {
    thread_local Machine machine;
    return machine;
}

uint64_t next_random(Machine &m) {
    uint64_t z = (m.random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Fiber 0 in the given order, over `count` things; shuffled anew on each call.
std::vector<int> in_order(Machine &m, int count) {
    std::vector<int> order(count);
    for (int i = 0; i < count; i++) order[i] = m.options.order == ORDER_REVERSE ? count - 1 - i : i;
    if (m.options.order == ORDER_SHUFFLED)
        for (int i = count - 1; i > 0; i--) std::swap(order[i], order[next_random(m) % uint64_t(i + 1)]);
    return order;
}

void say(Machine &m, const char *format, va_list arguments) {
    char text[400], where[200];
    vsnprintf(text, sizeof text, format, arguments);
    const Index &b = running.block;
    if (m.now)
        snprintf(where, sizeof where, "kernel %s, block (%u, %u, %u), thread %d: ", m.kernel->name, b.x, b.y, b.z,
                 m.now->number);
    else
        snprintf(where, sizeof where, "kernel %s, block (%u, %u, %u): ", m.kernel->name, b.x, b.y, b.z);
    if (m.error.empty()) m.error = std::string(where) + text;
}

// Ends the launch: the fibers are abandoned, and the next launch starts them anew.
[[noreturn]] void fail(const char *format, ...) {
    Machine &m = machine();
    va_list arguments;
    va_start(arguments, format);
    say(m, format, arguments);
    va_end(arguments);
    _longjmp(m.scheduler, 1);
}

void note(Machine &m, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(m, format, arguments);
    va_end(arguments);
}

// ---- fibers -------------------------------------------------------------------------------------

__attribute__((noinline)) void suspend() {
    Machine &m = machine();
    Fiber *fiber = m.now->fiber;
    if (_setjmp(fiber->where) == 0) _longjmp(m.scheduler, 1);
}

void fiber_main() {
    for (;;) {
        Machine &m = machine();
        m.kernel->call(m.args, m.windows.data());
        Thread *thread = m.now;
        if (!thread->copies.empty()) fail("ends while %zu of its copy_async are pending", thread->copies.size());
        thread->status = Status::Done;
        m.done++;
        m.idle.push_back(thread->fiber);
        suspend();
    }
}

Fiber *idle_fiber(Machine &m) {
    if (m.idle.empty()) {
        m.fibers.push_back(std::make_unique<Fiber>());
        Fiber *fiber = m.fibers.back().get();
        fiber->stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fiber->stack == MAP_FAILED) abort();
        m.idle.push_back(fiber);
    }
    Fiber *fiber = m.idle.back();
    m.idle.pop_back();
    return fiber;
}

// Runs a thread until it waits or ends.
__attribute__((noinline)) void run(Machine &m, Thread *thread) {
    m.now = thread;
    running.thread = thread->index;
    if (thread->status == Status::Fresh) {
        thread->fiber = idle_fiber(m);
        thread->fiber->thread = thread;
    }
    thread->status = Status::Ready;
    if (_setjmp(m.scheduler) == 0) {
        Fiber *fiber = thread->fiber;
        if (fiber->started) _longjmp(fiber->where, 1);
        fiber->started = true;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack;
        fiber->context.uc_stack.ss_size = STACK;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, fiber_main, 0);
        setcontext(&fiber->context);
    }
}

void drop_fibers(Machine &m) {
    m.idle.clear();
    for (auto &fiber : m.fibers) {
        fiber->started = false;
        m.idle.push_back(fiber.get());
    }
}

void explain_standstill(Machine &m) {
    m.now = nullptr;
    int at_barrier = 0, in_warp = 0, example_barrier = -1, example_warp = -1;
    for (const Thread &thread : m.threads) {
        if (thread.status == Status::AtBarrier) at_barrier++, example_barrier = thread.number;
        if (thread.status == Status::InWarp) in_warp++, example_warp = thread.number;
    }
    if (in_warp > 0) {
        const Warp &warp = m.warps[example_warp / WARP];
        note(m, "%d threads wait in %s (thread %d among them) for lanes that do not come; %d threads are at a barrier, "
                "%d have ended", in_warp, WARP_OP_NAMES[int(warp.op)], example_warp, at_barrier, m.done);
    } else {
        note(m, "%d of %zu threads wait at a barrier (thread %d among them), %d have ended: not all come to it",
             at_barrier, m.threads.size(), example_barrier, m.done);
    }
}

// ---- counting -----------------------------------------------------------------------------------

// Returns the thread's current instruction, counted as its next visit.
Request next_request(Machine &m, const void *place, const Window *window) {
    Request request{place, window, m.barrier, 0};
    request.visit = m.visits[{m.now->number, request}]++;
    return request;
}

void count_access(Machine &m, std::vector<Requests> &requests, const Request &request, const void *at, size_t bytes) {
    // Bytes of one access in the low bits: addresses are of the user's half, below 2^47.
    requests[m.now->number / WARP][request][size_t(m.now->number % WARP)] =
        uint64_t(reinterpret_cast<uintptr_t>(at)) << 8 | bytes;
}

void count_requests(Machine &m) {
    for (const Requests &of_warp : m.global_requests)
        for (const auto &entry : of_warp) {
            std::map<uint64_t, bool> sectors;
            uint64_t bytes = 0;
            for (uint64_t access : entry.second) {
                if (access == 0) continue;
                uint64_t at = access >> 8, size = access & 255;
                bytes += size;
                for (uint64_t sector = at / 32; sector <= (at + size - 1) / 32; sector++) sectors[sector] = true;
            }
            m.counters.global_requests++;
            m.counters.global_sectors += sectors.size();
            m.counters.global_least_sectors += (bytes + 31) / 32;
        }
    for (const Requests &of_warp : m.shared_requests)
        for (const auto &entry : of_warp) {
            // A quarter of a warp at a time for 16 bytes a lane, half for 8, all for less.
            const std::array<uint64_t, WARP> &accesses = entry.second;
            uint64_t size = 0;
            for (uint64_t access : accesses) size = size > (access & 255) ? size : access & 255;
            size_t lanes = size == 16 ? 8 : size == 8 ? 16 : 32;
            for (size_t first = 0; first < accesses.size(); first += lanes) {
                std::map<uint64_t, std::map<uint64_t, bool>> words_of_bank;
                size_t most = 0;
                for (size_t i = first; i < first + lanes; i++)
                    for (uint64_t at = accesses[i] >> 8, word = at / 4; at && word <= (at + size - 1) / 4; word++)
                        words_of_bank[word % 32][word] = true;
                for (const auto &bank : words_of_bank) most = bank.second.size() > most ? bank.second.size() : most;
                m.counters.shared_phases += most > 0;
                m.counters.bank_conflicts += most > 0 ? most - 1 : 0;
            }
        }
}

// ---- blocks -------------------------------------------------------------------------------------

void start_block(Machine &m) {
    // The memory of the last block is poisoned again: NaN in f32 and bf16.
    memset(m.shared, 0xff, m.shared_end);
    for (size_t i = 0; i < m.shared_end / GRAIN; i++) m.touched[i] = Touched{};
    m.sites.clear();
    m.shared_end = (m.dynamic_bytes + RED_ZONE + 127) / 128 * 128;
    for (size_t i = 0; i < m.shared_end / GRAIN; i++) m.touched[i] = Touched{};
    for (size_t i = 0; i < m.dynamic_bytes / GRAIN; i++) m.touched[i].allowed = true;
    m.barrier = 1;
    m.at_barrier = m.done = 0;
    for (Warp &warp : m.warps) warp = Warp{WarpOp::Sync, 0, 0, 1};
    for (Thread &thread : m.threads) {
        thread.status = Status::Fresh;
        thread.copies.clear();
        thread.group = 0;
    }
    m.visits.clear();
    m.global_requests.assign(m.warps.size(), Requests{});
    m.shared_requests.assign(m.warps.size(), Requests{});
}

bool run_block(Machine &m) {
    start_block(m);
    while (m.done < int(m.threads.size())) {
        bool ran = false;
        for (int i : in_order(m, int(m.threads.size()))) {
            Thread &thread = m.threads[i];
            if (thread.status != Status::Fresh && thread.status != Status::Ready) continue;
            ran = true;
            run(m, &thread);
            if (!m.error.empty()) return false;
        }
        if (!ran) {
            explain_standstill(m);
            return false;
        }
    }
    if (m.options.count) count_requests(m);
    return true;
}

// ---- shared memory ------------------------------------------------------------------------------

Touched *touched_at(Machine &m, const void *at, size_t bytes, const char *what) {
    const unsigned char *p = static_cast<const unsigned char *>(at);
    if (p < m.shared || p + bytes > m.shared + m.shared_end) fail("%s outside of shared memory", what);
    size_t offset = size_t(p - m.shared);
    if (offset % (bytes == 16 ? 16 : bytes) != 0)
        fail("%s of %zu bytes at offset %zu of shared memory, which is not aligned", what, bytes, offset);
    for (size_t i = 0; i < bytes / GRAIN; i++)
        if (!m.touched[offset / GRAIN + i].allowed)
            fail("%s at offset %zu of shared memory, behind the end of an array", what, offset);
    return &m.touched[offset / GRAIN];
}

// Returns whether an earlier access of `thread` is ordered before the current one of the running
// thread.
bool ordered(Machine &m, int thread, uint32_t barrier, uint32_t warp_epoch) {
    int warp = m.now->number / WARP;
    return thread == m.now->number || barrier < m.barrier ||
           (thread / WARP == warp && warp_epoch < m.warps[warp].epoch);
}

void watch_read(Machine &m, Touched &t) {
    int me = m.now->number, warp = me / WARP;
    uint32_t epoch = m.warps[warp].epoch;
    if (t.writer < 0) fail("reads shared memory that nothing wrote");
    if (t.pending) fail("reads shared memory whose copy_async, by thread %d, was not waited for", t.writer);
    if (!ordered(m, t.writer, t.write_barrier, t.write_warp_epoch))
        fail("race: reads shared memory that thread %d wrote, with no barrier between", t.writer);
    bool mine_alone = t.reader == -1 || t.reader == me || t.read_barrier < m.barrier ||
                      (t.reader >= 0 && t.reader / WARP == warp && t.read_warp_epoch < epoch);
    if (mine_alone)
        t.reader = me;
    else if (t.reader == MANY_WARPS || (t.reader >= 0 && t.reader / WARP != warp))
        t.reader = MANY_WARPS;
    else
        // Several lanes of one warp are stored as a negative number of the warp.
        t.reader = t.reader >= 0 || t.reader == MANY_LANES - 2 - warp ? MANY_LANES - 2 - warp : MANY_WARPS;
    t.read_barrier = m.barrier;
    t.read_warp_epoch = epoch;
}

void watch_write(Machine &m, Touched &t) {
    int me = m.now->number, warp = me / WARP;
    uint32_t epoch = m.warps[warp].epoch;
    if (t.pending && t.writer != me) fail("overwrites shared memory that a copy_async of thread %d fills", t.writer);
    if (t.writer >= 0 && !ordered(m, t.writer, t.write_barrier, t.write_warp_epoch))
        fail("race: overwrites shared memory that thread %d wrote, with no barrier between", t.writer);
    bool lanes_of_mine = t.reader == MANY_LANES - 2 - warp && t.read_warp_epoch < epoch;
    bool before = t.reader == -1 || t.read_barrier < m.barrier || lanes_of_mine ||
                  (t.reader >= 0 && ordered(m, t.reader, t.read_barrier, t.read_warp_epoch));
    if (!before) fail("race: overwrites shared memory that another thread reads, with no barrier between");
    t.writer = me;
    t.write_barrier = m.barrier;
    t.write_warp_epoch = epoch;
}

void shared_access(const void *at, size_t bytes, bool write) {
    Machine &m = machine();
    Touched *t = touched_at(m, at, bytes, write ? "a write" : "a read");
    for (size_t i = 0; i < bytes / GRAIN; i++) write ? watch_write(m, t[i]) : watch_read(m, t[i]);
}

// ---- global memory ------------------------------------------------------------------------------

// Returns the offset of an access in its window, counted in bytes of the window.
size_t place_in(const Window *window, const void *at, size_t bytes, const char *what) {
    if (!window || !window->base) fail("%s through a pointer that the launch did not give", what);
    uintptr_t p = reinterpret_cast<uintptr_t>(at), base = reinterpret_cast<uintptr_t>(window->base);
    if (p % bytes != 0) fail("%s of %zu bytes of argument %d is not aligned", what, bytes, window->argument);
    uint64_t from = p - base, row = window->pitch ? from / window->pitch : 0, column = from - row * window->pitch;
    if (p < base || row >= window->rows || column + bytes > window->row_bytes)
        fail("%s of %zu bytes at byte %lld of argument %d, which has %llu rows of %llu bytes", what, bytes,
             static_cast<long long>(p - base), window->argument, static_cast<unsigned long long>(window->rows),
             static_cast<unsigned long long>(window->row_bytes));
    return size_t(row * window->row_bytes + column);
}

uint32_t thread_number(Machine &m) { return m.block_number * uint32_t(m.threads.size()) + uint32_t(m.now->number) + 1; }

// Copies the data, or zeros if the copy has no source.
void deliver(const AsyncCopy &copy) {
    if (copy.there)
        memcpy(copy.to, copy.from, copy.bytes);
    else
        memset(copy.to, 0, copy.bytes);
}

void finish_copy(Machine &m, const AsyncCopy &copy, bool late) {
    if (late) deliver(copy);
    Touched *t = touched_at(m, copy.to, copy.bytes, "copy_async");
    for (size_t i = 0; i < copy.bytes / GRAIN; i++) {
        t[i].pending = false;
        t[i].write_barrier = m.barrier;
        t[i].write_warp_epoch = m.warps[m.now->number / WARP].epoch;
    }
}

// ---- warp-wide instructions ---------------------------------------------------------------------

float bf16_value(uint32_t pair, int half) { return bits_to_float((half ? pair >> 16 : pair & 0xffff) << 16); }

void compute_mma(Thread *lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const Deposit &deposit = lanes[lane].deposit;
        for (int v = 0; v < 8; v++) {
            Element e = element_of_a(lane, v);
            a[e.row][e.column] = bf16_value(deposit.a[v / 2], v % 2);
        }
        for (int v = 0; v < 4; v++) {
            Element e = element_of_b(lane, v);
            b[e.row][e.column] = bf16_value(deposit.b[v / 2], v % 2);
        }
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int v = 0; v < 4; v++) {
            Element e = element_of_c(lane, v);
            double sum = 0;
            for (int k = 0; k < 16; k++) sum += double(a[e.row][k]) * double(b[k][e.column]);
            lanes[lane].deposit.d[v] = float(double(lanes[lane].deposit.d[v]) + sum);
        }
}

void compute_load_matrices(Machine &m, Thread *lanes) {
    for (int matrix = 0; matrix < 4; matrix++) {
        const unsigned char *rows[8];
        int of_group[8] = {};
        for (int i = 0; i < 8; i++) {
            rows[i] = static_cast<const unsigned char *>(lanes[8 * matrix + i].deposit.row);
            of_group[reinterpret_cast<uintptr_t>(rows[i]) / 16 % 8]++;
        }
        int most = 1;
        for (int group : of_group) most = group > most ? group : most;
        m.counters.shared_phases++;
        m.counters.bank_conflicts += most - 1;
        for (int lane = 0; lane < WARP; lane++) {
            uint16_t halves[2];
            for (int half = 0; half < 2; half++) {
                Element e = element_of_matrix(lane, half, lanes[lane].deposit.transposed);
                memcpy(&halves[half], rows[e.row] + 2 * e.column, 2);
            }
            lanes[lane].deposit.out[matrix] = uint32_t(halves[0]) | uint32_t(halves[1]) << 16;
        }
    }
}

void compute(Machine &m, Warp &warp, Thread *lanes) {
    switch (warp.op) {
    case WarpOp::Sync:
        warp.epoch++;
        break;
    case WarpOp::Shuffle:
        for (int lane = 0; lane < WARP; lane++) *lanes[lane].deposit.out = lanes[lanes[lane].deposit.lane].deposit.bits;
        break;
    case WarpOp::Mma:
        compute_mma(lanes);
        break;
    case WarpOp::LoadMatrices:
        compute_load_matrices(m, lanes);
        break;
    }
}

void together(WarpOp op, const Deposit &deposit) {
    Machine &m = machine();
    Thread *me = m.now;
    Warp &warp = m.warps[me->number / WARP];
    if (warp.arrived == 0) {
        warp.op = op;
        warp.first = me->number;
    } else if (warp.op != op) {
        fail("comes to %s while thread %d of its warp is in %s", WARP_OP_NAMES[int(op)], warp.first,
             WARP_OP_NAMES[int(warp.op)]);
    }
    me->deposit = deposit;
    warp.arrived++;
    if (warp.arrived < WARP) {
        me->status = Status::InWarp;
        suspend();
        return;
    }
    Thread *lanes = &m.threads[size_t(me->number / WARP * WARP)];
    compute(m, warp, lanes);
    warp.arrived = 0;
    for (int lane = 0; lane < WARP; lane++) lanes[lane].status = Status::Ready;
}

} // namespace

// ---- what emu.h calls ---------------------------------------------------------------------------

const Window *window_at(uint64_t address, size_t bytes, bool write) {
    Machine &m = machine();
    if (address == 0 || bytes == 0) return nullptr;
    std::unique_ptr<Listed> &listed = m.listed[address];
    if (!listed) {
        listed = std::make_unique<Listed>();
        listed->window = Window{reinterpret_cast<unsigned char *>(address), 1, bytes, bytes, nullptr, write, true, false, -1};
        listed->writer.assign(write ? bytes : 0, 0);
        if (write) listed->window.writer = listed->writer.data();
    }
    if (listed->window.row_bytes != bytes || listed->window.may_write != write)
        fail("a table's address stands for %zu bytes, and for %llu in another place", bytes,
             static_cast<unsigned long long>(listed->window.row_bytes));
    return &listed->window;
}

static void check_load(Machine &m, const Window *window, const void *at, size_t bytes) {
    size_t place = place_in(window, at, bytes, "a read");
    if (!window->may_read) fail("reads argument %d, which is an Out", window->argument);
    if (window->writer) {
        uint32_t threads = uint32_t(m.threads.size());
        for (size_t i = 0; i < bytes; i++) {
            uint32_t writer = window->writer[place + i];
            if (writer && (writer - 1) / threads != m.block_number)
                fail("race: reads byte %zu of argument %d, which block %u wrote", place + i, window->argument,
                     (writer - 1) / threads);
        }
    }
}

__attribute__((noinline)) void on_load(const Window *window, const void *at, size_t bytes) {
    Machine &m = machine();
    check_load(m, window, at, bytes);
    if (m.options.count)
        count_access(m, m.global_requests, next_request(m, __builtin_return_address(0), window), at, bytes);
}

__attribute__((noinline)) void on_store(const Window *window, const void *at, size_t bytes) {
    Machine &m = machine();
    size_t place = place_in(window, at, bytes, "a write");
    if (!window->may_write) fail("writes argument %d, which is an In", window->argument);
    uint32_t me = thread_number(m), threads = uint32_t(m.threads.size());
    for (size_t i = 0; i < bytes; i++) {
        uint32_t &writer = window->writer[place + i];
        if (writer && window->once)
            fail("writes byte %zu of argument %d a second time; thread %u of block %u wrote it before", place + i,
                 window->argument, (writer - 1) % threads, (writer - 1) / threads);
        if (writer && (writer - 1) / threads != m.block_number)
            fail("race: writes byte %zu of argument %d, which block %u wrote", place + i, window->argument,
                 (writer - 1) / threads);
        writer = me;
    }
    if (m.options.count)
        count_access(m, m.global_requests, next_request(m, __builtin_return_address(0), window), at, bytes);
}

__attribute__((noinline)) void on_shared_load(const void *at, size_t bytes) {
    shared_access(at, bytes, false);
    Machine &m = machine();
    if (m.options.count)
        count_access(m, m.shared_requests, next_request(m, __builtin_return_address(0), nullptr), at, bytes);
}

__attribute__((noinline)) void on_shared_store(const void *at, size_t bytes) {
    shared_access(at, bytes, true);
    Machine &m = machine();
    if (m.options.count)
        count_access(m, m.shared_requests, next_request(m, __builtin_return_address(0), nullptr), at, bytes);
}

void *shared_memory(int site, size_t bytes) {
    Machine &m = machine();
    for (const Site &known : m.sites)
        if (known.number == site) {
            if (known.bytes != bytes) fail("a shared array of %zu bytes was one of %zu before", bytes, known.bytes);
            return m.shared + known.start;
        }
    size_t start = m.shared_end, end = (start + bytes + RED_ZONE + 127) / 128 * 128;
    size_t arrays = m.dynamic_bytes + bytes;
    for (const Site &known : m.sites) arrays += known.bytes;
    if (arrays > SHARED_BYTES) fail("needs %zu bytes of shared memory; a block has %zu", arrays, SHARED_BYTES);
    for (size_t i = start / GRAIN; i < end / GRAIN; i++) m.touched[i] = Touched{};
    memset(m.shared + start, 0xff, end - start);
    for (size_t i = 0; i < bytes / GRAIN; i++) m.touched[start / GRAIN + i].allowed = true;
    m.shared_end = end;
    m.sites.push_back(Site{site, start, bytes});
    return m.shared + start;
}

void *dynamic_shared_memory() { return machine().shared; }

uint32_t shared_offset(const void *at) { return uint32_t(static_cast<const unsigned char *>(at) - machine().shared); }

void sync_block() {
    Machine &m = machine();
    if (m.done > 0) fail("comes to a barrier that %d threads of its block have passed by: they have ended", m.done);
    m.now->status = Status::AtBarrier;
    if (++m.at_barrier < int(m.threads.size())) {
        suspend();
        return;
    }
    m.at_barrier = 0;
    m.barrier++;
    m.visits.clear();
    for (Thread &thread : m.threads) thread.status = Status::Ready;
}

void sync_warp() { together(WarpOp::Sync, Deposit{}); }

uint32_t shuffle(uint32_t bits, int lane) {
    uint32_t result = 0;
    Deposit deposit{};
    deposit.bits = bits;
    deposit.lane = lane;
    deposit.out = &result;
    together(WarpOp::Shuffle, deposit);
    return result;
}

void mma(float *d, const uint32_t *a, const uint32_t *b) {
    Deposit deposit{};
    deposit.d = d;
    deposit.a = a;
    deposit.b = b;
    together(WarpOp::Mma, deposit);
}

void load_matrices(uint32_t *registers, const void *row, bool transposed) {
    shared_access(row, 16, false);
    Deposit deposit{};
    deposit.out = registers;
    deposit.row = row;
    deposit.transposed = transposed;
    together(WarpOp::LoadMatrices, deposit);
}

void copy_async(void *to, const Window *window, const void *from, size_t bytes, bool there) {
    Machine &m = machine();
    if (there) check_load(m, window, from, bytes);
    shared_access(to, bytes, true);
    if (m.options.count) {
        // Without the position of the call: lanes with zeros may call from another one, and a GPU
        // has one instruction for both.
        Request request = next_request(m, nullptr, window);
        count_access(m, m.shared_requests, request, to, bytes);
        if (there) count_access(m, m.global_requests, request, from, bytes);
    }
    AsyncCopy copy{to, from, bytes, there, m.now->group};
    if (!m.options.late) deliver(copy);
    Touched *t = touched_at(m, to, bytes, "copy_async");
    for (size_t i = 0; i < bytes / GRAIN; i++) t[i].pending = true;
    m.now->copies.push_back(copy);
}

void copy_async_commit() { machine().now->group++; }

void copy_async_wait(int groups) {
    Machine &m = machine();
    Thread *me = m.now;
    std::vector<AsyncCopy> left;
    for (const AsyncCopy &copy : me->copies) {
        if (copy.group < me->group - groups)
            finish_copy(m, copy, m.options.late);
        else
            left.push_back(copy);
    }
    me->copies = left;
}

// ---- launches -----------------------------------------------------------------------------------

namespace {

// Byte ranges of a window from its base on; two windows of one pitch are compared by their columns.
bool overlap(const Window &a, const Window &b) {
    const unsigned char *a_end = a.base + (a.rows - 1) * a.pitch + a.row_bytes;
    const unsigned char *b_end = b.base + (b.rows - 1) * b.pitch + b.row_bytes;
    if (a.base >= b_end || b.base >= a_end) return false;
    if (a.pitch == b.pitch && a.rows > 1 && b.rows > 1) {
        uint64_t apart = uint64_t(b.base >= a.base ? b.base - a.base : a.base - b.base) % a.pitch;
        uint64_t first = b.base >= a.base ? a.row_bytes : b.row_bytes, other = b.base >= a.base ? b.row_bytes : a.row_bytes;
        return apart < first || apart + other > a.pitch;
    }
    return true;
}

bool set_windows(Machine &m, const Arg *args) {
    size_t count = m.kernel->arguments;
    m.listed.clear();
    m.windows.assign(count, Window{});
    m.writers.assign(count, {});
    for (size_t i = 0; i < count; i++) {
        const Mode mode = m.kernel->modes[i];
        Window &w = m.windows[i];
        w.argument = int(i);
        if (mode == Mode::Value || args[i].value == 0) continue;
        if (args[i].rows == 0 || args[i].row_bytes == 0) continue;
        w.base = reinterpret_cast<unsigned char *>(args[i].value);
        w.rows = args[i].rows;
        w.row_bytes = args[i].row_bytes;
        w.pitch = args[i].pitch;
        w.may_read = mode != Mode::Out;
        w.may_write = mode != Mode::In;
        w.once = mode == Mode::Out;
        if (w.may_write) {
            m.writers[i].assign(size_t(w.rows * w.row_bytes), 0);
            w.writer = m.writers[i].data();
        }
        if (mode == Mode::Out)
            for (uint64_t row = 0; row < w.rows; row++) memset(w.base + row * w.pitch, 0xff, w.row_bytes);
        for (size_t j = 0; j < i; j++)
            if (m.windows[j].base && (w.may_write || m.windows[j].may_write) && overlap(w, m.windows[j])) {
                note(m, "arguments %zu and %zu share memory, and one of them is written", j, i);
                return false;
            }
    }
    return true;
}

bool all_written(Machine &m) {
    for (const Window &w : m.windows)
        if (w.once)
            for (uint64_t i = 0; i < w.rows * w.row_bytes; i++)
                if (!w.writer[i]) {
                    m.now = nullptr;
                    note(m, "byte %llu of argument %d, an Out, was not written", static_cast<unsigned long long>(i),
                         w.argument);
                    return false;
                }
    return true;
}

bool run_grid(Machine &m, const uint32_t grid[3], const uint32_t block[3]) {
    uint32_t threads = block[0] * block[1] * block[2];
    if (threads == 0 || threads > 1024 || threads % WARP != 0) {
        note(m, "a block of %u threads; a multiple of 32 up to 1024 is allowed", threads);
        return false;
    }
    uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    if (blocks == 0) {
        note(m, "a grid without blocks, which the driver refuses");
        return false;
    }
    running.block_dim = Index{block[0], block[1], block[2]};
    running.grid_dim = Index{grid[0], grid[1], grid[2]};
    m.threads.assign(threads, Thread{});
    m.warps.assign(threads / WARP, Warp{});
    for (uint32_t i = 0; i < threads; i++) {
        m.threads[i].number = int(i);
        m.threads[i].index = Index{i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
    }
    for (int i : in_order(m, int(blocks))) {
        uint32_t b = uint32_t(i);
        m.block_number = b;
        running.block = Index{b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        if (!run_block(m)) return false;
    }
    return all_written(m);
}

} // namespace

} // namespace emu

extern "C" int finetune_emu_launch(const char *name, const uint32_t *grid, const uint32_t *block, uint32_t shared_bytes,
                                   const emu::Arg *args, size_t count, const emu::Options *options, emu::Counters *counters,
                                   char *error, size_t error_bytes) {
    using namespace emu;
    Machine &m = machine();
    m.error.clear();
    m.now = nullptr;
    m.kernel = nullptr;
    for (size_t i = 0; i < finetune_emu_kernel_count; i++)
        if (strcmp(finetune_emu_kernels[i].name, name) == 0) m.kernel = &finetune_emu_kernels[i];
    if (!m.kernel || m.kernel->arguments != count) {
        snprintf(error, error_bytes, "there is no kernel %s of %zu arguments", name, count);
        return 1;
    }
    if (!m.shared) {
        size_t bytes = 2 * SHARED_BYTES;
        m.memory.assign(bytes + 256, 0xff);
        m.shared = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(m.memory.data()) + 127) / 128 * 128);
        m.touched.assign(bytes / GRAIN, Touched{});
    }
    m.args = args;
    m.options = *options;
    m.random = options->seed;
    m.counters = Counters{};
    m.dynamic_bytes = shared_bytes;
    running = Running{};
    bool good = shared_bytes <= SHARED_BYTES;
    if (!good) note(m, "asks for %u bytes of shared memory; a block has %zu", shared_bytes, SHARED_BYTES);
    good = good && set_windows(m, args) && run_grid(m, grid, block);
    if (!good) drop_fibers(m);
    *counters = m.counters;
    snprintf(error, error_bytes, "%s", m.error.c_str());
    return good ? 0 : 1;
}
