"""How a stream fares as it grows: memory, speed, answers and energy at stated lengths, for each policy, full KV included.

InfiniPot-V's Table 6 and HERMES's Table 4 and Fig. 4 as one command. Each policy runs in a process of its own, so that its peak
memory is its own; they run one after the other. Frames go in as fast as they are taken.
"""
