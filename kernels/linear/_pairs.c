/* Products of bf16 rows with a bf16 weight, for x86 processors with AVX-512 BF16.

   y[t, n] = b[n] + sum over k of x[t, k] * W[n, k], in fp32 from k = 0 on and rounded once, or kept: a row of y has the
   same bits whatever rows are beside it and however many threads there are.

   The weight lies in panels (panels.h); one stays in the second cache for all tiles of a chunk of rows.

   Legend: T rows of x, N outputs, K inputs (even), P panels.
*/

#include <stdint.h>
#include <string.h>

#include "panel_tiles.h"
#include "../common/reserve.h"

typedef struct {
    int64_t n, k;
    const uint32_t *panels; /* [P, K / 2, PANEL_OUTPUTS] */
    const uint16_t *bias;   /* [N], or none */
    int64_t keeps_sums;     /* whether y is fp32 */
} Weight;

/* Rows of x as a tile, [K / 2, tokens]. */
static void pack(const uint16_t *x, int64_t stride, uint32_t *to, int64_t tokens, int64_t pairs) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t pair = 0; pair < pairs; pair++)
            memcpy(to + pair * tokens + t, x + t * stride + 2 * pair, sizeof *to);
}

/* y [rows, N] of x [rows, K] in bf16. Returns 0, or 1 without memory. */
int pairs_product(const Weight *w, const uint16_t *inputs, int64_t stride, void *y, int64_t rows, int threads) {
    if (!rows) return 0;
    int64_t pairs = w->k / 2, by_tiles = takes_tiles(pairs), together = by_tiles ? SIDE : TILE_ROWS;
    int64_t packed = smaller(rows, PACKED_ROWS);
    uint32_t *x = reserve((packed + together - 1) / together * together * pairs * sizeof *x);
    if (!x) return 1;
#pragma omp parallel num_threads(threads)
    {
        if (by_tiles) begin_tiles(rows);
        for (int64_t first = 0; first < rows; first += PACKED_ROWS) {
            int64_t count = smaller(rows - first, PACKED_ROWS);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < count; t += together) {
                const uint16_t *from = inputs + (first + t) * stride;
                if (by_tiles) pack_for_tiles(from, stride, pairs, x + t * pairs, count - t);
                else pack(from, stride, x + t * pairs, smaller(count - t, TILE_ROWS), pairs);
            }
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t t = 0; t < count; t += AT_ONCE)
                for (int64_t n = 0; n < w->n; n += PANEL_OUTPUTS) {
                    Columns to = {y, (first + t) * w->n + n, w->n, w->n - n, w->bias ? w->bias + n : NULL, w->keeps_sums};
                    const uint32_t *panel = w->panels + n * pairs;
                    if (by_tiles) product_by_tiles(panel, pairs, x + t * pairs, to, smaller(count - t, AT_ONCE));
                    else panel_product(panel, pairs, x + t * pairs, to, smaller(count - t, AT_ONCE));
                }
        }
        if (by_tiles) end_tiles();
    }
    return 0;
}
