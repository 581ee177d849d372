//! The project's own commands: `cargo xtask demo`, `cargo xtask test`, `cargo xtask check`.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod check;
mod demo;
mod process;
mod project;
mod python;
mod tally;
mod test;

use std::process::ExitCode;

use project::Project;

const HELP: &str = "\
cargo xtask COMMAND

  demo    export the bundled translation model, verify it on every backend, translate
  test    run every test of the project, Rust and Python
          --optimum: the tests with Hugging Face's Optimum alone, which need PyTorch
  check   formatting, clippy, documentation, the compile half alone, layers, sizes

Python packages are installed under target/python and nowhere else. PYTHON names another
interpreter than python3, MOA_PYTORCH a folder with an installed PyTorch, where
`test --optimum` is not to load several GB.";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let command: fn(&Project) -> Result<bool, String> = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        ["demo"] => demo::run,
        ["test"] => test::run,
        ["test", "--optimum"] => test::run_optimum,
        ["check"] => check::run,
        [] | ["help" | "-h" | "--help"] => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("error: there is no `cargo xtask {}`\n\n{HELP}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match Project::find().and_then(|project| command(&project)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
