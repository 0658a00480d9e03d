/* Calls functions of a shared library on memory that comes through standard input, for `emulated.py`.

   A call: a name of NAME bytes; how many segments and pointers there are; the size and contents of each segment; of each
   pointer the segment and offset where it lies, and the ones that it points to. Segment 0 is the arguments. The answer: the
   contents as they are then, pointers as they came, and what the function returned.
*/

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { NAME = 32, SEGMENTS = 64, POINTERS = 256, ALIGNMENT = 64 };

typedef int64_t Function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

static void get(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0);
}

static void answer(void *library) {
    char name[NAME], *at[SEGMENTS];
    int64_t counts[2], sizes[SEGMENTS], pointers[POINTERS][4], came[POINTERS];
    get(name, sizeof name);
    get(counts, sizeof counts);
    for (int64_t i = 0; i < counts[0]; i++) {
        get(sizes + i, sizeof *sizes);
        at[i] = aligned_alloc(ALIGNMENT, (sizes[i] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        get(at[i], sizes[i]);
    }
    get(pointers, counts[1] * sizeof *pointers);
    for (int64_t i = 0; i < counts[1]; i++) {
        int64_t *pointer = (int64_t *)(at[pointers[i][0]] + pointers[i][1]);
        came[i] = *pointer;
        *pointer = (int64_t)(at[pointers[i][2]] + pointers[i][3]);
    }
    const int64_t *a = (const int64_t *)at[0];
    int64_t result = ((Function *)dlsym(library, name))(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
    for (int64_t i = 0; i < counts[1]; i++) *(int64_t *)(at[pointers[i][0]] + pointers[i][1]) = came[i];
    for (int64_t i = 0; i < counts[0]; i++) {
        fwrite(at[i], 1, sizes[i], stdout);
        free(at[i]);
    }
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
}

int main(int count, char **arguments) {
    void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    for (;;) answer(library);
}
