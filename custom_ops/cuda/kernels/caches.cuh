// What blocks copy into the caches beside the projections: the past, and the hidden states where these are keys and values.
#pragma once

#include "rotary.cuh"

// Copies the past in front of the new rows.
template <class T, int THREADS>
DEVICE void copy_past(const Parameters &p, const void *past, void *cache, int block) {
    const size_t past_row = (size_t)p.past * p.head, row = (size_t)p.keys * p.head;
    const int length = p.vectors ? Run<T>::LENGTH : 1;
    const size_t first = ((size_t)block * THREADS + thread_index()) * length;
    const size_t step = (size_t)p.copy_blocks * THREADS * length;
    for (int pair = 0; pair < p.batch * p.kv_heads; pair++) {
        const T *from = (const T *)past + pair * past_row;
        T *to = (T *)cache + pair * row;
        for (size_t i = first; i < past_row; i += step) {
            if (p.vectors) {
                *(Vector16 *)(to + i) = *(const Vector16 *)(from + i);
            } else {
                to[i] = from[i];
            }
        }
    }
}

// One element of a key that is a hidden state, `from`, at column `d` of its head.
template <class T>
DEVICE T rotated_element(const Parameters &p, int token, int d, const T *from) {
    const int half = p.head / 2;
    const bool upper = d >= half;
    float own[1] = {to_float(*from)}, other[1] = {to_float(upper ? from[-half] : from[half])};
    if (upper) {
        rotate(p, rotary_row(p, token), d - half, other, own);
    } else {
        rotate(p, rotary_row(p, token), d, own, other);
    }
    T to;
    from_float(to, own[0]);
    return to;
}

// Copies the hidden states, head by head, behind the past; keys are rotated where there are rotary caches.
template <class T, int THREADS, bool KEYS>
DEVICE void copy_hidden(const Parameters &p, void *cache, int cache_rows, int block) {
    const bool rotates = KEYS && p.rotary_positions > 0, whole = p.vectors && !rotates;
    const int length = whole ? Run<T>::LENGTH : 1;
    const size_t elements = (size_t)p.batch * p.tokens * p.width, step = (size_t)p.copy_blocks * THREADS * length;
    for (size_t i = ((size_t)block * THREADS + thread_index()) * length; i < elements; i += step) {
        const int token = (int)(i / p.width), column = (int)(i % p.width);
        const int batch = token / p.tokens, head = column / p.head;
        const size_t end = ((size_t)batch * p.kv_heads + head + 1) * cache_rows;
        T *to = (T *)cache + (end - p.rows_behind + token % p.tokens) * p.head + column % p.head;
        const T *from = (const T *)p.hidden_states + i;
        if (whole) {
            *(Vector16 *)to = *(const Vector16 *)from;
        } else {
            *to = rotates ? rotated_element(p, token, column % p.head, from) : *from;
        }
    }
}

// The part of the keys, or of the values, that block `block` of those that copy has.
template <class T, int THREADS, bool KEYS>
DEVICE void fill_cache(const Parameters &p, const void *past, void *cache, int cache_rows, int block) {
    if (cache_rows == p.keys && p.past_rows == p.past) {
        copy_past<T, THREADS>(p, past, cache, block);
    }
    if (!p.kv_weight) {
        copy_hidden<T, THREADS, KEYS>(p, cache, cache_rows, block);
    }
}
