//! Link options of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // A runtime that unloads the library would leave behind a domain whose operators point into it.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
