//! Which parameter list an artifact's function has, by its own account, and binding values to it by name.

use std::collections::BTreeMap;

use super::ffi::tvm::{Argument, Module, Raised};
use crate::tables::calls::{Form, Function, Kind, Parameter};

/// Values by the names of `calls.toml`.
pub type Values = BTreeMap<&'static str, Argument>;

/// The parameter list of an exported function: the form of the table that is the artifact's own.
pub fn form_in(module: &Module, function: &'static Function) -> Result<&'static Form, String> {
    // Refused for its number of arguments before anything runs.
    match module.call(&function.name, &[]) {
        Ok(()) => Err(format!("{} can be called without arguments", function.name)),
        Err(raised) => form_by(function, &raised),
    }
}

fn form_by<'t>(function: &'t Function, raised: &Raised) -> Result<&'t Form, String> {
    let told =
        parse(&raised.message).ok_or_else(|| format!("{} does not tell its parameters; it said: {raised}", function.name))?;
    let fits = |form: &&Form| form.parameters.iter().map(|p| (p.kind, p.optional)).eq(told.iter().copied());
    function.forms.iter().find(fits).ok_or_else(|| {
        let told: Vec<_> = told.iter().map(|(kind, optional)| format!("{}{}", kind.word(), mark(*optional))).collect();
        format!("{} has a parameter list that the tables do not know: {}", function.name, told.join(", "))
    })
}

fn mark(optional: bool) -> &'static str {
    if optional { "?" } else { "" }
}

/// The kinds in tvm-ffi's own message about a wrong number of arguments; none where it is another message.
fn parse(message: &str) -> Option<Vec<(Kind, bool)>> {
    let inner = message.split_once("calling: `")?.1;
    let (list, rest) = inner.split_once(") -> ")?;
    let list = list.split_once('(')?.1;
    let count: usize = rest.split_once("Expected ")?.1.split_once(' ')?.0.parse().ok()?;
    let kinds = list.split(", ").filter(|text| !text.is_empty()).map(kind).collect::<Option<Vec<_>>>()?;
    (kinds.len() == count).then_some(kinds)
}

/// The kind in `0: Optional<DLTensor*>`.
fn kind(text: &str) -> Option<(Kind, bool)> {
    let (_, text) = text.split_once(": ")?;
    let inner = text.strip_prefix("Optional<").and_then(|text| text.strip_suffix('>'));
    let kind = match inner.unwrap_or(text) {
        "int" => Kind::Int,
        "bool" => Kind::Bool,
        "float" => Kind::Float,
        "DataType" | "dtype" => Kind::DataType,
        text if text.contains("Tensor") => Kind::Tensor,
        _ => return None,
    };
    Some((kind, inner.is_some()))
}

/// The arguments of a call in the order of `form`. An optional parameter without a value is left out.
pub fn bind(form: &Form, values: &Values) -> Result<Vec<Argument>, String> {
    form.parameters
        .iter()
        .map(|parameter| match values.get(parameter.name.as_str()) {
            Some(value) if fits(parameter, value) => Ok(value.clone()),
            Some(value) => Err(format!("{} is {}, not {value:?}", parameter.name, parameter.kind.word())),
            None if parameter.optional => Ok(Argument::None),
            None => Err(format!("no value for the parameter {}", parameter.name)),
        })
        .collect()
}

fn fits(parameter: &Parameter, value: &Argument) -> bool {
    match value {
        Argument::None => parameter.optional,
        Argument::Int(_) => parameter.kind == Kind::Int,
        Argument::Bool(_) => parameter.kind == Kind::Bool,
        Argument::Float(_) => parameter.kind == Kind::Float,
        Argument::DataType(_) => parameter.kind == Kind::DataType,
        Argument::Tensor(_) => parameter.kind == Kind::Tensor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::calls::calls;

    fn message(function: &Function, form: &Form) -> Raised {
        let word = |p: &Parameter| {
            let word = match p.kind {
                Kind::Tensor => "DLTensor*",
                Kind::DataType => "DataType",
                other => other.word(),
            };
            if p.optional { format!("Optional<{word}>") } else { word.to_owned() }
        };
        let list: Vec<_> = form.parameters.iter().enumerate().map(|(at, p)| format!("{at}: {}", word(p))).collect();
        let message = format!(
            "Mismatched number of arguments when calling: `{}({}) -> void`. Expected {} but got 0 arguments",
            function.name,
            list.join(", "),
            list.len()
        );
        Raised { kind: "TypeError".to_owned(), message }
    }

    #[test]
    fn the_form_is_the_one_that_the_artifact_tells_of_itself() {
        for function in &calls().functions {
            for form in &function.forms {
                let found = form_by(function, &message(function, form)).unwrap();
                assert!(std::ptr::eq(found, form), "{}, {}", function.name, form.releases);
            }
        }
    }

    #[test]
    fn a_parameter_list_that_is_in_no_form_is_refused() {
        let function = &calls().functions[0];
        let longer = |text: &str| Raised { kind: "TypeError".to_owned(), message: text.to_owned() };
        let unknown = longer("calling: `f(0: int, 1: int) -> void`. Expected 2 but got 0 arguments");
        assert!(form_by(function, &unknown).unwrap_err().contains("int, int"));
        for text in [
            "something else",
            "calling: `f(0: int) -> void`. Expected 2 but got 0 arguments",
            "calling: `f(0: Map) -> void`. Expected 1 but got 0",
        ] {
            assert!(form_by(function, &longer(text)).unwrap_err().contains("does not tell"), "{text}");
        }
    }

    #[test]
    fn values_go_to_their_names_and_what_is_optional_may_be_missing() {
        let form = &calls().functions.iter().find(|f| f.name == "trtllm_lamport_initialize").unwrap().forms[0];
        let mut values = Values::from([("buffer_ptr", Argument::Int(4)), ("size", Argument::Int(2))]);
        assert!(bind(form, &values).unwrap_err().contains("dtype"));
        values.insert("dtype", Argument::Int(3));
        assert!(bind(form, &values).unwrap_err().contains("dtype"));
        values.insert("dtype", Argument::DataType(super::super::numbers::DType::Bf16));
        values.insert("something of a later release", Argument::None);
        assert_eq!(bind(form, &values).unwrap()[..2], [Argument::Int(4), Argument::Int(2)]);
    }
}
