//! Plain code that is compiled for each level of instructions.

/// Defines a function that runs `$body::<FMA>` compiled for the level of an [`Isa`].
macro_rules! every_level {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $kind:ty),*) $(-> $out:ty)?, $body:ident) => {
        $(#[$doc])*
        pub(crate) fn $name(self, $($argument: $kind),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
            fn avx512($($argument: $kind),*) $(-> $out)? {
                $body::<true>($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($argument: $kind),*) $(-> $out)? {
                $body::<true>($($argument),*)
            }
            match self.0 {
                // SAFETY: `Isa` proves that the processor has the instructions.
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512 | Instructions::Amx => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 | Instructions::AvxVnni => unsafe { avx2($($argument),*) },
                _ => $body::<{ cfg!(target_arch = "aarch64") }>($($argument),*),
            }
        }
    };
}

pub(super) use every_level;
