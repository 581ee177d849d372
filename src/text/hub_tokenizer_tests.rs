//! Tokenizers of words and of bytes.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read(tokenizer: &Value) -> HubTokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(TOKENIZER_FILE), tokenizer.to_string()).unwrap();
    HubTokenizer::read(folder.path()).unwrap().unwrap()
}

/// The letters that byte-level tokenizers write for bytes, byte by byte.
fn letters() -> Vec<char> {
    let printed = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0u32..256).filter(|byte| !printed(*byte)).collect::<Vec<_>>();
    let place = |byte: u32| others.iter().position(|other| *other == byte).and_then(|place| u32::try_from(place).ok());
    (0u32..256).map(|byte| char::from_u32(place(byte).map_or(byte, |place| 256 + place)).unwrap()).collect()
}

/// Every byte is a token whose id is the byte.
fn of_bytes() -> HubTokenizer {
    let vocabulary: serde_json::Map<String, Value> =
        letters().into_iter().enumerate().map(|(byte, letter)| (letter.to_string(), byte.into())).collect();
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    read(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    }))
}

/// Every byte is a token, in the way of SentencePiece, and so is every small letter.
fn of_bytes_and_letters() -> HubTokenizer {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let letters = ('a'..='z').chain(['▁']).map(String::from);
    let vocabulary: serde_json::Map<String, Value> =
        bytes.chain(letters).enumerate().map(|(id, token)| (token, id.into())).collect();
    read(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null,
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        "pre_tokenizer": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
        ] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true, "unk_token": "<0x00>" },
    }))
}

fn bytes(text: &[u8]) -> Vec<i64> {
    text.iter().copied().map(i64::from).collect()
}

/// What is printed after each of `tokens`, and at the end.
fn pieces(tokenizer: &HubTokenizer, prompt: &[i64], tokens: &[i64]) -> Vec<String> {
    let mut pieces = Pieces::after(prompt, tokenizer);
    let mut printed: Vec<_> = tokens.iter().map(|token| pieces.push(*token, tokenizer).unwrap()).collect();
    printed.push(pieces.finish(tokenizer).unwrap());
    printed
}

/// A tokenizer of words that cuts, pads and begins every text, with a special token that is not printed.
fn of_words() -> HubTokenizer {
    read(&words())
}

fn words() -> Value {
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    };
    json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 },
        "padding": {
            "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0,
            "pad_token": "<pad>",
        },
        "added_tokens": [special(0, "<s>"), special(1, "<pad>")],
        "normalizer": { "type": "Lowercase" },
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } },
        },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "<s>": 0, "<pad>": 1, "a": 2, "b": 3, "?": 4 }, "unk_token": "?" },
    })
}

#[test]
fn a_text_is_begun_and_neither_cut_nor_padded() {
    let tokenizer = of_words();
    assert_eq!(tokenizer.encode("a B a c a").unwrap(), [0, 2, 3, 2, 4, 2]);
    assert_eq!(tokenizer.encode("b").unwrap(), [0, 3]);
    assert_eq!(tokenizer.decode(&[0, 2, 1, 3, 1]).unwrap(), "a b");
    assert_eq!(pieces(&tokenizer, &[0, 2], &[3, 0, 2]).concat(), " b a");
}

/// Words that begin with their space, the first of which a text drops, and a special token.
fn of_spaced_words() -> HubTokenizer {
    let end = json!({
        "id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    });
    let space = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    read(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": space, "post_processor": null, "decoder": space,
        "model": { "type": "WordLevel", "vocab": { "</s>": 0, "▁a": 1, "▁fox": 2 }, "unk_token": "▁a" },
    }))
}

/// A special token, and ids that the tokenizer lacks.
#[test]
fn what_is_not_printed_takes_no_space_away() {
    let tokenizer = of_spaced_words();
    for (silent, count) in [0, 3, -1].into_iter().flat_map(|id| [0, 1, 5, 6, 7, 40].map(|count| (id, count))) {
        let between = vec![silent; count];
        let tokens = [&[1][..], &between, &[2], &between, &[1]].concat();
        assert_eq!(tokenizer.decode(&[&[2][..], &tokens].concat()).unwrap(), "fox a fox a");
        assert_eq!(pieces(&tokenizer, &[2], &tokens).concat(), " a fox a", "{count} of {silent}");
        let prompt = [&[2][..], &between].concat();
        assert_eq!(pieces(&tokenizer, &prompt, &tokens).concat(), " a fox a", "{count} of {silent}");
    }
}

#[test]
fn tokens_around_a_text_are_compared_with_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(TOKENIZER_CONFIG_FILE);
    let contradiction = |tokenizer: &Value| {
        std::fs::write(folder.path().join(TOKENIZER_FILE), tokenizer.to_string()).unwrap();
        HubTokenizer::read(folder.path()).unwrap().unwrap().contradiction()
    };
    let begins = words();
    let mut bare = words();
    bare["post_processor"] = Value::Null;
    assert_eq!(contradiction(&begins).unwrap(), None, "without a configuration");
    let said = |keys: Value, tokenizer: &Value| {
        std::fs::write(&path, keys.to_string()).unwrap();
        let found = contradiction(tokenizer).unwrap();
        found.map(|found| found.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned())
    };
    assert_eq!(said(json!({}), &begins), None);
    let agreed = json!({ "add_bos_token": true, "add_eos_token": false });
    assert_eq!(said(agreed, &begins), None);
    assert_eq!(said(json!({ "add_bos_token": null, "add_eos_token": false }), &bare), None);
    let begun = said(json!({ "add_bos_token": false }), &begins);
    assert_eq!(begun.as_deref(), Some("add_bos_token is false, and tokenizer.json puts <s> before a text"));
    let bare = said(json!({ "add_bos_token": true, "add_eos_token": true }), &bare);
    let [before, behind] = [("bos", "before"), ("eos", "behind")]
        .map(|(key, place)| format!("add_{key}_token is true, and tokenizer.json puts no token {place} a text"));
    assert_eq!(bare, Some(format!("{before}; {behind}")));
    std::fs::write(&path, r#"{"add_bos_token": 1}"#).unwrap();
    assert!(contradiction(&begins).unwrap_err().to_string().ends_with("must be true or false, found 1"));
}

#[test]
fn a_character_is_printed_when_it_is_whole() {
    let tokenizer = of_bytes();
    assert_eq!(tokenizer.encode("a€").unwrap(), bytes("a€".as_bytes()));
    let printed = pieces(&tokenizer, &[], &bytes("a€ü🦀.".as_bytes()));
    assert_eq!(printed, ["a", "", "", "€", "", "ü", "", "", "", "🦀", ".", ""]);
    // A prompt may end within a character, and so may a text.
    let euro = bytes("€".as_bytes());
    assert_eq!(pieces(&tokenizer, &euro[..1], &euro[1..]).concat().chars().last(), Some('€'));
    assert_eq!(pieces(&tokenizer, &[], &[bytes(b"a"), euro[..2].to_vec()].concat()), ["a", "", "", "\u{FFFD}"]);
}

proptest! {
    #[test]
    fn pieces_are_the_text(prompt in "[a-c €ü🦀]{0,4}", text in "[a-c €ü🦀\\n]{0,12}") {
        let tokenizer = of_bytes();
        let printed = pieces(&tokenizer, &bytes(prompt.as_bytes()), &bytes(text.as_bytes()));
        prop_assert!(printed.iter().all(|piece| !piece.contains(INCOMPLETE)), "{printed:?}");
        prop_assert_eq!(printed.concat(), text);
    }
}

proptest! {
    #[test]
    fn pieces_of_bytes_between_letters_are_the_text(prompt in "[ab €ü🦀漢]{0,9}", text in "[ab €ü🦀漢]{0,20}") {
        let tokenizer = of_bytes_and_letters();
        let [prompt, tokens] = [&prompt, &text].map(|text| tokenizer.encode(text).unwrap());
        let printed = pieces(&tokenizer, &prompt, &tokens);
        prop_assert!(printed.iter().all(|piece| !piece.contains(INCOMPLETE)), "{printed:?}");
        prop_assert_eq!(printed.concat(), text);
    }
}

proptest! {
    /// Bytes of which some are no characters, where the prompt ends with one.
    #[test]
    fn the_whole_text_is_what_the_tokenizer_decodes(
        prompt in "[ab €🦀]{0,9}",
        tokens in proptest::collection::vec(prop_oneof![0x61i64..0x64, 0x80i64..0x100, 256i64..282], 0..24),
    ) {
        let tokenizer = of_bytes_and_letters();
        let prompt = [tokenizer.encode(&prompt).unwrap(), vec![256]].concat();
        let mut pieces = Pieces::after(&prompt, &tokenizer);
        for token in &tokens {
            pieces.push(*token, &tokenizer).unwrap();
        }
        pieces.finish(&tokenizer).unwrap();
        let all = tokenizer.decode(&[prompt.as_slice(), &tokens].concat()).unwrap();
        let known = tokenizer.decode(&prompt).unwrap();
        prop_assert_eq!(known + &pieces.whole(&tokenizer).unwrap(), all);
    }
}

#[test]
fn bytes_that_are_no_character_do_not_end_a_text() {
    let tokenizer = of_bytes_and_letters();
    let tokens = [tokenizer.encode("a漢").unwrap(), vec![0xFF], tokenizer.encode("b🦀").unwrap()].concat();
    let printed = pieces(&tokenizer, &tokenizer.encode("🦀🦀").unwrap(), &tokens);
    assert!(printed.concat().starts_with('a') && printed.concat().ends_with("b🦀"), "{printed:?}");
}

#[test]
#[cfg(unix)]
fn what_cannot_be_looked_at_is_not_absent() {
    let folder = tempfile::tempdir().unwrap();
    assert!(HubTokenizer::read(folder.path()).unwrap().is_none());
    std::os::unix::fs::symlink(TOKENIZER_FILE, folder.path().join(TOKENIZER_FILE)).unwrap();
    let error = HubTokenizer::read(folder.path()).unwrap_err();
    assert!(matches!(&error, TextError::Io { path, .. } if path.ends_with(TOKENIZER_FILE)), "{error}");
}
