"""Mooncake TransferEngine over TCP: one batch read of random 8 KiB units of another process.

usage: mooncake_read.py target|reader NAME FOLDER REPETITIONS
"""

import sys
import time

import common

try:
    from mooncake.engine import TransferEngine
except ImportError as error:
    raise SystemExit(f"peers: Mooncake does not load: {error}: run `bash deploy/install_deps.sh peers`") from error


def main(role, name, folder, repetitions):
    memory = common.target_pool() if role == "target" else common.reader_buffer()
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("peers: Mooncake's engine did not start on 127.0.0.1: its own log is above")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise SystemExit(f"peers: Mooncake did not register {memory.nbytes} bytes: its own log is above")
    if role == "target":
        common.offer(folder, "target.base", f"127.0.0.1:{engine.get_rpc_port()} {memory.ctypes.data}".encode())
        common.await_file(folder, "done", limit_s=600)
        return
    session, base = common.await_file(folder, "target.base").decode().split()
    places = [memory.ctypes.data + common.UNIT_BYTES * i for i in range(common.LIST_UNITS)]
    sizes = [common.UNIT_BYTES] * common.LIST_UNITS

    def read(units):
        sources = [int(base) + common.UNIT_BYTES * unit for unit in units.tolist()]
        start = time.perf_counter()
        status = engine.batch_transfer_sync_read(session, places, sources, sizes)
        return time.perf_counter() - start, status == 0, memory

    common.time_lists(name, repetitions, read)
    common.offer(folder, "done", b"1")


common.run(main, *sys.argv[1:5])
