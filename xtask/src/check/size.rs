//! Files stay short enough to read, and the repository small enough to clone.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Lines of one source file, its unit tests not counted.
const MAX_LINES: usize = 500;

/// Bytes of all data together.
const MAX_BYTES: u64 = 15_000_000;

/// Endings of files that people write; every other file is data.
const WRITTEN: [&str; 10] = ["rs", "py", "md", "toml", "cu", "cuh", "h", "hpp", "cpp", "sh"];

/// Every broken limit.
pub(super) fn check(root: &Path) -> io::Result<Vec<String>> {
    let files = files(root)?;
    let mut found = Vec::new();
    let mut data = 0;
    for file in &files {
        let path = root.join(file);
        let Ok(bytes) = fs::symlink_metadata(&path).map(|metadata| metadata.len()) else { continue };
        let ending = file.extension().and_then(OsStr::to_str);
        if !ending.is_some_and(|ending| WRITTEN.contains(&ending)) {
            data += bytes;
        }
        if matches!(ending, Some("rs" | "py" | "cu" | "cuh" | "h" | "cpp")) {
            let lines = lines_without_tests(&fs::read_to_string(&path)?);
            if lines > MAX_LINES {
                found.push(format!("{}: {lines} lines, and {MAX_LINES} are allowed", file.display()));
            }
        }
    }
    println!("data: {data} of {MAX_BYTES} bytes");
    if data > MAX_BYTES {
        found.push(format!("data: {data} bytes, and {MAX_BYTES} are allowed"));
    }
    Ok(found)
}

/// Files of the repository, from `root`.
pub(super) fn files(root: &Path) -> io::Result<Vec<PathBuf>> {
    tracked(root).map_or_else(|| walk(root, root), Ok)
}

/// Files that git tracks or would, if this is a clone.
fn tracked(root: &Path) -> Option<Vec<PathBuf>> {
    if !root.join(".git").exists() {
        return None;
    }
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(list).current_dir(root).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())?;
    Some(text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

/// Files under `folder`, from `root`; build folders and hidden ones are left out.
fn walk(root: &Path, folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "target" || name == "__pycache__" || name.starts_with('.') {
            continue;
        }
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            files.extend(walk(root, &path)?);
        } else {
            files.push(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
        }
    }
    files.sort();
    Ok(files)
}

/// Lines of `source` outside `#[cfg(test)] mod … { … }`, as rustfmt lays it out.
fn lines_without_tests(source: &str) -> usize {
    let lines: Vec<_> = source.lines().collect();
    let mut count = 0;
    let mut index = 0;
    while index < lines.len() {
        let opens = |line: &str| line.trim_start().starts_with("mod ") && line.ends_with('{');
        if lines[index].trim() == "#[cfg(test)]" && lines.get(index + 1).is_some_and(|line| opens(line)) {
            let indent = lines[index].len() - lines[index].trim_start().len();
            let end = format!("{}}}", &lines[index][..indent]);
            let inside = lines[index..].iter().position(|line| *line == end);
            index = inside.map_or(lines.len(), |inside| index + inside + 1);
        } else {
            count += 1;
            index += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    fn code(lines: usize) -> String {
        "let x = 1;\n".repeat(lines)
    }

    #[test]
    fn a_long_file_is_found() {
        let (short, long) = (code(500), code(501));
        let tree = planted(&[("src/a.rs", &short), ("src/b.rs", &long), ("tests/c.py", &long), ("target/d.rs", &long)]);
        assert_eq!(
            check(tree.path()).unwrap(),
            ["src/b.rs: 501 lines, and 500 are allowed", "tests/c.py: 501 lines, and 500 are allowed"]
        );
    }

    #[test]
    fn unit_tests_do_not_count() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}    fn f() {{\n    }}\n}}\n", code(700));
        assert_eq!(lines_without_tests(&format!("{}{tests}{}", code(3), code(2))), 5);
        assert_eq!(lines_without_tests(&format!("#[cfg(test)]\nmod tests;\n{}", code(3))), 5);
        assert_eq!(lines_without_tests(""), 0);
    }

    #[test]
    fn too_much_data_is_found() {
        let tree = planted(&[("tests/data/a.bin", ""), ("src/a.rs", "let x = 1;\n")]);
        let file = fs::File::create(tree.path().join("tests/data/a.bin")).unwrap();
        file.set_len(MAX_BYTES).unwrap();
        assert_eq!(check(tree.path()).unwrap(), [""; 0]);
        fs::write(tree.path().join("Cargo.lock"), "1").unwrap();
        assert_eq!(check(tree.path()).unwrap(), ["data: 15000001 bytes, and 15000000 are allowed"]);
    }
}
