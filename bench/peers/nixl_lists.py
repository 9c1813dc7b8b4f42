"""How both NIXL peers read a list: descriptor lists made once over the whole pool and the whole buffer, which is NIXL's
fastest use; a list then costs making its transfer, posting it and waiting for it.
"""

import time

import numpy as np

import common


def prepared(agent, owner, base, count, memory):
    """`count` units from address `base` on; memory: DRAM or VRAM."""
    rows = np.zeros((count, 3), dtype=np.uint64)  # address, bytes, device
    rows[:, 0] = base + common.UNIT_BYTES * np.arange(count, dtype=np.uint64)
    rows[:, 1] = common.UNIT_BYTES
    return agent.prep_xfer_dlist(owner, rows, memory)


class Lists:
    def __init__(self, agent, target_base, own_base, memory):
        self.agent = agent
        self.remote = prepared(agent, "target", target_base, common.POOL_UNITS, memory)
        self.local = prepared(agent, "NIXL_INIT_AGENT", own_base, common.LIST_UNITS, memory)
        self.places = np.arange(common.LIST_UNITS, dtype=np.int32)

    def read(self, units):
        """Seconds, and whether NIXL says that all came. Releasing the transfer is not counted."""
        start = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", self.local, self.places, self.remote, units)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        self.agent.release_xfer_handle(handle)
        return took, state == "DONE"
