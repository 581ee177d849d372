//! `generate` of causal language models: what it says of their folders.

use crate::scene::{Scene, json, require_runtime};

/// A graph alone knows no token that ends a text, and neither does an export whose checkpoint names one that the model
/// does not have.
#[test]
fn a_folder_that_knows_no_end_is_told() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o one/model.onnx");
    scene.accepts("ck -o whole");
    let line = "--input 5 --token-ids --max-new 2";
    let note = "note: no token ends a text by `eos_token_id` of genai_config.json, else of generation_config.json or \
                config.json: every text gets all 2 new tokens; exports to a folder have what the checkpoint says, but \
                for tokens that the model lacks\n";
    scene.accepts("ck -o strange");
    let mut genai = json(&String::from_utf8(scene.read("strange/genai_config.json")).unwrap());
    for key in ["eos_token_id", "pad_token_id"] {
        genai["model"][key] = 9999.into();
    }
    scene.write("strange/genai_config.json", genai.to_string());
    scene.write("ck/generation_config.json", r#"{ "eos_token_id": 50000 }"#);
    assert_eq!(scene.moa("ck -o endless").code, Some(0));
    for endless in ["one", "endless", "strange"] {
        assert_eq!(scene.moa(&format!("generate {endless} {line}")).stderr, note, "{endless}");
    }
    let untokenised = scene.moa("generate one --input text").stderr;
    assert!(untokenised.starts_with("error[MOA-E0523]: one/tokenizer.json is not there"), "{untokenised}");
    scene.write("two.txt", "5\n5 6 7\n");
    let two = "--input two.txt --token-ids --max-new 2";
    let [strange, endless] = ["strange", "endless"].map(|folder| scene.moa(&format!("generate {folder} {two}")));
    assert_eq!((strange.code, strange.stdout), (Some(0), endless.stdout));
    for quiet in [format!("generate one {line} --ignore-eos"), format!("generate whole {line}")] {
        assert_eq!(scene.moa(&quiet).stderr, "", "{quiet}");
    }
}

#[test]
fn token_ids_need_no_tokenizer_that_can_be_read() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let line = "generate out --input 5 --token-ids --max-new 2";
    let without = scene.accepts(line);
    scene.write("out/tokenizer.json", "{");
    assert_eq!(scene.accepts(line), without);
    scene.refuses("generate out --input x --max-new 2", 3, &["out/tokenizer.json: "]);
}

#[test]
fn what_draws_no_token_is_refused() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let other = |flag: &str| format!("help: give another --temperature, or leave out {flag}");
    for (options, flag, help) in [
        ("--seed 1", "--seed", "help: add --temperature, --top-k or --top-p".to_owned()),
        ("--seed 1 --temperature 0", "--seed", other("--seed")),
        ("--top-k 3 --temperature 0", "--top-k", other("--top-k")),
        ("--top-p 0.5 --temperature 0.0", "--top-p", other("--top-p")),
    ] {
        let told = format!("{flag} is for tokens that are drawn, and the most probable one is taken here");
        scene.refuses(&format!("generate out --input 5 --token-ids {options}"), 2, &[&told, &help]);
    }
}
