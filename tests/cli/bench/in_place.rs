//! `bench --in-place`.

use serde_json::Value;

use std::process::Command;

use super::{exported, list};
use crate::scene::{Scene, json, require_runtime};

/// The encoder has no caches, and ONNX Runtime alone makes new ones.
#[test]
fn what_can_updates_its_caches_in_place_and_every_output_says_so() {
    require_runtime();
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    let line = "bench out --samples 4 --warm-up 0.05 --seq 1,3 --past 0,7 --in-place";
    let result = json(&scene.accepts(&format!("{line} --json - --csv t.csv --report r.html")));
    assert_eq!(result["receipt"]["options"]["in_place"], true);
    for row in list(&result, "rows") {
        let (part, backend) = (&row["subject"]["part"], &row["subject"]["backend"]);
        assert_eq!(row["in_place"], Value::Bool(part == "decoder_model" && backend == "ort"), "{row}");
    }
    let told =
        "Caches in place (past and present are one buffer): out on ort, decoder_model. All others make new outputs.";
    let pass = "recorded, which is slower; caches are not in place in it\n";
    let page = String::from_utf8(scene.read("r.html")).unwrap();
    assert!(page.contains(told) && page.contains("updated in place where graph and backend can"), "{page}");
    assert!(String::from_utf8(scene.read("t.csv")).unwrap().contains(",true,agrees,"));
    assert!(page.contains("every node, which is slower; caches are not in place in it;"), "{page}");
    let text = scene.accepts(line);
    assert!(text.contains(told) && text.contains(pass), "{text}");
}

#[test]
fn what_has_no_caches_to_update_in_place_is_refused() {
    let scene = exported("");
    let parts = ["MOA-E0229", "--in-place: no graph here has caches", "help: give a decoder"];
    scene.refuses("bench m.onnx --in-place", 2, &parts);
    let decoder = Scene::with_fixture("jetmoe/bf16");
    decoder.accepts("ck -o out");
    decoder.refuses("bench out --in-place --backends ort-function", 2, &parts);
}

/// A copy of the program has no operator library beside it.
#[test]
fn caches_of_a_backend_that_was_skipped_are_none() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    std::fs::copy(env!("CARGO_BIN_EXE_moa-export"), scene.path("program")).unwrap();
    let line = "bench out --in-place --samples 4 --warm-up 0.05 --seq 1 --past 3";
    let mut command = Command::new(scene.path("program"));
    command.current_dir(scene.folder()).args(line.split_whitespace()).env_remove("MOA_ORT_LIBRARY");
    let parts = ["MOA-E0229", "updates in place; ort was skipped: ", "operator library", "help: give --backends ort"];
    scene.refuses_in(command, line, 2, &parts);
}
