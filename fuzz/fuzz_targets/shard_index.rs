//! `model.safetensors.index.json`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moa_export::checkpoint::fuzzing;

fuzz_target!(|text: &[u8]| {
    let _ = fuzzing::shard_index(text);
});
