//! Files stay short and narrow enough to read, and the repository small enough to clone.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Lines of one source file, its unit tests not counted.
const MAX_LINES: usize = 500;

/// Columns of a comment; rustfmt, which sees to code, leaves comments as they are.
const MAX_COLUMNS: usize = 120;

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
            let source = fs::read_to_string(&path)?;
            if ending == Some("rs") {
                let wide = wide_comments(&source).map(|(line, columns)| {
                    format!("{}:{line}: a comment of {columns} columns, and {MAX_COLUMNS} are allowed", file.display())
                });
                found.extend(wide);
            }
            let lines = lines_without_tests(&source);
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
fn files(root: &Path) -> io::Result<Vec<PathBuf>> {
    tracked(root).map_or_else(|| walk(root, root), Ok)
}

/// Those of Rust, with their sources.
pub(super) fn rust_sources(root: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let rust = files(root)?.into_iter().filter(|file| file.extension() == Some(OsStr::new("rs")));
    Ok(rust.filter_map(|file| fs::read_to_string(root.join(&file)).ok().map(|source| (file, source))).collect())
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

/// Numbers and columns of the lines of `source` that are too wide a comment; rows of tables are let be.
fn wide_comments(source: &str) -> impl Iterator<Item = (usize, usize)> {
    let lines = source.lines().enumerate().map(|(index, line)| (index + 1, line));
    let is_prose = |line: &str| {
        let text = line.trim_start().strip_prefix("//");
        text.is_some_and(|text| !text.trim_start_matches(['/', '!', ' ']).starts_with('|'))
    };
    let prose = lines.filter(move |(_, line)| is_prose(line));
    prose.map(|(number, line)| (number, line.chars().count())).filter(|(_, columns)| *columns > MAX_COLUMNS)
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
    fn a_wide_comment_is_found() {
        let fits = format!("    // {}", "é".repeat(113));
        assert_eq!(fits.chars().count(), 120);
        let code = format!("const X: &str = \"{}\"; // x", "x".repeat(120));
        let table = format!("/// | {} |", "x".repeat(120));
        let source = format!("{fits}\n{fits}.\n{code}\n{table}\n//! {}\n", "x".repeat(117));
        let tree = planted(&[("src/a.rs", &source), ("src/a.cpp", &format!("//{}\n", "x".repeat(120)))]);
        let wide = |line, columns| format!("src/a.rs:{line}: a comment of {columns} columns, and 120 are allowed");
        assert_eq!(check(tree.path()).unwrap(), [wide(2, 121), wide(5, 121)]);
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
