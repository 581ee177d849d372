// Attention by warpgroups: what its parts share, and the warpgroup that copies for those that multiply.
#pragma once

#include "attend.cuh"
#include "warpgroup.cuh"

#if HAS_WARPGROUP_PRODUCTS

// What the parts of a block share.
template <class A>
struct AttentionMemory {
    typedef typename A::Element T;
    T *begins, *tiles;
    typename A::Signals &signals;

    DEVICE explicit AttentionMemory(unsigned char *shared)
        : begins((T *)shared), tiles(begins + A::QUERY_STAGES * A::QUERY_ELEMENTS),
          signals(*(typename A::Signals *)(tiles + 2 * A::STAGES * A::TILE_ELEMENTS)) {}

    DEVICE T *queries(int stage) const { return begins + stage * A::QUERY_ELEMENTS; }
    DEVICE T *keys(int stage) const { return tiles + 2 * stage * A::TILE_ELEMENTS; }
    DEVICE T *values(int stage) const { return keys(stage) + A::TILE_ELEMENTS; }

    // By one thread.
    DEVICE void begin() const {
        for (int stage = 0; stage < A::QUERY_STAGES; stage++) {
            signal_init(signals.queries_full[stage], A::COPIERS);
            signal_init(signals.queries_free[stage], A::ROW_WARPS);
        }
        for (int stage = 0; stage < A::STAGES; stage++) {
            signals.doubtful[stage] = -1;
            signal_init(signals.keys_full[stage], A::COPIERS + 1);
            signal_init(signals.values_full[stage], A::COPIERS + A::COPIERS / 32);
            signal_init(signals.keys_free[stage], A::ROW_WARPS);
            signal_init(signals.values_free[stage], A::ROW_WARPS);
        }
        signal_init(signals.turn[0], A::TEAM_WARPS);
        signal_init(signals.turn[1], A::TEAM_WARPS);
        signal_init(signals.meeting, A::ROW_WARPS);
    }
};

// The tile of rows that a block takes in its turn `turn`. All tiles of a pair of batch row and head follow each other, so
// that few pairs are read at a time, and their keys and values stay in the cache. Where rows see the more keys the later
// they are, one with many follows one with few, and a block takes both, so that all blocks have as much to do.
template <class A>
struct TileInTurn {
    const Parameters &p;
    int index;  // Of all tiles; there are no more of this block where `exists` says so.

    DEVICE TileInTurn(const Parameters &parameters, int turn) : p(parameters) {
        const int both = takes_both() ? 2 : 1;
        const bool back = p.causal && both == 1 && turn % 2 != 0;
        const int place = back ? block_count() - 1 - block_index() : block_index();
        index = (turn / both * block_count() + place) * both + turn % both;
    }

    DEVICE int count() const { return p.query_tiles * p.batch * p.kv_heads; }
    DEVICE bool exists() const { return index < count(); }

    // Of few tiles a block gets one after the other, those of many keys first, to and fro; and behind a long past all see
    // about as many.
    DEVICE bool takes_both() const { return p.causal && p.past <= p.tokens && count() >= 4 * block_count(); }

    DEVICE QueryRows rows() const {
        const int pairs = p.batch * p.kv_heads;
        int pair, tile;
        if (p.causal && !takes_both()) {
            tile = p.query_tiles - 1 - index / pairs;
            pair = index % pairs;
        } else {
            pair = index / p.query_tiles;
            const int place = index - pair * p.query_tiles;
            tile = place % 2 == 0 ? p.query_tiles - 1 - place / 2 : place / 2;
        }
        const int batch = divided(pair, p.kv_heads);
        return {p, batch, pair - batch * p.kv_heads, tile * A::ROWS};
    }
};

// The keys that the rows of a tile see. Tokens of rows are found from the first one's, with a factor that makes up for
// the division by k: exactly, for as few rows as a tile and those of its first token are.
template <class A>
struct SeenKeys {
    const Parameters &p;
    int past, before, factor;
    int end, first_partial;  // Of what some row sees, and of what not all do.

    DEVICE explicit SeenKeys(const QueryRows &rows) : p(rows.p) {
        const int token = rows.place(0);
        past = p.past + token;
        before = rows.first - token * p.top_k;
        factor = (1 << 16) / p.top_k + 1;
        const int last_row = smaller(A::ROWS, p.tokens * p.top_k - rows.first) - 1;
        end = p.causal ? smaller(p.keys, last_key(last_row) + 1) : p.keys;
        first_partial = p.causal ? last_key(0) + 1 : end;
    }

    // The last key that a row sees where the mask is causal.
    DEVICE int last_key(int row) const { return past + ((before + row) * factor >> 16); }
};

// Copies the queries of a tile. Each lane looks up where one row of its warp's lies, so that all are looked up at once.
template <class A>
DEVICE void copy_queries(const QueryRows &rows, typename A::Element *to) {
    typedef typename A::Element T;
    const Parameters &p = rows.p;
    if (!p.vectors) {
        stage_queries<A>(rows, to, false);
        return;
    }
    const int first = thread_index() % A::COPIERS / 32 * 32, own = first + lane_index();
    const int row = lane_index() / A::RUNS, d = lane_index() % A::RUNS * A::LENGTH;
    const long long found = rows.exists(own) ? rows.source(own) : -1;
    const T *const from = (const T *)p.rows + rows.head * p.head + d;
#pragma unroll 4
    for (int below = 0; below < 32; below += 32 / A::RUNS) {
        const long long source = shuffle_from(found, below + row);
        const bool exists = source >= 0 && d < p.head;
        copy_async(to + A::place(A::QUERY_LAYOUT, first + below + row, d), from + (exists ? source * p.columns : 0), exists);
    }
}

// Says in `full` that this thread has begun all of its copies, or has made them where addresses allow no vectors.
DEVICE void signal_copies(const Parameters &p, Signal &full) {
    if (p.vectors) {
        signal_when_copied(full);
    } else {
        signal_arrive(full);
    }
}

// Bits that are set where one of two packed numbers is not finite, and others: one more in an exponent of ones alone
// reaches the sign.
DEVICE unsigned raised(binary16, unsigned both) { return (both & 0x7fff7fff) + 0x04000400; }
DEVICE unsigned raised(bfloat16, unsigned both) { return (both & 0x7fff7fff) + 0x00800080; }

// Whether those of a tile's rows `begin` to `end` are finite that this thread has copied. They are there.
template <class A>
DEVICE bool copied_finite(const typename A::Element *values, int begin, int end) {
    typedef typename A::Element T;
    typedef CacheCopier<A, CACHED_VALUES, A::VALUE_LAYOUT> Copier;
    const int AT_ONCE = 4;
    static_assert(Copier::PASSES % AT_ONCE == 0 && AT_ONCE % Copier::PARTS == 0, "whole rows at one time");
    const T *own = values + A::place(A::VALUE_LAYOUT, Copier::row(), Copier::run());
    const int ROWS = AT_ONCE / Copier::PARTS * Copier::ROW_STEP;
    unsigned found = 0;
#pragma unroll 1
    for (int first = begin / ROWS * ROWS; first < end; first += ROWS) {
        Vector16 runs[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            runs[i] = *(const Vector16 *)(own + A::rows_apart(A::VALUE_LAYOUT, first) + Copier::apart(i));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; i++) {
            found |= raised(T(), runs[i / 4].word[i % 4]);
        }
    }
    return (found & 0x80008000) == 0;
}

// Says of a filled stage whether its rows from `begin` on, which not all rows of queries see, hold values that are not
// finite, so that those who multiply need not look. Each copier looks at its own copies, once they are there.
template <class A>
DEVICE void look_for_doubts(const AttentionMemory<A> &memory, int filled, int begin, int end, bool vectors) {
    const int stage = filled % A::STAGES, first = begin > 0 ? begin : 0, behind = smaller(end, A::KEYS);
    if (first >= behind) {
        return;
    }
    copy_wait<0>();
    // Where addresses allow no vectors, wide rows are shared in another way.
    const bool knows = A::RUNS == A::RUNS_AT_ONCE || vectors;
    if (!knows || !copied_finite<A>(memory.values(stage), first, behind)) {
        memory.signals.doubtful[stage] = filled;
    }
}

// What the warpgroup that copies does.
template <class A>
DEVICE void copy_tiles(const Parameters &p, const AttentionMemory<A> &memory) {
    typename A::Signals &signals = memory.signals;
    int filled = 0;
#pragma unroll 1
    for (int turn = 0; TileInTurn<A>(p, turn).exists(); turn++) {
        const QueryRows rows = TileInTurn<A>(p, turn).rows();
        const SeenKeys<A> seen(rows);
        const int end_key = seen.end, first_partial = seen.first_partial, count = ceil_div(end_key, A::KEYS);
        CacheCopier<A, CACHED_KEYS, A::KEY_LAYOUT> key_copier(rows, 0);
        CacheCopier<A, CACHED_VALUES, A::VALUE_LAYOUT> value_copier(rows, 0);
        KeyMask<A::KEYS> mask(rows, 0, end_key);
#pragma unroll 1
        for (int tile = 0; tile < count; tile++, filled++) {
            const int stage = filled % A::STAGES, round = filled / A::STAGES;
            const auto visible = mask.bits();
            mask = KeyMask<A::KEYS>(rows, (tile + 1) * A::KEYS, end_key);
            signal_wait(signals.keys_free[stage], round - 1);
            key_copier.begin(tile, memory.keys(stage), visible);
            signal_copies(p, signals.keys_full[stage]);
            if (thread_index() % A::COPIERS == 0) {
                signals.visible[stage] = set_from(visible, end_key - tile * A::KEYS);
                signal_arrive(signals.keys_full[stage]);
            }
            if (tile == 0) {
                // Behind the keys, which have a place sooner.
                const int place = turn % A::QUERY_STAGES;
                signal_wait(signals.queries_free[place], turn / A::QUERY_STAGES - 1);
                copy_queries<A>(rows, memory.queries(place));
                signal_copies(p, signals.queries_full[place]);
            }
            signal_wait(signals.values_free[stage], round - 1);
            value_copier.begin(tile, memory.values(stage), visible);
            signal_copies(p, signals.values_full[stage]);
            look_for_doubts<A>(memory, filled, first_partial - tile * A::KEYS, end_key - tile * A::KEYS, p.vectors != 0);
            signal_of_warp(signals.values_full[stage]);
        }
    }
    copy_wait<0>();
}

#endif
