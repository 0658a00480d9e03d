/* Rows of W as numbers: what the C sources of few rows share. Each defines Number and `expand_row` before this. */

#ifndef EXPAND_H
#define EXPAND_H

/* The rows from `start` to `stop`, [stop - start, K]. */
void expand_rows(const Weight *w, int64_t start, int64_t stop, Number *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = start; n < stop; n++) expand_row(w, n, out + (n - start) * w->k);
}

/* Those with these numbers, [count, K]; NaN where W has no such row. */
void expand_chosen(const Weight *w, const int64_t *numbers, int64_t count, Number *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count >= ALONE)
    for (int64_t i = 0; i < count; i++) {
        if (numbers[i] >= 0 && numbers[i] < w->n)
            expand_row(w, numbers[i], out + i * w->k);
        else
            memset(out + i * w->k, 0xff, w->k * sizeof *out);
    }
}

#endif
