//! The one table of opcodes, and the scan over instructions.
//!
//! From SM 70 on an instruction is 16 bytes. The low 12 bits of its first word are the opcode: nine bits of operation, and
//! three that say what kind of operands follow (registers, an immediate, a constant, a uniform register). An operation writes
//! memory whatever its operands are, so the table goes by the nine bits, but for the few where the three say something else.
//!
//! NVIDIA documents none of this. The numbers come from probes: a kernel for each PTX instruction that can write, compiled for
//! sm_75, sm_90a, sm_100a and sm_120f and disassembled by nvdisasm, and raw words of every operation near them.

/// What an instruction means to this reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Of no interest, as far as memory outside the thread block goes.
    Other,
    /// Writes memory outside the thread block.
    Write,
    /// Copies in bulk; the second word says from where to where.
    BulkCopy,
    /// Calls a function at a place that is part of the instruction.
    Call,
    /// Calls a function whose absolute address is in a register: so the compiler calls the functions of the system.
    CallAbsolute,
    /// Calls or jumps to where a register says: a function pointer.
    CallPointer,
    /// The wait of programmatic dependent launch.
    Wait,
    /// The trigger of programmatic dependent launch.
    Trigger,
    LocalLoad,
    LocalStore,
}

/// The nine bits of the operation, whatever the operands are.
const OPERATIONS: &[(u16, Class)] = &[
    (0x17f, Class::Write),       // STG with 256 bits (SM 100 and newer)
    (0x183, Class::LocalLoad),   // LDL
    (0x185, Class::Write),       // ST: generic, and shared memory of another block of the cluster
    (0x186, Class::Write),       // STG: global; also multimem.st
    (0x187, Class::LocalStore),  // STL
    (0x18a, Class::Write),       // ATOM: generic
    (0x18b, Class::Write),       // ATOM.CAS
    (0x18e, Class::Write),       // RED, REDG: integers; also multimem.red
    (0x193, Class::Write),       // SUATOM: atomic on a surface
    (0x195, Class::Write),       // SUATOM.CAS
    (0x19b, Class::Write),       // SUST.P: formatted surface store
    (0x19d, Class::Write),       // SUST.D: raw surface store
    (0x19f, Class::Write),       // SURED: reduction on a surface
    (0x1a2, Class::Write),       // ATOM: floating point
    (0x1a3, Class::Write),       // ATOMG: floating point
    (0x1a6, Class::Write),       // REDG: floating point, vectors
    (0x1a8, Class::Write),       // ATOMG: integers, exchange
    (0x1a9, Class::Write),       // ATOMG.CAS
    (0x1b5, Class::Write),       // UTMASTG: tensor store, scatter
    (0x1b6, Class::Write),       // UTMAREDG: tensor reduction
    (0x1ba, Class::BulkCopy),    // UBLKCP
    (0x1bb, Class::Write),       // UBLKRED: bulk reduction, to global memory or into the cluster
    (0x1bd, Class::Write),       // STAS: asynchronous store into the cluster
    (0x1be, Class::Write),       // REDAS: asynchronous reduction into the cluster
    (0x143, Class::Call),        // CALL.ABS
    (0x144, Class::Call),        // CALL.REL
    (0x14a, Class::Call),        // JMP
    (0x14c, Class::CallPointer), // JMX
    (0x159, Class::CallPointer), // JMXU
];

/// All twelve bits, where the kind of operands matters. They win over [`OPERATIONS`].
const OPCODES: &[(u16, Class)] = &[
    (0x343, Class::CallAbsolute), // CALL.ABS with a register
    (0x344, Class::CallPointer),  // CALL.REL with a register
    (0x3b4, Class::Write),        // UTMALDG.MULTICAST: a tensor load into other blocks of the cluster; 0x5b4 loads into its own
    (0x82d, Class::Trigger),      // PREEXIT
    (0x82e, Class::Wait),         // ACQBULK
];

// Not in the tables, because no data leaves the thread block: STS, STSM, ATOMS (shared memory); LDGSTS, UTMALDG, LDGMC (loads);
// SYNCS, UCGABAR, MEMBAR, ERRBAR (barriers, also those of other blocks: an arrival carries no data); CCTL, UTMACCTL, UTMAPF,
// UBLKPF (caches); stores to tensor memory.

static CLASSES: [Class; 4096] = classes();

const fn classes() -> [Class; 4096] {
    let mut table = [Class::Other; 4096];
    let mut i = 0;
    while i < OPERATIONS.len() {
        let mut form = 0;
        while form < 8 {
            table[(OPERATIONS[i].0 + form * 0x200) as usize] = OPERATIONS[i].1;
            form += 1;
        }
        i += 1;
    }
    let mut i = 0;
    while i < OPCODES.len() {
        table[OPCODES[i].0 as usize] = OPCODES[i].1;
        i += 1;
    }
    table
}

/// What the instructions of one code section can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// Write memory outside the thread block.
    pub writes: bool,
    pub waits: bool,
    pub triggers: bool,
    pub calls: bool,
    pub calls_absolute: bool,
    pub calls_pointer: bool,
    pub local_loads: u32,
    pub local_stores: u32,
}

impl Marks {
    /// Adds what the code of a called function can do.
    pub fn add(&mut self, other: &Self) {
        self.writes |= other.writes;
        self.waits |= other.waits;
        self.triggers |= other.triggers;
        self.calls |= other.calls;
        self.calls_absolute |= other.calls_absolute;
        self.calls_pointer |= other.calls_pointer;
        self.local_loads = self.local_loads.saturating_add(other.local_loads);
        self.local_stores = self.local_stores.saturating_add(other.local_stores);
    }
}

/// The first SM whose encoding this table describes.
pub const FIRST_SM: u32 = 70;

/// What the instructions of `code` can do, for SM 70 and newer.
pub fn scan(code: &[u8]) -> Marks {
    let mut marks = Marks::default();
    for instruction in code.as_chunks::<16>().0 {
        let (low, high) = instruction.split_at(8);
        let low = u64::from_le_bytes(low.try_into().expect("half of sixteen bytes"));
        let class = CLASSES[(low & 0xfff) as usize];
        if class == Class::Other || never_runs(low) {
            continue;
        }
        match class {
            Class::Other => {}
            Class::Write => marks.writes = true,
            Class::BulkCopy => {
                let high = u64::from_le_bytes(high.try_into().expect("half of sixteen bytes"));
                marks.writes |= bulk_copy_leaves_the_block(high);
            }
            Class::Call => marks.calls = true,
            Class::CallAbsolute => marks.calls_absolute = true,
            Class::CallPointer => marks.calls_pointer = true,
            Class::Wait => marks.waits = true,
            Class::Trigger => marks.triggers = true,
            Class::LocalLoad => marks.local_loads = marks.local_loads.saturating_add(1),
            Class::LocalStore => marks.local_stores = marks.local_stores.saturating_add(1),
        }
    }
    marks
}

/// True for an instruction under `@!PT`. The compiler leaves such ones behind as delays.
fn never_runs(low: u64) -> bool {
    low & 0xf000 == 0xf000
}

/// True for a bulk copy to anywhere but the block's own shared memory. Bit 9 of the second word says that the target is shared
/// memory, bit 10 that the source is, bit 11 that it goes to several blocks. Only global to own shared memory stays.
fn bulk_copy_leaves_the_block(high: u64) -> bool {
    high & 0xe00 != 0x200
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(low: u64, high: u64) -> Marks {
        scan(&[low.to_le_bytes(), high.to_le_bytes()].concat())
    }

    #[test]
    fn stores_reductions_and_atomics_that_leave_the_block_are_writes() {
        for (low, high, what) in [
            (0x0000000402007986, 0x000fe2000c101904, "STG.E desc[UR4][R2.64], R4"),
            (0x0000000502007386, 0, "STG.E.SYS of sm_75"),
            (0x00000002ff007985, 0, "ST.E [RZ.U32+UR4], R2"),
            (0x000000000000098e, 0, "@P0 REDG"),
            (0x00000004080073b5, 0x0021e40008008000, "UTMASTG.2D"),
            (0x00000006040073ba, 0x0083e20008000405, "UBLKCP.G.S"),
            (0x00000004070073ba, 0x0001d80008000606, "UBLKCP.S.S"),
            (0x00000004060073ba, 0x0001d80008000a08, "UBLKCP.S.G.MULTICAST"),
            (0x00000004080073b4, 0x0001d8000800880a, "UTMALDG.2D.MULTICAST"),
        ] {
            assert!(one(low, high).writes, "{what}");
        }
    }

    #[test]
    fn loads_and_what_stays_in_the_block_are_no_writes() {
        for (low, high, what) in [
            (0x0000000402027981, 0, "LDG"),
            (0x0000000205007388, 0, "STS"),
            (0x0000000201007387, 0, "STL"),
            (0x000000000000798c, 0, "ATOMS"),
            (0x0000000400007844, 0, "STSM"),
            (0x00000006040073ba, 0x0053d80008000208, "UBLKCP.S.G"),
            (0x000000080c0075b4, 0x0001d80008008000, "UTMALDG.2D"),
            (0x000000000402f986, 0, "@!PT STG"),
            (0x000000000000794d, 0, "EXIT"),
        ] {
            assert!(!one(low, high).writes, "{what}");
        }
    }

    #[test]
    fn code_that_ends_inside_an_instruction_is_read_up_to_there() {
        assert_eq!(scan(&[0x86, 0x79, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Marks::default());
        assert_eq!(scan(&[]), Marks::default());
    }
}
