//! Exact changes of PTX: the target that it is for, and the conversion to FP4, which Hopper lacks. Every other byte stays.

use crate::target::Target;

/// Two `f32` to two `e2m1`, one instruction from SM 10.0 on.
const CONVERSION: &str = "cvt.rn.satfinite.e2m1x2.f32";

/// All our registers are called so; a PTX that has such a name of its own is not rewritten.
const OWN: &str = "fi_arch_";

/// The bits of the least magnitude (an `f32` without its sign) that becomes each code above 0, in the order of the codes. An
/// e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 as its codes 0 to 7; half-way between two of them goes to the even
/// code. So 0.25, 1.25, 2.5 and 5 go down, and what is greater by one bit goes up; 0.75, 1.75 and 3.5 go up.
const LEAST: [u32; 7] = [
    0x3e80_0001, // above 0.25
    0x3f40_0000, // 0.75
    0x3fa0_0001, // above 1.25
    0x3fe0_0000, // 1.75
    0x4020_0001, // above 2.5
    0x4060_0000, // 3.5
    0x40a0_0001, // above 5
];

/// PTX for `from` as PTX for `to`, or why it cannot be that.
pub fn rewrite(ptx: &str, from: Target, to: Target) -> Result<String, String> {
    let bytes = ptx.as_bytes();
    let mut out = String::with_capacity(ptx.len() + ptx.len() / 8);
    let (mut copied, mut at, mut guarded, mut targets) = (0, 0, false, 0);
    let line = |at: usize| bytes[..at].iter().filter(|b| **b == b'\n').count() + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => at = find(ptx, at, "\n").unwrap_or(bytes.len()),
            b'/' if bytes[at..].starts_with(b"/*") => {
                at = find(ptx, at + 2, "*/").ok_or_else(|| format!("line {}: a comment does not end", line(at)))? + 2;
            }
            b'"' => at = find(ptx, at + 1, "\"").ok_or_else(|| format!("line {}: a string does not end", line(at)))? + 1,
            b'@' => (guarded, at) = (true, at + 1),
            b';' | b'{' | b'}' => (guarded, at) = (false, at + 1),
            byte if is_word(byte) => {
                let end = at + word(ptx, at).len();
                match &ptx[at..end] {
                    ".target" => {
                        let start = end + ptx[end..].len() - ptx[end..].trim_start_matches([' ', '\t']).len();
                        let found = word(ptx, start);
                        if found != from.to_string() {
                            return Err(format!("line {}: it is for `{found}`, not for {from}", line(at)));
                        }
                        out.push_str(&ptx[copied..start]);
                        out.push_str(&to.to_string());
                        (copied, at, targets) = (start + found.len(), start + found.len(), targets + 1);
                    }
                    CONVERSION if guarded => {
                        return Err(format!("line {}: a conversion to FP4 under a predicate, which no rule is for", line(at)));
                    }
                    CONVERSION => {
                        let odd = || format!("line {}: a conversion to FP4 in a form that no rule is for", line(at));
                        let semicolon = find(ptx, end, ";").ok_or_else(odd)?;
                        let [d, a, b] = operands(&ptx[end..semicolon]).ok_or_else(odd)?;
                        out.push_str(&ptx[copied..at]);
                        out.push_str(&conversion(d, a, b));
                        (copied, at) = (semicolon + 1, semicolon + 1);
                    }
                    name if name.starts_with(OWN) => {
                        return Err(format!("line {}: it has a name of ours already, `{name}`", line(at)));
                    }
                    _ => at = end,
                }
            }
            _ => at += 1,
        }
    }
    if targets != 1 {
        return Err(format!("it has {targets} lines `.target` where one is right"));
    }
    out.push_str(&ptx[copied..]);
    Ok(out)
}

/// What stands for `cvt.rn.satfinite.e2m1x2.f32 d, a, b`, with integers alone, so that no mode of rounding or flushing touches it:
/// each input rounded to the nearest e2m1, ties to even; beyond 6 it is 6 with the input's sign, infinity too; a NaN of either
/// sign is +6; -0 keeps its sign, and so does what rounds to 0. `a` goes into the upper four bits of `d`, `b` into the lower.
/// (PTX ISA, `cvt`; of NaN also `cuda_fp4.h`: "NaN input values result in positive MAXNORM".)
pub fn conversion(d: &str, a: &str, b: &str) -> String {
    let code = |input: &str, code: &str| {
        // `set` gives -1 for true.
        let steps = LEAST.map(|least| {
            format!("set.ge.u32.u32 {OWN}over, {OWN}size, 0x{least:08x};\nsub.u32 {OWN}{code}, {OWN}{code}, {OWN}over;\n")
        });
        format!(
            "mov.b32 {OWN}bits, {input};\n\
             and.b32 {OWN}size, {OWN}bits, 0x7fffffff;\n\
             shr.u32 {OWN}sign, {OWN}bits, 28;\n\
             and.b32 {OWN}sign, {OWN}sign, 8;\n\
             setp.gt.u32 {OWN}nan, {OWN}size, 0x7f800000;\n\
             selp.b32 {OWN}{code}, 0, {OWN}sign, {OWN}nan;\n\
             {}",
            steps.concat()
        )
    };
    format!(
        "{{\n.reg .pred {OWN}nan;\n.reg .b32 {OWN}bits, {OWN}size, {OWN}sign, {OWN}over, {OWN}upper, {OWN}lower;\n\
         {}{}\
         shl.b32 {OWN}upper, {OWN}upper, 4;\n\
         or.b32 {OWN}upper, {OWN}upper, {OWN}lower;\n\
         cvt.u8.u32 {d}, {OWN}upper;\n}}",
        code(a, "upper"),
        code(b, "lower")
    )
}

/// The three operands of an instruction, each a register or a number.
fn operands(text: &str) -> Option<[&str; 3]> {
    let mut parts = text.split(',').map(str::trim);
    let operands = [parts.next()?, parts.next()?, parts.next()?];
    let is_operand = |text: &&str| !text.is_empty() && text.bytes().all(is_word) && !text.starts_with(OWN);
    (parts.next().is_none() && operands.iter().all(is_operand)).then_some(operands)
}

fn find(text: &str, from: usize, what: &str) -> Option<usize> {
    text.get(from..)?.find(what).map(|at| from + at)
}

/// The word that begins at a byte, with the dots of its modifiers.
fn word(text: &str, at: usize) -> &str {
    let length = text.as_bytes()[at..].iter().take_while(|byte| is_word(**byte)).count();
    &text[at..at + length]
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::target::Suffix;

    const FROM: Target = Target { sm: 120, suffix: Suffix::F };
    const TO: Target = Target { sm: 90, suffix: Suffix::A };

    /// Runs the text of [`conversion`] as a GPU would, instruction by instruction.
    fn run(text: &str, a: u32, b: u32) -> u8 {
        let mut registers = HashMap::from([("%f1".to_owned(), a), ("%f2".to_owned(), b)]);
        let body = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap();
        for statement in body.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            let (name, rest) = statement.split_once(' ').unwrap();
            if name == ".reg" {
                continue;
            }
            let operands: Vec<&str> = rest.split(',').map(str::trim).collect();
            let value = |index: usize| {
                let text = operands[index];
                match text.strip_prefix("0x") {
                    Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
                    None => text.parse().unwrap_or_else(|_| *registers.get(text).unwrap_or_else(|| panic!("{text} is not set"))),
                }
            };
            let result = match name {
                "mov.b32" => value(1),
                "and.b32" => value(1) & value(2),
                "or.b32" => value(1) | value(2),
                "shr.u32" => value(1) >> value(2),
                "shl.b32" => value(1) << value(2),
                "sub.u32" => value(1).wrapping_sub(value(2)),
                "set.ge.u32.u32" => {
                    if value(1) >= value(2) {
                        u32::MAX
                    } else {
                        0
                    }
                }
                "setp.gt.u32" => u32::from(value(1) > value(2)),
                "selp.b32" => {
                    if value(3) == 1 {
                        value(1)
                    } else {
                        value(2)
                    }
                }
                "cvt.u8.u32" => value(1) & 0xff,
                _ => panic!("{statement}"),
            };
            registers.insert(operands[0].to_owned(), result);
        }
        registers["d"] as u8
    }

    /// The e2m1 of an `f32` as its definition says, in other words than the sequence: the nearest of the eight magnitudes in
    /// exact arithmetic (every distance here is exact in f64), the even code where two are equally near.
    fn e2m1(bits: u32) -> u8 {
        let input = f32::from_bits(bits);
        if input.is_nan() {
            return 7;
        }
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let size = f64::from(input.abs()).min(6.0);
        let distance = |code: &usize| f64::abs(size - magnitudes[*code]);
        let nearest = |a: &usize, b: &usize| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
        let code = (0..8).min_by(nearest).unwrap() as u8;
        code | if input.is_sign_negative() { 8 } else { 0 }
    }

    /// Every magnitude, every tie, what is next to each on both sides, and everything special.
    fn interesting() -> Vec<u32> {
        let mut floats: Vec<u32> = vec![
            0,
            1,           // the least subnormal
            0x007f_ffff, // the greatest subnormal
            f32::MIN_POSITIVE.to_bits(),
            f32::MAX.to_bits(),
            f32::INFINITY.to_bits(),
            0x7f80_0001, // a signalling NaN
            0x7fc0_0000,
            0x7fff_ffff,
            1e30_f32.to_bits(),
        ];
        for point in [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0_f32] {
            floats.extend([point.to_bits() - 1, point.to_bits(), point.to_bits() + 1]);
        }
        // One of every exponent, and some between.
        floats.extend((0..=255).flat_map(|exponent| [exponent << 23, exponent << 23 | 0x0034_5678]));
        floats.iter().flat_map(|bits| [*bits, *bits | 0x8000_0000]).collect()
    }

    #[test]
    fn the_sequence_rounds_saturates_and_packs_as_the_conversion_does() {
        let text = conversion("d", "%f1", "%f2");
        for bits in interesting() {
            let expected = e2m1(bits);
            // In both places, beside something else.
            assert_eq!(run(&text, bits, 1.5_f32.to_bits()), expected << 4 | 3, "{bits:#010x} as a");
            assert_eq!(run(&text, (-6.0_f32).to_bits(), bits), 0xf0 | expected, "{bits:#010x} as b");
        }
    }

    #[test]
    fn ties_go_to_the_even_code_and_nan_to_plus_six() {
        let code = |input: f32| run(&conversion("d", "%f1", "%f2"), 0, input.to_bits());
        let table = [
            (0.25, 0),
            (0.75, 2),
            (1.25, 2),
            (1.75, 4),
            (2.5, 4),
            (3.5, 6),
            (5.0, 6),
            (-0.25, 8),
            (-0.75, 10),
            (-5.0, 14),
            (0.0, 0),
            (-0.0, 8),
            (6.0, 7),
            (-6.0, 15),
            (1e-40, 0),
            (-1e-40, 8),
            (1e30, 7),
            (f32::NEG_INFINITY, 15),
            (f32::NAN, 7),
            (-f32::NAN, 7),
        ];
        for (input, expected) in table {
            assert_eq!(code(input), expected, "{input}");
        }
    }

    fn changed(ptx: &str) -> Result<String, String> {
        rewrite(ptx, FROM, TO)
    }

    const HEAD: &str = ".version 9.0\n.target sm_120f\n.address_size 64\n";

    #[test]
    fn nothing_but_the_target_changes_where_there_is_no_conversion() {
        let rest = "// .target sm_120f, cvt.rn.satfinite.e2m1x2.f32 a, b, c;\n/* .target sm_120f */ .file 1 \".target sm_120f\"\n\
                    .visible .entry k() { @%p1 bra $L__BB0_2; .pragma \"nounroll\"; cvt.rn.f16x2.e2m1x2 %r1, b; ret; }\n";
        assert_eq!(changed(&format!("{HEAD}{rest}")).unwrap(), format!(".version 9.0\n.target sm_90a\n.address_size 64\n{rest}"));
        assert_eq!(changed(".target  sm_120f, debug\n").unwrap(), ".target  sm_90a, debug\n");
    }

    #[test]
    fn every_conversion_is_replaced_where_it_stands() {
        let cvt = |d: &str| format!("cvt.rn.satfinite.e2m1x2.f32   {d}, %f2,\n %f1;");
        let ptx = format!(
            "{HEAD}{{ @%p1 bra $L;\n{{.reg .b8 byte0;{} mov.b32 %r1, {{byte0, 0, 0, 0}}; }} {} }}\n",
            cvt("byte0"),
            cvt("__$t")
        );
        let expected = ptx.replace("sm_120f", "sm_90a").replace(&cvt("byte0"), &conversion("byte0", "%f2", "%f1"));
        assert_eq!(changed(&ptx).unwrap(), expected.replace(&cvt("__$t"), &conversion("__$t", "%f2", "%f1")));
    }

    #[test]
    fn what_no_rule_is_for_is_refused_with_its_line() {
        let refused = |ptx: &str| changed(ptx).unwrap_err();
        assert_eq!(refused(".version 9.0\n.target sm_120a\n"), "line 2: it is for `sm_120a`, not for sm_120f");
        assert_eq!(refused(".version 9.0\n"), "it has 0 lines `.target` where one is right");
        assert_eq!(refused(&format!("{HEAD}{HEAD}")), "it has 2 lines `.target` where one is right");
        assert!(
            refused(&format!("{HEAD}@%p1 cvt.rn.satfinite.e2m1x2.f32 a, b, c;")).starts_with("line 4: a conversion to FP4 under")
        );
        for odd in ["a, b", "a, b, c, d", "a, {b, c}", "fi_arch_over, b, c", ""] {
            let error = refused(&format!("{HEAD}\ncvt.rn.satfinite.e2m1x2.f32 {odd};"));
            assert!(error.starts_with("line 5: a conversion to FP4 in a form"), "{odd}: {error}");
        }
        assert!(refused(&format!("{HEAD}.reg .b32 fi_arch_size;")).contains("a name of ours already"));
        assert!(refused(&format!("{HEAD}/* ")).contains("a comment does not end"));
    }
}
