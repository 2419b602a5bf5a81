//! Cached plans of products: how a library describes each shape, and the algorithm for it.
//!
//! Algorithms differ in the order of their sums, so in the last bits. Rows that are not packed give
//! nearly every micro-batch another number of tokens. An algorithm is therefore chosen for a class
//! of token counts: a row is summed in the same order in all batches of a class, and a new number
//! of tokens costs a check instead of a choice.

use std::num::NonZeroUsize;

use lru::LruCache;

use super::gemm::{DeviceMatrix, Gemm, GemmElement};

/// Token counts from this number on are rounded up to a multiple of it.
const TOKENS: usize = 128;

/// A library that multiplies matrices by one of several algorithms.
pub(crate) trait GemmLibrary {
    /// The form in which the library describes a product.
    type Description;
    /// The library's name of an algorithm.
    type Algorithm: Copy;
    /// The error of each of the library's functions.
    type Error;
    /// The error of a product that no algorithm computes.
    const UNSUPPORTED: Self::Error;

    /// Describes a product.
    fn describe(&self, gemm: &Gemm) -> Result<Self::Description, Self::Error>;

    /// Returns at most `most` algorithms for a product with matrices of these alignments, in bytes;
    /// first the one that the library expects to be the fastest.
    fn ranking(
        &self,
        description: &Self::Description,
        alignments: [u32; 4],
        most: usize,
    ) -> Result<Vec<Self::Algorithm>, Self::Error>;

    /// Returns true if `algorithm`, chosen for another shape, also computes this product.
    fn is_supported(&self, description: &Self::Description, algorithm: &Self::Algorithm) -> bool;
}

/// The inputs of a library's choice of an algorithm.
#[derive(Debug, PartialEq, Eq, Hash)]
struct GemmPlanKey {
    size: [usize; 3],
    leading: [usize; 4],
    transposed: [bool; 2],
    elements: [GemmElement; 2],
    alignments: [u32; 4],
    has_scales: bool,
}

impl GemmPlanKey {
    fn of(gemm: &Gemm) -> Self {
        let matrices = [gemm.a, gemm.b, gemm.c, gemm.d];
        GemmPlanKey {
            size: gemm.size(),
            leading: matrices.map(|matrix| matrix.leading),
            transposed: gemm.transposed,
            elements: [gemm.operands, gemm.result],
            alignments: matrices.map(|matrix| alignment(&matrix)),
            has_scales: gemm.scales.is_some(),
        }
    }
}

/// Returns the largest power of two up to 256 that divides the matrix's address.
fn alignment(matrix: &DeviceMatrix) -> u32 {
    1 << matrix.arg.value.trailing_zeros().min(8)
}

/// Returns the product for whose shape the algorithm of `gemm` is chosen: `gemm` with the largest
/// number of tokens of its class. A few tokens have classes of their own, because a single one, as
/// in generation, is faster by other algorithms.
fn of_class(gemm: &Gemm) -> Gemm {
    let class = |n: usize| if n < TOKENS { n.next_power_of_two() } else { n.next_multiple_of(TOKENS) };
    let mut of_class = *gemm;
    let Gemm { a, b, c, d, .. } = &mut of_class;
    // A token is a column. The sum of a weight's gradient is over tokens; other products have them
    // in the result.
    if gemm.transposed[1] {
        (a.cols, b.cols) = (class(a.cols), class(b.cols));
    } else {
        (b.cols, c.cols, d.cols) = (class(b.cols), class(c.cols), class(d.cols));
    }
    of_class
}

/// The description of a shape, and the algorithm that multiplies it.
pub(crate) struct GemmPlan<L: GemmLibrary> {
    pub description: L::Description,
    pub algorithm: L::Algorithm,
}

/// The plans and choices that were used last.
pub(crate) struct GemmPlans<L: GemmLibrary> {
    plans: LruCache<GemmPlanKey, GemmPlan<L>>,
    /// The algorithm of each class; none if the library has none for it.
    choices: LruCache<GemmPlanKey, Option<L::Algorithm>>,
    /// The place of chosen algorithms in the library's ranking, from 0.
    algorithm_index: usize,
}

impl<L: GemmLibrary> GemmPlans<L> {
    /// Returns an empty cache of at most `limit` plans and as many choices, or of one each.
    pub(super) fn new(limit: usize) -> Self {
        let limit = NonZeroUsize::new(limit).unwrap_or(NonZeroUsize::MIN);
        GemmPlans { plans: LruCache::new(limit), choices: LruCache::new(limit), algorithm_index: 0 }
    }

    /// Chooses from now on the algorithm at `index` of the library's ranking, from 0, or the last
    /// of a shorter one.
    pub(crate) fn choose_algorithm(&mut self, index: usize) {
        self.plans.clear();
        self.choices.clear();
        self.algorithm_index = index;
    }

    /// Returns the plan of `gemm`: by the choice of its class or, if that does not compute its
    /// shape, by a choice of its own.
    ///
    /// # Errors
    /// Those of the library, and [`GemmLibrary::UNSUPPORTED`].
    pub(super) fn plan(&mut self, library: &L, gemm: &Gemm) -> Result<&GemmPlan<L>, L::Error> {
        let GemmPlans { plans, choices, algorithm_index } = self;
        let key = GemmPlanKey::of(gemm);
        let choose = |description: &L::Description, alignments| -> Result<_, L::Error> {
            let ranking = library.ranking(description, alignments, *algorithm_index + 1)?;
            Ok(ranking.last().copied())
        };
        let alignments = key.alignments;
        plans.try_get_or_insert(key, || {
            let class = of_class(gemm);
            let chosen = *choices.try_get_or_insert(GemmPlanKey::of(&class), || {
                choose(&library.describe(&class)?, alignments)
            })?;
            let description = library.describe(gemm)?;
            let algorithm = match chosen.filter(|chosen| library.is_supported(&description, chosen)) {
                Some(algorithm) => algorithm,
                None => choose(&description, alignments)?.ok_or(L::UNSUPPORTED)?,
            };
            Ok(GemmPlan { description, algorithm })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
    use crate::runtime::TensorMut;

    type Size = [usize; 3];

    /// A library whose algorithm is named by the shape that it was chosen for and its place.
    #[derive(Default)]
    struct FakeLibrary {
        /// The shapes that algorithms were chosen for.
        choices: RefCell<Vec<Size>>,
        /// The shapes that algorithms of other shapes do not compute.
        choosy: Vec<Size>,
        /// The shapes that no algorithm computes.
        unsupported: Vec<Size>,
        /// True if the next choice fails.
        fails: Cell<bool>,
        /// One reference more for each description.
        described: Rc<()>,
    }

    impl GemmLibrary for FakeLibrary {
        type Description = (Size, Rc<()>);
        type Algorithm = (Size, usize);
        type Error = &'static str;
        const UNSUPPORTED: &'static str = "unsupported";

        fn describe(&self, gemm: &Gemm) -> Result<(Size, Rc<()>), &'static str> {
            Ok((gemm.size(), Rc::clone(&self.described)))
        }

        fn ranking(
            &self,
            (size, _): &(Size, Rc<()>),
            _: [u32; 4],
            most: usize,
        ) -> Result<Vec<(Size, usize)>, &'static str> {
            if self.fails.take() {
                return Err("out of memory");
            }
            self.choices.borrow_mut().push(*size);
            let available = if self.unsupported.contains(size) { 0 } else { 3 };
            Ok((0..most.min(available)).map(|index| (*size, index)).collect())
        }

        fn is_supported(&self, (size, _): &(Size, Rc<()>), (chosen_for, _): &(Size, usize)) -> bool {
            size == chosen_for || !self.choosy.contains(size)
        }
    }

    /// The product of a layer from 64 to 32 columns, or one of its gradients, over `n` tokens.
    fn product(form: Transpose, n: usize) -> Gemm {
        let tensor = |rows, cols| Tensor::zeros((rows, cols), DType::F32, &Device::Cpu).expect("memory");
        let (x, y, weight) = (tensor(n, 64), tensor(n, 32), tensor(32, 64));
        let [dst, a, b] = match form {
            Transpose::Nt => [y, x, weight],
            Transpose::Nn => [x, y, weight],
            Transpose::Tn => [weight, y, x],
        };
        let dst = TensorMut::new(dst);
        let (dst, a, b) = (ColumnViewMut::all(&dst), ColumnView::all(&a), ColumnView::all(&b));
        let mut gemm = Gemm::new(&dst, &a, &b, form, 1.0, Addend::Nothing)
            .expect("the shapes fit")
            .expect("products support f32");
        // A choice depends on the alignment of addresses: all matrices have that of a GPU.
        for matrix in [&mut gemm.a, &mut gemm.b, &mut gemm.c, &mut gemm.d] {
            matrix.arg.value = 1 << 20;
        }
        gemm
    }

    const FORMS: [Transpose; 3] = [Transpose::Nt, Transpose::Nn, Transpose::Tn];

    #[test]
    fn token_counts_of_a_class_share_a_choice() {
        for form in FORMS {
            let (library, mut plans) = (FakeLibrary::default(), GemmPlans::new(1000));
            let size_of = |n| product(form, n).size();
            for n in 257..=512 {
                let plan = plans.plan(&library, &product(form, n)).expect("a plan");
                assert_eq!(plan.description.0, size_of(n));
                assert_eq!(plan.algorithm, (size_of(n.next_multiple_of(128)), 0), "{form:?}, {n} tokens");
            }
            assert_eq!(*library.choices.borrow(), [384, 512].map(size_of), "{form:?}");
        }
    }

    #[test]
    fn fewer_tokens_than_a_tile_have_classes_of_their_own() {
        for form in FORMS {
            let size = |n| product(form, n).size();
            let sizes = [1, 2, 3, 5, 64, 65, 127, 128, 129].map(|n| of_class(&product(form, n)).size());
            assert_eq!(sizes, [1, 2, 4, 8, 64, 128, 128, 128, 256].map(size), "{form:?}");
        }
    }

    #[test]
    fn other_dimensions_are_exact() {
        let (library, mut plans) = (FakeLibrary::default(), GemmPlans::new(1000));
        let mut other_leading = product(Transpose::Nt, 200);
        other_leading.d.leading += 8;
        let mut other_alignment = product(Transpose::Nt, 200);
        other_alignment.a.arg.value += 16;
        for gemm in [product(Transpose::Nt, 200), other_leading, other_alignment] {
            plans.plan(&library, &gemm).expect("a plan");
        }
        assert_eq!(library.choices.borrow().len(), 3);
    }

    #[test]
    fn a_shape_that_refuses_the_choice_of_its_class_gets_its_own() {
        let size = |n| product(Transpose::Nt, n).size();
        let (choosy, unsupported) = (vec![size(300)], vec![size(512), size(600)]);
        let library = FakeLibrary { choosy, unsupported, ..FakeLibrary::default() };
        let mut plans = GemmPlans::new(1000);
        let mut algorithm = |n| Ok(plans.plan(&library, &product(Transpose::Nt, n))?.algorithm.0);
        assert_eq!([algorithm(299), algorithm(300), algorithm(301)], [384, 300, 384].map(|n| Ok(size(n))));
        // The library computes no product of 512 tokens, but one of 400.
        assert_eq!([algorithm(400), algorithm(512)], [Ok(size(400)), Err("unsupported")]);
        assert_eq!([algorithm(600), algorithm(601)], [Ok(size(640)); 2]);
    }

    #[test]
    fn a_failed_choice_is_made_again() {
        let (library, mut plans) = (FakeLibrary::default(), GemmPlans::new(1000));
        library.fails.set(true);
        let gemm = product(Transpose::Nn, 300);
        assert_eq!(plans.plan(&library, &gemm).err(), Some("out of memory"));
        assert_eq!(plans.plan(&library, &gemm).map(|plan| plan.algorithm.0[1]), Ok(384));
    }

    #[test]
    fn the_least_recently_used_plan_makes_way() {
        let (library, mut plans) = (FakeLibrary::default(), GemmPlans::new(2));
        let mut plan = |n| plans.plan(&library, &product(Transpose::Nt, n)).map(drop);
        for n in [100, 200, 100, 300] {
            plan(n).expect("a plan");
        }
        let choices = || library.choices.borrow().iter().map(|size| size[1]).collect::<Vec<_>>();
        assert_eq!(choices(), [128, 256, 384]);
        // Two descriptions are left; 200 gave way, and its choice is still known.
        assert_eq!(Rc::strong_count(&library.described), 3);
        for n in [100, 200, 300] {
            plan(n).expect("a plan");
        }
        assert_eq!(choices(), [128, 256, 384]);
        plan(500).expect("a plan");
        plan(200).expect("a plan");
        assert_eq!(choices(), [128, 256, 384, 512, 256]);
        assert_eq!(Rc::strong_count(&library.described), 3);
    }

    #[test]
    fn a_place_of_the_ranking_is_chosen_for_all_shapes() {
        let (library, mut plans) = (FakeLibrary::default(), GemmPlans::new(1000));
        let algorithm = |plans: &mut GemmPlans<FakeLibrary>| {
            plans.plan(&library, &product(Transpose::Tn, 300)).expect("a plan").algorithm.1
        };
        assert_eq!(algorithm(&mut plans), 0);
        plans.choose_algorithm(2);
        assert_eq!(algorithm(&mut plans), 2);
        // The library has three.
        plans.choose_algorithm(7);
        assert_eq!(algorithm(&mut plans), 2);
        plans.choose_algorithm(0);
        assert_eq!(algorithm(&mut plans), 0);
    }
}
