// Attention with an online softmax, or by stick-breaking. All k queries of a token read the same keys, so a tile is 16
// rows a warp of the rows `t * k + slot` of one batch row and head. Warps cut a tile along its rows or, where there are
// few, along the keys; then blocks may cut the keys too, and the last to arrive combines the parts in their order.
#pragma once

#include "attend_sticks.cuh"
#include "constants.cuh"
#include "engine.cuh"

template <class EngineType, int HEAD_, int ROW_WARPS_, int KEY_WARPS_, int KEYS_, bool STICKS_ = false>
struct Attention {
    typedef EngineType Engine;
    typedef typename Engine::Element Element;
    static constexpr int HEAD = HEAD_, ROW_WARPS = ROW_WARPS_, KEY_WARPS = KEY_WARPS_, KEYS = KEYS_;
    static constexpr bool STICKS = STICKS_;
    static constexpr int THREADS = 32 * ROW_WARPS * KEY_WARPS;
    static constexpr int ROWS = 16 * ROW_WARPS, WARP_KEYS = KEYS / KEY_WARPS;
    static constexpr int STRIDE = HEAD + Engine::PAD;  // of queries and keys
    static constexpr int VALUE_STRIDE = HEAD + Engine::PAD_INNER_FIRST;
    static constexpr int QUERY_BYTES = ROWS * STRIDE * (int)sizeof(Element);
    static constexpr int KEY_BYTES = KEYS * STRIDE * (int)sizeof(Element);
    static constexpr int VALUE_BYTES = KEYS * VALUE_STRIDE * (int)sizeof(Element);
    static constexpr int MERGE_STRIDE = HEAD + 4;  // maximum, sum, 2 unused, the row
    static constexpr int MERGE_BYTES = KEY_WARPS > 1 ? KEY_WARPS * ROWS * MERGE_STRIDE * 4 : 0;
    static constexpr int TILE_BYTES = KEY_BYTES + VALUE_BYTES > MERGE_BYTES ? KEY_BYTES + VALUE_BYTES : MERGE_BYTES;
    static constexpr int SCRATCH_STRIDE = Engine::SCRATCH ? WARP_KEYS + Engine::SCRATCH : 0;
    static constexpr int SCRATCH_BYTES = ROW_WARPS * KEY_WARPS * 16 * SCRATCH_STRIDE * 4;
    static constexpr int LEFT_BYTES = STICKS && KEY_WARPS > 1 ? KEY_WARPS * ROWS * 4 : 0;
    static constexpr int SHARED_BYTES = QUERY_BYTES + TILE_BYTES + SCRATCH_BYTES + LEFT_BYTES + 16;
    static constexpr int LENGTH = Run<Element>::LENGTH, RUNS = HEAD / LENGTH;
    static constexpr bool KEEPS_MAXIMA = false;  // sums are scaled to every new one
    static constexpr bool HIDES_BY_LIMIT = false;  // code that a short block would read from far
    static constexpr int CHAINS = 1;
    static constexpr int COPIERS = THREADS, ALL_THREADS = THREADS, RUNS_AT_ONCE = RUNS;
    // Where blocks see few tiles, values come beside the keys, for one more barrier.
    static constexpr bool VALUES_BESIDE_KEYS = KEY_WARPS > 1 && !Engine::HELD;
    typedef typename Engine::template Sum<16, WARP_KEYS> Scores;
    typedef typename Engine::template Sum<16, HEAD> Mixed;

    static_assert(WARP_KEYS % Engine::STEP == 0 && WARP_KEYS <= 64, "the keys of a warp are whole steps of one mask");
    static_assert(ROW_WARPS == 1 || KEY_WARPS == 1, "warps cut rows or keys");
    static_assert(KEY_WARPS == 1 || MERGE_BYTES >= ROWS * MAX_SPLITS * 8, "two floats of every part and row");

    // Where an element of a row of queries, keys or values lies, by its layout.
    static constexpr int QUERY_LAYOUT = STRIDE, KEY_LAYOUT = STRIDE, VALUE_LAYOUT = VALUE_STRIDE;
    DEVICE static int place(int layout, int row, int d) { return row * layout + d; }
    DEVICE static constexpr int rows_apart(int layout, int rows) { return rows * layout; }
    DEVICE static constexpr int parts_apart(int, int) { return 0; }
};

// Waits for the warps that share the keys of this one.
template <class A>
struct Sharers {
    DEVICE void operator()() {
        if (A::ROW_WARPS > 1) {
            sync_block();
        } else {
            sync_warp();
        }
    }
};

// The keys of a warp's tile that some rows of it do not see, those from `begin` to `end` of it at most; among all keys
// they are from `first_partial` to `end_key`.
template <class A>
struct PartialKeys {
    int first_key, begin, end;

    DEVICE PartialKeys(int first_key, int first_partial, int end_key)
        : first_key(first_key), begin(first_partial > first_key ? first_partial - first_key : 0),
          end(smaller(A::WARP_KEYS, end_key - first_key)) {}
};

// Where a value that is not finite belongs to a key that some rows of the tile do not see, 0 times it would reach them.
// Such values become zeros in the tile and are added to the rows that see them: no weight would have made them finite.
// `sync` waits for the warps that share the values.
template <class A, class Sync>
DEVICE void move_apart(typename A::Element *values, const PartialKeys<A> &keys, typename A::Mixed &mixed,
                       const RowState<A> &state, Sync &sync) {
    sync();
    for (int key = keys.begin; key < keys.end; key++) {
#pragma unroll
        for (int j = 0; j < A::Mixed::COLUMNS; j++) {
            const float value = to_float(values[A::place(A::VALUE_LAYOUT, key, A::Mixed::column(j))]);
#pragma unroll
            for (int i = 0; i < RowState<A>::ROWS; i++) {
                const bool seen = keys.first_key + key <= state.last_key[i];
                mixed.at(i, j) += seen && !is_finite(value) ? value : 0;
            }
        }
    }
    sync();
    const int step = A::ROW_WARPS > 1 ? A::THREADS : 32, own = A::ROW_WARPS > 1 ? thread_index() : lane_index();
    for (int i = keys.begin * A::HEAD + own; i < keys.end * A::HEAD; i += step) {
        typename A::Element &value = values[A::place(A::VALUE_LAYOUT, i / A::HEAD, i % A::HEAD)];
        if (!is_finite(to_float(value))) {
            from_float(value, 0);
        }
    }
    sync();
}

// The same, where it is not known whether there is such a value.
template <class A, class Sync>
DEVICE void set_apart(typename A::Element *values, const PartialKeys<A> &keys, typename A::Mixed &mixed,
                      const RowState<A> &state, Sync &sync) {
    bool finite = true;
    for (int i = keys.begin * A::RUNS + lane_index(); i < keys.end * A::RUNS; i += 32) {
        const typename A::Element *run = values + A::place(A::VALUE_LAYOUT, i / A::RUNS, i % A::RUNS * A::LENGTH);
#pragma unroll
        for (int j = 0; j < A::LENGTH; j++) {
            finite = finite && is_finite(to_float(run[j]));
        }
    }
    if (ballot(finite) != 0xffffffffu) {
        move_apart<A>(values, keys, mixed, state, sync);
    }
}

// Factor on a finished row: the token's gate over the sum of weights; 0 where no key is visible.
DEVICE float row_factor(float gate, float sum) { return sum == 0 ? gate * 0 : gate / sum; }
DEVICE float row_factor(const QueryRows &rows, int row, float sum) {
    return row_factor(rows.p.pair_gates[rows.pair(row)], sum);
}

// The same of an attention: what is left of a stick divides nothing.
template <class A>
DEVICE float finished_factor(const QueryRows &rows, int row, float sum) {
    return A::STICKS ? rows.p.pair_gates[rows.pair(row)] : row_factor(rows, row, sum);
}

// Writes the rows of a warp that saw every key, through the shared memory of its queries.
template <class A>
DEVICE void store_rows(const QueryRows &rows, typename A::Element *queries, typename A::Mixed &mixed,
                       RowState<A> &state) {
    typedef typename A::Element T;
    const Parameters &p = rows.p;
    const int first = thread_index() / 32 * 16;
    T *own = queries + first * A::STRIDE;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        int row = mixed.row(i);
        float factor = rows.exists(first + row) ? finished_factor<A>(rows, first + row, state.sum[i]) : 0;
#pragma unroll
        for (int j = 0; j < A::Mixed::COLUMNS; j++) {
            from_float(own[row * A::STRIDE + mixed.column(j)], mixed.at(i, j) * factor);
        }
    }
    sync_warp();
    for (int i = lane_index(); i < 16 * A::RUNS; i += 32) {
        int row = i / A::RUNS, d = i % A::RUNS * A::LENGTH, valid = p.head - d;
        if (valid <= 0 || !rows.exists(first + row)) {
            continue;
        }
        float values[A::LENGTH];
#pragma unroll
        for (int j = 0; j < A::LENGTH; j++) {
            values[j] = to_float(own[row * A::STRIDE + d + j]);
        }
        T *to = (T *)p.attended + rows.pair(first + row) * p.columns + rows.head * p.head + d;
        store_run(to, values, valid, p.vectors != 0);
    }
}

// The parts of a row whose keys were cut: `count` rows, `stride` floats apart, and of each the maximum and the sum,
// `head_stride` floats apart.
struct RowParts {
    const float *heads, *rows;
    int count;
    size_t head_stride, stride;
};

// One run of a row whose sticks were broken by blocks one after the other, or by warps that told each other what is left.
template <class A, bool COHERENT>
DEVICE void combine_sticks(const RowParts &parts, int d, int valid, bool vectors, float &left, float (&values)[A::LENGTH]) {
    left = 1;
#pragma unroll
    for (int j = 0; j < A::LENGTH; j++) {
        values[j] = 0;
    }
#pragma unroll (COHERENT ? 8 : 4)
    for (int part = parts.count - 1; part >= 0; part--) {
        float own[A::LENGTH];
        load_floats<COHERENT>(own, parts.rows + part * parts.stride + d, valid, vectors);
        const float after = COHERENT ? left : 1;
        left = after * parts.heads[part * parts.head_stride + 1];
#pragma unroll
        for (int j = 0; j < A::LENGTH; j++) {
            values[j] += after * own[j];
        }
    }
}

// One run of a row that was cut; `COHERENT`: its rows are other blocks' work.
template <class A, bool COHERENT>
DEVICE void combine(const RowParts &parts, int d, int valid, bool vectors, float &largest, float &sum,
                    float (&values)[A::LENGTH]) {
    if constexpr (A::STICKS) {
        largest = 0;
        combine_sticks<A, COHERENT>(parts, d, valid, vectors, sum, values);
        return;
    }
    largest = -infinity();
#pragma unroll 4
    for (int part = 0; part < parts.count; part++) {
        largest = maximum(largest, parts.heads[part * parts.head_stride]);
    }
    const float base = largest == -infinity() ? 0 : largest;
    sum = 0;
#pragma unroll
    for (int j = 0; j < A::LENGTH; j++) {
        values[j] = 0;
    }
#pragma unroll (COHERENT ? 8 : 4)
    for (int part = 0; part < parts.count; part++) {
        const float *head = parts.heads + part * parts.head_stride;
        float own[A::LENGTH];
        load_floats<COHERENT>(own, parts.rows + part * parts.stride + d, valid, vectors);
        float shrink = exponential2(head[0] - base);
        sum += shrink * head[1];
#pragma unroll
        for (int j = 0; j < A::LENGTH; j++) {
            values[j] += shrink * own[j];
        }
    }
}

// What the end of a block asks for, in shared memory since registers are full.
struct KeptPlace {
    unsigned arrived;
    int tile, split, unused;
};

// Reads maximum and sum of every part of every row, `part_floats` floats apart, all of them at one time: each run of a
// row asks for them. With barriers around.
template <class A>
DEVICE void read_heads(const QueryRows &rows, const float *parts, size_t part_floats, float *heads) {
    const int splits = rows.p.key_splits;
    for (int i = thread_index(); i < A::ROWS * splits; i += A::THREADS) {
        const int row = i / splits;
        if (rows.exists(row)) {
            const float *head = parts + (i - row * splits) * part_floats + row * (rows.p.head + 4);
            heads[2 * i] = load_coherent(head);
            heads[2 * i + 1] = load_coherent(head + 1);
        }
    }
    sync_block();
}

// Combines the parts of the warps, then those of the blocks.
template <class A>
DEVICE void merge_rows(const QueryRows &rows, unsigned char *shared, typename A::Mixed &mixed, RowState<A> &state) {
    typedef typename A::Element T;
    const Parameters &p = rows.p;
    float *merge = (float *)(shared + A::QUERY_BYTES);
    float *own = merge + thread_index() / 32 * A::ROWS * A::MERGE_STRIDE;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        float *row = own + mixed.row(i) * A::MERGE_STRIDE;
        if (lane_index() / A::Engine::ROW_STEP % A::Engine::ROW_LANES == 0) {
            row[0] = state.largest[i];
            row[1] = state.sum[i];
        }
#pragma unroll
        for (int j = 0; j < A::Mixed::COLUMNS; j++) {
            row[4 + mixed.column(j)] = mixed.at(i, j);
        }
    }
    sync_block();
    const KeptPlace &kept = *(const KeptPlace *)(shared + A::SHARED_BYTES - sizeof(KeptPlace));
    const int tile = kept.tile, split = kept.split;
    const size_t part_floats = (size_t)A::ROWS * (p.head + 4);
    float *parts = p.partial_attention + (size_t)tile * p.key_splits * part_floats;
    for (int pass = 0; pass < 2; pass++) {
        const bool from_blocks = pass == 1;
        if (from_blocks) {
            read_heads<A>(rows, parts, part_floats, merge);
        }
        for (int i = thread_index(); i < A::ROWS * A::RUNS; i += A::THREADS) {
            int row = i / A::RUNS, d = i % A::RUNS * A::LENGTH, valid = p.head - d;
            if (valid <= 0 || !rows.exists(row)) {
                continue;
            }
            float largest, sum, values[A::LENGTH];
            if (from_blocks) {
                const float *first = parts + row * (p.head + 4) + 4;
                const RowParts of_row = {merge + row * p.key_splits * 2, first, p.key_splits, 2, part_floats};
                combine<A, true>(of_row, d, valid, p.vectors != 0, largest, sum, values);
            } else {
                const float *first = merge + row * A::MERGE_STRIDE;
                const size_t apart = A::ROWS * A::MERGE_STRIDE;
                const RowParts of_row = {first, first + 4, A::KEY_WARPS, apart, apart};
                combine<A, false>(of_row, d, A::LENGTH, true, largest, sum, values);
            }
            if (!from_blocks && p.key_splits > 1) {
                float *to = parts + split * part_floats + row * (p.head + 4);
                if (d == 0) {
                    to[0] = largest;
                    to[1] = sum;
                }
                store_floats(to + 4 + d, values, valid, p.vectors != 0);
                continue;
            }
            float factor = finished_factor<A>(rows, row, sum);
#pragma unroll
            for (int j = 0; j < A::LENGTH; j++) {
                values[j] *= factor;
            }
            T *to = (T *)p.attended + rows.pair(row) * p.columns + rows.head * p.head + d;
            store_run(to, values, valid, p.vectors != 0);
        }
        if (from_blocks || p.key_splits == 1) {
            return;
        }
        fence_device();
        sync_block();
        unsigned *arrived = (unsigned *)(shared + A::SHARED_BYTES - sizeof(KeptPlace));
        if (thread_index() == 0) {
            *arrived = atomic_add(p.tickets + tile, 1);
        }
        sync_block();
        if (*arrived + 1 != (unsigned)p.key_splits) {
            return;
        }
        fence_device();
    }
}

template <class A>
DEVICE void attend(const Parameters &p) {
    typedef typename A::Element T;
    typedef typename A::Engine Engine;
    DYNAMIC_SHARED(shared);
    release_next_grid();
    const int pairs = p.batch * p.kv_heads, whole = divided(block_index(), p.key_splits), behind = divided(whole, pairs);
    const int split = block_index() - whole * p.key_splits, pair = whole - behind * pairs;
    const int query_tile = p.query_tiles - 1 - behind, batch = divided(pair, p.kv_heads);
    const QueryRows rows = {p, batch, pair - batch * p.kv_heads, query_tile * A::ROWS};
    const int warp = thread_index() / 32;
    const int row_part = A::ROW_WARPS > 1 ? warp : 0, key_part = A::KEY_WARPS > 1 ? warp : 0;
    T *queries = (T *)shared, *keys = (T *)(shared + A::QUERY_BYTES), *values = keys + A::KEYS * A::STRIDE;
    float *scratches = (float *)(shared + A::QUERY_BYTES + A::TILE_BYTES), *left = scratches + A::SCRATCH_BYTES / 4;
    float *scratch = scratches + warp * 16 * A::SCRATCH_STRIDE;

    if (A::KEY_WARPS > 1 && thread_index() == 0) {
        KeptPlace &kept = *(KeptPlace *)(shared + A::SHARED_BYTES - sizeof(KeptPlace));
        kept.tile = query_tile * pairs + pair;
        kept.split = split;
    }

    RowState<A> state;
    typename A::Mixed mixed;
    mixed.clear();
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        state.largest[i] = -infinity();
        state.sum[i] = A::STICKS ? 1 : 0;
        state.last_key[i] = p.causal ? p.past + rows.place(row_part * 16 + A::Scores::row(i)) : p.keys;
    }
    int end_key = p.keys;
    if (p.causal) {
        int last_row = smaller(rows.first + A::ROWS, p.tokens * p.top_k) - 1;
        end_key = smaller(end_key, p.past + last_row / p.top_k + 1);
    }
    const int tiles = ceil_div(end_key, A::KEYS);
    const int begin = divided(tiles * split, p.key_splits), end = divided(tiles * (split + 1), p.key_splits);

    CacheCopier<A, CACHED_KEYS, A::KEY_LAYOUT> key_copier(rows, begin);
    CacheCopier<A, CACHED_VALUES, A::VALUE_LAYOUT> value_copier(rows, begin);
    // Mask and past are inputs of the call, which were there when its first grid began.
    const bool in_past = !Engine::HELD && begin < end && (begin + 1) * A::KEYS <= p.past;
    unsigned long long visible = KeyMask<A::KEYS>(rows, begin * A::KEYS, end_key).bits();
    if (in_past) {
        key_copier.begin(begin, keys, visible);
    }
    wait_for_previous_grid();
    stage_queries<A>(rows, queries, p.vectors != 0);
    copy_commit();
    if (begin < end && !in_past) {
        key_copier.begin(begin, keys, visible);
        key_copier.end(keys);
    }
    if (A::ROW_WARPS > 1) {
        ask_weights(p);
    }
    for (int tile = begin; tile < end; tile++) {
        const KeyMask<A::KEYS> next(rows, (tile + 1) * A::KEYS, end_key);
        if (A::VALUES_BESIDE_KEYS) {
            sync_block();
            value_copier.begin(tile, values, visible);
            copy_wait<1>();
            sync_block();
        } else {
            copy_wait<0>();
            sync_block();
            value_copier.begin(tile, values, visible);
        }
        typename A::Scores scores;
        scores.clear();
        const T *own_queries = queries + row_part * 16 * A::STRIDE;
        const T *own_keys = keys + key_part * A::WARP_KEYS * A::STRIDE;
#pragma unroll Engine::UNROLL
        for (int d = 0; d < A::HEAD; d += Engine::STEP) {
            Engine::multiply_transposed(scores, own_queries + d, A::STRIDE, own_keys + d, A::STRIDE);
        }
        const int first_key = tile * A::KEYS + key_part * A::WARP_KEYS;
        float shrink[RowState<A>::ROWS];
        const float factor = prepare_scores<A>(p, first_key, visible >> key_part * A::WARP_KEYS, scores, state);
        if constexpr (A::STICKS) {
            break_sticks<A>(factor, scores, shrink);
            if constexpr (A::KEY_WARPS > 1) {
                tell_left<A>(left, key_part, shrink);
            }
        } else {
            const bool keeps[RowState<A>::ROWS] = {};
            weigh<A>(factor, scores, keeps, state, shrink);
            scale_rows<A>(mixed, shrink);
        }
        visible = next.bits();
        value_copier.end(values);
        copy_wait<0>();
        sync_block();
        if (tile + 1 < end) {
            key_copier.begin(tile + 1, keys, visible);
        }
        if constexpr (A::STICKS) {
            if constexpr (A::KEY_WARPS > 1) {
                join_sticks<A>(left, key_part, scores, shrink);
            }
            leave<A>(mixed, state, shrink);
        }
        T *own_values = values + key_part * A::WARP_KEYS * A::VALUE_STRIDE;
        if (p.causal) {
            Sharers<A> sync;
            set_apart<A>(own_values, {first_key, p.past + rows.place(0) + 1, end_key}, mixed, state, sync);
        }
        Engine::multiply_sum(mixed, scores, scratch, own_values, A::VALUE_STRIDE);
        if (tile + 1 < end) {
            key_copier.end(keys);
        }
    }
    copy_wait<0>();
    sync_block();
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
        for (int mask = 1; !A::STICKS && mask < Engine::ROW_LANES; mask *= 2) {
            state.sum[i] += shuffle_xor(state.sum[i], mask * Engine::ROW_STEP);
        }
    }
    if (A::KEY_WARPS == 1) {
        store_rows<A>(rows, queries, mixed, state);
    } else {
        merge_rows<A>(rows, shared, mixed, state);
    }
}
