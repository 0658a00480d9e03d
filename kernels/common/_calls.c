/* Functions called one after another: see calls_cpu.py.

   Their arguments are integers and addresses. By the conventions of x86-64 and arm64 a function that has fewer of them,
   or narrower ones, finds its own where it looks for them.
*/

#include <stdint.h>

enum { MOST = 9 }; /* more would lie otherwise on Apple's arm64 */

typedef int (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

typedef struct {
    Function function;
    int64_t may_fail; /* whether it returns a number, which is 0 unless it fails */
    int64_t arguments[MOST];
} Call;

/* Calls all of them, or as far as one fails. Returns whether one has. */
int make_calls(const Call *calls, int64_t count) {
    for (const Call *call = calls; call < calls + count; call++) {
        const int64_t *a = call->arguments;
        int found = call->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
        if (call->may_fail && found) return 1;
    }
    return 0;
}
