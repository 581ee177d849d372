//! `moa-export profile`, and the pages of `profile` and `verify`.

use std::fs;

use prost::Message;
use serde_json::{Value, json};

use crate::{
    common::data,
    model::Model,
    scene::{Scene, require_runtime},
};

/// The trained translator with its vocabulary and its export `out`.
fn translator(form: &str) -> Scene {
    require_runtime();
    let scene = Scene::with_fixture("nmt");
    for file in ["dict.txt", "bpe.codes"] {
        fs::copy(data("nmt").join(file), scene.path("ck").join(file)).unwrap();
    }
    scene.accepts(&format!("ck -o out --form {form}"));
    let text = fs::read_to_string(data("nmt/unseen_pairs.tsv")).unwrap();
    let pairs = text.lines().take(20).map(|line| line.split_once('\t').unwrap().1.to_owned() + "\n");
    let pairs: Vec<String> = pairs.collect();
    scene.write("pairs.tsv", pairs.concat());
    let sources: Vec<&str> = pairs.iter().map(|pair| pair.split('\t').next().unwrap()).collect();
    scene.write("sources.txt", sources.join("\n"));
    scene
}

fn profile(scene: &Scene, line: &str) -> Value {
    serde_json::from_str(&scene.accepts(&format!("profile {line} --json"))).unwrap()
}

#[test]
fn a_greedy_translation_that_is_right_is_routed_as_its_target() {
    let scene = translator("function");
    let forced = profile(&scene, "out --inputs pairs.tsv --min-count 2 --top 3");
    let decoded = profile(&scene, "out --inputs sources.txt --min-count 2 --top 3");
    assert_eq!(forced["modules"], decoded["modules"]);
    let pairs = String::from_utf8(scene.read("pairs.tsv")).unwrap();
    let every_second = |(index, line): (usize, &str)| match index % 2 {
        0 => format!("{line}\n"),
        _ => format!("\n{}\n", line.split('\t').next().unwrap()),
    };
    scene.write("mixed.tsv", pairs.lines().enumerate().map(every_second).collect::<String>());
    assert_eq!(profile(&scene, "out --inputs mixed.tsv --min-count 2 --top 3")["modules"], forced["modules"]);
    let first = &forced["modules"][0];
    assert_eq!(first["counts"].as_array().unwrap().len(), 8);
    let tokens = first["pmi"][0].as_array().unwrap();
    assert!((1..=3).contains(&tokens.len()), "{tokens:?}");
    assert!(tokens.iter().all(|token| token["count"].as_u64() >= Some(2) && token["symbol"].is_string()));
    let all = profile(&scene, "out --inputs pairs.tsv --min-count 1 --top 1000");
    let modules = all["modules"].as_array().unwrap().iter().flat_map(|module| module["pmi"].as_array().unwrap());
    assert!(modules.flat_map(|expert| expert.as_array().unwrap()).all(|token| token["pmi"].as_f64() > Some(0.0)));
    let table = scene.accepts("profile out --inputs pairs.tsv --pmi --batch 1");
    assert!(table.contains("encoder.layers.0.self_attn ") && table.contains("thousand ("), "{table}");
    assert!(!table.contains("(-"), "{table}");
}

/// Of text, an encoder by itself reads the sources; tokens that the dictionary does not have are told.
#[test]
fn an_encoder_is_profiled_by_itself() {
    let scene = translator("function");
    let all = profile(&scene, "out --inputs pairs.tsv");
    let encoder = profile(&scene, "out/encoder_model.onnx --inputs sources.txt");
    let with_targets = "profile out/encoder_model.onnx --inputs pairs.tsv";
    scene.refuses(with_targets, 3, &["pairs.tsv, line 1: a target, and out/encoder_model.onnx reads", "cut -f1"]);
    let decoder = "profile out/decoder_model.onnx --inputs sources.txt";
    scene.refuses(decoder, 2, &["sources.txt is text, and out/decoder_model.onnx is half", "profile the folder"]);
    let [all, encoder] = [&all, &encoder].map(|value| value["modules"].as_array().unwrap());
    let counts = |modules: &[Value]| modules.iter().map(|module| module["counts"].clone()).collect::<Vec<_>>();
    assert_eq!(counts(encoder), counts(&all[..encoder.len()]));
    scene.write("odd.tsv", "nine\tqqq\nqqq\tneun\nnine\tneun\n");
    let outcome = scene.moa("profile out --inputs odd.tsv");
    let told = "note: odd.tsv, line 1: 3 of 4 tokens are not in the dictionary, and 1 more line has such tokens\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), told));
}

/// What it is decides which dictionary names its tokens, not what it is called.
#[test]
fn tokens_of_a_renamed_decoder_are_those_of_the_target() {
    let scene = translator("function");
    let dictionary = String::from_utf8(scene.read("ck/dict.txt")).unwrap();
    scene.write("out/target.txt", dictionary.lines().map(|line| format!("T_{line}\n")).collect::<String>());
    let configuration = String::from_utf8(scene.read("out/generation.json")).unwrap();
    let of_target = |file: &str| format!(r#""target_dictionary": "{file}""#);
    scene.write("out/generation.json", configuration.replace(&of_target("dict.txt"), &of_target("target.txt")));
    scene.accepts("run out/decoder_model.onnx --random --seq 9 --past 1 --save-inputs in.safetensors");
    fs::copy(scene.path("out/decoder_model.onnx"), scene.path("out/mine.onnx")).unwrap();
    let symbols = |graph: &str| {
        let profile = profile(&scene, &format!("out/{graph} --inputs in.safetensors --min-count 1"));
        let modules = profile["modules"].as_array().unwrap();
        let experts = modules.iter().flat_map(|module| module["pmi"].as_array().unwrap());
        let tokens = experts.flat_map(|tokens| tokens.as_array().unwrap());
        tokens.map(|token| token["symbol"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mine = symbols("mine.onnx");
    assert!(mine.iter().any(|symbol| symbol.starts_with("T_")), "{mine:?}");
    assert_eq!(mine, symbols("decoder_model.onnx"));
}

/// An encoder whose routing has no names is run for the decoder's sake; by itself it shows nothing.
#[test]
fn a_decoder_is_profiled_beside_an_encoder_without_named_routing() {
    let scene = translator("standard");
    let all = profile(&scene, "out --inputs pairs.tsv --backend ort-function");
    let mut model = scene.model("out/encoder_model.onnx");
    for node in &mut model.graph.as_mut().unwrap().node {
        for name in node.input.iter_mut().chain(&mut node.output).filter(|name| name.starts_with("router.")) {
            name.insert_str(0, "no.");
        }
    }
    scene.write("out/encoder_model.onnx", model.encode_to_vec());
    let decoder = profile(&scene, "out --inputs pairs.tsv --backend ort-function");
    let modules = all["modules"].as_array().unwrap().iter();
    let expected: Vec<_> = modules.filter(|module| module["graph"] == "decoder_model.onnx").collect();
    assert!(!expected.is_empty() && expected.into_iter().eq(decoder["modules"].as_array().unwrap()), "{decoder:#}");
    scene.write("lines.ids", "4 5 2\n");
    scene.refuses("profile out/encoder_model.onnx --inputs lines.ids", 4, &["encoder_model.onnx", "help: "]);
}

#[test]
fn an_export_in_fp16_is_profiled() {
    let scene = translator("function");
    scene.accepts("ck -o half --dtype fp16");
    let [wide, half] = ["out", "half"].map(|folder| profile(&scene, &format!("{folder} --inputs pairs.tsv")));
    for (wide, half) in wide["modules"].as_array().unwrap().iter().zip(half["modules"].as_array().unwrap()) {
        assert_eq!(wide["tokens"], half["tokens"]);
    }
}

#[test]
fn text_and_the_ids_that_stand_for_it_are_routed_alike() {
    let scene = translator("standard");
    scene.write("one.tsv", "seven\thundred\n");
    let dictionary = fs::read_to_string(data("nmt/dict.txt")).unwrap();
    let id = |symbol: &str| 4 + dictionary.lines().position(|line| line.split(' ').next() == Some(symbol)).unwrap();
    scene.write("one.ids", format!("{} 2\t2 {}\n", id("seven"), id("hundred")));
    let text = profile(&scene, "out --inputs one.tsv --backend tract");
    let ids = profile(&scene, "out --inputs one.ids --backend ort-function");
    for (text, ids) in text["modules"].as_array().unwrap().iter().zip(ids["modules"].as_array().unwrap()) {
        assert_eq!((&text["counts"], &text["tokens"]), (&ids["counts"], &ids["tokens"]));
        assert_eq!(text["tokens"], 2);
    }
}

#[test]
fn pages_are_whole_files_that_need_no_other() {
    let scene = translator("function");
    scene.accepts("profile out --inputs pairs.tsv --report profile.html");
    scene.accepts("verify out --checkpoint ck --backends ort --report verify.html");
    for (name, says, title) in
        [("profile.html", "thousand", "Expert routing"), ("verify.html", "verified on ort", "Verification")]
    {
        let page = String::from_utf8(scene.read(name)).unwrap();
        assert!(page.contains(&format!("<title>out – {title}</title>")), "{name}");
        for fact in ["Processor", "Time", "libmoa_ort", "encoder_model.onnx"] {
            assert!(page.contains(&format!("<dt>{fact}</dt>")), "{name} lacks {fact}");
        }
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n") && page.contains(says), "{name}");
        assert!(!page.contains("<script") && !page.contains("http:") && !page.contains("https:"), "{name}");
    }
    let page = String::from_utf8(scene.read("profile.html")).unwrap();
    for file in ["dict.txt", "bpe.codes", "pairs.tsv"] {
        assert!(page.contains(&format!("<dt>{file}</dt>")), "{file}");
    }
    assert!(page.contains("<dt>Threads</dt>"));
    let but_for_the_time = || {
        let page = String::from_utf8(scene.read("profile.html")).unwrap();
        let (before, after) = page.split_once("<dt>Time</dt><dd>").unwrap();
        format!("{before}{}", after.split_once("</dd>").unwrap().1)
    };
    let first = but_for_the_time();
    scene.accepts("profile out --inputs pairs.tsv --report profile.html --force");
    assert!(but_for_the_time() == first, "the same inputs give the same page");
    scene.refuses("profile out --inputs pairs.tsv --report profile.html", 2, &["MOA-E0211", "profile.html exists"]);
}

#[test]
fn endings_in_capitals_tell_the_format_too() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --form standard");
    scene.accepts("run m.onnx --random --seq 5 --save-inputs IN.SAFETENSORS --backend tract");
    scene.write("LINES.IDS", "4 5 6\n");
    for inputs in ["IN.SAFETENSORS", "LINES.IDS"] {
        scene.accepts(&format!("profile m.onnx --inputs {inputs} --backend tract"));
    }
}

/// Neither says how many threads a runtime takes that computes nothing.
#[test]
fn pages_of_tract_name_no_threads() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --form standard");
    scene.write("lines.ids", "4 5 6\n");
    fs::copy(data("mlm/dict.txt"), scene.path("names.txt")).unwrap();
    scene.accepts("profile m.onnx --inputs lines.ids --dict names.txt --backend tract --report profile.html");
    scene.accepts("verify m.onnx --checkpoint ck --backends tract --report verify.html");
    let [profile, verify] = ["profile.html", "verify.html"].map(|name| String::from_utf8(scene.read(name)).unwrap());
    for page in [&profile, &verify] {
        assert!(page.contains("<dt>Processor</dt>") && page.contains("<dt>tract</dt>"), "{page}");
        assert!(!page.contains("Threads"), "{page}");
    }
    assert!(profile.contains("<dt>names.txt</dt>"), "{profile}");
}

#[test]
fn what_cannot_be_profiled_is_refused() {
    let scene = translator("function");
    scene.write("three.tsv", "one\teins\n1\tone\teins\n");
    scene.write("three.ids", "4\t5\t6\n");
    scene.write("words.ids", "4 five 2\t2 4\n");
    scene.write("short.ids", "4 5 2\n");
    scene.write("empty.txt", "\n\n");
    scene.write("open.tsv", "seven\n");
    scene.write("latin.txt", b"se\xffen\n");
    scene.write("long.txt", "two ".repeat(1024));
    scene.write("strange.ids", "4 2\t2 4\n4 2\t2 120\n");
    Model::layer().write(&scene.path("layer"));
    scene.accepts("layer -o layer.onnx");
    for (line, code, number, says) in [
        ("profile out --inputs nix.txt", 5, "MOA-E0501", "nix.txt"),
        ("profile out --inputs ck", 5, "MOA-E0501", "ck: expected a file, found a folder"),
        ("profile out --inputs latin.txt", 3, "MOA-E0328", "latin.txt, line 1: not UTF-8"),
        ("profile out --inputs pairs.tsv --dict ck", 5, "MOA-E0521", "ck: expected a file, found a folder"),
        ("profile nix --inputs pairs.tsv", 5, "MOA-E0501", "nix"),
        ("profile out --inputs pairs.tsv --batch 0", 2, "MOA-E0201", "--batch"),
        (
            "profile layer.onnx --inputs pairs.tsv --pmi",
            2,
            "MOA-E0201",
            "--pmi is about token ids, and layer.onnx takes",
        ),
        ("profile out --inputs three.tsv", 3, "MOA-E0329", "three.tsv, line 2: 3 columns, and at most two are read"),
        ("profile out --format ids --inputs three.ids", 3, "MOA-E0329", "three.ids, line 1: 3 columns"),
        ("profile out --inputs words.ids", 3, "MOA-E0329", "line 1: \"five\""),
        ("profile out --inputs short.ids", 3, "MOA-E0329", "a tab"),
        ("profile out --inputs empty.txt", 3, "MOA-E0329", "no line"),
        ("profile out --inputs long.txt", 3, "MOA-E0326", "long.txt, line 1: 1025 tokens, and 1024 are possible"),
        (
            "profile out --inputs strange.ids",
            3,
            "MOA-E0332",
            "strange.ids, line 2: target token 120 is none of the model's 120",
        ),
        (
            "profile out/decoder_model.onnx --inputs short.ids",
            3,
            "MOA-E0316",
            "short.ids: input `encoder_attention_mask`",
        ),
        ("profile ck --inputs pairs.tsv", 5, "MOA-E0518", "ck holds no model.onnx"),
    ] {
        scene.refuses(line, code, &[number, says]);
    }
    std::fs::remove_file(scene.path("out/encoder_model.onnx")).unwrap();
    scene.refuses(
        "profile out --inputs pairs.tsv",
        5,
        &["MOA-E0518", "out holds decoder_model.onnx and no encoder_model.onnx"],
    );
}

/// Writes a tokenizer of the words `t0` to `t127` that puts `t1` before each text.
fn write_tokenizer(scene: &Scene) {
    let words = 0..128;
    let vocabulary: serde_json::Map<_, _> = words.map(|id| (format!("t{id}"), id.into())).collect();
    let begin = json!({ "SpecialToken": { "id": "t1", "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "decoder": null,
        "post_processor": {
            "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text],
            "special_tokens": { "t1": { "id": "t1", "ids": [1], "tokens": ["t1"] } },
        },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "t3" },
    });
    scene.write("out/tokenizer.json", tokenizer.to_string());
}

/// A language model reads text as `generate` does, and its tokens have names.
#[test]
fn the_text_of_a_language_model_goes_through_its_tokenizer() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    scene.write("lines.txt", "\u{feff}t50 t51\tt52\n\nt60 t61\n");
    scene.write("lines.ids", "1 50 51 52\n1 60 61\n");
    let says = ["MOA-E0201", "lines.txt is text, and out has neither a dictionary of fairseq nor a tokenizer.json"];
    scene.refuses("profile out --inputs lines.txt", 2, &says);
    let unnamed = profile(&scene, "out --inputs lines.ids --min-count 1");
    write_tokenizer(&scene);
    let [text, ids] =
        ["lines.txt", "lines.ids"].map(|file| profile(&scene, &format!("out --inputs {file} --min-count 1")));
    assert_eq!(text["modules"], ids["modules"]);
    let symbols = |value: &Value| {
        let modules = value["modules"].as_array().unwrap().iter();
        let experts = modules.flat_map(|module| module["pmi"].as_array().unwrap().clone());
        let tokens = experts.flat_map(|expert| expert.as_array().unwrap().clone());
        tokens
            .map(|token| (token["token"].to_string(), token["symbol"].as_str().unwrap().to_owned()))
            .collect::<Vec<_>>()
    };
    assert!(symbols(&text).iter().all(|(id, symbol)| *symbol == format!("t{id}")), "{text}");
    assert!(symbols(&unnamed).iter().all(|(id, symbol)| symbol == id), "{unnamed}");
    let table = scene.accepts("profile out --inputs lines.txt --pmi --min-count 1");
    assert!(table.contains(" t50 (") || table.contains(" t60 ("), "{table}");
    let larger = String::from_utf8(scene.read("out/tokenizer.json")).unwrap().replace("\"t52\":52", "\"t52\":128");
    scene.write("out/tokenizer.json", larger);
    scene.write("strange.txt", "t50\n\nt51 t52\n");
    let says = "strange.txt, line 3: token 128 is none of the model's 128";
    scene.refuses("profile out --inputs strange.txt", 3, &["MOA-E0332", says, "help: give ids of the tokenizer that"]);
}

/// A line is told by its number, whatever it would run with, or left out where it is too long alone.
#[test]
fn lines_that_a_model_cannot_read_are_told() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    write_tokenizer(&scene);
    for strange in ["128", "-1"] {
        scene.write("strange.ids", format!("1 50\n\n1 5 6 7\n1 {strange}\n"));
        let says = format!("strange.ids, line 4: token {strange} is none of the model's 128");
        scene.refuses("profile out --inputs strange.ids --skip-long", 3, &["MOA-E0332", &says]);
    }
    scene.write("short.ids", "1 50 51\n");
    let short = profile(&scene, "out --inputs short.ids");
    scene.write("long.ids", format!("{}\n\n1 50 51\n", "1 ".repeat(257)));
    scene.write("long.txt", format!("{}\n\nt50 t51\n", "t1 ".repeat(256)));
    for file in ["long.ids", "long.txt"] {
        let says = format!("{file}, line 1: 257 tokens, and 256 are possible");
        let line = format!("profile out --inputs {file}");
        scene.refuses(&line, 3, &["MOA-E0326", &says, "help: split the line, or add --skip-long"]);
        let outcome = scene.moa(&format!("{line} --skip-long --json"));
        assert_eq!(outcome.stderr, format!("note: {says}: left out\n"));
        let found: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let counts = |profile: &Value| {
            let modules = profile["modules"].as_array().unwrap().iter();
            modules.map(|module| module["counts"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(counts(&found), counts(&short), "{file}");
    }
}

/// Ids need no tokenizer that can be read; text does.
#[test]
fn a_tokenizer_that_cannot_be_read_names_nothing() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    scene.write("lines.ids", "1 50 51 52\n");
    let without = scene.accepts("profile out --inputs lines.ids --pmi");
    scene.write("out/tokenizer.json", "{");
    let outcome = scene.moa("profile out --inputs lines.ids --pmi");
    assert!(outcome.code == Some(0) && outcome.stdout == without, "{}", outcome.stdout);
    assert!(outcome.stderr.starts_with("note: out/tokenizer.json: "), "{}", outcome.stderr);
    assert!(outcome.stderr.ends_with("; tokens have no names\n"), "{}", outcome.stderr);
    scene.write("lines.txt", "t50\n");
    scene.refuses("profile out --inputs lines.txt", 3, &["out/tokenizer.json: is no tokenizer of Hugging Face"]);
    write_tokenizer(&scene);
    scene.write("out/tokenizer_config.json", r#"{ "add_bos_token": false }"#);
    let told =
        "add_bos_token is false, and tokenizer.json puts t1 before a text; `profile` goes by tokenizer.json alone\n";
    let outcome = scene.moa("profile out --inputs lines.txt");
    assert!(outcome.code == Some(0) && outcome.stderr.ends_with(told), "{}", outcome.stderr);
}

#[test]
fn a_dictionary_of_another_model_is_refused() {
    let scene = translator("function");
    scene.accepts("profile out --inputs pairs.tsv --dict ck/dict.txt");
    let symbols = fs::read_to_string(data("nmt/dict.txt")).unwrap();
    let shorter: Vec<_> = symbols.lines().skip(1).collect();
    for (name, text) in [("shorter.txt", shorter.join("\n")), ("longer.txt", symbols + "one-more 1\n")] {
        scene.write(name, text);
        let parts = ["MOA-E0322", name, "symbols with the four special ones; encoder_model.onnx knows 120", "help: "];
        scene.refuses(&format!("profile out --inputs pairs.tsv --dict {name}"), 3, &parts);
    }
    let masked = Scene::with_fixture("mlm");
    masked.accepts("ck -o m.onnx");
    masked.write("lines.ids", "4 5 6\n");
    fs::copy(data("mlm/dict.txt"), masked.path("dict.txt")).unwrap();
    masked.write("lines.txt", "text\n");
    let says = ["MOA-E0201", "lines.txt is text, and ", "; --dict names token ids, and splits no text"];
    masked.refuses("profile m.onnx --inputs lines.txt --dict dict.txt", 2, &says);
    masked.accepts("profile m.onnx --inputs lines.ids --dict dict.txt");
    fs::copy(data("nmt/dict.txt"), masked.path("dict.txt")).unwrap();
    masked.refuses("profile m.onnx --inputs lines.ids --dict dict.txt", 3, &["m.onnx knows 67"]);
}

#[test]
fn a_model_without_vocabulary_takes_no_text() {
    require_runtime();
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    scene.write("lines.txt", "seven\n");
    scene.write("lines.ids", "7\n");
    scene.refuses("profile m.onnx --inputs lines.txt", 2, &["MOA-E0201", "takes no token ids"]);
    scene.refuses("profile m.onnx --inputs lines.ids", 2, &["MOA-E0201", "takes no token ids"]);
}

/// A dictionary that an earlier export left in the folder names no tokens of this one.
#[test]
fn dictionaries_of_another_model_are_refused() {
    let scene = translator("function");
    let checkpoint = data("mlm");
    assert_eq!(scene.moa(&format!("{} -o out --force", checkpoint.display())).code, Some(0));
    scene.write("lines.ids", "4 5 6\n");
    let parts = ["MOA-E0322", "out: 120 symbols with the four special ones; model.onnx knows 67", "help: "];
    scene.refuses("profile out/model.onnx --inputs lines.ids", 3, &parts);
}
