//! What is known of processors besides their level. How fast they are cannot be asked of them: it is measured, but
//! where something else is said.

/// Streams in which a single row takes far weights; its bits are the same in both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Streams {
    /// A few at once, which the processor sees coming.
    Several,
    /// One, fetched a page ahead.
    One,
}

/// How a processor reads and multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Habits {
    pub(super) streams: Streams,
    /// Whether 16 lanes are multiplied in two passes.
    pub(super) two_passes: bool,
    /// Whether a product of pairs of bf16, where there is an instruction for it, takes as long as one of f32.
    pub(super) doubles_pairs: bool,
    /// Whether bytes are permuted across two vectors of 16 lanes, AVX512_VBMI.
    pub(super) permutes_bytes: bool,
}

/// Where nobody can be asked, or nothing was measured.
const UNKNOWN: Habits =
    Habits { streams: Streams::Several, two_passes: false, doubles_pairs: false, permutes_bytes: false };

/// AMD's Zen 5 gives a core 134 GB/s in one stream and 115 to 122 in four, Zen 4 is slower with one and has units of 8
/// lanes. Zen 5 adds 550 GFLOP/s of bf16 a core where it adds 275 of f32; of Zen 4 as much is expected, not measured.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn known() -> Habits {
    use std::arch::x86_64::__cpuid;
    use std::sync::OnceLock;

    const AMD: [u32; 3] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"enti"), u32::from_le_bytes(*b"cAMD")];
    const ZEN_5: u32 = 26;
    // Asking a virtual processor takes a trap each time.
    static KNOWN: OnceLock<Habits> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
        let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
        let permutes_bytes = is_x86_feature_detected!("avx512vbmi");
        match [vendor.ebx, vendor.edx, vendor.ecx] == AMD {
            true if family >= ZEN_5 => {
                Habits { streams: Streams::One, two_passes: false, doubles_pairs: true, permutes_bytes }
            }
            true => Habits { streams: Streams::Several, two_passes: true, doubles_pairs: true, permutes_bytes },
            false => Habits { permutes_bytes, ..UNKNOWN },
        }
    })
}

/// Where nobody can be asked.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn known() -> Habits {
    UNKNOWN
}
