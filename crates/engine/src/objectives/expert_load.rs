//! The load of experts, summed over micro-batches and ranks.

/// The load of the experts of all layers together; empty for a model without experts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertLoad {
    /// The number of tokens that chose each expert, `[E]`.
    pub picks: Vec<f64>,
    /// The number of tokens, counted once for each layer with experts.
    pub tokens: f64,
    /// The loss that balances the load, with its coefficient; 0 without it.
    pub balance: f64,
}

impl ExpertLoad {
    /// Adds the tokens of one layer: the number that chose each expert, and of all.
    pub(crate) fn add_layer(&mut self, picks: &[usize], tokens: usize) {
        self.picks.resize(picks.len(), 0.0);
        self.picks.iter_mut().zip(picks).for_each(|(sum, picks)| *sum += *picks as f64);
        self.tokens += tokens as f64;
    }

    /// Adds the load of another micro-batch.
    pub(crate) fn add(&mut self, other: ExpertLoad) {
        self.picks.resize(self.picks.len().max(other.picks.len()), 0.0);
        self.picks.iter_mut().zip(other.picks).for_each(|(mine, other)| *mine += other);
        self.tokens += other.tokens;
        self.balance += other.balance;
    }

    /// Returns the load, or zeros if the micro-batch does not count.
    pub(crate) fn counted(self, counts: bool) -> Self {
        let zeros = || vec![0.0; self.picks.len()];
        if counts { self } else { ExpertLoad { picks: zeros(), ..ExpertLoad::default() } }
    }

    /// Returns all numbers for a sum over ranks.
    pub(crate) fn values(&self) -> impl Iterator<Item = f64> + '_ {
        let has_experts = !self.picks.is_empty();
        let sums = [self.tokens, self.balance].into_iter().filter(move |_| has_experts);
        sums.chain(self.picks.iter().copied())
    }

    /// Replaces the numbers by their sums over ranks, in the order of [`ExpertLoad::values`].
    pub(crate) fn set(&mut self, values: &[f64]) {
        if let [tokens, balance, picks @ ..] = values {
            (self.tokens, self.balance) = (*tokens, *balance);
            self.picks.copy_from_slice(picks);
        }
    }

    /// Returns the load of each expert relative to the mean of all, `[E]`: 1 is balanced.
    pub fn relative(&self) -> Vec<f64> {
        let mean = self.picks.iter().sum::<f64>() / self.picks.len().max(1) as f64;
        self.picks.iter().map(|picks| picks / mean).collect()
    }
}
