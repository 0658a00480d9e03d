/* Memory that a product needs while it is computed. */

#ifndef RESERVE_H
#define RESERVE_H

#include <stdlib.h>

#include "inline.h"

/* Memory of the calling thread, which it keeps: given back, it would come with new pages each time. Null if there is none. */
INLINE void *reserve(int64_t bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (bytes <= size) return memory;
    free(memory);
    memory = aligned_alloc(64, bytes);
    size = memory ? bytes : 0;
    return memory;
}

#endif
