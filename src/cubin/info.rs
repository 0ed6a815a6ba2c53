//! The attributes in `.nv.info` that the assembler leaves for the driver.

use std::collections::HashMap;

use super::bytes::{u16_at, u32_at};

// Attribute numbers, from `cuobjdump -elf` beside the raw bytes.
const FRAME_SIZE: u8 = 0x11;
const REGCOUNT: u8 = 0x2f;
// How an attribute's value is stored: behind the header with a size in front, or in the header's last two bytes.
const SIZED: u8 = 4;

/// What `.nv.info` says about each function, by symbol index.
#[derive(Debug, Default)]
pub struct Info {
    pub registers: HashMap<u32, u32>,
    pub frame_bytes: HashMap<u32, u32>,
}

/// The attributes in one section. Reads as far as they make sense: what follows is of a newer kind, not for us.
pub fn parse(section: &[u8]) -> Info {
    let mut info = Info::default();
    let mut at = 0;
    while let (Some(&format), Some(&attribute), Some(size)) = (section.get(at), section.get(at + 1), u16_at(section, at + 2)) {
        at += 4;
        if !(1..=SIZED).contains(&format) {
            break;
        }
        if format != SIZED {
            continue;
        }
        let Some(value) = section.get(at..at + usize::from(size)) else { break };
        at += usize::from(size);
        if let (Some(symbol), Some(number)) = (u32_at(value, 0), u32_at(value, 4)) {
            match attribute {
                REGCOUNT => drop(info.registers.insert(symbol, number)),
                FRAME_SIZE => drop(info.frame_bytes.insert(symbol, number)),
                _ => {}
            }
        }
    }
    info
}
