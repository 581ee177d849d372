//! The `moa-export` program.

fn main() -> std::process::ExitCode {
    moa_export::cli::main()
}
