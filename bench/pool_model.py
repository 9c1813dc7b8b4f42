"""A pool of many daemons, in arithmetic and in virtual time; and placement hrw-v1 a second time.

usage: pool_model.py               figures of 1,000 workers and 200 daemons: arithmetic beside a simulation of seconds
       pool_model.py golden FILE   writes answers of hrw-v1 (tests/golden/placement_v1.txt)
       pool_model.py check FILE    holds such a file against this implementation

Placement follows the definition at the top of proto/placement.h and nothing else, so that the two prove each other:
the logarithms come from 60 decimal digits here and from squarings there. Standard library alone.
"""

import decimal
import math
import random
import sys

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
LOG_BITS = 48


def mix64(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def checksum64(data):
    data = data + bytes(-len(data) % 4)
    total = 0
    for i in range(0, len(data), 4):
        total += mix64((int.from_bytes(data[i:i + 4], "little") + (i // 4 + 1) * GOLDEN) & MASK)
    return total & MASK


def log_table():
    with decimal.localcontext() as context:
        context.prec = 60
        ln2 = decimal.Decimal(2).ln()
        return [int((1 + decimal.Decimal(i) / 256).ln() / ln2 * (1 << LOG_BITS)) for i in range(256)] + [1 << LOG_BITS]


TABLE = log_table()


def minus_log(h):
    x = max(h, 1)
    e = x.bit_length() - 1
    f = (x << (64 - e)) & MASK
    i = f >> 56
    r = (f >> 8) & ((1 << LOG_BITS) - 1)
    return (64 << LOG_BITS) - ((e << LOG_BITS) + TABLE[i] + ((TABLE[i + 1] - TABLE[i]) * r >> LOG_BITS))


def word_of(key):
    w0 = int.from_bytes(key[:8], "little")
    w1 = int.from_bytes(key[8:], "little")
    return w0 ^ (((w1 << 32) | (w1 >> 32)) & MASK)


def fixed_weight(weight):
    return max(int(weight * 1048576.0 + 0.5), 1)


class Placement:
    """`members`: (name, weight) pairs."""

    def __init__(self, members):
        self.members = [(name, checksum64(name.encode()), fixed_weight(weight)) for name, weight in members]

    def owners(self, word, count):
        """Names of the first `count` owners. Quotients are exact integers of 128 more bits than L has."""
        def score(member):
            name, name_hash, weight = member
            h = mix64(name_hash ^ word)
            return -((weight << 192) // minus_log(h)), -h, name
        return [name for name, _, _ in sorted(self.members, key=score)[:count]]


# --- golden answers ---

# Found by search: here the owners are others if a logarithm is not interpolated, and for the last one if it is exact.
CLOSE_CASES = [133, 267, 392, 508, 718, 959, 1049, 1102, 1656, 1899, 1928, 1947, 395197]
CLOSE_MEMBERS = [("kv-0:1", 1.0), ("kv-1:1", 2.0), ("kv-2:1", 3.0), ("kv-3:1", 1.5), ("kv-4:1", 0.7)]

def golden_cases():
    """(key, members) pairs: sizes 1 to 14; weights equal, doubling, fractional, far apart."""
    state = 7
    for case in range(96):
        words = []
        for _ in range(4):
            state = (state + GOLDEN) & MASK
            words.append(mix64(state))
        key = words[0].to_bytes(8, "little") + words[1].to_bytes(8, "little")
        if case == 0:
            key = bytes(16)
        if case == 1:
            key = bytes([255] * 16)
        count = 1 + words[2] % 14 if case % 8 else 1 + case // 8
        members = []
        for i in range(count):
            name = [f"kv-{i}.kv:7411", f"[2001:db8::{i + 1:x}]:7411", f"10.0.{i}.{255 - i}:65535"][case % 3]
            weight = [1.0, 1.0, float(1 << i % 4), 0.1 * (1 + (i * i + case) % 17),
                      [1e6, 1.0, 1e-6, 1e-9][(i + case) % 4], 2.5][case % 6]
            members.append((name, weight))
        yield key, members
    for case in CLOSE_CASES:
        key = b"".join(mix64(n * GOLDEN & MASK).to_bytes(8, "little") for n in (case, case + 1))
        yield key, CLOSE_MEMBERS


def golden_lines():
    yield "# Placement hrw-v1 (proto/placement.h): key, members with weights, the first three owners. Written by"
    yield "# `bench/pool_model.py golden FILE`, read by tests/proto/placement_test.cc."
    for key, members in golden_cases():
        owners = Placement(members).owners(word_of(key), 3)
        yield " ".join([key.hex(), ",".join(f"{name}={weight!r}" for name, weight in members), ",".join(owners)])


def write_golden(path):
    with open(path, "w", encoding="ascii") as out:
        out.write("\n".join(golden_lines()) + "\n")
    return 0


def check_golden(path):
    with open(path, encoding="ascii") as golden:
        have = golden.read().splitlines()
    want = list(golden_lines())
    wrong = [i for i, (a, b) in enumerate(zip(have, want)) if a != b]
    if wrong or len(have) != len(want):
        print(f"{path}: {len(have)} lines, expected {len(want)}; first that differs: {wrong[:1]}")
        return 1
    print(f"{path}: {len(want)} lines agree; sum of the table of logarithms {sum(TABLE) & MASK:#x}")
    return 0


# --- the model ---

WORKERS = 1000
DAEMONS = 200
STRIPE_TOKENS = 32 * 16
HEARTBEAT_S = 1.0
TTL_S = 5.0
POLL_S = 5.0
DAEMON_BYTES = 128 << 30
COPY_BYTES_PER_S = 3e9        # out of, and into, one daemon
MEAN_LIFE_DAYS = 30.0         # of a daemon, between deaths without drain
BACKOFF_S = [.1, .2, .4, .8, 1.6, 3.2, 5.0]  # client/pool_channel.cc
DOWN_S = 2.0                  # a daemon that is restarted in place


def say(what, computed, simulated="", unit=""):
    computed, simulated = (f"{x:,.4g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x
                           for x in (computed, simulated))
    print(f"{what:64} {computed:>12} {simulated:>12} {unit}")


def pool_names(count):
    return [f"locks-kvd-{i}.locks-kvd-members.kv.svc.cluster.local:7411" for i in range(count)]


def distinct_owners(stripes):
    return DAEMONS * (1 - (1 - 1 / DAEMONS) ** stripes)


class EqualPool:
    """hrw-v1 of members of equal weight: the highest hashes."""

    def __init__(self, names):
        self.hashes = [checksum64(name.encode()) for name in names]

    def top(self, word, count):
        """Indices of the first owners."""
        scores = [mix64(name_hash ^ word) for name_hash in self.hashes]
        if count == 1:
            return [scores.index(max(scores))]
        return sorted(range(len(scores)), key=lambda m: -scores[m])[:count]


def fan_out_and_losses(rng, pool):
    for tokens in (8192, 131072, 1048576):
        stripes = tokens // STRIPE_TOKENS
        runs = max(1, 2048 // stripes) if stripes < 2048 else 1
        owners = [len({pool.top(rng.getrandbits(64), 1)[0] for _ in range(stripes)}) for _ in range(runs)]
        say(f"daemons asked when a sequence of {tokens:,} tokens is opened", distinct_owners(stripes),
            sum(owners) / runs)
        say("  sequences of that length that one death touches", 100 * distinct_owners(stripes) / DAEMONS,
            unit="%")
    sample = [pool.top(rng.getrandbits(64), 2) for _ in range(4000)]
    dead = rng.sample(range(DAEMONS), 20)
    one = sum(sum(owners[0] == d for owners in sample) for d in dead) / len(dead) / len(sample)
    say("pages lost when 1 daemon dies, 1 replica", 100 / DAEMONS, 100 * one, "%")
    say("pages lost when 1 daemon dies, 2 replicas", 0, sum(owners[0] == owners[1] for owners in sample), "%")
    # Two that die together: stripes whose two owners are those. Measured over every pair at once.
    pairs = {}
    for owners in sample:
        pairs[tuple(sorted(owners))] = pairs.get(tuple(sorted(owners)), 0) + 1
    say("pages lost when 2 die together, 2 replicas", 100 * 2 / (DAEMONS * (DAEMONS - 1)), unit="%")
    say("  stripes of a sample of 4,000 that the worst pair holds alone", "1 .. 4", max(pairs.values()))


def failures(rng, years=50):
    """Deaths as a Poisson process; a second one before the first one's copies are made again loses pages."""
    share = DAEMON_BYTES / (DAEMONS - 1)
    window_s = TTL_S + share / COPY_BYTES_PER_S
    day_s = 86400.0
    rate = DAEMONS / (MEAN_LIFE_DAYS * day_s)
    at, previous, deaths, double = 0.0, -math.inf, 0, 0
    while at < years * 365 * day_s:
        at += rng.expovariate(rate)
        deaths += 1
        double += at - previous < window_s
        previous = at
    say("bytes that each survivor copies after a death", share / 1e9, unit="GB")
    say("time until every page has 2 copies again (TTL + copying)", window_s, unit="s")
    say("deaths a year", rate * 365 * day_s, deaths / years)
    say("second deaths within that time, a year", rate * rate * 365 * day_s * window_s * (DAEMONS - 1) / DAEMONS,
        double / years)


def heartbeats(rng):
    say("pings a second at a daemon, and as many events", WORKERS / HEARTBEAT_S)
    phases = [rng.random() * HEARTBEAT_S for _ in range(WORKERS)]
    windows = [0] * 100
    for phase in phases:
        windows[int(phase / HEARTBEAT_S * 100)] += 1
    say("  most in one hundredth of a second (mean 10)", "10 + 3.3 x 3", max(windows))
    say("pings a second of a worker", DAEMONS / HEARTBEAT_S)


def attach_storm(rng):
    """Workers come back after a daemon restarts in place: attempts in the 50 ms that see the most."""
    for name, jitter in (("as built, no jitter", 0.0), ("with 20% jitter", .2)):
        attempts = []
        for _ in range(WORKERS):
            at = rng.random() * .005  # the end of the stream travels
            for wait in BACKOFF_S:
                at += wait * (1 + jitter * (2 * rng.random() - 1))
                if at >= DOWN_S:
                    break
            attempts.append(at)
        attempts.sort()
        most = max(sum(1 for a in attempts if start <= a < start + .05) for start in attempts[::20])
        say(f"attaches in the fullest 50 ms after a restart, {name}", "", most)


def view_sizes():
    names = pool_names(DAEMONS)
    entry = sum(len(f'members {{ name: "{n}" address: "{n}" }}\n') for n in names)
    say("members file of the view", entry, unit="bytes")
    heap = sum(2 * (len(n) + 1 + 15 & ~15) + 72 for n in names)
    say("view in memory", heap, unit="bytes")
    say("placement of the view in memory", 24 * DAEMONS, unit="bytes")
    targets = sum(12 + 6 + len(n.rsplit(":", 1)[0]) + 2 for n in names)
    say("SRV answer (over TCP: UDP holds 512)", targets, unit="bytes")
    say("DNS answers a second of workers and daemons", (WORKERS + DAEMONS) / POLL_S,
        (WORKERS + DAEMONS) / POLL_S * targets / 1e6, "/s, MB/s")


def model():
    rng = random.Random(1)
    print(f"{WORKERS:,} workers, {DAEMONS} daemons\n{'':64} {'computed':>12} {'simulated':>12}")
    say("sessions, gRPC connections", WORKERS * DAEMONS)
    say("  at a daemon; at a worker", WORKERS, DAEMONS)
    view_sizes()
    heartbeats(rng)
    attach_storm(rng)
    fan_out_and_losses(rng, EqualPool(pool_names(DAEMONS)))
    failures(rng)
    return 0


def main(args):
    if not args:
        return model()
    if args[:1] in (["golden"], ["check"]) and len(args) == 2:
        return {"golden": write_golden, "check": check_golden}[args[0]](args[1])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
