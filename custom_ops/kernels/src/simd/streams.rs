//! How many streams a processor reads from its last cache fastest.

/// Streams in which a single row takes far weights; its bits are the same in both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Streams {
    /// A few at once, which the processor sees coming.
    Several,
    /// One, fetched a page ahead.
    One,
}

/// What was measured: AMD's Zen 5 gives a core 134 GB/s in one stream and 115 to 122 in four, Zen 4 is slower with one.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn fastest() -> Streams {
    use std::arch::x86_64::__cpuid;
    use std::sync::OnceLock;

    const AMD: [u32; 3] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"enti"), u32::from_le_bytes(*b"cAMD")];
    const ZEN_5: u32 = 26;
    // Asking a virtual processor takes a trap each time.
    static FASTEST: OnceLock<Streams> = OnceLock::new();
    *FASTEST.get_or_init(|| {
        let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
        let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
        match [vendor.ebx, vendor.edx, vendor.ecx] == AMD && family >= ZEN_5 {
            true => Streams::One,
            false => Streams::Several,
        }
    })
}

/// Where nobody can be asked, or nothing was measured.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn fastest() -> Streams {
    Streams::Several
}
