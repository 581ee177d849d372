//! Writes pickles and zip archives, sound and hostile ones.

/// A value as a pickle writes it.
#[derive(Debug, Clone)]
pub(super) enum Py {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<Py>),
    List(Vec<Py>),
    Dict(Vec<(Py, Py)>),
    Global(String, String),
    Call(Box<Py>, Vec<Py>),
    /// `callable.__new__` of no arguments, then a state.
    Built(Box<Py>, Box<Py>),
    /// A call of no arguments that is filled with items.
    Filled(Box<Py>, Vec<(Py, Py)>),
    Persistent(Box<Py>),
    /// Opcodes as they are.
    Raw(Vec<u8>),
}

pub(super) fn text(text: &str) -> Py {
    Py::Text(text.into())
}

pub(super) fn global(module: &str, name: &str) -> Py {
    Py::Global(module.into(), name.into())
}

pub(super) fn dict<const COUNT: usize>(entries: [(&str, Py); COUNT]) -> Py {
    Py::Dict(entries.into_iter().map(|(key, value)| (text(key), value)).collect())
}

pub(super) fn ordered_dict(entries: Vec<(Py, Py)>) -> Py {
    Py::Filled(Box::new(global("collections", "OrderedDict")), entries)
}

pub(super) fn namespace(keys: Py) -> Py {
    Py::Built(Box::new(global("argparse", "Namespace")), Box::new(keys))
}

pub(super) fn ints(numbers: &[i64]) -> Py {
    Py::Tuple(numbers.iter().copied().map(Py::Int).collect())
}

pub(super) fn storage(class: Py, key: &str, count: i64) -> Py {
    Py::Persistent(Box::new(Py::Tuple(vec![text("storage"), class, text(key), text("cpu"), Py::Int(count)])))
}

/// A tensor as `torch.save` describes it.
pub(super) fn tensor(storage: Py, offset: i64, shape: &[i64], strides: &[i64]) -> Py {
    let hooks = ordered_dict(Vec::new());
    let args = vec![storage, Py::Int(offset), ints(shape), ints(strides), Py::Bool(false), hooks];
    Py::Call(Box::new(global("torch._utils", "_rebuild_tensor_v2")), args)
}

/// A tensor of all elements of a storage of `class`.
pub(super) fn whole(class: &str, key: &str, count: i64) -> Py {
    tensor(storage(global("torch", class), key, count), 0, &[count], &[1])
}

impl Py {
    /// A pickle of this value.
    pub(super) fn pickle(&self) -> Vec<u8> {
        let mut bytes = vec![0x80, 2];
        self.write(&mut bytes);
        bytes.push(b'.');
        bytes
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Bool(flag) => out.push(if *flag { 0x88 } else { 0x89 }),
            Self::Int(number) => match i32::try_from(*number) {
                Ok(number) => {
                    out.push(b'J');
                    out.extend(number.to_le_bytes());
                }
                Err(_) => {
                    out.extend([0x8a, 8]);
                    out.extend(number.to_le_bytes());
                }
            },
            Self::Float(number) => {
                out.push(b'G');
                out.extend(number.to_be_bytes());
            }
            Self::Text(text) => {
                out.push(b'X');
                out.extend((text.len() as u32).to_le_bytes());
                out.extend(text.as_bytes());
            }
            Self::Tuple(items) => {
                out.push(b'(');
                items.iter().for_each(|item| item.write(out));
                out.push(b't');
            }
            Self::List(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| item.write(out));
                out.push(b'e');
            }
            Self::Dict(entries) => {
                out.push(b'}');
                write_entries(entries, out);
            }
            Self::Global(module, name) => out.extend(format!("c{module}\n{name}\n").bytes()),
            Self::Call(callable, args) => {
                callable.write(out);
                Self::Tuple(args.clone()).write(out);
                out.push(b'R');
            }
            Self::Built(class, state) => {
                class.write(out);
                out.extend(b")\x81");
                state.write(out);
                out.push(b'b');
            }
            Self::Filled(callable, entries) => {
                callable.write(out);
                out.extend(b")R");
                write_entries(entries, out);
            }
            Self::Persistent(id) => {
                id.write(out);
                out.push(b'Q');
            }
            Self::Raw(bytes) => out.extend(bytes),
        }
    }
}

fn write_entries(entries: &[(Py, Py)], out: &mut Vec<u8>) {
    out.push(b'(');
    for (key, value) in entries {
        key.write(out);
        value.write(out);
    }
    out.push(b'u');
}

/// The checksum of a zip entry, bit by bit.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// An entry of an archive; what is `Some` replaces the right value.
#[derive(Debug, Clone, Default)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) data: Vec<u8>,
    /// Name in the header in front of the data.
    pub(super) local_name: Option<String>,
    /// Checksum in both headers.
    pub(super) crc: Option<u32>,
    /// Checksum in front of or behind the data.
    pub(super) local_crc: Option<u32>,
    /// Size in front of or behind the data.
    pub(super) local_bytes: Option<u64>,
    pub(super) method: u16,
    /// Uncompressed size in the directory.
    pub(super) bytes: Option<u64>,
    /// Flags besides "UTF-8".
    pub(super) flags: u16,
    /// Where the directory says that the entry starts.
    pub(super) header: Option<u64>,
    /// Bytes between this entry and the next one.
    pub(super) gap: Vec<u8>,
}

pub(super) const TRAILING: u16 = 8;

impl Member {
    pub(super) fn new(name: &str, data: &[u8]) -> Self {
        Self { name: name.into(), data: data.into(), ..Self::default() }
    }
}

/// How an archive is written.
#[derive(Debug, Clone, Default)]
pub(super) struct Zip {
    pub(super) members: Vec<Member>,
    /// Sizes and offsets in ZIP64 fields.
    pub(super) long: bool,
    /// Number of entries in the end of the directory.
    pub(super) count: Option<u64>,
    pub(super) comment: Vec<u8>,
}

const LONG: u32 = 0xffff_ffff;

impl Zip {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let (mut out, mut directory) = (Vec::new(), Vec::new());
        for member in &self.members {
            let header = member.header.unwrap_or(out.len() as u64);
            self.write_local(member, &mut out);
            self.write_line(member, header, &mut directory);
        }
        let start = out.len() as u64;
        out.extend(&directory);
        let count = self.count.unwrap_or(self.members.len() as u64);
        let size = directory.len() as u64;
        if self.long {
            let end = out.len() as u64;
            out.extend(b"PK\x06\x06");
            out.extend(44u64.to_le_bytes());
            out.extend([0x1e, 3, 0x2d, 0]);
            for number in [0, count, count, size, start] {
                out.extend(u64::to_le_bytes(number));
            }
            out.extend(b"PK\x06\x07\0\0\0\0");
            out.extend(end.to_le_bytes());
            out.extend(1u32.to_le_bytes());
        }
        out.extend(b"PK\x05\x06\0\0\0\0");
        let short = |value: u64| if self.long { LONG } else { value as u32 };
        for _ in 0..2 {
            out.extend(if self.long { [0xff; 2] } else { (count as u16).to_le_bytes() });
        }
        out.extend(short(size).to_le_bytes());
        out.extend(short(start).to_le_bytes());
        out.extend((self.comment.len() as u16).to_le_bytes());
        out.extend(&self.comment);
        out
    }

    fn write_local(&self, member: &Member, out: &mut Vec<u8>) {
        let trailing = member.flags & TRAILING != 0;
        let crc = member.local_crc.or(member.crc).unwrap_or_else(|| crc32(&member.data));
        let bytes = member.local_bytes.unwrap_or(member.data.len() as u64);
        let name = member.local_name.as_ref().unwrap_or(&member.name);
        let long = self.long && !trailing;
        out.extend(b"PK\x03\x04\0\0");
        out.extend((member.flags | 0x800).to_le_bytes());
        out.extend(member.method.to_le_bytes());
        out.extend([0; 4]);
        out.extend(if trailing { 0 } else { crc }.to_le_bytes());
        let size = if trailing { 0 } else { bytes as u32 };
        out.extend((if long { LONG } else { size }).to_le_bytes());
        out.extend((if long { LONG } else { size }).to_le_bytes());
        out.extend((name.len() as u16).to_le_bytes());
        let mut extra = Vec::new();
        if long {
            extra.extend([1, 0, 16, 0]);
            extra.extend(bytes.to_le_bytes());
            extra.extend(bytes.to_le_bytes());
        }
        let padding = (64 - (out.len() + 2 + name.len() + extra.len() + 4) % 64) % 64;
        extra.extend(b"FB");
        extra.extend((padding as u16).to_le_bytes());
        extra.extend(vec![b'Z'; padding]);
        out.extend((extra.len() as u16).to_le_bytes());
        out.extend(name.as_bytes());
        out.extend(extra);
        out.extend(&member.data);
        if trailing {
            out.extend(b"PK\x07\x08");
            out.extend(crc.to_le_bytes());
            for _ in 0..2 {
                let short = (bytes as u32).to_le_bytes().to_vec();
                out.extend(if self.long { bytes.to_le_bytes().to_vec() } else { short });
            }
        }
        out.extend(&member.gap);
    }

    fn write_line(&self, member: &Member, header: u64, out: &mut Vec<u8>) {
        let stored = member.data.len() as u64;
        let bytes = member.bytes.unwrap_or(stored);
        out.extend(b"PK\x01\x02\0\0\0\0");
        out.extend((member.flags | 0x800).to_le_bytes());
        out.extend(member.method.to_le_bytes());
        out.extend([0; 4]);
        out.extend(member.crc.unwrap_or_else(|| crc32(&member.data)).to_le_bytes());
        let short = |value: u64| if self.long { LONG } else { value as u32 }.to_le_bytes();
        out.extend(short(stored));
        out.extend(short(bytes));
        out.extend((member.name.len() as u16).to_le_bytes());
        out.extend(if self.long { [28, 0] } else { [0, 0] });
        out.extend([0; 10]);
        out.extend(short(header));
        out.extend(member.name.as_bytes());
        if self.long {
            out.extend([1, 0, 24, 0]);
            for number in [bytes, stored, header] {
                out.extend(number.to_le_bytes());
            }
        }
    }
}
