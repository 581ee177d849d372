// Attention by warpgroups (wgmma), for many queries of 16-bit elements: a tile of 128 rows against tiles of 128 keys, or
// of 64 where heads are wide. One warpgroup copies tiles while two multiply, 64 rows each. These take turns, so that one's
// softmax passes beside the other's products; and the scores of a tile are under way together with the mix of the tile
// before, so that a softmax passes beside the mix of its own warpgroup too. Blocks stay: a block's next tile is copied
// while it ends the one before.
//
// The schedule is that of Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2.
#pragma once

#include "attend_copies.cuh"

#if HAS_WARPGROUP_PRODUCTS

template <class T, int HEAD_>
struct WarpgroupAttention {
    typedef T Element;
    typedef TensorCores<T> Engine;  // whose lanes hold a row alike
    static constexpr int HEAD = HEAD_, ROWS = 128, KEYS = HEAD <= 128 ? 128 : 64, WARP_KEYS = KEYS;
    // Threads that multiply, those behind them that copy, and the registers of each.
    static constexpr int THREADS = 256, COPIERS = 128, ALL_THREADS = THREADS + COPIERS;
    static constexpr int MULTIPLIER_REGISTERS = 224, COPIER_REGISTERS = 56;
    static constexpr int ROW_WARPS = THREADS / 32, TEAM_WARPS = 4;
    static constexpr int LINE = Pattern<T>::LINE, LINE_BYTES = Pattern<T>::LINE_BYTES;
    static constexpr int QUERY_ELEMENTS = ROWS * HEAD, TILE_ELEMENTS = KEYS * HEAD;
    // Tiles of keys, and of values, that are there or on their way.
    static constexpr int STAGES = HEAD <= 64 ? 4 : 2;
    static constexpr int LENGTH = Run<T>::LENGTH, RUNS = HEAD / LENGTH, RUNS_AT_ONCE = RUNS < 16 ? RUNS : 16;
    // Whether a row keeps its maximum from tile to tile, as long as its weights come to no more than this in one lane.
    static constexpr bool KEEPS_MAXIMA = true;
    static constexpr float MOST_WEIGHT = 8192;
    // Whether scores of a tile without masked keys are hidden by the last key of their row alone.
    static constexpr bool HIDES_BY_LIMIT = true;
    // Maxima of a row that a lane looks for side by side.
    static constexpr int CHAINS = 2;
    // Wider queries are read from shared memory by every product.
    static constexpr bool KEEPS_QUERIES = HEAD * KEYS <= 128 * 64;
    // Tiles of queries, the next one beside that which is read to its end; where heads are wide there is room for one.
    static constexpr int QUERY_STAGES = !KEEPS_QUERIES && HEAD <= 128 ? 2 : 1;
    typedef FragmentSum<16, KEYS> Scores;
    typedef FragmentSum<16, HEAD> Mixed;
    // Left factors of products: 16 columns each.
    typedef unsigned Queries[KEEPS_QUERIES ? HEAD / 16 : 1][4];
    typedef unsigned Weights[KEYS / 16][4];

    typedef typename KeyMask<KEYS>::Bits Bits;

    // `full` where something was copied, `free` where nobody needs it any more.
    struct Signals {
        Signal queries_full[QUERY_STAGES], queries_free[QUERY_STAGES];
        Signal keys_full[STAGES], keys_free[STAGES], values_full[STAGES], values_free[STAGES];
        Signal turn[2], meeting;
        // Bit `i`: key `i` of a stage is not masked, or no row sees it.
        Bits visible[STAGES];
        // The last filling of a stage that holds values which are not finite and which not all rows see.
        int doubtful[STAGES];
    };
    static constexpr int SHARED_BYTES =
        (QUERY_STAGES * QUERY_ELEMENTS + 2 * STAGES * TILE_ELEMENTS) * (int)sizeof(T) + (int)sizeof(Signals);

    static_assert(HEAD % LINE == 0 && 32 % RUNS == 0, "rows are whole lines, and warps copy whole rows");
    static_assert(ROWS == COPIERS, "each copier looks for one row");
    static_assert(COPIERS / RUNS_AT_ONCE % 8 == 0, "the rows that a thread copies lie alike in their lines");
    static_assert(RUNS_AT_ONCE * LENGTH % LINE == 0, "and so do the runs of a row");
    // What a block is given when it begins is all that its threads may share: what a register file of 64 Ki has for each.
    static constexpr int REGISTERS = (64 << 10) / (THREADS + COPIERS) / 8 * 8;
    static_assert(THREADS * (MULTIPLIER_REGISTERS - REGISTERS) <= COPIERS * (REGISTERS - COPIER_REGISTERS),
                  "those that multiply claim what the others release");

    // A layout is the number of rows: the first lines of all, then the second ones.
    static constexpr int QUERY_LAYOUT = ROWS, KEY_LAYOUT = KEYS, VALUE_LAYOUT = KEYS;
    DEVICE static int place(int layout, int row, int d) {
        return d / LINE * layout * LINE + Pattern<T>::place(row, d % LINE);
    }
    // Of whole patterns of rows, and from part to part of a row.
    DEVICE static constexpr int rows_apart(int, int rows) { return rows * LINE; }
    DEVICE static constexpr int parts_apart(int layout, int parts) { return parts * RUNS_AT_ONCE * LENGTH * layout; }

    // The 64 rows that this warpgroup has of the queries.
    DEVICE static const T *own_rows(const T *queries) { return queries + warpgroup_index() * 64 * LINE; }

    DEVICE static void load_queries(Queries &to, const T *queries) {
        if constexpr (KEEPS_QUERIES) {
            const int row = thread_index() / 32 * 16 + lane_index() % 16;
#pragma unroll
            for (int k = 0; k < HEAD / 16; k++) {
                load_matrices(to[k], queries + place(QUERY_LAYOUT, row, k * 16 + lane_index() / 16 * LENGTH));
            }
        }
    }

    // scores [64, KEYS] = queries [64, HEAD] * keys [KEYS, HEAD] transposed, of this warpgroup, whose rows are `own`: a
    // group of products.
    DEVICE static void score(Scores &scores, Queries &kept, const T *own, const T *keys) {
        const unsigned long long right = matrix_descriptor(SWIZZLE_128, keys, 0, Pattern<T>::BYTES);
        if constexpr (KEEPS_QUERIES) {
#pragma unroll
            for (int k = 0; k < HEAD / 16; k++) {
                keep_before_fence(kept[k]);
            }
            warpgroup_fence(scores.block[0]);
            warpgroup_multiply_add<false, false>(T(), scores.block[0], kept[0], right);
#pragma unroll
            for (int k = 1; k < HEAD / 16; k++) {
                warpgroup_multiply_add<false, true>(T(), scores.block[0], kept[k], advanced(right, step_bytes(KEYS, k)));
            }
        } else {
            const unsigned long long left = matrix_descriptor(SWIZZLE_128, own, 0, Pattern<T>::BYTES);
            warpgroup_fence(scores.block[0]);
            warpgroup_multiply_add<false, false>(T(), scores.block[0], left, right);
#pragma unroll
            for (int k = 1; k < HEAD / 16; k++) {
                warpgroup_multiply_add<false, true>(T(), scores.block[0], advanced(left, step_bytes(ROWS, k)),
                                                    advanced(right, step_bytes(KEYS, k)));
            }
        }
        warpgroup_commit();
    }

    // Bytes from the first 16 columns of a layout to those of step `k`.
    DEVICE static constexpr int step_bytes(int layout, int k) {
        return k * 16 / LINE * layout * LINE_BYTES + k * 16 % LINE * (int)sizeof(T);
    }

    DEVICE static void pack_weights(Weights &to, const Scores &weights) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const float(&low)[4] = weights.block[0][2 * k], (&high)[4] = weights.block[0][2 * k + 1];
            to[k][0] = pack(T(), low[0], low[1]);
            to[k][1] = pack(T(), low[2], low[3]);
            to[k][2] = pack(T(), high[0], high[1]);
            to[k][3] = pack(T(), high[2], high[3]);
        }
    }

    // mixed [64, HEAD] += weights [64, KEYS] * values [KEYS, HEAD], of this warpgroup: a group of products.
    DEVICE static void mix(Mixed &mixed, Weights &weights, const T *values) {
        const unsigned long long right =
            matrix_descriptor(SWIZZLE_128, values, KEYS * LINE_BYTES, Pattern<T>::BYTES);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            keep_before_fence(weights[k]);
        }
        warpgroup_fence(mixed.block[0]);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            warpgroup_multiply_add<true, true>(T(), mixed.block[0], weights[k], advanced(right, k * 16 * LINE_BYTES));
        }
        warpgroup_commit();
    }
};

// Turns of the two warpgroups that multiply: the first one begins.
struct ProductTurns {
    Signal (&turn)[2];
    int team, taken;

    DEVICE explicit ProductTurns(Signal (&of)[2]) : turn(of), team(warpgroup_index()), taken(0) {
        if (team == 1) {
            pass();
        }
    }

    DEVICE void take() { signal_wait(turn[team], taken++); }
    DEVICE void pass() { signal_of_warp(turn[1 - team]); }
};

// Waits for all warps that multiply.
struct MultipliersMeeting {
    Signal &signal;
    int held;

    DEVICE void operator()() {
        signal_of_warp(signal);
        signal_wait(signal, held++);
    }
};

// Writes the rows of a warp.
template <class A>
DEVICE void store_runs(const QueryRows &rows, typename A::Mixed &mixed, const RowState<A> &state,
                       const float (&gates)[RowState<A>::ROWS]) {
    typedef typename A::Element T;
    const Parameters &p = rows.p;
    const int own = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        const int row = thread_index() / 32 * 16 + A::Mixed::row(i);
        const bool exists = rows.exists(row);
        const float factor = row_factor(gates[i], state.sum[i]);
        T *const to = (T *)p.attended + (exists ? rows.pair(row) : 0) * p.columns + rows.head * p.head;
#pragma unroll
        for (int first = 0; first < A::RUNS; first += 4) {
            float values[A::LENGTH];
            exchange_runs(mixed, i, first, values);
#pragma unroll
            for (int j = 0; j < A::LENGTH; j++) {
                values[j] *= factor;
            }
            const int d = (first + own) * A::LENGTH;
            store_run(to + d, values, exists ? p.head - d : 0, p.vectors != 0);
        }
    }
}

// A tile of keys, and of values, of a block: its stage, and how often that was filled before.
template <class A>
struct Filling {
    int stage, round;

    DEVICE Filling next() const {
        const bool is_last = stage + 1 == A::STAGES;
        return {is_last ? 0 : stage + 1, is_last ? round + 1 : round};
    }

    DEVICE int number() const { return round * A::STAGES + stage; }
};

// Weights by the maxima of earlier tiles, in pairs as products take them. False where some row has none, or grows so much
// that its maximum has to be looked for; that takes as long as the weights, and is seldom needed. Then `keeps` says which
// rows need it not, so that none depends on what others are.
template <class A>
DEVICE bool weigh_by_last(float factor, const typename A::Scores &scores, RowState<A> &state, typename A::Weights &to,
                          bool (&keeps)[RowState<A>::ROWS]) {
    float sum[RowState<A>::ROWS] = {};
#pragma unroll
    for (int column = 0; column < A::KEYS / 8; column++) {
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            weight[j] = exponential2(fused_multiply_add(scores.block[0][column][j], factor, -state.largest[j / 2]));
            sum[j / 2] += weight[j];
        }
        to[column / 2][column % 2 * 2] = pack(typename A::Element(), weight[0], weight[1]);
        to[column / 2][column % 2 * 2 + 1] = pack(typename A::Element(), weight[2], weight[3]);
    }
    bool all_keep = true;
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        keeps[i] = state.largest[i] > -infinity() && sum[i] <= A::MOST_WEIGHT;
        all_keep = all_keep && keeps[i];
    }
    if (ballot(all_keep) != 0xffffffffu) {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            const unsigned row = (1u << A::Engine::ROW_LANES) - 1, own = lane_index() / A::Engine::ROW_LANES * A::Engine::ROW_LANES;
            keeps[i] = (ballot(keeps[i]) >> own & row) == row;
        }
        return false;
    }
#pragma unroll
    for (int i = 0; i < RowState<A>::ROWS; i++) {
        state.sum[i] += sum[i];
    }
    return true;
}

// What a warpgroup that multiplies does with one tile of rows.
template <class A>
struct RowTile {
    typedef typename A::Element T;
    const AttentionMemory<A> &memory;
    ProductTurns &turns;
    MultipliersMeeting &meeting;
    QueryRows rows;
    int turn, query_stage;
    int end_key, first_partial;  // From the second on some rows of the tile may not look.
    typename A::Scores scores;
    typename A::Weights weights, next_weights;
    typename A::Mixed mixed;
    typename A::Queries queries;
    RowState<A> state;
    float gates[RowState<A>::ROWS];

    DEVICE RowTile(const AttentionMemory<A> &memory, ProductTurns &turns, MultipliersMeeting &meeting, const Parameters &p,
                   int turn)
        : memory(memory), turns(turns), meeting(meeting), rows(TileInTurn<A>(p, turn).rows()), turn(turn),
          query_stage(A::QUERY_STAGES > 1 ? alike(turn % A::QUERY_STAGES) : 0) {
        const SeenKeys<A> seen(rows);
        end_key = seen.end;
        first_partial = seen.first_partial;
        mixed.clear();
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            state.largest[i] = -infinity();
            state.sum[i] = 0;
            state.last_key[i] = p.causal ? seen.last_key(thread_index() / 32 * 16 + A::Scores::row(i)) : end_key - 1;
        }
    }

    // Begins the scores of a tile whose keys are in a stage.
    DEVICE void begin_scores(const T *own, int stage) { A::score(scores, queries, own, memory.keys(stage)); }

    DEVICE const T *own_queries() const { return A::own_rows(memory.queries(query_stage)); }

    // Scores of tile `tile` become the next weights. Whether earlier sums are to be scaled, by `shrink`.
    DEVICE bool end_scores(const Filling<A> &keys, int tile, typename A::Bits visible,
                           float (&shrink)[RowState<A>::ROWS]) {
        signal_of_warp(memory.signals.keys_free[keys.stage]);
        if (!A::KEEPS_QUERIES && (tile + 1) * A::KEYS >= end_key) {
            free_queries();
        }
        const float factor = prepare_scores<A>(rows.p, tile * A::KEYS, visible, scores, state);
        bool keeps[RowState<A>::ROWS] = {};
        const bool is_known = tile > 0 && weigh_by_last<A>(factor, scores, state, next_weights, keeps);
        if (!is_known) {
            weigh<A>(factor, scores, keeps, state, shrink);
            A::pack_weights(next_weights, scores);
        }
#pragma unroll
        for (int k = 0; k < A::KEYS / 16; k++) {
            keep_before_fence(next_weights[k]);
        }
        return !is_known;
    }

    // Behind the products that read the weights before, of which this keeps the registers until then: the assembler would
    // give them to the next ones, and let the products wait for each other.
    DEVICE void take_weights() {
        const unsigned nothing = (unsigned)(rows.p.batch >> 31);
#pragma unroll
        for (int k = 0; k < A::KEYS / 16; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[k][i] = next_weights[k][i] ^ (weights[k][i] & nothing);
            }
        }
    }

    DEVICE void wait_for_keys(const Filling<A> &keys) { signal_wait(memory.signals.keys_full[keys.stage], keys.round); }

    // Behind the softmax of the tile: the assembler would move most of it behind the next wait for products, beside which
    // it should pass. So the phase is one that the sums, which are never below 0, have a part in.
    DEVICE void wait_for_values(const Filling<A> &values) {
        const int after_softmax = state.sum[0] + state.sum[1] < 0;
        signal_wait(memory.signals.values_full[values.stage], values.round + after_softmax);
    }

    // Of tile `tile`, whose values are there, before their mix.
    DEVICE void set_values_apart(const Filling<A> &values, int tile) {
        const int first_key = tile * A::KEYS;
        if (rows.p.causal && first_partial < first_key + A::KEYS && memory.signals.doubtful[values.stage] == values.number()) {
            const PartialKeys<A> keys(first_key, first_partial, end_key);
            move_apart<A>(memory.values(values.stage), keys, mixed, state, meeting);
        }
    }

    // Before they are needed, and not so early that the loop had to keep them.
    DEVICE void read_gates() {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
            const int row = thread_index() / 32 * 16 + A::Mixed::row(i);
            gates[i] = rows.exists(row) ? rows.p.pair_gates[rows.pair(row)] : 0;
        }
    }

    DEVICE void free_queries() { signal_of_warp(memory.signals.queries_free[query_stage]); }

    DEVICE void wait_for_queries() {
        signal_wait(memory.signals.queries_full[query_stage], turn / A::QUERY_STAGES);
        A::load_queries(queries, memory.queries(query_stage));
        if (A::KEEPS_QUERIES) {
            free_queries();
        }
    }

    DEVICE void begin_mix(int stage) { A::mix(mixed, weights, memory.values(stage)); }

    DEVICE void end_mix(const Filling<A> &values) {
        warpgroup_wait<0>(mixed.block[0]);
        signal_of_warp(memory.signals.values_free[values.stage]);
    }

    // All tiles of keys, of which `filled` is the first one.
    DEVICE void attend(Filling<A> filled) {
        const int count = ceil_div(end_key, A::KEYS);
        float shrink[RowState<A>::ROWS];
        wait_for_queries();
        wait_for_keys(filled);
        const typename A::Bits first_visible = memory.signals.visible[filled.stage];
        fence_products();
        turns.take();
        begin_scores(own_queries(), alike(filled.stage));
        turns.pass();
        warpgroup_wait<0>(scores.block[0]);
        end_scores(filled, 0, first_visible, shrink);
        wait_for_values(filled);
        A::pack_weights(weights, scores);
        set_values_apart(filled, 0);
#pragma unroll 1
        for (int tile = 1; tile < count; tile++) {
            const Filling<A> next = filled.next();
            // Known before what is waited for.
            const int key_stage = alike(next.stage), value_stage = alike(filled.stage);
            const T *const own = own_queries();
            wait_for_keys(next);
            const typename A::Bits visible = memory.signals.visible[next.stage];
            fence_products();
            turns.take();
            begin_scores(own, key_stage);
            begin_mix(value_stage);
            turns.pass();
            warpgroup_wait<1>(scores.block[0]);
            const bool grows = end_scores(next, tile, visible, shrink);
            wait_for_values(next);
            end_mix(filled);
            if (grows) {
                scale_rows<A>(mixed, shrink);
            }
            take_weights();
            filled = next;
            set_values_apart(filled, tile);
        }
        read_gates();
        fence_products();
        turns.take();
        begin_mix(alike(filled.stage));
        turns.pass();
        end_mix(filled);
    }

    DEVICE void store() {
#pragma unroll
        for (int i = 0; i < RowState<A>::ROWS; i++) {
#pragma unroll
            for (int mask = 1; mask < A::Engine::ROW_LANES; mask *= 2) {
                state.sum[i] += shuffle_xor(state.sum[i], mask * A::Engine::ROW_STEP);
            }
        }
        store_runs<A>(rows, mixed, state, gates);
    }
};

// What the warpgroups that multiply do.
template <class A>
DEVICE void attend_tiles(const Parameters &p, const AttentionMemory<A> &memory) {
    ProductTurns turns(memory.signals.turn);
    MultipliersMeeting meeting = {memory.signals.meeting, 0};
    int filled = 0;
#pragma unroll 1
    for (int turn = 0; TileInTurn<A>(p, turn).exists(); turn++) {
        RowTile<A> tile(memory, turns, meeting, p, turn);
        const int count = ceil_div(tile.end_key, A::KEYS);
        if (count > 0) {
            tile.attend({filled % A::STAGES, filled / A::STAGES});
        } else {
            tile.read_gates();
        }
        filled += count;
        tile.store();
    }
}

template <class A>
DEVICE void attend_warpgroups(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    const AttentionMemory<A> memory(shared);
    release_next_grid();
    if (thread_index() == 0) {
        memory.begin();
    }
    ask_weights(p);
    sync_block();
    wait_for_previous_grid();
    if (warpgroup_index() * 128 >= A::THREADS) {
        release_registers<A::COPIER_REGISTERS>();
        copy_tiles<A>(p, memory);
    } else {
        claim_registers<A::MULTIPLIER_REGISTERS>();
        attend_tiles<A>(p, memory);
    }
}

#endif
