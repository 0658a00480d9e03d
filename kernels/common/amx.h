/* The tile registers of x86 processors with AMX: eight, of SIDE rows of 64 bytes at most.

   Compiled for a processor without them nobody has them; with them a process has to ask the system once.
*/

#ifndef AMX_H
#define AMX_H

#include "inline.h"

enum { SIDE = 16 };

static int permitted;

INLINE int has_tiles(void) { return permitted; }

#ifdef __AMX_BF16__

enum { HAS_AMX = 1 };

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Asks the system for the registers, which it gives a process that asks. Returns 0, or 1 where it refuses. */
int permit_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    permitted = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return !permitted;
}

/* Shapes of the registers, as `ldtilecfg` reads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} Tiles;

static const Tiles FULL_TILES = {
    .palette = 1, .bytes_of_row = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

#else

enum { HAS_AMX = 0 };

int permit_tiles(void) { return 1; }

#endif

#endif
