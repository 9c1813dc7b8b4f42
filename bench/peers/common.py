"""What the peer programs share: the shape of the test, the meeting of two processes in a folder, the figures.

The target holds a pool of 1 GiB; the reader reads lists of it into one buffer that it uses again and again, as a decode
step does. Every page of both is touched before the first list, and so is every page of ours in fetch_bench.
"""

import json
import os
import pathlib
import sys
import time
import traceback

import numpy as np

UNIT_BYTES = 8192
POOL_UNITS = 131072  # 1 GiB
LIST_UNITS = 512
WARM_UP = 3  # lists that are checked but not timed: the first ones connect


def target_pool():
    """Every 32-bit word of a unit is the unit's number plus one, so that a wrong byte names its origin."""
    pool = np.empty(POOL_UNITS * UNIT_BYTES, dtype=np.uint8)
    pool.view(np.int32).reshape(POOL_UNITS, -1)[:] = np.arange(1, POOL_UNITS + 1, dtype=np.int32)[:, None]
    return pool


def reader_buffer():
    return np.full(LIST_UNITS * UNIT_BYTES, 0xFF, dtype=np.uint8)


def time_lists(name, repetitions, read, **more):
    """Calls read(units) -> (seconds, done, buffer) for random lists, checks every word and prints the figures."""
    rng = np.random.default_rng(7)
    seconds, wrong = [], 0
    for i in range(WARM_UP + repetitions):
        units = rng.choice(POOL_UNITS, LIST_UNITS, replace=False).astype(np.int32)
        took, done, buffer = read(units)
        right = (buffer.view(np.int32).reshape(LIST_UNITS, -1) == (units + 1)[:, None]).all(axis=1)
        wrong += int(LIST_UNITS - right.sum()) if done else LIST_UNITS
        if i >= WARM_UP:
            seconds.append(took)
    median = sorted(seconds)[len(seconds) // 2]
    checked = (WARM_UP + repetitions) * LIST_UNITS
    rate = LIST_UNITS * UNIT_BYTES / median / 1e9
    print(json.dumps(dict(name=name, us=median * 1e6, gb_per_s=rate, wrong=wrong, checked=checked, **more)), flush=True)


def offer(folder, name, data):
    path = pathlib.Path(folder) / name
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.rename(temporary, path)


def await_file(folder, name, limit_s=60):
    path = pathlib.Path(folder) / name
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit(f"peers: {name} did not appear within {limit_s} s: did the other process start?")
        time.sleep(0.02)
    return path.read_bytes()


def run(main, role, name, folder, repetitions):
    """Runs one end and leaves at once: the threads of NIXL and of Mooncake do not end by themselves."""
    code = 1
    try:
        main(role, name, folder, int(repetitions))
        code = 0
    except SystemExit as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
