//! Each rule sees its incident once, and none in runs without one.

use super::*;

fn report(step: u64, loss: f64, grad_norm: f64) -> StepReport {
    StepReport { step, loss, grad_norm, ..StepReport::default() }
}

fn spikes(losses: impl IntoIterator<Item = f64>) -> Vec<String> {
    let mut watch = LossSpikes::default();
    let findings =
        losses.into_iter().zip(1..).filter_map(|(loss, step)| watch.after(&report(step, loss, 1.0)));
    findings.map(|finding| finding.message).collect()
}

/// Returns a loss between 2 and 2.3, falling.
fn quiet(count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(|i| 2.0 + 0.2 / (1.0 + i as f64 / 50.0) + 0.1 * (i as f64 * 2.4).sin())
}

#[test]
fn a_spike_is_said_once() {
    assert_eq!(spikes(quiet(300)), [""; 0]);
    let messages = spikes(quiet(40).chain([5.0, 5.5]).chain(quiet(30)));
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("step 41: the loss 5.0000 is far above those of the 40 steps before it"));
    // A second one, long after.
    assert_eq!(spikes(quiet(40).chain([5.0]).chain(quiet(100)).chain([5.0])).len(), 2);
}

#[test]
fn neither_beginnings_nor_small_losses_are_spikes() {
    assert_eq!(spikes([2.0, 2.0, 9.0, 2.0]), [""; 0]);
    assert_eq!(spikes((0..40).map(|_| 0.001).chain([0.3])), [""; 0]);
}

#[test]
fn a_gradient_of_zero_is_said_once() {
    let mut watch = StillGradients::default();
    let norms = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let messages: Vec<String> = norms
        .into_iter()
        .zip(1..)
        .filter_map(|(norm, step)| watch.after(&report(step, 1.0, norm)))
        .map(|finding| finding.message)
        .collect();
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("step 7: the gradient norm has been 0 for 3 steps"), "{messages:?}");
}

/// Returns a step that spends `data` and `save` seconds, and the rest in computing.
fn timed(step: u64, data: f64, save: f64) -> StepReport {
    StepReport { data_secs: data, save_secs: save, forward_secs: 1.0 - data - save, ..report(step, 2.0, 1.0) }
}

#[test]
fn a_device_that_waits_is_said_once_with_what_it_waits_for() {
    let mut watch = WaitingDevice::default();
    let busy = (1..=30).filter_map(|step| watch.after(&timed(step, 0.3, 0.1)).map(|_| step));
    assert_eq!(busy.collect::<Vec<_>>(), [0; 0]);
    let findings: Vec<(u64, Finding)> =
        (31..=90).filter_map(|step| Some((step, watch.after(&timed(step, 0.7, 0.2))?))).collect();
    assert_eq!(findings.len(), 1);
    assert!(findings[0].0 <= 31 + WINDOW as u64, "{findings:?}");
    assert!(findings[0].1.message.contains("% for rows") && findings[0].1.value > Some(0.5), "{findings:?}");
    // One checkpoint that takes as long as ten steps is no trouble.
    let mut watch = WaitingDevice::default();
    let saving = |step| timed(step, 0.0, if step == 30 { 10.0 } else { 0.0 });
    let one = |step| StepReport { forward_secs: 1.0, ..saving(step) };
    assert!((1..=60).all(|step| watch.after(&one(step)).is_none()));
    // Nor are steps of no time at all.
    assert!((1..=60).all(|step| watch.after(&report(step, 2.0, 1.0)).is_none()));
}

#[test]
fn a_disk_without_room_for_the_next_checkpoint_is_said_once() {
    let space = |free| OutputSpace { total: 1000 << 30, free };
    let mut watch = ShortDisk::new(40 << 30);
    assert_eq!(watch.look(1, space(41 << 30)), None);
    let finding = watch.look(2, space(39 << 30)).unwrap();
    assert!(finding.message.starts_with("step 2: 39.0 GiB free"), "{finding:?}");
    assert!((3..90).all(|step| watch.look(step, space(1 << 30)).is_none()));
    // A few GiB of a large disk are enough, and a fiftieth of a small one.
    let mut small = ShortDisk::new(0);
    assert_eq!(small.look(1, space(6 << 30)), None);
    assert_eq!(small.look(2, OutputSpace { total: 100 << 20, free: 3 << 20 }), None);
    assert!(small.look(3, OutputSpace { total: 100 << 20, free: 1 << 20 }).is_some());
}

/// Returns the seconds until a stall is reported after `steps` steps of `secs` each; none within a
/// day.
fn stalled_after(watch: &mut StallWatch) -> Option<u64> {
    (1..86_400).find(|_| watch.tick(Duration::from_secs(1)).is_some())
}

#[test]
fn a_step_that_does_not_end_is_said_once() {
    let after = |steps: u64, secs: f64| {
        let mut watch = StallWatch::new(Duration::from_secs(60));
        (1..=steps).for_each(|step| watch.moved(step, Some(secs)));
        stalled_after(&mut watch)
    };
    assert_eq!(after(20, 0.1), Some(61));
    assert_eq!(after(20, 30.0), Some(301));
    // The first steps compile, read and fill caches.
    assert_eq!(after(2, 0.1), Some(601));
    let mut watch = StallWatch::new(Duration::from_secs(60));
    (1..=20).for_each(|step| watch.moved(step, Some(1.0)));
    watch.pause();
    assert_eq!(stalled_after(&mut watch), Some(601), "an evaluation may take its time");
    assert_eq!(stalled_after(&mut watch), None, "once");
    watch.moved(20, None);
    (21..=50).for_each(|step| watch.moved(step, Some(1.0)));
    let again = (1..100).find_map(|_| watch.tick(Duration::from_secs(1))).unwrap();
    assert!(again.message.contains("after step 50, and a step usually takes 1"), "{again:?}");
}

/// Random numbers between 0 and 1 from a seed (xorshift, Marsaglia 2003).
struct Noise(u64);

impl Noise {
    fn of(seed: u64) -> Self {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a nearly normal number, mean 0 and deviation 1, from twelve uniform ones.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }
}

/// Returns step `step` of a run without trouble: a loss that falls from 3 with noise of `noise`
/// nats, a few hard rows, gradients and times that vary, a checkpoint now and then.
fn normal_step(step: u64, noise: f64, random: &mut Noise) -> StepReport {
    let hard = if random.next() < 0.002 { 2.0 * noise } else { 0.0 };
    let loss = 0.8 + 2.2 / (1.0 + step as f64 / 300.0) + noise * random.normal() + hard;
    let saves = if step.is_multiple_of(250) { 3.0 } else { 0.0 };
    let slow = if random.next() < 0.01 { 5.0 } else { 1.0 };
    StepReport {
        data_secs: 0.02 * random.next() * slow,
        forward_secs: 0.3 + 0.05 * random.next(),
        backward_secs: 0.6 + 0.1 * random.next(),
        exposed_secs: 0.1 * random.next(),
        update_secs: 0.05,
        save_secs: saves * random.next(),
        other_secs: 0.01 * random.next(),
        step_secs: 1.1 * slow,
        ..report(step, loss.max(0.01), 0.2 + random.next())
    }
}

#[test]
fn ten_thousand_normal_steps_raise_nothing() {
    let (steps, mut seen) = (10_000, 0);
    for (seed, noise) in (1..=10).flat_map(|seed| [0.02, 0.1, 0.3].map(|noise| (seed, noise))) {
        let mut random = Noise::of(seed);
        let (mut spikes, mut still) = (LossSpikes::default(), StillGradients::default());
        let (mut waiting, mut disk) = (WaitingDevice::default(), ShortDisk::new(1 << 30));
        let mut stall = StallWatch::new(Duration::from_secs(60));
        for step in 1..=steps {
            let report = normal_step(step, noise, &mut random);
            let free = (40 << 30) - step * (1 << 20);
            let passed = Duration::from_secs_f64(report.step_secs);
            let findings = [
                spikes.after(&report),
                still.after(&report),
                waiting.after(&report),
                disk.look(step, OutputSpace { total: 1 << 40, free }),
                stall.tick(passed),
            ];
            stall.moved(step, Some(report.step_secs));
            assert_eq!(findings, [None, None, None, None, None], "seed {seed}, noise {noise}");
            seen += 1;
        }
    }
    assert_eq!(seen, 300_000);
}

/// The quickstart as a machine of two cores recorded it, whose loss falls from 10.6 to 0.05.
#[test]
fn a_run_that_was_recorded_raises_nothing() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap()
        .join("tests/golden/train/quickstart_metrics.jsonl");
    let (mut spikes, mut still, mut waiting) =
        (LossSpikes::default(), StillGradients::default(), WaitingDevice::default());
    let (mut stall, mut steps) = (StallWatch::new(Duration::from_secs(60)), 0);
    for entry in crate::metrics::read(&path).unwrap() {
        let crate::MetricsEntry::Step(report) = entry else { continue };
        let passed = stall.tick(Duration::from_secs_f64(report.all_parts()));
        stall.moved(report.step, Some(report.all_parts()));
        let findings = [spikes.after(&report), still.after(&report), waiting.after(&report), passed];
        assert_eq!(findings, [None, None, None, None]);
        steps += 1;
    }
    assert_eq!(steps, 153);
}

type Spoil = fn(StepReport) -> StepReport;

/// A rule reports trouble at step 500 of a normal run within 20 steps.
#[test]
fn planted_trouble_is_said_within_twenty_steps() {
    let planted: [(&str, Spoil); 3] = [
        ("the loss", |report| StepReport { loss: 6.0, ..report }),
        ("gradient norm", |report| StepReport { grad_norm: 0.0, ..report }),
        ("waited", |report| StepReport { data_secs: 3.0, ..report }),
    ];
    for (seed, (what, spoil)) in (1..=5).flat_map(|seed| planted.map(|planted| (seed, planted))) {
        let mut random = Noise::of(seed);
        let (mut spikes, mut still, mut waiting) =
            (LossSpikes::default(), StillGradients::default(), WaitingDevice::default());
        let mut messages = Vec::new();
        for step in 1..=560 {
            let normal = normal_step(step, 0.1, &mut random);
            let report = if step >= 500 { spoil(normal) } else { normal };
            let findings = [spikes.after(&report), still.after(&report), waiting.after(&report)];
            messages.extend(findings.into_iter().flatten().map(|finding| (step, finding.message)));
        }
        assert_eq!(messages.len(), 1, "{what}: {messages:?}");
        assert!((500..520).contains(&messages[0].0) && messages[0].1.contains(what), "{what}: {messages:?}");
    }
}
