// Made from src/parameters.rs; a test compares the two.
#pragma once

struct Parameters {
    const void *hidden_states;  // [N, C].
    const float *router_weight;  // [C, E].
    const int *query_mask;  // Row b begins at b * query_mask_stride + query_mask_offset.
    const int *key_mask;  // [B, S].
    const void *input_weight;  // [E, C, input_columns]: queries, or the first matrix of a feed-forward expert.
    const void *kv_weight;  // [C, 2 * w], keys first.
    const void *output_weight;  // [E, w, C].
    const void *output_bias;  // [C], or null.
    const void *past_key;  // [B, G, past_rows, D]: the past is the first P rows.
    const void *past_value;  // [B, G, past_rows, D], the same of values.
    const float *cos_cache;  // [rotary_positions, D / 2].
    const float *sin_cache;  // [rotary_positions, D / 2].
    const long long *position_ids;  // [N].
    void *output;  // [N, C].
    long long *topk_indices;  // [N, k], or null.
    float *topk_weights;  // [N, k], or null.
    void *key;  // [B, G, key_rows, D]: the last rows_behind rows begin with the keys behind the past.
    void *value;  // [B, G, value_rows, D], the same of values.
    void *rows;  // [N, E, w] where every expert is computed, else [N, k, w]: queries or hidden rows.
    void *attended;  // [N, k, w] times gate; slots by rising expert.
    void *partial_rows;  // [N, k, C] products of single slots, or [output_splits, N, C] f32.
    float *partial_attention;  // For every row and split: maximum, sum, D values.
    unsigned char *slots;  // [E, N]: slot of a token's expert, 255 where it is not chosen.
    int *pair_experts;  // [N, k], rising; -1 for a token that is routed nowhere.
    float *pair_gates;  // [N, k], in the order of pair_experts.
    int *expert_pairs;  // [E, N]: the pairs token * k + slot of each expert, rising.
    int *expert_counts;  // [E].
    unsigned *tickets;  // [tickets_count], set to 0 by the first launch.
    unsigned *status;  // Bits of Fault, or null.
    int batch;  // B.
    int tokens;  // T.
    int past;  // P.
    int keys;  // S.
    int past_rows;  // P, or the capacity M of caches that are updated in place.
    int key_rows;  // S where the past is copied into key, M where key is past_key, else the keys behind the past.
    int value_rows;  // The same of value.
    int rows_behind;  // Rows of key and of value behind the past: T, or M - P where they are updated in place.
    int width;  // C.
    int experts;  // E.
    int top_k;  // k.
    int kv_heads;  // G; 1 in a feed-forward layer.
    int head;  // D; F in a feed-forward layer.
    int columns;  // w = G * D.
    int input_columns;  // w, or 2 * w where gated.
    int rotary_positions;  // Rows of the rotary caches, 0 where nothing is rotated.
    int query_mask_stride;  // Elements from one row of the query mask to the next.
    int query_mask_offset;  // Elements in front of the first query.
    int gate_mode;  // Place in GateMode::ALL.
    int activation;  // Place in ACTIVATIONS, -1 in an attention layer.
    int gated;  // Whether input_weight holds two blocks of columns.
    int causal;  // Whether query i sees the keys 0 ..= P + i only.
    int skip_padded;  // Whether a token whose query mask is 0 is routed nowhere.
    int vectors;  // Whether every row of hidden_states, of matrices and of caches begins at a multiple of 16 bytes; rows of router_weight, of router_input and of the rotary tables need not.
    int row_mode;  // Which rows a product computes: RowMode.
    int route_blocks;  // Blocks that route, the first of the grid.
    int route_splits;  // Warps that share the tokens of one group.
    int row_tiles;  // Tiles over rows of one expert, or of all experts together where rows are listed.
    int input_tiles;  // Tiles over the columns of one expert's input_weight, or of all, one behind the other, where blocks stay and rows are not listed.
    int key_tiles;  // Tiles over the columns of keys, and of values behind them where blocks stay and these have none.
    int value_tiles;  // Tiles over the columns of values.
    int kv_row_tiles;  // Tiles over tokens for keys and values.
    int copy_blocks;  // Blocks that copy the past, the last of the grid.
    int tickets_count;  // Tickets to set to 0.
    int query_tiles;  // Tiles over the rows T * k of one batch row and head.
    int key_splits;  // Parts into which the keys of one tile of queries are cut.
    int ahead_bytes;  // Weights of the output, from the first on, that attention asks into the cache, in bytes.
    int output_tiles;  // Tiles over the columns of the output.
    int output_splits;  // Parts into which the inner dimension of the output projection is cut.
    float scale;  // Factor on query · key.
};

const int PARAMETERS_POINTERS = 29;
static_assert(sizeof(Parameters) == 392, "the fields have no padding between them");
