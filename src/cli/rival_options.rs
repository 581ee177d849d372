//! Options of other programs, and what does here what they do there.

use clap::CommandFactory;

use super::args::Arguments;

struct Rival {
    /// How others spell it.
    options: &'static [&'static str],
    /// Commands that it is told of; none are all.
    commands: &'static [&'static str],
    /// The option that a command must have for the help to be of use.
    ours: Option<&'static str>,
    help: &'static str,
}

const RIVALS: [Rival; 9] = [
    Rival {
        options: &["--model", "-m"],
        commands: &["export"],
        ours: None,
        help: "the checkpoint comes first, without an option: moa-export CHECKPOINT -o OUT",
    },
    Rival {
        options: &["--overwrite", "--yes", "-y", "-f"],
        commands: &[],
        ours: Some("force"),
        help: "--force replaces what is there",
    },
    Rival {
        options: &["--precision", "--quantize"],
        commands: &["export", "baseline"],
        ours: Some("dtype"),
        help: "--dtype says the type of the weights, such as --dtype fp16 or --dtype int8",
    },
    Rival {
        options: &["--fp16"],
        commands: &["export", "baseline", "plan"],
        ours: Some("dtype"),
        help: "it is --dtype fp16",
    },
    Rival {
        options: &["--bf16"],
        commands: &["export", "baseline", "plan"],
        ours: Some("dtype"),
        help: "it is --dtype bf16",
    },
    Rival {
        options: &["--precision", "--quantize", "--fp16", "--bf16"],
        commands: &["build"],
        ours: None,
        help: "an engine has the types of its model: export with --dtype fp16 or --dtype bf16",
    },
    Rival {
        options: &["--verbose", "--quiet", "-v", "-q"],
        commands: &[],
        ours: None,
        help: "leave it out: there is none; results go to stdout, notes and progress to stderr",
    },
    Rival {
        options: &["--num-beams", "--num_beams"],
        commands: &["generate"],
        ours: Some("beam"),
        help: "the beams of a translation are given with --beam",
    },
    Rival {
        options: &["--output", "-o"],
        commands: &["generate"],
        ours: None,
        help: "the texts go to stdout; redirect with `> FILE`",
    },
];

/// What to type in place of an option that this `command`, or the export where it has no name, does not have.
pub(super) fn help_for(command: &str, option: &str) -> Option<&'static str> {
    let command = if command.is_empty() { "export" } else { command };
    let all = Arguments::command();
    let has = |ours| {
        let command = all.find_subcommand(command);
        command.is_some_and(|command| command.get_arguments().any(|known| known.get_long() == Some(ours)))
    };
    let rival = RIVALS.iter().find(|rival| {
        rival.options.contains(&option)
            && (rival.commands.is_empty() || rival.commands.contains(&command))
            && rival.ours.is_none_or(has)
    });
    rival.map(|rival| rival.help)
}
