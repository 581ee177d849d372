//! One safetensors file: its header, its kind, its layout.

use std::{fmt::Write as _, fs};

use moa_export::checkpoint::{Checkpoint, ErrorKind};
use moa_graphs::TensorDirectory;

use super::{
    assert_header_refused, assert_refused, described, entry, file_of, folder, open_bytes, refusal, refusal_in, single,
};

#[test]
fn shorter_than_its_length_is_malformed() {
    assert_refused(b"", ErrorKind::Malformed, &["has 0 bytes"]);
    assert_refused(b"\x01\0\0", ErrorKind::Malformed, &["has 3 bytes"]);
    assert_refused(&[0; 8], ErrorKind::Malformed, &["must start with '{'"]);
}

#[test]
fn impossible_header_length_is_malformed() {
    for length in [u64::MAX, 100_000_001, 1 << 63] {
        let mut file = length.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert_refused(&file, ErrorKind::Malformed, &["expected a header of at most 100000000 bytes", "found"]);
    }
    for length in [3u64, 16 << 20, 100_000_000] {
        let mut file = length.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert_refused(&file, ErrorKind::Malformed, &[&format!("expected {} bytes", 8 + length), "found 10"]);
    }
}

#[test]
fn large_header_exceeds_a_limit() {
    let mut header = "{}".to_owned();
    header.push_str(&" ".repeat((16 << 20) - 1));
    assert_refused(&file_of(&header, &[]), ErrorKind::Limit, &["header", "16777216"]);
    header.pop();
    let folder = folder();
    assert!(open_bytes(&folder, &file_of(&header, &[])).unwrap().names().is_empty());
}

#[test]
fn bombs_are_refused() {
    for count in [200_001, 250_000, 1_000_000] {
        let mut header = "{".to_owned();
        for index in 0..count {
            write!(header, r#""{index}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},"#).unwrap();
        }
        header.pop();
        header.push('}');
        let file = file_of(&header, &[]);
        let folder = folder();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, file).unwrap();
        let (kind, text) = described(Checkpoint::open(&path, None), "model.safetensors");
        assert_eq!(kind, ErrorKind::Limit, "{text}");
    }
    let entries: Vec<_> = (0..200_001).map(|index| format!("\"{index}\":\"\"")).collect();
    let header = format!("{{\"__metadata__\":{{{}}}}}", entries.join(","));
    assert_header_refused(&header, &[], ErrorKind::Limit, &["metadata entries", "200000"]);
}

#[test]
fn broken_json_is_malformed() {
    assert_header_refused("{\"a\"", &[], ErrorKind::Malformed, &[]);
    assert_header_refused("{\"a\"}", &[], ErrorKind::Malformed, &["tensor \"a\""]);
    assert_header_refused("{,}", &[], ErrorKind::Malformed, &["not valid JSON"]);
    assert_header_refused(&"[".repeat(100_000), &[], ErrorKind::Malformed, &["must start with '{'"]);
    let nested = format!("{{\"__metadata__\":{}}}", "[".repeat(100_000));
    assert_header_refused(&nested, &[], ErrorKind::Malformed, &["expected an object of texts"]);
    let nested = format!("{{\"x\":{}}}", "{\"dtype\":".repeat(100_000));
    assert_header_refused(&nested, &[], ErrorKind::Malformed, &[]);
    let mut file = file_of("{\"?\":1}", &[]);
    file[10] = 0xff;
    assert_refused(&file, ErrorKind::Malformed, &["not UTF-8 at byte 2"]);
    assert_header_refused(r#"{"\ud800":1}"#, &[], ErrorKind::Malformed, &["not valid JSON"]);
}

#[test]
fn content_is_never_shown() {
    let header = r#"{"x":{"dtype":"F32","shape":"secret","data_offsets":[0,0]}}"#;
    assert!(!refusal(&file_of(header, &[])).1.contains("secret"));
    let header = r#"{"__metadata__":"secret, expected secret"}"#;
    let text = refusal(&file_of(header, &[])).1;
    assert!(!text.contains("secret"), "{text}");
    let header = r#"{"__metadata__":{"a":["secret"]}}"#;
    assert!(!refusal(&file_of(header, &[])).1.contains("secret"));
}

#[test]
fn repeated_keys_are_malformed() {
    let data = [0; 16];
    let header = format!("{{{},{}}}", entry("x", "F32", "[2,2]", 0, 16), entry("x", "I32", "[4,1]", 0, 16));
    assert_header_refused(&header, &data, ErrorKind::Malformed, &["\"x\" is repeated"]);
    let header = format!(r#"{{"__metadata__":{{}},"__metadata__":{{}},{}}}"#, entry("x", "F32", "[4]", 0, 16));
    assert_header_refused(&header, &data, ErrorKind::Malformed, &["\"__metadata__\" is repeated"]);
    let header = format!(r#"{{"__metadata__":{{"a":"b","a":"c"}},{}}}"#, entry("x", "F32", "[4]", 0, 16));
    assert_header_refused(&header, &data, ErrorKind::Malformed, &["\"a\" is repeated"]);
    for key in [r#""dtype":"F32""#, r#""shape":[4]"#, r#""data_offsets":[0,16]"#] {
        let header = format!(r#"{{"x":{{{key},"dtype":"F32","shape":[4],"data_offsets":[0,16]}}}}"#);
        assert_header_refused(&header, &data, ErrorKind::Malformed, &["tensor \"x\"", "repeats the key"]);
    }
}

#[test]
fn entries_have_exactly_three_keys() {
    let cases = [
        (r#"{"dtype":"F32","shape":[4]}"#, "lacks the key \"data_offsets\""),
        (r#"{"dtype":"F32","data_offsets":[0,16]}"#, "lacks the key \"shape\""),
        (r#"{"shape":[4],"data_offsets":[0,16]}"#, "lacks the key \"dtype\""),
        (r#"{"dtype":"F32","shape":[4],"data_offsets":[0,16],"y":1}"#, "unknown key \"y\""),
        (r#"{"dtype":"F32","shape":[4],"data_offsets":[0,16,16]}"#, "not of the form"),
        (r#"{"dtype":"F32","shape":[4],"data_offsets":[16]}"#, "not of the form"),
        (r#"{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}"#, "not of the form"),
        (r#"{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}"#, "not of the form"),
        (r#"{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}"#, "not of the form"),
        (r#"{"dtype":5,"shape":[4],"data_offsets":[0,16]}"#, "not of the form"),
        (r"[]", "not of the form"),
        (r"null", "not of the form"),
        (r"5", "not of the form"),
    ];
    for (text, part) in cases {
        let header = format!("{{\"x\":{text}}}");
        assert_header_refused(&header, &[0; 16], ErrorKind::Malformed, &["tensor \"x\"", part]);
    }
    for text in ["null", "[]", r#"{"a":1}"#, r#"{"a":null}"#] {
        let header = format!("{{\"__metadata__\":{text}}}");
        assert_header_refused(&header, &[], ErrorKind::Malformed, &["expected"]);
    }
}

#[test]
fn data_is_covered_exactly() {
    let two = |first: (u64, u64), second: (u64, u64)| {
        let shape = |(begin, end): (u64, u64)| format!("[{}]", (end - begin) / 4);
        let entry = |name, span: (u64, u64)| entry(name, "F32", &shape(span), span.0, span.1);
        format!("{{{},{}}}", entry("x", first), entry("y", second))
    };
    let refused = |header: &str, parts: &[&str]| assert_header_refused(header, &[0; 16], ErrorKind::Malformed, parts);
    refused(&two((0, 8), (4, 16)), &["tensor \"y\"", "overlaps", "byte 8", "\"x\" ends", "found 4"]);
    refused(&two((0, 4), (8, 16)), &["tensor \"y\"", "hole", "byte 4", "\"x\" ends", "found 8"]);
    refused(&two((4, 8), (8, 16)), &["tensor \"x\"", "hole", "byte 0", "found 4"]);
    refused(&two((0, 8), (0, 8)), &["overlaps"]);
    refused(&two((0, 8), (8, 12)), &["expected", "found"]);
    refused(&two((0, 8), (8, 20)), &["expected", "found"]);
    let backwards = format!("{{{},{}}}", entry("x", "F32", "[2]", 0, 8), entry("y", "F32", "[2]", 16, 8));
    refused(&backwards, &["tensor \"y\"", "expected 8 bytes", "found bytes 16 to 8"]);
    refused(&format!("{{{}}}", entry("x", "F32", "[5]", 0, 16)), &["expected 20 bytes for F32 of shape [5]"]);
    refused("{}", &["expected 10 bytes", "found 26"]);
    let far = 1 << 63;
    refused(&two((far, far + 8), (8, 16)), &["tensor \"x\"", "starts at byte 9223372036854775808", "which has 16"]);
    refused(&two((0, 8), (far, far + 8)), &["tensor \"y\"", "starts at byte 9223372036854775808"]);
    let reversed = format!("{{{},{}}}", entry("y", "F32", "[2]", 8, 16), entry("x", "F32", "[2]", 0, 8));
    assert!(open_bytes(&folder(), &file_of(&reversed, &[0; 16])).is_ok());
    let end = u64::MAX - 3;
    refused(&format!("{{{}}}", entry("x", "U8", &format!("[{}]", end / 8), 0, end / 8)), &["expected"]);
}

#[test]
fn trailing_archive_is_malformed() {
    let mut file = single("F32", "[1]", &[0; 4]);
    let size = file.len();
    file.extend(b"PK\x03\x04 polyglot");
    assert_refused(&file, ErrorKind::Malformed, &[&format!("expected {size} bytes by its header")]);
}

#[test]
fn truncation_is_refused_at_every_byte() {
    let header = format!("{{{},{}}}  ", entry("x", "F32", "[2]", 0, 8), entry("y", "F16", "[3]", 8, 14));
    let file = file_of(&header, &[0; 14]);
    let folder = folder();
    assert!(open_bytes(&folder, &file).is_ok());
    for size in 0..file.len() {
        let (kind, text) = refusal_in(&folder, "model.safetensors", &file[..size]);
        assert_eq!(kind, ErrorKind::Malformed, "{text}");
    }
}

#[test]
fn impossible_shapes_are_refused() {
    for shape in ["[0,18446744073709551615]", "[4294967296,4294967296,2]", "[18446744073709551615,0]"] {
        let header = format!("{{{}}}", entry("x", "F32", shape, 0, 0));
        assert_header_refused(&header, &[], ErrorKind::Malformed, &["tensor \"x\"", "more elements"]);
    }
    let header = format!("{{{}}}", entry("x", "F32", "[18446744073709551616]", 0, 0));
    assert_header_refused(&header, &[], ErrorKind::Malformed, &["not of the form"]);
    for rank in [9, 70_000] {
        let shape = format!("[{}]", vec!["1"; rank].join(","));
        let header = format!("{{{}}}", entry("x", "F32", &shape, 0, 4));
        assert_header_refused(&header, &[0; 4], ErrorKind::Limit, &["dimensions", "8"]);
    }
    let header = format!("{{{}}}", entry("x", "F4", "[3]", 0, 1));
    assert_header_refused(&header, &[0], ErrorKind::Malformed, &["whole bytes"]);
}

#[test]
fn hostile_names_are_refused_or_escaped() {
    for name in ["a\\u0000b", "a\\nb", "\\u001b[31m", "\\u0085", "\\u007f"] {
        let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        assert_header_refused(&header, &[0; 4], ErrorKind::Malformed, &["control character"]);
    }
    for length in [1025, 1 << 20] {
        let header = format!("{{{}}}", entry(&"n".repeat(length), "F32", "[1]", 0, 4));
        assert_header_refused(&header, &[0; 4], ErrorKind::Limit, &["tensor name", "1024"]);
    }
    for name in ["../../etc/x", "/a/b", "", "é", &"n".repeat(1024)] {
        let header = format!("{{{}}}", entry(name, "F32", "[1]", 0, 4));
        let checkpoint = open_bytes(&folder(), &file_of(&header, &[0; 4])).unwrap();
        assert_eq!(checkpoint.names(), [name]);
    }
    let header = format!(r#"{{"x":{{"dtype":"F32","{}":0}}}}"#, "k".repeat(5000));
    assert!(refusal(&file_of(&header, &[])).1.len() < 1000);
}

#[cfg(unix)]
#[test]
fn control_characters_in_paths_are_escaped() {
    let folder = folder();
    let path = folder.path().join("red\u{1b}[31m\n.safetensors");
    fs::write(&path, b"").unwrap();
    let (_, text) = described(Checkpoint::open(&path, None), "red\\u{1b}[31m\\n.safetensors");
    assert!(text.contains("has 0 bytes"), "{text}");
}

#[test]
fn header_starts_with_a_brace_and_ends_with_spaces() {
    let tensor = entry("x", "F32", "[1]", 0, 4);
    assert_header_refused(&format!(" {{{tensor}}}"), &[0; 4], ErrorKind::Malformed, &["must start with '{'"]);
    for padding in ["\n", "\t", "\0", " \n", "\n "] {
        let header = format!("{{{tensor}}}{padding}");
        assert_header_refused(&header, &[0; 4], ErrorKind::Malformed, &["nothing but spaces"]);
    }
    assert_header_refused(&format!("{{{tensor}}}{{}}"), &[0; 4], ErrorKind::Malformed, &["not valid JSON"]);
    assert!(open_bytes(&folder(), &file_of(&format!("{{{tensor}}}       "), &[0; 4])).is_ok());
}

#[test]
fn other_files_are_named_by_content() {
    let tar = [b"moa/config.json".as_slice(), &[0; 242], b"ustar\x0000", &[0; 247]].concat();
    let cut = [b"a".as_slice(), &"\u{e9}".repeat(300).into_bytes()].concat();
    let cases: [(&[u8], &str); 15] = [
        (&tar, "a tar archive"),
        (b"a text of words,\n\tin lines", "a text"),
        (b"12345678{and a brace", "a text"),
        (&cut, "a text"),
        (b"PK\x03\x04\x14\0\0\0\0\0 weights.npy and as many bytes as an archive has", "a zip archive"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a Python pickle"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", "a Python pickle"),
        (b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0", "a GGUF model"),
        (b"\x08\x0a\x12\x07pytorch\x1a\x052.1.0", "an ONNX model"),
        (b"\x89HDF\r\n\x1a\n\0\0\0\0", "an HDF5 file"),
        (b"\x93NUMPY\x01\0v\0{'descr'", "a NumPy array"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"{\"weight_map\": {}}", "a JSON text"),
        (b"\x18\0\0\0TFL3\0\0\0\0", "a TensorFlow Lite model"),
    ];
    for (bytes, kind) in cases {
        assert_refused(bytes, ErrorKind::Unsupported, &[kind, "not supported", ".safetensors"]);
    }
}

#[test]
fn unknown_element_type_is_unsupported() {
    let header = format!("{{{}}}", entry("x", "F128", "[1]", 0, 16));
    assert_header_refused(&header, &[0; 16], ErrorKind::Unsupported, &["tensor \"x\"", "\"F128\"", "BF16", "I64"]);
}
