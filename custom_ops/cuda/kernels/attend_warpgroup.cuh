// Attention by two warpgroups (wgmma), for many queries of 16-bit elements: a tile of 128 rows against tiles of 64 keys,
// of which the next is loaded meanwhile. One warpgroup weighs its scores while the other multiplies.
#pragma once

#include "attend.cuh"
#include "warpgroup.cuh"

#if HAS_WARPGROUP_PRODUCTS

template <class T, int HEAD_>
struct WarpgroupAttention {
    typedef T Element;
    typedef TensorCores<T> Engine;  // whose lanes hold a row alike
    static constexpr int HEAD = HEAD_, ROWS = 128, KEYS = 64, WARP_KEYS = KEYS, THREADS = 256;
    static constexpr int ROW_WARPS = THREADS / 32, KEY_WARPS = 1;
    static constexpr int LINE = Pattern<T>::LINE, LINE_BYTES = Pattern<T>::LINE_BYTES;
    static constexpr int STRIDE = HEAD;  // of finished rows, where queries were
    static constexpr int QUERY_ELEMENTS = ROWS * HEAD, TILE_ELEMENTS = KEYS * HEAD;
    static constexpr int SHARED_BYTES = (QUERY_ELEMENTS + 4 * TILE_ELEMENTS) * (int)sizeof(T);
    static constexpr int LENGTH = Run<T>::LENGTH, RUNS = HEAD / LENGTH;
    typedef FragmentSum<16, KEYS> Scores;
    typedef FragmentSum<16, HEAD> Mixed;

    static_assert(HEAD % LINE == 0, "rows are whole lines");
    static_assert(THREADS / RUNS % 8 == 0, "the rows that a thread copies lie alike in their lines");

    // A layout is the number of rows: the first lines of all, then the second ones.
    static constexpr int QUERY_LAYOUT = ROWS, KEY_LAYOUT = KEYS, VALUE_LAYOUT = KEYS;
    DEVICE static int place(int layout, int row, int d) {
        return d / LINE * layout * LINE + Pattern<T>::place(row, d % LINE);
    }
    // Of whole patterns of rows.
    DEVICE static constexpr int rows_apart(int, int rows) { return rows * LINE; }

    // scores [64, KEYS] = queries [64, HEAD] * keys [KEYS, HEAD] transposed, of this warpgroup.
    DEVICE static void score(Scores &scores, const T *queries, const T *keys) {
        const unsigned long long left =
            matrix_descriptor(SWIZZLE_128, queries + thread_index() / 128 * 64 * LINE, 0, Pattern<T>::BYTES);
        const unsigned long long right = matrix_descriptor(SWIZZLE_128, keys, 0, Pattern<T>::BYTES);
        warpgroup_fence(scores.block[0]);
        warpgroup_multiply_add<false, false>(T(), scores.block[0], left, right);
#pragma unroll
        for (int d = 16; d < HEAD; d += 16) {
            const int line = d / LINE, bytes = d % LINE * (int)sizeof(T);
            warpgroup_multiply_add<false, true>(T(), scores.block[0], advanced(left, line * ROWS * LINE_BYTES + bytes),
                                                advanced(right, line * KEYS * LINE_BYTES + bytes));
        }
        warpgroup_commit();
        warpgroup_wait<0>(scores.block[0]);
    }

    // mixed [64, HEAD] += weights [64, KEYS] * values [KEYS, HEAD], of this warpgroup.
    DEVICE static void mix(Mixed &mixed, const Scores &weights, const T *values) {
        const unsigned long long right =
            matrix_descriptor(SWIZZLE_128, values, KEYS * LINE_BYTES, Pattern<T>::BYTES);
        unsigned left[KEYS / 16][4];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const float(&low)[4] = weights.block[0][2 * k], (&high)[4] = weights.block[0][2 * k + 1];
            left[k][0] = pack(T(), low[0], low[1]);
            left[k][1] = pack(T(), low[2], low[3]);
            left[k][2] = pack(T(), high[0], high[1]);
            left[k][3] = pack(T(), high[2], high[3]);
            keep_before_fence(left[k]);
        }
        warpgroup_fence(mixed.block[0]);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            warpgroup_multiply_add<true, true>(T(), mixed.block[0], left[k], advanced(right, k * 16 * LINE_BYTES));
        }
        warpgroup_commit();
        warpgroup_wait<0>(mixed.block[0]);
    }
};

template <class A>
DEVICE void attend_warpgroups(const Parameters &p) {
    typedef typename A::Element T;
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    const int pairs = p.batch * p.kv_heads, pair = block_index() % pairs;
    const int query_tile = p.query_tiles - 1 - block_index() / pairs;
    const QueryRows rows = {p, pair / p.kv_heads, pair % p.kv_heads, query_tile * A::ROWS};
    T *queries = (T *)shared, *tiles = queries + A::QUERY_ELEMENTS;

    RowState<A> state;
    typename A::Mixed mixed;
    mixed.clear();
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        state.largest[i] = -infinity();
        state.sum[i] = 0;
        state.last_key[i] = p.causal ? p.past + rows.place(thread_index() / 32 * 16 + A::Scores::row(i)) : p.keys;
    }
    int end_key = p.keys;
    if (p.causal) {
        int last_row = smaller(rows.first + A::ROWS, p.tokens * p.top_k) - 1;
        end_key = smaller(end_key, p.past + last_row / p.top_k + 1);
    }
    // From here on some rows of the tile may not look.
    const int first_partial = p.causal ? p.past + rows.place(0) + 1 : end_key;
    const int count = ceil_div(end_key, A::KEYS);

    CacheCopier<A, CACHED_KEYS, A::KEY_LAYOUT> key_copier(rows, 0);
    CacheCopier<A, CACHED_VALUES, A::VALUE_LAYOUT> value_copier(rows, 0);
    auto keys_of = [&](int tile) { return tiles + tile % 2 * 2 * A::TILE_ELEMENTS; };
    auto fill = [&](int tile, unsigned long long seen) {
        key_copier.begin(tile, keys_of(tile), seen);
        value_copier.begin(tile, keys_of(tile) + A::TILE_ELEMENTS, seen);
    };
    unsigned long long visible = KeyMask<A::KEYS>(rows, 0, end_key).bits();
    KeyMask<A::KEYS> ahead(rows, A::KEYS, end_key);
    stage_queries<A>(rows, queries);
    copy_commit();
    if (count > 0) {
        fill(0, visible);
    }
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        T *keys = keys_of(tile), *values = keys + A::TILE_ELEMENTS;
        const int first_key = tile * A::KEYS;
        const unsigned long long next = ahead.bits();
        ahead = KeyMask<A::KEYS>(rows, first_key + 2 * A::KEYS, end_key);
        copy_wait<0>();
        fence_products();
        sync_block();
        if (tile + 1 < count) {
            fill(tile + 1, next);
        }
        typename A::Scores scores;
        A::score(scores, queries, keys);
        weigh<A>(p, first_key, visible, scores, mixed, state);
        visible = next;
        if (first_partial < first_key + A::KEYS && p.causal) {
            set_apart<A>(values, first_key, first_partial, end_key, mixed, state);
            fence_products();
            sync_block();
        }
        A::mix(mixed, scores, values);
    }
    copy_wait<0>();
    sync_block();
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
        for (int mask = 1; mask < A::Engine::ROW_LANES; mask *= 2) {
            state.sum[i] += shuffle_xor(state.sum[i], mask * A::Engine::ROW_STEP);
        }
    }
    store_rows<A>(rows, queries, mixed, state);
}

#endif
