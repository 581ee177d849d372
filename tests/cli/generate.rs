//! `generate` of causal language models: what it says of their folders.

use crate::scene::{Scene, require_runtime};

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
                config.json: each has 2 more; exports to a folder have what the checkpoint says, but for tokens that \
                the model lacks\n";
    scene.write("ck/generation_config.json", r#"{ "eos_token_id": 50000 }"#);
    assert_eq!(scene.moa("ck -o endless").code, Some(0));
    for endless in ["one", "endless"] {
        assert_eq!(scene.moa(&format!("generate {endless} {line}")).stderr, note, "{endless}");
    }
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
