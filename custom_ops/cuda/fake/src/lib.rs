//! A CUDA driver that writes down what it is asked, for tests of what calls it. Panics where a test is wrong.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, process};

use libloading::Library;
use moa_cuda::archive::{Image, KernelResources, MAGIC, Manifest};
use moa_cuda::{Element, SOURCE_HASH};
use moa_cuda_driver::Driver;

/// A fake driver of one test: a library of its own, so that no two tests share a log.
pub struct Fake {
    library: Library,
    path: PathBuf,
    /// The driver that the library serves.
    pub driver: Arc<Driver>,
}

impl Fake {
    /// Loads another copy.
    pub fn load() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let built = Path::new(env!("OUT_DIR")).join("libfake_cuda.so");
        let path = built.with_extension(format!("{}-{}.so", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::copy(built, &path).unwrap();
        // SAFETY: the library's initialisers make empty containers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let driver = Arc::new(Driver::open(&path).unwrap());
        Self { library, path, driver }
    }

    fn call<T: Copy>(&self, name: &CStr) -> T {
        // SAFETY: callers name a function of the fake by its type.
        *unsafe { self.library.get::<T>(name.to_bytes_with_nul()) }.unwrap()
    }

    /// What was asked since the last time, one line a call, without questions for the current context.
    pub fn taken_log(&self) -> Vec<String> {
        // SAFETY: the text lives until the log changes.
        let text = unsafe { CStr::from_ptr(self.call::<extern "C" fn() -> *const c_char>(c"fake_log")()) };
        let lines = text.to_str().unwrap().lines().filter(|line| *line != "cuCtxGetCurrent");
        let lines = lines.map(str::to_owned).collect();
        self.call::<extern "C" fn()>(c"fake_clear")();
        lines
    }

    /// Makes the `call`th call of `function` from now on fail with `code`.
    pub fn fail(&self, function: &str, call: i32, code: i32) {
        let name = CString::new(function).unwrap();
        self.call::<extern "C" fn(*const c_char, c_int, c_int)>(c"fake_fail")(name.as_ptr(), call, code);
    }

    /// The first bytes, at most 1024, of the parameter of launch `index` since the log was taken.
    pub fn parameters(&self, index: usize, bytes: usize) -> Vec<u8> {
        let start = self.call::<extern "C" fn(usize) -> *const u8>(c"fake_parameters")(index);
        // SAFETY: the fake keeps 1024 bytes.
        unsafe { std::slice::from_raw_parts(start, bytes.min(1024)) }.to_vec()
    }

    /// Makes the device one of compute capability `capability / 10 . capability % 10`; 9.0 before.
    pub fn set_capability(&self, capability: i32) {
        self.call::<extern "C" fn(c_int)>(c"fake_capability")(capability);
    }

    /// Makes the driver one of that version of the API, 1000 · major + 10 · minor; 13.0 before.
    pub fn set_version(&self, version: i32) {
        self.call::<extern "C" fn(c_int)>(c"fake_version")(version);
    }

    /// Says whether every stream is being captured.
    pub fn set_capturing(&self, capturing: bool) {
        self.call::<extern "C" fn(c_int)>(c"fake_capturing")(capturing.into());
    }

    /// Gives the calling thread a context, or takes it away with 0.
    pub fn make_current(&self, context: usize) {
        self.call::<extern "C" fn(usize)>(c"fake_make_current")(context);
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// An archive in which every module has `kernels`, for each of `targets`; an image is the text `MODULE-TARGET`.
pub fn archive(targets: &[&str], kernels: &[String]) -> Vec<u8> {
    let (mut images, mut payload) = (Vec::new(), Vec::new());
    for element in Element::ALL {
        for target in targets {
            let text = format!("{}-{target}\0", element.module());
            let resources = kernels.iter().map(|name| KernelResources {
                name: name.clone(),
                registers: 40,
                shared_bytes: 1024,
                local_bytes: 0,
                max_threads: 256,
                instructions: None,
            });
            images.push(Image {
                module: element.module().into(),
                target: (*target).to_owned(),
                offset: payload.len() as u64,
                bytes: text.len() as u64,
                kernels: resources.collect(),
            });
            payload.extend(text.into_bytes());
        }
    }
    let source_hash = SOURCE_HASH.to_owned();
    let manifest = Manifest { source_hash, script_hash: None, compiler: String::new(), disassembler: None, images };
    let json = serde_json::to_vec(&manifest).unwrap();
    [&MAGIC[..], &(json.len() as u64).to_le_bytes(), &json, &payload].concat()
}
