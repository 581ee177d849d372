//! Embeds the kernel archive that `MOA_CUDA_KERNELS` names, if it names one.

use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=MOA_CUDA_KERNELS");
    let target = Path::new(&env::var_os("OUT_DIR").unwrap_or_default()).join("kernels.bin");
    match env::var_os("MOA_CUDA_KERNELS").filter(|place| !place.is_empty()) {
        Some(place) => {
            println!("cargo::rerun-if-changed={}", place.to_string_lossy());
            fs::copy(place, target).map(drop)
        }
        None => fs::write(target, []),
    }
}
