//! `cargo xtask synthesize jetmoe-8b` or `molm-350m-4b`: checkpoints of released shapes without released values.
//!
//! Every value depends on the seed, the name of its tensor and its place there, so layers and shards may be chosen
//! without changing what they share.

pub(crate) mod molm;

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use serde_json::{Map, Value, json};

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// The folder, which must be new or empty.
    pub(crate) out: PathBuf,
    pub(crate) model: Model,
    pub(crate) shards: usize,
    pub(crate) seed: u64,
    /// Holes in place of values: every value is zero, and no disk space is used.
    pub(crate) sparse: bool,
}

/// Whose shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Model {
    JetMoe(Sizes),
    Molm(molm::Sizes),
}

impl Model {
    fn named(name: &str) -> Option<Self> {
        match name {
            "jetmoe-8b" => Some(Self::JetMoe(Sizes::JETMOE_8B)),
            "molm-350m-4b" => Some(Self::Molm(molm::Sizes::MOLM_350M_4B)),
            _ => None,
        }
    }

    fn layers(&mut self) -> &mut usize {
        match self {
            Self::JetMoe(sizes) => &mut sizes.layers,
            Self::Molm(sizes) => &mut sizes.layers,
        }
    }

    fn config(&self) -> Value {
        match self {
            Self::JetMoe(sizes) => sizes.config(),
            Self::Molm(sizes) => sizes.config(),
        }
    }

    fn tensors(&self) -> Vec<Tensor> {
        match self {
            Self::JetMoe(sizes) => sizes.tensors(),
            Self::Molm(sizes) => sizes.tensors(),
        }
    }
}

/// Sizes of a JetMoE model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
    pub(crate) hidden: usize,
    pub(crate) vocabulary: usize,
}

impl Sizes {
    /// jetmoe/jetmoe-8b.
    pub(crate) const JETMOE_8B: Self = Self {
        layers: 24,
        width: 2048,
        experts: 8,
        top_k: 2,
        kv_heads: 16,
        head: 128,
        hidden: 5632,
        vocabulary: 32_000,
    };

    /// The configuration, with the keys of the released files.
    fn config(&self) -> Value {
        json!({
            "activation_function": "silu",
            "architectures": ["JetMoEForCausalLM"],
            "bias": true,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "ffn_hidden_size": self.hidden,
            "glu": true,
            "hidden_size": self.width,
            "kv_channels": self.head,
            "layer_norm_epsilon": 1e-5,
            "model_type": "jetmoe",
            "moe_num_experts": self.experts,
            "moe_top_k": self.top_k,
            "n_positions": 4096,
            "num_attention_heads": self.kv_heads * self.top_k,
            "num_key_value_heads": self.kv_heads,
            "num_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "rotary_percent": 1.0,
            "tie_word_embeddings": true,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        })
    }

    /// All tensors, in the order of the layers.
    fn tensors(&self) -> Vec<Tensor> {
        let Self { width, experts, hidden, .. } = *self;
        let columns = self.kv_heads * self.head;
        let mut tensors = vec![Tensor::new("model.embed_tokens.weight".into(), &[self.vocabulary, width], 1)];
        for layer in 0..self.layers {
            let prefix = format!("model.layers.{layer}");
            let mut add = |name: &str, shape: &[usize], fan_in| {
                tensors.push(Tensor::new(format!("{prefix}.{name}"), shape, fan_in));
            };
            add("input_layernorm.weight", &[width], NORM);
            add("self_attention.experts.bias", &[width], width);
            add("self_attention.experts.input_linear.weight", &[experts, columns, width], width);
            add("self_attention.experts.output_linear.weight", &[experts, width, columns], columns);
            add("self_attention.experts.router.layer.weight", &[experts, width], width);
            add("self_attention.kv_proj.weight", &[2 * columns, width], width);
            add("post_attention_layernorm.weight", &[width], NORM);
            add("mlp.bias", &[width], width);
            add("mlp.input_linear.weight", &[experts, 2 * hidden, width], width);
            add("mlp.output_linear.weight", &[experts, width, hidden], hidden);
            add("mlp.router.layer.weight", &[experts, width], width);
        }
        tensors.push(Tensor::new("model.norm.weight".into(), &[width], NORM));
        tensors
    }
}

/// In place of a fan-in: scales of a normalisation, which lie from 1 to 1.125.
const NORM: usize = 0;

struct Tensor {
    name: String,
    shape: Vec<usize>,
    /// Inputs of the linear map, which say how large its values are.
    fan_in: usize,
}

impl Tensor {
    fn new(name: String, shape: &[usize], fan_in: usize) -> Self {
        Self { name, shape: shape.to_vec(), fan_in }
    }

    fn bytes(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product::<u64>() * 2
    }
}

/// Runs the command with these arguments.
pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let request = Request::parse(arguments)?;
    let start = Instant::now();
    let bytes = write(&request)?;
    let seconds = start.elapsed().as_secs_f64();
    let rate = bytes as f64 / seconds / 1e9;
    println!("wrote {}  {bytes} bytes in {seconds:.1} s, {rate:.2} GB/s", request.out.display());
    Ok(())
}

impl Request {
    const USAGE: &str =
        "usage: cargo xtask synthesize jetmoe-8b|molm-350m-4b -o DIR [--layers N] [--shards N] [--seed N] [--sparse]";

    fn parse(arguments: &[&str]) -> Result<Self, String> {
        let [name, arguments @ ..] = arguments else { return Err(Self::USAGE.into()) };
        let model = Model::named(name).ok_or(Self::USAGE)?;
        let mut request = Self { out: PathBuf::new(), model, shards: 4, seed: 0, sparse: false };
        let mut arguments = arguments.iter();
        while let Some(option) = arguments.next() {
            if *option == "--sparse" {
                request.sparse = true;
                continue;
            }
            let value = arguments.next().ok_or_else(|| format!("{option} needs a value; {}", Self::USAGE))?;
            let number = || value.parse::<usize>().map_err(|_| format!("{option} {value}: not a number"));
            match *option {
                "-o" => request.out = value.into(),
                "--layers" => *request.model.layers() = number()?,
                "--shards" => request.shards = number()?.max(1),
                "--seed" => request.seed = number()? as u64,
                _ => return Err(format!("{option} is unknown; {}", Self::USAGE)),
            }
        }
        if request.out.as_os_str().is_empty() { Err(Self::USAGE.into()) } else { Ok(request) }
    }
}

/// Writes the checkpoint and returns the bytes of its tensors.
pub(crate) fn write(request: &Request) -> Result<u64, String> {
    let at = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| format!("{path}: {error}")
    };
    let out = &request.out;
    fs::create_dir_all(out).map_err(at(out))?;
    if fs::read_dir(out).map_err(at(out))?.next().is_some() {
        return Err(format!("{} is not empty", out.display()));
    }
    let tensors = request.model.tensors();
    let total = tensors.iter().map(Tensor::bytes).sum::<u64>();
    let (mut map, mut rest, mut done) = (Map::new(), tensors.as_slice(), 0);
    for shard in 1..=request.shards {
        let name = format!("model-{shard:05}-of-{:05}.safetensors", request.shards);
        let end = total * shard as u64 / request.shards as u64;
        let mut count = 0;
        while rest.get(count).is_some_and(|tensor| shard == request.shards || done + tensor.bytes() / 2 < end) {
            map.insert(rest[count].name.clone(), name.as_str().into());
            done += rest[count].bytes();
            count += 1;
        }
        let (held, left) = rest.split_at(count);
        rest = left;
        write_shard(&out.join(&name), held, request).map_err(at(&out.join(&name)))?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    for (name, value) in [("model.safetensors.index.json", index), ("config.json", request.model.config())] {
        fs::write(out.join(name), format!("{value:#}\n")).map_err(at(&out.join(name)))?;
    }
    Ok(total)
}

fn write_shard(path: &Path, tensors: &[Tensor], request: &Request) -> io::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes();
        let entry = json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end] });
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = File::create_new(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    if request.sparse {
        return file.set_len(8 + header.len() as u64 + offset);
    }
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut buffer = vec![0; threads * BLOCK];
    for tensor in tensors {
        let values = Values::new(request.seed, &tensor.name, tensor.fan_in);
        let mut at = 0;
        while at < tensor.bytes() {
            let left = usize::try_from(tensor.bytes() - at).unwrap_or(usize::MAX);
            let part = buffer.len().min(left);
            thread::scope(|scope| {
                for (index, block) in buffer[..part].chunks_mut(BLOCK).enumerate() {
                    let (values, start) = (&values, at + (index * BLOCK) as u64);
                    scope.spawn(move || values.fill(block, start));
                }
            });
            file.write_all(&buffer[..part])?;
            at += part as u64;
        }
    }
    Ok(())
}

/// Bytes that a thread makes at once.
const BLOCK: usize = 4 << 20;

/// The values of a tensor: SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom number
/// generators", 2014), four values from each of its numbers.
struct Values {
    /// The seed and the FNV-1a hash of the name.
    key: u64,
    /// The bf16 value of every 16 random bits.
    of_bits: Vec<u16>,
}

impl Values {
    /// Nearly uniform within the bound of a linear map of `fan_in` inputs.
    fn new(seed: u64, name: &str, fan_in: usize) -> Self {
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let base = largest_exponent(fan_in);
        let value = |random: u16| match fan_in {
            NORM => 0x3f80 | (random & 0x000f),
            _ => (random & 0x807f) | ((base - ((random >> 7) | 0x100).trailing_zeros() as u16) << 7),
        };
        let key = seed ^ name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
        Self { key, of_bits: (0..=u16::MAX).map(value).collect() }
    }

    /// The number of the generator with this index.
    fn number(&self, index: u64) -> u64 {
        let state = self.key.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Fills `block` with what begins at the byte `start` of the tensor, a multiple of eight.
    fn fill(&self, block: &mut [u8], start: u64) {
        for (eight, index) in block.chunks_mut(8).zip(start / 8..) {
            let mut bits = self.number(index);
            for value in eight.as_chunks_mut::<2>().0 {
                value.copy_from_slice(&self.of_bits[usize::from(bits as u16)].to_le_bytes());
                bits >>= 16;
            }
        }
    }
}

/// Biased exponent of the values next to the bound `sqrt(3 / fan_in)` of a uniform distribution of variance
/// `1 / fan_in`.
fn largest_exponent(fan_in: usize) -> u16 {
    let bound = (3.0 / fan_in.max(1) as f64).sqrt();
    (126.0 + bound.log2().round()) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_released_shapes_are_right() {
        let tensors = Sizes::JETMOE_8B.tensors();
        let parameters: u64 = tensors.iter().map(Tensor::bytes).sum::<u64>() / 2;
        assert_eq!((tensors.len(), parameters), (2 + 24 * 11, 8_522_237_952));
    }

    #[test]
    fn values_are_finite_and_of_the_right_size() {
        let mut block = vec![0; 1 << 16];
        Values::new(7, "a", 2048).fill(&mut block, 0);
        let value = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
        let values: Vec<_> = block.as_chunks::<2>().0.iter().map(|pair| f64::from(value(pair))).collect();
        let variance = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let ratio = variance * 2048.0;
        assert!((0.5..2.0).contains(&ratio) && mean.abs() < 1e-3, "{ratio} {mean}");
        Values::new(7, "a", NORM).fill(&mut block, 0);
        assert!(block.as_chunks::<2>().0.iter().all(|pair| (1.0..1.125).contains(&value(pair))));
    }

    #[test]
    fn values_depend_on_their_place_alone() {
        let values = Values::new(7, "a", 2048);
        let (mut whole, mut part) = (vec![0; 4096], vec![0; 1000]);
        values.fill(&mut whole, 0);
        values.fill(&mut part, 1024);
        assert_eq!(whole[1024..2024], part);
        assert_ne!(whole[..1000], part);
    }

    #[test]
    fn arguments_are_understood() {
        for name in ["jetmoe-8b", "molm-350m-4b"] {
            let mut request = Request::parse(&[name, "--layers", "2", "-o", "x", "--sparse"]).unwrap();
            assert_eq!((*request.model.layers(), request.shards, request.sparse), (2, 4, true));
        }
        assert!(Request::parse(&["jetmoe-8b"]).is_err());
        assert!(Request::parse(&["jetmoe-9b", "-o", "x"]).is_err());
        assert!(Request::parse(&["jetmoe-8b", "-o", "x", "--layers", "two"]).is_err());
    }
}
