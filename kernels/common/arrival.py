"""The program that comes last does what is left for one: no second launch for a few numbers."""

from kernels.common.triton import tl, triton


@triton.jit
def arrives_last(p_arrived, row, count):
    """Whether this program is the last of the `count` of a row; what they stored before, it then reads by ".cg".

    p_arrived [N] holds zeros, before and after.
    """
    # All threads of this program are through before it counts itself in, and none reads before it has counted.
    tl.debug_barrier()
    is_last = tl.atomic_add(p_arrived + row, 1, sem="acq_rel") == count - 1
    tl.debug_barrier()
    if is_last:
        tl.store(p_arrived + row, 0)
    return is_last
