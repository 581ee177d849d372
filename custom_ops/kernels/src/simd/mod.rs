//! Small matrix products and row functions, in the widest instructions that the processor has.
//!
//! `product` is the door to the products: it proves every slice before a microkernel touches it. `lanes` holds the row
//! functions, `sticks` that of stick-breaking, `activations` those of hidden rows; they are written once and compiled
//! for each of the `levels`. Every element of a product is one chain of adds in rising order of the inner index, of
//! blocks of it where rows are quantized, whatever the size of the block that it is computed in.
//!
//! `avx512`, `avx2` and `neon` are the microkernels, `partial_vectors` what some of them do at ragged ends.
//!
//! `few_keys` and `few_slots` are the doors to the attention of one token to few keys, and of few slots to many;
//! `past_caches` is that to copies that the caches do not keep.
//!
//! `rounded_rows` is the door to rows that are rounded: `pairs` to bf16, `quantized` to int8, which `vnni`,
//! `avx2_integers` and `neon_integers` multiply.
//! `packable` makes elements of weights.
//!
//! `widened` is the door to panels that are widened for many blocks of rows.
//!
//! `compact` packs bf16 in 12 bits. It is the door to products of few rows with such panels, which `avx512_compact`
//! makes, and to panels that are unpacked for many.
//!
//! `tiles` is the door to products of many rows on AMX tiles: `pairs_on_tiles` has those with weights of one part,
//! `rounded_tiles` those of rows that are rounded. `strip_softmax` is the door to attention on them. `amx` asks for
//! tiles and proves bounds, `amx_split` cuts f32 into bf16 parts or rounds it, `amx_blocks` and `amx_rounded` multiply
//! these in `amx_steps`, `amx_softmax` stands between these products, `known_rows` knows what was split last.

mod activations;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
#[allow(unsafe_code)]
mod amx;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod amx_blocks;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod amx_rounded;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod amx_softmax;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod amx_split;
#[cfg(target_arch = "x86_64")]
mod amx_steps;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2_integers;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2_nibbles;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2_softmax;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512_compact;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512_softmax;
#[allow(unsafe_code)]
pub(crate) mod compact;
mod element;
#[allow(unsafe_code)]
mod few_keys;
#[allow(unsafe_code)]
mod few_slots;
mod habits;
mod known_rows;
mod lanes;
mod levels;
#[cfg(all(feature = "measure", target_arch = "x86_64"))]
#[allow(unsafe_code)]
pub(crate) mod limits;
pub(crate) mod magnitudes;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code)]
mod neon;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code)]
mod neon_integers;
#[allow(unsafe_code)]
mod nibbles;
mod one_token;
mod packable;
#[allow(unsafe_code)]
pub(crate) mod pairs;
mod pairs_on_tiles;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
#[allow(unsafe_code)]
mod partial_vectors;
#[allow(unsafe_code)]
mod past_caches;
#[allow(unsafe_code)]
mod portable;
mod product;
pub(crate) mod quantized;
mod rounded_rows;
mod rounded_tiles;
mod sticks;
pub(crate) mod strip_softmax;
#[allow(unsafe_code)]
pub(crate) mod tiles;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod vnni;
#[allow(unsafe_code)]
pub(crate) mod widened;

pub(crate) use element::Element;
pub(crate) use few_keys::FewKeys;
pub(crate) use few_slots::FewSlots;
pub(crate) use known_rows::Epoch;
pub(crate) use nibbles::Nibbles;
pub(crate) use one_token::OneToken;
pub(crate) use packable::{Packable, Place};
pub(crate) use past_caches::copy_past_caches;
pub(crate) use product::{Ahead, Left, Memory, Product, Right, Write, are_integers, panels_at_once};
pub(crate) use rounded_rows::{Form, RoundedRows, StepOrder, with_rounded};

use habits::{Habits, Streams};

/// Rows of the largest block that one microkernel call computes.
pub(crate) const ROWS: usize = 12;

/// Elements of the widest vector.
pub(crate) const LANES: usize = 16;

/// Columns of a panel of packed weights.
pub(crate) const PANEL: usize = 2 * LANES;

/// Most rows that one call multiplies with several panels.
const FEW_ROWS: usize = 3;

/// Panels that one call multiplies with so few rows.
const ROW_PANELS: usize = 4;

/// Panels that one call multiplies with a single row, where vectors have 8 lanes or 4.
const ROW_PANELS_OF_NARROW: usize = 2;

/// Instructions that the kernels may use; the processor decides where it has fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Instructions {
    /// What the compiler makes of plain arithmetic for every processor of the architecture.
    Portable,
    /// NEON, which every aarch64 has.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX_VNNI for rows that are rounded to int8, besides AVX2, FMA and F16C.
    AvxVnni,
    /// AVX-512 F and DQ, besides AVX2, FMA and F16C.
    Avx512,
    /// AMX tiles of bf16 for products of many rows, besides AVX-512 F, BW and DQ, and AVX512_BF16.
    #[default]
    Amx,
}

impl Instructions {
    /// Every level, in the order of [`moa_schema::INSTRUCTION_LEVELS`].
    const ALL: [Self; moa_schema::INSTRUCTION_LEVELS.len()] =
        [Self::Portable, Self::Neon, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Amx];

    /// The level of this name.
    pub fn named(name: &str) -> Option<Self> {
        let index = moa_schema::INSTRUCTION_LEVELS.iter().position(|level| *level == name)?;
        Some(Self::ALL[index])
    }
}

/// A level of instructions that this processor has, how it uses them, and what it rounds; NEON on aarch64 alone, and
/// what is wider on x86-64 alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Isa(Instructions, Habits, Rounding);

/// What factors of products are rounded to, but those of the router; rows are rounded by an [`Isa`] alone whose
/// processor has the instructions to multiply them, but in tests that do so in plain arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rounding {
    /// Of what is multiplied with weights: bf16 where these are bf16, or int8 where they are integers; bf16 on tiles.
    rows: Form,
    /// Whether queries, keys, weights of keys, and values are bf16; with tiles, on these alone.
    attention: bool,
}

impl Rounding {
    const NONE: Self = Self { rows: Form::Values, attention: false };
}

impl Isa {
    /// The widest level that the processor has, at most `limit`.
    pub(crate) fn at_most(limit: Instructions) -> Self {
        let habits = habits::known();
        #[cfg(target_arch = "x86_64")]
        {
            let fused = is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx2 = is_x86_feature_detected!("avx2") && fused;
            let avx512 = avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq");
            if avx512 && limit >= Instructions::Amx && amx::available() {
                return Self(Instructions::Amx, habits, Rounding::NONE);
            }
            if avx512 && limit >= Instructions::Avx512 {
                return Self(Instructions::Avx512, habits, Rounding::NONE);
            }
            if avx2 && limit >= Instructions::AvxVnni && is_x86_feature_detected!("avxvnni") {
                return Self(Instructions::AvxVnni, habits, Rounding::NONE);
            }
            if avx2 && limit >= Instructions::Avx2 {
                return Self(Instructions::Avx2, habits, Rounding::NONE);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if limit >= Instructions::Neon {
            return Self(Instructions::Neon, habits, Rounding::NONE);
        }
        let _ = limit;
        Self(Instructions::Portable, habits, Rounding::NONE)
    }

    /// Whether a single row takes far weights in one stream.
    pub(crate) fn reads_one_stream(self) -> bool {
        self.1.streams == Streams::One
    }

    /// Whether vectors have 16 lanes.
    pub(crate) fn has_wide_vectors(self) -> bool {
        self.0 >= Instructions::Avx512
    }

    /// Whether 16 lanes are multiplied at once and not in two passes: such products wait for memory sooner.
    pub(crate) fn multiplies_whole_vectors(self) -> bool {
        self.has_wide_vectors() && !self.1.two_passes
    }

    /// Whether vectors have 8 lanes or 4, so that blocks which stay in registers have few rows.
    pub(crate) fn has_narrow_vectors(self) -> bool {
        matches!(self.0, Instructions::Neon | Instructions::Avx2 | Instructions::AvxVnni)
    }

    /// The same without tiles. Rows that tiles would have rounded to bf16 stay f32 where vectors gain nothing by it.
    pub(crate) fn without_tiles(self) -> Self {
        if !self.has_tiles() {
            return self;
        }
        let vectors = Self(Instructions::Avx512, self.1, Rounding::NONE);
        let vectors = match self.form() {
            Form::Values => vectors,
            Form::Pairs => vectors.rounding(),
            form => vectors.quantizing().quantizing_to(form),
        };
        if self.2.attention { vectors } else { vectors.keeping_attention() }
    }

    /// The same, by which factors are rounded to bf16 where that makes products faster.
    pub(crate) fn rounding(self) -> Self {
        #[cfg(target_arch = "x86_64")]
        if self.has_tiles()
            || self.0 == Instructions::Avx512 && self.1.doubles_pairs && is_x86_feature_detected!("avx512bf16")
        {
            return Self(self.0, self.1, Rounding { rows: Form::Pairs, attention: true });
        }
        self
    }

    /// The same, by which rows are quantized where the processor multiplies integers, and rounded to bf16 where they
    /// go to AMX tiles; attention is that of [`Self::rounding`]. With AVX2 alone int8 is faster without.
    pub(crate) fn quantizing(self) -> Self {
        #[cfg(target_arch = "x86_64")]
        if self.has_wide_vectors() && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni") {
            let attention = self.rounding().2.attention;
            return Self(self.0, self.1, Rounding { rows: Form::OF_INT8, attention });
        }
        match self.0 {
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                Self(self.0, self.1, Rounding { rows: Form::OF_INT8, attention: false })
            }
            Instructions::AvxVnni => Self(self.0, self.1, Rounding { rows: Form::OF_INT8, attention: false }),
            Instructions::Avx2 => Self(self.0, self.1, Rounding { rows: Form::OF_INT4, attention: false }),
            _ => self,
        }
    }

    /// The same, by which rows are quantized and then multiplied as every processor can.
    #[cfg(test)]
    pub(crate) fn quantizing_in_plain_arithmetic(self) -> Self {
        Self(Instructions::Portable, self.1, Rounding { rows: Form::OF_INT8, ..Rounding::NONE })
    }

    /// The same, by which no factor is rounded.
    pub(crate) fn keeping_rows(self) -> Self {
        Self(self.0, self.1, Rounding::NONE)
    }

    /// The same, by which the factors are rounded that `other` rounds.
    pub(crate) fn rounding_as(self, other: Self) -> Self {
        Self(self.0, self.1, other.2)
    }

    /// The same, by which no factor of attention is rounded.
    pub(crate) fn keeping_attention(self) -> Self {
        Self(self.0, self.1, Rounding { attention: false, ..self.2 })
    }

    /// The same, to `form`, where it quantizes to that.
    pub(crate) fn quantizing_to(self, form: Form) -> Self {
        if self.quantizes_to(form) { Self(self.0, self.1, Rounding { rows: form, ..self.2 }) } else { self }
    }

    /// The form that rows are rounded to.
    pub(crate) fn form(self) -> Form {
        self.2.rows
    }

    /// Whether rows are rounded where weights are bf16.
    pub(crate) fn rounds(self) -> bool {
        self.form() == Form::Pairs
    }

    /// Whether rows are quantized to `form` where weights want that.
    pub(crate) fn quantizes_to(self, form: Form) -> bool {
        self.form().is_quantized() && form.is_quantized() && (form == Form::OF_INT4 || self.0 != Instructions::Avx2)
    }

    /// Whether rows are rounded to bf16 that tiles multiply with weights which want `form` on vectors.
    pub(crate) fn rounds_on_tiles(self, form: Form) -> bool {
        self.has_tiles()
            && match self.form() {
                Form::Values => false,
                Form::Pairs => form == Form::Pairs,
                Form::Quantized(_) => form.is_quantized(),
            }
    }

    /// Whether factors of attention on vectors are rounded.
    pub(crate) fn rounds_attention(self) -> bool {
        self.2.attention && !self.has_tiles()
    }

    /// Parts of a factor of attention on tiles: one where it is rounded.
    pub(crate) fn parts_of_attention(self) -> usize {
        if self.2.attention { 1 } else { tiles::PARTS }
    }

    /// Whether pairs of bf16 are multiplied by AVX512_BF16.
    fn multiplies_pairs(self) -> bool {
        self.rounds() || self.rounds_attention()
    }

    /// Whether products of many rows go to tiles.
    pub(crate) fn has_tiles(self) -> bool {
        self.0 == Instructions::Amx
    }
}

/// Every level that the processor has, and with AVX-512 every way to read.
#[cfg(test)]
pub(crate) fn every_isa() -> Vec<Isa> {
    let levels = Instructions::ALL.map(Isa::at_most);
    let ways = [Streams::Several, Streams::One];
    let way = |level: &Isa, streams| Isa(level.0, Habits { streams, ..level.1 }, level.2);
    let mut all: Vec<Isa> = levels.iter().flat_map(|level| ways.map(|streams| way(level, streams))).collect();
    all.retain(|isa| isa.0 >= Instructions::Avx512 || isa.1.streams == Streams::Several);
    all.dedup();
    all
}

/// Those of [`every_isa`] that serve something; where none does, a word about what is `missing`.
#[cfg(test)]
pub(crate) fn every_isa_where(serves: impl Fn(Isa) -> bool, missing: &str) -> Vec<Isa> {
    let found: Vec<Isa> = every_isa().into_iter().filter(|isa| serves(*isa)).collect();
    if found.is_empty() {
        crate::skip::skip(missing);
    }
    found
}

#[cfg(all(test, target_arch = "aarch64"))]
mod tests {
    use super::*;

    #[test]
    fn a_limit_gives_what_it_bounds() {
        let levels = Instructions::ALL.map(|limit| Isa::at_most(limit).0);
        assert_eq!(levels[..2], [Instructions::Portable, Instructions::Neon]);
        assert_eq!(levels[2..], [Instructions::Neon; 4]);
    }
}
