//! Shapes of inputs by name, as `trtexec` and Polygraphy take them, held against a model.

use std::{collections::BTreeMap, str::FromStr};

use super::{
    InputShapes, ShapeProfile, ShapeProfileError,
    profile::{MOST, nothing_is_empty},
};
use crate::onnx::read::{Dim, ValueInfo, dims_text, terms};

/// Shapes by the names of inputs, in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeList(Vec<(String, Vec<u64>)>);

impl FromStr for ShapeList {
    type Err = String;

    /// Reads `NAME:1x16,OTHER:1x1x64`; `NAME:[1,16]` and quotes around a name are taken too.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut shapes: Vec<(String, Vec<u64>)> = Vec::new();
        for part in split(text) {
            let (name, shape) = named_shape(part)?;
            if shapes.iter().any(|(known, _)| *known == name) {
                return Err(format!("`{name}` has two shapes"));
            }
            shapes.push((name, shape));
        }
        Ok(Self(shapes))
    }
}

/// Parts between commas that stand in no brackets.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    text.split(move |letter| {
        match letter {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    })
}

fn named_shape(text: &str) -> Result<(String, Vec<u64>), String> {
    let expected = || format!("expected NAME:SIZExSIZE, such as input_ids:1x128, found {text:?}");
    let (name, sizes) = text.trim().rsplit_once(':').ok_or_else(expected)?;
    let unquoted = ['\'', '"'].into_iter().find_map(|quote| name.strip_prefix(quote)?.strip_suffix(quote));
    let (name, separator, sizes) = match sizes.strip_prefix('[').and_then(|sizes| sizes.strip_suffix(']')) {
        Some(inside) => (unquoted.unwrap_or(name), ',', inside),
        None => (unquoted.unwrap_or(name), 'x', sizes),
    };
    let size = |size: &str| size.trim().parse().ok().filter(|size| *size <= MOST);
    let sizes: Option<Vec<u64>> = match sizes.trim() {
        "" => Some(Vec::new()),
        sizes => sizes.split(separator).map(size).collect(),
    };
    match sizes {
        Some(sizes) if !name.is_empty() => Ok((name.to_owned(), sizes)),
        _ => Err(expected()),
    }
}

impl ShapeList {
    fn of(&self, input: &str) -> Option<&Vec<u64>> {
        self.0.iter().find(|(name, _)| name == input).map(|(_, shape)| shape)
    }
}

/// The shapes of every input of a model whose smallest, most frequent and largest shapes are `lists`, each with the
/// option that gave it. Inputs without open dimensions may be left out.
///
/// # Errors
///
/// Where a name is unknown, an input with open dimensions is left out, a shape is none of the input's, the three do not
/// ascend, one dimension of the model has two sizes, or another than those of the past may be of 0.
pub fn listed_shapes(inputs: &[ValueInfo], lists: [(&str, &ShapeList); 3]) -> Result<ShapeProfile, ShapeProfileError> {
    let named = lists.iter().flat_map(|(option, list)| list.0.iter().map(move |(name, _)| (option, name)));
    if let Some((option, name)) = named.into_iter().find(|(_, name)| inputs.iter().all(|input| input.name != **name)) {
        return Err(refused(inputs, format!("{option} names the input `{name}`, which the model does not have")));
    }
    let mut found = Vec::with_capacity(inputs.len());
    for input in inputs {
        let mut shapes = [const { Vec::new() }; 3];
        for (place, (option, list)) in lists.into_iter().enumerate() {
            shapes[place] = match (list.of(&input.name), fixed(input)) {
                (Some(shape), _) => checked(inputs, input, shape, option)?,
                (None, Some(shape)) => shape,
                (None, None) => {
                    return Err(refused(inputs, format!("{option} lacks the input `{}`", input.name)));
                }
            };
        }
        ascend(inputs, input, &shapes)?;
        let [min, opt, max] = shapes;
        found.push(InputShapes { name: input.name.clone(), min, opt, max });
    }
    for (which, (option, _)) in lists.into_iter().enumerate() {
        agree(inputs, &found, which, option)?;
    }
    nothing_is_empty(inputs, &found)?;
    Ok(found)
}

fn refused(inputs: &[ValueInfo], why: String) -> ShapeProfileError {
    let described = |input: &ValueInfo| format!("{} {}", input.name, taken_shape(input));
    ShapeProfileError::Shapes { why, inputs: inputs.iter().map(described).collect::<Vec<_>>().join(", ") }
}

/// The shape of an input that leaves nothing open.
fn fixed(input: &ValueInfo) -> Option<Vec<u64>> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => Some(*size as u64),
        _ => None,
    };
    input.dims.as_ref()?.iter().map(size).collect()
}

fn taken_shape(input: &ValueInfo) -> String {
    input.dims.as_deref().map_or_else(|| "of unknown rank".to_owned(), dims_text)
}

fn shape_text(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

/// `shape`, where its rank and fixed sizes are those of the input.
fn checked(
    inputs: &[ValueInfo],
    input: &ValueInfo,
    shape: &[u64],
    option: &str,
) -> Result<Vec<u64>, ShapeProfileError> {
    let fits = |(dim, size): (&Dim, &u64)| !matches!(dim, Dim::Fixed(fixed) if *fixed as u64 != *size);
    let is_its_own =
        input.dims.as_ref().is_none_or(|dims| dims.len() == shape.len() && dims.iter().zip(shape).all(fits));
    if is_its_own {
        return Ok(shape.to_vec());
    }
    let (name, given, dims) = (&input.name, shape_text(shape), taken_shape(input));
    Err(refused(inputs, format!("{option} gives the input `{name}` the shape {given}, and the model says {dims}")))
}

fn ascend(inputs: &[ValueInfo], input: &ValueInfo, [min, opt, max]: &[Vec<u64>; 3]) -> Result<(), ShapeProfileError> {
    let ascends =
        |low: &[u64], high: &[u64]| low.len() == high.len() && low.iter().zip(high).all(|(low, high)| low <= high);
    if ascends(min, opt) && ascends(opt, max) {
        return Ok(());
    }
    let [min, opt, max] = [min, opt, max].map(|shape| shape_text(shape));
    let why = format!("the shapes {min}, {opt} and {max} of the input `{}` do not ascend", input.name);
    Err(refused(inputs, why))
}

/// That each name of a dimension stands for one size in the shapes of all inputs, and each sum for the sum of its
/// terms.
fn agree(inputs: &[ValueInfo], found: &[InputShapes], which: usize, option: &str) -> Result<(), ShapeProfileError> {
    let mut dims = Vec::new();
    for (input, shapes) in inputs.iter().zip(found) {
        let sizes = [&shapes.min, &shapes.opt, &shapes.max][which];
        for (dim, size) in input.dims.iter().flatten().zip(sizes) {
            if let Dim::Symbolic(text) = dim {
                dims.push((text.as_str(), *size, input.name.as_str()));
            }
        }
    }
    // Sums come last, and those of more terms after those of fewer, so that most terms are known by then.
    dims.sort_by_key(|(text, ..)| terms(text).count());
    let mut known: BTreeMap<&str, u64> = BTreeMap::new();
    for (text, size, input) in dims {
        let value = |term: &str| term.parse().ok().or_else(|| known.get(term).copied());
        let unknown: Vec<&str> = terms(text).filter(|term| value(term).is_none()).collect();
        let sum = terms(text).filter_map(value).fold(0, u64::saturating_add);
        match unknown.as_slice() {
            [] if sum == size => {}
            [one] if sum <= size => {
                known.insert(one, size - sum);
            }
            [] | [_] => {
                let why = format!(
                    "{option} gives the dimension `{text}` of the input `{input}` the size {size}, and other inputs say {sum}"
                );
                return Err(refused(inputs, why));
            }
            // What two unknown terms make together is not held against anything.
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::tensor_proto::DataType;

    fn input(name: &str, dims: &[&str]) -> ValueInfo {
        let dim = |text: &&str| match text.parse() {
            Ok(size) => Dim::Fixed(size),
            Err(_) if *text == "?" => Dim::Unknown,
            Err(_) => Dim::Symbolic((*text).to_owned()),
        };
        ValueInfo { name: name.into(), data_type: DataType::Float, dims: Some(dims.iter().map(dim).collect()) }
    }

    fn decoder() -> Vec<ValueInfo> {
        vec![
            input("mask", &["batch", "past + new"]),
            input("ids", &["batch", "new"]),
            input("past", &["batch", "2", "past", "8"]),
            input("table", &["4"]),
        ]
    }

    const GOOD: [&str; 3] = [
        "ids:1x1,mask:1x1,past:1x2x0x8",
        "mask:[4, 33],ids:[4,1],'past':4x2x32x8",
        "ids:8x16,mask:8x80,past:8x2x64x8,table:4",
    ];

    fn shapes(texts: [&str; 3]) -> Result<ShapeProfile, ShapeProfileError> {
        let [min, opt, max] = texts.map(|text| text.parse::<ShapeList>().unwrap());
        listed_shapes(&decoder(), [("--min", &min), ("--opt", &opt), ("--max", &max)])
    }

    #[test]
    fn shapes_are_read_as_trtexec_and_polygraphy_write_them() {
        let list = |text: &str| text.parse::<ShapeList>().map(|list| list.0);
        let of = |name: &str, shape: &[u64]| (name.to_owned(), shape.to_vec());
        assert_eq!(list("x:1x2,y:3"), Ok(vec![of("x", &[1, 2]), of("y", &[3])]));
        assert_eq!(list("x:[1, 2],y:[3],z:[]"), Ok(vec![of("x", &[1, 2]), of("y", &[3]), of("z", &[])]));
        assert_eq!(
            list("x:0:1x2,\"a,b\":7"),
            Err(r#"expected NAME:SIZExSIZE, such as input_ids:1x128, found "\"a""#.into())
        );
        assert_eq!(list("'x:0':1x2"), Ok(vec![of("x:0", &[1, 2])]));
        for wrong in ["", "x", "x:1x", "x:axb", "x:-1", ":1", "x:1,,y:2", "x:1x2147483648", "x:[1x2]", "x:1;2"] {
            assert!(list(wrong).is_err(), "{wrong}");
        }
        assert_eq!(list("x:1,x:2"), Err("`x` has two shapes".into()));
    }

    #[test]
    fn shapes_of_a_model_are_taken() {
        let found = shapes(GOOD).unwrap();
        assert_eq!(found.iter().map(|input| input.name.as_str()).collect::<Vec<_>>(), ["mask", "ids", "past", "table"]);
        assert_eq!((&found[0].min, &found[0].opt, &found[0].max), (&vec![1, 1], &vec![4, 33], &vec![8, 80]));
        assert_eq!(found[2].max, [8, 2, 64, 8]);
        assert!(found[3].is_fixed());
    }

    #[test]
    fn shapes_that_are_not_the_models_are_refused() {
        let all = "mask [batch, past + new], ids [batch, new], past [batch, 2, past, 8], table [4]";
        for (which, text, expected) in [
            (0, "ids:1x1,mask:1x1", "--min lacks the input `past`"),
            (1, "idz:1x1", "--opt names the input `idz`, which the model does not have"),
            (
                2,
                "ids:8,mask:8x80,past:8x2x64x8",
                "--max gives the input `ids` the shape 8, and the model says [batch, new]",
            ),
            (0, "ids:1x1,mask:1x1,past:1x3x0x8", "`past` the shape 1x3x0x8, and the model says [batch, 2, past, 8]"),
            (2, "ids:8x16,mask:8x80,past:8x2x64x8,table:5", "`table` the shape 5, and the model says [4]"),
            (0, "ids:5x1,mask:5x1,past:5x2x0x8", "the shapes 5x1, 4x33 and 8x80 of the input `mask` do not ascend"),
            (
                2,
                "ids:9x16,mask:8x80,past:8x2x64x8",
                "--max gives the dimension `batch` of the input `ids` the size 9, and other inputs say 8",
            ),
            (
                2,
                "ids:8x16,mask:8x81,past:8x2x64x8",
                "--max gives the dimension `past + new` of the input `mask` the size 81, and other inputs say 80",
            ),
        ] {
            let mut texts = GOOD;
            texts[which] = text;
            let Err(ShapeProfileError::Shapes { why, inputs }) = shapes(texts) else { panic!("{text} is taken") };
            assert!(why.contains(expected), "{text}: {why}");
            assert_eq!(inputs, all);
        }
    }

    #[test]
    fn only_the_past_may_be_empty() {
        let mut texts = GOOD;
        texts[0] = "ids:0x1,mask:0x1,past:0x2x0x8";
        assert_eq!(shapes(texts).unwrap_err().to_string(), "a size of 0 is given to the dimension `batch`");
    }

    #[test]
    fn a_sum_tells_its_only_unknown_term() {
        let inputs = [input("long", &["a + b"]), input("b", &["b"]), input("again", &["a + 1"])];
        let of = |text: &str| {
            let list: ShapeList = text.parse().unwrap();
            listed_shapes(&inputs, [("--opt", &list); 3]).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(of("long:7,b:3,again:5"), Ok(()));
        assert!(of("long:7,b:3,again:6").unwrap_err().contains("the size 6, and other inputs say 5"));
        assert!(of("long:2,b:3,again:1").unwrap_err().contains("the size 2, and other inputs say 3"));
        // Unnamed dimensions take what they are given.
        let list: ShapeList = "x:3".parse().unwrap();
        assert!(listed_shapes(&[input("x", &["?"])], [("--opt", &list); 3]).is_ok());
    }
}
