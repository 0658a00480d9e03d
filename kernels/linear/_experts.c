/* The MLPs of a mixture's experts, each for the tokens that chose it: see experts_on_cpu.py.

   y[t, c] = down(act(gate(x[t])) * up(x[t]))     by the expert e = chosen[t, c]

   Products and gates are functions of other sources, which share each among the threads.

   Legend: T tokens, k experts of a token, E experts, D hidden size, I neurons of an expert.
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*Multiply)(const void *weight, const void *x, int64_t row, void *y, int64_t rows, int threads);
typedef void (*Gate)(int dtype, const void *gate, const void *up, void *y, int64_t rows, int64_t size, int64_t gate_row,
                     int64_t up_row, int threads);

typedef int (*MultiplyRounded)(const void *weight, int dtype, const void *x, int64_t row, int64_t group, void *y,
                               int64_t rows, int threads);
typedef void (*Round)(const void *x, int64_t row, int64_t size, int64_t group, void *y, int64_t rows, int threads);

typedef struct {
    Multiply one, more; /* for a row and for several */
    const void *weight;
    MultiplyRounded rounded; /* for `most_rounded` rows, which it rounds, `group` neighbours together */
    Round round;             /* for more of them, before they are multiplied, if anything rounds them */
    int64_t most_rounded, group;
} Product;

typedef struct {
    Product gate, up, down; /* without weight in `up`, gate makes both: [., 2 I] */
} Expert;

typedef struct {
    const Expert *experts;
    Gate gate;
    int64_t count, chosen, hidden, neurons; /* E, k, D, I */
    int64_t dtype, bytes;                   /* of a number */
} Mixture;

typedef struct {
    char *rows, *made; /* of an expert, D numbers each */
    char *inside;      /* gate, up and their product, 3 I */
    char *rounded;     /* inputs of a product, D or I */
} Room;

/* y [rows, .] of x [rows, size], whose rows are `row` numbers apart. */
static int multiply(const Mixture *m, const Product *product, const char *x, int64_t row, int64_t size, const Room *room,
                    char *y, int64_t rows, int threads) {
    if (rows <= product->most_rounded)
        return product->rounded(product->weight, m->dtype, x, row, product->group, y, rows, threads);
    Multiply function = rows == 1 ? product->one : product->more;
    if (product->round) {
        product->round(x, row, size, product->group, room->rounded, rows, threads);
        x = room->rounded, row = size;
    }
    return function(product->weight, x, row, y, rows, threads);
}

/* y [rows, D] of x [rows, D], by one expert. */
static int pass_expert(const Mixture *m, const Expert *expert, const char *x, int64_t row, const Room *room, char *y,
                       int64_t rows, int threads) {
    int64_t size = m->neurons * m->bytes, is_one = !expert->up.weight, made = is_one ? 2 * m->neurons : m->neurons;
    char *gate = room->inside, *up = gate + (is_one ? size : rows * size), *gated = gate + 2 * rows * size;
    if (multiply(m, &expert->gate, x, row, m->hidden, room, gate, rows, threads)) return 1;
    if (!is_one && multiply(m, &expert->up, x, row, m->hidden, room, up, rows, threads)) return 1;
    m->gate(m->dtype, gate, up, gated, rows, m->neurons, made, made, threads);
    return multiply(m, &expert->down, gated, m->neurons, m->neurons, room, y, rows, threads);
}

/* y [T, k, D] of x [T, D], whose rows are so many numbers apart, and chosen [T, k], numbers below E. There is room for T k
   in `order`, and in `work` for 3 D + 4 I numbers a token. Returns 0, or 1 without memory. */
int mixture(const Mixture *m, const char *x, int64_t row, const int64_t *chosen, int64_t tokens, int64_t *order, char *work,
            char *y, int threads) {
    int64_t places = tokens * m->chosen, size = m->hidden * m->bytes;
    int64_t ends[m->count + 1]; /* of each expert, among the places in `chosen` that name it */
    memset(ends, 0, sizeof ends);
    for (int64_t p = 0; p < places; p++) ends[chosen[p] + 1]++;
    for (int64_t e = 0; e < m->count; e++) ends[e + 1] += ends[e];
    for (int64_t p = 0; p < places; p++) order[ends[chosen[p]]++] = p; /* so far they were where each begins */
    Room room = {work, work + tokens * size, work + 2 * tokens * size, NULL};
    room.rounded = room.inside + 3 * tokens * m->neurons * m->bytes;
    for (int64_t e = 0; e < m->count; e++) {
        const int64_t *mine = order + (e ? ends[e - 1] : 0);
        int64_t count = order + ends[e] - mine;
        if (count == 1) { /* nothing to bring together */
            const char *from = x + *mine / m->chosen * row * m->bytes;
            if (pass_expert(m, m->experts + e, from, row, &room, y + *mine * size, 1, threads)) return 1;
        } else if (count) {
            for (int64_t i = 0; i < count; i++)
                memcpy(room.rows + i * size, x + mine[i] / m->chosen * row * m->bytes, size);
            if (pass_expert(m, m->experts + e, room.rows, m->hidden, &room, room.made, count, threads)) return 1;
            for (int64_t i = 0; i < count; i++) memcpy(y + mine[i] * size, room.made + i * size, size);
        }
    }
    return 0;
}
