//! Names of modules for tables and pictures.

/// Names without the parts that say nothing: an end that all share, and a beginning before `layers`.
pub(super) fn labels<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let names: Vec<Vec<&str>> = names.map(|name| name.split('.').collect()).collect();
    let number = |part: &&str| part.parse::<usize>().is_ok();
    let prefix = |parts: &Vec<&str>| parts.iter().position(number).unwrap_or(1).saturating_sub(1);
    let shortest = names.iter().map(prefix).min().unwrap_or(0);
    let first = names.first().cloned().unwrap_or_default();
    let same_start = (0..shortest).take_while(|at| names.iter().all(|name| name[*at] == first[*at])).count();
    let spare = |parts: &Vec<&str>| parts.len().saturating_sub(parts.iter().rposition(number).map_or(1, |at| at + 2));
    let most = names.iter().map(spare).min().unwrap_or(0);
    let end = |name: &Vec<&str>, at: usize| name[name.len() - 1 - at].to_owned();
    let same_end = (0..most).take_while(|at| names.iter().all(|name| end(name, *at) == end(&first, *at))).count();
    let label = |name: &Vec<&str>| name[same_start..name.len() - same_end].join(".");
    names.iter().map(label).map(|label| if label.is_empty() { "layer".to_owned() } else { label }).collect()
}

#[cfg(test)]
mod tests {
    fn labels(names: &[&str]) -> Vec<String> {
        super::labels(names.iter().copied())
    }

    #[test]
    fn labels_keep_what_tells_modules_apart() {
        assert_eq!(
            labels(&["encoder.layers.0.self_attn.q_proj", "decoder.layers.0.encoder_attn.q_proj"]),
            ["encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]
        );
        assert_eq!(
            labels(&["model.layers.0.self_attention.experts", "model.layers.0.mlp"]),
            ["layers.0.self_attention.experts", "layers.0.mlp"]
        );
        assert_eq!(labels(&["encoder.sentence_encoder.layers.3.self_attn.q_proj"]), ["layers.3.self_attn"]);
        assert_eq!(labels(&[""]), ["layer"]);
        assert_eq!(labels(&["odd"]), ["odd"]);
    }
}
