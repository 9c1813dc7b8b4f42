"""NIXL READ (wheel nixl-cu13) of scattered 8 KiB units from another process's GPU memory into this one's.

usage: nixl_read_gpu.py target|reader NAME FOLDER REPETITIONS     CUDA_VISIBLE_DEVICES chooses each end's GPU
Both descriptor lists are prepared once, over the whole pool and buffer, which is NIXL's fastest use; a list costs making its
transfer, posting it and waiting for it. Every word that comes is checked.
"""

import sys
import time

import numpy as np
import torch

import common

try:
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise SystemExit(f"peers: NIXL does not load: {error}: install the wheel nixl-cu13") from error


def prepared(agent, owner, base, count):
    rows = np.zeros((count, 3), dtype=np.uint64)  # address, bytes, device
    rows[:, 0] = base + common.UNIT_BYTES * np.arange(count, dtype=np.uint64)
    rows[:, 1] = common.UNIT_BYTES
    return agent.prep_xfer_dlist(owner, rows, "VRAM")


def main(role, name, folder, repetitions):
    units = common.POOL_UNITS if role == "target" else common.LIST_UNITS
    memory = torch.full((units, common.UNIT_BYTES // 4), -1, dtype=torch.int32, device="cuda")
    if role == "target":
        memory[:] = torch.arange(1, units + 1, dtype=torch.int32, device="cuda")[:, None]
    torch.cuda.synchronize()
    agent = nixl_agent(role, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    agent.register_memory(memory)
    common.offer(folder, role + ".base", str(memory.data_ptr()).encode())
    common.offer(folder, role + ".meta", agent.get_agent_metadata())
    if role == "target":
        agent.add_remote_agent(common.await_file(folder, "reader.meta"))
        common.await_file(folder, "done", limit_s=300)
        return
    agent.add_remote_agent(common.await_file(folder, "target.meta"))
    remote = prepared(agent, "target", int(common.await_file(folder, "target.base")), common.POOL_UNITS)
    local = prepared(agent, "NIXL_INIT_AGENT", memory.data_ptr(), common.LIST_UNITS)
    places = np.arange(common.LIST_UNITS, dtype=np.int32)

    def read(wanted):
        memory.fill_(-1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", local, places, remote, wanted)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        agent.release_xfer_handle(handle)
        return took, state == "DONE", memory.cpu().numpy().view(np.uint8).reshape(-1)

    common.time_lists(name, repetitions, read)
    common.offer(folder, "done", b"1")


common.run(main, *sys.argv[1:5])
