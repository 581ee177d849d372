//! The opcodes of pickle protocols 2 to 4, which are all that `torch.save` writes in protocol 5 too, unless a
//! `bytearray` or a NumPy array is saved: `BYTEARRAY8` is not read.

macro_rules! opcodes {
    ($($name:ident $code:literal,)*) => {
        /// What one byte of a pickle asks for.
        #[repr(u8)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(clippy::upper_case_acronyms, non_camel_case_types)]
        pub(super) enum Opcode {
            $($name = $code,)*
        }

        impl Opcode {
            /// The opcode of a byte, where it has one.
            pub(super) const fn of(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    MARK b'(',
    STOP b'.',
    POP b'0',
    POP_MARK b'1',
    DUP b'2',
    BINFLOAT b'G',
    BININT b'J',
    BININT1 b'K',
    BININT2 b'M',
    NONE b'N',
    BINPERSID b'Q',
    REDUCE b'R',
    BINSTRING b'T',
    SHORT_BINSTRING b'U',
    BINUNICODE b'X',
    APPEND b'a',
    BUILD b'b',
    GLOBAL b'c',
    APPENDS b'e',
    BINGET b'h',
    LONG_BINGET b'j',
    BINPUT b'q',
    LONG_BINPUT b'r',
    SETITEM b's',
    TUPLE b't',
    SETITEMS b'u',
    EMPTY_DICT b'}',
    EMPTY_LIST b']',
    EMPTY_TUPLE b')',
    PROTO 0x80,
    NEWOBJ 0x81,
    TUPLE1 0x85,
    TUPLE2 0x86,
    TUPLE3 0x87,
    NEWTRUE 0x88,
    NEWFALSE 0x89,
    LONG1 0x8a,
    LONG4 0x8b,
    BINBYTES b'B',
    SHORT_BINBYTES b'C',
    SHORT_BINUNICODE 0x8c,
    BINUNICODE8 0x8d,
    BINBYTES8 0x8e,
    EMPTY_SET 0x8f,
    ADDITEMS 0x90,
    FROZENSET 0x91,
    NEWOBJ_EX 0x92,
    STACK_GLOBAL 0x93,
    MEMOIZE 0x94,
    FRAME 0x95,
}

/// Opcodes that Python knows and that are refused. Of these, pickles of protocols 2 to 5 by `torch.save` hold at most
/// `BYTEARRAY8`.
const OTHERS: [(u8, &str); 18] = [
    (b'F', "FLOAT"),
    (b'I', "INT"),
    (b'L', "LONG"),
    (b'P', "PERSID"),
    (b'S', "STRING"),
    (b'V', "UNICODE"),
    (b'd', "DICT"),
    (b'g', "GET"),
    (b'i', "INST"),
    (b'l', "LIST"),
    (b'o', "OBJ"),
    (b'p', "PUT"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (0x96, "BYTEARRAY8"),
    (0x97, "NEXT_BUFFER"),
    (0x98, "READONLY_BUFFER"),
];

/// What Python calls the opcode `code`, where it has one that is not read here.
pub(super) fn unsupported(code: u8) -> Option<&'static str> {
    OTHERS.iter().find(|(other, _)| *other == code).map(|(_, name)| *name)
}
