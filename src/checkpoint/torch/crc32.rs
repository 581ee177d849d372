//! The checksum of zip entries: CRC-32 with the reversed polynomial 0xEDB88320, eight bytes a step.

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let previous = tables[table - 1][byte];
            tables[table][byte] = (previous >> 8) ^ tables[0][(previous & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// A checksum of the bytes seen so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crc32(u32);

impl Crc32 {
    pub(super) const fn new() -> Self {
        Self(u32::MAX)
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        let (steps, rest) = bytes.as_chunks::<8>();
        let mut crc = self.0;
        for step in steps {
            let word = u64::from_le_bytes(*step) ^ u64::from(crc);
            crc = 0;
            for (byte, table) in word.to_le_bytes().into_iter().zip(TABLES.iter().rev()) {
                crc ^= table[usize::from(byte)];
            }
        }
        for byte in rest {
            crc = (crc >> 8) ^ TABLES[0][usize::from(crc.to_le_bytes()[0] ^ byte)];
        }
        self.0 = crc;
    }

    pub(super) const fn value(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc(bytes: &[u8]) -> u32 {
        let mut crc = Crc32::new();
        crc.update(bytes);
        crc.value()
    }

    #[test]
    fn known_values() {
        assert_eq!(crc(b""), 0);
        assert_eq!(crc(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc(b"The quick brown fox jumps over the lazy dog"), 0x414F_A339);
        assert_eq!(crc(&[0; 32]), 0x190A_55AD);
    }

    #[test]
    fn pieces_make_the_whole() {
        let bytes: Vec<u8> = (0..100u8).map(|byte| byte.wrapping_mul(77)).collect();
        for cut in 0..bytes.len() {
            let mut pieces = Crc32::new();
            pieces.update(&bytes[..cut]);
            pieces.update(&bytes[cut..]);
            assert_eq!(pieces.value(), crc(&bytes));
        }
    }
}
