//! Finds places in Python by syntax tree: a gate in its function, in its call, in its keyword; an anchor as one whole
//! expression or statement. Comments, spaces and line breaks don't matter; the same text in another function is no such place.

use std::fmt;
use std::ops::Range;

use tree_sitter::{Node, Parser, Tree};

use super::{Site, line_of};
use crate::tables::{self, Anchor};

/// A Python file as a syntax tree.
pub struct Source<'s> {
    text: &'s [u8],
    tree: Tree,
    /// The qualified name (`Class.method`) and the bytes of each function.
    functions: Vec<(String, Range<usize>)>,
}

impl<'s> Source<'s> {
    /// Reads `text`. Where it is no valid Python, nothing is found.
    pub fn new(text: &'s [u8]) -> Self {
        let tree = tree_of(text);
        let mut functions = Vec::new();
        name_functions(tree.root_node(), text, "", &mut functions);
        Self { text, tree, functions }
    }

    /// The places of an anchor, in the order of the file, however many there are.
    pub fn find(&self, anchor: &Anchor) -> Vec<Site> {
        let pattern = tree_of(anchor.find.as_bytes());
        let mut wanted = Vec::new();
        tokens(pattern.root_node(), &mut |token| {
            wanted.push(&anchor.find.as_bytes()[token]);
            true
        });
        // Only what touches a named function can hold a place in it.
        let named =
            |name: &String| self.functions.iter().filter(|(known, _)| known == name).map(|(_, bytes)| bytes.clone()).collect();
        let regions: Option<Vec<Range<usize>>> = anchor.within.as_ref().map(named);
        let inside = |name: &str, at: usize| self.functions.iter().any(|(known, bytes)| known == name && bytes.contains(&at));
        let mut sites = Vec::new();
        let mut found = |bytes: Range<usize>| {
            let in_place = anchor.within.as_ref().is_none_or(|name| inside(name, bytes.start))
                && anchor.outside.as_ref().is_none_or(|name| !inside(name, bytes.start));
            if in_place {
                sites.push(Site { line: line_of(self.text, bytes.start), bytes });
            }
        };
        match anchor.any_order {
            true => {
                let chain = chain_in(pattern.root_node(), anchor.find.as_bytes());
                let chain = chain.expect("an anchor in any order is one chain; the tables' own test looks at it");
                self.search_chain(self.tree.root_node(), &chain, regions.as_deref(), &mut found);
            }
            false => self.search(self.tree.root_node(), &wanted, regions.as_deref(), &mut found),
        }
        sites
    }

    /// Hands over the chains of `and` or of `or` that have exactly the operands of `wanted`, in any order.
    fn search_chain(
        &self,
        node: Node<'_>,
        wanted: &Chain<'_>,
        regions: Option<&[Range<usize>]>,
        found: &mut impl FnMut(Range<usize>),
    ) {
        let touches = |region: &Range<usize>| region.start < node.end_byte() && node.start_byte() < region.end;
        if regions.is_some_and(|regions| !regions.iter().any(touches)) {
            return;
        }
        if node.kind() == BOOLEAN && chain(node, self.text).as_ref() == Some(wanted) {
            return found(node.byte_range());
        }
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor) {
            self.search_chain(child, wanted, regions, found);
        }
    }

    /// Hands over the outermost nodes that consist of the tokens `wanted`, of those that touch one of `regions` (all without).
    fn search(&self, node: Node<'_>, wanted: &[&[u8]], regions: Option<&[Range<usize>]>, found: &mut impl FnMut(Range<usize>)) {
        let touches = |region: &Range<usize>| region.start < node.end_byte() && node.start_byte() < region.end;
        if regions.is_some_and(|regions| !regions.iter().any(touches)) {
            return;
        }
        // A look at the first bytes saves walking a tree for each node. A comment or a space there hides the first token.
        let text = &self.text[node.start_byte()..];
        let may_begin =
            |first: &&[u8]| text.starts_with(first) || text.first().is_some_and(|b| *b == b'#' || b.is_ascii_whitespace());
        let mut rest = wanted.iter();
        let same = wanted.first().is_some_and(may_begin)
            && tokens(node, &mut |token| rest.next().is_some_and(|next| *next == &self.text[token]));
        if same && rest.next().is_none() && !wanted.is_empty() {
            return found(node.byte_range());
        }
        let mut cursor = node.walk();
        for child in node.named_children(&mut cursor) {
            self.search(child, wanted, regions, found);
        }
    }
}

/// How the grammar calls `a and b` and `a or b`.
const BOOLEAN: &str = "boolean_operator";

/// `a or b or c`: the operator, and the tokens of each operand, sorted.
type Chain<'s> = (&'s [u8], Vec<Vec<&'s [u8]>>);

/// The chain that a boolean node is.
fn chain<'s>(node: Node<'_>, source: &'s [u8]) -> Option<Chain<'s>> {
    let operator = text(node.child_by_field_name("operator")?, source);
    let mut operands = Vec::new();
    let mut left = node;
    // `a or b or c` is `(a or b) or c` in the tree.
    while left.kind() == BOOLEAN && text(left.child_by_field_name("operator")?, source) == operator {
        operands.push(tokens_of(left.child_by_field_name("right")?, source));
        left = left.child_by_field_name("left")?;
    }
    operands.push(tokens_of(left, source));
    operands.sort();
    Some((operator, operands))
}

/// The first chain below a node.
fn chain_in<'s>(node: Node<'_>, source: &'s [u8]) -> Option<Chain<'s>> {
    match node.kind() {
        BOOLEAN => chain(node, source),
        _ => chain_in(node.named_child(0)?, source),
    }
}

/// Whether the text is one chain of `and` or of `or`.
pub fn is_chain(text: &str) -> bool {
    let tree = tree_of(text.as_bytes());
    let root = tree.root_node();
    let statement = root.named_child(0).filter(|_| root.named_child_count() == 1);
    statement.and_then(|statement| statement.named_child(0)).is_some_and(|node| node.kind() == BOOLEAN)
}

fn tokens_of<'s>(node: Node<'_>, source: &'s [u8]) -> Vec<&'s [u8]> {
    let mut all = Vec::new();
    tokens(node, &mut |token| {
        all.push(&source[token]);
        true
    });
    all
}

fn name_functions(node: Node<'_>, source: &[u8], scope: &str, functions: &mut Vec<(String, Range<usize>)>) {
    let definition = matches!(node.kind(), "function_definition" | "class_definition");
    let name = definition.then(|| node.child_by_field_name("name")).flatten();
    let qualified = name.map(|name| match (scope, String::from_utf8_lossy(text(name, source))) {
        ("", name) => name.into_owned(),
        (scope, name) => format!("{scope}.{name}"),
    });
    let scope = qualified.as_deref().unwrap_or(scope);
    if node.kind() == "function_definition" {
        functions.push((scope.to_owned(), node.byte_range()));
    }
    let mut cursor = node.walk();
    for child in node.named_children(&mut cursor) {
        // Most of a file is in these, and no definition is.
        if !matches!(
            child.kind(),
            "expression_statement"
                | "return_statement"
                | "import_statement"
                | "import_from_statement"
                | "parameters"
                | "decorator"
        ) {
            name_functions(child, source, scope, functions);
        }
    }
}

/// Hands over the tokens of a node, one after another, while `take` wants more. Returns whether it wanted all.
/// A comment is no token, nor is the comma behind the last argument of a call.
fn tokens(node: Node<'_>, take: &mut impl FnMut(Range<usize>) -> bool) -> bool {
    if node.is_extra() {
        return true;
    }
    let mut cursor = node.walk();
    let children: Vec<Node> = node.children(&mut cursor).filter(|child| !child.is_extra()).collect();
    if children.is_empty() {
        return node.byte_range().is_empty() || take(node.byte_range());
    }
    let kind = |at: usize| children.get(at).map_or("", |child| child.kind());
    let last_comma = |at: usize| node.kind() == "argument_list" && kind(at) == "," && kind(at + 1) == ")";
    (0..children.len()).all(|at| last_comma(at) || tokens(children[at], take))
}

fn tree_of(source: &[u8]) -> Tree {
    let mut parser = Parser::new();
    parser.set_language(&tree_sitter_python::LANGUAGE.into()).expect("the grammar fits the parser's version");
    parser.parse(source, None).expect("without a time limit the parser always ends with a tree")
}

/// A list of major versions in a generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gate {
    /// The list, with its brackets.
    pub site: Site,
    pub majors: Vec<u32>,
    /// Where a further major goes: behind the last one, before whatever follows it (a comma, a comment).
    pub end_of_last: usize,
}

/// Why there is no gate where one must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotFound {
    /// The file, or the function, is not valid Python.
    Syntax,
    /// How many definitions of the function there are, where one must be.
    Function { name: String, found: usize },
    /// How many calls with the keyword there are in the function, where one must be.
    Call { function: String, call: String, keyword: String, found: usize },
    /// The keyword's value is no list of plain integers.
    Value { keyword: String, line: usize },
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax => write!(f, "this is not valid Python"),
            Self::Function { name, found } => write!(f, "expected 1 function `{name}`, found {found}"),
            Self::Call { function, call, keyword, found } => {
                write!(f, "expected 1 call of `{call}` with `{keyword}` in `{function}`, found {found}")
            }
            Self::Value { keyword, line } => {
                write!(f, "line {line}: expected a list of integers for `{keyword}`, found something else")
            }
        }
    }
}

/// The one gate of `function`.
pub fn gate(source: &[u8], function: &str, gate: &tables::Gate) -> Result<Gate, NotFound> {
    let tree = tree_of(source);
    let body = the_function(&tree, source, function)?;
    let mut values = Vec::new();
    visit(body, &mut |node| {
        if node.kind() == "call" && called(node, source) == Some(gate.call.as_bytes()) {
            values.extend(keyword_value(node, source, &gate.keyword));
        }
    });
    let [value] = values[..] else {
        return Err(NotFound::Call {
            function: function.to_owned(),
            call: gate.call.clone(),
            keyword: gate.keyword.clone(),
            found: values.len(),
        });
    };
    list(value, source, &gate.keyword)
}

/// A function that describes a module to FlashInfer's JIT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generator {
    pub name: String,
    /// The line of its gate where it has one, else of its definition.
    pub line: usize,
    /// The majors that its one gate lets in; `None` where it has none.
    pub majors: Option<Vec<u32>>,
}

/// All functions `gen_…_module` of a file, in order. `gate` says what their gates look like.
pub fn generators(source: &[u8], gate: &tables::Gate) -> Result<Vec<Generator>, NotFound> {
    let tree = tree_of(source);
    let mut generators = Vec::new();
    visit(tree.root_node(), &mut |node| {
        let Some(name) = (node.kind() == "function_definition").then(|| node.child_by_field_name("name")).flatten() else {
            return;
        };
        let name = String::from_utf8_lossy(text(name, source)).into_owned();
        if !(name.starts_with("gen_") && name.ends_with("_module")) {
            return;
        }
        let mut gates = Vec::new();
        visit(node, &mut |call| {
            if call.kind() == "call" && called(call, source) == Some(gate.call.as_bytes()) {
                gates
                    .extend(keyword_value(call, source, &gate.keyword).and_then(|value| list(value, source, &gate.keyword).ok()));
            }
        });
        let line = node.start_position().row + 1;
        generators.push(match gates.pop().filter(|_| gates.is_empty()) {
            Some(gate) => Generator { name, line: gate.site.line, majors: Some(gate.majors) },
            None => Generator { name, line, majors: None },
        });
    });
    Ok(generators)
}

/// The gate whose list of plain integers `value` is.
fn list(value: Node<'_>, source: &[u8], keyword: &str) -> Result<Gate, NotFound> {
    let line = value.start_position().row + 1;
    let wrong = || NotFound::Value { keyword: keyword.to_owned(), line };
    if value.kind() != "list" {
        return Err(wrong());
    }
    let mut majors = Vec::new();
    let mut end_of_last = value.start_byte() + 1;
    let mut cursor = value.walk();
    for element in value.named_children(&mut cursor).filter(|node| node.kind() != "comment") {
        let major = (element.kind() == "integer").then(|| text(element, source)).and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            digits.parse().ok()
        });
        majors.push(major.ok_or_else(wrong)?);
        end_of_last = element.end_byte();
    }
    Ok(Gate { site: Site { bytes: value.byte_range(), line }, majors, end_of_last })
}

/// The line (from 1) on which the one definition of `function` starts.
pub fn function_line(source: &[u8], function: &str) -> Result<usize, NotFound> {
    let tree = tree_of(source);
    Ok(the_function(&tree, source, function)?.start_position().row + 1)
}

fn the_function<'t>(tree: &'t Tree, source: &[u8], name: &str) -> Result<Node<'t>, NotFound> {
    let mut functions = Vec::new();
    visit(tree.root_node(), &mut |node| {
        if node.kind() == "function_definition"
            && node.child_by_field_name("name").is_some_and(|n| text(n, source) == name.as_bytes())
        {
            functions.push(node);
        }
    });
    match functions[..] {
        [function] if function.has_error() => Err(NotFound::Syntax),
        [function] => Ok(function),
        _ if tree.root_node().has_error() => Err(NotFound::Syntax),
        _ => Err(NotFound::Function { name: name.to_owned(), found: functions.len() }),
    }
}

fn visit<'t>(node: Node<'t>, look: &mut impl FnMut(Node<'t>)) {
    look(node);
    let mut cursor = node.walk();
    for child in node.named_children(&mut cursor) {
        visit(child, look);
    }
}

/// The name behind the last dot of what a call calls.
fn called<'s>(call: Node<'_>, source: &'s [u8]) -> Option<&'s [u8]> {
    let function = call.child_by_field_name("function")?;
    let name = if function.kind() == "attribute" { function.child_by_field_name("attribute")? } else { function };
    Some(text(name, source))
}

fn keyword_value<'t>(call: Node<'t>, source: &[u8], keyword: &str) -> Option<Node<'t>> {
    let arguments = call.child_by_field_name("arguments")?;
    let mut cursor = arguments.walk();
    arguments
        .named_children(&mut cursor)
        .filter(|node| node.kind() == "keyword_argument")
        .find(|node| node.child_by_field_name("name").is_some_and(|name| text(name, source) == keyword.as_bytes()))?
        .child_by_field_name("value")
}

fn text<'s>(node: Node<'_>, source: &'s [u8]) -> &'s [u8] {
    &source[node.byte_range()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(source: &str) -> Result<Vec<u32>, NotFound> {
        let row = tables::Gate { call: "flags".to_owned(), keyword: "majors".to_owned(), add: 12 };
        gate(source.as_bytes(), "gen", &row).map(|gate| gate.majors)
    }

    #[test]
    fn a_gate_is_found_however_it_is_written() {
        assert_eq!(find("def gen():\n    return ctx.flags(majors=[9, 10])\n"), Ok(vec![9, 10]));
        assert_eq!(
            find("@cache\ndef gen(a=1) -> X:\n  f = flags(\n   majors = [  # why\n 9,\n 10,  # not 12\n ],\n )\n"),
            Ok(vec![9, 10])
        );
        assert_eq!(find("def gen():\n    f = [x for x in a.b.flags(1, majors=[])] + ['-x']\n"), Ok(vec![]));
    }

    #[test]
    fn the_list_of_another_function_is_not_the_gate() {
        let source = "def other():\n    return c.flags(majors=[9])\n\ndef gen():\n    return c.flags(majors=[10])\n";
        assert_eq!(find(source), Ok(vec![10]));
        // Nor is text in a comment or a string.
        let source = "def gen():\n    # c.flags(majors=[8])\n    '''c.flags(majors=[7])'''\n    return c.flags(majors=[10])\n";
        assert_eq!(find(source), Ok(vec![10]));
    }

    #[test]
    fn anything_but_exactly_one_plain_list_is_refused() {
        let found = |result: Result<_, NotFound>| match result.unwrap_err() {
            NotFound::Call { found, .. } | NotFound::Function { found, .. } => found,
            other => panic!("{other}"),
        };
        assert_eq!(found(find("def gen():\n    return c.flags()\n")), 0);
        assert_eq!(found(find("def gen():\n    return c.flags(majors=[9]) + c.flags(majors=[9])\n")), 2);
        assert_eq!(found(find("def gen2():\n    return c.flags(majors=[9])\n")), 0);
        assert_eq!(found(find("def gen():\n    pass\ndef gen():\n    return c.flags(majors=[9])\n")), 2);
        for value in ["MAJORS", "[9, X]", "[9] + [10]", "(9, 10)", "[*A]", "[9.0]", "[-1]"] {
            let result = find(&format!("def gen():\n    return c.flags(majors={value})\n"));
            assert!(matches!(result, Err(NotFound::Value { line: 2, .. })), "{value}: {result:?}");
        }
        assert_eq!(find("def gen():\n    return c.flags(majors=[9,\n"), Err(NotFound::Syntax));
    }

    fn lines(source: &str, find: &str, within: Option<&str>) -> Vec<usize> {
        let anchor = Anchor {
            find: find.to_owned(),
            count: 1,
            within: within.map(str::to_owned),
            outside: None,
            any_order: false,
            replace: None,
            before: None,
            after: None,
        };
        Source::new(source.as_bytes()).find(&anchor).iter().map(|site| site.line).collect()
    }

    #[test]
    fn an_anchor_is_a_whole_expression_or_statement_however_it_is_written() {
        let source = "\
x = f(a, g(1))
x = f(  # why
    a, g(1,
    ),
)
'''x = f(a, g(1))'''
y = 2 + x.f(a, g(1)) * 3
x = f(a, g(1), 2)
";
        assert_eq!(lines(source, "f(a, g(1))", None), [1, 2]);
        assert_eq!(lines(source, "x = f(a, g(1))", None), [1, 2]);
        assert_eq!(lines(source, "g(1)", None), [1, 3, 7, 8]);
        assert_eq!(lines(source, "2 + x", None), [0; 0]);
    }

    #[test]
    fn an_anchor_in_a_function_is_told_by_the_qualified_name() {
        let source = "\
class A:
    def f(self):
        if m == 0:
            raise E
class B:
    @d
    def f(self):
        def g():
            return m == 0
def f():
    return m == 0
";
        assert_eq!(lines(source, "m == 0", None), [3, 9, 11]);
        assert_eq!(lines(source, "m == 0", Some("A.f")), [3]);
        assert_eq!(lines(source, "m == 0", Some("B.f")), [9]);
        assert_eq!(lines(source, "m == 0", Some("B.f.g")), [9]);
        assert_eq!(lines(source, "m == 0", Some("f")), [11]);
    }

    #[test]
    fn a_chain_in_any_order_is_found_however_it_is_written_and_only_whole() {
        let lines = |source: &str| {
            let anchor = Anchor {
                find: "a or f()".to_owned(),
                count: 1,
                within: None,
                outside: None,
                any_order: true,
                replace: None,
                before: None,
                after: None,
            };
            Source::new(source.as_bytes()).find(&anchor).iter().map(|site| site.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("x = (\n  f()  # first\n  or a\n) and b\nif not (a or f()): pass\n"), [2, 5]);
        // The front of a longer chain is a chain of its own; its tail is not, nor is a chain of another operator.
        assert_eq!(lines("x = f() or a or b\n"), [1]);
        for other in ["b or a or f()", "a and f()", "a or f() and b", "a or a", "a or f(1)", "a or (f())", "a or not f()"] {
            assert_eq!(lines(&format!("x = {other}\n")), [0; 0], "{other}");
        }
        assert!(is_chain("a or f()") && is_chain("a and b and c"));
        assert!(!is_chain("a") && !is_chain("(a or b)") && !is_chain("a or b\nc or d") && !is_chain("x = a or b"));
    }

    #[test]
    fn odd_text_ends_the_reading_without_harm() {
        for source in ["", "def", "((((", "class :", "é = '", "\u{0}", "def f(:\n  x"] {
            assert_eq!(lines(source, "x == 0", None), [0; 0]);
        }
    }

    #[test]
    fn a_further_major_goes_behind_the_last_one() {
        let row = tables::Gate { call: "flags".to_owned(), keyword: "majors".to_owned(), add: 12 };
        let source = "def gen():\n    c.flags(majors=[\n9,  # a\n10,  # b\n])\n";
        let end = gate(source.as_bytes(), "gen", &row).unwrap().end_of_last;
        assert_eq!(&source[end - 2..end + 6], "10,  # b");
    }
}
