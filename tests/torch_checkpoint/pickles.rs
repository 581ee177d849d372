//! The pickle: its opcodes, its limits, what it may name.

use moa_export::checkpoint::ErrorKind;
use moa_graphs::TensorDirectory;

use super::{
    assert_refused, f32s, file_of, keys, open_bytes, opened, root,
    writer::{Py, dict, global, ordered_dict, text, whole},
    zip,
};

fn raw(bytes: &[u8]) -> Vec<u8> {
    zip(&[b"\x80\x02", bytes].concat(), &[])
}

#[track_caller]
fn assert_malformed(pickle: &[u8], parts: &[&str]) {
    assert_refused(&raw(pickle), ErrorKind::Malformed, parts);
}

/// A file whose optimizer state is `value`.
fn beside(value: Py) -> Vec<u8> {
    let Py::Dict(mut entries) = root(dict([("x", whole("FloatStorage", "0", 1))]), keys()) else { panic!() };
    entries.push((text("last_optimizer_state"), value));
    zip(&Py::Dict(entries).pickle(), &[("0", &f32s(&[1.0]))])
}

fn system() -> Py {
    Py::Call(Box::new(global("os", "system")), vec![text("exit 1")])
}

#[test]
fn globals_in_the_model_are_refused_by_name() {
    let places: [(Py, &str); 6] = [
        (dict([("x", system())]), "refused global os.system in tensor \"x\""),
        (dict([("x", global("builtins", "eval"))]), "refused global builtins.eval in tensor \"x\""),
        (system(), "refused global os.system in \"model\""),
        (Py::Built(Box::new(global("a", "B")), Box::new(Py::None)), "refused global a.B in \"model\""),
        (
            dict([("x", Py::List(vec![Py::Tuple(vec![Py::Persistent(Box::new(system()))])]))]),
            "refused global os.system",
        ),
        (Py::Filled(Box::new(global("my", "Dict")), Vec::new()), "refused global my.Dict"),
    ];
    for (model, part) in places {
        assert_refused(&zip(&root(model, keys()).pickle(), &[]), ErrorKind::Malformed, &[part]);
    }
    let hidden = Py::Dict(vec![(system(), Py::None)]);
    assert_refused(&zip(&root(hidden, keys()).pickle(), &[]), ErrorKind::Malformed, &["os.system"]);
}

#[test]
fn attributes_of_the_model_are_looked_at() {
    let state = |value| {
        let model = Py::Raw([ordered(&[]), pickled(&dict([("_metadata", value)])), b"b".to_vec()].concat());
        zip(&root(model, keys()).pickle(), &[])
    };
    assert!(opened(&state(ordered_dict(Vec::new()))).0.names().is_empty());
    assert_refused(&state(system()), ErrorKind::Malformed, &["refused global os.system in \"model\""]);
}

fn pickled(value: &Py) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.write(&mut bytes);
    bytes
}

fn ordered(entries: &[(Py, Py)]) -> Vec<u8> {
    pickled(&ordered_dict(entries.to_vec()))
}

#[test]
fn globals_elsewhere_are_inert() {
    for value in [system(), global("os", "system"), Py::Built(Box::new(global("a", "B")), Box::new(system()))] {
        let (checkpoint, _folder) = opened(&beside(value));
        assert_eq!(checkpoint.tensor("x").unwrap().to_f32().unwrap(), [1.0]);
    }
    let (checkpoint, _folder) = opened(&beside(whole("FloatStorage", "7", 1 << 40)));
    assert_eq!(checkpoint.names(), ["x"]);
}

#[test]
fn names_of_globals_are_escaped_and_cut() {
    let model = |module: &str, name: &str| zip(&root(dict([("x", global(module, name))]), keys()).pickle(), &[]);
    assert_refused(&model("a\u{1b}[31m", "b\r"), ErrorKind::Malformed, &["a\\u{1b}[31m.b\\r"]);
    assert_refused(&model(&"m".repeat(1000), "n"), ErrorKind::Malformed, &["mmm…"]);
    assert_refused(&model(&"m".repeat(2000), "n"), ErrorKind::Malformed, &["the name of a global"]);
}

#[test]
fn protocols_two_to_five_are_read() {
    let model = b"}X\x05\0\0\0model}sX\x03\0\0\0cfg}X\x05\0\0\0model}X\x04\0\0\0archX\x0f\0\0\0moa_transformersss.";
    for protocol in 2..=5 {
        assert!(opened(&zip(&[&[0x80, protocol], model.as_slice()].concat(), &[])).0.names().is_empty());
    }
    for protocol in [0, 1, 6, 255] {
        let bytes = zip(&[&[0x80, protocol], model.as_slice()].concat(), &[]);
        assert_refused(&bytes, ErrorKind::Unsupported, &[&format!("protocol {protocol}")]);
    }
    assert_refused(&zip(model, &[]), ErrorKind::Unsupported, &["protocol 0 or 1"]);
    assert_refused(&zip(b"", &[]), ErrorKind::Unsupported, &["protocol 0 or 1"]);
}

#[test]
fn opcodes_of_protocol_four_are_read() {
    let mut pickle = b"\x80\x04\x95\x05\0\0\0\0\0\0\0}\x94(\x8c\x05model\x94\x8c\x0bcollections\x94".to_vec();
    pickle.extend(b"\x8c\x0bOrderedDict\x94\x93\x94)R\x94");
    pickle.extend(b"\x8c\x03cfg}h\x01}\x8c\x04arch\x8d\x0f\0\0\0\0\0\0\0moa_transformerss");
    pickle.extend(b"\x8c\x05other(\x8f(NK\x01\x90(\x88\x91C\x02ab\x8e\x01\0\0\0\0\0\0\0aB\x01\0\0\0a");
    pickle.extend(b"h\x04)}\x92U\x01aT\x01\0\0\0bM\x01\x02J\xff\xff\xff\xff\x8b\x02\0\0\0\0\x80\x8a\x00lu.");
    let malformed = pickle.clone();
    let place = pickle.iter().rposition(|byte| *byte == b'l').unwrap();
    pickle[place] = b't';
    let (checkpoint, _folder) = opened(&zip(&pickle, &[]));
    assert_eq!(checkpoint.config().model_type(), "moa_transformer");
    assert_refused(&zip(&malformed, &[]), ErrorKind::Unsupported, &["pickle opcode LIST at byte"]);
}

#[test]
fn unknown_opcodes_are_refused() {
    for (code, name) in [(b'i', "INST"), (b'o', "OBJ"), (b'P', "PERSID"), (0x82, "EXT1"), (0x96, "BYTEARRAY8")] {
        let parts = [&format!("the pickle opcode {name} at byte 2")[..], "not supported"];
        assert_refused(&raw(&[code]), ErrorKind::Unsupported, &parts);
    }
    assert_malformed(&[0xff], &["at byte 2", "0xff is no opcode"]);
    assert_malformed(&[0], &["0x00 is no opcode"]);
}

#[test]
fn broken_pickles_name_byte_and_opcode() {
    let cases: [(&[u8], &str); 24] = [
        (b"", "at byte 2: it needs 1 bytes, where 0 are left"),
        (b".", "at byte 2 (STOP): it must leave one value"),
        (b"NN.", "it must leave one value"),
        (b"(.", "it must leave one value"),
        (b"N.N", "1 bytes follow its end"),
        (b"N\x80\x02.", "(PROTO): the protocol is repeated"),
        (b"0", "(POP): there is no value on the stack"),
        (b"N(a.", "(APPEND): there is no value on the stack"),
        (b"t", "(TUPLE): there is no mark"),
        (b"1", "(POP_MARK): there is no mark"),
        (b"N\x86", "(TUPLE2): there is no value on the stack"),
        (b"N(\x85", "(TUPLE1): there is no value on the stack"),
        (b"NNa", "(APPEND): there is no object"),
        (b")Na", "(APPEND): there is nothing to append to"),
        (b"](N\x90", "(ADDITEMS): there is nothing to append to"),
        (b"]NNs", "(SETITEM): there is no dictionary"),
        (b"}(Nu", "(SETITEMS): a key without a value"),
        (b"}}b", "(BUILD): there is no object that takes a state"),
        (b"h\x05", "(BINGET): nothing was memorised as 5"),
        (b"q\x00", "(BINPUT): there is no value on the stack"),
        (b"NN\x93", "(STACK_GLOBAL): the names of a global are no texts"),
        (b"cos", "(GLOBAL): the name of a global"),
        (b"cos\xff\nx\n", "(GLOBAL): the name of a global"),
        (b"\x95\xff\0\0\0\0\0\0\0", "(FRAME): a frame of 255 bytes, where 0 are left"),
    ];
    for (pickle, part) in cases {
        assert_malformed(pickle, &["its pickle is malformed", part]);
    }
}

#[test]
fn lengths_are_checked_before_anything_is_allocated() {
    for length in [11u32, 1 << 31, u32::MAX] {
        for code in [b'X', b'T', b'B', 0x8b] {
            let pickle = [&[code], length.to_le_bytes().as_slice(), b"0123456789"].concat();
            assert_malformed(&pickle, &[&format!("it needs {length} bytes, where 10 are left")]);
        }
    }
    for code in [0x8d, 0x8e] {
        let pickle = [&[code], u64::MAX.to_le_bytes().as_slice(), b"0123456789"].concat();
        assert_malformed(&pickle, &["it needs 18446744073709551615 bytes, where 10 are left"]);
    }
    for code in [b'U', b'C', 0x8c, 0x8a] {
        assert_malformed(&[code, 11, 0, 0, 0], &["it needs 11 bytes, where 3 are left"]);
    }
}

#[test]
fn limits_are_stated() {
    let refused = |pickle: &[u8], what: &str| {
        assert_refused(&raw(pickle), ErrorKind::Limit, &[what]);
    };
    refused(&[b'('; 10_001], "depth of the stack of its pickle exceeds the limit of 10000");
    refused(&[b'N'; 10_001], "depth of the stack of its pickle exceeds the limit of 10000");
    refused(&[b"N".as_slice(), &b"2".repeat(10_001)].concat(), "depth of the stack");
    refused(b"Nr\x40\x42\x0f\x00", "memorised values of its pickle exceeds the limit of 1000000");
    refused(b"Nr\xff\xff\xff\xff", "memorised values");
    refused(&[b"N".as_slice(), &b"20".repeat(4_000_001)].concat(), "values of its pickle exceeds the limit of 4000000");
    refused(&[b"N".as_slice(), &b"\x85".repeat(4_000_001)].concat(), "values of its pickle");
    refused(&[b"X\x01\0\0\x04".as_slice(), &vec![b'a'; 64 << 20]].concat(), "size of its pickle exceeds the limit");
}

/// `levels` pairs, each of the one before twice.
fn bomb(levels: usize, byte: u8) -> Py {
    let mut bytes = vec![byte];
    if byte == b']' {
        bytes.extend(b"Na");
    }
    bytes.extend(b"2\x86".repeat(levels));
    Py::Raw(bytes)
}

#[test]
fn memo_bombs_are_shared() {
    for levels in [64, 100_000] {
        let (checkpoint, _folder) = opened(&beside(bomb(levels, b']')));
        assert_eq!(checkpoint.names(), ["x"]);
        let (checkpoint, _folder) = opened(&zip(&root(dict([]), bombed_keys(levels)).pickle(), &[]));
        assert_eq!(checkpoint.config().model_type(), "moa_transformer");
        let model = dict([("x", bomb(levels, b')'))]);
        let file = zip(&root(model, keys()).pickle(), &[]);
        assert_refused(&file, ErrorKind::Limit, &["values among its tensors"]);
    }
}

fn bombed_keys(levels: usize) -> Py {
    dict([("arch", text("moa_transformer")), ("bomb", bomb(levels, b'N'))])
}

#[test]
fn values_that_hold_themselves_are_harmless() {
    let circle = Py::Raw(b"]q\x00h\x00a".to_vec());
    assert!(opened(&beside(circle.clone())).0.tensor("x").is_some());
    let file = zip(&root(dict([("x", circle)]), keys()).pickle(), &[]);
    assert_refused(&file, ErrorKind::Limit, &["values among its tensors"]);
    let model = Py::Raw(b"}q\x00(X\x01\0\0\0xh\x00u".to_vec());
    assert_refused(&zip(&root(model, keys()).pickle(), &[]), ErrorKind::Limit, &["values among its tensors"]);
}

#[test]
fn texts_need_not_be_utf8_where_nobody_reads_them() {
    let path = Py::Raw(b"X\x02\0\0\0\xed\xa0".to_vec());
    let keys = |key: &str| dict([("arch", text("moa_transformer")), (key, path.clone())]);
    assert!(opened(&zip(&root(dict([]), keys("data")).pickle(), &[])).0.names().is_empty());
    let file = zip(&root(Py::Dict(vec![(path.clone(), Py::None)]), keys("data")).pickle(), &[]);
    assert_refused(&file, ErrorKind::Malformed, &["a key that is bytes"]);
}

#[test]
fn roots_without_a_model_are_unsupported() {
    for (pickle, found) in [(Py::None, "None"), (Py::List(vec![]), "a list"), (dict([]), "a dictionary")] {
        let part = format!("neither a checkpoint of fairseq nor a dictionary of tensors ({found})");
        assert_refused(&zip(&pickle.pickle(), &[]), ErrorKind::Unsupported, &[&part]);
    }
    let file = zip(&root(Py::Int(5), keys()).pickle(), &[]);
    assert_refused(&file, ErrorKind::Malformed, &["\"model\" must be a dictionary, found an integer"]);
}

#[test]
fn tensors_that_lie_deeper_are_not_looked_for() {
    let weight = || whole("FloatStorage", "0", 1);
    let error = |root: Py| open_bytes(&tempfile::tempdir().unwrap(), &zip(&root.pickle(), &[])).unwrap_err();
    for root in [Py::List(vec![weight()]), weight(), dict([("epoch", Py::Int(3))])] {
        let error = error(root);
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.help().unwrap().contains("state_dict() alone"));
    }
    // A path with backslashes is in no command.
    let command = match cfg!(windows) {
        true => "load it in Python and save it with torch.save",
        false => "weights_only=False)[\"state_dict\"], sys.argv[2])' ",
    };
    for (key, help) in [
        ("state_dict", "save its \"state_dict\" alone, beside the model's config.json, where you trust the file, "),
        ("state_dict", command),
        ("it's", "save the dictionary of tensors in it alone, beside the model's config.json"),
    ] {
        let error = error(dict([("epoch", Py::Int(3)), (key, dict([("weight", weight())]))]));
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(&format!("(a dictionary of \"epoch\", \"{key}\")")), "{error}");
        assert!(error.help().unwrap().contains(help), "{error}");
    }
}

#[test]
fn repeated_keys_are_refused() {
    let tensor = || whole("FloatStorage", "0", 1);
    let file = file_of([("x", tensor()), ("x", tensor())], &[("0", &[0; 4])]);
    assert_refused(&file, ErrorKind::Malformed, &["tensor \"x\" is repeated"]);
    let twice = dict([("model", dict([])), ("model", dict([]))]);
    assert_refused(&zip(&twice.pickle(), &[]), ErrorKind::Malformed, &["repeats the key \"model\""]);
    let keys = dict([("arch", text("a")), ("arch", text("moa_transformer"))]);
    let file = zip(&root(dict([]), keys).pickle(), &[]);
    assert_refused(&file, ErrorKind::Malformed, &["repeats the key \"arch\""]);
}
