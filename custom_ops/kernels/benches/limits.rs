//! `cargo bench -p moa-kernels --features measure --bench limits [-- --json FILE]`: what bounds a call of the CPU
//! operator on this machine. `benches/cpu_operator_goals.py --limits FILE` holds goals against it.

#![allow(clippy::print_stdout, clippy::print_stderr)]

#[cfg(target_arch = "x86_64")]
#[path = "limits/x86.rs"]
mod x86;

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    x86::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("not measured: not x86-64");
}
