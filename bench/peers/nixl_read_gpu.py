"""NIXL READ (wheel nixl-cu13) of scattered 8 KiB units from another process's GPU memory into this one's.

usage: nixl_read_gpu.py target|reader NAME FOLDER REPETITIONS     CUDA_VISIBLE_DEVICES chooses each end's GPU
Both descriptor lists are prepared once, over the whole pool and buffer, which is NIXL's fastest use; a list costs making its
transfer, posting it and waiting for it. Every word that comes is checked.
"""

import sys

import numpy as np
import torch

import common
from nixl_lists import Lists

try:
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise SystemExit(f"peers: NIXL does not load: {error}: install the wheel nixl-cu13") from error


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
    lists = Lists(agent, int(common.await_file(folder, "target.base")), memory.data_ptr(), "VRAM")

    def read(wanted):
        memory.fill_(-1)
        torch.cuda.synchronize()
        took, done = lists.read(wanted)
        return took, done, memory.cpu().numpy().view(np.uint8).reshape(-1)

    common.time_lists(name, repetitions, read)
    common.offer(folder, "done", b"1")


common.run(main, *sys.argv[1:5])
