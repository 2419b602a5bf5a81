// Kernels with one fault each, which the emulator must name
// (crates/backends/src/gpu/emulator/tests.rs), and one without. All take x: [64] and y: [64] and
// run in two blocks of 32 threads, or as noted in one of 64.
#include "../compat.cuh"

namespace {

DEVICE inline int place() { return int(blockIdx.x * blockDim.x + threadIdx.x); }

} // namespace

// No fault: neighbours swap values through shared memory, across a barrier.
KERNEL fault_none(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    s.store(int(threadIdx.x), x.load(place()));
    sync_block();
    y.store(place(), s.load(int(threadIdx.x) ^ 1));
}
// Reads one element beyond the end.
KERNEL fault_bounds(In<float> x, Out<float> y) { y.store(place(), x.load(place() + 1)); }
// Reads sixteen bytes from an address that is not a multiple of sixteen.
KERNEL fault_alignment(In<float> x, Out<float> y) {
    y.store(place(), threadIdx.x == 1 ? value_of<float>(x.load16(1), 0) : 0.0f);
}
// Writes one element twice.
KERNEL fault_twice(In<float> x, Out<float> y) {
    y.store(place(), x.load(place()));
    if (place() == 5) y.store(place(), 0.0f);
}
// Does not write one element.
KERNEL fault_unwritten(In<float> x, Out<float> y) {
    if (place() != 7) y.store(place(), x.load(place()));
}
// In blocks of 64: reads another warp's word without a barrier between.
KERNEL fault_race(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    s.store(int(threadIdx.x), x.load(place()));
    if (threadIdx.x < 32) sync_warp();
    if (threadIdx.x >= 32) y.store(place(), s.load(int(threadIdx.x) - 32));
    if (threadIdx.x < 32) y.store(place(), s.load(int(threadIdx.x)));
}
// Overwrites a lane's word while its neighbour may still read it.
KERNEL fault_overwrite(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    s.store(int(threadIdx.x), x.load(place()));
    sync_block();
    y.store(place(), s.load(int(threadIdx.x) ^ 1));
    s.store(int(threadIdx.x), 0.0f);
}
// Reads shared memory that no thread wrote.
KERNEL fault_unset(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    if (threadIdx.x > 0) s.store(int(threadIdx.x), x.load(place()));
    sync_block();
    y.store(place(), s.load(int(threadIdx.x)));
}
// Half of a block does not reach the barrier.
KERNEL fault_barrier(In<float> x, Out<float> y) {
    if (threadIdx.x % 2 == 0) sync_block();
    y.store(place(), x.load(place()));
}
// Half of a warp does not reach the shuffle.
KERNEL fault_divergence(In<float> x, Out<float> y) {
    float v = x.load(place());
    if (threadIdx.x < 16) v = shuffle_xor(v, 1);
    y.store(place(), v);
}
// Reads data of an asynchronous copy before waiting for it.
KERNEL fault_copy(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    if (threadIdx.x < 16) copy_async16(s.offset(4 * int(threadIdx.x)), x, 4 * int(threadIdx.x), true);
    copy_async_commit();
    sync_block();
    copy_async_wait<0>();
    y.store(place(), s.load(place()));
}
// Ends before an asynchronous copy has arrived, one of zeros.
KERNEL fault_pending(In<float> x, Out<float> y) {
    SHARED(float, s, 64);
    y.store(place(), x.load(place()));
    if (threadIdx.x < 16) copy_async16(s.offset(4 * int(threadIdx.x)), x, 0, false);
    copy_async_commit();
}
// Reads an element that another block writes.
KERNEL fault_blocks(InOut<float> x, Out<float> y) {
    y.store(place(), x.load(63 - place()));
    x.store(place(), 1.0f);
}
// Accesses an element beyond the end of a shared array.
KERNEL fault_shared_bounds(In<float> x, Out<float> y) {
    SHARED(float, s, 32);
    s.store(int(threadIdx.x) + (threadIdx.x == 31 ? 1 : 0), x.load(place()));
    sync_block();
    y.store(place(), s.load(int(threadIdx.x) % 31));
}
