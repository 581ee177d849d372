//! The zip archive: its directory, its headers, its layout.

use std::{collections::BTreeSet, fs, ops::ControlFlow, path::Path, process::Command};

use moa_export::checkpoint::{Checkpoint, CheckpointError, ErrorKind};
use moa_graphs::{TensorDirectory, WeightError};

use super::{
    NAME, assert_refused,
    data::data,
    f32s, file_of, keys, members, open_bytes, opened, refusal, root,
    tensors::single,
    writer::{Member, TRAILING, Zip, dict, whole},
};

fn pickle() -> Vec<u8> {
    root(dict([("x", whole("FloatStorage", "0", 2))]), keys()).pickle()
}

/// The archive of one tensor "x" of two elements.
fn archive() -> Zip {
    Zip { members: members(&pickle(), &[("0", &f32s(&[1.0, 2.0]))]), ..Zip::default() }
}

/// The archive after a change of the entry of the storage.
fn changed(change: impl FnOnce(&mut Member)) -> Vec<u8> {
    let mut zip = archive();
    change(&mut zip.members[3]);
    zip.bytes()
}

#[track_caller]
fn assert_malformed(bytes: &[u8], parts: &[&str]) {
    assert_refused(bytes, ErrorKind::Malformed, parts);
}

#[test]
fn every_way_to_write_sizes_is_read() {
    for (long, trailing) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut zip = archive();
        zip.long = long;
        for member in &mut zip.members {
            member.flags = if trailing { TRAILING } else { 0 };
        }
        let (checkpoint, _folder) = opened(&zip.bytes());
        assert_eq!(checkpoint.tensor("x").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    }
}

#[test]
fn records_may_be_missing_and_come_in_any_order() {
    let mut zip = archive();
    zip.members.remove(4);
    zip.members.remove(2);
    zip.members.reverse();
    let (checkpoint, _folder) = opened(&zip.bytes());
    assert_eq!(checkpoint.names(), ["x"]);
}

#[test]
fn truncation_is_refused_at_every_64_bytes() {
    for file in ["v_ffd_moe", "v_postnorm"] {
        let bytes = fs::read(data(format!("variants/{file}/checkpoint.pt"))).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        fs::write(&path, &bytes).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        for size in (0..bytes.len()).step_by(64).chain([1, bytes.len() - 1]).collect::<BTreeSet<_>>().into_iter().rev()
        {
            file.set_len(size as u64).unwrap();
            let error = Checkpoint::open(&path, None).expect_err("cut");
            assert_eq!(error.kind(), ErrorKind::Malformed, "{size}: {error}");
        }
    }
    let bytes = archive().bytes();
    for size in 4..bytes.len() {
        let (kind, text) = refusal(&bytes[..size]);
        assert_eq!(kind, ErrorKind::Malformed, "{size}: {text}");
    }
}

#[test]
fn what_follows_the_archive_is_refused() {
    for long in [false, true] {
        let archive = || Zip { long, ..archive() };
        let sound = archive().bytes();
        for rest in [b"\0".to_vec(), b"<html>".to_vec(), vec![b'P'; 70_000], b"PK\x05\x06".repeat(30)] {
            let end = format!("ends at byte {}, and {} more bytes follow", sound.len(), rest.len());
            assert_malformed(&[sound.clone(), rest].concat(), &[&end]);
        }
        let bytes = Zip { comment: b"hello".to_vec(), ..archive() }.bytes();
        assert_malformed(&bytes, &["has a comment of 5 bytes"]);
        let bytes = Zip { comment: archive().bytes(), ..archive() }.bytes();
        assert_malformed(&bytes, &["has a comment of", "as torch.save writes none"]);
        let end = format!("ends at byte {0}, and {0} more bytes follow", sound.len());
        assert_malformed(&sound.repeat(2), &[&end]);
        let bytes = [Zip { comment: b"hello".to_vec(), ..archive() }.bytes(), vec![0; 9]].concat();
        assert_malformed(&bytes, &["has a comment of 5 bytes", "9 more bytes follow it"]);
        let help = open_bytes(&tempfile::tempdir().unwrap(), &bytes).unwrap_err().help().unwrap();
        assert!(!help.contains("truncate"), "{help}");
    }
}

/// An archive that ends too far before its file is not found.
#[test]
fn long_files_without_an_end_are_not_called_cut_short() {
    let sound = archive().bytes();
    let (_, text) = refusal(&[sound.clone(), vec![0; 1 << 20]].concat());
    assert!(text.contains("does not end with the directory of a zip archive"), "{text}");
    assert!(!text.contains("cut short"), "{text}");
    assert_malformed(&sound[..sound.len() - 1], &["does not end with the directory of a zip archive: it is cut short"]);
    let near = [sound.clone(), vec![0; (1 << 20) - 22]].concat();
    assert_malformed(&near, &[&format!("ends at byte {}", sound.len())]);
}

/// The command behind the colon of a help, run by a shell in a folder.
fn run_help(help: &str, folder: &Path) {
    let command = help.split_once(": ").unwrap().1;
    let status = Command::new("sh").args(["-c", command]).current_dir(folder).status().unwrap();
    assert!(status.success(), "{command}");
}

#[cfg(unix)]
#[test]
fn what_follows_the_archive_is_cut_off_by_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a file.pt");
    fs::write(&path, [archive().bytes(), vec![0; 9]].concat()).unwrap();
    let help = Checkpoint::open(&path, None).unwrap_err().help().unwrap();
    run_help(&help, folder.path());
    assert_eq!(Checkpoint::open(&path, None).unwrap().names(), ["x"]);
    fs::remove_file(&path).unwrap();
    run_help(&help, folder.path());
    assert!(!path.exists(), "a file was made");
    let dash = folder.path().join("-o.pt");
    fs::write(&dash, archive().bytes()).unwrap();
    let (file, end, count) = ("-o.pt".into(), 7, 1);
    run_help(&CheckpointError::Behind { file, end, count }.help().unwrap(), folder.path());
    assert_eq!(fs::metadata(&dash).unwrap().len(), 7);
}

/// Messages escape such names, so that a command would name another file.
#[cfg(unix)]
#[test]
fn names_that_are_shown_otherwise_are_in_no_command() {
    let folder = tempfile::tempdir().unwrap();
    let legacy = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.".to_vec();
    for name in ["gro\u{308}ße.pt", "a\nb.pt", "\u{202e}.pt", "a\\u{e}.pt"] {
        let path = folder.path().join(name);
        for bytes in [[archive().bytes(), vec![0; 9]].concat(), legacy.clone()] {
            fs::write(&path, bytes).unwrap();
            let help = Checkpoint::open(&path, None).unwrap_err().help().unwrap();
            assert!(help.contains("no command is given"), "{help}");
            assert!(!help.contains("truncate") && !help.contains("python3"), "{help}");
        }
    }
    let path = folder.path().join("größe.pt");
    fs::write(&path, [archive().bytes(), vec![0; 9]].concat()).unwrap();
    assert!(Checkpoint::open(&path, None).unwrap_err().help().unwrap().ends_with("größe.pt"));
}

#[test]
fn compressed_and_encrypted_entries_are_refused() {
    assert_malformed(&changed(|member| member.method = 8), &["\"checkpoint/data/0\"", "is compressed"]);
    for flag in [1u16, 1 << 6, 1 << 13] {
        assert_malformed(&changed(|member| member.flags |= flag), &["\"checkpoint/data/0\"", "is encrypted"]);
    }
    assert_malformed(&changed(|member| member.bytes = Some(9)), &["is stored as 8 bytes, but has 9 bytes"]);
}

/// A part of an element too many is as many bytes too many.
#[test]
fn storages_have_as_many_bytes_as_their_elements() {
    for count in [0, 7, 9, 11, 12] {
        let file = changed(|member| member.data = vec![0; count]);
        assert_malformed(&file, &["\"checkpoint/data/0\" must have 8 bytes", &format!("found {count}")]);
    }
}

#[test]
fn repeated_names_are_refused() {
    let mut zip = archive();
    zip.members[3].name = "checkpoint/data.pkl".into();
    assert_malformed(&zip.bytes(), &["\"checkpoint/data.pkl\" is repeated"]);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in ["../x", "checkpoint/../../x", "/etc/x", "checkpoint\\x", "checkpoint/\u{1b}[31m", "..", ""] {
        assert_malformed(&changed(|member| member.name = name.into()), &["is not a plain path"]);
    }
    let long = "n".repeat(1025);
    assert_refused(&changed(|member| member.name = long), ErrorKind::Limit, &["name of a zip entry", "1024"]);
}

#[test]
fn headers_must_agree() {
    let other = "is described otherwise in its own header";
    assert_malformed(&changed(|member| member.local_name = Some("checkpoint/data/1".into())), &[other]);
    for flags in [0, TRAILING] {
        let part = if flags == 0 { other } else { "leaves a hole" };
        let crc = |member: &mut Member| (member.flags, member.local_crc) = (flags, Some(5));
        assert_malformed(&changed(crc), &["\"checkpoint/data/0\"", part]);
        let size = |member: &mut Member| (member.flags, member.local_bytes) = (flags, Some(4));
        assert_malformed(&changed(size), &["\"checkpoint/data/0\"", part]);
    }
}

#[test]
fn every_byte_belongs_to_one_entry() {
    assert_malformed(&changed(|member| member.gap = vec![0; 3]), &["leaves a hole of 19 bytes behind it"]);
    assert_malformed(&changed(|member| member.gap = vec![0; 70_000]), &["leaves a hole"]);
    assert_malformed(&changed(|member| member.header = Some(0)), &["overlaps"]);
    assert_malformed(&changed(|member| member.header = Some(10)), &["\"checkpoint/data.pkl\""]);
    assert_malformed(&changed(|member| member.header = Some(0xffff_fff0)), &["zip"]);
    let mut zip = archive();
    for member in &mut zip.members {
        member.header = Some(0);
    }
    assert_malformed(&zip.bytes(), &["overlaps"]);
    let mut first = archive();
    first.members[0].header = Some(64);
    assert_malformed(&first.bytes(), &["hole at byte 0"]);
}

#[test]
fn the_number_of_entries_is_bounded() {
    for count in [4, 6] {
        assert_malformed(&Zip { count: Some(count), ..archive() }.bytes(), &["zip directory"]);
    }
    let many = Zip { count: Some(65_537), long: true, ..archive() };
    assert_refused(&many.bytes(), ErrorKind::Limit, &["zip entries", "65536"]);
    let none = [b"PK\x05\x06".as_slice(), &[0; 18]].concat();
    assert_malformed(&none, &[]);
}

#[test]
fn wrong_checksum_is_refused() {
    let mut zip = archive();
    zip.members[0].crc = Some(1);
    assert_malformed(&zip.bytes(), &["\"checkpoint/data.pkl\" has another checksum"]);
    let (checkpoint, _folder) = opened(&changed(|member| member.crc = Some(1)));
    let weight = checkpoint.tensor("x").unwrap();
    for error in [weight.to_f32().unwrap_err(), weight.read_bytes(&mut |_| ControlFlow::Continue(())).unwrap_err()] {
        assert!(error.to_string().contains("\"checkpoint/data/0\" has another checksum"), "{error}");
        assert_eq!(ErrorKind::from(&error), ErrorKind::Malformed);
    }
}

#[test]
fn checksum_is_verified_where_a_tensor_is_a_part() {
    let mut file = archive();
    file.members[0].data = root(dict([("x", single(1, &[1], &[1], 2))]), keys()).pickle();
    let (checkpoint, _folder) = opened(&file.bytes());
    let weight = checkpoint.tensor("x").unwrap();
    assert_eq!((weight.to_f32().unwrap(), weight.to_f64().unwrap()), (vec![2.0], vec![2.0]));
    file.members[3].crc = Some(1);
    let (checkpoint, _folder) = opened(&file.bytes());
    let error = checkpoint.tensor("x").unwrap().to_f32().unwrap_err();
    assert!(matches!(error, WeightError::Damaged { .. }), "{error}");
}

#[test]
fn byte_order_must_be_little() {
    let order = |order: &[u8]| {
        let mut zip = archive();
        zip.members[2].data = order.into();
        zip.bytes()
    };
    assert_refused(&order(b"big"), ErrorKind::Unsupported, &["big-endian"]);
    assert_malformed(&order(b"middle"), &["\"checkpoint/byteorder\" is neither"]);
    assert_refused(&order(&[0; 65]), ErrorKind::Limit, &["byte order"]);
}

#[cfg(unix)]
#[test]
fn other_archives_are_named() {
    let other = Zip { members: vec![Member::new("word/document.xml", b"<>")], ..Zip::default() }.bytes();
    assert_refused(&other, ErrorKind::Unsupported, &["a zip archive is not supported", "a zip file of torch.save"]);
    let mut compressed = Member::new("weights.npy", b"x");
    compressed.method = 8;
    let other = Zip { members: vec![compressed], ..Zip::default() }.bytes();
    assert_refused(&other, ErrorKind::Unsupported, &["a zip archive is not supported"]);
    let mut program = archive();
    program.members.push(Member::new("checkpoint/constants.pkl", b"x"));
    assert_refused(&program.bytes(), ErrorKind::Unsupported, &["a TorchScript archive"]);
    // As torch.jit.save writes it.
    let mut code = Member::new("checkpoint/code/__torch__.py", b"x");
    code.method = 8;
    program.members.push(code);
    assert_refused(&program.bytes(), ErrorKind::Unsupported, &["a TorchScript archive is not supported"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scripted.pt");
    fs::write(&path, program.bytes()).unwrap();
    let help = Checkpoint::open(&path, None).unwrap_err().help().unwrap();
    assert!(help.starts_with("save its state_dict(), where you trust the file"), "{help}");
    assert!(help.contains("torch.jit.load(sys.argv[1], map_location=\"cpu\").state_dict()"), "{help}");
}

#[cfg(unix)]
#[test]
fn old_formats_are_named_with_the_way_out() {
    let legacy = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    assert_refused(legacy, ErrorKind::Unsupported, &["the old format", "no zip archive", "not supported"]);
    assert_refused(b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", ErrorKind::Unsupported, &["a Python pickle is not supported"]);
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, loaded) in [
        ("it's old.pt", legacy.as_slice(), r#"torch.load(sys.argv[1], map_location="cpu", weights_only=False)"#),
        ("plain.pt", b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", r#"pickle.load(open(sys.argv[1], "rb"))"#),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let help = Checkpoint::open(&path, None).unwrap_err().help().unwrap();
        assert!(help.contains(&format!("torch.save({loaded}, sys.argv[2])")), "{help}");
        let words = "printf '%s\\n' ".to_owned() + help.split_once("python3 ").unwrap().1;
        let said = Command::new("sh").args(["-c", &words]).output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let [_, _, old, new] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
        assert_eq!((old, new), (path.to_str().unwrap(), format!("{}.new.pt", path.display()).as_str()));
    }
}

#[test]
fn a_changed_file_is_not_read() {
    let (checkpoint, folder) = opened(&archive().bytes());
    fs::write(folder.path().join(NAME), file_of([], &[])).unwrap();
    let error = checkpoint.tensor("x").unwrap().to_f32().unwrap_err();
    assert!(error.to_string().contains("changed"), "{error}");
}
