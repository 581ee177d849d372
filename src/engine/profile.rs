//! Sizes of the dimensions that a model leaves open, and the shapes that an engine is built for.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::onnx::read::{Dim, ValueInfo, terms};

/// Smallest, most frequent and largest size of one open dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DimRange {
    /// Name of the dimension in the model.
    pub name: String,
    /// Smallest, most frequent, largest.
    pub sizes: [u64; 3],
}

impl FromStr for DimRange {
    type Err = String;

    /// Reads `NAME=MIN:OPT:MAX`, or `NAME=N` for one size.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected NAME=MIN:OPT:MAX, such as batch=1:4:8, or NAME=N".to_owned();
        let (name, numbers) = text.split_once('=').ok_or_else(expected)?;
        let numbers: Vec<u64> = numbers.split(':').map(str::parse).collect::<Result<_, _>>().map_err(|_| expected())?;
        let sizes = match *numbers.as_slice() {
            [size] => [size; 3],
            [least, usual, most] => [least, usual, most],
            _ => return Err(expected()),
        };
        if !sizes.is_sorted() {
            return Err("MIN may not exceed OPT, nor OPT exceed MAX".into());
        }
        if name.is_empty() || sizes[2] > MOST {
            return Err(format!("a dimension has a name, and a size of at most {MOST}"));
        }
        Ok(Self { name: name.to_owned(), sizes })
    }
}

/// Largest size of a dimension, that of TensorRT 8.6.
pub(super) const MOST: u64 = i32::MAX as u64;

/// Shapes of one input that an engine serves: every size between the smallest and the largest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputShapes {
    /// Name of the input.
    pub name: String,
    /// Smallest shape.
    pub min: Vec<u64>,
    /// The shape that the engine is tuned for.
    pub opt: Vec<u64>,
    /// Largest shape.
    pub max: Vec<u64>,
}

impl InputShapes {
    /// Whether `shape` lies in the range.
    pub fn hold(&self, shape: &[usize]) -> bool {
        let within = |((size, min), max): ((&usize, &u64), &u64)| (*min..=*max).contains(&(*size as u64));
        shape.len() == self.min.len() && shape.iter().zip(&self.min).zip(&self.max).all(within)
    }

    /// Whether the input has one shape only.
    pub fn is_fixed(&self) -> bool {
        self.min == self.max
    }
}

/// The shapes of all inputs in one optimisation profile.
pub type ShapeProfile = Vec<InputShapes>;

/// Why sizes and a model do not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeProfileError {
    /// A size is given for a dimension that is not there.
    #[error("a size is given to the dimension `{name}`, which no input has")]
    Unknown {
        /// The dimension.
        name: String,
        /// Those that the model leaves open.
        open: Vec<String>,
    },
    /// A dimension is given twice.
    #[error("the dimension `{name}` is given a size twice")]
    Twice {
        /// The dimension.
        name: String,
    },
    /// Some dimensions have no size.
    #[error("no size is given to {}", names.join(", "))]
    Missing {
        /// The dimensions.
        names: Vec<String>,
    },
    /// A dimension that every run has some of is given none.
    #[error("a size of 0 is given to the dimension `{name}`")]
    Empty {
        /// The dimension.
        name: String,
    },
    /// An input has a dimension that has no name.
    #[error("input `{input}` has a dimension without a name, which cannot be given a size")]
    Unnamed {
        /// The input.
        input: String,
    },
    /// Shapes that are listed by input are not those of the model.
    #[error("{why}")]
    Shapes {
        /// What is wrong.
        why: String,
        /// The model's inputs with their dimensions.
        inputs: String,
    },
    /// Rows are longer than the model has positions.
    #[error("{what} rows of {length} tokens, and `{table}` has {positions} positions")]
    Positions {
        /// Which sizes do.
        what: String,
        /// Tokens of a row.
        length: u64,
        /// Weight that holds the positions.
        table: String,
        /// Positions that there are.
        positions: u64,
    },
}

/// Names of the dimensions that the inputs leave open, in order.
pub fn open_dims(inputs: &[ValueInfo]) -> Vec<String> {
    let dims = inputs.iter().flat_map(|input| input.dims.iter().flatten());
    let mut names = Vec::new();
    for dim in dims {
        let Dim::Symbolic(text) = dim else { continue };
        for name in terms(text).filter(|name| name.parse::<u64>().is_err()) {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
    }
    names
}

/// The shapes of every input where the open dimensions have the sizes `dims`.
///
/// # Errors
///
/// Where `dims` are not exactly the open dimensions, where an input has a dimension without a name, and where another
/// dimension than those of the past may be of 0.
pub fn shapes(inputs: &[ValueInfo], dims: &[DimRange]) -> Result<ShapeProfile, ShapeProfileError> {
    let open = open_dims(inputs);
    if let Some(unknown) = dims.iter().find(|dim| !open.contains(&dim.name)) {
        return Err(ShapeProfileError::Unknown { name: unknown.name.clone(), open });
    }
    if let Some((_, twice)) =
        dims.iter().enumerate().find(|(index, dim)| dims[..*index].iter().any(|known| known.name == dim.name))
    {
        return Err(ShapeProfileError::Twice { name: twice.name.clone() });
    }
    let names: Vec<_> = open.into_iter().filter(|name| dims.iter().all(|dim| dim.name != *name)).collect();
    if !names.is_empty() {
        return Err(ShapeProfileError::Missing { names });
    }
    let shapes = inputs.iter().map(|input| {
        let shape = |which| shape(input, dims, which);
        Ok(InputShapes { name: input.name.clone(), min: shape(0)?, opt: shape(1)?, max: shape(2)? })
    });
    let profile = shapes.collect::<Result<_, _>>()?;
    nothing_is_empty(inputs, &profile)?;
    Ok(profile)
}

/// That a run has some of everything but keys and values of the past.
pub(super) fn nothing_is_empty(inputs: &[ValueInfo], profile: &ShapeProfile) -> Result<(), ShapeProfileError> {
    let minima = inputs.iter().zip(profile).flat_map(|(input, shapes)| input.dims.iter().flatten().zip(&shapes.min));
    let empty = minima.into_iter().find_map(|(dim, size)| dim.wrongly_empty(*size));
    empty.map_or(Ok(()), |name| Err(ShapeProfileError::Empty { name: name.to_owned() }))
}

fn shape(input: &ValueInfo, dims: &[DimRange], which: usize) -> Result<Vec<u64>, ShapeProfileError> {
    let unnamed = || ShapeProfileError::Unnamed { input: input.name.clone() };
    let size = |name: &str| {
        let given = dims.iter().find(|dim| dim.name == name).map(|dim| dim.sizes[which]);
        given.or_else(|| name.parse().ok()).unwrap_or(0)
    };
    let sizes = input.dims.as_ref().ok_or_else(unnamed)?.iter().map(|dim| match dim {
        Dim::Fixed(size) => Ok(*size as u64),
        Dim::Symbolic(text) => Ok(terms(text).map(size).fold(0_u64, u64::saturating_add)),
        Dim::Unknown => Err(unnamed()),
    });
    sizes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::tensor_proto::DataType;

    fn input(name: &str, dims: &[&str]) -> ValueInfo {
        let dim = |text: &&str| text.parse().map_or_else(|_| Dim::Symbolic((*text).to_owned()), Dim::Fixed);
        ValueInfo { name: name.into(), data_type: DataType::Float, dims: Some(dims.iter().map(dim).collect()) }
    }

    fn sizes(texts: &[&str]) -> Vec<DimRange> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(sizes(&["batch=1:4:8"])[0].sizes, [1, 4, 8]);
        assert_eq!(sizes(&["past=0"])[0].sizes, [0; 3]);
        for wrong in
            ["", "batch", "batch=", "=1", "b=1:2", "b=2:1:3", "b=1:3:2", "b=-1:1:1", "b=1:2:3:4", "b=1:1:2147483648"]
        {
            assert!(wrong.parse::<DimRange>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn open_dimensions_are_named_once_in_order() {
        let inputs = [input("x", &["batch", "past + new", "4"]), input("y", &["new", "1 + k"])];
        assert_eq!(open_dims(&inputs), ["batch", "past", "new", "k"]);
    }

    #[test]
    fn sums_add_their_terms() {
        let inputs = [input("x", &["batch", "past + new", "4"]), input("y", &["new + 1"])];
        let found = shapes(&inputs, &sizes(&["batch=1:2:3", "past=0:5:9", "new=1:1:7"])).unwrap();
        assert_eq!((&found[0].min, &found[0].opt, &found[0].max), (&vec![1, 1, 4], &vec![2, 6, 4], &vec![3, 16, 4]));
        assert_eq!((&found[1].min, &found[1].max), (&vec![2], &vec![8]));
        assert!(found[0].hold(&[3, 16, 4]) && !found[0].is_fixed());
        for outside in [&[4, 16, 4][..], &[3, 17, 4], &[3, 0, 4], &[3, 16, 5], &[3, 16]] {
            assert!(!found[0].hold(outside), "{outside:?}");
        }
    }

    #[test]
    fn every_open_dimension_has_one_size() {
        let inputs = [input("x", &["batch", "new"])];
        let error = |texts: &[&str]| shapes(&inputs, &sizes(texts)).unwrap_err().to_string();
        assert_eq!(error(&["batch=1"]), "no size is given to new");
        assert_eq!(error(&["batch=1", "new=1", "old=1"]), "a size is given to the dimension `old`, which no input has");
        assert_eq!(error(&["batch=1", "new=1", "new=2"]), "the dimension `new` is given a size twice");
        assert_eq!(error(&["batch=0:1:1", "new=1"]), "a size of 0 is given to the dimension `batch`");
        let unnamed = ValueInfo { dims: Some(vec![Dim::Unknown]), ..input("z", &[]) };
        let error = shapes(&[unnamed], &[]).unwrap_err().to_string();
        assert_eq!(error, "input `z` has a dimension without a name, which cannot be given a size");
    }
}
