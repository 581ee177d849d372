//! The block of parameters that every kernel takes, by value, as its only argument.
//!
//! The table below is the one place where its fields are written down: [`c_header`] makes the C++ structure of it
//! (`kernels/parameters.cuh`, compared by a test), [`Parameters::bytes`] its bytes. Pointers come first, so that the
//! structure has no padding.

use std::fmt::Write;

/// Where a pointer of a launch points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Buffer {
    /// Nowhere: the null pointer.
    #[default]
    Null,
    /// Input `i` of the operator, in the order of the schema; null where it is absent.
    Input(usize),
    /// Output `i` of the operator, in the order of the schema; null where nobody asks for it.
    Output(usize),
    /// This many bytes into the workspace; a multiple of [`crate::WORKSPACE_ALIGNMENT`].
    Workspace(usize),
    /// A `u32` that kernels only ever set bits in ([`crate::Fault`]); may be null.
    Status,
}

macro_rules! parameters {
    (
        pointers { $($pointer:ident: $ctype:literal, $pointer_doc:literal;)* }
        integers { $($integer:ident, $integer_doc:literal;)* }
        floats { $($float:ident, $float_doc:literal;)* }
    ) => {
        /// One launch's parameters; symbols as in the schema, `N = B * T`, `w` the width of one expert's rows.
        #[derive(Debug, Clone, Copy, PartialEq, Default)]
        pub struct Parameters {
            $(#[doc = $pointer_doc] pub $pointer: Buffer,)*
            $(#[doc = $integer_doc] pub $integer: i32,)*
            $(#[doc = $float_doc] pub $float: f32,)*
        }

        impl Parameters {
            /// Bytes that a kernel takes, whole words of 8.
            pub const BYTES: usize = {
                let words = [$(stringify!($pointer)),*].len();
                let halves = [$(stringify!($integer),)* $(stringify!($float)),*].len();
                (8 * words + 4 * halves).next_multiple_of(8)
            };

            /// Every pointer with its name.
            pub fn pointers(&self) -> Vec<(&'static str, Buffer)> {
                vec![$((stringify!($pointer), self.$pointer)),*]
            }

            /// The bytes that the kernel takes; `address` gives the device address of a buffer, 0 for null.
            ///
            /// Kernels load vectors of 16 bytes only where every address allows it.
            pub fn bytes(&self, mut address: impl FnMut(Buffer) -> u64) -> [u8; Self::BYTES] {
                let mut addresses = [$(self.$pointer),*]
                    .map(|buffer| if buffer == Buffer::Null { 0 } else { address(buffer) });
                let aligned = addresses.iter_mut().all(|address| address.is_multiple_of(16));
                let mut own = *self;
                own.vectors &= i32::from(aligned || self.only_status_is_unaligned(&addresses));
                let mut bytes = [0; Self::BYTES];
                let (words, _) = bytes.as_chunks_mut::<8>();
                let mut words = words.iter_mut();
                addresses.iter().zip(words.by_ref()).for_each(|(address, word)| *word = address.to_le_bytes());
                let (halves, _) = words.into_slice().as_flattened_mut().as_chunks_mut::<4>();
                let own = [$(own.$integer.to_le_bytes(),)* $(own.$float.to_le_bytes()),*];
                halves.iter_mut().zip(own).for_each(|(half, own)| *half = own);
                bytes
            }
        }

        fn fields(header: &mut String) {
            $(field(header, $ctype, stringify!($pointer), $pointer_doc);)*
            $(field(header, "int ", stringify!($integer), $integer_doc);)*
            $(field(header, "float ", stringify!($float), $float_doc);)*
        }
    };
}

parameters! {
    pointers {
        hidden_states: "const void *", "`[N, C]`.";
        router_weight: "const float *", "`[C, E]`.";
        query_mask: "const int *", "Row `b` begins at `b * query_mask_stride + query_mask_offset`.";
        key_mask: "const int *", "`[B, S]`.";
        input_weight: "const void *", "`[E, C, input_columns]`: queries, or the first matrix of a feed-forward expert.";
        kv_weight: "const void *", "`[C, 2 * w]`, keys first.";
        output_weight: "const void *", "`[E, w, C]`.";
        output_bias: "const void *", "`[C]`, or null.";
        past_key: "const void *", "`[B, G, past_rows, D]`: the past is the first `P` rows.";
        past_value: "const void *", "`[B, G, past_rows, D]`, the same of values.";
        cos_cache: "const float *", "`[rotary_positions, D / 2]`.";
        sin_cache: "const float *", "`[rotary_positions, D / 2]`.";
        position_ids: "const long long *", "`[N]`.";
        output: "void *", "`[N, C]`.";
        topk_indices: "long long *", "`[N, k]`, or null.";
        topk_weights: "float *", "`[N, k]`, or null.";
        key: "void *", "`[B, G, key_rows, D]`: the last `rows_behind` rows begin with the keys behind the past.";
        value: "void *", "`[B, G, value_rows, D]`, the same of values.";
        rows: "void *", "`[N, E, w]` where every expert is computed, else `[N, k, w]`: queries or hidden rows.";
        attended: "void *", "`[N, k, w]` times gate; slots by rising expert.";
        partial_rows: "void *", "`[N, k, C]` products of single slots, or `[output_splits, N, C]` f32.";
        partial_attention: "float *", "For every row and split: maximum, sum, `D` values.";
        slots: "unsigned char *", "`[E, N]`: slot of a token's expert, 255 where it is not chosen.";
        pair_experts: "int *", "`[N, k]`, rising; -1 for a token that is routed nowhere.";
        pair_gates: "float *", "`[N, k]`, in the order of `pair_experts`.";
        expert_pairs: "int *", "`[E, N]`: the pairs `token * k + slot` of each expert, rising.";
        expert_counts: "int *", "`[E]`.";
        tickets: "unsigned *", "`[tickets_count]`, set to 0 by the first launch.";
        status: "unsigned *", "Bits of `Fault`, or null.";
    }
    integers {
        batch, "`B`.";
        tokens, "`T`.";
        past, "`P`.";
        keys, "`S`.";
        past_rows, "`P`, or the capacity `M` of caches that are updated in place.";
        key_rows, "`S` where the past is copied into `key`, `M` where `key` is `past_key`, else the keys behind the past.";
        value_rows, "The same of `value`.";
        rows_behind, "Rows of `key` and of `value` behind the past: `T`, or `M - P` where they are updated in place.";
        width, "`C`.";
        experts, "`E`.";
        top_k, "`k`.";
        kv_heads, "`G`; 1 in a feed-forward layer.";
        head, "`D`; `F` in a feed-forward layer.";
        columns, "`w = G * D`.";
        input_columns, "`w`, or `2 * w` where gated.";
        rotary_positions, "Rows of the rotary caches, 0 where nothing is rotated.";
        query_mask_stride, "Elements from one row of the query mask to the next.";
        query_mask_offset, "Elements in front of the first query.";
        gate_mode, "Place in `GateMode::ALL`.";
        activation, "Place in `ACTIVATIONS`, -1 in an attention layer.";
        gated, "Whether `input_weight` holds two blocks of columns.";
        causal, "Whether query `i` sees the keys `0 ..= P + i` only.";
        skip_padded, "Whether a token whose query mask is 0 is routed nowhere.";
        vectors, "Whether every row of `hidden_states`, of matrices and of caches begins at a multiple of 16 bytes; rows of `router_weight`, of `router_input` and of the rotary tables need not.";
        row_mode, "Which rows a product computes: `RowMode`.";
        route_blocks, "Blocks that route, the first of the grid.";
        route_splits, "Warps that share the tokens of one group.";
        row_tiles, "Tiles over rows of one expert, or of all experts together where rows are listed.";
        input_tiles, "Tiles over the columns of one expert's `input_weight`, or of all, one behind the other, where blocks stay and rows are not listed.";
        key_tiles, "Tiles over the columns of keys, and of values behind them where blocks stay and these have none.";
        value_tiles, "Tiles over the columns of values.";
        kv_row_tiles, "Tiles over tokens for keys and values.";
        copy_blocks, "Blocks that copy the past, the last of the grid.";
        tickets_count, "Tickets to set to 0.";
        query_tiles, "Tiles over the rows `T * k` of one batch row and head.";
        key_splits, "Parts into which the keys of one tile of queries are cut.";
        ahead_bytes, "Weights of the output, from the first on, that attention asks into the cache, in bytes.";
        output_tiles, "Tiles over the columns of the output.";
        output_splits, "Parts into which the inner dimension of the output projection is cut.";
    }
    floats {
        scale, "Factor on query · key.";
    }
}

impl Parameters {
    /// Whether all pointers but that to the status are multiples of 16.
    fn only_status_is_unaligned(&self, addresses: &[u64]) -> bool {
        self.pointers()
            .iter()
            .zip(addresses)
            .all(|((_, buffer), address)| *buffer == Buffer::Status || address.is_multiple_of(16))
    }
}

fn field(header: &mut String, ctype: &str, name: &str, doc: &str) {
    let _ = writeln!(header, "    {ctype}{name};  // {}", doc.replace('`', ""));
}

/// The text of `kernels/parameters.cuh`.
pub fn c_header() -> String {
    let mut header =
        String::from("// Made from src/parameters.rs; a test compares the two.\n#pragma once\n\nstruct Parameters {\n");
    fields(&mut header);
    header.push_str("};\n\n");
    let pointers = Parameters::default().pointers().len();
    let _ = writeln!(header, "const int PARAMETERS_POINTERS = {pointers};");
    let bytes = Parameters::BYTES;
    let _ =
        writeln!(header, "static_assert(sizeof(Parameters) == {bytes}, \"the fields have no padding between them\");");
    header
}
