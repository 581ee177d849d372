//! The cache of engines, on the library that plays TensorRT.

use std::fs;

use crate::{
    scene::{Outcome, Scene},
    tensorrt::{BUILD, Stage},
};

#[test]
fn an_engine_that_was_built_before_comes_out_of_the_cache() {
    let stage = Stage::new();
    assert!(stage.accepts("", BUILD).contains("wrote m.plan  "));
    let first = (stage.0.read("m.plan"), stage.0.read("m.plan.lock.json"));
    // A library that cannot build any more shows that nothing is built.
    let printed = stage.accepts("parser", &format!("{BUILD} --force"));
    assert!(printed.ends_with("TensorRT 10.4.0.26 on NVIDIA H200, from the cache\n"), "{printed}");
    assert_eq!((stage.0.read("m.plan"), stage.0.read("m.plan.lock.json")), first);
    assert_eq!(stage.engines(), 1);
    for (words, line) in [
        ("parser", "build m.onnx -o x.plan --dim rows=1:2:9"),
        ("parser", "build m.onnx -o x.plan --dim rows=1:2:8 --tf32"),
        ("parser newer", "build m.onnx -o x.plan --dim rows=1:2:8"),
        ("parser a100", "build m.onnx -o x.plan --dim rows=1:2:8"),
        ("parser", "build m.onnx -o x.plan --dim rows=1:2:8 --no-cache"),
        ("parser", "build m.onnx -o x.plan --dim rows=1:2:8 --cache elsewhere"),
    ] {
        stage.refuses(words, line, 4, &["the parser refuses the model"]);
    }
    let mut command = stage.command("parser", "build m.onnx -o x.plan --dim rows=1:2:8");
    command.env("MOA_CUDA_MULTIPROCESSORS", "1");
    Outcome::of(command).assert_refused("another plan of the kernels", 4, &["the parser refuses the model"]);
    stage.accepts("", "build m.onnx -o x.plan --dim rows=1:2:9 --no-cache");
    assert_eq!(stage.engines(), 1);
}

/// A lock names the file that the user gave, also where another file gave the same engine.
#[test]
fn a_cached_engine_is_locked_to_the_file_at_hand() {
    let stage = Stage(Scene::with_fixture("mlm"));
    stage.accepts("", "ck -o m.onnx --form fused");
    stage.accepts("", "prepare m.onnx -o p.onnx");
    let dims = "--dim batch=1:1:4 --dim sequence=1:8:16";
    stage.accepts("", &format!("build m.onnx -o m.plan {dims}"));
    let printed = stage.accepts("", &format!("build p.onnx -o p.plan {dims}"));
    assert!(printed.contains("from the cache"), "{printed}");
    let locks = ["m", "p"].map(|name| stage.lock(&format!("{name}.plan.lock.json")));
    assert_eq!(locks[0]["key"], locks[1]["key"]);
    for (lock, file) in locks.iter().zip(["m.onnx", "p.onnx"]) {
        assert_eq!(lock["source_sha256"], moa_export::digest::sha256(&stage.0.read(file)), "{file}");
    }
}

#[test]
fn a_damaged_cache_is_not_used_and_not_an_end() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let engines = stage.0.path("cache/moa-export/engines");
    let engine = fs::read_dir(&engines).unwrap().next().unwrap().unwrap().path();
    fs::write(engine.join("engine.plan"), "plan of somebody else\nend\n").unwrap();
    let outcome = stage.moa("", &format!("{BUILD} --force"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(
        outcome.stderr.starts_with("note: the cached engine is not used and is built anew: "),
        "{}",
        outcome.stderr
    );
    assert!(outcome.stdout.contains("built in"), "{}", outcome.stdout);
    assert_eq!(fs::read(engine.join("engine.plan")).unwrap(), stage.0.read("m.plan"));
    stage.0.write("file", "");
    let outcome = stage.moa("", &format!("{BUILD} --force --cache file/engines"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("note: the engine is not kept in the cache: "), "{}", outcome.stderr);
}

#[test]
#[cfg(unix)]
fn a_cache_that_others_may_write_is_refused_before_anything_is_built() {
    use std::os::unix::fs::PermissionsExt;
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let folder = stage.0.path("cache/moa-export/engines");
    let allow = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    allow(0o777);
    let parts = ["others may write to the cache of engines", "cache/moa-export/engines (mode 777)", "`chmod 700`"];
    stage.refuses("", &format!("{BUILD} --force"), 5, &parts);
    stage.accepts("", &format!("{BUILD} --force --no-cache"));
    allow(0o700);
    assert!(stage.accepts("", &format!("{BUILD} --force")).contains("from the cache"));
}
