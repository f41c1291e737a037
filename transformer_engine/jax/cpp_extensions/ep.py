"""Settings and functions of expert parallelism under the original's path; XLA's collectives exchange the tokens."""

from ...common import absent
from ..ep import (
    EpConfig,
    EpLayerConfig,
    ep_combine,
    ep_dispatch,
    ep_handle_mem_size,
    ep_prepare,
    get_ep_config,
    reset_ep_config,
    set_ep_config,
)

__all__ = [
    "EpConfig",
    "EpLayerConfig",
    "ep_combine",
    "ep_dispatch",
    "ep_handle_mem_size",
    "ep_prepare",
    "get_ep_config",
    "reset_ep_config",
    "set_ep_config",
]

absent.install_getter(__name__)
