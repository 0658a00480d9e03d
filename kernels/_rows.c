/* RMSNorm with the residual addition before it, and the gates of SwiGLU and GeGLU.

   A row's result depends on that row alone. Numbers are fp32 or bf16, arithmetic is fp32; what `rms_norm` rounds on its
   way kernels/rms_norm.py says, and the gate is rounded once.
*/

#include "common/floats.h"

/* Below this many numbers a second thread costs more than it saves. */
enum { ALONE = 1 << 15 };

typedef struct {
    int64_t dtype, rows, size;
    int64_t heads;                                              /* rows that a token has */
    int64_t x_token, x_head, residual_token, residual_head;     /* strides; y and sum are contiguous */
    const void *x, *residual, *weight;                          /* residual: null where there is none */
    void *y, *sum;
    float eps;
} Norm;

INLINE void norm_row(int dtype, const Norm *norm, int64_t row) {
    int64_t token = row / norm->heads, head = row % norm->heads, size = norm->size;
    const void *x = at(dtype, norm->x, token * norm->x_token + head * norm->x_head);
    void *y = (void *)at(dtype, norm->y, row * size);
    if (norm->residual) {
        void *sum = (void *)at(dtype, norm->sum, row * size);
        const void *residual = at(dtype, norm->residual, token * norm->residual_token + head * norm->residual_head);
        for (int64_t c = 0; c < size; c += LANES) {
            Floats added = load_some(dtype, at(dtype, residual, c), size - c);
            added = plus(load_some(dtype, at(dtype, x, c), size - c), added);
            store_some(dtype, (void *)at(dtype, sum, c), rounded(dtype, added), size - c);
        }
        x = sum;
    }
    float factor = inverse_rms(dtype, x, size, norm->eps);
    for (int64_t c = 0; c < size; c += LANES) {
        Floats weight = load_some(dtype, at(dtype, norm->weight, c), size - c);
        Floats scaled = normalized(dtype, load_some(dtype, at(dtype, x, c), size - c), factor, weight);
        store_some(dtype, (void *)at(dtype, y, c), scaled, size - c);
    }
}

void rms_norm(const Norm *norm, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && norm->rows * norm->size > ALONE)
    for (int64_t row = 0; row < norm->rows; row++)
        if (norm->dtype == FP32)
            norm_row(FP32, norm, row);
        else
            norm_row(BF16, norm, row);
}

/* What a gate is multiplied with the logistic function of: itself, or for GELU by tanh 2·√(2/π)·(z + 0.044715 z³). */
enum { SILU, GELU };

INLINE Floats gated(int kind, Floats gate, Floats up) {
    Floats inner = gate;
    if (kind == GELU) {
        Floats square = times(gate, gate);
        Floats factor = times_plus(square, every(0.07135481627f), every(1.5957691216f));
        inner = times(gate, factor);
    }
    Floats power = exp2_lanes(times(inner, every(-1.44269504f)));
    Floats activated = over(gate, plus(every(1), power));
    return times(activated, up);
}

INLINE void gate_row(int kind, int dtype, const void *gate, const void *up, void *y, int64_t size) {
    for (int64_t c = 0; c < size; c += LANES) {
        Floats from_gate = load_some(dtype, at(dtype, gate, c), size - c), from_up = load_some(dtype, at(dtype, up, c), size - c);
        store_some(dtype, (void *)at(dtype, y, c), rounded(dtype, gated(kind, from_gate, from_up)), size - c);
    }
}

/* y [rows, size] of gate and up, whose rows are so far apart. */
INLINE void gate_rows(int kind, int dtype, const void *gate, const void *up, void *y, int64_t rows, int64_t size,
                      int64_t gate_row_stride, int64_t up_row_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        const void *from_gate = at(dtype, gate, row * gate_row_stride), *from_up = at(dtype, up, row * up_row_stride);
        void *to = (void *)at(dtype, y, row * size);
        if (dtype == FP32)
            gate_row(kind, FP32, from_gate, from_up, to, size);
        else
            gate_row(kind, BF16, from_gate, from_up, to, size);
    }
}

void swiglu(int dtype, const void *gate, const void *up, void *y, int64_t rows, int64_t size, int64_t gate_row_stride,
            int64_t up_row_stride, int threads) {
    gate_rows(SILU, dtype, gate, up, y, rows, size, gate_row_stride, up_row_stride, threads);
}

void geglu(int dtype, const void *gate, const void *up, void *y, int64_t rows, int64_t size, int64_t gate_row_stride,
           int64_t up_row_stride, int threads) {
    gate_rows(GELU, dtype, gate, up, y, rows, size, gate_row_stride, up_row_stride, threads);
}
