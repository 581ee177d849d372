//! A folder with a causal language model, ours or another's: its graph, the names of inputs and outputs, special ids.

use std::path::{Path, PathBuf};

use moa_schema::interface::{ANY_LAYER, ATTENTION_MASK, Cache, INPUT_IDS, LOGITS, POSITION_IDS};

use super::GenerateError;
use super::graphs::{cache_sizes, check_logits, no_caches};
use crate::{
    file_names::{CONFIG, GENAI_CONFIG, GENERATION_CONFIG, Part, graph_file},
    files::stays_below,
    onnx::{OnnxFile, read::ValueInfo, read_model},
    text::{Keys, TRANSLATION_CONFIG, TextError},
};

const EOS: &str = "eos_token_id";

/// Whether the folder is one for a [`TextGenerator`](super::TextGenerator), and not for a
/// [`Translator`](super::Translator); a link counts, wherever it leads.
pub fn holds_causal_lm(folder: &Path) -> bool {
    let holds = |name: &str| folder.join(name).symlink_metadata().is_ok();
    let is_translation = holds(&graph_file(Part::Encoder)) || holds(TRANSLATION_CONFIG);
    (holds(&graph_file(Part::Model)) || holds(GENAI_CONFIG)) && !is_translation
}

/// Inputs and outputs by what they mean.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) ids: String,
    pub(super) mask: Option<String>,
    pub(super) positions: Option<String>,
    pub(super) logits: String,
    /// Keys and values, layer by layer.
    pub(super) past: Vec<String>,
    /// The same, in the same order.
    pub(super) present: Vec<String>,
}

/// A checked folder.
pub(super) struct CausalFolder {
    pub(super) graph: OnnxFile,
    pub(super) names: Names,
    /// Key/value heads and their width, by layer.
    pub(super) caches: Vec<[usize; 2]>,
    /// Tokens that the graph chooses from, where it fixes their number.
    pub(super) vocabulary: Option<usize>,
    /// Most tokens of a row, where the folder says so.
    pub(super) context: Option<usize>,
    /// Tokens of the vocabulary that end a text.
    pub(super) eos: Vec<i64>,
    pub(super) pad: i64,
    pub(super) settings: GenerationSettings,
}

/// Settings of generation that a folder has and that are not the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationSettings {
    /// The file that transformers goes by: `generation_config.json`, or `config.json`.
    pub file: &'static str,
    /// The settings.
    pub keys: Vec<&'static str>,
}

/// What the JSON files say.
struct Configs {
    /// `model` of `genai_config.json`, and its `decoder`.
    genai: Option<[Keys; 2]>,
    /// Where transformers goes by it.
    generation: Option<Keys>,
    config: Option<Keys>,
}

impl Configs {
    fn read(folder: &Path) -> Result<Self, TextError> {
        let model = Keys::read(&folder.join(GENAI_CONFIG))?.map(|keys| keys.object("model")).transpose()?.flatten();
        let decoder = model.as_ref().map(|model| model.object("decoder")).transpose()?.flatten();
        let config = Keys::read(&folder.join(CONFIG))?;
        let generation = Keys::read_generation(&folder.join(GENERATION_CONFIG), config.as_ref())?;
        Ok(Self { genai: model.zip(decoder).map(<[Keys; 2]>::from), generation, config })
    }

    /// Tokens that end a text: by `genai_config.json`, else by `generation_config.json` alone, as transformers 4.57
    /// reads it, else by the configuration.
    fn eos(&self) -> Result<Vec<i64>, TextError> {
        let genai = self.genai.as_ref().map(|[model, _]| model).filter(|model| model.has(EOS));
        let keys = genai.or(self.generation.as_ref()).or(self.config.as_ref());
        Ok(keys.map(|keys| keys.token_ids(EOS)).transpose()?.flatten().unwrap_or_default())
    }

    fn token_ids(&self, key: &str) -> Result<Option<Vec<i64>>, TextError> {
        let genai = self.genai.as_ref().map(|[model, _]| model);
        for keys in [genai, self.generation.as_ref(), self.config.as_ref()].into_iter().flatten() {
            let ids = keys.token_ids(key)?;
            if ids.is_some() {
                return Ok(ids);
            }
        }
        Ok(None)
    }

    fn context(&self) -> Result<Option<usize>, TextError> {
        let genai = self.genai.as_ref().map(|[model, _]| model.size("context_length")).transpose()?.flatten();
        let Some(config) = self.config.as_ref().filter(|_| genai.is_none()) else { return Ok(genai) };
        let size = config.size("max_position_embeddings")?;
        if size.is_some() { Ok(size) } else { config.size("n_positions") }
    }

    fn settings(&self) -> GenerationSettings {
        let (file, keys) = match &self.generation {
            None => (CONFIG, self.config.as_ref()),
            generation => (GENERATION_CONFIG, generation.as_ref()),
        };
        let all = |keys: &Keys| keys.generation_settings().chain(keys.further_generation_settings()).collect();
        GenerationSettings { file, keys: keys.map(all).unwrap_or_default() }
    }

    /// A text of the `section` of `genai_config.json`'s decoder, else `default`.
    fn name(&self, section: &str, key: &str, default: &str) -> Result<String, TextError> {
        let section = self.genai.as_ref().map(|[_, decoder]| decoder.object(section)).transpose()?.flatten();
        let name = section.as_ref().map(|keys| keys.text(key)).transpose()?.flatten();
        Ok(name.unwrap_or(default).to_owned())
    }
}

impl CausalFolder {
    pub(super) fn read(folder: &Path) -> Result<Self, GenerateError> {
        let configs = Configs::read(folder)?;
        let name = configs.genai.as_ref().map(|[_, decoder]| decoder.text("filename")).transpose()?.flatten();
        let name = name.map_or_else(|| graph_file(Part::Model), ToOwned::to_owned);
        let path = folder.join(&name);
        if !stays_below(Path::new(&name)) {
            let what = format!("{GENAI_CONFIG} names it, and it is outside the folder");
            return Err(GenerateError::Graph { path, what });
        }
        if matches!(path.try_exists(), Ok(false)) {
            return Err(GenerateError::Missing { path });
        }
        let graph = read_model(&path)?;
        Self::of(graph, &configs, path)
    }

    fn of(graph: OnnxFile, configs: &Configs, path: PathBuf) -> Result<Self, GenerateError> {
        let refused = |what: String| GenerateError::Graph { path: path.clone(), what };
        let inputs = graph.inputs();
        let LayerCaches { sizes, past, present } = caches(configs, &inputs, &refused)?;
        let optional = |key: &str| -> Result<Option<String>, GenerateError> {
            let name = configs.name("inputs", key, key)?;
            Ok(Some(name).filter(|name| inputs.iter().any(|input| input.name == *name)))
        };
        let ids = optional(INPUT_IDS)?.ok_or_else(|| refused(format!("there is no input `{INPUT_IDS}`")))?;
        let names = Names {
            ids,
            mask: optional(ATTENTION_MASK)?,
            positions: optional(POSITION_IDS)?,
            logits: configs.name("outputs", LOGITS, LOGITS)?,
            past,
            present,
        };
        check(&graph, &names).map_err(refused)?;
        let vocabulary = check_logits(&graph, &names.logits).map_err(refused)?;
        let is_known = |id: &i64| usize::try_from(*id).is_ok_and(|id| vocabulary.is_none_or(|all| id < all));
        let eos: Vec<i64> = configs.eos()?.into_iter().filter(is_known).collect();
        let pad = configs.token_ids("pad_token_id")?.and_then(|ids| ids.first().copied().filter(is_known));
        let pad = pad.or(eos.first().copied()).unwrap_or_default();
        let settings = configs.settings();
        // Other programs may have left positions in the graph; an export without them takes rows of any length.
        let is_limited = names.positions.is_some() || !graph.is_export();
        let context = configs.context()?.filter(|_| is_limited).into_iter().chain(graph.most_positions()).min();
        Ok(Self { names, caches: sizes, vocabulary, context, eos, pad, settings, graph })
    }
}

/// The caches, layer by layer.
#[derive(Default)]
struct LayerCaches {
    /// Key/value heads and their width.
    sizes: Vec<[usize; 2]>,
    /// Names of inputs: of a layer's keys, then of its values.
    past: Vec<String>,
    /// Names of outputs, in the same order.
    present: Vec<String>,
}

/// The caches of as many layers as the graph has.
fn caches(
    configs: &Configs,
    inputs: &[ValueInfo],
    refused: &impl Fn(String) -> GenerateError,
) -> Result<LayerCaches, GenerateError> {
    let any = Cache::of_layer(ANY_LAYER);
    let patterns = |section: &str, keys: [&str; 2], ours: [String; 2]| -> Result<Vec<String>, TextError> {
        keys.iter().zip(ours).map(|(key, ours)| configs.name(section, key, &ours)).collect()
    };
    let past = patterns("inputs", ["past_key_names", "past_value_names"], any.past())?;
    let present = patterns("outputs", ["present_key_names", "present_value_names"], any.present())?;
    let layer = |patterns: &[String], index: usize| -> Vec<String> {
        patterns.iter().map(|pattern| pattern.replacen(ANY_LAYER, &index.to_string(), 1)).collect()
    };
    let mut found = LayerCaches::default();
    while let Some(input) = inputs.iter().find(|input| input.name == layer(&past, found.sizes.len())[0]) {
        let sizes = cache_sizes(input).map_err(refused)?;
        found.past.extend(layer(&past, found.sizes.len()));
        found.present.extend(layer(&present, found.sizes.len()));
        found.sizes.push(sizes);
        if found.sizes.len() > inputs.len() {
            return Err(refused(format!("{GENAI_CONFIG} names caches without their layer, {ANY_LAYER}")));
        }
    }
    if found.sizes.is_empty() {
        return Err(refused(no_caches(&layer(&past, 0)[0])));
    }
    Ok(found)
}

/// Every input must have a meaning, every output that is read must be there.
fn check(graph: &OnnxFile, names: &Names) -> Result<(), String> {
    let known = [Some(&names.ids), names.mask.as_ref(), names.positions.as_ref()];
    let known: Vec<_> = known.into_iter().flatten().chain(&names.past).collect();
    let inputs: Vec<_> = graph.inputs().into_iter().map(|input| input.name).collect();
    if let Some(name) = inputs.iter().find(|name| !known.contains(name)) {
        return Err(format!("input `{name}` is unknown"));
    }
    if let Some(name) = names.past.iter().find(|name| !inputs.contains(name)) {
        return Err(format!("there is no input `{name}`"));
    }
    let outputs: Vec<_> = graph.outputs().into_iter().map(|output| output.name).collect();
    match names.present.iter().find(|name| !outputs.contains(name)) {
        Some(name) => Err(format!("there is no output `{name}`")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn ids_are_those_of_the_first_file_that_has_them() {
        let folder = tempfile::tempdir().unwrap();
        let pad = || Configs::read(folder.path()).unwrap().token_ids("pad_token_id").unwrap();
        assert_eq!(pad(), None);
        for (name, text, expected) in [
            (CONFIG, r#"{"pad_token_id": 7}"#, 7),
            (GENERATION_CONFIG, "{}", 7),
            (GENERATION_CONFIG, r#"{"pad_token_id": 6}"#, 6),
            (GENAI_CONFIG, r#"{"model": {"decoder": {}}}"#, 6),
            (GENAI_CONFIG, r#"{"model": {"pad_token_id": 5, "decoder": {}}}"#, 5),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
            assert_eq!(pad(), Some(vec![expected]), "{name}: {text}");
        }
    }

    #[test]
    fn folders_of_translators_are_none_of_language_models() {
        let folder = tempfile::tempdir().unwrap();
        let holds = || holds_causal_lm(folder.path());
        assert!(!holds());
        for name in [graph_file(Part::Model), GENAI_CONFIG.to_owned()] {
            fs::write(folder.path().join(&name), "").unwrap();
            assert!(holds(), "{name}");
            for of_translators in [graph_file(Part::Encoder), TRANSLATION_CONFIG.to_owned()] {
                fs::write(folder.path().join(&of_translators), "").unwrap();
                assert!(!holds(), "{name} beside {of_translators}");
                fs::remove_file(folder.path().join(of_translators)).unwrap();
            }
            fs::remove_file(folder.path().join(name)).unwrap();
        }
    }
}
