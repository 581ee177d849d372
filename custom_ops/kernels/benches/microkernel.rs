//! `cargo bench -p moa-kernels --features measure`: block products beside the `gemm` crate, one thread.

#![allow(clippy::print_stdout)]

use moa_kernels::measure::{SIZES, product, streams};

fn main() {
    println!("one row times weights from memory, one thread");
    for figure in streams() {
        let (stored, gigabytes, weights) = (figure.stored, figure.gigabytes, figure.weights);
        println!("{stored:>6}  {gigabytes:>6.1} GB/s  {weights:>6.1} billion weights/s");
    }
    println!(
        "{:>20}  {:>8}  {:>8}  {:>8}  {:>8}  GFLOP/s",
        "rows x inner x columns", "vectors", "best", "bf16", "gemm"
    );
    for figure in SIZES.into_iter().filter_map(product) {
        let ([rows, inner, columns], [best, brain]) = (figure.sizes, figure.best);
        print!("{rows:>6} x {inner:>4} x {columns:>4}    {:>8.0}  {best:>8.0}  {brain:>8.0}", figure.packed);
        println!("  {:>8.0}", figure.gemm);
    }
}
