//! Building and running the emulator.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_cuda::Buffer;
use moa_cuda::plan::Plan;
use sha2::{Digest, Sha256};

const UNITS: [&str; 9] = [
    "f32.cu",
    "f16.cu",
    "bf16.cu",
    "emulator/block.cpp",
    "emulator/main.cpp",
    "emulator/probe.cpp",
    "emulator/signal.cpp",
    "emulator/warp.cpp",
    "emulator/warpgroup.cpp",
];

/// A load or store of a vector at an address that does not allow it ends the emulator, as it would end the GPU's
/// context.
const FLAGS: [&str; 10] = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-c",
];

fn kernels() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Hash of every source and of the flags.
fn source_hash(compiler: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{compiler}{FLAGS:?}"));
    for folder in [kernels(), kernels().join("emulator")] {
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files.iter().filter(|file| file.is_file()) {
            hash.update(fs::read(file).unwrap());
        }
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn compile(compiler: &str, unit: &str, object: &Path) -> Result<(), String> {
    let mut command = Command::new(compiler);
    command.args(FLAGS);
    if cfg!(target_arch = "x86_64") && std::is_x86_feature_detected!("fma") {
        command.args(["-mfma", "-mavx2"]);
    }
    if unit.ends_with(".cu") {
        command.args(["-x", "c++"]);
    }
    succeed(command.arg(kernels().join(unit)).arg("-o").arg(object))
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("a C++ compiler is needed ({error}); name it in CXX"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn build(compiler: &str) -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("emulator-{}", source_hash(compiler)));
    if program.is_file() {
        return Ok(program);
    }
    let build = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
    let objects: Vec<_> = (0..UNITS.len()).map(|index| build.path().join(format!("{index}.o"))).collect();
    let compile_some = |part: usize| {
        let mut units = UNITS.iter().zip(&objects).skip(part).step_by(2);
        units.try_for_each(|(unit, object)| compile(compiler, unit, object))
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| compile_some(1));
        compile_some(0).and(other.join().unwrap())
    })?;
    let linked = build.path().join("emulator");
    succeed(Command::new(compiler).args(&objects).arg("-o").arg(&linked))?;
    fs::rename(linked, &program).map_err(|error| error.to_string())?;
    Ok(program)
}

/// The emulator, built once for every state of the sources.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let program = PROGRAM.get_or_init(|| build(&compiler));
    program.as_ref().unwrap_or_else(|message| panic!("{message}"))
}

/// The tensors of one call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tensors {
    /// Bytes of the inputs by position; `None` where absent.
    pub(crate) inputs: Vec<Option<Vec<u8>>>,
    /// Length in bytes of the outputs by position; `None` where nobody asks.
    pub(crate) outputs: Vec<Option<usize>>,
    /// Inputs, and the outputs that stand in their memory.
    pub(crate) in_place: Vec<(usize, usize)>,
    /// Bytes that every tensor begins behind a multiple of 16.
    pub(crate) offset: usize,
}

/// What a call leaves.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    /// Bytes of the outputs by position.
    pub(crate) outputs: Vec<Option<Vec<u8>>>,
    /// The status word.
    pub(crate) status: u32,
}

/// Writes a request, and remembers which buffer is which.
struct Request {
    buffers: Vec<u8>,
    count: u64,
    /// Addresses and lengths of those that may be written.
    writable: Vec<(u64, usize)>,
}

impl Request {
    /// Adds a buffer, and returns its address.
    fn add(&mut self, content: &[u8], writable: bool, offset: usize) -> u64 {
        let padded = [vec![0xA5; offset], content.to_vec()].concat();
        self.buffers.extend((padded.len() as u64).to_le_bytes());
        self.buffers.extend(u64::from(writable).to_le_bytes());
        self.buffers.extend(&padded);
        self.count += 1;
        let address = (self.count << 40) + offset as u64;
        if writable {
            self.writable.push((address, padded.len()));
        }
        address
    }

    /// Takes what stands at the writable buffer `address` at the end apart from what stands at the others.
    fn content<'a>(&self, contents: &'a [u8], address: u64) -> &'a [u8] {
        let place = self.writable.iter().position(|(other, _)| *other == address).unwrap();
        let before: usize = self.writable[..place].iter().map(|(_, length)| length).sum();
        &contents[before..before + self.writable[place].1]
    }
}

/// Runs a plan; `Err` holds what the emulator complains of.
pub(crate) fn try_run(plan: &Plan, tensors: &Tensors) -> Result<Results, String> {
    let mut request = Request { buffers: Vec::new(), count: 0, writable: Vec::new() };
    let offset = tensors.offset;
    let is_updated = |index| tensors.in_place.iter().any(|(input, _)| *input == index);
    let given = tensors.inputs.iter().enumerate();
    let inputs: Vec<u64> = given
        .map(|(index, input)| input.as_ref().map_or(0, |input| request.add(input, is_updated(index), offset)))
        .collect();
    let mut output = |(index, length): (usize, &Option<usize>)| {
        let (Some(length), place) = (length, tensors.in_place.iter().find(|(_, output)| *output == index)) else {
            return 0;
        };
        place.map_or_else(|| request.add(&vec![0xFF; *length], true, offset), |(input, _)| inputs[*input])
    };
    let outputs: Vec<u64> = tensors.outputs.iter().enumerate().map(&mut output).collect();
    let workspace = request.add(&vec![0xFF; plan.workspace_bytes], true, 0);
    let status = request.add(&[0; 4], true, 0);
    let address = |buffer: Buffer| match buffer {
        Buffer::Null => 0,
        Buffer::Input(index) => inputs.get(index).copied().unwrap_or(0),
        Buffer::Output(index) => outputs.get(index).copied().unwrap_or(0),
        Buffer::Workspace(offset) => workspace + offset as u64,
        Buffer::Status => status,
    };
    let mut bytes = request.count.to_le_bytes().to_vec();
    bytes.extend(&request.buffers);
    bytes.extend((plan.launches.len() as u64).to_le_bytes());
    for launch in &plan.launches {
        let name = format!("{}:{}", launch.element.module(), launch.kernel);
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
        for number in [launch.grid, launch.block, launch.shared_bytes] {
            bytes.extend(u64::from(number).to_le_bytes());
        }
        bytes.extend(launch.parameters.bytes(address));
    }
    let contents = execute(&bytes)?;
    let output = |address: &u64| (*address != 0).then(|| request.content(&contents, *address)[offset..].to_vec());
    let status = request.content(&contents, status).try_into().unwrap();
    Ok(Results { outputs: outputs.iter().map(output).collect(), status: u32::from_le_bytes(status) })
}

/// Runs a plan that must run.
pub(crate) fn run(plan: &Plan, tensors: &Tensors) -> Results {
    try_run(plan, tensors).unwrap_or_else(|message| panic!("{message}\n{plan:#?}"))
}

fn execute(request: &[u8]) -> Result<Vec<u8>, String> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let name = COUNT.fetch_add(1, Ordering::Relaxed);
    let [from, to] = ["request", "result"].map(|kind| folder.path().join(format!("{kind}-{name}")));
    fs::write(&from, request).unwrap();
    let output = Command::new(program()).arg(&from).arg(&to).output().unwrap();
    if output.status.success() {
        Ok(fs::read(to).unwrap())
    } else {
        Err(format!("{} {}", output.status, String::from_utf8_lossy(&output.stderr)))
    }
}
