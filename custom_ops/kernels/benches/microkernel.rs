//! `cargo bench -p moa-kernels --features measure`: block products beside the `gemm` crate, one thread.
//! `-- --at-most LEVEL` leaves out what is above a level of instructions, such as `avx-vnni`.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use moa_kernels::Instructions;
use moa_kernels::measure::{SIZES, product, streams};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let limit = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Some(Instructions::default()),
        ["--at-most", name] => Instructions::named(name),
        _ => None,
    };
    let Some(limit) = limit else {
        println!("usage: microkernel [--at-most {}]", moa_schema::INSTRUCTION_LEVELS.join("|"));
        return ExitCode::FAILURE;
    };
    print_figures(limit);
    ExitCode::SUCCESS
}

fn print_figures(limit: Instructions) {
    println!("rows times weights from memory, one thread: billion weights a second");
    println!("{:>6}  {:>7}  {:>8}  {:>8}  {:>10}  {:>9}", "rows", "stored", "vectors", "best", "best, GB/s", "rounded");
    for figure in streams(limit) {
        let (stored, rows, [vectors, best, rounded]) = (figure.stored, figure.rows, figure.weights);
        print!("{rows:>6}  {stored:>7}  {vectors:>8.2}  {best:>8.2}  {:>10.1}", best * figure.bytes);
        println!("  {rounded:>9.2}");
    }
    println!(
        "{:>20}  {:>8}  {:>8}  {:>8}  {:>8}  {:>8}  {:>8}  {:>8}  GFLOP/s",
        "rows x inner x columns", "vectors", "best", "bf16", "rounded", "int8", "int4", "gemm"
    );
    for figure in SIZES.into_iter().filter_map(|sizes| product(limit, sizes)) {
        let ([rows, inner, columns], [best, brain]) = (figure.sizes, figure.best);
        print!("{rows:>6} x {inner:>4} x {columns:>4}    {:>8.0}  {best:>8.0}  {brain:>8.0}", figure.packed);
        let [int8, int4] = figure.quantized;
        println!("  {:>8.0}  {int8:>8.0}  {int4:>8.0}  {:>8.0}", figure.rounded, figure.gemm);
    }
}
