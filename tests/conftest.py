"""What all tests share: examples are the same in every run; `--hypothesis-profile=fresh` draws new ones."""

from hypothesis import settings

settings.register_profile("fresh", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
