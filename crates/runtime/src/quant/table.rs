//! Codes of the signed dynamic map for weights and scales, equal to those of bitsandbytes' CPU
//! library.
//!
//! The library looks codes up in a table: it rounds a value to the nearest of 65536 evenly spaced
//! numbers from -1 to 1, and uses that number's nearest code. So a value within 1.5e-5 of the
//! midpoint of two codes may get either, and zero, which is not in the table, has the code of
//! 1.5e-5. Midpoints are common in bf16 weights, and few distinct scales turn one such value into
//! many codes. Optimizer states, where zero must stay zero, use the nearest code:
//! [`super::DynamicMap`].

use std::sync::LazyLock;

use super::codes::dynamic_signed;
use super::magnitude::largest;

const LEN: usize = 1 << 16;

static CODES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let map = dynamic_signed();
    let mut code = 0;
    let codes = (0..LEN).map(|i| {
        let value = -1.0 + (2 * i) as f32 / (LEN - 1) as f32;
        while code < 255 && 0.5 * (map[code] + map[code + 1]) < value {
            code += 1;
        }
        code as u8
    });
    codes.collect()
});

/// Writes the codes of one block of `values` and returns its scale, the largest magnitude.
pub(super) fn quantize(values: &[f32], codes: &mut [u8]) -> f32 {
    let absmax = largest(values);
    if absmax == 0.0 {
        codes.fill(0);
        return absmax;
    }
    let (factor, table) = (1.0 / absmax, &CODES[..LEN]);
    for (code, value) in codes.iter_mut().zip(values) {
        let scaled = (value * factor).clamp(-1.0, 1.0);
        *code = table[((scaled + 1.0) * 0.5 * (LEN - 1) as f32 + 0.5) as usize & (LEN - 1)];
    }
    absmax
}
