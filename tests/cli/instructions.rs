//! `MOA_CPU_INSTRUCTIONS` bounds what the operator library uses, and exports are proved with each level of it;
//! `MOA_CPU_PACKING` says how it packs.

use std::fs;

use crate::scene::{Outcome, Scene, require_runtime};

const VARIABLE: &str = "MOA_CPU_INSTRUCTIONS";
const LEVELS: [&str; 6] = ["portable", "neon", "avx2", "avx-vnni", "avx512", "amx"];

fn with(scene: &Scene, level: &str, line: &str) -> Outcome {
    let mut command = scene.command(line);
    command.env(VARIABLE, level);
    Outcome::of(command)
}

/// Levels that the processor lacks are those below them.
#[test]
fn exports_are_proved_with_every_level() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    for dtype in ["fp32", "bf16-products", "fp16", "int8-products", "int4-products"] {
        scene.accepts(&format!("ck -o {dtype} --dtype {dtype}"));
        for level in LEVELS {
            let outcome = with(&scene, level, &format!("verify {dtype} --checkpoint ck --backends ort --threads 1"));
            assert_eq!(outcome.code, Some(0), "{dtype} {level}: {}{}", outcome.stdout, outcome.stderr);
        }
    }
}

/// Plain arithmetic rounds each product where other levels fuse it with the sum.
#[test]
fn the_library_keeps_to_a_level() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let outputs = ["portable", "", LEVELS[5]].map(|level| {
        let line = format!("run out --random --seq 16 --outputs {level}.safetensors --threads 1");
        let outcome = with(&scene, level, &line);
        assert_eq!(outcome.code, Some(0), "{level}: {}", outcome.stderr);
        fs::read(scene.path(&format!("{level}.safetensors"))).unwrap()
    });
    assert!(outputs[1] == outputs[2], "an empty value counts as none");
    for line in [
        "verify out --checkpoint ck --backends ort --threads 1 --json",
        "bench out --backends ort --samples 2 --warm-up 0.01 --seq 4 --threads 1 --json",
    ] {
        assert_eq!(with(&scene, "avx2", &format!("{line} told.json --force")).code, Some(0), "{line}");
        assert!(String::from_utf8_lossy(&scene.read("told.json")).contains("\"instructions\": \"avx2\""), "{line}");
    }
    if fuses() {
        assert!(outputs[0] != outputs[1], "the level changes nothing");
    }
}

#[cfg(target_arch = "x86_64")]
fn fuses() -> bool {
    std::arch::is_x86_feature_detected!("fma")
}

#[cfg(not(target_arch = "x86_64"))]
fn fuses() -> bool {
    false
}

#[test]
fn a_level_that_is_not_known_is_refused() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let told = "MOA_CPU_INSTRUCTIONS must be one of portable, neon, avx2, avx-vnni, avx512, amx, found AVX512";
    for line in
        ["run out --random --seq 2", "verify out --checkpoint ck --backends ort", "bench out --backends ort --seq 2"]
    {
        with(&scene, "AVX512", line).assert_refused(line, 2, &[told, "help: "]);
    }
    let line = "run out --random --seq 2 --backend ort-function";
    assert_eq!(with(&scene, "AVX512", line).code, Some(0), "what is not used is not refused");
}

#[test]
fn a_way_to_pack_is_told_and_others_are_refused() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let with = |way: &str, line: &str| {
        let mut command = scene.command(line);
        command.env("MOA_CPU_PACKING", way);
        Outcome::of(command)
    };
    for line in [
        "verify out --checkpoint ck --backends ort --threads 1 --json told.json --report told.html",
        "bench out --backends ort --samples 2 --warm-up 0.01 --seq 4 --threads 1 --json told.json --report told.html",
    ] {
        let outcome = with("compact", &format!("{line} --force"));
        assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.stderr);
        assert!(String::from_utf8_lossy(&scene.read("told.json")).contains("\"packing\": \"compact\""), "{line}");
        assert!(String::from_utf8_lossy(&scene.read("told.html")).contains("Packing of bf16"), "{line}");
    }
    let told = "MOA_CPU_PACKING must be one of plain, compact, found 12";
    for line in
        ["run out --random --seq 2", "verify out --checkpoint ck --backends ort", "bench out --backends ort --seq 2"]
    {
        with("12", line).assert_refused(line, 2, &[told, "help: name one of these"]);
    }
    assert_eq!(with("", "run out --random --seq 2").code, Some(0), "an empty value counts as none");
    let line = "run out --random --seq 2 --backend ort-function";
    assert_eq!(with("12", line).code, Some(0), "what is not used is not refused");
}
