//! Greedy and beam search beside what fairseq's `SequenceGenerator` found.

use moa_export::{
    backend::OrtOperators,
    generate::{Hypothesis, SearchOptions, Stop, Translator},
};
use moa_graphs::{Form, Precision};
use serde_json::Value;

use crate::{data, exported, exported_as, translator};

const SCORE_TOLERANCE: f64 = 1e-5;

fn items() -> Vec<Value> {
    let text = std::fs::read_to_string(data("nmt/generation.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    golden["items"].as_array().unwrap().clone()
}

fn assert_same(what: &str, found: &Hypothesis, golden: &Value) {
    let tokens: Vec<_> = golden["tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    assert_eq!(found.tokens, tokens, "{what}");
    assert_eq!(found.text, golden["text"].as_str().unwrap(), "{what}");
    assert!((found.score - golden["score"].as_f64().unwrap()).abs() < SCORE_TOLERANCE, "{what}: {found:?}");
    let scores = golden["positional_scores"].as_array().unwrap();
    assert_eq!(scores.len(), found.log_probabilities.len(), "{what}");
    for (score, golden) in found.log_probabilities.iter().zip(scores) {
        assert!((score - golden.as_f64().unwrap()).abs() < SCORE_TOLERANCE, "{what}: {found:?}");
    }
}

/// Compares all hypotheses of all sources, in batches of the translator's size.
fn compare(what: &str, translator: &mut Translator, key: &str, options: &SearchOptions) {
    let items = items();
    let sources: Vec<_> = items.iter().map(|item| item["source"].as_str().unwrap()).collect();
    let results = translator.translate(&sources, options).unwrap();
    assert_eq!(results.len(), 32);
    for (item, found) in items.iter().zip(results) {
        let goldens = match &item[key] {
            Value::Array(goldens) => goldens.clone(),
            golden => vec![golden.clone()],
        };
        assert_eq!(found.len(), goldens.len());
        for (rank, (found, golden)) in found.iter().zip(&goldens).enumerate() {
            assert_same(&format!("{what}, {key}, {}, hypothesis {rank}", item["source"]), found, golden);
        }
    }
}

fn all(what: &str, translator: &mut Translator) {
    let greedy = SearchOptions { beam: 1, length_penalty: 0.6, stop: Stop::Fairseq, ..SearchOptions::default() };
    compare(what, translator, "greedy", &greedy);
    compare(what, translator, "greedy", &SearchOptions { stop: Stop::Best, ..greedy });
    for (key, length_penalty) in [("beam4_lenpen0_6", 0.6), ("beam4_lenpen1_0", 1.0)] {
        let beam = SearchOptions { beam: 4, nbest: 4, length_penalty, ..greedy };
        compare(what, translator, key, &beam);
    }
}

#[test]
fn the_library_finds_what_fairseq_found() {
    let folder = exported(Form::Function);
    for batch in [1, 5, 32] {
        let mut translator = translator(&folder, OrtOperators::Library, batch);
        all(&format!("batches of {batch}"), &mut translator);
    }
}

#[test]
fn functions_and_standard_operators_find_what_fairseq_found() {
    for form in [Form::Function, Form::Standard] {
        let folder = exported(form);
        let mut translator = translator(&folder, OrtOperators::Functions, 32);
        all(&format!("{} form without the library", form.as_str()), &mut translator);
    }
}

/// With two bytes a weight, and a cache, the best translation of every source is still upstream's.
#[test]
fn reduced_precision_finds_the_same_translations() {
    let items = items();
    let sources: Vec<_> = items.iter().map(|item| item["source"].as_str().unwrap()).collect();
    for precision in [Precision::Fp16, Precision::Bf16] {
        for operators in [OrtOperators::Library, OrtOperators::Functions] {
            let folder = exported_as(Form::Function, precision);
            let mut translator = translator(&folder, operators, 32);
            for (key, beam) in [("greedy", 1), ("beam4_lenpen1_0", 4)] {
                let options = SearchOptions { beam, stop: Stop::Fairseq, ..SearchOptions::default() };
                let results = translator.translate(&sources, &options).unwrap();
                for (item, found) in items.iter().zip(results) {
                    let golden = item[key].get(0).unwrap_or(&item[key]);
                    let place = format!("{precision:?}, {operators:?}, {key}, {}", item["source"]);
                    assert_eq!(found[0].text, golden["text"].as_str().unwrap(), "{place}");
                }
            }
        }
    }
}

/// Weights in integers change a few translations, and the same ones with the library and without.
#[test]
fn integers_find_most_of_the_translations() {
    finds_most_of_the_translations(Precision::Int8);
    finds_most_of_the_translations(Precision::Int4);
}

fn finds_most_of_the_translations(precision: Precision) {
    let items = items();
    let sources: Vec<_> = items.iter().map(|item| item["source"].as_str().unwrap()).collect();
    let folder = exported_as(Form::Function, precision);
    for (key, beam) in [("greedy", 1), ("beam4_lenpen1_0", 4)] {
        let options = SearchOptions { beam, stop: Stop::Fairseq, ..SearchOptions::default() };
        let found = [OrtOperators::Library, OrtOperators::Functions].map(|operators| -> Vec<String> {
            let results = translator(&folder, operators, 32).translate(&sources, &options).unwrap();
            results.into_iter().map(|found| found[0].text.clone()).collect()
        });
        assert_eq!(found[0], found[1], "{precision:?}, {key}");
        let golden =
            |item: &serde_json::Value| item[key].get(0).unwrap_or(&item[key])["text"].as_str().unwrap().to_owned();
        let same = items.iter().zip(&found[0]).filter(|(item, found)| golden(item) == **found).count();
        assert!(10 * same >= 9 * items.len(), "{precision:?}, {key}: {same} of {}", items.len());
    }
}

#[test]
fn the_source_tokens_are_those_of_upstream() {
    let folder = exported(Form::Function);
    let config = moa_export::text::TranslationConfig::read(&crate::out(&folder)).unwrap();
    let tokenizer = moa_export::text::Tokenizer::read(&crate::out(&folder), &config).unwrap();
    for item in items() {
        let mut tokens = tokenizer.encode(item["source"].as_str().unwrap());
        tokens.push(2);
        assert_eq!(serde_json::json!(tokens), item["source_tokens"]);
        let reference: Vec<_> =
            item["reference_tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        assert_eq!(tokenizer.decode(&reference), item["reference"].as_str().unwrap());
    }
}

#[test]
fn a_wider_n_best_starts_with_the_narrower_one() {
    let folder = exported(Form::Function);
    let mut translator = translator(&folder, OrtOperators::Library, 32);
    let lines = ["nine hundred", "", "four hundred twelve thousand seven", " \t ", "zero"];
    let wide = SearchOptions { beam: 6, nbest: 3, ..SearchOptions::default() };
    let three = translator.translate(&lines, &wide).unwrap();
    let one = translator.translate(&lines, &SearchOptions { nbest: 1, ..wide }).unwrap();
    for (index, (three, one)) in three.iter().zip(&one).enumerate() {
        if index == 1 || index == 3 {
            assert!(three.is_empty() && one.is_empty());
            continue;
        }
        assert_eq!(three.len(), 3);
        assert!(three.windows(2).all(|pair| pair[0].score >= pair[1].score));
        assert_eq!((&one[0].text, &one[0].tokens), (&three[0].text, &three[0].tokens));
    }
}
