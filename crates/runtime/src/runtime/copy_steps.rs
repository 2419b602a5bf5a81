//! Schedule of a copy between host and GPU through two page-locked buffers: its pieces, and the
//! order of actions of the host and the GPU's copy stream.
//!
//! While the GPU copies one piece between its memory and one buffer, the host copies another
//! between the other buffer and the caller's memory. A buffer is written again only after a wait
//! for the copy that read it, and read only after a wait for the copy that wrote it.

#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only copies to and from GPUs go this way"))]

use std::ops::Range;

/// Number of buffers, which pieces use in turn.
pub(super) const BUFFERS: usize = 2;

/// Minimum bytes of a piece except the last: below it, the start of a copy costs more than overlap
/// saves.
const LEAST_PIECE: usize = 4 << 20;

/// Pieces have whole pages of the host.
const PAGE: usize = 4096;

/// A part of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Range of its bytes in the whole.
    pub(super) range: Range<usize>,
    /// Buffer that it uses, from the buffer's start.
    pub(super) buffer: usize,
}

/// Action of the host for a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyAction {
    /// Waits for the GPU's last copy on the piece's buffer, if there was one.
    Wait,
    /// Copies the piece between its buffer and the host's memory.
    CopyOnHost,
    /// Starts the GPU's copy of the piece, after all earlier ones.
    StartOnGpu,
}

/// An action on a piece.
pub(super) type CopyStep = (CopyAction, Piece);

/// A copy from the host to a GPU, as the host performs it.
pub(super) trait CopyToGpu {
    /// A point in the GPU's computation.
    type Mark;
    /// Error of the driver.
    type Error;

    /// Makes the copy stream wait for the computation before `mark`, or for all so far.
    fn follow(&mut self, mark: Option<&Self::Mark>) -> Result<(), Self::Error>;

    /// Performs a step.
    fn step(&mut self, step: CopyStep) -> Result<(), Self::Error>;

    /// Makes later computation wait for the copy stream.
    fn lead(&mut self) -> Result<(), Self::Error>;
}

/// Performs `copy` of `bytes` bytes; the other arguments are those of [`steps_to_gpu`]. No
/// computation after `free` uses the GPU's memory, so the copy runs beside it.
pub(super) fn bring<C: CopyToGpu>(
    copy: &mut C,
    bytes: usize,
    buffer_bytes: usize,
    first: usize,
    free: Option<&C::Mark>,
) -> Result<(), C::Error> {
    copy.follow(free)?;
    steps_to_gpu(bytes, buffer_bytes, first).into_iter().try_for_each(|step| copy.step(step))?;
    copy.lead()
}

/// Steps that copy `bytes` bytes from the host to a GPU through buffers of `buffer_bytes`,
/// beginning with buffer `first`. The GPU's copies may still run after the last step.
pub(super) fn steps_to_gpu(bytes: usize, buffer_bytes: usize, first: usize) -> Vec<CopyStep> {
    let of_piece = |piece: Piece| {
        [CopyAction::Wait, CopyAction::CopyOnHost, CopyAction::StartOnGpu]
            .map(|action| (action, piece.clone()))
    };
    pieces(bytes, buffer_bytes, first).flat_map(of_piece).collect()
}

/// Steps that copy `bytes` bytes from a GPU to the host, like [`steps_to_gpu`]. All copies are
/// finished after the last step.
pub(super) fn steps_to_host(bytes: usize, buffer_bytes: usize, first: usize) -> Vec<CopyStep> {
    let pieces: Vec<Piece> = pieces(bytes, buffer_bytes, first).collect();
    let mut steps = Vec::with_capacity(3 * pieces.len());
    let take = |steps: &mut Vec<CopyStep>, piece: &Piece| {
        steps.extend([CopyAction::Wait, CopyAction::CopyOnHost].map(|action| (action, piece.clone())));
    };
    for (i, piece) in pieces.iter().enumerate() {
        if let Some(before) = i.checked_sub(BUFFERS) {
            take(&mut steps, &pieces[before]);
        }
        // An earlier copy to the GPU may still read the buffer; the copy stream runs one after the
        // other.
        steps.push((CopyAction::StartOnGpu, piece.clone()));
    }
    for piece in &pieces[pieces.len().saturating_sub(BUFFERS)..] {
        take(&mut steps, piece);
    }
    steps
}

/// Pieces of `bytes` bytes: about four, so that host and GPU overlap, if the buffers are large
/// enough.
fn pieces(bytes: usize, buffer_bytes: usize, first: usize) -> impl Iterator<Item = Piece> {
    let least = LEAST_PIECE.min(buffer_bytes);
    let each = bytes.div_ceil(2 * BUFFERS).next_multiple_of(PAGE).clamp(least, buffer_bytes);
    let piece = move |(i, start): (usize, usize)| Piece {
        range: start..(start + each).min(bytes),
        buffer: (first + i) % BUFFERS,
    };
    (0..bytes).step_by(each).enumerate().map(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUFFER: usize = 10_000;

    /// Two buffers, and pending copies of the GPU: run as late as the waits allow, or at once.
    struct Lane {
        buffers: [Vec<u8>; BUFFERS],
        under_way: Vec<Piece>,
        late: bool,
    }

    impl Lane {
        fn new(late: bool) -> Self {
            Lane { buffers: [(); BUFFERS].map(|()| vec![0; BUFFER]), under_way: Vec::new(), late }
        }

        /// Pending copies that finish with the last one on `buffer`, in order.
        fn due(&mut self, buffer: Option<usize>) -> Vec<Piece> {
            let on = |piece: &Piece| buffer.is_none_or(|buffer| piece.buffer == buffer);
            let last = self.under_way.iter().rposition(on).map_or(0, |last| last + 1);
            self.under_way.drain(..last).collect()
        }

        /// Runs the steps; both copies are between a buffer and the range of a piece. Pending
        /// copies are pieces.
        fn go(
            &mut self,
            steps: Vec<CopyStep>,
            mut on_host: impl FnMut(&mut [u8], Range<usize>),
            mut on_gpu: impl FnMut(&mut [u8], Range<usize>),
        ) {
            for (action, piece) in steps {
                let due = match action {
                    CopyAction::Wait => self.due(Some(piece.buffer)),
                    CopyAction::CopyOnHost => {
                        on_host(&mut self.buffers[piece.buffer][..piece.range.len()], piece.range);
                        Vec::new()
                    }
                    CopyAction::StartOnGpu => {
                        self.under_way.push(piece);
                        if self.late { Vec::new() } else { self.due(None) }
                    }
                };
                for Piece { range, buffer } in due {
                    on_gpu(&mut self.buffers[buffer][..range.len()], range);
                }
            }
        }
    }

    const SIZES: [usize; 9] = [0, 1, 4095, 4096, 9_999, 10_000, 10_001, 40_000, 123_457];

    #[test]
    fn copies_are_whole_however_late_the_gpu_is() {
        for bytes in SIZES {
            for (late, first) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
                let from: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8 | 1).collect();
                let mut lane = Lane::new(late);
                let mut to = vec![0; bytes];
                let fill = |buffer: &mut [u8], range| buffer.copy_from_slice(&from[range]);
                lane.go(steps_to_gpu(bytes, BUFFER, first), fill, |buffer, range| {
                    to[range].copy_from_slice(buffer)
                });
                for Piece { range, buffer } in lane.due(None) {
                    to[range.clone()].copy_from_slice(&lane.buffers[buffer][..range.len()]);
                }
                assert!(to == from, "{bytes} bytes to the GPU, {late}");
                to.fill(0);
                lane.go(
                    steps_to_host(bytes, BUFFER, first),
                    |buffer, range| to[range].copy_from_slice(buffer),
                    fill,
                );
                assert!(lane.under_way.is_empty(), "what was copied may be freed");
                assert!(to == from, "{bytes} bytes to the host, {late}");
            }
        }
    }

    #[test]
    fn pieces_cover_the_range_once_and_buffers_alternate() {
        for bytes in SIZES {
            for first in 0..BUFFERS {
                let mut end = 0;
                for (i, piece) in pieces(bytes, BUFFER, first).enumerate() {
                    assert_eq!((piece.range.start, piece.buffer), (end, (first + i) % BUFFERS));
                    assert!(!piece.range.is_empty() && piece.range.len() <= BUFFER);
                    end = piece.range.end;
                }
                assert_eq!(end, bytes);
            }
        }
        let lengths =
            |bytes| pieces(bytes, 64 << 20, 0).map(|piece| piece.range.len() >> 20).collect::<Vec<_>>();
        assert_eq!(lengths(3 << 20), [3]);
        assert_eq!(lengths(10 << 20), [4, 4, 2]);
        assert_eq!(lengths(100 << 20), [25; 4]);
        assert_eq!(lengths(200 << 20), [50; 4]);
        assert_eq!(lengths(300 << 20), [64, 64, 64, 64, 44]);
    }

    /// Times of the host and of the two streams of a GPU, which copies a byte in a unit.
    #[derive(Default)]
    struct Timeline {
        host: usize,
        compute: usize,
        copies: usize,
        done: [usize; BUFFERS],
    }

    impl CopyToGpu for Timeline {
        type Mark = usize;
        type Error = ();

        fn follow(&mut self, mark: Option<&usize>) -> Result<(), ()> {
            self.copies = self.copies.max(*mark.unwrap_or(&self.compute));
            Ok(())
        }

        fn step(&mut self, (action, piece): CopyStep) -> Result<(), ()> {
            match action {
                CopyAction::Wait => self.host = self.host.max(self.done[piece.buffer]),
                CopyAction::CopyOnHost => {}
                CopyAction::StartOnGpu => {
                    self.copies = self.copies.max(self.host) + piece.range.len();
                    self.done[piece.buffer] = self.copies;
                }
            }
            Ok(())
        }

        fn lead(&mut self) -> Result<(), ()> {
            self.compute = self.compute.max(self.copies);
            Ok(())
        }
    }

    /// Time of `blocks` blocks in two memories, each copied when its computation is due.
    fn time_of_blocks(blocks: usize, [copy, compute]: [usize; 2], marked: bool) -> usize {
        let (mut gpu, mut free) = (Timeline::default(), [0; 2]);
        for block in 0..blocks {
            let mark = marked.then_some(&free[block % 2]);
            bring(&mut gpu, copy, copy / 4, 0, mark).unwrap();
            gpu.compute = gpu.compute.max(gpu.host) + compute;
            free[block % 2] = gpu.compute;
        }
        gpu.compute
    }

    /// The next block's copy runs beside this block's kernels, without a third memory.
    #[test]
    fn copies_overlap_with_computation_after_the_mark() {
        let (long, short) = (80_000, 40_000);
        assert_eq!(time_of_blocks(36, [short, long], true), short + 36 * long);
        assert_eq!(time_of_blocks(36, [long, short], true), 36 * long + short);
        assert_eq!(time_of_blocks(36, [long, short], false), 36 * (long + short));
    }

    /// The GPU copies a piece while the host works on the one before it.
    #[test]
    fn copies_overlap_with_the_work_of_the_host() {
        let (piece, mut host, mut copies, mut done) = (BUFFER, 0, 0, [0; BUFFERS]);
        for (action, Piece { buffer, .. }) in steps_to_host(4 * piece, piece, 0) {
            match action {
                CopyAction::Wait => host = host.max(done[buffer]),
                CopyAction::CopyOnHost => host += piece,
                CopyAction::StartOnGpu => {
                    copies = copies.max(host) + piece;
                    done[buffer] = copies;
                }
            }
        }
        assert_eq!(host, 5 * piece, "apart, it would take 8");
    }

    #[test]
    fn a_buffer_is_waited_for_before_the_host_touches_it() {
        for bytes in SIZES {
            for steps in [steps_to_gpu(bytes, BUFFER, 0), steps_to_host(bytes, BUFFER, 0)] {
                let touches =
                    steps.iter().enumerate().filter(|(_, (action, _))| *action == CopyAction::CopyOnHost);
                for (i, (_, piece)) in touches {
                    assert_eq!(steps[i - 1], (CopyAction::Wait, piece.clone()));
                }
                let count = |wanted| steps.iter().filter(|(action, _)| *action == wanted).count();
                let pieces = pieces(bytes, BUFFER, 0).count();
                assert_eq!([count(CopyAction::CopyOnHost), count(CopyAction::StartOnGpu)], [pieces; 2]);
            }
        }
        // Both buffers are in use before the host waits for the first.
        let order: Vec<CopyAction> =
            steps_to_host(BUFFER * 4, BUFFER, 0).iter().map(|(action, _)| *action).collect();
        assert_eq!(order[..3], [CopyAction::StartOnGpu, CopyAction::StartOnGpu, CopyAction::Wait]);
    }
}
