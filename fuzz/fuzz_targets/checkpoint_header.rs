//! The header of a safetensors file: every byte string is either refused or described.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moa_export::checkpoint::fuzzing;

fuzz_target!(|bytes: &[u8]| {
    let _ = fuzzing::header(bytes);
    let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
    file.extend(bytes);
    let _ = fuzzing::header(&file);
});
