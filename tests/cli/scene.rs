//! A temporary folder in which the program is run.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use moa_export::onnx::proto::ModelProto;
use prost::Message;
use serde_json::Value;
use tempfile::TempDir;

use crate::{common::data, model::Model};

/// Name, kind and content of everything below a folder.
pub(crate) type Snapshot = BTreeMap<PathBuf, Entry>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    Folder,
    Link(PathBuf),
    File(Vec<u8>),
}

/// What exports say of checkpoints without the files that text needs, as most fixtures are.
pub(crate) const NO_TOKENIZER: &str =
    "note: no tokenizer.json lies beside the checkpoint; `generate` takes token ids with --token-ids alone\n";
pub(crate) const NO_DICTIONARY: &str = "note: no dictionary was found, and `generate` needs one: export with --dict \
                                        FILE, or --source-dict and --target-dict\n";

/// stderr of a command without these notes, and without the verdict that stands beside a JSON document.
pub(crate) fn beside(line: &str, stderr: &str) -> String {
    let is_verdict = |said: &str| line.contains("--json") && said.starts_with("verified on ");
    let is_known = |said: &str| [NO_TOKENIZER, NO_DICTIONARY].contains(&said) || is_verdict(said);
    stderr.split_inclusive('\n').filter(|said| !is_known(said)).collect()
}

/// What a command printed as JSON.
pub(crate) fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A folder that is removed at the end of a test.
pub(crate) struct Scene {
    folder: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// With a checkpoint in the folder `ck`.
    pub(crate) fn with(model: &Model) -> Self {
        let scene = Self::new();
        model.write(&scene.path("ck"));
        scene
    }

    /// With configuration and tensors of a fixture in the folder `ck`.
    pub(crate) fn with_fixture(name: &str) -> Self {
        let scene = Self::new();
        fs::create_dir(scene.path("ck")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(data(name).join(file), scene.path("ck").join(file)).unwrap();
        }
        scene
    }

    /// With a fixture in `ck` and its export `m.onnx`.
    pub(crate) fn exported(name: &str, options: &str) -> Self {
        let scene = Self::with_fixture(name);
        scene.accepts(&format!("ck -o m.onnx {options}"));
        scene
    }

    /// Changes the model in the file `name`.
    pub(crate) fn edit(&self, name: &str, change: impl FnOnce(&mut ModelProto)) {
        let mut model = self.model(name);
        change(&mut model);
        self.write(name, model.encode_to_vec());
    }

    /// The model in the file `name`.
    pub(crate) fn model(&self, name: &str) -> ModelProto {
        ModelProto::decode(self.read(name).as_slice()).unwrap()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Names below a folder, sorted.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::new();
        let mut folders = vec![self.folder.path().to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let kind = fs::symlink_metadata(&path).unwrap();
                let entry = if kind.is_symlink() {
                    Entry::Link(fs::read_link(&path).unwrap())
                } else if kind.is_dir() {
                    folders.push(path.clone());
                    Entry::Folder
                } else {
                    Entry::File(fs::read(&path).unwrap())
                };
                snapshot.insert(path.strip_prefix(self.folder.path()).unwrap().into(), entry);
            }
        }
        snapshot
    }

    /// The program with the words of `line` as arguments.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moa-export"));
        command.current_dir(self.folder.path()).args(line.split_whitespace());
        command
    }

    /// The program with `line`, after the commands `before` of a shell.
    pub(crate) fn command_after(&self, before: &str, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.current_dir(self.folder.path());
        command.args(["-c", &format!("{before}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_moa-export")]);
        command.args(line.split_whitespace());
        command
    }

    pub(crate) fn moa(&self, line: &str) -> Outcome {
        Outcome::of(self.command(line))
    }

    /// Runs without an error or a note of another kind, and gives back what was printed.
    #[track_caller]
    pub(crate) fn accepts(&self, line: &str) -> String {
        let Outcome { code, stdout, stderr } = self.moa(line);
        assert!(!stderr.contains(NO_TOKENIZER) || !self.path("ck/tokenizer.json").exists(), "{stderr}");
        assert!(!stderr.contains(NO_DICTIONARY) || !self.path("ck/dict.txt").exists(), "{stderr}");
        assert_eq!((code, beside(line, &stderr).as_str()), (Some(0), ""), "moa-export {line}\n{stdout}");
        stdout
    }

    /// [`Self::accepts`], where the environment of `command`, which is `line`, is that of a runtime.
    #[track_caller]
    pub(crate) fn accepts_in(&self, command: Command, line: &str) -> String {
        let Outcome { code, stdout, stderr } = Outcome::of(command);
        assert_eq!((code, beside(line, &stderr).as_str()), (Some(0), ""), "{line}\n{stdout}");
        stdout
    }

    /// Ends with `code`, one line of error that holds `parts`, and everything as it was.
    #[track_caller]
    pub(crate) fn refuses(&self, line: &str, code: u8, parts: &[&str]) {
        self.refuses_in(self.command(line), line, code, parts);
    }

    /// [`Self::refuses`], where the environment of `command` is that of a runtime; `what` says which command it is.
    #[track_caller]
    pub(crate) fn refuses_in(&self, command: Command, what: &str, code: u8, parts: &[&str]) {
        let before = self.snapshot();
        Outcome::of(command).assert_refused(what, code, parts);
        self.assert_unchanged(&before, what);
    }

    #[track_caller]
    pub(crate) fn assert_unchanged(&self, before: &Snapshot, what: &str) {
        let after = self.snapshot();
        let paths = before.keys().chain(after.keys());
        let changed: Vec<_> = paths.filter(|path| before.get(*path) != after.get(*path)).collect();
        assert!(changed.is_empty(), "{what}: changed {changed:?}");
    }
}

/// What the program said.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn of(mut command: Command) -> Self {
        command.output().unwrap().into()
    }

    /// One `error` line that starts with the exit code, at most one `help` line, of usage exactly one, and nothing on
    /// stdout.
    #[track_caller]
    pub(crate) fn assert_refused(&self, what: &str, code: u8, parts: &[&str]) {
        assert_eq!(self.stdout, "", "{what}");
        self.assert_failed(what, code, parts);
    }

    #[track_caller]
    pub(crate) fn assert_failed(&self, what: &str, code: u8, parts: &[&str]) {
        let stderr = &beside(what, &self.stderr);
        assert_eq!(self.code, Some(code.into()), "{what}\n{stderr}");
        let lines: Vec<_> = stderr.lines().collect();
        let (error, help) = match lines.as_slice() {
            [error] => (*error, None),
            [error, help] => (*error, Some(*help)),
            _ => panic!("{what}: one error line and at most one help line, found\n{stderr}"),
        };
        let numbered =
            error.strip_prefix(&format!("error[MOA-E{code:02}")).unwrap_or_else(|| panic!("{what}: {error}"));
        assert!(numbered.get(2..).is_some_and(|rest| rest.starts_with("]: ")), "{what}: {error}");
        assert!(help.is_none_or(|help| help.starts_with("help: ")), "{what}: {stderr}");
        assert!(help.is_some() || code != 2, "{what}: what to type instead is not said in\n{stderr}");
        assert!(!stderr.contains("panicked at") && !stderr.contains(".moa-"), "{what}: {stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{what}: {part:?} is not in\n{stderr}");
        }
    }
}

impl From<Output> for Outcome {
    fn from(Output { status, stdout, stderr }: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }
}

/// Fails where the runtime or the operator library is not named.
pub(crate) fn require_runtime() {
    for variable in ["ORT_DYLIB_PATH", "MOA_ORT_LIBRARY"] {
        let path = std::env::var_os(variable).unwrap_or_else(|| panic!("set {variable}; this test needs the runtime"));
        assert!(Path::new(&path).is_file(), "{variable} must name a file, found {}", path.display());
    }
}
