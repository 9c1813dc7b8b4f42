"""UCX's own active messages between the GPU memories of two processes over TCP: ucx_perftest of the wheel libucx-cu13.

usage: ucx_am.py FOLDER      the wheel's folder libucx, with bin and lib
"""

import json
import os
import subprocess
import sys
import time

PORT = "17431"


def run(folder, size, count):
    tool = os.path.join(folder, "bin", "ucx_perftest")
    environment = dict(
        os.environ, UCX_TLS="tcp,cuda_copy", UCX_NET_DEVICES="lo", LD_LIBRARY_PATH=os.path.join(folder, "lib") + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    )
    server = subprocess.Popen([tool, "-p", PORT], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        test = [tool, "-p", PORT, "127.0.0.1", "-t", "ucp_am_bw", "-m", "cuda", "-s", str(size), "-n", str(count), "-w", "5", "-f"]
        out = subprocess.run(test, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        server.kill()
        server.wait()
    # Last line: count, three overheads, bandwidth average and overall (MiB/s), two message rates.
    return float(out.strip().splitlines()[-1].split()[-3]) * 1.048576e-3


for mib, count in ((4, 100), (64, 10)):
    try:
        rate = run(sys.argv[1], mib << 20, count)
        print(json.dumps(dict(name=f"ucx_am/{mib}MiB", gb_per_s=rate)), flush=True)
    except (subprocess.SubprocessError, IndexError, ValueError) as error:
        print(f"ucx_am: {mib} MiB: {error}", file=sys.stderr)
