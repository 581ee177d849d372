//! Names of initializers that are made of a tensor of the checkpoint, or of none.

use moa_schema::{FloatType, IntegerType};

const TURNED: &str = "/transposed.";
const RESHAPED: &str = "/reshaped.";
const SCALE: &str = "/scale";
const SINUSOIDS: &str = ".sinusoids";
const ROTARY: &str = "rotary.";

/// The types that a tensor may be written in beside its first.
const FLOATS: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

/// Of the tensor `name` with its axes reordered.
pub fn turned(name: &str, permutation: &[usize]) -> String {
    let order: Vec<_> = permutation.iter().map(ToString::to_string).collect();
    format!("{name}{TURNED}{}", order.concat())
}

/// Of the tensor `name` under another shape.
pub fn reshaped(name: &str, shape: &[usize]) -> String {
    let dims: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("{name}{RESHAPED}{}", dims.join("x"))
}

/// Of the tensor `name` in another type than its first.
pub fn of_type(name: &str, float: FloatType) -> String {
    format!("{name}/{float}")
}

/// Of the matrix `name` in integers.
pub fn in_integers(name: &str, integers: IntegerType) -> String {
    format!("{name}/{integers}")
}

/// Of the scales that go with [`in_integers`].
pub fn scale(name: &str) -> String {
    format!("{name}{SCALE}")
}

/// Of a table of sinusoids of positions, which belongs to the embedding of positions `name`.
pub fn sinusoids(name: &str) -> String {
    format!("{name}{SINUSOIDS}")
}

/// Of the table `name` of a rotary embedding.
pub fn rotary(name: &str) -> String {
    format!("{ROTARY}{name}")
}

/// Name of the tensor that the initializer `name` is made of.
pub fn stored(name: &str) -> &str {
    let without = |name, types: &[String]| {
        let mut endings = types.iter().map(String::as_str);
        endings.find_map(|ending| str::strip_suffix(name, ending)).unwrap_or(name)
    };
    let name = without(name, &IntegerType::ALL.map(|integers| in_integers("", integers)));
    let end = [TURNED, RESHAPED].iter().filter_map(|suffix| name.find(suffix)).min();
    without(end.map_or(name, |end| &name[..end]), &FLOATS.map(|float| of_type("", float)))
}

/// The names of which one is that of the matrix that the scales `name` go with; `None` where they are no [`scale`].
pub fn scaled(name: &str) -> Option<[String; IntegerType::ALL.len()]> {
    let matrix = name.strip_suffix(SCALE)?;
    Some(IntegerType::ALL.map(|integers| in_integers(matrix, integers)))
}

/// Whether an initializer is computed from sizes alone, and was not trained.
pub fn is_table(name: &str) -> bool {
    stored(name).ends_with(SINUSOIDS) || name.starts_with(ROTARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "a.weight";

    #[test]
    fn a_weight_has_one_name_however_it_is_written() {
        let turned_of = |name: &str| turned(name, &[1, 0]);
        let in_half = of_type(NAME, FloatType::F16);
        for (derived, expected) in [
            (NAME.to_owned(), "a.weight"),
            (turned_of(NAME), "a.weight/transposed.10"),
            (reshaped(NAME, &[6, 4]), "a.weight/reshaped.6x4"),
            (of_type(NAME, FloatType::F32), "a.weight/float32"),
            (of_type(NAME, FloatType::Bf16), "a.weight/bfloat16"),
            (turned_of(&in_half), "a.weight/float16/transposed.10"),
            (in_integers(NAME, IntegerType::Int8), "a.weight/int8"),
            (in_integers(&turned(NAME, &[0, 2, 1]), IntegerType::Int4), "a.weight/transposed.021/int4"),
        ] {
            assert_eq!((derived.as_str(), stored(&derived), is_table(&derived)), (expected, NAME, false));
        }
    }

    #[test]
    fn scales_lead_to_their_matrix() {
        let matrix = turned(NAME, &[1, 0]);
        for integers in IntegerType::ALL {
            assert!(scaled(&scale(&matrix)).unwrap().contains(&in_integers(&matrix, integers)), "{integers}");
        }
        assert_eq!((scale(NAME).as_str(), scaled(NAME)), ("a.weight/scale", None));
    }

    #[test]
    fn tables_are_known_in_every_type() {
        let table = sinusoids("encoder.embed_positions");
        let tables = [(table.clone(), "encoder.embed_positions.sinusoids"), (rotary("cos_cache"), "rotary.cos_cache")];
        for (name, expected) in tables {
            assert_eq!((name.as_str(), is_table(&name)), (expected, true));
        }
        assert!(is_table(&of_type(&table, FloatType::F16)));
    }
}
