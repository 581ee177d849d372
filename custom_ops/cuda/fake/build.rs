//! Compiles the fake driver with the system's C++ compiler.

use std::path::Path;
use std::process::Command;
use std::{env, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=fake_cuda.cpp");
    println!("cargo::rerun-if-env-changed=CXX");
    let target = Path::new(&env::var_os("OUT_DIR").unwrap_or_default()).join("libfake_cuda.so");
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "fake_cuda.cpp", "-o"];
    let status = Command::new(&compiler).args(options).arg(target).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{} failed", compiler.display()))) }
}
