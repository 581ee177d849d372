//! The kernels, run on an emulator of the hardware, against the contract in f64.
//!
//! The emulator (`kernels/emulator`) compiles the very sources that become machine code with the system's C++ compiler.
//! Every case runs under four orders of threads, whose results must have the same bits.

#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::unwrap_used)]

mod attention;
#[path = "../../../kernels/tests/kernels/attention_reference.rs"]
mod attention_reference;
mod complaints;
mod devices;
mod emulator;
mod faults;
mod feed_forward;
mod grouped;
mod modular;
mod routers;
#[path = "../../../kernels/tests/kernels/routing_reference.rs"]
mod routing_reference;
mod scales;
mod shared_caches;
mod support;
mod unseen;
mod warpgroups;
