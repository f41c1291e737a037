"""Token permutation by expert under NVIDIA's path."""

from ...common import absent
from ..permutation import (
    routing_map_to_selected_experts,
    sort_chunks_by_index,
    token_combine,
    token_dispatch,
)

__all__ = [
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]

absent.install_getter(__name__)
