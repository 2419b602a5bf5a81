//! The view on screens of several sizes, drawn into memory.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::metrics::EvalReport;

fn report(step: u64, ranks: usize) -> StepReport {
    StepReport {
        step,
        loss: 1.0 + 2.0 / (1.0 + step as f64 / 20.0),
        learning_rate: 2e-4,
        grad_norm: 0.75,
        tokens: 4096,
        step_secs: 0.5,
        tokens_per_sec: 8192.0,
        peak_bytes: 3 << 30,
        data_secs: 0.01,
        forward_secs: 0.15,
        backward_secs: 0.3,
        exposed_secs: 0.02,
        update_secs: 0.02,
        rank_secs: (0..ranks).map(|rank| 0.4 + 0.01 * rank as f64).collect(),
        ..StepReport::default()
    }
}

fn run(steps: u64, ranks: usize) -> ScreenFigures {
    let mut figures = ScreenFigures::new("my\u{1b}run");
    figures.begin(0, 400);
    figures.eval(&EvalReport::new(0, 3.1, 100));
    (1..=steps).for_each(|step| figures.step(&report(step, ranks)));
    if steps > 0 {
        figures.eval(&EvalReport::new(steps, 1.5, 100));
    }
    figures
}

fn screen(columns: u16, rows: u16, figures: &ScreenFigures, lines: &[&str]) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
    terminal.draw(|frame| draw(frame, figures, &lines, 60.0)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row = |cells: &[ratatui::buffer::Cell]| {
        cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned() + "\n"
    };
    buffer.content.chunks(usize::from(columns).max(1)).map(row).collect()
}

const SAID: [&str; 2] = ["eval at step 0: loss 3.1000", "warning: step 41: the loss 5.0 is far above"];

#[test]
fn a_screen_of_eighty_columns() {
    insta::assert_snapshot!(screen(80, 24, &run(120, 2), &SAID), @r#"
    my\u{1b}run  step 120/400  1 min 00 s passed, 2 min 20 s left  q saves and stops
    ━━━━━━━━━━━━━━━━━━━━━━━━────────────────────────────────────────────────────────
    ┌ loss, and • of held-out rows ────────────┐┌──────────────────────────────────┐
    │3.100│•                                   ││loss          1.2857, mean 1.3071 │
    │     │ ⠓⢄                                 ││held-out loss 1.5000 at step 120  │
    │     │  ⠈⠙⠦⣀                              ││held-out best 1.5000 at step 120  │
    │     │      ⠉⠑⠒⠤⢤⣀⣀⡀                      ││learning rate 2.00e-4             │
    │1.286│             ⠈⠉⠉⠉⠒⠒⠒⠒⠒⠤⠤⠤⠤⠤⠤⠤⢤⣀⣀⣀⣀⣀•││gradient norm 0.750               │
    │     └────────────────────────────────────││tokens/s      8.19K, 500 ms a step│
    │     0                                 120││peak memory   3.00 GiB            │
    └──────────────────────────────────────────┘└──────────────────────────────────┘
    ┌ time of the last 20 steps ───────────────┐┌ seconds of each rank ────────────┐
    │data       2 % █                          ││  0   0.400 s ████████████████████│
    │forward   30 % ████████                   ││  1   0.410 s ████████████████████│
    │backward  60 % ████████████████           ││                                  │
    │waiting    4 % █                          ││                                  │
    │update     4 % █                          ││                                  │
    │save       0 %                            ││                                  │
    │other      0 %                            ││                                  │
    └──────────────────────────────────────────┘└──────────────────────────────────┘
    ┌──────────────────────────────────────────────────────────────────────────────┐
    │eval at step 0: loss 3.1000                                                   │
    │warning: step 41: the loss 5.0 is far above                                   │
    └──────────────────────────────────────────────────────────────────────────────┘
    "#);
}

#[test]
fn a_screen_of_forty_columns() {
    insta::assert_snapshot!(screen(40, 10, &run(120, 2), &SAID), @r#"
    my\u{1b}run  step 120/400  1 min 00 s pa
    ━━━━━━━━━━━━────────────────────────────
    loss          1.2857, mean 1.3071
    held-out loss 1.5000 at step 120
    held-out best 1.5000 at step 120
    learning rate 2.00e-4
    gradient norm 0.750
    tokens/s      8.19K, 500 ms a step
    eval at step 0: loss 3.1000
    warning: step 41: the loss 5.0 is far ab
    "#);
}

/// The best evaluation after training began stays while later ones are worse or equal; that of the
/// base does not count.
#[test]
fn the_best_evaluation_stays_on_the_screen() {
    let mut figures = ScreenFigures::new("run");
    figures.begin(0, 400);
    for (step, loss) in [(0, 0.5), (10, 1.5), (20, 1.25), (30, 1.25), (40, 1.75)] {
        figures.eval(&EvalReport::new(step, loss, 100));
        figures.step(&report(step + 1, 1));
    }
    let shown = screen(80, 24, &figures, &[]);
    assert!(shown.contains("held-out loss 1.7500 at step 40"), "{shown}");
    assert!(shown.contains("held-out best 1.2500 at step 20"), "{shown}");
}

#[test]
fn before_the_first_step() {
    insta::assert_snapshot!(screen(72, 22, &run(0, 1), &[]), @r#"
    my\u{1b}run  step 0/400  1 min 00 s passed  q saves and stops
    ────────────────────────────────────────────────────────────────────────
    ┌ loss, and • of held-out rows ────┐┌──────────────────────────────────┐
    │3.600│                            ││loss          no step yet         │
    │     │                            ││held-out loss 3.1000              │
    │     │•                           ││                                  │
    │2.600│                            ││                                  │
    │     └────────────────────────────││                                  │
    │     0                           1││                                  │
    └──────────────────────────────────┘└──────────────────────────────────┘
    ┌ time of the last 20 steps ───────┐┌ seconds of each rank ────────────┐
    │data       0 %                    ││                                  │
    │forward    0 %                    ││                                  │
    │backward   0 %                    ││                                  │
    │waiting    0 %                    ││                                  │
    │update     0 %                    ││                                  │
    │save       0 %                    ││                                  │
    │other      0 %                    ││                                  │
    └──────────────────────────────────┘└──────────────────────────────────┘
    ┌──────────────────────────────────────────────────────────────────────┐
    │                                                                      │
    └──────────────────────────────────────────────────────────────────────┘
    "#);
}

#[test]
fn no_size_and_no_run_is_too_small_or_too_large() {
    let mut stopping = run(3, 1);
    stopping.is_stopping = true;
    assert!(screen(80, 24, &stopping, &[]).contains("stopping: the run saves"));
    for (columns, rows) in (0..90_u16).flat_map(|columns| (0..30_u16).map(move |rows| (columns, rows))) {
        if columns * rows > 0 && (columns % 23 == 0 || rows % 11 == 0 || columns + rows < 20) {
            screen(columns, rows, &run(5, 3), &SAID);
            screen(columns, rows, &run(0, 1), &[]);
        }
    }
    let many = screen(120, 40, &run(40, 64), &SAID);
    assert!(many.contains("and 58 more, 1.030 s at most"), "{many}");
}

#[test]
fn a_long_run_has_a_curve_of_bounded_length() {
    let mut figures = ScreenFigures::new("long");
    figures.begin(0, 100_000);
    (1..=100_000).for_each(|step| figures.step(&report(step, 1)));
    let points = figures.curve.points();
    assert!((256..1024).contains(&points.len()), "{}", points.len());
    assert!(points.is_sorted_by(|a, b| a.0 < b.0) && points.last().is_some_and(|last| last.0 > 99_000.0));
    (0..5000).for_each(|step| figures.eval(&EvalReport::new(step, 1.0, 1)));
    assert!(figures.evals.len() < 1100);
    screen(80, 24, &figures, &[]);
    // A loss that is equal at all steps, and one beyond all bounds.
    let mut flat = ScreenFigures::new("flat");
    flat.begin(0, 10);
    flat.step(&StepReport { step: 1, loss: 0.0, ..StepReport::default() });
    screen(80, 24, &flat, &[]);
    flat.step(&StepReport { step: 2, loss: 1e300, ..StepReport::default() });
    screen(80, 24, &flat, &[]);
}
