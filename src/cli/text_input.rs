//! Text that a command is given, in files or from the standard input.

use super::Failure;
use crate::files::BYTE_ORDER_MARK;

/// Most bytes that are read together.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// The text that `bytes` are, whose first line has the number `first`, without a byte order mark.
pub(super) fn text(name: &str, bytes: Vec<u8>, first: usize) -> Result<String, Failure> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Failure::too_much(format!("{name}: more than {MAX_BYTES} bytes"), "split the file"));
    }
    let line_of = |place: usize| first + bytes[..place].iter().filter(|byte| **byte == b'\n').count();
    if let Some(place) = bytes.iter().position(|byte| *byte == 0) {
        return Err(Failure::no_text(format!("{name}, line {}: a zero byte: this is no text", line_of(place))));
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) if first == 1 => Ok(text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text).to_owned()),
        Ok(text) => Ok(text.to_owned()),
        Err(error) => {
            let line = line_of(error.valid_up_to());
            Err(Failure::no_text(format!("{name}, line {line}: not UTF-8: this is no text, or in another encoding")))
        }
    }
}
