//! Element types of stored tensors.

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal,)*) => {
        /// Element type of a stored tensor.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types, missing_docs)]
        #[non_exhaustive]
        pub enum Dtype {
            $($variant,)*
        }

        const NAMES: &[&str] = &[$($name),*];

        impl Dtype {
            /// The type that a header calls `name`.
            pub(super) fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Name in a header.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Width of one element in bits.
            pub const fn bits(self) -> u64 {
                match self {
                    $(Self::$variant => $bits,)*
                }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 8,
    F4 "F4" 4,
    F6_E2M3 "F6_E2M3" 6,
    F6_E3M2 "F6_E3M2" 6,
    U8 "U8" 8,
    I8 "I8" 8,
    F8_E5M2 "F8_E5M2" 8,
    F8_E4M3 "F8_E4M3" 8,
    F8_E8M0 "F8_E8M0" 8,
    F8_E4M3Fnuz "F8_E4M3FNUZ" 8,
    F8_E5M2Fnuz "F8_E5M2FNUZ" 8,
    I16 "I16" 16,
    U16 "U16" 16,
    F16 "F16" 16,
    BF16 "BF16" 16,
    I32 "I32" 32,
    U32 "U32" 32,
    F32 "F32" 32,
    C64 "C64" 64,
    F64 "F64" 64,
    I64 "I64" 64,
    U64 "U64" 64,
}

impl Dtype {
    /// Names of all types, for messages.
    pub(super) fn known() -> String {
        NAMES.join(", ")
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
