"""The baselines written down from their rules, one token at a time: slow, and meant to be read.

A token is a dict with seq and frame, as `Filled.heads` makes it; a head is a list of tokens, the prefix not among them.
"""

LOW = 2**64 - 1


def streaming_llm(head, target, sinks=4):
    """The seqs that one head keeps."""
    seqs = sorted(token["seq"] for token in head)
    first = seqs[: min(sinks, target)]
    return set(first) | set(seqs[len(seqs) - (target - len(first)) :])


def simple_stream(shown, k):
    """The seqs that are held after frames that showed the tokens ``shown``, one list of seqs a frame: the last k."""
    return set().union(*shown[max(0, len(shown) - k) :])


def uniform(head, target, per_frame):
    """The seqs that one head keeps: frame after frame goes; the last one loses only as many tokens as must go."""
    frames = {}
    for token in sorted(head, key=lambda token: token["seq"]):
        frames.setdefault(token["frame"], []).append(token["seq"])
    while (surplus := sum(map(len, frames.values())) - target) > 0:
        goes = next_to_go(frames, per_frame)
        frames[goes] = frames[goes][surplus:]
        if not frames[goes]:
            del frames[goes]
    return {seq for seqs in frames.values() for seq in seqs}


def next_to_go(frames, per_frame):
    times = sorted(frames)
    incomplete = [time for time in times[:-1] if len(frames[time]) < per_frame]
    if incomplete:
        return incomplete[0]
    if len(times) <= 2:
        return times[0]
    merged = {times[i]: times[i + 1] - times[i - 1] for i in range(1, len(times) - 1)}
    return min(merged, key=lambda time: (merged[time], time))


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & LOW
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & LOW
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & LOW
    return x ^ (x >> 31)


def random_tokens(seen, target, seed):
    """The seqs held of all ever ``seen``: those of the largest hash."""
    key = splitmix64(splitmix64(seed % 2**64))
    return set(sorted(seen, key=lambda seq: splitmix64(splitmix64(seq) ^ key), reverse=True)[:target])
