"""NIXL READ of random 8 KiB units of another process, host memory.

usage: nixl_read.py target|reader NAME FOLDER REPETITIONS [OPTION=VALUE]...   (options of NIXL's UCX backend)
UCX_TLS and UCX_NET_DEVICES choose the way. Both descriptor lists are prepared once, over the whole pool and the whole
buffer, which is NIXL's fastest use; a list then costs making its transfer, posting it and waiting for it. Only the
target has a progress thread: the reader's would share the core of the caller, who polls, and makes it slower.
"""

import sys

import common
from nixl_lists import Lists

try:
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise SystemExit(f"peers: NIXL does not load: {error}: run `bash deploy/install_deps.sh peers`") from error


def main(role, name, folder, repetitions):
    memory = common.target_pool() if role == "target" else common.reader_buffer()
    agent = nixl_agent(role, nixl_agent_config(enable_prog_thread=role == "target", backends=[]))
    agent.create_backend("UCX", dict(option.split("=") for option in sys.argv[5:]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    common.offer(folder, role + ".base", str(memory.ctypes.data).encode())
    common.offer(folder, role + ".meta", agent.get_agent_metadata())
    if role == "target":
        agent.add_remote_agent(common.await_file(folder, "reader.meta"))
        common.await_file(folder, "done", limit_s=600)
        return
    agent.add_remote_agent(common.await_file(folder, "target.meta"))
    lists = Lists(agent, int(common.await_file(folder, "target.base")), memory.ctypes.data, "DRAM")

    def read(units):
        took, done = lists.read(units)
        return took, done, memory

    common.time_lists(name, repetitions, read)
    common.offer(folder, "done", b"1")


common.run(main, *sys.argv[1:5])
