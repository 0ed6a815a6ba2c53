//! `ptxas` and `fatbinary` as nvcc calls them, with another target. What is not known of such a call is refused: a guess would
//! give an artifact that is not what its manifest says.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ptx;
use crate::error::{Error, Result};
use crate::target::Target;

/// A program of the toolkit in whose place a script of ours stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    Ptxas,
    Fatbinary,
}

impl Tool {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ptxas => "ptxas",
            Self::Fatbinary => "fatbinary",
        }
    }
}

/// Turns this process into the toolkit's own `program`, called with `args` as nvcc gave them but for the target. Returns only
/// when that fails.
pub fn become_tool(tool: Tool, program: &Path, from: Target, to: Target, args: Vec<String>) -> Error {
    match changed(tool, from, to, args) {
        Ok(args) => {
            let error = Command::new(program).args(args).exec();
            Error::machine(format!("cannot start {}", program.display())).because(error)
        }
        // On one line: of a failed nvcc's output one line is shown.
        Err(error) => {
            let words = std::iter::once(error.what()).chain(error.why().iter().map(String::as_str));
            Error::new(error.exit(), format!("{}: {}", tool.name(), words.collect::<Vec<_>>().join(": ")))
        }
    }
}

fn changed(tool: Tool, from: Target, to: Target, args: Vec<String>) -> Result<Vec<String>> {
    let unknown = |why: String| {
        Error::refused(format!("nvcc called {} in a way that this fi-arch does not know", tool.name()))
            .because(why)
            .because(args.join(" "))
            .hint("use CUDA 13.0, which is fetched where no toolkit is named, or a newer fi-arch")
    };
    match tool {
        Tool::Fatbinary => fatbinary(&args, from, to).map_err(unknown),
        Tool::Ptxas => {
            let (mut args, input) = ptxas(&args, from, to).map_err(unknown)?;
            let path = PathBuf::from(&args[input]);
            let text = fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
            let text = ptx::rewrite(&text, from, to)
                .map_err(|why| Error::refused(format!("{} cannot be assembled for {to}", path.display())).because(why))?;
            // Beside the original, which stays to be looked at.
            let rewritten = path.with_extension(format!("{to}.ptx"));
            fs::write(&rewritten, text).map_err(|e| Error::io("write", &rewritten, e))?;
            args[input] = rewritten.to_string_lossy().into_owned();
            Ok(args)
        }
    }
}

/// The arguments of ptxas for the other target, and which of them is the PTX.
fn ptxas(args: &[String], from: Target, to: Target) -> Result<(Vec<String>, usize), String> {
    let mut args = args.to_vec();
    let spellings = ["-arch", "--gpu-name"];
    let wanted: Vec<String> = spellings.iter().map(|option| format!("{option}={from}")).collect();
    let targets: Vec<usize> = (0..args.len())
        .filter(|&i| {
            wanted.contains(&args[i]) || (i > 0 && spellings.contains(&args[i - 1].as_str()) && args[i] == from.to_string())
        })
        .collect();
    let [target] = targets[..] else { return Err(format!("{from} is named {} times", targets.len())) };
    args[target] = args[target].replace(&from.to_string(), &to.to_string());
    let inputs: Vec<usize> = (0..args.len()).filter(|&i| args[i].ends_with(".ptx") && !args[i].starts_with('-')).collect();
    let [input] = inputs[..] else { return Err(format!("it names {} files of PTX", inputs.len())) };
    Ok((args, input))
}

/// The arguments of fatbinary for the other target: one image, of machine code.
fn fatbinary(args: &[String], from: Target, to: Target) -> Result<Vec<String>, String> {
    let mut images = 0;
    let mut image = |arg: &String| -> Result<String, String> {
        if !arg.starts_with("--image") {
            return Ok(arg.clone());
        }
        images += 1;
        let (option, fields) = arg.split_once('=').ok_or("an image without a description")?;
        let fields: Vec<&str> = fields.split(',').collect();
        let named = format!("sm={}{}", from.sm, from.suffix);
        if !fields.contains(&"kind=elf") || fields.iter().filter(|field| **field == named).count() != 1 {
            return Err(format!("`{arg}` is no machine code for {from}"));
        }
        let other = format!("sm={}{}", to.sm, to.suffix);
        let fields: Vec<&str> = fields.iter().map(|field| if **field == named { other.as_str() } else { field }).collect();
        Ok(format!("{option}={}", fields.join(",")))
    };
    let args = args.iter().map(&mut image).collect::<Result<Vec<_>, _>>()?;
    if images == 1 { Ok(args) } else { Err(format!("it packs {images} images")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Suffix;

    const FROM: Target = Target { sm: 120, suffix: Suffix::F };
    const TO: Target = Target { sm: 90, suffix: Suffix::A };

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn ptxas_gets_the_other_target_and_all_else_as_it_was() {
        let ptxas = |text: &str| ptxas(&words(text), FROM, TO);
        let (args, input) = ptxas("-arch=sm_120f -m64 keep/a/a.ptx -o keep/a/a.cubin").unwrap();
        assert_eq!((args, input), (words("-arch=sm_90a -m64 keep/a/a.ptx -o keep/a/a.cubin"), 2));
        let (args, input) = ptxas("--gpu-name sm_120f -m64 sm_120f.ptx -o sm_120f.cubin").unwrap();
        assert_eq!((args, input), (words("--gpu-name sm_90a -m64 sm_120f.ptx -o sm_120f.cubin"), 3));
        assert!(ptxas("-arch=sm_120 a.ptx -o a.cubin").unwrap_err().contains("0 times"));
        assert!(ptxas("-arch=sm_120f -arch sm_120f a.ptx").unwrap_err().contains("2 times"));
        assert!(ptxas("-arch=sm_120f a.ptx b.ptx").unwrap_err().contains("2 files"));
        assert!(ptxas("-arch=sm_120f --options-file x").unwrap_err().contains("0 files"));
    }

    #[test]
    fn fatbinary_packs_one_image_under_the_other_target() {
        let fatbinary = |text: &str| fatbinary(&words(text), FROM, TO);
        assert_eq!(
            fatbinary("--create=a.fatbin -64 --image3=kind=elf,sm=120f,file=k/sm=120f.cubin --embedded-fatbin=a.c").unwrap(),
            words("--create=a.fatbin -64 --image3=kind=elf,sm=90a,file=k/sm=120f.cubin --embedded-fatbin=a.c")
        );
        for wrong in [
            "--image3=kind=ptx,sm=120f,file=a.ptx",
            "--image3=kind=elf,sm=120a,file=a.cubin",
            "--image3=kind=elf,sm=120f,file=a --image3=kind=elf,sm=120f,file=b",
            "--create=a.fatbin",
            "--image",
        ] {
            assert!(fatbinary(wrong).is_err(), "{wrong}");
        }
    }
}
