// The rows that attention reads: queries, and tiles of keys and values with their mask.
#pragma once

#include "memory.cuh"
#include "project.cuh"

// Where the rows of a tile come from and go to.
struct QueryRows {
    const Parameters &p;
    int batch, head, first;

    DEVICE bool exists(int row) const { return first + row < p.tokens * p.top_k; }
    DEVICE int place(int row) const { return (first + row) / p.top_k; }

    DEVICE size_t pair(int row) const { return (size_t)batch * p.tokens * p.top_k + first + row; }

    // Row of `rows`, or a negative number where a token is known to be routed nowhere.
    DEVICE long long source(int row) const {
        const size_t own = pair(row);
        if (slots_are_experts(p)) {
            return (long long)own;
        }
        const int expert = p.pair_experts[own];
        const bool every_expert = p.row_mode == ALL_ROWS || p.row_mode == ROUTED_ROWS;
        if (expert < 0 || !every_expert) {
            return expert < 0 ? -1 : (long long)own;
        }
        return ((long long)batch * p.tokens + place(row)) * p.experts + expert;
    }
};

template <class A>
DEVICE void stage_queries(const QueryRows &rows, typename A::Element *to, bool vectors) {
    typedef typename A::Element T;
    const Parameters &p = rows.p;
    stage_runs<A::ROWS * A::RUNS, A::COPIERS, T>(vectors, [&](int, int i, T *&target, const T *&from) {
        int row = i / A::RUNS, d = i % A::RUNS * A::LENGTH;
        target = to + A::place(A::QUERY_LAYOUT, row, d);
        long long source = rows.exists(row) ? rows.source(row) : -1;
        int valid = source < 0 ? 0 : p.head - d;
        from = (const T *)p.rows;
        if (valid > 0) {
            from += source * p.columns + rows.head * p.head + d;
        }
        return valid;
    });
}

// The keys or the values of one batch row and head: the past, then the rows behind it.
template <class T>
struct Cache {
    const T *past, *behind;
    int past_rows, head;

    DEVICE Cache(const QueryRows &rows, const void *past_cache, const void *cache, int cache_rows) {
        const Parameters &p = rows.p;
        const size_t pair = (size_t)rows.batch * p.kv_heads + rows.head;
        past_rows = p.past;
        head = p.head;
        past = (const T *)past_cache + pair * p.past_rows * p.head;
        behind = (const T *)cache + ((pair + 1) * cache_rows - p.rows_behind - p.past) * p.head;
    }

    DEVICE const T *row(int key) const { return (key < past_rows ? past : behind) + (long long)key * head; }
};

// Asks weights of the output, which the next launch reads, into the cache, while memory has little to do.
DEVICE void ask_weights(const Parameters &p) {
    if (p.vectors && thread_index() == 0) {
        ask_share(p.output_weight, p.ahead_bytes);
    }
}

// A bit for each of 128 keys.
struct WideBits {
    unsigned long long low, high;
};

// Bit `i`; of wide bits, `is_high` says in which word that is.
DEVICE bool has_bit(unsigned long long bits, int i, bool) { return (bits >> i & 1) != 0; }
DEVICE bool has_bit(const WideBits &bits, int i, bool is_high) { return ((is_high ? bits.high : bits.low) >> i % 64 & 1) != 0; }

// Whether all of the first `KEYS` bits are set.
template <int KEYS>
DEVICE bool has_all(unsigned long long bits) {
    const unsigned long long ALL = KEYS == 64 ? ~0ull : (1ull << KEYS % 64) - 1;
    return (bits & ALL) == ALL;
}

template <int KEYS>
DEVICE bool has_all(const WideBits &bits) {
    return (bits.low & bits.high) == ~0ull;
}

// Bits of which those from `count` on are set too.
DEVICE unsigned long long set_from(unsigned long long bits, int count) { return count < 64 ? bits | ~0ull << count : bits; }
DEVICE WideBits set_from(const WideBits &bits, int count) {
    return {set_from(bits.low, count), count < 64 ? ~0ull : set_from(bits.high, count - 64)};
}

// Bits moved down, within their words, so far that none is asked for that leaves its word.
DEVICE unsigned long long moved_down(unsigned long long bits, int by, bool wanted) { return wanted ? bits >> by : 0; }
DEVICE WideBits moved_down(const WideBits &bits, int by, bool wanted) {
    return {moved_down(bits.low, by, wanted), moved_down(bits.high, by, wanted)};
}

enum CachePart { CACHED_KEYS = 0, CACHED_VALUES = 1 };

template <class T, CachePart PART>
DEVICE Cache<T> cache_of(const QueryRows &rows) {
    const Parameters &p = rows.p;
    return PART == CACHED_KEYS ? Cache<T>(rows, p.past_key, p.key, p.key_rows)
                               : Cache<T>(rows, p.past_value, p.value, p.value_rows);
}

// Copies tile after tile of keys or values to shared memory. A thread has the same runs of some rows of every tile, so
// that a copy is little more than its own instruction: addresses move from tile to tile. `begin` starts a copy, which
// must be closed by `end`, with the same place, behind the next `copy_wait`.
//
// `A::COPIERS` threads, the last of the block, copy `A::RUNS_AT_ONCE` runs of some rows in one pass.
template <class A, CachePart PART, int LAYOUT>
struct CacheCopier {
    typedef typename A::Element T;
    static constexpr int ROW_STEP = A::COPIERS / A::RUNS_AT_ONCE, PARTS = A::RUNS / A::RUNS_AT_ONCE;
    static constexpr int PASSES = A::KEYS / ROW_STEP * PARTS;
    static constexpr int PART_WIDTH = A::RUNS_AT_ONCE * A::LENGTH;
    static constexpr bool HELD = A::Engine::HELD && PASSES <= 8;  // of more, registers would spill
    static constexpr int UNROLL = HELD ? PASSES : PASSES > 8 ? 4 : 8;
    // Where copies are all that some warps do, beside others that have the multiprocessor's turns to wait for.
    static constexpr bool COPIES_WHOLE = A::COPIERS < A::ALL_THREADS;
    static constexpr bool CARRIED = A::HEAD <= 128;  // else registers are full, and each tile computes its address
    static_assert(A::COPIERS % A::RUNS_AT_ONCE == 0 && A::KEYS % ROW_STEP == 0, "every thread copies as many rows");

    const QueryRows &rows;
    unsigned long long from;  // `address` of the next tile
    Vector16 held[HELD ? PASSES : 1];

    DEVICE static int row() { return thread_index() % A::COPIERS / A::RUNS_AT_ONCE; }
    DEVICE static int run() { return thread_index() % A::RUNS_AT_ONCE * A::LENGTH; }

    // Elements of the tile from a thread's first run to that of pass `i`.
    DEVICE static constexpr int apart(int i) {
        return A::rows_apart(LAYOUT, i / PARTS * ROW_STEP) + A::parts_apart(LAYOUT, i % PARTS);
    }

    // Bytes from where a row behind the past would lie in the past to where it is.
    DEVICE unsigned long long behind() const {
        const Cache<T> cache = cache_of<T, PART>(rows);
        return (unsigned long long)cache.behind - (unsigned long long)cache.past;
    }

    DEVICE CacheCopier(const QueryRows &of, int first_tile) : rows(of) {
        from = CARRIED ? address(first_tile * A::KEYS) : 0;
    }

    // Of this thread's first run of a tile, as if the past did not end in it.
    DEVICE unsigned long long address(int first) const {
        const Cache<T> cache = cache_of<T, PART>(rows);
        return (unsigned long long)(first < cache.past_rows ? cache.past : cache.behind) +
               ((unsigned long long)(first + row()) * cache.head + run()) * sizeof(T);
    }

    // Copies tile `index`, the next one; bit `i` of `seen` says whether row `i` is more than zeros, which are not read.
    template <class Bits>
    DEVICE void begin(int index, T *tile, const Bits &seen) {
        const Parameters &p = rows.p;
        const int first = index * A::KEYS;
        const bool ends_past = first < p.past && first + A::KEYS >= p.past;
        from = CARRIED ? from : address(first);
        if (!p.vectors) {
            copy_elements(first, tile, seen);
        } else if (ends_past && first + A::KEYS > p.past) {
            copy_runs<true>(first, tile, seen);
        } else if (COPIES_WHOLE && p.head == A::HEAD && has_all<A::KEYS>(seen)) {
            copy_whole(tile);
        } else {
            copy_runs<false>(first, tile, seen);
        }
        if (CARRIED) {
            from += (unsigned long long)A::KEYS * p.head * sizeof(T) + (ends_past ? behind() : 0);
        }
        copy_commit();
    }

    // Every run of a tile that nothing hides or cuts: all distances are constants.
    DEVICE void copy_whole(T *tile) {
        T *to = tile + A::place(LAYOUT, row(), run());
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int distance = (i / PARTS * ROW_STEP * A::HEAD + i % PARTS * PART_WIDTH) * (int)sizeof(T);
            copy_async(to, (const void *)(from + distance), true, apart(i) * (int)sizeof(T));
        }
    }

    // `CROSSES`: the past ends inside the tile.
    template <bool CROSSES, class Bits>
    DEVICE void copy_runs(int first, T *tile, const Bits &all_seen) {
        const unsigned long long step = (unsigned long long)ROW_STEP * rows.p.head * sizeof(T);
        const unsigned long long jump = CROSSES ? behind() : 0;
        T *to = tile + A::place(LAYOUT, row(), run());
        const Bits seen = moved_down(all_seen, row(), run() < rows.p.head);
#pragma unroll (CROSSES && !HELD ? 1 : UNROLL)
        for (int i = 0; i < PASSES; i++) {
            const int below = i / PARTS, part = i % PARTS * PART_WIDTH;
            const bool is_behind = CROSSES && first + row() + below * ROW_STEP >= rows.p.past;
            const void *at = (const void *)(from + below * step + part * sizeof(T) + (is_behind ? jump : 0));
            const bool in_head = PARTS == 1 || run() + part < rows.p.head;
            const bool exists = in_head && has_bit(seen, below * ROW_STEP, below * ROW_STEP >= 64);
            if constexpr (HELD) {
                const Vector16 zero = {{0, 0, 0, 0}};
                held[i] = exists ? *(const Vector16 *)at : zero;
            } else {
                copy_async(to, at, exists, apart(i) * (int)sizeof(T));
            }
        }
    }

    DEVICE void end(T *tile) {
        if constexpr (HELD) {
            T *to = tile + A::place(LAYOUT, row(), run());
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (rows.p.vectors) {
                    *(Vector16 *)(to + apart(i)) = held[i];
                }
            }
        }
    }

    // The same where addresses allow no vectors.
    template <class Bits>
    DEVICE void copy_elements(int first, T *tile, const Bits &seen) {
        const Cache<T> cache = cache_of<T, PART>(rows);
        stage_runs<A::KEYS * A::RUNS, A::COPIERS, T>(false, [&](int, int i, T *&to, const T *&source) {
            int row = i / A::RUNS, d = i % A::RUNS * A::LENGTH;
            int valid = has_bit(seen, row, row >= 64) ? cache.head - d : 0;
            to = tile + A::place(LAYOUT, row, d);
            source = valid > 0 ? cache.row(first + row) + d : cache.past;
            return valid;
        });
    }
};
