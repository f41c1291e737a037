"""Stateless maths on plain tensors: one folder per operation, one file per backend, no autograd."""

from __future__ import annotations

import torch

from ...common import dispatch
from ...common.recipe import living
from ..runtime.tracing import specialize

dispatch.trace_when(torch.compiler.is_compiling)
living.set_specialization(specialize)
