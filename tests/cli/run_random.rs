//! `moa-export run --random`, and what `run` shows of outputs.

use prost::Message;

use crate::{
    run::{exported, outputs},
    scene::Outcome,
    support_onnx::node,
};

/// What comes out is shown whether it is kept or not; the same seed gives the same inputs.
#[test]
fn inputs_are_made_where_there_is_no_file() {
    let scene = exported("");
    let line = "run m.onnx --random --batch 2 --seq 5 --backend tract";
    let printed = scene.accepts(line);
    let words: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["output", "type", "shape", "least", "mean", "largest"]);
    assert_eq!(words[1][..5], ["logits", "float32", "[2,", "5,", "67]"]);
    let kept = scene.accepts(&format!("{line} --outputs tract.safetensors"));
    assert_eq!(kept, printed);
    let values = &outputs(&scene, "tract")[0].2;
    let [least, mean, largest] = [5, 6, 7].map(|place| words[1][place].parse::<f32>().unwrap());
    assert!((values.iter().copied().reduce(f32::min).unwrap() - least).abs() < 1e-4, "{printed}");
    assert!((values.iter().copied().reduce(f32::max).unwrap() - largest).abs() < 1e-4, "{printed}");
    assert!((values.iter().sum::<f32>() / values.len() as f32 - mean).abs() < 1e-3, "{printed}");
    let other = scene.accepts(&format!("{line} --seed 1 --save-inputs in.safetensors"));
    assert_ne!(other, printed);
    assert_eq!(scene.accepts("run m.onnx --inputs in.safetensors --backend tract"), other);
    for (options, code, says) in [
        ("", 2, ["--inputs <FILE>", "or let --random make some"]),
        ("--random --past 4", 2, ["no graph here has the axis \"past_sequence\"", "leave out"]),
        ("--random --dim heads=4", 2, ["the axis \"heads\"", "leave out"]),
        ("--random --dim heads=4 --dim heads=5", 2, ["--dim gives the axis heads two sizes", "one size"]),
        ("--random --seq 5000", 2, ["5000 positions", "smaller sizes"]),
        ("--random --batch 1048576 --seq 1048576", 2, ["a point of", "smaller sizes"]),
        ("--inputs i --seq 4", 2, ["--seq <T>", "--inputs <FILE>"]),
        ("--inputs i --random", 2, ["--random", "--inputs <FILE>"]),
        ("--random --outputs o --save-inputs o", 2, ["o is named twice", "a file of its own"]),
    ] {
        scene.refuses(&format!("run m.onnx {options}"), code, &says);
    }
    scene.write("m.plan", "a plan");
    scene.refuses("run m.plan --random", 2, &["a plan does not tell what its ids mean", "--plan"]);
}

#[test]
fn values_that_are_not_finite_are_counted() {
    let scene = exported("");
    let mut model = scene.model("m.onnx");
    let graph = model.graph.as_mut().unwrap();
    let last = graph.node.iter_mut().find(|node| node.output.iter().any(|name| name == "logits")).unwrap();
    last.output[0] = "finite".into();
    graph.node.push(node("Log", &["finite"], &["logits"]));
    scene.write("m.onnx", model.encode_to_vec());
    let printed = scene.accepts("run m.onnx --random --seq 5 --backend ort");
    let header = printed.lines().next().unwrap();
    let count: usize = printed.split_whitespace().last().unwrap().parse().unwrap();
    assert!(header.ends_with("not finite") && count > 0 && count < 5 * 67, "{printed}");
}

/// What a variable names is told with the variable, what an option names without.
#[test]
fn libraries_that_cannot_be_used_are_told_with_their_variables() {
    let scene = exported("");
    scene.write("text.so", [b'#'; 300]);
    let other = std::env::var("MOA_ORT_LIBRARY").unwrap();
    for (variable, library, parts) in [
        ("ORT_DYLIB_PATH", "text.so", ["text.so cannot be loaded: invalid ELF header", "help: correct or unset ORT"]),
        ("ORT_DYLIB_PATH", &other, ["is no ONNX Runtime, or is too old: ", "help: correct or unset ORT_DYLIB_PATH"]),
        ("MOA_ORT_LIBRARY", "text.so", ["text.so cannot be loaded: ", "help: set MOA_ORT_LIBRARY to the libmoa_ort "]),
    ] {
        let mut command = scene.command("run m.onnx --random");
        command.env(variable, library);
        Outcome::of(command).assert_refused(library, 6, &parts);
    }
    scene.refuses(
        "run m.onnx --random --library text.so",
        6,
        &["text.so cannot be loaded: ", "help: give the libmoa_"],
    );
}
