//! Finds anchored text in CUDA, token by token: spaces, line breaks and comments don't matter, and the function around
//! a place is told by its braces, never by a line number.

use std::ops::Range;

use super::{Site, line_of};
use crate::tables::Anchor;

/// A CUDA file, cut into tokens.
pub struct Source<'s> {
    text: &'s [u8],
    tokens: Vec<Token>,
    functions: Vec<Function<'s>>,
}

#[derive(Debug, Clone)]
struct Token {
    bytes: Range<usize>,
    /// Part of a preprocessor line, which has no say in how braces nest.
    directive: bool,
}

/// A function with a body.
#[derive(Debug)]
struct Function<'s> {
    name: &'s [u8],
    body: Range<usize>,
}

impl<'s> Source<'s> {
    pub fn new(text: &'s [u8]) -> Self {
        let tokens = tokenize(text);
        let functions = functions(text, &tokens);
        Self { text, tokens, functions }
    }

    /// The places of an anchor, in the order of the file, however many there are.
    pub fn find(&self, anchor: &Anchor) -> Vec<Site> {
        let wanted_text = anchor.find.as_bytes();
        let wanted: Vec<&[u8]> = tokenize(wanted_text).iter().map(|token| &wanted_text[token.bytes.clone()]).collect();
        let Some(head) = wanted.first() else { return Vec::new() };
        let inside = |name: &str, at: usize| {
            self.functions.iter().any(|function| function.name == name.as_bytes() && function.body.contains(&at))
        };
        let is = |index: usize, token: &[u8]| self.tokens.get(index).is_some_and(|t| self.text_of(t) == token);
        let mut sites = Vec::new();
        for first in 0..self.tokens.len() {
            if !wanted.iter().enumerate().all(|(i, token)| is(first + i, token)) {
                continue;
            }
            // `std::optional` is not found in `cuda::std::optional`.
            if is_word(head[0]) && first > 0 && (is(first - 1, b"::") || is(first - 1, b".")) {
                continue;
            }
            let bytes = self.tokens[first].bytes.start..self.tokens[first + wanted.len() - 1].bytes.end;
            if anchor.within.as_ref().is_some_and(|name| !inside(name, bytes.start))
                || anchor.outside.as_ref().is_some_and(|name| inside(name, bytes.start))
            {
                continue;
            }
            sites.push(Site { line: line_of(self.text, bytes.start), bytes });
        }
        sites
    }

    /// Whether a word stands in the file as a token of its own.
    pub fn has_word(&self, word: &str) -> bool {
        self.tokens.iter().any(|token| self.text_of(token) == word.as_bytes())
    }

    fn text_of(&self, token: &Token) -> &'s [u8] {
        &self.text[token.bytes.clone()]
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn tokenize(text: &[u8]) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut at = 0;
    let mut directive = false;
    let mut line_start = true;
    let starts = |at: usize, what: &[u8]| text[at..].starts_with(what);
    while at < text.len() {
        let byte = text[at];
        let start = at;
        match byte {
            b'\\' if starts(at, b"\\\n") => at += 2,
            b'\\' if starts(at, b"\\\r\n") => at += 3,
            b'\n' => {
                (directive, line_start) = (false, true);
                at += 1;
            }
            _ if byte.is_ascii_whitespace() => at += 1,
            _ if starts(at, b"//") => at += text[at..].iter().position(|b| *b == b'\n').unwrap_or(text.len() - at),
            _ if starts(at, b"/*") => {
                let end = text[at + 2..].windows(2).position(|w| w == b"*/");
                at = end.map_or(text.len(), |end| at + 2 + end + 2);
            }
            _ => {
                directive |= line_start && byte == b'#';
                line_start = false;
                if byte == b'"' || byte == b'\'' {
                    at += 1;
                    while at < text.len() && text[at] != byte && text[at] != b'\n' {
                        at += if text[at] == b'\\' { 2 } else { 1 };
                    }
                    at = (at + usize::from(text.get(at) == Some(&byte))).min(text.len());
                } else if is_word(byte) {
                    at += text[at..].iter().position(|b| !is_word(*b)).unwrap_or(text.len() - at);
                } else if starts(at, b"::") {
                    at += 2;
                } else {
                    at += 1;
                }
                tokens.push(Token { bytes: start..at, directive });
            }
        }
    }
    tokens
}

/// The functions of a file that stand in no other function. Namespaces, classes and `extern "C"` are looked into.
fn functions<'s>(text: &'s [u8], tokens: &[Token]) -> Vec<Function<'s>> {
    let code: Vec<(&'s [u8], Range<usize>)> =
        tokens.iter().filter(|token| !token.directive).map(|token| (&text[token.bytes.clone()], token.bytes.clone())).collect();
    let is = |at: usize, token: &[u8]| code.get(at).is_some_and(|(t, _)| *t == token);
    // The index behind the bracket that closes the one at `at`; the end of the file when none does.
    let behind = |at: usize, open: &[u8], close: &[u8]| {
        let mut depth = 0usize;
        let mut at = at;
        while at < code.len() {
            if is(at, open) {
                depth += 1;
            } else if is(at, close) {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            at += 1;
        }
        code.len()
    };
    let mut functions = Vec::new();
    let mut at = 0;
    // Where the current declaration starts, and the last name of it that is followed by an argument list.
    let mut declaration = 0;
    let mut candidate = None;
    while at < code.len() {
        if is(at, b"(") {
            let named = at > declaration && is_word(code[at - 1].0[0]);
            let name = at.wrapping_sub(1);
            at = behind(at, b"(", b")");
            // Attributes with arguments stand before the name: only a name whose list ends the head counts.
            let ends_head = [&b"{"[..], b":", b"const", b"noexcept", b"override", b"-"].iter().any(|token| is(at, token));
            if candidate.is_none() && named && ends_head {
                candidate = Some(name);
            }
        } else if is(at, b"{") {
            let end = behind(at, b"{", b"}");
            let scope = code[declaration..at]
                .iter()
                .any(|(token, _)| [&b"namespace"[..], b"struct", b"class", b"extern"].contains(token));
            match candidate.take() {
                Some(name) => {
                    let last = code[end - 1].1.end;
                    functions.push(Function { name: code[name].0, body: code[at].1.start..last });
                    at = end;
                }
                None if scope => at += 1,
                None => at = end,
            }
            declaration = at;
        } else {
            if is(at, b";") || is(at, b"}") {
                declaration = at + 1;
                candidate = None;
            }
            at += 1;
        }
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anchor(find: &str) -> Anchor {
        Anchor {
            find: find.to_owned(),
            count: 1,
            within: None,
            outside: None,
            any_order: false,
            replace: None,
            before: None,
            after: None,
        }
    }

    fn lines(source: &str, anchor: &Anchor) -> Vec<usize> {
        Source::new(source.as_bytes()).find(anchor).iter().map(|site| site.line).collect()
    }

    #[test]
    fn spaces_line_breaks_and_comments_do_not_matter() {
        let source = "a = f( /* the\n size */ x,\n   y) ; // f(x, y)\n\"f(x, y)\"; f(x,y);";
        assert_eq!(lines(source, &anchor("f(x, y)")), [1, 4]);
        let site = &Source::new(source.as_bytes()).find(&anchor("f(x, y)"))[0];
        assert_eq!(&source[site.bytes.clone()], "f( /* the\n size */ x,\n   y)");
    }

    #[test]
    fn a_token_is_whole_and_a_name_is_not_the_tail_of_another() {
        assert_eq!(lines("i + tp_size; i + tp_size2;\ni + tp_size * 2;", &anchor("i + tp_size")), [1, 2]);
        assert_eq!(lines("cuda::std::optional<int> a;\nstd::optional<int> b;", &anchor("std::optional<")), [2]);
        assert_eq!(lines("cfg.size = 8;\nsize = 8;", &anchor("size = 8")), [2]);
    }

    #[test]
    fn the_function_around_a_place_is_told_by_its_braces() {
        let source = r#"
namespace a { namespace b {
template <typename T, bool B = false>
__global__ void __launch_bounds__(1024, 1)
    first(Params<T> p) {
#if X < 1
  if (p) { here; }
#endif
}
#define M(x) { here; }
class C { public: C() : m(1) { here; } int operator()(int x) const { here; return x; } int m; };
static inline int second(int x) { auto f = [&](int y) { here; }; return '}' + "}{"[0]; }
int here;
}}
"#;
        let within = |name: &str| lines(source, &Anchor { within: Some(name.to_owned()), ..anchor("here") });
        assert_eq!(within("first"), [7]);
        assert_eq!(within("second"), [12]);
        assert_eq!(within("C"), [11]);
        let outside = Anchor { outside: Some("first".to_owned()), ..anchor("here") };
        assert_eq!(lines(source, &outside), [10, 11, 11, 12, 13]);
    }

    #[test]
    fn odd_text_ends_the_reading_without_harm() {
        for source in ["\"", "'\\", "/*", "#", "{{{", ")))", "f(", "f(x) {", "\\", "é", "}"] {
            let _ = Source::new(source.as_bytes()).find(&anchor("x"));
        }
    }
}
