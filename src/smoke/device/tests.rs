//! The arithmetic of the kernels, built by this machine's C++ compiler, against that of `inputs` and `reference`: bit for bit.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::*;
use crate::smoke::arrays::{byte_poison, input_bytes};
use crate::smoke::cases::{Custom, REPLAYS};
use crate::smoke::compare;
use crate::smoke::inputs::{Inputs, make, mix};
use crate::smoke::numbers::Floats;
use crate::smoke::reference::Outputs;
use crate::smoke::reference::tests::kernel;
use crate::tables::calls::calls;

/// The program of host.cpp. Built once.
fn program() -> &'static PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap().keep();
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut build = cc::Build::new();
        build.cpp(true).host(&target).target(&target).opt_level(2).cargo_metadata(false);
        let mut command = build.get_compiler().to_command();
        command.args(["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-I"]);
        command.arg(format!("{root}cuda-src/smoke")).arg("-o").arg(dir.join("host"));
        let built = command.arg(format!("{root}src/smoke/device/host.cpp")).output().expect("a C++ compiler starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        dir.join("host")
    })
}

/// A replay as it lies in memory: the arrays of the hosted ranks one behind the other.
struct Memory {
    hosts: Vec<Host>,
    bytes: Vec<u8>,
}

impl Memory {
    /// Outputs and what guards them; inputs are left as zeros. `outputs`: by rank and call.
    fn new(case: &Case, sizes: &Sizes, hosted: &[usize], outputs: &[Vec<Outputs>]) -> Self {
        let mut memory = Self { hosts: Vec::new(), bytes: Vec::new() };
        for (&rank, calls) in hosted.iter().zip(outputs) {
            let mut addresses = [0; Array::ALL.len()];
            for (array, bytes) in input_sizes(case) {
                addresses[array as usize] = memory.place(&vec![0; bytes * case.calls()]);
            }
            for (array, bytes) in output_sizes(case, sizes).into_iter().filter(|(_, bytes)| *bytes > 0) {
                let mut held = Vec::new();
                for outputs in calls {
                    let written = match array {
                        Array::SumOut => outputs.sum.bytes(),
                        Array::ResidualOut => outputs.residual.bytes(),
                        Array::NormOut => outputs.norm.bytes(),
                        Array::QuantOut => &outputs.quant,
                        _ => &outputs.scales,
                    };
                    assert_eq!(written.len(), bytes, "{case} {array:?}");
                    held.extend_from_slice(written);
                    let poison: Vec<u8> = match array {
                        Array::QuantOut | Array::ScalesOut => vec![byte_poison(case, array, 1)],
                        _ => case.dtype.poison().to_le_bytes()[..2].to_vec(),
                    };
                    held.extend(poison.iter().cycle().take(guard(case, array)));
                }
                addresses[array as usize] = memory.place(&held);
            }
            memory.hosts.push(Host { rank, addresses });
        }
        memory
    }

    fn place(&mut self, bytes: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(256);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytes);
        at as u64
    }
}

/// The memory with its inputs made, and what was found.
fn run(case: &Case, seed: u64, memory: &Memory) -> (Vec<u8>, Found) {
    let sizes = Sizes::of(case);
    let words = task(case, &sizes, &memory.hosts);
    let mut told = seed.to_le_bytes().to_vec();
    told.extend((words.len() as u64 * 8).to_le_bytes());
    told.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    told.extend((memory.bytes.len() as u64).to_le_bytes());
    told.extend(&memory.bytes);
    let mut child = Command::new(program()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&told));
    let mut answer = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut answer).unwrap();
    writer.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
    let made = answer[..memory.bytes.len()].to_vec();
    let words: Vec<u64> =
        answer[memory.bytes.len()..].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let hosted: Vec<usize> = memory.hosts.iter().map(|host| host.rank).collect();
    assert_eq!(words.len(), result_words(case, hosted.len()));
    (made, read(case, &hosted, &words))
}

fn all_inputs(case: &Case, seed: u64) -> Vec<Vec<Inputs>> {
    (0..case.calls()).map(|call| (0..case.ranks).map(|rank| make(case, seed, call, rank)).collect()).collect()
}

fn outputs(case: &Case, inputs: &[Vec<Inputs>], hosted: &[usize]) -> Vec<Vec<Outputs>> {
    hosted.iter().map(|rank| inputs.iter().map(|inputs| kernel(case, inputs, *rank)).collect()).collect()
}

/// What `spoil` does.
const DAMAGES: [u64; 5] = [0, 1, 2, 3, 4];

/// Checks that inputs are the same and that findings are, of outputs with each of these `damages`.
fn agrees(case: &Case, damages: &[u64]) {
    let hosted: Vec<usize> = if case.ranks == 2 { vec![0, 1] } else { vec![case.ranks - 1] };
    let sizes = Sizes::of(case);
    // Other numbers in each case.
    let seed = case.to_string().bytes().fold(5, |seed, byte| mix(seed ^ u64::from(byte)));
    let inputs = all_inputs(case, seed);
    let right = outputs(case, &inputs, &hosted);
    for &damage in damages {
        let mut damaged = right.clone();
        damaged.iter_mut().flatten().enumerate().for_each(|(at, outputs)| spoil(outputs, damage, mix(seed + at as u64)));
        let memory = Memory::new(case, &sizes, &hosted, &damaged);
        let (made, found) = run(case, seed, &memory);
        for (host, rank) in memory.hosts.iter().zip(&hosted) {
            for (call, inputs) in inputs.iter().enumerate() {
                for (array, bytes) in input_bytes(&inputs[*rank]) {
                    let at = host.addresses[array as usize] as usize + call * bytes.len();
                    assert!(made[at..][..bytes.len()] == bytes[..], "{case} rank {rank} call {call}: {array:?}");
                }
            }
        }
        let on_host = Found { rows: compare::on_host(case, &inputs, &hosted, &damaged), changed: None };
        same(case, &on_host, &found);
        // The low bits of float32 may change within the bounds.
        if !(damage == 2 && case.dtype == DType::Fp32) {
            assert_eq!(on_host.verdict(case.hidden).is_ok(), damage == 0, "{case}, damage {damage}");
        }
    }
}

/// Bit for bit, where `Found::difference` leaves a little room.
fn same(case: &Case, one: &Found, other: &Found) {
    assert_eq!(one.difference(other), None, "{case}");
    for (one, other) in one.rows.iter().zip(&other.rows) {
        match (one, other) {
            (Ok(one), Ok(other)) => assert_eq!(one, other, "{case}"),
            (Err(one), Err(other)) => {
                let bits = |wrong: &Wrong| [wrong.got, wrong.least, wrong.most].map(|x| if x.is_nan() { 1 } else { x.to_bits() });
                assert_eq!(bits(&one.wrong), bits(&other.wrong), "{case}: {one:?} {other:?}");
            }
            _ => panic!("{case}: {one:?} {other:?}"),
        }
    }
}

/// Damages outputs in one of several ways: 1 an element never written, 2 flipped low bits here and there, 3 flipped high bits, 4 a
/// last output that is all poison.
fn spoil(outputs: &mut Outputs, damage: u64, hash: u64) {
    let flip = |floats: &mut Floats, mask: u32| {
        for at in (0..floats.len()).filter(|at| mix(hash ^ *at as u64).is_multiple_of(97)) {
            floats.set(at, floats.word(at) ^ mask);
        }
    };
    let flip_bytes = |bytes: &mut Vec<u8>, mask: u8| {
        for at in (0..bytes.len()).filter(|at| mix(hash ^ *at as u64).is_multiple_of(89)) {
            bytes[at] ^= mask;
        }
    };
    match damage {
        0 => {}
        1 => {
            for floats in [&mut outputs.sum, &mut outputs.residual].into_iter().filter(|floats| !floats.is_empty()) {
                let poison = if floats.bytes().len() == 4 * floats.len() { 0x7fa5_7fa5 } else { 0x7fa5 };
                floats.set(hash as usize % floats.len(), poison);
            }
        }
        2 | 3 => {
            let (mask, byte) = if damage == 2 { (6, 3) } else { (0x4010, 0x48) };
            // The last of them alone, so that every stage is seen.
            if !outputs.quant.is_empty() && hash.is_multiple_of(2) {
                flip_bytes(&mut outputs.quant, byte);
            } else if !outputs.scales.is_empty() {
                flip_bytes(&mut outputs.scales, byte);
                flip_bytes(&mut outputs.quant, byte);
            } else if !outputs.norm.is_empty() {
                flip(&mut outputs.norm, mask);
            } else {
                flip(&mut outputs.sum, mask);
                flip(&mut outputs.residual, mask);
            }
        }
        _ => {
            if !outputs.quant.is_empty() {
                outputs.quant.fill(0xff);
                outputs.scales.fill(0xff);
            } else {
                for floats in [&mut outputs.norm, &mut outputs.sum] {
                    (0..floats.len()).for_each(|at| floats.set(at, 0x7fa5));
                }
            }
        }
    }
}

fn case(what: What, dtype: DType, ranks: usize, tokens: usize, hidden: usize) -> Case {
    Case { what, dtype, ranks, tokens, hidden, pdl: false, replays: REPLAYS }
}

#[test]
fn host_and_gpu_agree_on_every_pattern_type_and_layout() {
    for pattern in &calls().patterns {
        for (dtype, fp32_acc) in [(DType::Bf16, true), (DType::Fp16, false), (DType::Fp32, true)] {
            let fp4 = pattern.quant == Some(Quant::Fp4);
            if fp4 && dtype == DType::Fp32 {
                continue;
            }
            let fusion = |scales| What::Fusion { pattern: pattern.code, oneshot: true, fp32_acc, trigger_at_end: true, scales };
            agrees(&case(fusion(layout::Scales::Swizzled), dtype, 2, 3, 512), &DAMAGES);
            agrees(&case(fusion(layout::Scales::Linear), dtype, 4, 3, 576), &[0, 3]);
        }
    }
}

#[test]
fn host_and_gpu_agree_on_the_other_functions() {
    for dtype in [DType::Bf16, DType::Fp16] {
        for path in [Custom::NormLamport, Custom::PrePostOneShot, Custom::OneShotPull] {
            agrees(&case(What::Custom { path, bias: path.norm() }, dtype, 4, 2, 512), &DAMAGES);
        }
        agrees(&case(What::MoeReduction { experts: 3, quant: true }, dtype, 2, 3, 512), &DAMAGES);
        for (shared, weighted) in [(true, true), (false, true), (true, false)] {
            agrees(&case(What::MoeFinalize { top_k: 3, shared, weighted }, dtype, 4, 3, 512), &DAMAGES);
        }
    }
}

#[test]
fn a_write_behind_an_output_or_into_an_input_is_counted() {
    let what = What::Fusion { pattern: 5, oneshot: true, fp32_acc: true, trigger_at_end: true, scales: layout::Scales::Swizzled };
    let case = case(what, DType::Bf16, 2, 2, 512);
    let (sizes, seed) = (Sizes::of(&case), mix(9));
    let inputs = all_inputs(&case, seed);
    let right = outputs(&case, &inputs, &[0, 1]);
    for array in [Array::ResidualOut, Array::NormOut, Array::QuantOut, Array::ScalesOut] {
        let mut memory = Memory::new(&case, &sizes, &[0, 1], &right);
        let bytes: BTreeMap<Array, usize> = output_sizes(&case, &sizes).into();
        // Behind the output of the second rank's last call: the first byte, and the last.
        let begin = memory.hosts[1].addresses[array as usize] as usize;
        let stride = bytes[&array] + guard(&case, array);
        let last = begin + case.calls() * stride;
        memory.bytes[last - guard(&case, array)] = 1;
        memory.bytes[last - 1] = 2;
        let (_, found) = run(&case, seed, &memory);
        assert_eq!(found.changed, Some(Changed { rank: 1, call: 2, array, count: 2 }));
        assert!(found.verdict(512).unwrap_err().beyond_a_race);
    }
}

#[test]
fn what_the_kernels_did_not_write_is_wrong() {
    let what = What::Fusion { pattern: 0, oneshot: true, fp32_acc: true, trigger_at_end: true, scales: layout::Scales::Linear };
    let case = case(what, DType::Bf16, 2, 2, 512);
    let found = read(&case, &[0, 1], &vec![u64::MAX; result_words(&case, 2)]);
    assert!(found.rows.iter().all(Result::is_err) && found.changed.is_some());
}
