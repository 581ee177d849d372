//! `unsafe` stands where SECURITY.md says, and nowhere else.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use super::{paths::names_word, size::rust_sources};

const DOCUMENT: &str = "SECURITY.md";

/// The heading of the list; each of its items begins with a path.
const HEADING: &str = "## Where `unsafe` is";

/// Keywords and lints that a file with `unsafe` code has.
const WORDS: [&str; 2] = ["unsafe", "unsafe_code"];

/// Every file that the list lacks, and every path in it without `unsafe` code.
pub(super) fn check(root: &Path) -> io::Result<Vec<String>> {
    let listed = listed(&fs::read_to_string(root.join(DOCUMENT))?);
    let mut unused: Vec<_> = listed.iter().collect();
    let mut found = Vec::new();
    for (file, source) in rust_sources(root)? {
        if !names_word(&source, &WORDS) {
            continue;
        }
        if !listed.iter().any(|path| covers(path, &file)) {
            found.push(format!("{}: has `unsafe` code, and {DOCUMENT} does not list it", file.display()));
        }
        unused.retain(|path| !covers(path, &file));
    }
    found.extend(unused.iter().map(|path| format!("{DOCUMENT}: no `unsafe` code is in {}", path.display())));
    Ok(found)
}

/// The paths of the list in `document`.
fn listed(document: &str) -> Vec<PathBuf> {
    let section = document.lines().skip_while(|line| *line != HEADING).skip(1);
    let items = section.take_while(|line| !line.starts_with('#')).filter_map(|line| line.strip_prefix("* `"));
    items.filter_map(|item| item.split_once('`')).map(|(path, _)| PathBuf::from(path)).collect()
}

/// Whether `file` belongs to what `path` names: a folder, or a file with the folder of its modules.
fn covers(path: &Path, file: &Path) -> bool {
    file.starts_with(path) || path.extension() == Some(OsStr::new("rs")) && file.starts_with(path.with_extension(""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    const LIST: &str = "# Security\n* `src/c.rs` is elsewhere\n\n## Where `unsafe` is\n\nSomewhere:\n\n\
                        * `src/a.rs`: one file, `src/c.rs`\n* `src/b`: a folder\n\n## Next\n* `src/d.rs`: another list\n";

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        check(planted(&[&[("SECURITY.md", LIST)], files].concat()).path()).unwrap()
    }

    #[test]
    fn a_path_stands_for_its_modules() {
        let files = [
            ("src/a.rs", "#![allow(unsafe_code)]"),
            ("src/a/tests.rs", "fn f() { unsafe { g() } }"),
            ("src/b/mod.rs", "#[allow(unsafe_code)]\nmod c;"),
            ("src/b/c.rs", "pub(super) unsafe fn f() {}"),
            ("src/e.rs", "// unsafe\nconst TEXT: &str = \"unsafe_code\";"),
            ("target/f.rs", "unsafe {}"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn what_is_not_listed_is_found() {
        let files = [("src/a.rs", "unsafe {}"), ("src/b/c.rs", "unsafe {}"), ("src/ab.rs", "unsafe {}")];
        let missing = |path| format!("{path}: has `unsafe` code, and SECURITY.md does not list it");
        assert_eq!(found(&files), [missing("src/ab.rs")]);
        for path in ["src/c.rs", "src/d.rs"] {
            let files = [files[0], files[1], (path, "#![allow(unsafe_code, dead_code)]")];
            assert_eq!(found(&files), [missing(path)]);
        }
    }

    #[test]
    fn what_is_listed_in_vain_is_found() {
        let files = [("src/a.rs", "unsafe {}"), ("src/b.rs", "fn f() {}")];
        assert_eq!(found(&files), ["SECURITY.md: no `unsafe` code is in src/b"]);
    }
}
