//! A PyTorch file: every byte string is either refused or described.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moa_export::checkpoint::fuzzing;

fuzz_target!(|bytes: &[u8]| {
    let _ = fuzzing::torch_zip(bytes);
});
