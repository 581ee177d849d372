//! `moa-export bench --compare`.

use serde_json::Value;

use super::{QUICK, exported, list};
use crate::scene::{Scene, json};

/// An export, a result of it, and the line that makes another.
struct Measured {
    scene: Scene,
    result: Value,
    line: String,
}

impl Measured {
    fn new() -> Self {
        let scene = exported("");
        let line = format!("bench m.onnx {QUICK} --no-operators");
        let result = json(&scene.accepts(&format!("{line} --json -")));
        Self { scene, result, line }
    }

    /// Writes an older result, made up from the new one: a gate must not depend on how fast this machine is.
    fn write(&self, name: &str, change: &dyn Fn(&mut Value)) {
        let mut old = self.result.clone();
        change(&mut old);
        self.scene.write(name, old.to_string());
    }

    /// One of calls that took `factor` of the time.
    fn write_scaled(&self, name: &str, factor: f64) {
        self.write(name, &|old| {
            for row in old["rows"].as_array_mut().unwrap() {
                for place in ["/value", "/interval/0", "/interval/1"] {
                    let number = row["turn_median_ns"].pointer_mut(place).unwrap();
                    *number = (number.as_f64().unwrap() * factor).into();
                }
            }
        });
    }

    fn refused(&self, name: &str, code: u8, parts: &[&str], options: &str) {
        self.scene.refuses(&format!("{} --compare {name} {options}", self.line), code, parts);
    }
}

#[test]
fn older_results_are_a_gate() {
    let measured = Measured::new();
    let Measured { scene, line, .. } = &measured;
    measured.write_scaled("fast.json", 1e-6);
    measured.write_scaled("slow.json", 1e6);
    let slower = scene.moa(&format!("{line} --compare fast.json"));
    assert_eq!((slower.code, slower.stderr.as_str()), (Some(1), ""));
    assert!(slower.stdout.contains("SLOWER") && slower.stdout.contains("2 rows became slower"), "{}", slower.stdout);
    assert!(scene.accepts(&format!("{line} --compare slow.json")).ends_with("beyond both 95 % intervals and 5 %\n"));
    scene.accepts(&format!("{line} --compare fast.json --threshold 1e12"));
    let gated = scene.moa(&format!("{line} --compare fast.json --report page.html --json -"));
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    assert!(page.contains("Beside the older result") && page.contains("SLOWER"), "{page}");
    assert!(page.contains("slower than the older result"), "{page}");
    let comparison = &json(&gated.stdout)["comparison"];
    assert_eq!((gated.code, &comparison["threshold"]), (Some(1), &0.05.into()), "{comparison}");
    assert!(list(comparison, "rows").iter().all(|row| row["outcome"] == "slower"), "{comparison}");
    assert!(list(comparison, "other_files").is_empty() && measured.result["comparison"].is_null(), "{comparison}");
}

#[test]
fn a_model_may_have_another_name_and_other_bytes() {
    let measured = Measured::new();
    let Measured { scene, line, .. } = &measured;
    measured.write_scaled("slow.json", 1e6);
    let renamed = line.replace("m.onnx", "renamed.onnx");
    std::fs::copy(scene.path("m.onnx"), scene.path("renamed.onnx")).unwrap();
    assert!(!scene.accepts(&format!("{renamed} --compare slow.json")).contains("other bytes"));
    scene.accepts("ck -o renamed.onnx --opset 20 --force");
    let told = "no row became slower, beyond both 95 % intervals and 5 %\nthe older result is of other bytes of renamed.onnx\n";
    assert!(scene.accepts(&format!("{renamed} --compare slow.json")).ends_with(told));
    let two = format!("{} --compare slow.json", line.replace("m.onnx", "m.onnx renamed.onnx"));
    scene.refuses(&two, 2, &["renamed.onnx, model, batch 1, sequence 6: not measured then, asked for now"]);
}

#[test]
fn what_was_measured_otherwise_is_not_compared() {
    let measured = Measured::new();
    measured.write("other.json", &|old| old["receipt"]["machine"]["cpu"] = "another".into());
    measured.refused("other.json", 2, &["other.json measured something else", "processor: another then"], "");
    measured.write("some.json", &|old| old["rows"] = Value::Array(vec![old["rows"][0].clone()]));
    measured.refused("some.json", 2, &["ort-function", "not measured then"], "");
    measured.write("same.json", &|_| ());
    measured.refused("same.json", 2, &["sequence 9", "not measured then, asked for now"], "--seq 9");
    let more = measured.result["receipt"]["threads"]["onnx_runtime"].as_u64().unwrap() + 1;
    measured.refused("same.json", 2, &["threads"], &format!("--threads {more}"));
    measured.refused("same.json", 2, &["routing: data then, single now"], "--routing single");
    measured.refused("same.json", 2, &["caches in place: no then, yes now"], "--in-place");
}

/// Fewer turns than an interval needs: the result is written, and says that it was not compared.
#[test]
fn a_comparison_that_fails_is_told_with_the_result() {
    let measured = Measured::new();
    measured.write("old.json", &|_| ());
    let line = measured.line.replace("--samples 12", "--samples 3");
    let outcome = measured.scene.moa(&format!("{line} --compare old.json --report page.html --json -"));
    outcome.assert_failed(&line, 2, &["old.json measured something else", "too few turns for an interval now"]);
    let comparison = &json(&outcome.stdout)["comparison"];
    let why_not = comparison["why_not"].as_str().unwrap();
    assert!(why_not.contains("too few turns") && list(comparison, "rows").is_empty(), "{comparison}");
    let page = String::from_utf8(measured.scene.read("page.html")).unwrap();
    assert!(page.contains("Beside the older result") && page.contains("too few turns"), "{page}");
    measured.write("few.json", &|old| old["rows"][1]["turn_median_ns"]["interval"] = Value::Null);
    measured.refused("few.json", 2, &["too few turns for an interval then, asked for now"], "");
}

#[test]
fn what_is_no_result_is_told_what_it_is() {
    let measured = Measured::new();
    let scene = &measured.scene;
    measured.write("older.json", &|old| old["format"] = 0.into());
    scene.write("broken.json", "{}");
    scene.write("empty.json", "");
    scene.write("binary.json", [b"{\"format\": \"".as_slice(), &[0xff, 0xfe, 0, 1]].concat());
    scene.write("ops.json", scene.accepts("ops --json"));
    std::fs::File::create(scene.path("large.json")).unwrap().set_len((64 << 20) + 1).unwrap();
    for (name, is) in [
        ("older.json", "has format 0 of `bench`, and this program reads format 1"),
        ("broken.json", "is no document of `bench`"),
        ("empty.json", "is empty"),
        ("binary.json", "is no JSON: "),
        ("ops.json", "is a document of `ops`"),
        ("large.json", "is no result of `bench`: expected at most 67108864 bytes, found 67108865"),
        ("m.onnx", "is no JSON: "),
    ] {
        measured.refused(name, 3, &[&format!("{name} {is}"), "help: give a file that"], "");
    }
    measured.refused("nowhere.json", 5, &["nowhere.json"], "");
}
