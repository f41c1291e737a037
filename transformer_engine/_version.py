"""The version: the release of NVIDIA's engine whose API is implemented, then the release of this package as local part.

Between two releases, the local part is the next release with `.dev0`; see docs/releases.md.
"""

__version__ = "2.20.2+py0.4.0.dev0"
