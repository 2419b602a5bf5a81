//! Reads the expressions of a tag like Jinja2's parser, and records their changes.

use std::ops::Range;

use super::edits::SourceEdits;
use super::literals;
use super::macro_traits::{MacroTraits, TemplateMacros};
use super::method_names::{is_dict_method, is_method};
use super::tags::{TagToken, TokenKind};

/// Maximum depth of nested expressions, the same as in minijinja.
const MAX_NESTING: usize = 150;

/// The bytes at which an expression begins and ends.
type Extent = (usize, usize);

/// Reads the tokens of one tag. Its functions return `None` at an unknown token.
pub(super) struct ExpressionReader<'a, 'e> {
    source: &'a str,
    tokens: &'a [TagToken],
    macros: &'a TemplateMacros,
    edits: &'e mut SourceEdits,
    at: usize,
    depth: usize,
}

impl<'a, 'e> ExpressionReader<'a, 'e> {
    pub(super) fn new(
        source: &'a str,
        tokens: &'a [TagToken],
        macros: &'a TemplateMacros,
        edits: &'e mut SourceEdits,
    ) -> Self {
        ExpressionReader { source, tokens, macros, edits, at: 0, depth: 0 }
    }

    fn token(&self, ahead: usize) -> Option<(&'a str, TokenKind)> {
        let token = self.tokens.get(self.at + ahead)?;
        Some((&self.source[token.range.clone()], token.kind))
    }

    /// The byte range of the next token.
    pub(super) fn range(&self) -> Option<Range<usize>> {
        self.tokens.get(self.at).map(|token| token.range.clone())
    }

    /// The end of the previous token.
    fn end(&self) -> usize {
        self.at.checked_sub(1).and_then(|at| self.tokens.get(at)).map_or(0, |token| token.range.end)
    }

    pub(super) fn skip(&mut self) {
        self.at += 1;
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at >= self.tokens.len()
    }

    pub(super) fn at_end(&self) -> Option<()> {
        self.is_at_end().then_some(())
    }

    pub(super) fn peek_operator(&self, operator: &str) -> bool {
        self.token(0) == Some((operator, TokenKind::Operator))
    }

    fn peek_name(&self, name: &str) -> bool {
        self.token(0) == Some((name, TokenKind::Name))
    }

    /// Consumes `operator` if it is next; returns its byte range.
    pub(super) fn operator(&mut self, operator: &str) -> Option<Range<usize>> {
        let range = self.range().filter(|_| self.peek_operator(operator))?;
        self.skip();
        Some(range)
    }

    /// Consumes `name` if it is next; returns its byte range.
    pub(super) fn name(&mut self, name: &str) -> Option<Range<usize>> {
        let range = self.range().filter(|_| self.peek_name(name))?;
        self.skip();
        Some(range)
    }

    /// Consumes any name; returns its byte range.
    pub(super) fn any_name(&mut self) -> Option<Range<usize>> {
        let range = self.range()?;
        let (_, kind) = self.token(0)?;
        self.skip();
        (kind == TokenKind::Name).then_some(range)
    }

    /// The number of recorded changes.
    pub(super) fn mark(&self) -> usize {
        self.edits.mark()
    }

    /// Writes text around an expression.
    pub(super) fn wrap(&mut self, start: usize, before: &str, end: usize, after: &str) {
        self.edits.before(start, before);
        self.edits.after(end, after);
    }

    /// Inserts text at `at`, where the tag's end begins.
    pub(super) fn insert(&mut self, at: usize, text: &str) {
        self.edits.after(at, text);
    }

    /// The text of a token.
    pub(super) fn text(&self, range: Range<usize>) -> &'a str {
        &self.source[range]
    }

    /// Replaces a token with text.
    pub(super) fn replace(&mut self, range: Range<usize>, text: &str) {
        self.edits.instead(range, text);
    }

    /// Reads the targets of a loop or an assignment. Returns the byte range of a namespace's name
    /// that begins with an underscore.
    pub(super) fn target(&mut self) -> Option<Option<Range<usize>>> {
        let mut hidden = None;
        loop {
            if self.peek_operator("(") {
                self.skip_brackets()?;
            } else {
                let start = self.any_name()?.start;
                while self.operator(".").is_some() {
                    let name = self.any_name()?;
                    if self.source[name.clone()].starts_with('_') {
                        hidden = Some(start..name.end);
                    }
                }
            }
            if self.operator(",").is_none() || self.peek_name("in") || self.peek_operator("=") {
                return Some(hidden);
            }
        }
    }

    /// Skips a bracket and its contents.
    pub(super) fn skip_brackets(&mut self) -> Option<()> {
        let mut depth = 0usize;
        loop {
            match self.token(0)?.0 {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.checked_sub(1)?,
                _ => {}
            }
            self.skip();
            if depth == 0 {
                return Some(());
            }
        }
    }

    /// Reads an expression, or a tuple of several with commas between them.
    pub(super) fn list(&mut self) -> Option<Extent> {
        self.tuple(Self::expression)
    }

    /// Like [`Self::list`], before the `if` of a loop.
    pub(super) fn loop_list(&mut self) -> Option<Extent> {
        self.tuple(Self::alternatives)
    }

    /// Adds brackets around a tuple, which minijinja requires in a tag and Jinja does not.
    fn tuple(&mut self, item: impl Fn(&mut Self) -> Option<Extent>) -> Option<Extent> {
        let (start, mut end) = item(self)?;
        let mut is_tuple = false;
        while let Some(comma) = self.operator(",") {
            (is_tuple, end) = (true, comma.end);
            if self.is_at_end() || self.peek_name("if") || self.peek_name("recursive") {
                break;
            }
            end = item(self)?.1;
        }
        if is_tuple {
            self.wrap(start, "(", end, ")");
        }
        Some((start, end))
    }

    /// Reads a chain of filters, without a value before the first.
    pub(super) fn filters(&mut self) -> Option<()> {
        self.operator("|");
        loop {
            self.filter()?;
            if self.operator("|").is_none() {
                return Some(());
            }
        }
    }

    /// `a if b else c`
    pub(super) fn expression(&mut self) -> Option<Extent> {
        self.nested(|reader| {
            let (start, mut end) = reader.alternatives()?;
            while reader.name("if").is_some() {
                end = reader.alternatives()?.1;
                if reader.name("else").is_some() {
                    end = reader.expression()?.1;
                }
            }
            Some((start, end))
        })
    }

    fn nested(&mut self, read: impl FnOnce(&mut Self) -> Option<Extent>) -> Option<Extent> {
        self.depth += 1;
        let extent = if self.depth > MAX_NESTING { None } else { read(self) };
        self.depth -= 1;
        extent
    }

    /// `a or b`
    pub(super) fn alternatives(&mut self) -> Option<Extent> {
        let (start, mut end) = self.negation()?;
        // `and` binds closer, but neither changes.
        while self.name("or").or_else(|| self.name("and")).is_some() {
            end = self.negation()?.1;
        }
        Some((start, end))
    }

    fn negation(&mut self) -> Option<Extent> {
        match self.name("not") {
            Some(not) => self.nested(|reader| Some((not.start, reader.negation()?.1))),
            None => self.comparison(),
        }
    }

    fn comparison(&mut self) -> Option<Extent> {
        let (start, mut end) = self.sum()?;
        let mut operators = Vec::new();
        loop {
            let range = self.range();
            let function = match self.token(0) {
                Some(("==" | "!=", TokenKind::Operator)) => "",
                Some(("<", TokenKind::Operator)) => "lt__(",
                Some((">", TokenKind::Operator)) => "gt__(",
                Some(("<=", TokenKind::Operator)) => "le__(",
                Some((">=", TokenKind::Operator)) => "ge__(",
                Some(("in", TokenKind::Name)) => "in__(",
                Some(("not", TokenKind::Name)) if self.token(1) == Some(("in", TokenKind::Name)) => {
                    self.skip();
                    "(not in__("
                }
                _ => break,
            };
            operators.push((function, range?.start..self.range()?.end));
            self.skip();
            end = self.sum()?.1;
        }
        // A chain of comparisons keeps minijinja's own.
        if let [(function, operator)] = &operators[..]
            && !function.is_empty()
        {
            self.replace(operator.clone(), ", ");
            self.wrap(start, function, end, if function.starts_with('(') { "))" } else { ")" });
        }
        Some((start, end))
    }

    fn sum(&mut self) -> Option<Extent> {
        let (start, mut end) = self.concatenation()?;
        while self.operator("+").or_else(|| self.operator("-")).is_some() {
            end = self.concatenation()?.1;
        }
        Some((start, end))
    }

    fn concatenation(&mut self) -> Option<Extent> {
        let first = self.range()?;
        let mut part = self.product()?;
        let mut is_text = self.is_text(first, part);
        if !self.peek_operator("~") {
            return Some(part);
        }
        let start = part.0;
        loop {
            if !is_text {
                self.wrap(part.0, "str__(", part.1, ")");
            }
            if self.operator("~").is_none() {
                return Some((start, part.1));
            }
            let first = self.range()?;
            part = self.product()?;
            is_text = self.is_text(first, part);
        }
    }

    /// Returns whether an expression is only a text, which requires no conversion.
    fn is_text(&self, first: Range<usize>, (start, end): Extent) -> bool {
        first == (start..end) && self.source[start..].starts_with(['"', '\''])
    }

    fn product(&mut self) -> Option<Extent> {
        let (start, mut end) = self.power()?;
        loop {
            let operator = match self.token(0) {
                Some((operator @ ("*" | "%" | "/" | "//"), TokenKind::Operator)) => operator,
                _ => return Some((start, end)),
            };
            let range = self.range()?;
            self.skip();
            end = self.power()?.1;
            if operator == "*" || operator == "%" {
                self.replace(range, ", ");
                self.wrap(start, if operator == "%" { "mod__(" } else { "mul__(" }, end, ")");
            }
        }
    }

    fn power(&mut self) -> Option<Extent> {
        let (start, mut end) = self.unary(true)?;
        while self.operator("**").is_some() {
            end = self.unary(true)?.1;
        }
        Some((start, end))
    }

    fn unary(&mut self, with_filters: bool) -> Option<Extent> {
        let (start, mut end) = if let Some(minus) = self.operator("-") {
            let (_, end) = self.nested(|reader| reader.unary(false))?;
            (minus.start, end)
        } else if let Some(plus) = self.operator("+") {
            let (_, end) = self.nested(|reader| reader.unary(false))?;
            self.replace(plus.clone(), "");
            self.wrap(plus.start, "pos__(", end, ")");
            (plus.start, end)
        } else {
            let extent = self.primary()?;
            self.postfix(extent)?
        };
        if with_filters {
            end = self.filters_and_tests(end)?;
        }
        Some((start, end))
    }

    fn filters_and_tests(&mut self, end: usize) -> Option<usize> {
        let mut end = end;
        loop {
            if self.operator("|").is_some() {
                self.filter()?;
            } else if self.name("is").is_some() {
                self.test()?;
            } else {
                return Some(end);
            }
            end = self.end();
        }
    }

    fn filter(&mut self) -> Option<()> {
        self.any_name()?;
        while self.operator(".").is_some() {
            self.any_name()?;
        }
        if self.peek_operator("(") {
            self.arguments()?;
        }
        Some(())
    }

    fn test(&mut self) -> Option<()> {
        self.name("not");
        self.any_name()?;
        while self.operator(".").is_some() {
            self.any_name()?;
        }
        match self.token(0) {
            Some(("(", TokenKind::Operator)) => self.arguments(),
            Some(("and" | "or" | "else" | "is" | "if" | "not" | "in" | "recursive", TokenKind::Name)) => {
                Some(())
            }
            Some(("[" | "{", _)) | Some((_, TokenKind::Name | TokenKind::Number | TokenKind::Text)) => {
                let extent = self.primary()?;
                self.postfix(extent).map(|_| ())
            }
            _ => Some(()),
        }
    }

    fn primary(&mut self) -> Option<Extent> {
        let range = self.range()?;
        let (text, kind) = self.token(0)?;
        self.skip();
        match (kind, text) {
            (TokenKind::Name | TokenKind::Number, _) => {}
            (TokenKind::Text, _) => {
                self.literal(range.clone());
                while let Some((_, TokenKind::Text)) = self.token(0) {
                    self.literal(self.range()?);
                    self.skip();
                }
            }
            (_, "(") => self.items(")", false)?,
            (_, "[") => self.items("]", false)?,
            (_, "{") => self.items("}", true)?,
            _ => return None,
        }
        Some((range.start, self.end()))
    }

    fn literal(&mut self, range: Range<usize>) {
        if let Some(resolved) = literals::resolve(&self.source[range.clone()]) {
            self.edits.instead(range, resolved);
        }
    }

    /// Reads the items of a bracket up to `close`; with `keys`, those of a dict.
    fn items(&mut self, close: &str, keys: bool) -> Option<()> {
        while self.operator(close).is_none() {
            self.expression()?;
            if keys {
                self.operator(":")?;
                self.expression()?;
            }
            if self.operator(",").is_none() {
                self.operator(close)?;
                break;
            }
        }
        Some(())
    }

    fn postfix(&mut self, (start, mut end): Extent) -> Option<Extent> {
        let base = &self.source[start..end];
        let mut traits = self.macros.get(base);
        let is_loop = base == "loop";
        loop {
            if let Some(dot) = self.operator(".") {
                self.attribute(start, dot, is_loop)?;
            } else if self.peek_operator("[") {
                self.subscript(start)?;
            } else if self.peek_operator("(") {
                let open = self.range()?.end;
                self.arguments_for(traits.hides())?;
                let close = self.end() - 1;
                if traits.packs() && open == close {
                    self.edits.after(open, "pack__()");
                } else if traits.packs() {
                    self.wrap(open, "pack__(", close, ")");
                }
            } else {
                return Some((start, end));
            }
            traits = MacroTraits::default();
            end = self.end();
        }
    }

    /// Reads the name after a dot. A method without a call becomes a value.
    fn attribute(&mut self, start: usize, dot: Range<usize>, is_loop: bool) -> Option<()> {
        let (name, kind) = self.token(0)?;
        let range = self.range()?;
        self.skip();
        if kind == TokenKind::Name && !self.peek_operator("(") && !is_loop && is_method(name) {
            self.replace(dot.start..range.end, &format!(", '{name}')"));
            self.edits.before(start, "attr__(");
        }
        matches!(kind, TokenKind::Name | TokenKind::Number).then_some(())
    }

    /// Reads an index or a slice.
    fn subscript(&mut self, start: usize) -> Option<()> {
        let open = self.operator("[")?;
        let literal = self.token(0).filter(|(_, kind)| *kind == TokenKind::Text).map(|(text, _)| text);
        let mut is_slice = false;
        if self.peek_operator(":") {
            self.edits.after(open.end, "none")
        } else {
            self.expression().map(|_| ())?
        }
        while let Some(colon) = self.operator(":") {
            is_slice = true;
            let end = colon.end;
            self.replace(colon, ", ");
            if self.peek_operator(":") || self.peek_operator("]") {
                self.edits.after(end, "none")
            } else {
                self.expression().map(|_| ())?
            }
        }
        let close = self.operator("]")?;
        let quoted = literal.and_then(|text| text.get(1..text.len() - 1));
        let function = match (is_slice, quoted) {
            (true, _) => "slice__(",
            (false, Some(name)) if close.start == open.end + name.len() + 2 && is_dict_method(name) => {
                "item__("
            }
            _ => return Some(()),
        };
        self.replace(open, ", ");
        self.replace(close, ")");
        self.edits.before(start, function);
        Some(())
    }

    /// Reads the arguments of a call, in their brackets.
    fn arguments(&mut self) -> Option<()> {
        self.arguments_for(false)
    }

    /// Reads the arguments of a call; with `hide`, of one to a macro with defaults.
    fn arguments_for(&mut self, hide: bool) -> Option<()> {
        self.operator("(")?;
        while self.operator(")").is_none() {
            let splat = self.operator("**").or_else(|| self.operator("*")).is_some();
            if !splat && self.token(1) == Some(("=", TokenKind::Operator)) {
                self.any_name()?;
                self.operator("=")?;
            }
            let (start, end) = self.expression()?;
            if hide && !splat {
                self.wrap(start, "given__(", end, ")");
            }
            if self.operator(",").is_none() {
                self.operator(")")?;
                break;
            }
        }
        Some(())
    }
}
