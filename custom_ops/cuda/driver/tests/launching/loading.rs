//! Contexts, modules and functions.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use moa_cuda::Element;
use moa_cuda_driver::{Driver, KernelSet};
use moa_cuda_fake::{Fake, archive};

use crate::support::{bind, kernels};

#[test]
fn a_machine_without_a_driver_gets_a_clear_line() {
    let error = Driver::open(Path::new("/nowhere/libcuda.so.1")).err().unwrap().to_string();
    assert!(error.starts_with("the CUDA driver /nowhere/libcuda.so.1 cannot be loaded: "), "{error}");
}

#[test]
fn a_library_that_lacks_a_function_is_an_old_driver() {
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6", "/lib64/libc.so.6"];
    let Some(path) = libc.iter().map(Path::new).find(|path| path.exists()) else {
        let _ = writeln!(io::stdout(), "skipped: no C library where it mostly is");
        return;
    };
    let error = Driver::open(path).err().unwrap().to_string();
    let needed = "a driver of CUDA 12 (525) or newer, and of CUDA 12.9 (575) where they run through PTX";
    assert_eq!(error, format!("the CUDA driver has no cuInit; the kernels need {needed}"));
}

#[test]
fn loading_resolves_every_function_and_raises_its_limit() {
    let fake = Fake::load();
    let names = ["one".to_owned(), "two".to_owned()];
    let archive = archive(&["sm_90a", "compute_80"], &names);
    fake.taken_log();
    let kernels = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).unwrap();
    kernels.load(Element::Bf16).unwrap();
    kernels.load(Element::Bf16).unwrap();
    let log = fake.taken_log();
    let attributes = ["75", "76", "16", "97", "38"].map(|number| format!("cuDeviceGetAttribute {number}"));
    let mut expected = vec![
        "cuDeviceGet 0".to_owned(),
        "cuDevicePrimaryCtxRetain 0".into(),
        "cuDriverGetVersion".into(),
        "cuCtxPushCurrent 1000".into(),
        "cuCtxGetDevice".into(),
    ];
    expected.extend(attributes);
    expected.extend(["cuMemAlloc 4", "cuMemsetD8 0 4", "cuMemcpyDtoH 4", "cuCtxPopCurrent"].map(String::from));
    expected.extend(["cuCtxPushCurrent 1000", "cuModuleLoadDataEx bf16-sm_90a"].map(String::from));
    for name in names {
        expected.push(format!("cuModuleGetFunction {name}"));
        expected.extend([4, 1].map(|attribute| format!("cuFuncGetAttribute {name} {attribute}")));
        expected.push(format!("cuFuncSetAttribute {name} 8 {}", (227 << 10) - 1024));
        expected.push(format!("cuFuncSetAttribute {name} 9 100"));
    }
    expected.push("cuCtxPopCurrent".into());
    assert_eq!(log, expected);

    drop(kernels);
    let end =
        ["cuCtxPushCurrent 1000", "cuModuleUnload 5001", "cuMemFree", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 0"];
    assert_eq!(fake.taken_log(), end);
}

#[test]
fn the_nearest_image_of_the_device_is_loaded() {
    for (capability, forced, expected) in [
        (90, None, "f32-sm_90a"),
        (86, None, "f32-sm_80"),
        (120, None, "f32-compute_80"),
        (90, Some((8, 0)), "f32-compute_80"),
        (90, Some((7, 0)), "f32-compute_70"),
    ] {
        let fake = Fake::load();
        fake.set_capability(capability);
        let archive = archive(&["sm_70", "sm_80", "sm_90a", "compute_70", "compute_80"], &["one".to_owned()]);
        let kernels = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, forced).unwrap();
        fake.taken_log();
        kernels.load(Element::F32).unwrap();
        let expected = format!("cuModuleLoadDataEx {expected}");
        assert!(fake.taken_log().contains(&expected), "{expected}");
    }
}

/// The fake's blocks have 227 KiB of shared memory, whatever its capability.
#[test]
fn an_older_path_has_the_shared_memory_of_its_own_devices() {
    for (own, forced, expected) in [
        (90, None, 227),
        (90, Some((9, 0)), 227),
        (90, Some((8, 0)), 163),
        (90, Some((8, 6)), 99),
        (90, Some((7, 5)), 64),
        (90, Some((7, 0)), 96),
        (75, None, 227),
        (120, Some((9, 0)), 227),
    ] {
        let fake = Fake::load();
        fake.set_capability(own);
        let archive =
            archive(&["sm_75", "sm_90a", "sm_120", "compute_70", "compute_75", "compute_80"], &["one".into()]);
        let set = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, forced).unwrap();
        assert_eq!(set.facts().device.shared_bytes_per_block, expected << 10, "{own} {forced:?}");
        fake.taken_log();
        if set.load(Element::F16).is_ok() {
            let limit = format!("cuFuncSetAttribute one 8 {}", (expected << 10) - 1024);
            assert!(fake.taken_log().contains(&limit), "{limit}");
        }
    }
}

#[test]
fn a_device_that_nothing_runs_on_is_named() {
    let fake = Fake::load();
    fake.set_capability(61);
    let archive = archive(&["sm_70", "compute_70"], &[]);
    let kernels = KernelSet::on_device(Arc::clone(&fake.driver), archive.clone().into(), 0, None).unwrap();
    let error = kernels.load(Element::F16).unwrap_err().to_string();
    assert_eq!(error, "the kernel archive has no f16 kernels for compute capability 6.1");
    let newer =
        KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, Some((9, 0))).err().unwrap().to_string();
    assert_eq!(newer, "kernels of compute capability 9.0 cannot run on a device of 6.1");
}

#[test]
fn the_current_context_is_used_where_the_caller_has_one() {
    let fake = Fake::load();
    let archive = archive(&["sm_90a"], &["one".to_owned()]);
    fake.make_current(0);
    let none = KernelSet::in_current_context(Arc::clone(&fake.driver), archive.clone().into(), None).err().unwrap();
    assert!(none.to_string().contains("no current CUDA context"), "{none}");
    fake.make_current(77);
    fake.taken_log();
    let kernels = KernelSet::in_current_context(Arc::clone(&fake.driver), archive.into(), None).unwrap();
    kernels.load(Element::F16).unwrap();
    drop(kernels);
    let log = fake.taken_log();
    assert!(!log.iter().any(|line| line.contains("Push") || line.contains("Primary")), "{log:?}");
}

#[test]
fn what_fails_while_loading_is_undone() {
    for (function, call, undone) in [
        ("cuDriverGetVersion", 1, vec!["cuDevicePrimaryCtxRelease 0"]),
        ("cuCtxPushCurrent", 1, vec!["cuDevicePrimaryCtxRelease 0"]),
        ("cuMemAlloc", 1, vec!["cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 0"]),
        ("cuMemsetD8", 1, vec!["cuMemFree", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 0"]),
        ("cuMemcpyDtoH", 1, vec!["cuMemFree", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 0"]),
    ] {
        let fake = Fake::load();
        fake.taken_log();
        fake.fail(function, call, 2);
        let archive = archive(&["sm_90a"], &[]);
        let error = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, None).err().unwrap().to_string();
        assert_eq!(error, format!("{function} failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory"));
        let log = fake.taken_log();
        let after = log.iter().position(|line| line.starts_with(function)).unwrap() + 1;
        assert_eq!(log[after..], undone, "{function}");
    }
    for function in ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute"] {
        let fake = Fake::load();
        let kernels = kernels(&fake);
        fake.taken_log();
        fake.fail(function, 1, 700);
        let error = bind(&kernels).err().unwrap().to_string();
        assert!(error.starts_with(&format!("{function} failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")), "{error}");
        let log = fake.taken_log();
        assert_eq!(log.iter().any(|line| line.starts_with("cuModuleUnload")), function != "cuModuleLoadDataEx");
        bind(&kernels).unwrap();
    }
}

#[test]
fn what_the_driver_says_about_ptx_is_passed_on() {
    let fake = Fake::load();
    let kernels = kernels(&fake);
    fake.fail("cuModuleLoadDataEx", 1, 218);
    let error = kernels.load(Element::F16).unwrap_err().to_string();
    assert_eq!(error, "cuModuleLoadDataEx failed: unknown (218), unknown: ptxas: line 7: syntax error");
}

/// Machine code that fails, or PTX under a driver that knows it, has another reason.
#[test]
fn ptx_that_is_newer_than_the_driver_names_the_driver_that_it_needs() {
    for (version, forced, old) in [(12_080, Some((8, 0)), true), (12_090, Some((8, 0)), false), (12_080, None, false)] {
        let fake = Fake::load();
        fake.set_version(version);
        let archive = archive(&["sm_90a", "compute_80"], &["one".to_owned()]);
        let kernels = KernelSet::on_device(Arc::clone(&fake.driver), archive.into(), 0, forced).unwrap();
        fake.taken_log();
        fake.fail("cuModuleLoadDataEx", 1, 222);
        let error = kernels.load(Element::F16).unwrap_err().to_string();
        assert!(error.starts_with("cuModuleLoadDataEx failed: unknown (222), unknown"), "{error}");
        let needed = "; the f16 kernels run through PTX on this device, which needs a driver of CUDA 12.9 (575 on Linux) \
                      or newer, and this one is of CUDA 12.8";
        assert_eq!(error.ends_with(needed), old, "{error}");
        kernels.load(Element::F16).unwrap();
    }
}

#[test]
fn an_unknown_code_is_still_a_clear_line() {
    let fake = Fake::load();
    fake.fail("cuDriverGetVersion", 1, 12345);
    let error = fake.driver.version().unwrap_err().to_string();
    assert_eq!(error, "cuDriverGetVersion failed: unknown (12345), unknown");
    assert_eq!(fake.driver.version().unwrap(), 13000);
}
