//! `moa-export run --inputs`: what may be left out, and outputs that were expected.

use crate::run::{BACKENDS, causal, ids, line, mask, outputs, write_causal_inputs, write_inputs};

/// Caches of no token and positions of a mask without padding are what a file of all inputs holds.
#[test]
fn caches_and_positions_may_be_left_out() {
    for options in ["", "--dtype fp16"] {
        let scene = causal(options);
        let backends = if options.is_empty() { &BACKENDS[..] } else { &BACKENDS[..2] };
        for backend in backends {
            if options.is_empty() {
                write_causal_inputs(&scene, &[0, 1, 2]);
                scene.accepts(&line(backend));
                std::fs::rename(scene.path(&format!("{backend}.safetensors")), scene.path("all.safetensors")).unwrap();
            }
            write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
            scene.accepts(&line(backend));
            if options.is_empty() {
                assert_eq!(outputs(&scene, backend), outputs(&scene, "all"), "{backend}");
            }
        }
    }
}

#[test]
fn what_does_not_follow_must_be_given() {
    let scene = causal("");
    write_inputs(&scene, &[ids(&[1, 3])]);
    scene.refuses(&line("ort"), 3, &["inputs.safetensors", "`attention_mask`", "found nothing"]);
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 2])]);
    scene.refuses(&line("ort"), 3, &["`attention_mask`", "a value for each token", "[1, 2] beside input_ids [1, 3]"]);
}
