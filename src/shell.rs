//! Commands as a shell reads them.

use std::path::Path;

/// One argument as a POSIX shell takes it: as it is where no character means anything, else in single quotes.
pub(crate) fn word(text: impl std::fmt::Display) -> String {
    let text = text.to_string();
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=@%+".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A path as a shell takes it for one word and no option; `None` where it is no text.
pub(crate) fn path_word(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    Some(word(if text.starts_with('-') { format!("./{text}") } else { text.to_owned() }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{path_word, word};

    #[test]
    fn paths_are_no_options() {
        for (path, expected) in [("-out", "./-out"), ("out", "out"), ("my model", "'my model'"), ("-a b", "'./-a b'")] {
            assert_eq!(path_word(Path::new(path)).as_deref(), Some(expected));
        }
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_or_expand_them() {
        for (text, expected) in [
            ("out/model.onnx", "out/model.onnx"),
            ("--onnx=größe.onnx", "--onnx=größe.onnx"),
            ("my model", "'my model'"),
            ("", "''"),
            ("~/a", "'~/a'"),
            ("a$b*", "'a$b*'"),
            ("it's", r"'it'\''s'"),
        ] {
            assert_eq!(word(text), expected);
        }
    }
}
