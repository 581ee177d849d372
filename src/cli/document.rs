//! JSON documents that commands write; `docs/json.md` says what their keys mean.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of all documents: it grows where a key goes, or means something else.
const FORMAT: u32 = 1;

/// Which document it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Baseline,
    Bench,
    Build,
    Export,
    InspectCheckpoint,
    InspectGraphs,
    InspectPaper,
    InspectPresets,
    Ops,
    Plan,
    Prepare,
    Profile,
    Run,
    Verify,
}

/// What every document begins with, and what it is about.
#[derive(Debug, Serialize)]
struct Document<T> {
    kind: Kind,
    format: u32,
    #[serde(flatten)]
    content: T,
}

/// `content`, an object, as a document with a line end.
pub(super) fn document(kind: Kind, content: impl Serialize) -> String {
    let document = Document { kind, format: FORMAT, content };
    serde_json::to_string_pretty(&document).map(|text| text + "\n").unwrap_or_default()
}

/// What a document of `kind` is about.
///
/// # Errors
///
/// What the bytes are instead, as the end of a sentence that begins with the name of their file.
pub(super) fn read<T: DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Header {
        kind: Option<Kind>,
        format: u32,
    }
    if bytes.is_empty() {
        return Err("is empty".into());
    }
    let no_json = |error: serde_json::Error| format!("is no JSON: {error}");
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(no_json)?;
    let command = |kind| serde_json::to_value(kind).ok().and_then(|name| name.as_str().map(str::to_owned));
    let wanted = command(kind).unwrap_or_default();
    match Header::deserialize(&value) {
        Ok(Header { kind: Some(found), .. }) if found != kind => {
            Err(format!("is a document of `{}`", command(found).unwrap_or_default()))
        }
        Ok(Header { format, .. }) if format != FORMAT => {
            Err(format!("has format {format} of `{wanted}`, and this program reads format {FORMAT}"))
        }
        Ok(Header { kind: Some(_), .. }) => T::deserialize(value).map_err(|error| format!("is damaged: {error}")),
        _ => Err(format!("is no document of `{wanted}`")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_document_is_read_as_what_it_is() {
        let text = document(Kind::Bench, json!({ "rows": [1] }));
        assert_eq!(text, "{\n  \"kind\": \"bench\",\n  \"format\": 1,\n  \"rows\": [\n    1\n  ]\n}\n");
        let other = document(Kind::InspectGraphs, json!({}));
        for (text, expected) in [
            ("", "is empty"),
            ("rows", "is no JSON: expected value at line 1 column 1"),
            ("[]", "is no document of `bench`"),
            ("{}", "is no document of `bench`"),
            ("{\"format\": 1}", "is no document of `bench`"),
            ("{\"kind\": \"bank\", \"format\": 1}", "is no document of `bench`"),
            ("{\"kind\": \"bench\", \"format\": 2}", "has format 2 of `bench`, and this program reads format 1"),
            (&other, "is a document of `inspect_graphs`"),
        ] {
            assert_eq!(read::<Value>(Kind::Bench, text.as_bytes()), Err(expected.to_owned()), "{text}");
        }
        #[derive(Debug, Deserialize)]
        struct Rows {
            rows: Vec<u32>,
        }
        assert_eq!(read::<Rows>(Kind::Bench, text.as_bytes()).map(|read| read.rows), Ok(vec![1]));
        let damaged = read::<Rows>(Kind::Bench, text.replace("rows", "columns").as_bytes()).unwrap_err();
        assert_eq!(damaged, "is damaged: missing field `rows`");
    }
}
