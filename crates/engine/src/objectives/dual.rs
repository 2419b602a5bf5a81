//! Numbers with their derivatives by two variables (forward-mode differentiation), so that the loss
//! of a pair is written once, as its formula.

use std::f64::consts::LN_2;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A value and its derivatives by two variables.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Dual {
    /// The number itself.
    pub(super) value: f64,
    /// The derivative by each variable.
    pub(super) slopes: [f64; 2],
}

impl Dual {
    /// Returns the two variables at these values.
    pub(super) fn variables([first, second]: [f64; 2]) -> [Dual; 2] {
        [Dual { value: first, slopes: [1.0, 0.0] }, Dual { value: second, slopes: [0.0, 1.0] }]
    }

    /// Returns a function of this number, given the function's value and slope there.
    fn chain(self, value: f64, slope: f64) -> Self {
        Dual { value, slopes: self.slopes.map(|own| own * slope) }
    }

    pub(super) fn exp(self) -> Self {
        let exp = self.value.exp();
        self.chain(exp, exp)
    }

    pub(super) fn square(self) -> Self {
        self.chain(self.value * self.value, 2.0 * self.value)
    }

    /// Returns 1 / (1 + e^−x).
    pub(super) fn sigmoid(self) -> Self {
        let value = sigmoid(self.value);
        self.chain(value, value * sigmoid(-self.value))
    }

    /// Returns log(1 / (1 + e^−x)).
    pub(super) fn log_sigmoid(self) -> Self {
        let value = self.value.min(0.0) - (-self.value.abs()).exp().ln_1p();
        self.chain(value, sigmoid(-self.value))
    }

    /// Returns log(1 − e^x), for x below 0.
    pub(super) fn log_one_minus_exp(self) -> Self {
        let x = self.value;
        let value = if x > -LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() };
        self.chain(value, x.exp() / x.exp_m1())
    }

    /// Returns the number, or 0 if it is negative.
    pub(super) fn at_least_zero(self) -> Self {
        // A NaN stays a NaN.
        if self.value < 0.0 { self.chain(0.0, 0.0) } else { self }
    }

    /// Returns the number, or `most` if it is larger.
    pub(super) fn at_most(self, most: f64) -> Self {
        if self.value > most { self.chain(most, 0.0) } else { self }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Add for Dual {
    type Output = Dual;
    fn add(self, other: Dual) -> Dual {
        let [a, b] = [self.slopes, other.slopes];
        Dual { value: self.value + other.value, slopes: [a[0] + b[0], a[1] + b[1]] }
    }
}

impl Sub for Dual {
    type Output = Dual;
    fn sub(self, other: Dual) -> Dual {
        self + -other
    }
}

impl Mul for Dual {
    type Output = Dual;
    fn mul(self, other: Dual) -> Dual {
        self.chain(self.value * other.value, other.value) + other.chain(0.0, self.value)
    }
}

impl Neg for Dual {
    type Output = Dual;
    fn neg(self) -> Dual {
        self * -1.0
    }
}

impl Add<f64> for Dual {
    type Output = Dual;
    fn add(self, number: f64) -> Dual {
        Dual { value: self.value + number, ..self }
    }
}

impl Sub<f64> for Dual {
    type Output = Dual;
    fn sub(self, number: f64) -> Dual {
        self + -number
    }
}

impl Mul<f64> for Dual {
    type Output = Dual;
    fn mul(self, factor: f64) -> Dual {
        self.chain(self.value * factor, factor)
    }
}

impl Div<f64> for Dual {
    type Output = Dual;
    fn div(self, number: f64) -> Dual {
        self * (1.0 / number)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Compares the derivatives of `function` at `at` with central differences, relative to their
    /// size or 1.
    pub(in super::super) fn slopes_are_right(what: &str, at: [f64; 2], function: impl Fn([Dual; 2]) -> Dual) {
        let value = |x: [f64; 2]| function(Dual::variables(x)).value;
        let slopes = function(Dual::variables(at)).slopes;
        for side in 0..2 {
            let step = 1e-5 * at[side].abs().max(1.0);
            let moved = |by: f64| {
                let mut x = at;
                x[side] += by;
                value(x)
            };
            let wanted = (moved(step) - moved(-step)) / (2.0 * step);
            let distance = (slopes[side] - wanted).abs() / wanted.abs().max(1.0);
            assert!(distance < 1e-8, "{what} at {at:?}: {slopes:?}, by differences {wanted} for side {side}");
        }
    }

    #[test]
    fn each_function_has_its_derivative() {
        for x in [-700.0, -31.5, -2.5, -0.3] {
            for y in [-40.0, -1.0, 0.25, 3.0, 690.0] {
                slopes_are_right("sigmoid", [x, y], |[x, y]| (x - y).sigmoid() + y.sigmoid());
                slopes_are_right("log-sigmoid", [x, y], |[x, y]| x.log_sigmoid() * 0.5 - y.log_sigmoid());
                slopes_are_right("square", [x, y], |[x, y]| (x * y / 100.0).square() + 3.0);
                slopes_are_right("bounds", [x, y], |[x, y]| {
                    (x - y).at_least_zero() + (x - 1.0).at_most(-2.0)
                });
            }
            slopes_are_right("log(1 − e^x)", [x, -1.0], |[x, y]| {
                x.log_one_minus_exp() + y.log_one_minus_exp()
            });
            slopes_are_right("exp", [x, 1.0], |[x, y]| x.exp() * y.exp());
        }
    }

    /// Extremes neither overflow nor lose their sign.
    #[test]
    fn extremes_are_finite() {
        let at = |x: f64| Dual::variables([x, 0.0])[0];
        assert_eq!(at(-1e4).log_sigmoid().value, -1e4);
        assert_eq!(at(-1e4).log_sigmoid().slopes[0], 1.0);
        assert_eq!(at(1e4).log_sigmoid().value, 0.0);
        assert_eq!(at(-1e4).sigmoid(), Dual { value: 0.0, slopes: [0.0; 2] });
        assert_eq!(at(-1e4).log_one_minus_exp().value, 0.0);
        assert!(at(f64::NAN).at_least_zero().value.is_nan());
    }
}
