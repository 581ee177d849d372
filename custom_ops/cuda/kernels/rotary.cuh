// Rotary embeddings: a head's first half turns with its second.
#pragma once

#include "memory.cuh"
#include "route.cuh"

// The row of the rotary caches for a token's position; negative, and a fault, where there is none.
DEVICE int rotary_row(const Parameters &p, int token) {
    const long long position = p.position_ids[token];
    const bool exists = position >= 0 && position < p.rotary_positions;
    if (!exists && p.status) {
        atomic_or(p.status, FAULT_POSITION);
    }
    return exists ? (int)position : -1;
}

// Turns first columns and their partners by the angles of a row of the rotary caches.
template <int LENGTH>
DEVICE void rotate(const Parameters &p, int rotary_row, int first_unit, float (&a)[LENGTH], float (&b)[LENGTH]) {
    const bool exists = rotary_row >= 0;
    const size_t start = (size_t)(exists ? rotary_row : 0) * (p.head / 2) + first_unit;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        float cosine = exists ? p.cos_cache[start + i] : not_a_number();
        float sine = exists ? p.sin_cache[start + i] : not_a_number();
        float first = a[i], second = b[i];
        a[i] = first * cosine - second * sine;
        b[i] = second * cosine + first * sine;
    }
}
