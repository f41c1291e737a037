"""L2Normalization under the original's module path."""

from .normalization import L2Normalization as L2Normalization
