//! Where outputs go, and where they cannot go.

use std::{
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
    },
};

use crate::{
    common::data,
    model::Model,
    scene::{NO_DICTIONARY, Outcome, Scene},
};

#[test]
fn an_output_is_a_file_or_a_folder() {
    let scene = Scene::with(&Model::layer());
    for (line, written) in [
        ("ck -o m.onnx", "m.onnx"),
        ("ck -o out", "out/model.onnx"),
        ("ck -o out2/", "out2/model.onnx"),
        ("ck -o M.ONNX", "M.ONNX"),
        ("ck/model.safetensors -o n1/n2/m.onnx", "n1/n2/m.onnx"),
        ("ck -o n1/n3/n4", "n1/n3/n4/model.onnx"),
        ("export ck -o here/../m2.onnx --config ck/config.json", "m2.onnx"),
    ] {
        if line.contains("here") {
            fs::create_dir(scene.path("here")).unwrap();
        }
        let printed = scene.accepts(line);
        assert!(printed.starts_with("wrote ") && printed.contains("next: moa-export verify"), "{printed}");
        assert_eq!(scene.read(written), scene.read("m.onnx"), "{line}");
    }
}

/// A shell takes the printed command as it stands.
#[test]
fn the_next_command_can_be_copied() {
    let scene = Scene::with(&Model::layer());
    fs::rename(scene.path("ck/config.json"), scene.path("ck/my own.json")).unwrap();
    let mut command = scene.command("ck --config");
    command.args(["ck/my own.json", "-o", "it's here/m.onnx"]);
    let printed = Outcome::of(command).stdout;
    let next = r"next: moa-export verify 'it'\''s here/m.onnx' --checkpoint ck --config 'ck/my own.json'";
    assert_eq!(printed.lines().last(), Some(next));
    fs::rename(scene.path("ck/my own.json"), scene.path("ck/config.json")).unwrap();
    let folder = scene.accepts("ck -o folder/");
    assert_eq!(folder.lines().last(), Some("next: moa-export verify folder --checkpoint ck"));
}

#[test]
fn json_lists_what_was_written() {
    let scene = Scene::with(&Model::translator());
    let printed = scene.accepts("ck -o out --external-data always --json");
    let value: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let mut listed = Vec::new();
    for file in value["files"].as_array().unwrap() {
        let path = file["path"].as_str().unwrap();
        assert_eq!(file["bytes"].as_u64(), Some(scene.read(path).len() as u64), "{path}");
        listed.push(path.strip_prefix("out/").unwrap().to_owned());
    }
    listed.sort();
    assert_eq!(listed, scene.names("out"));
    assert_eq!(listed.len(), 4);
    assert_eq!(value["family"], "moa_transformer");
    assert_eq!(value["source_sha256"].as_str().unwrap().len(), 64);
}

#[test]
fn endings_of_other_formats_are_refused() {
    let scene = Scene::with(&Model::layer());
    for ending in ["safetensors", "plan", "engine", "pt", "json"] {
        scene.refuses(&format!("ck -o m.{ending}"), 2, &[&format!("m.{ending} "), "NAME.onnx"]);
    }
}

#[test]
fn results_have_no_endings_of_other_formats() {
    let scene = Scene::with(&Model::layer());
    scene.write("mine.md", "mine");
    scene.write("mine.safetensors", "mine");
    for (line, name) in [
        ("run m.onnx --inputs i --outputs o.onnx", "o.onnx: what is written is safetensors"),
        ("run m.onnx --inputs i --outputs o.PLAN", "o.PLAN: what is written is safetensors"),
        ("run m.onnx --inputs i --outputs o.json", "o.json: what is written is safetensors, not .json"),
        ("run m.onnx --inputs i --outputs o.npz", "o.npz: what is written is safetensors, not .npz"),
        ("run m.onnx --random --save-inputs in.bin", "in.bin: what is written is safetensors, not .bin"),
        ("verify m.onnx --checkpoint ck --json x.html", "x.html: what is written is json"),
        ("verify m.onnx --checkpoint ck --report x.json", "x.json: what is written is html"),
        ("verify m.onnx --checkpoint ck --report mine.md --force", "mine.md: what is written is html, not .md"),
        ("verify m.onnx --checkpoint ck --json mine.safetensors --force", "mine.safetensors: what is written is json"),
        ("bench m.onnx --report mine.md --force", "mine.md: what is written is html"),
        ("bench m.onnx --json mine.md --force", "mine.md: what is written is json"),
        ("bench m.onnx --csv x.tsv", "x.tsv: what is written is csv"),
        ("profile m.onnx --inputs i --report mine.md --force", "mine.md: what is written is html"),
    ] {
        scene.refuses(line, 2, &["MOA-E0214", name, "help: give NAME."]);
    }
    assert_eq!((scene.read("mine.md"), scene.read("mine.safetensors")), (b"mine".to_vec(), b"mine".to_vec()));
    for name in ["x.HTM", "x.html", "x", ".x"] {
        let outcome = scene.moa(&format!("verify m.onnx --checkpoint ck --report {name}"));
        assert!(!outcome.stderr.contains("MOA-E0214"), "{name}: {}", outcome.stderr);
    }
}

/// Files of the folder in which the program runs have no folder before their names.
#[test]
fn what_was_just_written_is_of_no_earlier_export() {
    let scene = Scene::with(&Model::translator());
    for line in ["ck -o .", "ck -o . --force", "ck -o ./ --force"] {
        scene.accepts(line);
    }
    scene.write("model.onnx", "old");
    let outcome = scene.moa("ck -o . --force");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let notes = outcome.stderr.replace(NO_DICTIONARY, "");
    let notes: Vec<_> = notes.lines().collect();
    assert!(matches!(notes[..], [note] if note.contains("model.onnx is of an earlier export")), "{notes:?}");
}

#[test]
fn models_of_weights_that_were_replaced_are_named() {
    let scene = Scene::with_fixture("mlm");
    let noted = |line: &str| -> Vec<String> {
        let outcome = scene.moa(line);
        assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.stderr);
        outcome.stderr.lines().map(str::to_owned).collect()
    };
    assert_eq!(noted("ck -o out --external-data always"), [""; 0]);
    assert_eq!(noted("prepare out/model.onnx -o out/m.trt.onnx"), [""; 0]);
    // The data of the second is shorter, so that the model that was prepared cannot be read any more.
    for options in ["--external-data always --form fused", "--external-data always --dtype fp16"] {
        let told = "note: out/m.trt.onnx reads model.onnx.data, which was written anew: make it again";
        assert_eq!(noted(&format!("ck -o out --force {options}")), [told]);
        noted("ck -o out --force --external-data always");
    }
    let told = "note: out/model.onnx.data is of an earlier export, and out/m.trt.onnx reads it";
    assert_eq!(noted("ck -o out --force"), [told]);
    assert_eq!(noted("prepare out/model.onnx -o out/m.trt.onnx --force").len(), 0);
    fs::remove_file(scene.path("out/model.onnx.data")).unwrap();
    let noted = noted("baseline mlm-8k8e128d --layers 1 --vocab 100 -o out --force");
    assert_eq!(noted[0], "note: out/m.trt.onnx was made from other weights than this export");
    assert!(noted[1..].iter().all(|note| note.contains(" was there before, ")), "{noted:?}");
}

/// A folder that is made for the export lies beside models, which say nothing of it.
#[test]
fn models_beside_a_new_folder_are_not_named() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    Model::translator().write(&scene.path("other"));
    for line in ["other -o out --force", "baseline mlm-8k8e128d --layers 1 --vocab 100 -o base --force"] {
        let outcome = scene.moa(line);
        assert!(outcome.code == Some(0) && !outcome.stderr.contains("m.onnx"), "{line}: {}", outcome.stderr);
    }
}

#[test]
fn what_an_earlier_export_left_is_named() {
    let scene = Scene::with(&Model::translator());
    let library = format!("{}moa_ort{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    fs::create_dir(scene.path("out")).unwrap();
    for name in ["model.onnx", "model.onnx.data", &library] {
        scene.write(&format!("out/{name}"), "old");
    }
    let outcome = scene.moa("ck -o out --force");
    let notes = outcome.stderr.replace(NO_DICTIONARY, "");
    let notes: Vec<_> = notes.lines().collect();
    assert_eq!((outcome.code, notes.len()), (Some(0), 3), "{notes:?}");
    assert!(notes[0].contains(&format!("{library} was there before: ")), "{notes:?}");
    assert!(notes[1].ends_with("model.onnx.data is of an earlier export; nothing reads it now"), "{notes:?}");
    assert!(
        notes[2].ends_with("model.onnx is of an earlier export, and commands may take it for this folder: remove it"),
        "{notes:?}"
    );
    let outcome = scene.moa("ck -o out --force --form standard");
    assert!(outcome.stderr.contains("graphs in the form standard need none"), "{}", outcome.stderr);
}

#[test]
fn a_slash_behind_a_name_means_a_folder() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o tr.onnx/");
    assert!(scene.path("tr.onnx/model.onnx").is_file());
    scene.accepts("ck -o a.bin/");
    scene.accepts("ck -o m.onnx");
    scene.refuses("ck -o m.onnx/ --force", 2, &["m.onnx/ is not a folder"]);
}

#[test]
fn two_graphs_need_a_folder() {
    let scene = Scene::with(&Model::translator());
    scene.refuses(
        "ck -o new/m.onnx",
        2,
        &["new/m.onnx", "moa_transformer", "encoder_model.onnx and decoder_model.onnx"],
    );
    scene.accepts("ck -o out");
    assert_eq!(scene.names("out"), ["decoder_model.onnx", "encoder_model.onnx"]);
}

#[test]
fn existing_outputs_are_replaced_only_by_force() {
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out --form standard");
    let standard = scene.read("out/encoder_model.onnx");
    scene.write("out/notes.txt", "mine");
    scene.refuses("ck -o out", 2, &["out/encoder_model.onnx exists already", "--force"]);
    scene.accepts("ck -o out --force");
    assert_ne!(scene.read("out/encoder_model.onnx"), standard);
    assert_eq!(scene.read("out/notes.txt"), b"mine");
    assert_eq!(scene.names("out"), ["decoder_model.onnx", "encoder_model.onnx", "notes.txt"]);
    fs::remove_file(scene.path("out/encoder_model.onnx")).unwrap();
    scene.refuses("ck -o out", 2, &["out/decoder_model.onnx exists already", "--force"]);
}

/// Under `--force` too; graphs beside a checkpoint may be replaced, files that may belong to it may not.
#[test]
fn an_export_never_replaces_what_it_is_made_from() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o ck");
    scene.accepts("ck -o ck --force");
    for name in ["dict.txt", "bpe.codes"] {
        fs::copy(data("nmt").join(name), scene.path(name)).unwrap();
    }
    scene.write("ck/generation.json", "mine");
    for force in ["", "--force"] {
        let parts = ["ck/generation.json lies beside the checkpoint and would be overwritten", "help: "];
        scene.refuses(&format!("ck -o ck --dict dict.txt {force}"), 2, &parts);
        scene.refuses(&format!("ck/model.safetensors -o ./ck/. --dict dict.txt {force}"), 2, &parts[1..]);
    }
    scene.accepts("ck -o out --dict dict.txt");
    let parts = ["out/dict.txt is read by this export and would be overwritten", "help: "];
    scene.refuses("ck -o out --dict out/dict.txt --force", 2, &parts);
    let layer = Scene::with(&Model::layer());
    fs::rename(layer.path("ck/model.safetensors"), layer.path("ck/m.onnx")).unwrap();
    layer.refuses("ck/m.onnx -o ./ck/m.onnx --force", 2, &["ck/m.onnx is read by this export", "help: "]);
    fs::rename(layer.path("ck/config.json"), layer.path("ck/n.onnx")).unwrap();
    layer.refuses("ck/m.onnx --config ck/n.onnx -o ck/n.onnx --force", 2, &["ck/n.onnx is read by this export"]);
}

/// Under `--force` too.
#[test]
fn no_result_replaces_what_is_read_beside_a_file() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o out/m.onnx --external-data always");
    for name in ["out/dict.txt", "out/generation.json", "in.safetensors"] {
        scene.write(name, "mine");
    }
    fs::copy(scene.path("ck/model.safetensors"), scene.path("out/c.safetensors")).unwrap();
    fs::copy(scene.path("ck/config.json"), scene.path("out/config.json")).unwrap();
    let (run, sizes) = ("run out/m.onnx --inputs in.safetensors --outputs", "--dim batch=1 --dim sequence=1");
    for (line, output) in [
        (run, "out/m.onnx.data"),
        (run, "./out/../out/m.onnx.data"),
        ("bench out/m.onnx --json", "out/m.onnx.data"),
        ("bench out/m.onnx --checkpoint out/c.safetensors --csv", "out/config.json"),
        ("verify out/m.onnx --checkpoint ck --report", "out/m.onnx.data"),
        ("verify out/m.onnx --checkpoint out/c.safetensors --json", "out/config.json"),
        ("profile out/m.onnx --inputs in.safetensors --report", "out/dict.txt"),
        ("profile out/m.onnx --inputs in.safetensors --report", "out/generation.json"),
        (&format!("build out/m.onnx {sizes} -o"), "out/m.onnx.data"),
        (&format!("build out/m.onnx {sizes} -o out/m.plan --timing-cache"), "out/m.onnx"),
        (&format!("build out/m.onnx {sizes} -o out/m.plan --timing-cache"), "out/m.onnx.data"),
        ("baseline --config base.onnx -o", "base.onnx"),
        ("baseline --config base/model.onnx.data -o", "base"),
    ] {
        if line.starts_with("baseline") {
            fs::create_dir_all(scene.path("base")).unwrap();
            fs::copy(scene.path("ck/config.json"), scene.path("base.onnx")).unwrap();
            fs::copy(scene.path("ck/config.json"), scene.path("base/model.onnx.data")).unwrap();
        }
        scene.refuses(&format!("{line} {output} --force"), 2, &["is read by this command", "help: "]);
    }
    let parts = ["m.plan is named twice", "help: "];
    scene.refuses(&format!("build out/m.onnx {sizes} -o out/m.plan --timing-cache out/m.plan"), 2, &parts);
}

/// Weights lie where the model says, whatever their file is called; other files beside a model may be replaced.
#[test]
fn no_result_replaces_weights_under_another_name() {
    const NAME: &[u8] = b"weights.raw";
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o out/m.onnx --external-data always");
    let mut model = scene.read("out/m.onnx");
    let old = b"m.onnx.data";
    while let Some(place) = model.windows(old.len()).position(|bytes| bytes == old) {
        model[place..place + NAME.len()].copy_from_slice(NAME);
    }
    scene.write("out/m.onnx", model);
    fs::rename(scene.path("out/m.onnx.data"), scene.path("out/weights.raw")).unwrap();
    scene.write("in.safetensors", "no tensors");
    for line in [
        "run out/m.onnx --inputs in.safetensors --outputs",
        "bench out/m.onnx --json",
        "bench out --csv",
        "verify out/m.onnx --checkpoint ck --report",
        "profile out/m.onnx --inputs in.safetensors --report",
        "build out/m.onnx --dim batch=1 --dim sequence=1 -o out/m.plan --timing-cache",
    ] {
        let parts = ["weights.raw is read by this command", "help: "];
        scene.refuses(&format!("{line} out/weights.raw --force"), 2, &parts);
    }
    scene.write("out/notes.html", "old");
    scene.accepts("verify out/m.onnx --checkpoint ck --backends tract --report out/notes.html --force");
}

#[test]
fn existing_data_files_are_not_replaced_either() {
    let scene = Scene::with(&Model::layer());
    scene.write("m.onnx.data", "mine");
    scene.refuses("ck -o m.onnx --external-data always", 2, &["m.onnx.data exists already", "--force"]);
    let outcome = scene.moa("ck -o m.onnx");
    assert_eq!((outcome.code, outcome.stderr.contains("m.onnx.data is of an earlier export")), (Some(0), true));
    assert_eq!(scene.read("m.onnx.data"), b"mine");
    scene.accepts("ck -o m.onnx --external-data always --force");
    assert_ne!(scene.read("m.onnx.data"), b"mine");
}

#[test]
fn places_that_are_no_place_are_refused() {
    let scene = Scene::with(&Model::layer());
    scene.write("file", "mine");
    fs::create_dir_all(scene.path("taken/model.onnx")).unwrap();
    fs::create_dir(scene.path("real")).unwrap();
    symlink("elsewhere.onnx", scene.path("dangling.onnx")).unwrap();
    symlink("file", scene.path("link.onnx")).unwrap();
    symlink("nowhere", scene.path("dangling")).unwrap();
    symlink("../nowhere", scene.path("real/link.onnx")).unwrap();
    let long = format!("ck -o {}.onnx", "x".repeat(300));
    let cases: [(&str, u8, &[&str]); 17] = [
        ("ck -o taken", 2, &["taken/model.onnx", "regular file"]),
        ("ck -o taken --force", 2, &["taken/model.onnx", "regular file"]),
        ("ck -o link.onnx", 2, &["link.onnx is a link to file\n", "write to file itself, or remove the link"]),
        ("ck -o link.onnx --force", 2, &["link.onnx is a link to file\n"]),
        (
            "ck -o dangling.onnx",
            2,
            &["dangling.onnx is a link to elsewhere.onnx, where nothing is\n", "remove the link"],
        ),
        ("ck -o dangling.onnx --force", 2, &["dangling.onnx is a link to elsewhere.onnx, where nothing is\n"]),
        ("ck -o real/link.onnx", 2, &["real/link.onnx is a link to real/../nowhere, where nothing is\n"]),
        ("ck -o dangling", 2, &["dangling is a link to nowhere, where nothing is\n", "write to nowhere itself"]),
        ("ck -o dangling/m.onnx", 2, &["dangling is a link to nowhere, where nothing is\n"]),
        ("ck -o dangling/new/m.onnx", 2, &["dangling is a link to nowhere, where nothing is\n"]),
        ("ck -o file", 2, &["file is not a folder"]),
        ("ck -o file/m.onnx", 2, &["file is not a folder"]),
        ("ck -o file/new/m.onnx", 5, &["file/new cannot be written"]),
        ("ck -o file/new/newer", 5, &["file/new/newer cannot be written"]),
        ("ck -o /proc/m.onnx", 5, &["/proc/m.onnx cannot be written"]),
        ("ck -o /proc/new/newer/m.onnx", 5, &["/proc/new/newer cannot be written"]),
        (&long, 5, &["too long"]),
    ];
    for (line, code, parts) in cases {
        scene.refuses(line, code, parts);
    }
}

#[test]
fn failures_leave_no_folders_behind() {
    let scene = Scene::with(&Model::layer());
    let mut broken = Model::layer();
    broken.tensor("v_proj.weight").set(3, f32::NAN);
    broken.write(&scene.path("nan"));
    for line in ["nan -o n1/n2/m.onnx", "nan -o n1/n2/n3", "nan -o n1/n2/m.onnx --external-data always"] {
        scene.refuses(line, 3, &["v_proj.weight"]);
    }
    scene.refuses("ck -o n1/n2/x.pt", 2, &["n1/n2/x.pt"]);
    scene.refuses("ck -o n1/n2 --opset 3", 4, &["3"]);
    scene.accepts("ck -o n1/n2/m.onnx");
    scene.refuses("nan -o n1/n2/m.onnx --force", 3, &["v_proj.weight"]);
    scene.refuses("nan -o n1/n2/m.onnx --force --external-data always", 3, &["v_proj.weight"]);
}

/// A folder on the way that is not there, and `..` behind it.
#[test]
fn new_folders_may_be_left_again() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o new/../other/m.onnx");
    assert_eq!(scene.names("other"), ["m.onnx"]);
}

#[test]
fn links_to_folders_are_followed_and_stay() {
    let scene = Scene::with(&Model::layer());
    fs::create_dir(scene.path("real")).unwrap();
    symlink("real", scene.path("link")).unwrap();
    scene.accepts("ck -o link");
    assert_eq!(scene.names("real"), ["model.onnx"]);
    assert!(fs::symlink_metadata(scene.path("link")).unwrap().is_symlink());
}

/// A name that is no text is no reason to speak of several graphs.
#[test]
fn names_that_are_no_text_are_refused_for_what_they_are() {
    let scene = Scene::with(&Model::layer());
    let mut command = scene.command("ck -o");
    command.arg(std::ffi::OsStr::from_bytes(b"bad\xff.onnx"));
    let before = scene.snapshot();
    let outcome = Outcome::of(command);
    outcome.assert_refused("bad\\xff.onnx", 2, &["bad", "UTF-8"]);
    scene.assert_unchanged(&before, "bad\\xff.onnx");
}

#[test]
fn the_umask_is_respected() {
    let scene = Scene::with(&Model::layer());
    for (mask, file, folder) in [("022", 0o644, 0o755), ("077", 0o600, 0o700), ("002", 0o664, 0o775)] {
        for (out, model) in [(format!("n{mask}/out"), "/model.onnx"), (format!("n{mask}/m.onnx"), "")] {
            let line = format!("ck -o {out} --external-data always");
            let outcome = Outcome::of(scene.command_after(&format!("umask {mask}"), &line));
            assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
            let model = scene.path(&format!("{out}{model}"));
            let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
            assert_eq!(format!("{:o}", mode(&model)), format!("{file:o}"), "umask {mask}, {out}");
            assert_eq!(mode(&model.with_extension("onnx.data")), file, "umask {mask}, {out}");
            assert_eq!(format!("{:o}", mode(model.parent().unwrap())), format!("{folder:o}"), "umask {mask}, {out}");
        }
    }
}

#[test]
fn packed_models_are_not_written() {
    let scene = Scene::with(&Model::layer());
    for name in ["m.onnx.gz", "m.ONNX.zip"] {
        scene.refuses(&format!("ck -o {name}"), 2, &[name, "ending of another format"]);
    }
}

#[test]
fn weights_that_are_gone_are_named_with_their_model() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --external-data always");
    fs::rename(scene.path("m.onnx"), scene.path("n.onnx")).unwrap();
    fs::remove_file(scene.path("m.onnx.data")).unwrap();
    scene.refuses("run n.onnx --random", 5, &["n.onnx: its weights lie in m.onnx.data", "help: copy it beside"]);
}

#[test]
fn a_translator_without_its_dictionary_says_what_is_missing() {
    let scene = Scene::with_fixture("nmt");
    for line in ["ck -o out", "ck -o json --json"] {
        let outcome = scene.moa(line);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), NO_DICTIONARY), "{line}");
    }
    scene.write("words.txt", fs::read(data("nmt/dict.txt")).unwrap());
    let outcome = scene.moa("ck -o other --dict words.txt");
    assert!(outcome.code == Some(0) && !outcome.stderr.contains("no dictionary"), "{}", outcome.stderr);
    let outcome = scene.moa("ck -o other --force");
    let note = "dict.txt was there before, and programs may read it with this export: remove it if it is no part";
    assert!(outcome.code == Some(0) && outcome.stderr.contains(note), "{}", outcome.stderr);
    let outcome = scene.moa("ck/model.safetensors -o ck --config ck/config.json");
    assert_eq!((outcome.code, outcome.stderr.matches("was there before").count()), (Some(0), 0), "{}", outcome.stderr);
}
