//! Activations of MLPs without a gate.

use candle_core::{Device, Tensor, Var};

use super::{Pull, close, normal, pulled, var, zeros};
use crate::error::Result;
use crate::ops::activation::{self, PlainActivation};
use crate::ops::xielu;

#[test]
fn xielus() -> Result<()> {
    let (x, dh) = (var("x", (9, 12))?, normal("dh", (9, 12))?);
    let curve = Var::from_tensor(&Tensor::new(&[0.8f32, 1.3, 0.5, -1e-6], &Device::Cpu)?)?;
    let number = |at: usize| -> Result<Tensor> { Ok(curve.narrow(0, at, 1)?.reshape((1, 1))?) };
    let positive = x.relu()?;
    let negative = (&*x - &positive)?;
    let curved = ((negative.exp()? - 1.0)? - &negative)?;
    let bent = positive.powf(2.0)?.broadcast_mul(&number(0)?)?;
    let h = ((bent + curved.broadcast_mul(&number(1)?)?)? + x.broadcast_mul(&number(2)?)?)?;
    close("h", &xielu::reference(&x, &curve)?, &h)?;
    let store = h.apply_op1(Pull(dh.clone()))?.backward()?;
    let dcurve = zeros(2)?;
    let dx = xielu::reference_backward(&x, &dh, &curve, Some(&dcurve))?;
    close("dx", &dx, store.get(&x).expect("the tape has a gradient"))?;
    close("dcurve", &dcurve, &store.get(&curve).expect("the tape has a gradient").narrow(0, 0, 2)?)
}

#[test]
fn activations_without_a_gate() -> Result<()> {
    for activation in activation::cases::KINDS {
        let (x, dh) = (var("x", (9, 12))?, normal("dh", (9, 12))?);
        let h = match activation {
            PlainActivation::Relu2 => x.relu()?.powf(2.0)?,
            PlainActivation::Gelu => x.gelu_erf()?,
            PlainActivation::GeluTanh => x.gelu()?,
        };
        close("h", &activation::reference(&x, activation)?, &h)?;
        let [want] = pulled(&h, &dh, [&x])?;
        close("dx", &activation::reference_backward(&x, &dh, activation)?, &want)?;
    }
    Ok(())
}
