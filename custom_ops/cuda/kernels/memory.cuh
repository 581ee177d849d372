// Reading and writing rows of elements.
#pragma once

#include "hardware.cuh"

// Elements that 16 bytes hold.
template <class T>
struct Run {
    static constexpr int LENGTH = 16 / (int)sizeof(T);
};

// Copies `LENGTH` elements of which `valid` exist, the rest zeros, to shared memory. Asynchronous where `vectors` is
// set; then `valid` is 0 or `LENGTH`, and `from` is a multiple of 16 bytes.
template <class T>
DEVICE void stage_run(T *to, const T *from, int valid, bool vectors) {
    const int LENGTH = Run<T>::LENGTH;
    if (vectors) {
        copy_async(to, from, valid > 0);
        return;
    }
#pragma unroll
    for (int i = 0; i < LENGTH; i++) {
        T zero;
        from_float(zero, 0);
        to[i] = i < valid ? from[i] : zero;
    }
}

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

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
