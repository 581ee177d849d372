//! `cargo bench -p moa-kernels --features measure`: block products beside the `gemm` crate, one thread.

#![allow(clippy::print_stdout)]

use moa_kernels::measure::{SIZES, product};

fn main() {
    println!("{:>20}  {:>8}  {:>8}  GFLOP/s", "rows x inner x columns", "packed", "gemm");
    for figure in SIZES.into_iter().filter_map(product) {
        let [rows, inner, columns] = figure.sizes;
        println!("{rows:>6} x {inner:>4} x {columns:>4}    {:>8.0}  {:>8.0}", figure.packed, figure.gemm);
    }
}
