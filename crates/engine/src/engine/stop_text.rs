//! Search for texts that end an answer, while the answer arrives in pieces.

/// A search for stop texts in one answer. It holds back text that may begin a stop text.
#[derive(Debug)]
pub struct StopSearch<'a> {
    stops: &'a [String],
    held: String,
}

impl<'a> StopSearch<'a> {
    /// Creates a search for any of `stops`, none of which is empty.
    pub fn new(stops: &'a [String]) -> Self {
        StopSearch { stops, held: String::new() }
    }

    /// Adds a piece of the answer. Returns the text that no stop text can contain any more, and
    /// whether a stop text was found. The first complete stop text counts; if several end at the
    /// same character, the longest. So the result does not depend on how the answer is split into
    /// pieces.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        let mut ready = String::new();
        for character in piece.chars() {
            self.held.push(character);
            let complete = self.stops.iter().filter(|stop| self.held.ends_with(stop.as_str()));
            if let Some(stop) = complete.max_by_key(|stop| stop.len()) {
                self.held.truncate(self.held.len() - stop.len());
                ready.push_str(&std::mem::take(&mut self.held));
                return (ready, true);
            }
            let begins = |from: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*from..]));
            let beginnings = self.held.char_indices().map(|(from, _)| from);
            let keep = beginnings.into_iter().find(begins).unwrap_or(self.held.len());
            ready.extend(self.held.drain(..keep));
        }
        (ready, false)
    }

    /// Returns the text held back at the end of an answer without a stop text.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the answer up to the first stop text, and whether one was found.
    fn answer(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let (mut search, mut text) = (StopSearch::new(&stops), String::new());
        for piece in pieces {
            let (ready, is_end) = search.push(piece);
            text.push_str(&ready);
            if is_end {
                return (text, true);
            }
        }
        (text + &search.finish(), false)
    }

    #[test]
    fn an_answer_ends_before_a_stop_text_however_it_is_cut() {
        for (stops, text, wanted, is_stopped) in [
            (&[][..], "all of it", "all of it", false),
            (&["of"], "all of it", "all ", true),
            (&["\n\n"], "one\n\ntwo", "one", true),
            (&["\n\n"], "one\n", "one\n", false),
            (&["aab"], "aaab", "a", true),
            (&["abac"], "abababac", "abab", true),
            (&["abc", "b"], "xabc", "xa", true),
            (&["bc", "abc"], "xabcd", "x", true),
            (&["ende"], "das Ende: end", "das Ende: end", false),
            (&["é🙂"], "café🙂!", "caf", true),
            (&["all"], "all of it", "", true),
        ] {
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
            assert_eq!(answer(stops, &characters), (wanted.to_owned(), is_stopped), "{stops:?} in {text:?}");
            for (middle, _) in text.char_indices() {
                let (first, rest) = text.split_at(middle);
                assert_eq!(
                    answer(stops, &[first, rest]),
                    (wanted.to_owned(), is_stopped),
                    "{stops:?} in {text:?}"
                );
            }
        }
    }

    #[test]
    fn text_is_held_back_only_while_a_stop_text_may_come() {
        let stops = ["END".to_owned()];
        let mut search = StopSearch::new(&stops);
        assert_eq!(search.push("the E"), ("the ".to_owned(), false));
        assert_eq!(search.push("N"), (String::new(), false));
        assert_eq!(search.push("d"), ("ENd".to_owned(), false));
        assert_eq!(search.finish(), "");
    }
}
