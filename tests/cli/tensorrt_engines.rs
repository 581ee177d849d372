//! Engines of a MoA layer, built, proved and run by the real plugin: libraries of `custom_ops/tensorrt/fake` play
//! TensorRT and the CUDA driver, and the kernels run on their emulator.
//!
//! `MOA_TENSORRT_FAKES` names the folder of these libraries, which `cargo xtask test` builds.

use std::{fs, path::PathBuf, process::Command};

use serde_json::Value;

use crate::{
    model::Model,
    scene::{Outcome, Scene},
};

const DIMS: &str = "--dim batch=1:2:4 --dim sequence=1:8:200";

/// A layer that is exported as `model.onnx`.
struct Engines(Scene);

impl Engines {
    fn of(model: &Model, options: &str) -> Self {
        let engines = Self(Scene::with(model));
        engines.accepts("", &format!("ck -o model.onnx {options}"));
        engines
    }

    fn command(&self, words: &str, line: &str) -> Command {
        let folder = PathBuf::from(std::env::var_os("MOA_TENSORRT_FAKES").expect("set MOA_TENSORRT_FAKES"));
        let mut command = self.0.command(line);
        command.env("LD_LIBRARY_PATH", &folder).env("TENSORRT_ROOT", &folder).env("MOA_FAKE_TENSORRT", words);
        command.env("MOA_TENSORRT_LIBRARY", folder.join("libmoa_tensorrt.so")).env_remove("MOA_CUDA_LIBRARY");
        command.env("MOA_CUDA_KERNELS", folder.join("kernels.bin")).env("XDG_CACHE_HOME", self.0.path("cache"));
        command
    }

    #[track_caller]
    fn accepts(&self, words: &str, line: &str) -> String {
        self.0.accepts_in(self.command(words, line), line)
    }

    #[track_caller]
    fn refuses(&self, words: &str, line: &str, code: u8, parts: &[&str]) {
        self.0.refuses_in(self.command(words, line), &format!("{words}: {line}"), code, parts);
    }

    /// What a verification with the plan says of the outputs: largest difference and tolerance.
    fn verified(&self) -> [f64; 2] {
        self.accepts("", &format!("build model.onnx -o model.plan {DIMS} --force"));
        let line = "verify model.onnx --checkpoint ck --backends tensorrt --plan model.plan --json -";
        let value: Value = serde_json::from_str(&self.accepts("", line)).unwrap();
        let outputs = &value["backends"][0]["graphs"][0]["outputs"];
        assert!(value["passed"] == true && outputs["values"].as_u64() > Some(1000), "{value:#}");
        ["max_abs", "atol"].map(|key| outputs[key].as_f64().unwrap())
    }
}

#[test]
#[ignore = "needs libraries that play TensorRT; `cargo xtask test` builds them"]
fn a_layer_is_proved_in_every_form_and_type() {
    let layer = Model::layer_of(32, 4, 16);
    for form in ["function", "fused"] {
        let [difference, tolerance] = Engines::of(&layer, &format!("--form {form}")).verified();
        assert!(difference > 0.0 && difference < 1e-4 && tolerance < 1e-3, "{form}: {difference} {tolerance}");
    }
    let [difference, _] = Engines::of(&layer, "--dtype fp16").verified();
    assert!(difference > 1e-5 && difference < 1e-2, "fp16: {difference}");
    // Activations are rounded to eight digits, and the tolerance follows.
    let [difference, tolerance] = Engines::of(&layer, "--dtype bf16").verified();
    assert!(difference > 1e-3 && difference < 0.1 && tolerance < 0.5, "bf16: {difference} {tolerance}");
}

/// One token runs in a profile of its own, and every case of `verify` in one of two.
#[test]
#[ignore = "needs libraries that play TensorRT; `cargo xtask test` builds them"]
fn an_engine_of_several_profiles_is_proved_in_each() {
    let engines = Engines::of(&Model::layer_of(32, 4, 16), "");
    let dims = "--profile=0 --dim batch=1 --dim sequence=1 --profile=1 --dim batch=1:2:4 --dim sequence=2:8:80";
    engines.accepts("", &format!("build model.onnx -o model.plan {dims}"));
    let verify = "verify model.onnx --checkpoint ck --backends tensorrt --plan model.plan --json -";
    let value: Value = serde_json::from_str(&engines.accepts("", verify)).unwrap();
    assert!(value["passed"] == true, "{value:#}");
    let left_out = value["backends"][0]["graphs"][0]["left_out"].as_str().unwrap();
    let why = "the case \"many tokens at once\" was not run: no profile of the engine holds attention_mask [1, 200], ";
    assert!(left_out.starts_with(why), "{left_out}");
    // Without the first, the case of one token is in none.
    let second = "--dim batch=1:2:4 --dim sequence=2:8:80 --force";
    engines.accepts("", &format!("build model.onnx -o model.plan {second}"));
    let outcome = Outcome::of(engines.command("", verify));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("the range that the engine was built for"), "{}", outcome.stdout);
}

/// Wheels of 8.6.0 keep the libraries in `tensorrt`, others in `tensorrt_libs`.
#[test]
#[ignore = "needs libraries that play TensorRT; `cargo xtask test` builds them"]
fn tensorrt_is_found_in_both_python_packages() {
    let engines = Engines::of(&Model::layer_of(32, 4, 16), "");
    let fakes = PathBuf::from(std::env::var_os("MOA_TENSORRT_FAKES").expect("set MOA_TENSORRT_FAKES"));
    let folders = ["driver", "first", "second"].map(|name| engines.0.path(name));
    let packages = ["tensorrt_libs", "tensorrt"].map(|name| format!("lib/python3.10/site-packages/{name}"));
    let packages = [folders[1].join(&packages[0]), folders[2].join(&packages[1])];
    packages.iter().chain([&folders[0]]).for_each(|folder| fs::create_dir_all(folder).unwrap());
    for file in fs::read_dir(&fakes).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        let name = file.file_name().unwrap();
        let inference = name.to_str().unwrap().starts_with("libnvinfer") || name.to_str().unwrap().contains("parser");
        for folder in if inference { &packages[..] } else { &folders[..1] } {
            fs::copy(&file, folder.join(name)).unwrap();
        }
    }
    let build = |environment: &str| {
        let mut command = engines.command("", &format!("build model.onnx -o model.plan {DIMS} --force"));
        command.env_remove("TENSORRT_ROOT").env("LD_LIBRARY_PATH", &folders[0]);
        command.env("VIRTUAL_ENV", engines.0.path(environment));
        Outcome::of(command)
    };
    build("neither").assert_refused("no TensorRT", 6, &["libnvinfer", "TENSORRT_ROOT"]);
    for environment in ["first", "second"] {
        let outcome = build(environment);
        assert_eq!(outcome.code, Some(0), "{environment}: {}", outcome.stderr);
    }
}

/// A plan of a layer with other weights is found out.
#[test]
#[ignore = "needs libraries that play TensorRT; `cargo xtask test` builds them"]
fn an_engine_of_other_weights_is_found_out() {
    let mut layer = Model::layer_of(32, 4, 16);
    let engines = Engines::of(&layer, "");
    layer.tensor("q_proj.experts.w").set(7, 3.0);
    layer.write(&engines.0.path("ck"));
    let outcome = Outcome::of(engines.command("", "verify model.onnx --checkpoint ck --backends tensorrt"));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("NOT verified"), "{}", outcome.stdout);
}

#[test]
#[ignore = "needs libraries that play TensorRT; `cargo xtask test` builds them"]
fn what_tensorrt_refuses_is_said_in_one_line() {
    let engines = Engines::of(&Model::layer_of(32, 4, 16), "");
    let build = format!("build model.onnx -o x.plan {DIMS} --no-cache");
    for (words, code, part) in [
        ("forget", 4, "getPluginCreator could not find plugin: MoASelfAttention"),
        ("build_fails", 6, "TensorRT failed to build the engine"),
        ("build_memory", 6, "memory"),
        ("no_builder", 6, "error[MOA-E0630]"),
        ("version=80600", 6, "libmoa_tensorrt.so was built for TensorRT"),
    ] {
        engines.refuses(words, &build, code, &[part]);
    }
    engines.accepts("", &format!("build model.onnx -o model.plan {DIMS}"));
    let run = "run model.plan --inputs ck/model.safetensors --outputs out.safetensors";
    engines.refuses("", run, 3, &["one of query, attention_mask", "an unknown name"]);
    engines.refuses("version=110300", run, 4, &["model.plan: TensorRT here is"]);
    engines.refuses("capability=80", run, 4, &["the plan was built for another GPU"]);
}
