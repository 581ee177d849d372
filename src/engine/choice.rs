//! Whether a model, a GPU, a release of TensorRT and the device at hand go together.

use moa_schema::IntegerType;

use super::{Dtype, GPUS, Gpu, Misfit, RELEASES, Release, ReleaseNumber, Version, fit};
use crate::onnx::{
    OnnxFile,
    proto::{NodeProto, tensor_proto::DataType},
    read::{for_each_node, operator_of},
};

/// The GPU that CUDA found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// What it computes with.
    pub capability: Version,
}

/// Why no engine can be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// No release of the table has that major number, and the number is not newer than the table.
    #[error(
        "TensorRT {number} is not served: {} are",
        RELEASES.iter().map(|release| release.name).collect::<Vec<_>>().join(", ")
    )]
    NotServed {
        /// The release.
        number: ReleaseNumber,
    },
    /// The release has no bfloat16.
    #[error("TensorRT {release} has no bfloat16, and the model is bf16")]
    NoBf16 {
        /// Name of the release.
        release: &'static str,
    },
    /// Matrices of experts are integers.
    #[error("the model is {integers}, and engines are built of floats alone")]
    Integers {
        /// Which.
        integers: IntegerType,
    },
    /// GPU, release and dtype do not fit.
    #[error("the model is {}, and {gpu} does not fit: {why}", dtype.name())]
    Misfit {
        /// The GPU.
        gpu: String,
        /// That of the model.
        dtype: Dtype,
        /// A reason.
        why: Misfit,
    },
    /// Another GPU is present than the engine is for.
    #[error(
        "the engine is for {asked} (compute capability {capability}), and the device here is {} ({}): TensorRT builds \
         on the GPU that will run the engine",
        found.name,
        found.capability
    )]
    OtherDevice {
        /// The GPU that was asked for.
        asked: &'static str,
        /// What that computes with.
        capability: Version,
        /// The GPU that is there.
        found: Device,
    },
}

/// What the table knows of a release; newer ones than it knows are taken for its newest.
///
/// # Errors
///
/// [`ChoiceError::NotServed`].
pub fn release_of(number: ReleaseNumber) -> Result<&'static Release, ChoiceError> {
    let newest = RELEASES[RELEASES.len() - 1].first;
    let is_served = |release: &&Release| release.first.0 == number.0 || release.first == newest;
    let found = RELEASES.iter().rev().find(|release| release.first <= number);
    found.filter(is_served).ok_or(ChoiceError::NotServed { number })
}

/// As [`release_of`] for a release that is not at hand: nothing is known of a newer major version.
///
/// # Errors
///
/// [`ChoiceError::NotServed`].
pub fn known_release_of(number: ReleaseNumber) -> Result<&'static Release, ChoiceError> {
    let release = release_of(number)?;
    Some(release).filter(|release| release.first.0 == number.0).ok_or(ChoiceError::NotServed { number })
}

/// The type of weights and activations: that of the weights which are not f32 everywhere.
///
/// # Errors
///
/// [`ChoiceError::Integers`] for exports in integers; what other programs have quantised is TensorRT's to judge.
pub fn dtype_of(file: &OnnxFile) -> Result<Dtype, ChoiceError> {
    let weights = file.graph().map_or(&[][..], |graph| &graph.initializer);
    let has = |wanted: DataType| weights.iter().any(|weight| weight.data_type == wanted as i32);
    if let Some(integers) = integers_of(file) {
        Err(ChoiceError::Integers { integers })
    } else if has(DataType::Float16) {
        Ok(Dtype::Fp16)
    } else if has(DataType::Bfloat16) {
        Ok(Dtype::Bf16)
    } else {
        Ok(Dtype::Fp32)
    }
}

/// The integers that an operator of ours has scales for, or that standard operators widen as our bodies do.
fn integers_of(file: &OnnxFile) -> Option<IntegerType> {
    let mut found = None;
    for_each_node(file.graph().map_or(&[][..], |graph| &graph.node), &mut |node| {
        found = found.or_else(|| scaled(file, node)).or_else(|| widened(node));
    });
    found
}

fn scaled(file: &OnnxFile, node: &NodeProto) -> Option<IntegerType> {
    let scales = node.input.get(operator_of(node)?.of_floats().inputs.len()..)?;
    let mut weights = node.input.iter().filter_map(|input| file.initializer(input));
    match weights.any(|weight| weight.data_type == DataType::Int4 as i32) {
        _ if scales.iter().all(String::is_empty) => None,
        true => Some(IntegerType::Int4),
        false => Some(IntegerType::Int8),
    }
}

fn widened(node: &NodeProto) -> Option<IntegerType> {
    let integers = match node.op_type.as_str() {
        "Cast" => IntegerType::Int8,
        "DequantizeLinear" => IntegerType::Int4,
        _ => return None,
    };
    let ending = format!("/{integers}");
    let is_ours = node.domain.is_empty() && node.input.first().is_some_and(|input| input.ends_with(&ending));
    is_ours.then_some(integers)
}

/// Whether `dtype` fits a GPU and a release; each is any where it is absent.
///
/// # Errors
///
/// Why it does not: what the dtype lacks, else the last reason.
pub fn must_fit(gpu: Option<&Gpu>, release: Option<&'static Release>, dtype: Dtype) -> Result<(), ChoiceError> {
    let Some(gpu) = gpu else {
        return match release {
            Some(release) if dtype == Dtype::Bf16 && !release.bf16 => {
                Err(ChoiceError::NoBf16 { release: release.name })
            }
            _ => Ok(()),
        };
    };
    let releases = release.map_or_else(|| RELEASES.iter().collect(), |release| vec![release]);
    let misfits: Vec<_> = releases.iter().map_while(|release| fit(gpu, release, dtype).err()).collect();
    if misfits.len() < releases.len() {
        return Ok(());
    }
    let of_dtype = misfits.iter().find(|why| why.is_of_dtype());
    let why = of_dtype.or(misfits.last()).copied();
    why.map_or(Ok(()), |why| Err(ChoiceError::Misfit { gpu: gpu.name.to_owned(), dtype, why }))
}

/// Whether the device at hand is `gpu`, or any GPU where that is absent, and fits `release` and `dtype`.
///
/// # Errors
///
/// Where it is another one, or does not fit.
pub fn must_be(device: &Device, gpu: Option<&Gpu>, release: &'static Release, dtype: Dtype) -> Result<(), ChoiceError> {
    if let Some(gpu) = gpu.filter(|gpu| !is_called(device, gpu)) {
        return Err(ChoiceError::OtherDevice { asked: gpu.name, capability: gpu.capability, found: device.clone() });
    }
    let newest = GPUS.iter().filter(|gpu| gpu.capability == device.capability).find_map(|gpu| gpu.cuda.1);
    let like = Gpu { name: "the device here", capability: device.capability, cuda: (Version(0, 0), newest) };
    must_fit(Some(&like), Some(release), dtype).map_err(|error| match error {
        ChoiceError::Misfit { dtype, why, .. } => ChoiceError::Misfit { gpu: device.name.clone(), dtype, why },
        error => error,
    })
}

/// Whether a device has the capability of `gpu` and not the name of another one that has it too.
fn is_called(device: &Device, gpu: &Gpu) -> bool {
    let name = device.name.to_lowercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let pairs = words.windows(2).map(<[&str]>::concat);
    let all: Vec<String> = pairs.chain(words.iter().map(|word| (*word).to_owned())).collect();
    let named = |gpu: &Gpu| all.iter().any(|word| word == gpu.name);
    let is_another = GPUS.iter().any(|other| other.name != gpu.name && named(other));
    device.capability == gpu.capability && (named(gpu) || !is_another)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str) -> Gpu {
        GPUS.into_iter().find(|gpu| gpu.name == name).unwrap()
    }

    fn device(name: &str, capability: Version) -> Device {
        Device { name: name.into(), capability }
    }

    #[test]
    fn devices_are_told_by_capability_and_name() {
        for (name, capability, expected) in [
            ("Tesla V100-SXM2-16GB", Version(7, 0), &["v100"][..]),
            ("NVIDIA A100-SXM4-80GB", Version(8, 0), &["a100"]),
            ("NVIDIA H100 80GB HBM3", Version(9, 0), &["h100"]),
            ("NVIDIA H200", Version(9, 0), &["h200"]),
            ("NVIDIA GH200 480GB", Version(9, 0), &["h100", "h200"]),
            ("NVIDIA GeForce RTX 5090", Version(12, 0), &["rtx5090"]),
            ("NVIDIA A10", Version(8, 6), &["a10"]),
            ("NVIDIA GeForce RTX 3090", Version(8, 6), &["rtx3090"]),
            ("NVIDIA RTX A6000", Version(8, 6), &["a10", "a40", "rtx3090"]),
            ("NVIDIA L40S", Version(8, 9), &["l40s"]),
            ("NVIDIA GB200", Version(10, 0), &["gb200"]),
            ("Tesla P100", Version(6, 0), &[]),
        ] {
            let device = device(name, capability);
            let found: Vec<_> = GPUS.iter().filter(|gpu| is_called(&device, gpu)).map(|gpu| gpu.name).collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn another_device_is_refused_by_name() {
        let found = device("NVIDIA H200", Version(9, 0));
        let error = must_be(&found, Some(&gpu("h100")), &RELEASES[1], Dtype::Fp16).unwrap_err().to_string();
        let expected = "the engine is for h100 (compute capability 9.0), and the device here is NVIDIA H200 (9.0)";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(must_be(&found, Some(&gpu("h200")), &RELEASES[1], Dtype::Fp16), Ok(()));
        assert_eq!(must_be(&found, None, &RELEASES[1], Dtype::Bf16), Ok(()));
    }

    #[test]
    fn a_device_that_the_release_has_dropped_is_refused() {
        let volta = device("Tesla V100-SXM2-16GB", Version(7, 0));
        let error = must_be(&volta, None, &RELEASES[2], Dtype::Fp16).unwrap_err().to_string();
        assert!(error.contains("Tesla V100-SXM2-16GB does not fit: TensorRT 10.5 to 10.6 serves"), "{error}");
        let error = must_be(&volta, None, &RELEASES[1], Dtype::Bf16).unwrap_err().to_string();
        assert!(error.contains("compute capability 7.0 has no bfloat16"), "{error}");
        let unknown = device("Tesla P100", Version(6, 0));
        assert!(must_be(&unknown, None, &RELEASES[1], Dtype::Fp32).is_err());
    }

    #[test]
    fn versions_find_their_release() {
        let name = |text: &str| release_of(text.parse().unwrap()).map(|release| release.name).ok();
        for (text, expected) in [
            ("8.6", Some("8.6")),
            ("8.6.1.6", Some("8.6")),
            ("10.4", Some("10.0 to 10.4")),
            ("10.13.0.35", Some("10.8 to 10.13.0")),
            ("10.13.2", Some("10.13.2 to 10.16")),
            ("10.13", Some("10.13.2 to 10.16")),
            ("13.0", Some("11.0 to 11.4")),
            ("9.3", None),
            ("8.5", None),
        ] {
            assert_eq!(name(text), expected, "{text}");
        }
        for text in ["13.0", "9.3", "110.4"] {
            assert!(known_release_of(text.parse().unwrap()).is_err(), "{text}");
        }
        assert_eq!(known_release_of("11.9".parse().unwrap()).map(|release| release.name), Ok("11.0 to 11.4"));
        let error = release_of(ReleaseNumber(9, 3, u16::MAX)).unwrap_err().to_string();
        assert!(error.starts_with("TensorRT 9.3 is not served: 8.6, 10.0 to 10.4, "), "{error}");
    }
}
