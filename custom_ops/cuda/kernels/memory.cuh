// Reading and writing rows of elements.
#pragma once

#include "hardware.cuh"

// Elements that 16 bytes hold.
template <class T>
struct Run {
    static constexpr int LENGTH = 16 / (int)sizeof(T);
};

// Fills `COUNT` runs of shared memory with the `THREADS` threads of a block, or the last `THREADS` of it.
// `place(pass, i, to, from)` says where run `i` lies and returns how many of its elements exist, the rest are zeros; a
// thread's runs are numbered by `pass`, -1 where it varies. With `vectors`, that is none or all of them, `from` is a
// multiple of 16 bytes, and the copies are asynchronous.
template <int COUNT, int THREADS, class T, class Place>
DEVICE void stage_runs(bool vectors, Place place) {
    T *to = nullptr;
    const T *from = nullptr;
    if (vectors) {
#pragma unroll 4
        for (int pass = 0; pass < (COUNT + THREADS - 1) / THREADS; pass++) {
            int i = pass * THREADS + thread_index() % THREADS;
            if (COUNT % THREADS == 0 || i < COUNT) {
                bool exists = place(pass, i, to, from) > 0;
                copy_async(to, from, exists);
            }
        }
        return;
    }
#pragma unroll 1
    for (int i = thread_index() % THREADS; i < COUNT; i += THREADS) {
        int valid = place(-1, i, to, from);
        T zero;
        from_float(zero, 0);
#pragma unroll 1
        for (int j = 0; j < Run<T>::LENGTH; j++) {
            to[j] = j < valid ? from[j] : zero;
        }
    }
}

// Passes of a block over its runs.
DEVICE constexpr int passes_of(int count, int threads) { return (count + threads - 1) / threads; }

// Movers of runs: `runs<FIRST, COUNT, THREADS, T>(vectors, place)` moves those that `place` says, as `stage_runs`, `FIRST`
// being the passes in front.

// Where addresses allow no vectors.
struct Elementwise {
    template <int FIRST, int COUNT, int THREADS, class T, class Place>
    DEVICE void runs(bool, Place place) {
        stage_runs<COUNT, THREADS, T>(false, place);
    }
};

// Runs of a thread in registers, between a read of memory and a write to shared memory, for hardware without asynchronous
// copies.
template <int PASSES>
struct HeldRuns {
    Vector16 run[PASSES];
};

// Reads them.
template <int PASSES>
struct HeldReader {
    HeldRuns<PASSES> &held;

    template <int FIRST, int COUNT, int THREADS, class T, class Place>
    DEVICE void runs(bool vectors, Place place) {
        static_assert(FIRST + passes_of(COUNT, THREADS) <= PASSES, "every pass has its register");
        if (!vectors) {
            return;
        }
#pragma unroll
        for (int pass = 0; pass < passes_of(COUNT, THREADS); pass++) {
            int i = pass * THREADS + thread_index();
            if (COUNT % THREADS == 0 || i < COUNT) {
                T *to;
                const T *from;
                Vector16 zero = {{0, 0, 0, 0}};
                held.run[FIRST + pass] = place(pass, i, to, from) > 0 ? *(const Vector16 *)from : zero;
            }
        }
    }
};

// Writes them; or, where addresses allow no vectors, does it all.
template <int PASSES>
struct HeldWriter {
    HeldRuns<PASSES> &held;

    template <int FIRST, int COUNT, int THREADS, class T, class Place>
    DEVICE void runs(bool vectors, Place place) {
        if (!vectors) {
            stage_runs<COUNT, THREADS, T>(false, place);
            return;
        }
#pragma unroll
        for (int pass = 0; pass < passes_of(COUNT, THREADS); pass++) {
            int i = pass * THREADS + thread_index();
            if (COUNT % THREADS == 0 || i < COUNT) {
                T *to;
                const T *from;
                place(pass, i, to, from);
                *(Vector16 *)to = held.run[FIRST + pass];
            }
        }
    }
};

// Writes the first `valid` of `LENGTH` values; with `vectors`, all or none, in one piece.
template <class T>
DEVICE void store_run(T *to, const float (&values)[Run<T>::LENGTH], int valid, bool vectors) {
    const int LENGTH = Run<T>::LENGTH;
    struct alignas(16) Piece {
        T element[Run<T>::LENGTH];
    } piece;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        from_float(piece.element[i], values[i]);
    }
    if (vectors) {
        if (valid > 0) {
            *(Piece *)to = piece;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        if (i < valid) {
            to[i] = piece.element[i];
        }
    }
}

// Reads the first `valid` of `LENGTH` floats, zeros behind them; with `vectors`, that is all or none, and `from` is a
// multiple of 16 bytes. `COHERENT`: what other multiprocessors wrote.
template <bool COHERENT, int LENGTH>
DEVICE void load_floats(float (&values)[LENGTH], const float *from, int valid, bool vectors) {
    static_assert(LENGTH % 4 == 0, "whole vectors");
    if (vectors) {
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4) {
            const Floats4 *at = (const Floats4 *)(from + i);
            const Floats4 four = COHERENT ? load_coherent(at) : *at;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                values[i + j] = four.element[j];
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        values[i] = i < valid ? COHERENT ? load_coherent(from + i) : from[i] : 0;
    }
}

// Reads two floats; with `vectors`, in one piece.
DEVICE Floats2 load_pair(const float *from, bool vectors) {
    if (vectors) {
        return *(const Floats2 *)from;
    }
    return {{from[0], from[1]}};
}

// Writes the first `valid` of `LENGTH` floats; as `load_floats`.
template <int LENGTH>
DEVICE void store_floats(float *to, const float (&values)[LENGTH], int valid, bool vectors) {
    static_assert(LENGTH % 4 == 0, "whole vectors");
    if (vectors) {
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4) {
            *(Floats4 *)(to + i) = {{values[i], values[i + 1], values[i + 2], values[i + 3]}};
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        if (i < valid) {
            to[i] = values[i];
        }
    }
}

// Asks this block's share of `bytes` bytes into the cache, by one thread; blocks have like shares.
DEVICE void ask_share(const void *from, size_t bytes) {
    const size_t LINE = 128, share = (bytes / block_count() / LINE + 1) * LINE, first = block_index() * share;
    if (first < bytes) {
        ask_ahead((const char *)from + first, (unsigned)(bytes - first < share ? bytes - first : share));
    }
}

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where `b` is often 1: a division is some thirty instructions, which short blocks read from far.
DEVICE int divided(int a, int b) { return b == 1 ? a : a / b; }

// Block `block` of a grid of tiles: groups of 32 row tiles, in which all blocks of one column come before the next, so
// that the rows of a group and a column of weights stay in the cache.
DEVICE void tile_of_block(int block, int row_tiles, int column_tiles, int &row, int &column) {
    const int GROUP = 32;
    const int group = row_tiles <= GROUP ? 0 : block / (GROUP * column_tiles);
    const int inside = block - group * GROUP * column_tiles, rows = smaller(GROUP, row_tiles - group * GROUP);
    column = divided(inside, rows);
    row = group * GROUP + inside - column * rows;
}
