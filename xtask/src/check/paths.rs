//! The paths that a Rust source names, without compiling it.

use std::iter;

/// A path such as `crate::onnx::read`, groups of `use` written out, `*` last where it is a glob.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NamedPath<'a> {
    /// Line on which it begins, from 1.
    pub(super) line: usize,
    /// Its parts.
    pub(super) parts: Vec<&'a str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    /// `::`.
    Separator,
    Open,
    Close,
    Comma,
    Star,
    Other,
}

/// Keywords that a path with a leading `::` may follow.
const BEFORE_PATHS: [&str; 12] =
    ["break", "dyn", "else", "for", "if", "impl", "in", "match", "move", "mut", "return", "use"];

/// Every path in `source`, comments and literals left out.
pub(super) fn named_paths(source: &str) -> Vec<NamedPath<'_>> {
    let tokens = tokens(source);
    let kind = |index: usize| tokens.get(index).map(|(_, token)| *token);
    let mut found = Vec::new();
    let mut index = 0;
    while let Some((line, token)) = tokens.get(index) {
        let continues =
            index > 1 && kind(index - 1) == Some(Token::Separator) && matches!(kind(index - 2), Some(Token::Word(_)));
        if matches!(token, Token::Word(_)) && !continues {
            let mut trees = Vec::new();
            index = tree(&tokens, index, Vec::new(), &mut trees);
            found.extend(trees.into_iter().map(|parts| NamedPath { line: *line, parts }));
        } else {
            index += 1;
        }
    }
    found
}

/// Whether `source` has one of `words` outside comments and literals.
pub(super) fn names_word(source: &str, words: &[&str]) -> bool {
    tokens(source).iter().any(|(_, token)| matches!(token, Token::Word(word) if words.contains(word)))
}

/// Reads the path or group at `index` behind `parts`, and returns the index after it.
fn tree<'a>(
    tokens: &[(usize, Token<'a>)],
    mut index: usize,
    mut parts: Vec<&'a str>,
    found: &mut Vec<Vec<&'a str>>,
) -> usize {
    let kind = |index: usize| tokens.get(index).map(|(_, token)| *token);
    loop {
        match kind(index) {
            Some(Token::Word(word)) => {
                if word != "self" || parts.is_empty() {
                    parts.push(word);
                }
                index += 1;
                if kind(index) != Some(Token::Separator) {
                    found.push(parts);
                    return index;
                }
                index += 1;
            }
            Some(Token::Star) => {
                parts.push("*");
                found.push(parts);
                return index + 1;
            }
            Some(Token::Open) => return group(tokens, index + 1, &parts, found),
            _ => {
                found.push(parts);
                return index;
            }
        }
    }
}

/// Reads the members of a group behind `parts`, and returns the index after its end.
fn group<'a>(
    tokens: &[(usize, Token<'a>)],
    mut index: usize,
    parts: &[&'a str],
    found: &mut Vec<Vec<&'a str>>,
) -> usize {
    loop {
        index = match tokens.get(index) {
            None => return index,
            Some((_, Token::Close)) => return index + 1,
            Some((_, Token::Word("as"))) => index + 2,
            Some((_, Token::Word(_) | Token::Star | Token::Open)) => tree(tokens, index, parts.to_vec(), found),
            Some(_) => index + 1,
        };
    }
}

/// Splits `source` into tokens with their lines.
fn tokens(source: &str) -> Vec<(usize, Token<'_>)> {
    let mut tokens = Vec::new();
    let mut line = 1;
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let (token, length) = match first {
            '/' if rest.starts_with("//") => (None, rest.find('\n').unwrap_or(rest.len())),
            '/' if rest.starts_with("/*") => (None, block_comment(rest)),
            '"' => (None, string(rest)),
            '\'' => (None, quote(rest)),
            ':' if rest.starts_with("::") => (Some(Token::Separator), 2),
            '{' => (Some(Token::Open), 1),
            '}' => (Some(Token::Close), 1),
            ',' => (Some(Token::Comma), 1),
            '*' => (Some(Token::Star), 1),
            _ if is_word(first) => word(rest),
            _ if first.is_whitespace() => (None, first.len_utf8()),
            _ => (Some(Token::Other), first.len_utf8()),
        };
        let (taken, left) = rest.split_at(length);
        tokens.extend(token.map(|token| (line, token)));
        line += taken.matches('\n').count();
        rest = left;
    }
    tokens
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A word, a raw identifier or a raw string, and its length.
fn word(text: &str) -> (Option<Token<'_>>, usize) {
    let length = text.find(|c| !is_word(c)).unwrap_or(text.len());
    let (word, rest) = text.split_at(length);
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let behind = &rest[hashes..];
    match word {
        "r" | "br" | "cr" if behind.starts_with('"') => {
            let end: String = iter::once('"').chain(iter::repeat_n('#', hashes)).collect();
            let inside = &behind[1..];
            let closing = inside.find(&end).map_or(inside.len(), |at| at + end.len());
            (None, length + hashes + 1 + closing)
        }
        "r" if hashes == 1 && behind.starts_with(is_word) => {
            let name = behind.find(|c| !is_word(c)).unwrap_or(behind.len());
            (Some(Token::Word(&behind[..name])), length + 1 + name)
        }
        _ if BEFORE_PATHS.contains(&word) => (Some(Token::Other), length),
        _ => (Some(Token::Word(word)), length),
    }
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    loop {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
        } else {
            at += rest.chars().next().map_or(0, char::len_utf8);
        }
        if depth == 0 || at >= text.len() {
            return at;
        }
    }
}

fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a character literal, or of the quote of a lifetime.
fn quote(text: &str) -> usize {
    let mut inside = text.chars().skip(1);
    match (inside.next(), inside.next()) {
        (Some('\\'), _) => text.get(3..).and_then(|rest| rest.find('\'')).map_or(text.len(), |at| at + 4),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<String> {
        let paths = named_paths(source);
        paths.iter().filter(|path| path.parts.len() > 1).map(|path| path.parts.join("::")).collect()
    }

    #[test]
    fn groups_are_written_out() {
        let source = "use crate::{\n    onnx::{self, read::*, write as w},\n    tensor::Tensor as T,\n};";
        assert_eq!(
            found(source),
            ["crate::onnx", "crate::onnx::read::*", "crate::onnx::write", "crate::tensor::Tensor"]
        );
        assert_eq!(named_paths("\n\ncrate::a::b()")[0], NamedPath { line: 3, parts: vec!["crate", "a", "b"] });
    }

    #[test]
    fn white_space_raw_names_and_leading_separators_hide_nothing() {
        assert_eq!(found("crate :: /* x */ onnx\n::f"), ["crate::onnx::f"]);
        assert_eq!(found("crate::r#onnx::f"), ["crate::onnx::f"]);
        assert_eq!(found("use ::std::fs;"), ["std::fs"]);
        assert_eq!(found("x(super::super::y)"), ["super::super::y"]);
        assert_eq!(found("use super::{super::y};"), ["super::super::y"]);
    }

    #[test]
    fn comments_and_literals_name_nothing() {
        for source in [
            "// crate::onnx",
            "/* /* */ crate::onnx */",
            "\"crate::onnx \\\" crate::onnx\"",
            "r#\"crate::onnx \" crate::onnx\"#",
            "fn f<'a>(x: &'a str) -> char { '\"' } // \"crate::onnx",
            "['\\'', '\\u{1F600}', '\"']; /// crate::onnx",
        ] {
            assert_eq!(found(source), [""; 0], "{source}");
        }
        assert_eq!(found("let c = '\\''; crate::onnx::f('\"')"), ["crate::onnx::f"]);
    }
}
