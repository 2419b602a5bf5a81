//! The 8-bit floating-point type e4m3 without infinities (OCP OFP8 1.0; torch's `float8_e4m3fn`): 4
//! bits of exponent with bias 7, 3 of fraction.

/// The value of each code; 127 and 255 are NaN.
pub static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, fraction) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match exponent {
            15 if fraction == 7 => f32::NAN,
            0 => fraction as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
        };
        table[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    table
};

/// The largest value.
pub const MOST_E4M3: f32 = 448.0;

/// Returns the code of the value nearest to `x`, ties to even; beyond ±448 that of ±448. NaN stays
/// NaN. Branch-free, so that loops vectorize.
#[inline(always)]
pub fn to_e4m3(x: f32) -> u8 {
    /// The last place of 2^14 in f32 is 2^-9, the distance of the values below 2^-6.
    const COARSE: f32 = 16384.0;
    /// The smallest value of full precision, 2^-6.
    const LEAST_NORMAL: f32 = 0.015_625;
    let (bits, sign) = (x.to_bits() & 0x7fff_ffff, (x.to_bits() >> 24) & 0x80);
    let magnitude = f32::from_bits(bits);
    let normal = (bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) >> 20).wrapping_sub(120 << 3);
    let small = (magnitude + COARSE).to_bits().wrapping_sub(COARSE.to_bits());
    let code = if magnitude < LEAST_NORMAL { small } else { normal }.min(0x7e);
    (sign | if x.is_nan() { 0x7f } else { code }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_that_of_its_value() {
        for (code, value) in E4M3.iter().enumerate() {
            let nan = code & 0x7f == 0x7f;
            assert_eq!(value.is_nan(), nan);
            assert_eq!(to_e4m3(*value), code as u8, "{value}");
        }
    }

    /// The middle of two neighbours goes to the even one, and the next f32 on each side to the
    /// nearer one.
    #[test]
    fn ties_go_to_even() {
        for code in 0..0x7e_u8 {
            let [low, high] = [code, code + 1].map(|code| E4M3[usize::from(code)]);
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(to_e4m3(middle), even, "{middle}");
            assert_eq!(to_e4m3(-middle), even | 0x80, "-{middle}");
            assert_eq!([to_e4m3(middle.next_down()), to_e4m3(middle.next_up())], [code, code + 1]);
        }
    }

    #[test]
    fn large_values_saturate() {
        for (x, code) in [
            (448.0, 0x7e),
            (463.9, 0x7e),
            (464.0, 0x7e),
            (480.0, 0x7e),
            (f32::MAX, 0x7e),
            (f32::INFINITY, 0x7e),
            (-1e9, 0xfe),
            (f32::MIN_POSITIVE, 0),
            (-0.0, 0x80),
        ] {
            assert_eq!(to_e4m3(x), code, "{x}");
        }
    }
}
