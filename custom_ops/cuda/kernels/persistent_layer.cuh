// The projections of many rows by blocks that stay: keys, values and rows of experts in one launch behind the router,
// and the output. Rotated heads are two lines wide, others whole lines.
#pragma once

#include "persistent.cuh"

#if HAS_WARPGROUP_PRODUCTS

template <class TileType>
struct WidePlaces;
template <class TileType>
struct WidePlain;
template <class TileType>
struct WideRotated;

// The tiles of the first projections: those of experts, then those of keys and values.
template <class TileType>
struct ProjectWork {
    typedef typename TileType::Element T;
    typedef WidePlaces<TileType> Rows;
    const Parameters &p;
    const typename TileType::Shared &shared;
    Part part = EXPERTS;
    bool has_both = false;        // keys and, behind them, values
    int first_row = 0, row_count = 0;  // of the expert's list, or tokens
    const int *pairs = nullptr;   // of the rows, or null: then rows are tokens
    WideColumns<T> factor = {};

    DEVICE ProjectWork(const Parameters &parameters, const typename TileType::Shared &memory)
        : p(parameters), shared(memory) {}

    DEVICE bool begin(int tile) {
        const bool listed = p.row_mode == LISTED_ROWS;
        const int row_tiles = listed ? shared.list_starts[p.experts] : p.row_tiles;
        const int expert_tiles = row_tiles * p.input_tiles;
        int row_tile, column_tile;
        pairs = nullptr;
        if (tile >= expert_tiles) {
            const int columns = p.key_tiles + p.value_tiles;
            if (tile - expert_tiles >= p.kv_row_tiles * columns) {
                return false;
            }
            tile_of_block(tile - expert_tiles, p.kv_row_tiles, columns, row_tile, column_tile);
            first_row = row_tile * TileType::ROWS;
            row_count = p.batch * p.tokens;
            take_cache(column_tile);
            return true;
        }
        tile_of_block(tile, row_tiles, p.input_tiles, row_tile, column_tile);
        const int expert = rows_of_tile<TileType>(p, shared.list_starts, row_tile, first_row, row_count, pairs);
        take_experts(column_tile, expert);
        return true;
    }

    // The columns of keys, of values or of both.
    DEVICE void take_cache(int column_tile) {
        part = column_tile < p.key_tiles ? KEYS : VALUES;
        has_both = p.value_tiles == 0;
        factor.weight = (const T *)p.kv_weight + (part == VALUES ? p.columns : 0);
        factor.stride = 2 * (size_t)p.columns;
        const bool rotary = p.rotary_positions > 0 && part == KEYS;
        cut(column_tile - (part == KEYS ? 0 : p.key_tiles), has_both ? 2 * p.columns : p.columns, 1, 0, rotary);
    }

    // The columns of one expert, or of all where rows are tokens.
    DEVICE void take_experts(int column_tile, int expert) {
        const size_t matrix = (size_t)p.width * p.input_columns;
        part = EXPERTS;
        factor.weight = (const T *)p.input_weight + expert * matrix;
        factor.stride = p.input_columns;
        cut(column_tile, p.columns, pairs ? 1 : p.experts, matrix, p.rotary_positions > 0);
    }

    DEVICE void cut(int column_tile, int columns, int matrices, size_t matrix_stride, bool rotary) {
        factor.inner = p.width;
        factor.units = rotary ? columns / 2 : columns;
        factor.all_units = matrices * factor.units;
        factor.matrix_stride = matrix_stride;
        factor.rotates = rotary;
        factor.first = column_tile * (rotary ? TileType::COLUMNS / 2 : TileType::COLUMNS);
    }

    DEVICE int chunks() const { return ceil_div(p.width, TileType::DEPTH); }

    // The whole width of a matrix.
    DEVICE int segments() const { return 1; }

    // The pairs of rows.
    template <int COUNT, int STEP>
    DEVICE void look_up(int, int first, int (&found)[COUNT]) const {
#pragma unroll
        for (int i = 0; pairs && i < COUNT; i++) {
            const int row = first + i * STEP;
            found[i] = pairs[first_row + row < row_count ? row : 0];
        }
    }

    DEVICE const T *rows() const { return (const T *)p.hidden_states; }

    template <int COUNT, int STEP>
    DEVICE unsigned rows_of(int first, const int (&found)[COUNT], unsigned (&to)[COUNT]) const {
        unsigned present = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP;
            const bool exists = first_row + row < row_count;
            const int token = pairs ? found[i] / p.top_k : first_row + (exists ? row : 0);
            present |= (exists ? 1u : 0u) << i;
            to[i] = (unsigned)token * (p.width / TileType::LENGTH);
        }
        return present;
    }

    DEVICE const WideColumns<T> &columns(int) const { return factor; }

    DEVICE void end(typename TileType::Sum &sum, const Rows &places) const {
        if (factor.rotates) {
            hand_over_wide<TileType>(p, sum, WideRotated<TileType>{places});
        } else {
            hand_over_wide<TileType>(p, sum, WidePlain<TileType>{places});
        }
    }
};

// Of two neighbours of a rotated head.
struct Angles {
    float cosine[2], sine[2];
};

// Where the rows of a lane belong. The columns of a line, which lies in one head, follow each other.
template <class TileType>
struct WidePlaces {
    typedef typename TileType::Element T;
    static constexpr int ROWS = TileType::Sum::ROWS, LINE = TileType::LINE, LINES = TileType::LINES;
    const ProjectWork<TileType> &work;
    T *to[ROWS][LINES];
    bool exists[ROWS];
    int angles[ROWS];  // rows of the rotary caches
    Angles angles_ahead[4];

    DEVICE explicit WidePlaces(const ProjectWork<TileType> &of) : work(of) {}

    DEVICE void begin(int i, int row) {
        const Parameters &p = work.p;
        exists[i] = work.first_row + row < work.row_count;
        const int at = exists[i] ? row : 0, pair = work.pairs ? work.pairs[at] : 0;
        const int token = work.pairs ? pair / p.top_k : work.first_row + at;
        angles[i] = work.factor.rotates ? rotary_row(p, token) : 0;
#pragma unroll
        for (int j = 0; i == 0 && j < 4; j++) {
            angles_ahead[j] = work.factor.rotates ? look_up(0, j * TileType::LENGTH + lane_index() % 4 * 2) : Angles();
        }
        if (work.part == EXPERTS) {
            const size_t place = work.pairs ? (size_t)pair : (size_t)token * p.experts;
            T *const start = (T *)p.rows + place * p.columns;
#pragma unroll
            for (int line = 0; line < LINES; line++) {
                to[i][line] = start + column(line);
            }
            return;
        }
        const int batch = token / p.tokens;
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            to[i][line] = in_cache(batch, token - batch * p.tokens, column(line));
        }
    }

    // The angles of a column of any line, and of its next.
    DEVICE Angles look_up(int i, int column) const {
        const Parameters &p = work.p;
        const bool exists = angles[i] >= 0;
        const size_t at = (size_t)(exists ? angles[i] : 0) * LINE + column;
        const Floats2 cosine = load_pair(p.cos_cache + at, p.vectors != 0), sine = load_pair(p.sin_cache + at, p.vectors != 0);
        const float none = not_a_number();
        return {{exists ? cosine.element[0] : none, exists ? cosine.element[1] : none},
                {exists ? sine.element[0] : none, exists ? sine.element[1] : none}};
    }

    // The first column of a line.
    DEVICE int column(int line) const { return work.factor.template column<TileType>(work.factor.first + line * LINE); }

    // The place of a column of keys or of values.
    DEVICE T *in_cache(int batch, int token, int column) const {
        const Parameters &p = work.p;
        const bool is_behind_keys = work.has_both && column >= p.columns;
        const bool is_value = work.part == VALUES || is_behind_keys;
        const int inside = column - (is_behind_keys ? p.columns : 0), head = inside / p.head;
        const int cache_rows = is_value ? p.value_rows : p.key_rows;
        const size_t at = ((size_t)batch * p.kv_heads + head + 1) * cache_rows - p.rows_behind + token;
        return (T *)(is_value ? p.value : p.key) + at * p.head + inside - head * p.head;
    }

    // Writes a run of units, `apart` elements behind their place.
    DEVICE void store(int i, int column, int apart, const unsigned (&run)[4]) const {
        const int left = work.factor.all_units - work.factor.first - column;
        if (exists[i]) {
            store_pairs(to[i][column / LINE] + column % LINE + apart, run, left, work.p.vectors != 0);
        }
    }
};

// Columns that are stored as they are.
template <class TileType>
struct WidePlain {
    struct Found {};
    const WidePlaces<TileType> &places;

    DEVICE Found first(int) const { return {}; }
    DEVICE Found look_up(int, int) const { return {}; }
    DEVICE void change(int, int, Found, float (&)[2], float (&)[2]) const {}

    DEVICE void end(int i, int column, const unsigned (&low)[4], const unsigned (&high)[4]) const {
        places.store(i, column, 0, low);
        places.store(i, column + TileType::COLUMNS / 2, 0, high);
    }
};

// Columns that are rotated with their partners, all lines by the same angles.
template <class TileType>
struct WideRotated {
    typedef Angles Found;
    const WidePlaces<TileType> &places;

    DEVICE Found first(int j) const { return places.angles_ahead[j]; }
    DEVICE Found look_up(int i, int column) const { return places.look_up(i, column); }

    DEVICE void change(int, int, const Found &found, float (&low)[2], float (&high)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float first = low[i], second = high[i];
            low[i] = first * found.cosine[i] - second * found.sine[i];
            high[i] = second * found.cosine[i] + first * found.sine[i];
        }
    }

    DEVICE void end(int i, int column, const unsigned (&low)[4], const unsigned (&high)[4]) const {
        places.store(i, column, 0, low);
        places.store(i, column, TileType::LINE, high);
    }
};

template <class TileType>
struct WideOutput;

// The tiles of the output. Its inner dimension is cut into the experts, of which a token's rows of those that it did
// not choose are zeros; or is one, where an expert's rows are listed or every token chose all.
template <class TileType>
struct OutputWork {
    typedef typename TileType::Element T;
    typedef WideOutput<TileType> Rows;
    const Parameters &p;
    const typename TileType::Shared &shared;
    int expert = 0;               // whose rows are listed, else 0
    int first_row = 0, row_count = 0;  // of the tile
    int first_column = 0;
    const int *pairs = nullptr;   // of the rows, or null: then rows are tokens

    DEVICE OutputWork(const Parameters &parameters, const typename TileType::Shared &memory)
        : p(parameters), shared(memory) {}

    DEVICE bool listed() const { return p.row_mode == LISTED_ROWS; }
    DEVICE bool all() const { return !listed() && slots_are_experts(p); }

    DEVICE bool begin(int tile) {
        const int row_tiles = listed() ? shared.list_starts[p.experts] : p.row_tiles;
        if (tile >= row_tiles * p.output_tiles) {
            return false;
        }
        int row_tile, column_tile;
        tile_of_block(tile, row_tiles, p.output_tiles, row_tile, column_tile);
        expert = rows_of_tile<TileType>(p, shared.list_starts, row_tile, first_row, row_count, pairs);
        row_count = smaller(TileType::ROWS, row_count - first_row);
        first_column = column_tile * TileType::COLUMNS;
        return true;
    }

    DEVICE int inner() const { return all() ? p.experts * p.columns : p.columns; }
    DEVICE int segments() const { return all() || listed() ? 1 : p.experts; }
    DEVICE int chunks() const { return segments() * ceil_div(inner(), TileType::DEPTH); }

    // The pairs of rows, or the slots of their tokens.
    template <int COUNT, int STEP>
    DEVICE void look_up(int segment, int first, int (&found)[COUNT]) const {
        const unsigned char *const slots = p.slots + (size_t)segment * (p.batch * p.tokens) + first_row;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP < row_count ? first + i * STEP : 0;
            found[i] = pairs ? pairs[row] : all() ? 0 : slots[row];
        }
    }

    DEVICE const T *rows() const { return (const T *)p.attended; }

    template <int COUNT, int STEP>
    DEVICE unsigned rows_of(int first, const int (&found)[COUNT], unsigned (&to)[COUNT]) const {
        unsigned present = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const bool exists = first + i * STEP < row_count && (pairs || found[i] != NO_SLOT);
            const int pair = pairs ? found[i] : (first_row + first + i * STEP) * p.top_k + found[i];
            present |= (exists ? 1u : 0u) << i;
            to[i] = (unsigned)(exists ? pair : 0) * (p.columns / TileType::LENGTH);
        }
        return present;
    }

    DEVICE WideColumns<T> columns(int segment) const {
        const T *weight = (const T *)p.output_weight + (size_t)(expert + segment) * p.columns * p.width;
        return {weight, (size_t)p.width, inner(), first_column, p.width, p.width, 0, false};
    }

    DEVICE void end(typename TileType::Sum &sum, const Rows &rows) const { hand_over_wide<TileType>(p, sum, rows); }
};

// Where the sums of the output belong: with bias, or zeros for a token that is routed nowhere; or as products of single
// slots.
template <class TileType>
struct WideOutput {
    struct Found {};
    typedef typename TileType::Element T;
    static constexpr int ROWS = TileType::Sum::ROWS, HALF = TileType::COLUMNS / 2;
    const OutputWork<TileType> &work;
    T *to[ROWS];
    bool exists[ROWS], routed[ROWS];

    DEVICE explicit WideOutput(const OutputWork<TileType> &of) : work(of) {}

    DEVICE void begin(int i, int row) {
        const Parameters &p = work.p;
        exists[i] = row < work.row_count;
        const int at = exists[i] ? row : 0;
        const size_t token = work.first_row + at;
        routed[i] = work.pairs || is_routed(p, token);
        const size_t place = work.pairs ? (size_t)work.pairs[at] : token;
        to[i] = (T *)(work.pairs ? p.partial_rows : p.output) + place * p.width + work.first_column;
    }

    DEVICE Found first(int) const { return {}; }
    DEVICE Found look_up(int, int) const { return {}; }

    DEVICE void change(int, int column, Found, float (&low)[2], float (&high)[2]) const {
        if (work.p.output_bias && !work.pairs) {
            add_bias(column, low);
            add_bias(column + HALF, high);
        }
    }

    DEVICE void add_bias(int column, float (&values)[2]) const {
        const int at = work.first_column + column;
        const T *const bias = (const T *)work.p.output_bias + at;
        if (at < work.p.width) {
            values[0] += to_float(bias[0]);
            values[1] += to_float(bias[1]);
        }
    }

    DEVICE void end(int i, int column, const unsigned (&low)[4], const unsigned (&high)[4]) const {
        store(i, column, low);
        store(i, column + HALF, high);
    }

    DEVICE void store(int i, int column, const unsigned (&run)[4]) const {
        unsigned own[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            own[j] = routed[i] ? run[j] : 0;
        }
        if (exists[i]) {
            store_pairs(to[i] + column, own, work.p.width - work.first_column - column, work.p.vectors != 0);
        }
    }
};

template <class TileType>
DEVICE void project_tiles(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    begin_tiles<TileType>(p, TileType::shared_of(shared));
    ProjectWork<TileType> work(p, TileType::shared_of(shared));
    run_tiles<TileType>(p, shared, work);
}

template <class TileType>
DEVICE void output_tiles(const Parameters &p) {
    DYNAMIC_SHARED(shared);
    release_next_grid();
    wait_for_previous_grid();
    begin_tiles<TileType>(p, TileType::shared_of(shared));
    OutputWork<TileType> work(p, TileType::shared_of(shared));
    run_tiles<TileType>(p, shared, work);
}

#endif
