//! Commands as a shell reads them.

/// One argument as a POSIX shell takes it: as it is where no character means anything, else in single quotes.
pub(super) fn word(text: impl std::fmt::Display) -> String {
    let text = text.to_string();
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=@%+".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::word;

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
