//! Hostile input: whatever a file holds, reading it ends, with an inventory or with an error that says what is wrong.

use super::*;

const FATBIN: &[u8] = include_bytes!("testdata/small.fatbin");
const OBJECT: &[u8] = include_bytes!("testdata/small.o");

/// The numbers of a fixed sequence, the same on every run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

/// `bytes` with the numbers of `patch` written over them.
fn patched(bytes: &[u8], at: usize, patch: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + patch.len()].copy_from_slice(patch);
    bytes
}

fn refused(bytes: &[u8]) -> String {
    let error = read_bytes(bytes).expect_err("damaged input is refused");
    assert_eq!(error.exit(), Exit::Fault, "{error}");
    error.to_string()
}

/// The bare cubin in the object: its last uncompressed image.
fn cubin() -> &'static [u8] {
    let start = OBJECT.windows(8).rposition(|window| window == b"\x7fELF\x02\x01\x01\x41").expect("the object holds a cubin");
    let cubin = &OBJECT[start..];
    let table = |at: usize, sizes: usize| {
        let size = usize::from(bytes::u16_at(cubin, sizes).unwrap()) * usize::from(bytes::u16_at(cubin, sizes + 2).unwrap());
        usize::try_from(bytes::u64_at(cubin, at).unwrap()).unwrap() + size
    };
    // The tables of program and section headers come last.
    &cubin[..table(32, 54).max(table(40, 58))]
}

#[test]
fn a_small_fatbin_and_object_are_read_whole() {
    for (bytes, format, codec) in [(FATBIN, Format::Fatbin, Codec::Zstd), (OBJECT, Format::Object, Codec::Raw)] {
        let inventory = read_bytes(bytes).unwrap();
        assert_eq!(inventory.format, format);
        let mut targets: Vec<_> = inventory.images.iter().map(|image| image.target.as_str()).collect();
        targets.sort_unstable();
        assert_eq!(targets, ["compute_120f", "sm_120f", "sm_90a"]);
        for image in &inventory.images {
            assert_eq!(image.codec, codec);
            if image.kind == Kind::Ptx {
                assert_eq!(image.ptx_entries.len(), 2);
                continue;
            }
            let [writes, empty] = &image.kernels[..] else { panic!("{:?}", image.kernels) };
            assert_eq!((writes.name.as_str(), writes.hollow, writes.has_dependency_marks()), ("_Z6writesPi", false, true));
            assert_eq!((empty.name.as_str(), empty.hollow, empty.has_dependency_marks()), ("empty", true, false));
        }
    }
    let registered: Vec<_> = read_bytes(OBJECT).unwrap().registered.into_iter().collect();
    assert_eq!(registered, ["_Z6writesPi", "empty"]);
}

#[test]
fn text_emptiness_and_foreign_files_are_refused_by_name() {
    assert!(refused(b"").contains("empty"));
    assert!(refused(&b"# a makefile\n".repeat(40)).contains("text"));
    assert!(refused(b"\x7fELF").contains("cut short"));
    assert!(refused(b"!<arch>\n").contains("static library"));
    assert!(refused(&[0; 4096]).contains("neither"));
    assert!(refused(&patched(OBJECT, 4, &[1])).contains("64-bit"));
}

#[test]
fn a_file_cut_short_anywhere_is_refused_or_read_up_to_there() {
    for whole in [FATBIN, OBJECT, cubin()] {
        for end in (0..whole.len()).step_by(64).chain([whole.len() - 1]) {
            // Only padding may be missing.
            if let Ok(inventory) = read_bytes(&whole[..end]) {
                assert!(
                    end + 64 >= whole.len() || inventory.images.is_empty(),
                    "{end} of {} bytes pass for the whole",
                    whole.len()
                );
            }
        }
    }
}

#[test]
fn absurd_sizes_are_refused_before_memory_is_set_aside() {
    let entry = 16;
    let huge = u64::MAX.to_le_bytes();
    for (at, patch, what) in [
        (8, &huge[..], "size of the fat binary"),
        (8, &(i64::MAX as u64).to_le_bytes()[..], "size of the fat binary"),
        (6, &0u16.to_le_bytes()[..], "header of the fat binary"),
        (entry + 4, &0u32.to_le_bytes()[..], "empty header of an entry"),
        (entry + 4, &u32::MAX.to_le_bytes()[..], "header of an entry"),
        (entry + 8, &huge[..], "payload"),
        (entry + 16, &u32::MAX.to_le_bytes()[..], "compressed size"),
        (entry + 56, &huge[..], "size after decompression"),
        (entry + 56, &(1u64 << 40).to_le_bytes()[..], "size after decompression"),
        (entry + 56, &0u64.to_le_bytes()[..], "no size after decompression"),
        (entry + 40, &0xa011u64.to_le_bytes()[..], "two codecs"),
    ] {
        assert!(!refused(&patched(FATBIN, at, patch)).is_empty(), "{what}");
    }
}

#[test]
fn bytes_flipped_at_random_never_panic() {
    let mut numbers = Numbers(1);
    for whole in [FATBIN, OBJECT, cubin()] {
        for _ in 0..4000 {
            let mut bytes = whole.to_vec();
            for _ in 0..1 + numbers.below(4) {
                let at = numbers.below(bytes.len());
                bytes[at] = numbers.next().to_le_bytes()[0];
            }
            let _ = read_bytes(&bytes);
        }
    }
}

#[test]
fn numbers_replaced_by_extremes_never_panic() {
    let extremes = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_fff0, u32::MAX];
    for whole in [FATBIN, OBJECT, cubin()] {
        let mut numbers = Numbers(2);
        for _ in 0..4000 {
            let at = numbers.below(whole.len() / 4 - 1) * 4;
            let extreme = extremes[numbers.below(extremes.len())];
            let _ = read_bytes(&patched(whole, at, &extreme.to_le_bytes()));
        }
    }
}

#[test]
fn noise_behind_a_right_beginning_never_panics() {
    let mut numbers = Numbers(3);
    for head in [&FATBIN[..16], &FATBIN[..80], &OBJECT[..64], &cubin()[..64]] {
        for _ in 0..1000 {
            let mut bytes = head.to_vec();
            bytes.extend((0..numbers.below(2048)).map(|_| numbers.next().to_le_bytes()[0]));
            let _ = read_bytes(&bytes);
        }
    }
}

#[test]
fn bytes_may_lie_at_any_address() {
    for whole in [FATBIN, OBJECT, cubin()] {
        let expected = read_bytes(whole).unwrap().images.iter().map(|image| image.kernels.clone()).collect::<Vec<_>>();
        for shift in 1..8 {
            let shifted = [&[0; 8][..shift], whole].concat();
            let found = read_bytes(&shifted[shift..]).unwrap();
            assert!(found.images.iter().map(|image| &image.kernels).eq(&expected), "shifted by {shift}");
        }
    }
}
